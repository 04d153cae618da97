"""calibration.json, beside a checkpoint: the temperatures that eval.py --fit-temperature has found.

A row belongs to the weights whose digest is its key, so that a run that goes on, or another
checkpoint in the folder, does not take it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..base.files import (
    CheckpointError,
    one_at_a_time,
    parse_json,
    read_bytes,
    require_no_links,
    write_text_atomically,
)
from ..base.values import PositiveNumber, Table, convert
from .checkpoint import weights_digest

FILE = "calibration.json"


def read_rows(folder: Path) -> Table:
    """The rows of the file in a folder, by the digest of their weights; {} if there is none."""
    path = folder / FILE
    try:
        rows = convert(parse_json(read_bytes(path, default=b"{}")), Mapping[str, Any])
        for row in rows.values():
            convert(convert(row, Mapping[str, Any]).get("temperature"), PositiveNumber)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: expected a table with a temperature for each digest of weights ({error})"
        ) from None
    return dict(rows)


def row_of(tensors: Mapping[str, Tensor], folder: Path) -> Table | None:
    """The row of these weights in a folder's file; None: it has none. {} if there is no file."""
    rows = read_rows(folder)
    if not rows:
        return {}  # without a digest, which takes as long as reading the weights
    return rows.get(weights_digest(tensors))


def add_row(row: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> Path:
    """Write the row of these weights beside the others, and return the file. Of two programs that
    do so at a time, one waits.
    """
    require_no_links(folder)
    path, digest = folder / FILE, weights_digest(tensors)
    with one_at_a_time(folder / "calibration.lock"):
        rows = read_rows(folder) | {digest: row}
        write_text_atomically(json.dumps(rows, indent=1) + "\n", path)
    return path
