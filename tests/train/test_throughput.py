"""Throughput is the median pass after warm-up; how fast anything is, is not asserted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vitinit.train import throughput as room
from vitinit.train.metrics import ProgressBar

CPU = torch.device("cpu")


class Clocked(nn.Module):
    """A model under whose clock pass n takes `seconds[n]`."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__()
        self.seconds, self.now, self.seen = iter(seconds), 0.0, []

    def forward(self, images):
        self.seen.append((tuple(images.shape), images.is_contiguous(), self.training,
                          torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        self.now += next(self.seconds)
        return images


@pytest.mark.parametrize("amp, channels_last", [("off", False), ("bf16", True)])
def test_it_is_the_median_of_the_timed_passes(monkeypatch, amp, channels_last):
    passes = [1000.0] * room.WARMUP_PASSES + [7.0] * (room.TIMED_PASSES // 2 - 1) \
        + [2.0, 4.0] + [0.5] * (room.TIMED_PASSES // 2 - 1)
    model = Clocked(passes)
    monkeypatch.setattr(room.time, "perf_counter", lambda: model.now)
    bar = ProgressBar("x", len(passes), shown=False)
    found = room.throughput(model, batch_size=5, size=(7, 11), device=CPU, amp=amp,
                            channels_last=channels_last, bar=bar)
    assert found.milliseconds == 3000.0 and found.images_per_second == pytest.approx(5 / 3)
    assert found.batch_size == 5 and found.peak_memory.endswith("GiB")
    assert bar.done == len(passes)
    assert model.seen == [((5, 3, 7, 11), not channels_last, False, False,
                           amp != "off")] * len(passes)
