"""Test the image decoder with broken files: each has to be decoded or refused in one line."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ..data.images import DataError, decode_image
from .broken_files import broken_files

PATIENCE = 60.0                 # seconds after which decoding a file counts as hanging
KINDS = ("decoded", "refused", "traceback", "signal", "hung")


class DecodeOutcome(NamedTuple):
    """The outcome of decoding a file."""

    kind: str                   # one of KINDS
    words: str = ""             # the message of the exception, or the exit status
    printed: str = ""           # what C libraries wrote to standard error meanwhile


def outcome(decode: Callable[[str], Tensor], path: str) -> DecodeOutcome:
    """Decode a file in this process.

    It is "decoded", or "refused" if a DataError is raised whose message is one line: the path and
    at most 200 more characters. Any other exception is a "traceback".
    """
    try:
        decode(path)
    except DataError as error:
        line = str(error)
        fine = line.startswith(f"{path}: ") and line.isprintable()
        return DecodeOutcome("refused" if fine and len(line) - len(path) <= 200 else "traceback", line)
    except Exception as error:
        return DecodeOutcome("traceback", f"{type(error).__name__}: {error}")
    return DecodeOutcome("decoded")


def worker(connection: Connection, decode: Callable[[str], Tensor], paths: Sequence[str],
           indices: Sequence[int]) -> None:
    """Decode the files with these indices in a worker process; send (index, outcome) of each."""
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        for index in indices:
            log.seek(0)
            log.truncate()
            found = outcome(decode, paths[index])
            log.seek(0)
            connection.send((index, found._replace(printed=log.read().decode(errors="replace"))))


def outcomes(decode: Callable[[str], Tensor], paths: Sequence[str], workers: int
             ) -> list[DecodeOutcome]:
    """The outcome of every file, decoded in `workers` processes.

    If a worker dies or hangs, that is the outcome of the file it was decoding, and another worker
    continues with the next file.
    """
    context = multiprocessing.get_context("fork")
    found: list[DecodeOutcome | None] = [None] * len(paths)

    def start(indices: Sequence[int]) -> tuple[Connection, multiprocessing.Process, list[int]]:
        receiver, sender = context.Pipe()
        process = context.Process(target=worker, args=(sender, decode, paths, indices), daemon=True)
        process.start()
        sender.close()                               # so that recv raises EOFError if it dies
        return receiver, process, list(indices)

    running = [start(range(first, len(paths), workers)) for first in range(workers)]
    while running:
        ready = wait([connection for connection, _, _ in running], timeout=PATIENCE)
        for number, (connection, process, left) in list(enumerate(running)):
            if ready and connection not in ready:
                continue
            try:
                if not ready:
                    raise EOFError
                index, found[index] = connection.recv()
                left.remove(index)
            except EOFError:
                hung = process.is_alive() and not ready
                process.kill() if hung else process.join()
                if left:
                    found[left[0]] = (DecodeOutcome("hung") if hung else
                                      DecodeOutcome("signal", f"exit status {process.exitcode}"))
                    left = left[1:]
                running[number] = start(left) if left else None
        running = [one for one in running if one is not None]
    return found


def bench_corrupt(count: int, seed: int, workers: int) -> int:
    """Decode `count` broken files and print their outcomes by format.

    Returns how many were neither decoded nor refused in one line.
    """
    files = broken_files(count, seed)
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for name, content in files:
            paths.append(str(Path(folder) / name))
            Path(paths[-1]).write_bytes(content)
        results = outcomes(decode_image, paths, workers)
    endings = {ending: Counter() for ending in sorted({Path(path).suffix for path in paths})}
    for path, result in zip(paths, results):
        endings[Path(path).suffix].update([result.kind] + ["printed"] * bool(result.printed))
    print(f"{len(files)} broken files, seed {seed}\n{'':8}" + "".join(
        f"{kind:>10}" for kind in (*KINDS, "C prints")))
    for ending, counts in (*endings.items(), ("all", sum(endings.values(), Counter()))):
        print(f"{ending:8}" + "".join(f"{counts[kind]:10}" for kind in (*KINDS, "printed")))
    wrong = [(path, result) for path, result in zip(paths, results)
             if result.kind not in ("decoded", "refused")]
    for path, result in wrong:
        print(f"{Path(path).name}: {result.kind} {result.words}")
    return len(wrong)
