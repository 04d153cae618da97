"""How all files are written, and how text, which may be from elsewhere, is read.

A file is written beside its place, flushed to disk and renamed. Text is read within limits of
bytes, depth and digits; the types of what it says are checked where it is used.
"""

import json
import os
import re
import secrets
import shutil
import stat
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from .messages import OneLineError

# What training leaves in the folder of a run, and the files that no other program replaces.
RESULTS = ("last.pt", "previous.pt", "best.pt", "epoch_*.pt", "metrics.jsonl", "steps.jsonl")
RUN_FILES = (
    *RESULTS,
    "recipe.toml",
    "run.json",
    "run.lock",
    "start.txt",
    "images.txt",
    "calibration.json",
    "calibration.lock",
)

OF_A_WRITER = re.compile(r"\.[\da-f]{12}\.partial$")  # a temporary file's name
MOST_LINKS = 40  # one after the other, as Linux follows them
LARGEST_TEXT = 2**24  # most bytes of a text
LARGEST_TOML = 2**16  # of TOML, which takes long to read and is short
DEEPEST, MOST = 64, 2**18  # most levels of tables and lists; fewer than MOST are on one level
LONG_NUMBER = re.compile(rb"(?<![\d_])[\d_]{308}|0[xob][\da-fA-F_]{250}")  # more than a float


class FileError(OneLineError):
    """A file cannot be read or written, or may not be replaced; the message is one line."""


@contextmanager
def in_one_line(path: Path | str, verb: str = "written") -> Iterator[None]:
    """A context that turns an error of the disk into FileError, which names the file."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: cannot be {verb}: {error.strerror or error}") from None


def write_text_atomically(text: str, path: Path) -> None:
    """Write a text file as UTF-8, as `written_atomically` does."""
    with written_atomically(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


@contextmanager
def written_atomically(path: Path, *, keep: Path | None = None) -> Iterator[BinaryIO]:
    """A context that yields a file beside `path`; at the end it is on disk and takes its place.

    At every moment there is an old or a new file at `path`, also after a power failure, and of two
    programs that write it the whole file of one. Of a symbolic link, the target is replaced. An
    open handle, a pipe and a device are written to, not replaced: see `stream_at`. keep: a path at
    which the old file is kept. Raises FileError, which names `path`, if it cannot be written.
    """
    with in_one_line(path):
        try:
            stream = stream_at(path)
            if stream is not None:
                with stream:
                    yield stream
            else:
                with _in_place_of(Path(os.path.realpath(path)), keep) as file:
                    yield file
        except RuntimeError as error:
            # On a full disk torch's writer raises one, in the context of the system's error.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def stream_at(path: Path | str) -> BinaryIO | None:
    """What is at a path to be written to as it is: an open handle, a pipe or a device. None for a
    file, wherever it is, and where there is nothing.
    """
    handle = open_handle(path)
    if handle is not None:
        for printed in (sys.stdout, sys.stderr):  # what it holds back comes first
            with suppress(OSError, ValueError):  # closed
                printed.flush()
        return os.fdopen(os.dup(handle), "wb")
    if os.path.isfile(path) or not os.path.exists(path):
        return None
    return open(path, "wb")


def open_handle(path: Path | str) -> int | None:
    """The number of the open handle of this process that a path such as /dev/stdout or /dev/fd/3
    means, whatever that writes to; None for any other path.
    """
    handles = rf"/dev/fd|/proc/{os.getpid()}(/task/\d+)?/fd"  # without links
    for _ in range(MOST_LINKS):
        folder, name = os.path.split(path)
        folder = os.path.realpath(folder)  # the last name is followed link by link, since
        if name.isdecimal() and re.fullmatch(handles, folder):  # a handle is one, to its file
            return int(name)
        path = os.path.join(folder, name)
        if not os.path.islink(path):
            break
        path = os.path.join(folder, os.readlink(path))
    return None


@contextmanager
def _in_place_of(target: Path, keep: Path | None) -> Iterator[BinaryIO]:
    """A context that yields a new file, which takes the place of `target` at its end."""
    for left in target.parent.glob(f"{escape(target.name)}.*.partial"):
        if OF_A_WRITER.search(left.name) and left.is_file():
            _remove_if_left(left)
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(6)}.partial")
    try:
        with open(temporary, "xb") as file:
            with suppress(OSError):  # a file system without locks
                _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
            if target.exists():
                shutil.copymode(target, temporary)
                if keep is not None:
                    _keep(target, keep)
            if os.name == "nt":  # which renames no file that is open
                file.close()
            os.replace(temporary, target)
        sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)  # what was renamed is not there any more


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """A context that one process is in at a time, on any machine: others wait, and if it dies, the
    next goes on. Nobody waits where the file `lock`, which is there meanwhile, cannot be written.
    """
    with ExitStack() as stack:
        with suppress(OSError, ImportError):
            import fcntl  # which Windows has not

            file = stack.enter_context(open(lock, "a"))
            # Two may enter once the first has left.
            stack.callback(lock.unlink, missing_ok=True)
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _lock(file: BinaryIO) -> None:
    """Lock a file as long as it is open, or the process lives; OSError if another one has. Windows
    has no such locks, and deletes no file that is open.
    """
    with suppress(ImportError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_if_left(path: Path) -> None:
    """Remove a writer's temporary file if the writer was killed; else it still holds its lock."""
    with suppress(OSError), open(path, "rb") as file:
        _lock(file)
        path.unlink()


def _keep(path: Path, keep: Path) -> None:
    """Make the file at `path` that at `keep` as well; `path` is never absent."""
    link = keep.with_name(f"{keep.name}.partial")
    link.unlink(missing_ok=True)  # of a process that was killed here
    try:
        os.link(path, link)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, link)
    os.replace(link, keep)
    link.unlink(missing_ok=True)  # if both were one file, replacing did nothing


def sync_folder(folder: Path) -> None:
    """Flush the folder to disk, if it can be: only then a rename in it survives a power failure."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def is_of_a_run(path: Path) -> bool:
    """Whether a file has the name of one that a run writes in its folder."""
    return any(fnmatchcase(path.name, pattern) for pattern in RUN_FILES)


def require_no_links(folder: Path) -> None:
    """Raise FileError if a file that a run would write here is a link, which may lead anywhere."""
    links = [path for path in folder.iterdir() if path.is_symlink() and is_of_a_run(path)]
    if links:
        raise FileError(
            f"{links[0]}: is a symbolic link, and no run writes through one; "
            "expected the file itself"
        )


@contextmanager
def opened(path: Path | str, limit: int) -> Iterator[BinaryIO]:
    """A context of a file to read; FileError if it is over `limit`, or a pipe."""
    # A pipe, too, is opened without waiting for who writes to it; Windows has none.
    at_once = getattr(os, "O_NONBLOCK", 0)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | at_once)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FileError(f"{path}: is a pipe or a device, expected a file")
        if status.st_size > limit:
            raise FileError(
                f"{path}: has {status.st_size:,} bytes, expected a file of at most {limit:,}"
            )
        yield file


def read_bytes(
    path: Path | str, *, default: bytes | None = None, limit: int = LARGEST_TEXT
) -> bytes:
    """A file's contents, or `default` if there is none; FileError over `limit`, and for a pipe."""
    with in_one_line(path, "read"):
        try:
            with opened(path, limit) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            if default is None:
                raise
            return default


def parse_json(text: bytes) -> Any:
    """The value in a text of JSON; ValueError, in a few words, if there is none within limits."""
    return _parse(text, partial(json.loads, object_pairs_hook=unique_keys))


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The table of these pairs, for JSON; ValueError if it has a key twice."""
    table = dict(pairs)
    if len(table) < len(pairs):  # which Python does not mind
        raise ValueError("a table has a key twice")
    return table


def parse_toml(text: bytes) -> dict[str, Any]:
    """The table in a text of TOML; ValueError, in a few words, if there is none within limits."""
    # tomllib takes memory by the square of the dots in a name.
    if len(text) > LARGEST_TOML or any(line.count(b".") > 999 for line in text.splitlines()):
        raise ValueError(f"it has over {LARGEST_TOML:,} bytes, or 999 dots in a line")
    return _parse(text, _load_toml)


def _load_toml(content: bytes) -> dict[str, Any]:
    text = content.decode("utf-8-sig")  # which an editor on Windows may have written
    surrogates = r"\\U0010(D[89A-F][\dA-F]{2})"  # as `values.to_toml` writes them
    return tomllib.loads(re.sub(surrogates, lambda code: chr(int(code[1], 16)), text))


def _parse(text: bytes, load: Callable[[bytes], Any]) -> Any:
    if len(text) > LARGEST_TEXT or LONG_NUMBER.search(text):
        raise ValueError(f"it has over {LARGEST_TEXT:,} bytes, or a number of over 300 digits")
    with suppress(RecursionError):
        value = load(text)
        if not nested_deeply(value):
            return value
    raise ValueError(f"it is nested over {DEEPEST} deep")


def nested_deeply(value: object) -> bool:
    """Whether tables and lists are nested over DEEPEST deep, or MOST of them are equally deep. One
    that contains itself is endlessly deep, and one that contains another twice counts it twice.
    """
    level: list[Any] = [[value]]
    for _ in range(DEEPEST + 1):
        level = list(islice(_containers_in(level), MOST))
        if len(level) in (0, MOST):
            break
    return bool(level)


def _containers_in(level: list[Any]) -> Iterator[Any]:
    for container in level:
        parts = container.values() if isinstance(container, dict) else container
        yield from (part for part in parts if isinstance(part, (dict, list, tuple)))


class CheckpointError(FileError):
    """Something is wrong with a checkpoint or a run folder; the message is one line."""


class NoCheckpoint(CheckpointError):
    """The file does not exist."""


class Damaged(CheckpointError):
    """The file is not a checkpoint, or it changed after it was written."""
