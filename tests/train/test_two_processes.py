"""Two processes under DistributedDataParallel: their steps equal those of a single process, and what
ends one of them ends both, between the same two steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import vitinit
from vitinit.data.mix import smooth_one_hot
from vitinit.data.sampler import BatchPlan
from vitinit.messages import OneLineError
from vitinit.recipe.files import RECIPES, load_recipe
from vitinit.train import distributed
from vitinit.train.distributed import Processes
from vitinit.train.ema import Ema
from vitinit.train.engine import read_losses, train_epochs
from vitinit.train.interruption import Interrupted, StopRequest
from vitinit.train.metrics import Progress
from vitinit.train.optim import optimizer_for
from vitinit.train.state import TrainState

GLOBAL_BATCH, STEPS, CLASSES, ACCUMULATION = 12, 3, 7, 3
MODELS = {"vit_tiny": dict(patch_size=4, num_heads=3),
          "convmixer_256_8": dict(patch_size=2, kernel_size=3)}
ALONE = Processes(0, 0, 1, torch.device("cpu"))


def fresh(name: str) -> TrainState:
    model = vitinit.build_model(name, num_classes=CLASSES, image_size=8, embed_dim=12, depth=2,
                                **MODELS[name])
    vitinit.init_weights(model, "torch", generator=torch.Generator().manual_seed(0))
    optim = replace(load_recipe(RECIPES / "quickstart.toml").optim, name="muon", weight_decay=0.1,
                    eps=1e-4)
    return TrainState(model, optimizer_for(model, optim), torch.amp.GradScaler("cpu", enabled=False),
                      Ema(model, decay=0.8, warmup=True), Progress())


class Part(NamedTuple):
    """A micro-batch, in the form that the engine expects."""

    images: torch.Tensor
    targets: torch.Tensor
    positions: np.ndarray

    def prepare(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images, self.targets


def steps(processes: Processes, count: int, ending: str) -> Iterator[tuple[int, list[Part]]]:
    """`count` steps, and then what ends them: broken data, a signal to this process, or nothing."""
    plan = BatchPlan(GLOBAL_BATCH, processes.world_size,
                     GLOBAL_BATCH // processes.world_size // ACCUMULATION, group=1)
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        images = torch.randn(GLOBAL_BATCH, 3, 8, 8, generator=generator)
        targets = smooth_one_hot(torch.randint(CLASSES, (GLOBAL_BATCH,), generator=generator),
                                 CLASSES, 0.1)
        places = [plan.positions(processes.rank, micro_step) for micro_step in range(ACCUMULATION)]
        yield number, [Part(images[place], targets[place], place) for place in places]
    if ending == "image 7":
        raise OneLineError(ending)
    if ending:
        os.kill(os.getpid(), signal.SIGTERM)
        yield count, []


def trained(processes: Processes, name: str, count: int = STEPS, ending: str = ""
            ) -> tuple[TrainState, str]:
    """The state after `count` steps, and why they ended, or ""."""
    state, why = fresh(name), ""
    forward = state.model
    if processes.world_size > 1:
        forward = DistributedDataParallel(state.model, gradient_as_bucket_view=True)
    with StopRequest() as stop:
        try:
            train_epochs(state, forward, lambda epoch, done: steps(processes, count, ending),
                         epochs=1, global_batch=GLOBAL_BATCH, amp="off", lr_at=lambda step: 1e-2,
                         drop_path_at=lambda step: None, clip_norm=0.5, processes=processes, stop=stop)
        except (OneLineError, Interrupted) as error:
            why = str(error)
            read_losses(state, processes)
    return state, why


def tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """The tensors of the model, its moving average and the optimiser."""
    moments = {f"{number}.{name}": value
               for number, values in state.optimizer.state_dict()["state"].items()
               for name, value in values.items()}
    average = {f"average {name}": value for name, value in state.ema.model.state_dict().items()}
    return state.model.state_dict() | average | moments


def ended(processes: Processes) -> list[tuple[str, int, list[str], int]]:
    """Why this process stopped, its steps, tensors that differ from those before, gradients left.

    Only one process has broken data, or gets a signal, for its second or third step.
    """
    found = []
    for name, rank, count, ending in ENDINGS:
        state, why = trained(processes, name, count, ending) if processes.rank == rank else \
            trained(processes, name)
        before = tensors(trained(processes, name, count)[0])
        other = [key for key, value in tensors(state).items() if not torch.equal(value, before[key])]
        gradients = sum(parameter.grad is not None for parameter in state.model.parameters())
        found.append((why, state.progress.step, other, gradients))
    return found


ENDINGS = [("vit_tiny", 0, 1, "image 7"), ("convmixer_256_8", 1, 1, "stopped by SIGTERM"),
           ("convmixer_256_8", 0, 2, "stopped by SIGTERM"), ("vit_tiny", 1, 2, "image 7")]


def threads_left(processes: Processes) -> list[str]:
    """The names of this process's threads after it was stopped and has left the process group."""
    trained(processes, "vit_tiny", 1 if processes.rank == 0 else STEPS,
            "a signal" if processes.rank == 0 else "")
    distributed.stop()
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def ends_and_threads(processes: Processes) -> tuple:
    return ended(processes), threads_left(processes)


def test_what_ends_one_process_ends_both_between_the_same_steps_and_leaves_no_thread(in_two_processes):
    """Beside a thread of the process group, Python would abort at its end now and then."""
    for found, names in in_two_processes(ends_and_threads):
        assert found == [(ending, count, [], 0) for _, _, count, ending in ENDINGS]
        assert names and not [name for name in names if "gloo" in name]
