"""Prepare the next batch on a GPU while the model still trains on the current one.

Work on a GPU waits in queues, called streams; the host launches work and goes on. Training is
launched in one stream and the preparation of batches (copies and augmentation) in another, and the
GPU takes work from both. The host never waits here; events tell each stream what it has to wait
for.

    host              prepare 1 | launch training on 1 | prepare 2 | launch training on 2 | prepare 3 …
    training stream         . . . . . . . . [ 1 ################ ] [ 2 ################ ] [ 3 …
    preparing stream   [ 1 ] . . . . . . . [ 2 ] . . . . . . . .  [ 3 ] . . . .
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


@functools.cache
def stream_of_makers(device: torch.device) -> torch.cuda.Stream:
    """The stream in which batches are made.

    There is only one per device, because torch reuses memory that was freed in a stream for that
    stream alone.
    """
    return torch.cuda.Stream(device)


def made_ahead(items: Iterable[T], device: torch.device) -> Iterator[T]:
    """Yield the items; on a GPU each is made in the stream for preparing, elsewhere as usual.

    The caller must launch all work on one item before it asks for the next, and must not use an
    item after that, because the memory of item k is used again for item k + 2. So at most two items
    are on the device beside the one that is being made, however far the host is ahead of the
    device. (With Tensor.record_stream instead, memory would grow with every step that the host
    launches ahead.)
    """
    if device.type != "cuda":
        yield from items
        return
    items, making = iter(items), stream_of_makers(device)
    trained = None                                   # recorded when the current item was asked for
    while True:
        training = torch.cuda.current_stream(device)
        before, trained = trained, training.record_event()
        # `before` follows all work on the item before the current one, whose memory is free by
        # then.
        making.wait_event(before or trained)
        try:
            with torch.cuda.stream(making):
                item = next(items)                   # `item` still held the current item until here
        except StopIteration:
            return
        training.wait_stream(making)
        yield item
