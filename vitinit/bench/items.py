"""All items of `bench all`, in the order in which they run.

Checks of correctness come first, since measurements of wrong results are worth nothing. Then follow
the measurements to which the GPU's goals belong, a short training run, and all other measurements.
"""

from __future__ import annotations

from functools import partial

from . import speeds
from .checks import images, needs, runs, steps
from .item import Goal, Item

CHECKS = (
    Item("augmentation", "check", images.augmentation),
    Item("erasing_and_mixing", "check", images.erasing_and_mixing),
    Item("resident_cutting", "check", images.resident_cutting),
    Item("streams", "check", images.streams),
    Item("evaluation_views", "check", images.evaluation_views),
    Item("train_step", "check", steps.train_step),
    Item("evaluation", "check", steps.evaluation),
    Item("fp16_overflow", "check", steps.fp16_overflow),
    Item("bf16", "check", steps.bf16),
    Item("moving_average", "check", steps.moving_average),
    Item("micro_batches", "check", steps.micro_batches),
    Item("channels_last", "check", steps.channels_last),
    Item("no_waiting", "check", needs.no_waiting),
    Item("resume", "check", runs.resume, seconds=(60, 40)),
    Item("compiled", "check", steps.compiled, seconds=(120, 40), alone=True),
    Item("peak_memory", "check", needs.peak_memory, seconds=(20, 10)),
    Item("two_processes", "check", runs.two_processes, seconds=(40, 25)),
)
SPEEDS = (
    Item("step_vit_base", "speed", partial(speeds.step, "vit_base"), seconds=(90, 20), alone=True,
         goals=(Goal("% of the card's bf16 rate", at_least=50),)),
    Item("torchvision_vit", "speed", speeds.torchvision_vit, seconds=(120, 30), alone=True,
         goals=(Goal("× torchvision's", at_least=1.1),)),
    Item("augmentation_share", "speed", speeds.augmentation_share, seconds=(60, 15), alone=True,
         goals=(Goal("% of the step", at_most=5),)),
    Item("loader_fed", "speed", speeds.loader_fed, seconds=(120, 30), alone=True,
         goals=(Goal("fed/synthetic", at_least=0.95, where=(("workers", 16),)),)),
    *(Item(f"step_{name}", "speed", partial(speeds.step, name), seconds=seconds, alone=True)
      for name, seconds in [("vit_tiny", (60, 60)), ("vit_small", (60, 15)), ("swin_tiny", (90, 15)),
                            ("mixer_b16", (60, 15)), ("convmixer_768_32", (90, 15))]),
    Item("launches", "speed", speeds.launches, seconds=(20, 20), alone=True,
         goals=(Goal("operations beside views", at_most=400, where=(("part", "augmentation"),)),)),
    Item("updates", "speed", speeds.updates, seconds=(60, 90), alone=True),
    Item("host_time", "speed", speeds.host_time, seconds=(40, 40), alone=True),
    Item("loader", "speed", speeds.loader, seconds=(20, 20), alone=True),
    Item("inits", "speed", speeds.inits, seconds=(60, 45), alone=True),
    Item("draws", "speed", speeds.draws),
    Item("listing", "speed", speeds.listing, seconds=(15, 10)),
)
# If the time runs out, the short run is worth more than the remaining measurements.
ITEMS = (*CHECKS, *SPEEDS[:4], Item("quickstart", "run", runs.quickstart, seconds=(60, 150)),
         *SPEEDS[4:])
