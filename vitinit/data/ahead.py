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
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def preparing_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream in which batches are prepared.

    There is only one per device, because torch reuses memory that was freed in a stream for that
    stream alone.
    """
    return torch.cuda.Stream(device)


class Ahead:
    """Calls functions that prepare batches: on a GPU in the stream for it, elsewhere as usual.

    The caller must launch all work on one batch before it asks for the next, and must not use a
    batch after that, because the memory of batch k is used again for batch k + 2. So at most two
    batches are on the device beside the one that is being prepared, however far the host is ahead
    of the device. (With Tensor.record_stream instead, memory would grow with every step that the
    host launches ahead.)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.asked = self.batch = None

    def __call__(self, prepare: Callable[..., Any], *arguments: Any) -> Any:
        """Return prepare(*arguments), a batch that work in the current stream may use."""
        if self.device.type != "cuda":
            return prepare(*arguments)
        training, preparing = torch.cuda.current_stream(self.device), preparing_stream(self.device)
        # `before` follows all work on the batch before the current one, whose memory is then free.
        before, self.asked = self.asked, training.record_event()
        preparing.wait_event(before or self.asked)
        with torch.cuda.stream(preparing):
            self.batch = prepare(*arguments)         # the current batch is kept alive until here
        training.wait_stream(preparing)
        return self.batch
