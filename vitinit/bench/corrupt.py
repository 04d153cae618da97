"""Broken files against the decoder: each is decoded or refused in one line, and nothing crashes."""

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

PATIENCE = 60.0                 # seconds until a file counts as one that hangs
KINDS = ("decoded", "refused", "traceback", "signal", "hung")


class DecodeOutcome(NamedTuple):
    """What became of a file: one of KINDS, and the words that came with it."""

    kind: str
    words: str = ""
    printed: str = ""           # what C libraries wrote on standard error meanwhile


def outcome(decode: Callable[[str], Tensor], path: str) -> DecodeOutcome:
    """Decoded, refused in one line that names the file, or a traceback: anything else raised."""
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
           mine: Sequence[int]) -> None:
    """In a process of its own: says of each file what became of it."""
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        for index in mine:
            log.seek(0)
            log.truncate()
            found = outcome(decode, paths[index])
            log.seek(0)
            connection.send((index, found._replace(printed=log.read().decode(errors="replace"))))


def outcomes(decode: Callable[[str], Tensor], paths: Sequence[str], workers: int) -> list[DecodeOutcome]:
    """Of every file. A worker that dies or hangs is replaced, and its file is to blame."""
    context = multiprocessing.get_context("fork")
    found: list[DecodeOutcome | None] = [None] * len(paths)

    def start(mine: Sequence[int]) -> tuple[Connection, multiprocessing.Process, list[int]]:
        ours, theirs = context.Pipe()
        process = context.Process(target=worker, args=(theirs, decode, paths, mine), daemon=True)
        process.start()
        theirs.close()                               # so that its death is the end of the pipe
        return ours, process, list(mine)

    running = [start(range(first, len(paths), workers)) for first in range(workers)]
    while running:
        ready = wait([connection for connection, _, _ in running], timeout=PATIENCE)
        for place, (connection, process, left) in list(enumerate(running)):
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
                running[place] = start(left) if left else None
        running = [one for one in running if one is not None]
    return found


def bench_corrupt(count: int, seed: int, workers: int) -> int:
    """Prints how `count` broken files went, by format; returns how many went wrong."""
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
