"""A run's own steps, on images of a folder or on tensors that are given, for measurements."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...data.pipeline import MicroBatch
from ...recipe.files import load_recipe, overrides
from ...recipe.sections import Recipe
from ...runs.data import open_data
from ...runs.model import build, task_of, trained_model
from ...runs.start import draw_weights, model_to_train, new_state
from ...tasks.labels import cross_entropy
from ...train.device import automatic_values, keep_freed_memory
from ...train.distributed import Processes
from ...train.interruption import StopRequest
from ...train.loop import Keeper, Training, train_epochs
from ...train.meter import StepMeter
from ...train.state import TrainState

Part = tuple[Tensor, Tensor]  # images (B, 3, H, W) and targets (B, K) on the device


def measured_recipe(
    name: str,
    sets: Sequence[str] = (),
    device: torch.device = torch.device("cpu"),
    *,
    automatic: Mapping[str, str] | None = None,
) -> Recipe:
    """The recipe `name` with init "default" and with changes such as "engine.compile=false";
    from no checkpoint. automatic: the keys left to a device, by key; by default those of this one.
    """
    changes = overrides(init="default", sets=["init.checkpoint=", *sets])
    return load_recipe(name, changes).with_automatic(automatic or automatic_values(device))


def clock_of(device: torch.device) -> Callable[[], float]:
    """A clock in seconds for the work of this process on a device: on one CPU thread that of the
    processor, on which other programs do not count; else that on the wall, on a GPU once its work is
    done. From then on freed memory is kept, as in a run.
    """
    keep_freed_memory()
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time
    return wall_clock(device)


def wall_clock(device: torch.device) -> Callable[[], float]:
    """A clock on the wall, in seconds, that is read once a GPU has done its work."""

    def read() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


def alone(device: torch.device) -> Processes:
    """The processes of a run that consists of one process."""
    return Processes(rank=0, local_rank=0, world_size=1, device=device)


def set_up(recipe: Recipe, device: torch.device) -> tuple[TrainState, nn.Module]:
    """A run's first state, if its init reads no images, and the (compiled) model to call."""
    processes, task, classifier = alone(device), task_of(recipe), build(recipe)
    model = trained_model(task, classifier, recipe)
    draw_weights(model, classifier, recipe, task, processes)
    state = new_state(model, recipe, processes)
    return state, model_to_train(state, recipe, processes)


def given_step(number: int, parts: Sequence[Part]) -> tuple[int, list[MicroBatch]]:
    """Step number `number`, on one process, of micro-batches `parts`."""

    def micro_batch(part: Part, end: int) -> MicroBatch:
        return MicroBatch(lambda: part, np.arange(end - len(part[0]), end))

    return number, [*map(micro_batch, parts, np.cumsum([len(images) for images, _ in parts]))]


def train_on(
    state: TrainState,
    steps: Iterable[tuple[int, Sequence[Any]]],
    *,
    forward: nn.Module | None = None,
    drop_path: Tensor | None = None,
    **options: Any,
) -> None:
    """Train on `steps` as one epoch of the loop, measured as a run is.

    forward: what computes the logits, such as a compiled model; None: the model itself.
    drop_path: scales (branches, B) of every step. options: further fields of `Training`, where
    cross-entropy, a small constant learning rate, float32 and no clipping are not wanted.
    """
    processes, progress = alone(next(state.model.parameters()).device), state.progress
    usual = {"loss": cross_entropy, "learning_rate": lambda step: 1e-4}
    training = Training(
        state=state,
        forward=state.model if forward is None else forward,
        steps=lambda epoch, done: steps,
        drop_path=lambda step: drop_path,
        processes=processes,
        stop=StopRequest(),
        epochs=progress.epochs + 1,
        **usual | options,
    )
    meter = StepMeter(
        progress, processes, epochs=training.epochs, steps_per_epoch=0, global_batch=1
    )
    meter.told_paces = True  # a run measures its first rows' last steps alone, which costs time
    train_epochs(training, Keeper(), meter)


def steps_of(recipe: Recipe, device: torch.device) -> Iterator:
    """The recipe's training steps on one process, epoch after epoch."""
    data = open_data(recipe, alone(device), dry_run=False)
    for epoch in itertools.count():
        yield from data.train_batches.steps(epoch)
