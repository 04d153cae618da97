"""Batches are prepared in a stream of their own, and the streams wait for each other where they must."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from vitinit.data.pipeline import Ahead, preparing_stream

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Queue:
    """A stand-in for a CUDA stream that records what must have ended before each piece of work.

    past: for each queue, how many of its pieces of work end before the next one in this queue begins.
    """

    current: Queue

    def __init__(self, device: torch.device | None = None) -> None:
        self.past: dict[Queue, int] = {self: 0}

    def launch(self) -> dict[Queue, int]:
        """Launch a piece of work. Returns how many pieces of each queue end before it, with itself."""
        self.past[self] += 1
        return dict(self.past)

    def record_event(self) -> dict[Queue, int]:
        return dict(self.past)

    def wait_event(self, event: dict[Queue, int]) -> None:
        for queue, count in event.items():
            self.past[queue] = max(self.past.get(queue, 0), count)

    def wait_stream(self, other: Queue) -> None:
        self.wait_event(other.record_event())


@pytest.fixture
def queues(monkeypatch) -> Queue:
    """Replaces the streams of torch.cuda by queues, and gives the one in which training is launched."""
    @contextlib.contextmanager
    def within(queue: Queue) -> Iterator[None]:
        before, Queue.current = Queue.current, queue
        try:
            yield
        finally:
            Queue.current = before
    Queue.current = Queue()
    monkeypatch.setattr(torch.cuda, "Stream", Queue)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Queue.current)
    preparing_stream.cache_clear()
    yield Queue.current
    preparing_stream.cache_clear()


def after(later: dict[Queue, int], earlier: dict[Queue, int]) -> bool:
    """Whether one piece of work begins only once the other has ended."""
    return all(later.get(queue, 0) >= count for queue, count in earlier.items())


def test_the_next_batch_is_prepared_while_the_one_before_is_trained_on(queues):
    prepared: list[dict[Queue, int]] = []
    trained: list[dict[Queue, int]] = []
    uploaded = queues.launch()                       # such as the copy of a set to the device
    ahead = Ahead(CUDA)
    for _ in range(7):
        prepared.append(ahead(lambda: Queue.current.launch()))
        assert Queue.current is queues
        trained.append(queues.launch())

    for number in range(7):
        assert after(prepared[number], uploaded)
        assert after(trained[number], prepared[number])
        if number >= 1:                              # may run at the same time
            assert not after(prepared[number], trained[number - 1])
        if number >= 2:                              # so its memory is free
            assert after(prepared[number], trained[number - 2])


def test_memory_of_the_batch_in_hand_is_kept_until_the_next_is_prepared(queues):
    """The caller may drop a batch early; its memory must not be used for the next one."""
    class Batch:
        alive = 0

        def __init__(self, seen: list[int]) -> None:
            seen.append(Batch.alive)
            Batch.alive += 1

        def __del__(self) -> None:
            Batch.alive -= 1
    ahead, seen = Ahead(CUDA), []
    for _ in range(5):
        ahead(Batch, seen)
    assert seen == [0, 1, 1, 1, 1]


def test_all_batches_are_prepared_in_one_stream(queues):
    """torch reuses memory that was freed in a stream only for that stream."""
    streams = [Ahead(CUDA)(lambda: Queue.current) for _ in range(3)]
    assert len(set(streams)) == 1 and streams[0] is not queues


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_what_is_prepared_is_returned_and_errors_come_through(queues, device):
    ahead = Ahead(device)
    assert [ahead(pow, 3, number) for number in range(4)] == [1, 3, 9, 27]
    with pytest.raises(KeyError):
        ahead({}.__getitem__, "three")
    assert Queue.current is queues and ahead(abs, -5) == 5
