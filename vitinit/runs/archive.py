"""Many runs in one compressed file: the three small text files of each, enough to compare them.

    runs.tar.xz
      cifar10_10k-default-s0/metrics.jsonl
      cifar10_10k-default-s0/recipe.toml
      cifar10_10k-default-s0/run.json
      cifar10_10k-default-s1/…

The same runs always give the same bytes: members are sorted, and their times and owners are 0.
Nothing of an archive is unpacked to the disk, since it may come from elsewhere.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import tarfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ..messages import in_brief
from ..train.checkpoint import CheckpointError, shortened, written_atomically
from ..train.distributed import warn
from .records import FILES, Run, parse_run, read_run

SUFFIX = ".tar.xz"
LARGEST = 2**28                 # bytes of an archive, unpacked: about 3,000 runs of 300 epochs


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def write_archive(runs: Sequence[Run], out: Path) -> None:
    """Write the three files of each run into one archive, atomically. A missing file is left out.

    The absolute paths that run.json has, of the data and in the commands, stay out. A run goes by
    the name of its folder. Raises CheckpointError if two runs have the same name, if `out` cannot be
    written, or if its name does not end in .tar.xz: it may be that of a run, given by mistake.
    """
    if not out.name.endswith(SUFFIX):
        raise CheckpointError(f"{out}: not the name of an archive, expected one such as runs{SUFFIX}")
    by_name: dict[str, Run] = {}
    for run in runs:
        name = Path(os.path.abspath(run.path)).name  # abspath: of "." and "..", too
        other = by_name.setdefault(name, run)
        if other is not run:
            raise CheckpointError(f"{run.path}: called {name} like {other.path}; in an archive each "
                                  "run needs a name of its own")
    with (written_atomically(out) as file,
          tarfile.open(fileobj=file, mode="w:xz", preset=6 | lzma.PRESET_EXTREME) as archive):
        for name, run in sorted(by_name.items()):
            for title in sorted(run.files):
                content = run.files[title]
                content = without_paths(content) if title == "run.json" else content
                member = tarfile.TarInfo(f"{name}/{title}")      # mode 0644; time and owner are 0
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


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


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs at these paths, finished or not, in order. A path is one of three:

        a run's folder;
        an archive, which stands for all its runs, sorted by name;
        an archive and a pattern, as in runs.tar.xz/cifar10_10k-*-s0, for the runs of such names.

    Other files and folders, such as logs, which a pattern of the shell finds beside the runs, are
    left out with a warning. Raises CheckpointError if nothing else is there, for a pattern that fits
    no run, and as `read_run` and `read_archive` do.
    """
    runs, others = [], []
    archives: dict[Path, list[Run]] = {}
    for path in paths:
        archive = next((place for place in (path, path.parent)
                        if place.name.endswith(SUFFIX) and os.path.isfile(place)), None)
        if archive is not None:
            if archive not in archives:
                archives[archive] = read_archive(archive)
            held = archives[archive]
            chosen = held if archive == path else (
                [run for run in held if run.path.name == path.name] or
                [run for run in held if fnmatchcase(run.path.name, path.name)])
            if not chosen:
                raise CheckpointError(f"{path}: none of the {len(held)} run(s) in the archive has such "
                                      f"a name; it holds {shortened([r.path.name for r in held])}")
            runs += chosen
        elif os.path.exists(path) and not any(
                os.path.exists(path / name) for name in (*FILES, "last.pt", "previous.pt")):
            others.append(str(path))
        else:
            runs.append(read_run(path))
    if others and not runs:
        raise CheckpointError(f"{others[0]}: neither a run's folder nor an archive of runs")
    if others:
        warn(f"left out, no run: {shortened(others)}")
    return runs


def read_archive(path: Path) -> list[Run]:
    """All runs in an archive, sorted by name.

    Raises CheckpointError if the file is damaged, is no archive, is too large, or contains anything
    but the three files of runs, and as `parse_run` does.
    """
    files: dict[str, dict[str, bytes]] = {}
    try:
        with lzma.open(path) as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise CheckpointError(f"{path}: more than {LARGEST:,} bytes when unpacked, so it is no "
                                  "archive of runs")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                run, _, title = member.name.partition("/")
                # A sparse member may be a gigabyte once it is read.
                if (not member.isreg() or member.issparse() or title not in FILES
                        or run in ("", ".", "..")):
                    raise CheckpointError(f"{path}: contains {in_brief(member.name)}, expected nothing "
                                          f"but <run>/{', <run>/'.join(FILES)}")
                files.setdefault(run, {})[title] = archive.extractfile(member).read()
    except CheckpointError:
        raise
    except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path}: not an archive of runs ({in_brief(error)})") from None
    if not files:
        raise CheckpointError(f"{path}: an archive without a run in it")
    return [parse_run(path / name, files[name]) for name in sorted(files)]
