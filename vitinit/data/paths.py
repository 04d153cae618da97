"""Many paths in one run of bytes: a million of them are two tensors, not a million Python strings.

Worker processes share tensors, however they are started (forked: as pages that nobody writes to;
spawned: as shared memory), and a long path takes no more room than its own bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from .images import DataError


class Paths(Sequence[str]):
    """What `os.fsencode` makes of N paths, each with a zero byte behind it, which no path holds.

    content: (bytes,) uint8. ends: (N,) int64, where the zero bytes are.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        """DataError for a path with a zero byte in it."""
        content = np.frombuffer(bytearray(os.fsencode("\0".join([*paths, ""]))), dtype=np.uint8)
        ends = np.flatnonzero(content == 0)
        if len(ends) != len(paths):
            wrong = next(path for path in paths if "\0" in path)
            raise DataError(f"{wrong}: a path holds no zero byte")
        self.content, self.ends = torch.from_numpy(content), torch.from_numpy(ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        """index: 0 … N − 1."""
        begin = int(self.ends[index - 1]) + 1 if index else 0
        return os.fsdecode(self.content[begin:int(self.ends[index])].numpy().tobytes())

    def __iter__(self) -> Iterator[str]:
        return iter(os.fsdecode(self.content.numpy().tobytes()).split("\0")[:-1])

    def part(self, indices: Sequence[int] | np.ndarray) -> Paths:
        """Those paths alone, in that order."""
        whole = list(self)
        return Paths([whole[index] for index in indices])
