"""Runs read back from their small text files: from folders, and from archives of many runs.

Only recipe.toml, run.json and metrics.jsonl are read; the checkpoints may have been deleted. A
record's recipe is a plain table that is not checked, so records of any version can be read.

    runs.tar.xz
      cifar10_10k-default-s0/metrics.jsonl
      cifar10_10k-default-s0/recipe.toml
      cifar10_10k-default-s0/run.json
      cifar10_10k-default-s1/…

The same runs always give the same bytes: members are sorted, and their times and owners are 0.
One that was packed by hand may have the runs in any folder, also in "./". Nothing of an archive is
unpacked to the disk, since it may come from elsewhere.
"""

import io
import json
import lzma
import math
import os
import posixpath
import re
import tarfile
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np

from ...base.files import LARGEST_TEXT, CheckpointError, parse_json, read_bytes, written_atomically
from ...base.messages import OneLineError, counted, in_brief, one_line, shortened, warn
from ...base.table import find
from ...base.values import to_toml
from ...recipe.absent import MEANT
from ...recipe.files import load_recipe
from ...runs.folder import RunFolder, image_digests, parse_keys, parse_lines, parse_starts
from ...runs.load import by_name
from ...tasks import TASKS
from ...train.metrics import MEASURES, METRICS, OF_SEVERAL
from ...watch.verdict import best_by_of, how_good

FILES = ("metrics.jsonl", "recipe.toml", "run.json")
SUFFIX = ".tar.xz"
Json = dict[str, Any]  # an object of JSON, or a table of TOML
Columns = Mapping[str, np.ma.MaskedArray]  # what `columns_of` returns
LARGEST_ARCHIVE = 2**26  # most bytes, unpacked, of an archive; 1,000 runs have 20 million


@dataclass(frozen=True)
class RunRecord:
    """A run, as the text files in its folder describe it."""

    path: Path  # of the folder; in an archive, runs.tar.xz/<name>
    source: str  # its recipe, as it was asked for: a name or a path
    keys: Json  # "section.key" → value, every option written out
    columns: Columns  # metrics.jsonl: the values of METRICS and OF_SEVERAL, one per finished epoch
    starts: list[Json]  # run.json: per start, what was asked for, commit, versions, …
    files: Mapping[str, bytes]  # recipe.toml and run.json; of an archive metrics.jsonl, too

    @property
    def recipe(self) -> str:
        return Path(self.source).stem

    @property
    def seed(self) -> int:
        return self.keys["run.seed"]

    @property
    def epochs(self) -> int:
        """The number of epochs that the recipe asks for, cool-down included."""
        return self.keys["schedule.epochs"] + self.keys["schedule.cooldown_epochs"]

    @property
    def finished(self) -> bool:
        return self.done == self.epochs

    @property
    def done(self) -> int:
        """The number of epochs that are finished."""
        return len(self.columns["epoch"])

    @property
    def rows(self) -> list[Json]:
        """One row per finished epoch; what was not measured is None. A million take a gigabyte."""
        values = zip(*(column.tolist() for column in self.columns.values()))
        return [dict(zip(self.columns, row)) for row in values]

    @property
    def began(self) -> Json:
        """What run.json says of the first start; {} without run.json."""
        return self.starts[0] if self.starts else {}

    @property
    def validated_on(self) -> str:
        """A digest of the files and labels of the validation images; "" if it is not on record."""
        return image_digests(self.began.get("data", {}))[1]

    @property
    def trained_on(self) -> str:
        """The same of the training images; their number, where each seed draws its own."""
        data = self.began.get("data", {})
        if self.keys.get("data.subset_seed") == "run":
            return str(data.get("training images", ""))
        return image_digests(data)[0]

    def good(self) -> list[str]:
        """How good it is, in lines; see `how_good`."""
        return how_good(self.rows, best_by_of(self.keys), self.began.get("data", {}))

    def changes(self) -> list[list[str]] | str:
        """Each key in which the run differs from the recipe of that name, with the values of both;
        or, in words, why that is not known.
        """
        try:
            source = load_recipe(self.source).keys
        except OneLineError as error:
            return str(error)
        used = MEANT | self.keys
        changes = []
        for key in source | self.keys:
            if source.get(key) != used.get(key):
                values = [to_toml(keys[key]) if key in keys else "–" for keys in (source, used)]
                changes.append([key, *values])
        return changes

    def measured(self, metric: str) -> list[float]:
        """The values of a metric in the epochs that were evaluated; [] for that of no EMA."""
        return self.columns[metric].compressed().tolist()

    @property
    def score(self) -> str:
        """Which of MEASURES says how good its models are: top-1 also of a task that has none of
        them, and of one that is not in the table here.
        """
        task = TASKS.get((MEANT | self.keys)["task.name"])
        score = find(task).score if task else "top1"
        return score if score in MEASURES else "top1"


def columns_of(rows: Iterable[Json], place: str, keys: Iterable[str]) -> Columns:
    """What rows have under `place`, (n,) int64, and under each key, (n,) float64, masked where that
    is None or missing: 9 bytes a value, of which dictionaries take 60.
    """
    places = array("q")
    values = {key: array("d") for key in keys if key != place}
    missing = {key: bytearray() for key in values}
    for row in rows:
        places.append(row[place])
        for key, column in values.items():
            value = row.get(key)
            column.append(math.nan if value is None else value)
            missing[key].append(value is None)
    columns = {place: np.ma.array(np.asarray(places))}
    for key, column in values.items():
        mask = np.frombuffer(missing[key], bool)
        columns[key] = np.ma.array(np.asarray(column), mask=mask)
    return columns


def parse_run(path: Path, files: Mapping[str, bytes], rows: Iterable[Json]) -> RunRecord:
    """The run at `path`, whose FILES have these contents, and metrics.jsonl these rows;
    CheckpointError if damaged or no run.
    """
    if "recipe.toml" not in files:
        raise CheckpointError(f"{path}: not a run's folder, there is no recipe.toml in it")
    keys = parse_keys(files["recipe.toml"], path / "recipe.toml")
    begun = parse_starts(files.get("run.json", b"[]"), path / "run.json")
    starts = [in_lines(start) for start in begun]
    source = one_line(recipe_of(starts[0] if starts else {}))
    columns = columns_of(rows, "epoch", (*METRICS, *OF_SEVERAL))
    return RunRecord(path, source, keys, columns, starts, files)


def in_lines(start: Mapping[str, Any]) -> Json:
    """A start with its texts as printable lines, as programs show them, and it may be anybody's."""
    return {key: one_line(text) if isinstance(text, str) else text for key, text in start.items()}


def recipe_of(start: Mapping[str, Any]) -> str:
    """The recipe that a run was started by: a name or a path."""
    if "arguments" in start:
        return str(start["arguments"].get("recipe", start.get("recipe")))
    # A run of before these were recorded has the words of its command alone.
    words = "\0".join(map(str, start.get("command", [])))
    source = re.search(r"--recipe[=\0]([^\0]+)", words)
    return source[1] if source else "recipe"


def read_run(path: Path) -> RunRecord:
    """Read the run in the folder `path`, finished or not. Raises as `parse_run` does."""
    folder = RunFolder(path)
    texts = folder.recipe, folder.info
    files = {text.name: read_bytes(text) for text in texts if text.is_file()}
    return parse_run(path, files, folder.metrics.rows())


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """The runs at these paths, finished or not, in order. A path is one of three:

        a run's folder, or the name of a model in recipes/trained;
        an archive, which stands for all its runs, sorted by name;
        an archive and a pattern, as in runs.tar.xz/cifar10_10k-*-s0, for the runs of such names.

    Other files and folders, such as logs, which a pattern of the shell finds beside the runs, are
    left out with a warning. Raises CheckpointError if nothing else is there, for a pattern that
    fits no run, and as `read_run` and `read_archive` do.
    """
    runs, others = [], []

    for path in map(by_name, paths):
        archive, pattern = (path, "*") if is_archive(path) else (path.parent, path.name)
        if is_archive(archive):
            held = {run.path.name: run for run in read_archive(archive)}
            selected = [run for name, run in held.items() if fnmatchcase(name, pattern)]
            if not selected:
                raise CheckpointError(
                    f"{path}: none of the {counted(len(held), 'run')} in the "
                    f"archive has such a name; it holds {shortened([*held])}"
                )
            runs += selected
        elif (path / "recipe.toml").exists() or not path.exists():
            runs.append(read_run(path))
        else:
            others.append(str(path))
    if not runs:
        raise CheckpointError(f"{others[0]}: neither a run's folder nor an archive of runs")
    if others:
        warn(f"left out, no run: {shortened(others)}")
    return runs


def is_archive(path: Path) -> bool:
    return path.name.endswith(SUFFIX) and path.is_file()


def read_archive(path: Path) -> list[RunRecord]:
    """All runs in an archive, sorted by name. Raises CheckpointError if it is damaged or none, or
    if two runs have one name.
    """
    files: dict[str, dict[str, bytes]] = {}
    try:
        decoder = lzma.LZMADecompressor(memlimit=2 * LARGEST_ARCHIVE)  # of xz -9 the half
        content = decoder.decompress(read_bytes(path), LARGEST_ARCHIVE)
        if not decoder.eof:
            raise EOFError(f"cut short, or of over {LARGEST_ARCHIVE:,} bytes")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:  # nothing packed
            for member in archive:
                folder, title = posixpath.split(posixpath.normpath(member.name))
                if not member.isfile() or title not in FILES:
                    continue
                file = archive.extractfile(member)
                if file is None or member.size > LARGEST_TEXT or member.issparse():  # of holes
                    raise ValueError(f"{member.name} has {member.size:,} bytes, or holes in it")
                files.setdefault(folder, {})[title] = file.read()
        named = {posixpath.basename(folder): folder for folder in files}
        if not files or "" in named or len(named) < len(files):
            found = [posixpath.join(folder, "recipe.toml") for folder in sorted(files)]
            raise ValueError(
                f"expected <run>/recipe.toml, each run with a name of its own, not {found}"
            )
    except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path}: not an archive of runs ({in_brief(error)})") from None
    runs = []
    for name in sorted(named):
        texts, run = files[named[name]], path / name
        lines = io.BytesIO(texts.get("metrics.jsonl", b""))
        runs.append(parse_run(run, texts, parse_lines(lines, run / "metrics.jsonl", "epoch")))
    return runs


def write_archive(runs: Sequence[RunRecord], out: Path) -> None:
    """Write the three files of each run into one archive, atomically. A missing file is left out.

    The absolute paths that run.json has, of the data and in the commands, stay out. A run goes by
    the name of its folder. Raises CheckpointError if two runs have the same name, and FileError if
    `out` cannot be written.
    """
    named: dict[str, RunRecord] = {}
    for run in runs:
        name = Path(os.path.abspath(run.path)).name  # abspath: of "." and "..", too
        if named.setdefault(name, run) is not run:
            raise CheckpointError(
                f"{run.path}: called {name} like {named[name].path}; in an "
                "archive each run needs a name of its own"
            )
    with (
        written_atomically(out) as file,
        lzma.open(file, "wb", preset=6 | lzma.PRESET_EXTREME) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name, run in sorted(named.items()):
            metrics = run.path / "metrics.jsonl"
            files = dict(run.files)
            if metrics.is_file():
                files[metrics.name] = read_bytes(metrics)
            for title, content in sorted(files.items()):
                if title == "run.json":
                    content = without_paths(content)
                member = tarfile.TarInfo(f"{name}/{title}")  # mode 0644; time and owner are 0
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
            if archive.offset + tarfile.RECORDSIZE > LARGEST_ARCHIVE:  # of zeros, at its end
                raise CheckpointError(
                    f"{out}: over {LARGEST_ARCHIVE:,} bytes before they are packed, with {name}, "
                    "and no such archive is read; expected fewer runs"
                )


def without_paths(run_json: bytes) -> bytes:
    """The contents of run.json without the machine's own paths: of the data and in commands."""
    starts = parse_json(run_json)
    for start in starts:
        if isinstance(start.get("data"), dict):
            start["data"].pop("root", None)
        for key in start.keys() & {"command", "arguments", "imports"}:
            start[key] = without_folders(start[key])
    return (json.dumps(starts, indent=2) + "\n").encode()


def without_folders(value: Any) -> Any:
    """A value of JSON; of absolute paths, also in words of a command, only the last part remains.

    "/home/ada/photos" → "photos", "data.root=/home/ada/photos" → "data.root=photos"
    """
    if isinstance(value, dict):
        return {without_folders(key): without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [*map(without_folders, value)]
    # In a string of TOML's, perhaps; and as Windows writes paths.
    match = re.fullmatch(r"([^/\\]*=|)([\"']?)((?:[A-Za-z]:)?[/\\].+)\2", str(value))
    return match[1] + PureWindowsPath(match[3]).name if match else value
