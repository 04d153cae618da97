"""Everything that `bench all` does, in order of worth."""

from __future__ import annotations

from .checks import images, runs, steps
from .item import Item

CHECKS = (
    Item("augmentation", "check", images.augmentation),
    Item("erasing_and_mixing", "check", images.erasing_and_mixing),
    Item("resident_cutting", "check", images.resident_cutting),
    Item("evaluation_views", "check", images.evaluation_views),
    Item("train_step", "check", steps.train_step),
    Item("evaluation", "check", steps.evaluation),
    Item("fp16_overflow", "check", steps.fp16_overflow),
    Item("bf16", "check", steps.bf16),
    Item("moving_average", "check", steps.moving_average),
    Item("micro_batches", "check", steps.micro_batches),
    Item("channels_last", "check", steps.channels_last),
    Item("no_waiting", "check", steps.no_waiting),
    Item("resume", "check", runs.resume, seconds=(60, 40)),
    Item("compiled", "check", steps.compiled, seconds=(120, 40), alone=True),
    Item("peak_memory", "check", steps.peak_memory, seconds=(20, 10)),
    Item("two_processes", "check", runs.two_processes, seconds=(40, 25)),
)
ITEMS = (
    *CHECKS,
    Item("quickstart", "run", runs.quickstart, seconds=(60, 150)),
)
