"""What benchmarks share: honest times, tables, and the run's own training on given tensors."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...data.pipeline import MicroBatch
from ...recipe.files import load_recipe, overrides
from ...recipe.sections import Recipe
from ...runs.model import build, task_of, trained_model
from ...runs.start import draw_weights, model_to_train, new_state
from ...tasks.labels import cross_entropy
from ...train.device import automatic_values, keep_freed_memory
from ...train.distributed import Processes
from ...train.interruption import StopRequest
from ...train.loop import Keeper, Training, train_epochs
from ...train.meter import StepMeter
from ...train.state import TrainState
from ..shared.results import table

ROUNDS = 7
ResultRow = dict[str, Any]  # a row of results: column → number or short text, None for no value
Part = tuple[Tensor, Tensor]  # images (B, 3, H, W) and targets (B, K) on the device


def clock_of(device: torch.device) -> Callable[[], float]:
    """A clock in seconds for the work of this process on a device.

    On a GPU it is the wall clock, read when all work is done; on a CPU one thread's processor time.
    """
    torch.set_num_threads(1)
    if device.type == "cpu":
        keep_freed_memory()
        return time.process_time

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


def interleave(
    actions: Mapping[str, Callable[[], object]], clock: Callable[[], float]
) -> dict[str, list[float]]:
    """The seconds of each action in ROUNDS rounds, by name; a first round does not count.

    The actions run in turn, in every second round in the opposite order, so that what disturbs the
    machine affects all of them alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(ROUNDS + 1):
        for name in list(actions)[:: 1 if number % 2 else -1]:
            began = clock()
            actions[name]()
            if number:
                seconds[name].append(clock() - began)
    return seconds


def times_as_fast(ours: Sequence[float], others: Sequence[float]) -> str:
    """How many times as fast as the other ours is: the median of all rounds, and their range."""
    ratios = [other / our for our, other in zip(ours, others, strict=True)]
    return f"{statistics.median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})"


def row_table(rows: Sequence[ResultRow]) -> str:
    """A Markdown table with every column in which any of the rows has a value."""
    columns = list(dict.fromkeys(name for row in rows for name in row if row[name] is not None))
    return table(columns, [[cell(row.get(column)) for column in columns] for row in rows])


def cell(value: Any) -> str:
    """A value as text: floats with three significant digits, from 1000 on and integers in full."""
    if value is None:
        return "–"
    if not isinstance(value, (int, float)):
        return str(value)
    full = isinstance(value, int) or 1000 <= abs(value) < math.inf
    return f"{value:,.0f}" if full else f"{value:.3g}"


def bench_recipe(
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
