"""A compact list of paths: a million of them are two tensors, not a million Python strings.

Worker processes share the memory of tensors, however they are started: forked processes share pages
that nobody writes to, spawned ones get tensors through shared memory. Python strings would be
copied into each worker, since reading one writes to its reference count.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from .images import DataError


class Paths(Sequence[str]):
    """A sequence of N paths, stored as bytes (`os.fsencode`) with a zero byte after each path.

    No path contains a zero byte. content: (bytes,) uint8. ends: (N,) int64, the indices of the zero
    bytes.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        """Raises DataError for a path with a zero byte in it."""
        content = np.frombuffer(bytearray(os.fsencode("\0".join([*paths, ""]))), dtype=np.uint8)
        ends = np.flatnonzero(content == 0)
        if len(ends) != len(paths):
            wrong = next(path for path in paths if "\0" in path)
            raise DataError(f"{wrong}: a path holds no zero byte")
        self.content, self.ends = torch.from_numpy(content), torch.from_numpy(ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        """The path at `index`, from 0 to N − 1."""
        begin = int(self.ends[index - 1]) + 1 if index else 0
        return os.fsdecode(self.content[begin:int(self.ends[index])].numpy().tobytes())

    def __iter__(self) -> Iterator[str]:
        return iter(os.fsdecode(self.content.numpy().tobytes()).split("\0")[:-1])

    def part(self, indices: Sequence[int] | np.ndarray) -> Paths:
        """Only the paths at these indices, in this order."""
        paths = list(self)
        return Paths([paths[index] for index in indices])
