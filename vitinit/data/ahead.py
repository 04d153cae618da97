"""The next batch is copied and augmented while the model still trains on the one before.

Work on a GPU waits in queues, called streams; the host launches it and goes on. The model's work is
in one stream, the making of batches in another, and the GPU takes from both. Nothing here makes the
host wait: what must come before what, the streams are told.

    host     make 1 | launch training on 1 | make 2 | launch training on 2 | make 3 | …
    training        . . . . . . . . [ 1 ################ ] [ 2 ################ ] [ 3 …
    making     [ 1 ] . . . . . . . [ 2 ] . . . . . . . .  [ 3 ] . . . .
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


@functools.cache
def stream_of_makers(device: torch.device) -> torch.cuda.Stream:
    """One for all, since torch gives memory that was freed in one stream to that stream alone."""
    return torch.cuda.Stream(device)


def made_ahead(items: Iterable[T], device: torch.device) -> Iterator[T]:
    """The items, each made on a stream of its own where `device` has streams; else as they come.

    Whoever takes them launches all work on one item before asking for the next, and does not keep
    it: memory of item k may hold item k + 2. So at most two items stand on the device beside the
    one that is being made, however far the host is ahead; Tensor.record_stream would let it take
    memory for all steps that the host has launched.
    """
    if device.type != "cuda":
        yield from items
        return
    items, making = iter(items), stream_of_makers(device)
    trained = None                                   # recorded when the item in hand was asked for
    while True:
        training = torch.cuda.current_stream(device)
        before, trained = trained, training.record_event()
        # By then all work on the item before the one in hand was launched, and its memory is free.
        making.wait_event(before or trained)
        try:
            with torch.cuda.stream(making):
                item = next(items)                   # the one in hand keeps its memory until here
        except StopIteration:
            return
        training.wait_stream(making)
        yield item
