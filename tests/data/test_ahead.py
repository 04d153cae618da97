"""Batches are made in a stream of their own, and the streams wait for each other where they must."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from vitinit.data import ahead
from vitinit.data.ahead import made_ahead

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
    ahead.stream_of_makers.cache_clear()
    yield Queue.current
    ahead.stream_of_makers.cache_clear()


def after(later: dict[Queue, int], earlier: dict[Queue, int]) -> bool:
    """Whether one piece of work begins only once the other has ended."""
    return all(later.get(queue, 0) >= count for queue, count in earlier.items())


def test_the_next_item_is_made_while_the_one_before_is_trained_on(queues):
    made: list[dict[Queue, int]] = []
    trained: list[dict[Queue, int]] = []

    def makers() -> Iterator[int]:
        for number in range(7):
            made.append(Queue.current.launch())
            yield number
    uploaded = queues.launch()                       # such as the copy of a set to the device
    for number in made_ahead(makers(), CUDA):
        assert Queue.current is queues and len(made) == number + 1
        trained.append(queues.launch())

    assert len(made) == len(trained) == 7
    for number in range(7):
        assert after(made[number], uploaded)
        assert after(trained[number], made[number])
        if number >= 1:                              # may run at the same time
            assert not after(made[number], trained[number - 1])
        if number >= 2:                              # so its memory is free
            assert after(made[number], trained[number - 2])


def test_memory_of_the_item_in_hand_is_kept_until_the_next_is_made(queues):
    """The caller may drop an item early; its memory must not be used for the next item."""
    class Item:
        alive = 0

        def __init__(self) -> None:
            Item.alive += 1

        def __del__(self) -> None:
            Item.alive -= 1
    seen = []

    def makers() -> Iterator[Item]:
        for _ in range(5):
            seen.append(Item.alive)
            yield Item()
    for item in made_ahead(makers(), CUDA):
        del item
    assert seen == [0, 1, 1, 1, 1]


def test_all_makers_share_a_stream(queues):
    """torch reuses memory that was freed in a stream only for that stream."""
    streams = []

    def makers() -> Iterator[None]:
        streams.append(Queue.current)
        yield
    for _ in range(3):
        list(made_ahead(makers(), CUDA))
    assert len(set(streams)) == 1 and streams[0] is not queues


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_items_come_in_order_and_errors_where_they_are_raised(queues, device):
    def makers() -> Iterator[int]:
        yield from range(3)
        raise KeyError("three")
    seen = []
    with pytest.raises(KeyError, match="three"):
        for item in made_ahead(makers(), device):
            seen.append(item)
    assert seen == [0, 1, 2] and list(made_ahead(range(5), device)) == [0, 1, 2, 3, 4]
