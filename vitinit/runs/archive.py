"""Many runs in one compressed file: the three small text files of each, enough to compare them.

    runs.tar.xz
      cifar10_10k-default-s0/metrics.jsonl
      cifar10_10k-default-s0/recipe.toml
      cifar10_10k-default-s0/run.json
      cifar10_10k-default-s1/…

The same runs always give the same bytes: members are sorted, and their times and owners are 0. Of
an archive nothing is unpacked but such members, since it may come from elsewhere.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ..messages import in_brief
from ..train.checkpoint import CheckpointError, written_atomically
from ..train.distributed import warn

FILES = ("metrics.jsonl", "recipe.toml", "run.json")
SUFFIX = ".tar.xz"
MAGIC = b"\xfd7zXZ\0"          # the first bytes of every .xz file
LARGEST = 2**28                 # bytes of an archive, unpacked: about 3,000 runs of 300 epochs
MOST_RUNS = 5_000               # in an archive: each costs a folder, however small its files are
DECODER_MEMORY = 2**27          # bytes; what `write_archive` wrote needs a tenth of this
NAMED = 5                       # most runs that an error message lists


class Place(NamedTuple):
    """Where a run's files are, and where they are said to be."""

    folder: Path                # where they can be read: a temporary folder for a run of an archive
    path: Path                  # the folder as the user knows it; in an archive, runs.tar.xz/<name>


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def write_archive(runs: Sequence[Place], out: Path) -> None:
    """Write the three files of each run into one archive, atomically. A missing file is left out.

    The absolute paths that run.json has, of the data and in the commands, stay out. A run goes by
    the name of its folder. Raises CheckpointError if two runs have the same name, if a file cannot be
    read, if there is more than an archive may hold, if `out` cannot be written, or if its name does
    not end in .tar.xz: it may be that of a run, given by mistake.
    """
    if not out.name.endswith(SUFFIX):
        raise CheckpointError(f"{out}: not the name of an archive, expected one such as runs{SUFFIX}")
    by_name: dict[str, Place] = {}
    for run in runs:
        name = Path(os.path.abspath(run.path)).name  # abspath: of "." and "..", too
        if name in by_name:
            raise CheckpointError(f"{run.path}: called {name} like {by_name[name].path}; in an "
                                  "archive each run needs a name of its own")
        by_name[name] = run
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, run in sorted(by_name.items()):
            for file in FILES:
                _add(archive, f"{name}/{file}", run.folder / file)
    if packed.tell() > LARGEST or len(by_name) > MOST_RUNS:
        raise CheckpointError(f"{out}: {len(by_name):,} runs take {packed.tell():,} bytes before "
                              f"compression, and an archive holds {LARGEST:,} bytes and "
                              f"{MOST_RUNS:,} runs; expected fewer runs")
    with written_atomically(out) as file:
        file.write(lzma.compress(packed.getvalue(), preset=6 | lzma.PRESET_EXTREME))


def without_paths(run_json: bytes) -> bytes:
    """The contents of run.json without the machine's own paths: of the data and in commands."""
    starts = json.loads(run_json)
    for start in starts:
        if isinstance(start.get("data"), dict):
            start["data"].pop("root", None)
        if isinstance(start.get("command"), list):
            start["command"] = [portable(str(word)) for word in start["command"]]
    if starts == json.loads(run_json):               # nothing was left out: the same bytes
        return run_json
    return (json.dumps(starts, indent=2) + "\n").encode()


def portable(word: str) -> str:
    """A path, or a word of a command; of an absolute path only the last part remains.

    "/home/ada/photos" → "photos", "data.root=/home/ada/photos" → "data.root=photos"
    """
    key, equals, path = ("", "", word) if os.path.isabs(word) else word.partition("=")
    return f"{key}{equals}{Path(path).name}" if os.path.isabs(path) else word


def _add(archive: tarfile.TarFile, name: str, path: Path) -> None:
    """Add the file at `path` under `name`, with fixed times and owners; nothing if there is none."""
    try:
        content = path.read_bytes()
        if path.name == "run.json":
            content = without_paths(content)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    member = tarfile.TarInfo(name)                   # mode 0644; time and owner are 0 and nameless
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


@contextmanager
def opened(paths: Sequence[Path]) -> Iterator[list[Place]]:
    """A context in which the runs at these paths can be read; it yields their places, in order.

    A path is one of three:
        a run's folder, which need not exist: whoever reads it says what is wrong with it;
        an archive, which stands for all its runs, sorted by name;
        an archive and a pattern, as in runs.tar.xz/cifar10_10k-*-s0, for the runs of such names.

    Other files and folders are left out, see `runs_among`. Each archive is unpacked once, into a
    temporary folder that is deleted at the end. Raises CheckpointError for a file that is no such
    archive, and for a pattern that fits none of its runs.
    """
    unpacked: dict[Path, Path] = {}                  # archive → temporary folder
    places: list[Place] = []
    with ExitStack() as stack:
        for path in runs_among(paths):
            archive, pattern = (path, "*") if os.path.isfile(path) else (path.parent, path.name)
            if not os.path.isfile(archive):
                places.append(Place(path, path))
                continue
            if archive not in unpacked:
                unpacked[archive] = Path(stack.enter_context(TemporaryDirectory(prefix="vitinit-")))
                unpack(archive, unpacked[archive])
            names = sorted(os.listdir(unpacked[archive]))
            chosen = [pattern] if pattern in names else [name for name in names
                                                         if fnmatchcase(name, pattern)]
            if not chosen:
                more = ", …" if len(names) > NAMED else ""
                raise CheckpointError(f"{path}: none of the {len(names)} run(s) in the archive has "
                                      f"such a name; it holds {', '.join(names[:NAMED])}{more}")
            places += [Place(unpacked[archive] / name, archive / name) for name in chosen]
        yield places


def runs_among(paths: Sequence[Path]) -> list[Path]:
    """`paths` without files and folders that are no runs, such as logs; a warning names these.

    A pattern of the shell, such as runs/*, finds them beside the runs. A path at which nothing
    exists stays, and all stay if there is no run among them: whoever reads them says what is wrong.
    """
    runs = [path for path in paths if not os.path.exists(path) or _may_hold_runs(path)]
    others = [str(path) for path in paths if path not in runs]
    if not runs:
        return list(paths)
    if others:
        more = ", …" if len(others) > NAMED else ""
        warn(f"left out, no run: {', '.join(others[:NAMED])}{more}")
    return runs


def _may_hold_runs(path: Path) -> bool:
    """Whether the folder holds a file of a run, or the file may be an archive."""
    if os.path.isdir(path):
        return any(os.path.exists(path / name) for name in (*FILES, "last.pt", "previous.pt"))
    if path.name.endswith(SUFFIX):
        return True
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:                                  # reading it again says why
        return True


def unpack(path: Path, folder: Path) -> None:
    """Unpack the archive at `path` into `folder`, one folder per run.

    Raises CheckpointError if the file is damaged, is no archive, is too large, or contains anything
    but the three files of runs.
    """
    found: set[str] = set()
    runs: set[str] = set()
    try:
        with tarfile.open(fileobj=io.BytesIO(_decompressed(path)), mode="r:") as archive:
            for member in archive:
                run, _, file = member.name.partition("/")
                if (not member.isreg() or member.issparse() or file not in FILES
                        or run in ("", ".", "..")):
                    raise CheckpointError(f"{path}: contains {in_brief(member.name)}, expected nothing "
                                          f"but <run>/{', <run>/'.join(FILES)}")
                if member.name in found:
                    raise CheckpointError(f"{path}: contains {in_brief(member.name)} twice")
                found.add(member.name)
                if run not in runs:
                    runs.add(run)
                    if len(runs) > MOST_RUNS:
                        raise CheckpointError(f"{path}: more than {MOST_RUNS:,} runs, expected several "
                                              "smaller archives")
                    (folder / run).mkdir()
                (folder / member.name).write_bytes(archive.extractfile(member).read())
    except CheckpointError:
        raise
    except tarfile.TarError as error:
        raise CheckpointError(f"{path}: not an archive of runs ({in_brief(error)})") from None
    except (OSError, ValueError) as error:           # a name too long for a file, or with a zero byte
        raise CheckpointError(f"{path}: cannot be unpacked: {in_brief(error)}") from None
    if not found:
        raise CheckpointError(f"{path}: an archive without a run in it")


def _decompressed(path: Path) -> bytes:
    """The content of an .xz file, of at most LARGEST bytes."""
    decoder = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=DECODER_MEMORY)
    try:
        with open(path, "rb") as file:
            packed = file.read(LARGEST)
        if not packed.startswith(MAGIC):
            raise CheckpointError(f"{path}: neither a run's folder nor an archive of runs")
        content = decoder.decompress(packed, max_length=LARGEST + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except lzma.LZMAError as error:
        raise CheckpointError(f"{path}: a damaged archive ({in_brief(error)})") from None
    if len(content) > LARGEST:
        raise CheckpointError(f"{path}: more than {LARGEST:,} bytes when unpacked, so it is no archive "
                              "of runs")
    if not decoder.eof or decoder.unused_data:
        raise CheckpointError(f"{path}: a damaged archive, "
                              f"{'it goes on after its end' if decoder.eof else 'it is cut short'}")
    return content
