"""What eval.py found, for people and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..data.eval_sets import NamedSet
from ..train.checkpoint import CheckpointError, write_text_atomically
from ..train.engine import Evaluation
from ..train.throughput import Throughput
from .markdown import table


@dataclass(frozen=True)
class Finding:
    """What came of one checkpoint on one data set."""

    checkpoint: str
    recipe: str
    data_set: NamedSet                          # of the data set
    image_size: tuple[int, int]             # (height, width)
    model_classes: int                      # that the model knows
    classes: Sequence[str]                  # that the data set has
    throughput: Throughput | None
    results: Mapping[str, Evaluation]       # of "model", and of "ema" where it has one

    def as_dict(self) -> dict[str, Any]:
        """The JSON object: what was evaluated on what, then the numbers under "model" and "ema"."""
        row = {"checkpoint": self.checkpoint, "recipe": self.recipe, "data": self.data_set.name,
               "data_dir": self.data_set.root, "image_size": list(self.image_size),
               "classes": len(self.classes), "model_classes": self.model_classes}
        for name, result in self.results.items():
            by_class = [{"class": label, "correct": correct, "total": total} for
                        label, correct, total in zip(self.classes, result.class_hits,
                                                     result.class_images)]
            row[name] = {"loss": result.loss, "top1": result.top1, "top5": result.top5,
                         "images": result.images, "per_class": by_class}
        if self.throughput is not None:
            row["throughput"] = dataclasses.asdict(self.throughput)
        return row

    def by_class(self) -> str:
        """A table of all classes, those that the model knows least first."""
        rows = []
        for label, total, *hits in zip(self.classes, self.results["model"].class_images,
                                       *(result.class_hits for result in self.results.values())):
            shares = [100.0 * correct / total for correct in hits]
            rows.append((shares[0], [label, f"{total:,}", *(f"{share:.2f}" for share in shares)]))
        rows.sort(key=lambda row: row[0])
        return table(["class", "images", *(f"{name} top-1" for name in self.results)],
                     [cells for _, cells in rows])


def report(findings: Sequence[Finding], *, per_class: bool, json_file: Path | None) -> None:
    """Print the findings, one as lines, several as a table; then JSON, a line a finding."""
    for finding in findings:
        if len(finding.classes) < finding.model_classes:
            print(f"{finding.data_set}: {len(finding.classes)} of the {finding.model_classes} classes "
                  f"of {finding.checkpoint}; the others are left out of ranking and loss")
    rows = [[finding.checkpoint, name, str(finding.data_set), f"{result.top1:.3f}",
             f"{result.top5:.3f}", f"{result.loss:.4f}", f"{result.images:,}"]
            for finding in findings for name, result in finding.results.items()]
    if len(findings) > 1:
        print(table(["checkpoint", "weights", "data", "top-1 %", "top-5 %", "loss", "images"],
                    rows))
    else:
        for _, name, _, top1, top5, loss, images in rows:
            print(f"{name:5}  top-1 {top1} %  top-5 {top5} %  loss {loss}  over {images} images")
    for finding in findings if per_class else []:
        print(f"\n{finding.checkpoint} on {finding.data_set}, top-1 of every class in %:\n\n"
              f"{finding.by_class()}\n")
    text = "".join(json.dumps(finding.as_dict()) + "\n" for finding in findings)
    if json_file is None:
        print(text, end="", flush=True)
    else:
        write_output(text, json_file)
        print(f"wrote {json_file}", flush=True)


def write_output(text: str, path: Path) -> None:
    """Into a regular file or a new one whole or not at all; through anything else, as it stands.

    A link stays, and what it leads to is written. A pipe, a terminal or /dev/null is no file to
    replace, and neither is the one that this program prints to, under whatever name.
    Raises CheckpointError.
    """
    try:
        there = os.stat(path)
    except OSError:
        there = None                                 # a new file, or an error that comes again
    try:
        for stream in (sys.stdout, sys.stderr):
            if there is not None and _is_open_as(stream, there):
                print(text, end="", file=stream, flush=True)
                return
        if there is None or stat.S_ISREG(there.st_mode):
            write_text_atomically(text, Path(os.path.realpath(path)))
        else:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None


def _is_open_as(stream: TextIO, there: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), there)
    except (OSError, ValueError):                    # a stream without a file, as in a test
        return False
