"""A recipe's run on so much hardware: its plan, and what would change it."""

import argparse
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...base.messages import OneLineError, counted
from ...recipe.sections import Recipe
from ...runs.model import build, task_of, trained_model, without_data
from ..shared.plan import Plan, Rates, plan_run
from ..shared.steps import clock_of, measured_recipe, steps_of
from .loader import image_folder, in_batches
from .step import FLOAT_BYTES, GIB, engine_of, memory_row, numbers_kept, step_seconds
from .training import ROUNDS, ResultRow, row_table

WHOLE_STATES = 2  # that a run keeps: last.pt, previous.pt; best.pt and epochs have weights alone


def changes_of(plan: Plan) -> dict[str, Plan]:
    """The plan with other hardware or another input, by what is changed."""
    free = replace(plan.rates, prepare=math.inf)
    return {
        counted(plan.cores, "core"): plan,
        counted(plan.cores_needed, "core"): replace(plan, cores=plan.cores_needed),
        "an input that costs nothing": replace(plan, rates=replace(free, core=math.inf)),
        f"{2 * plan.gpus} GPUs, {2 * plan.cores} cores": replace(
            plan, gpus=2 * plan.gpus, cores=2 * plan.cores
        ),
    }


def plan_rows(plan: Plan, limit_hours: float, start_seconds: float) -> list[ResultRow]:
    return [
        {
            "with": change,
            "images/s": changed.rate,
            "bound by": changed.bound,
            "s an epoch": changed.epoch_seconds,
            "hours": changed.hours,
            f"jobs of {limit_hours:g} h": changed.jobs(limit_hours, start_seconds),
        }
        for change, changed in changes_of(plan).items()
    ]


def disk_gib(recipe: Recipe) -> float:
    """GiB of the checkpoints that a run keeps, whose weights are counted and not made."""
    with FakeTensorMode():
        recipe = without_data(recipe)
        model: torch.nn.Module = trained_model(task_of(recipe), build(recipe), recipe)
    weights, moments = numbers_kept(model, recipe)
    of_weights = WHOLE_STATES + 1 + len(recipe.checkpoint.keep_epochs)
    return FLOAT_BYTES * (of_weights * weights + WHOLE_STATES * moments) / GIB


def input_rates(
    recipe: Recipe, args: argparse.Namespace, device: torch.device
) -> tuple[float, float]:
    """Images/s that this core loads, and that the device prepares, of micro-batches of photographs:
    medians, each timed by itself, since on a GPU a difference of both would be noise.
    """
    if recipe.data.decode == "cuda":  # by a thread of its own, which is ahead
        raise OneLineError(
            'with data.decode = "cuda" loading and preparing are not told apart; expected '
            "--core-rate and --prepare-rate"
        )
    batch = args.batch or recipe.optim.max_batch_per_process
    clock = clock_of(device)
    loads, prepares = [], []
    with tempfile.TemporaryDirectory() as folder:
        sets = [*args.set, *image_folder(Path(folder), args.data_dir, batch), *in_batches(batch)]
        sets += ["data.workers=0", "data.on_device_gib=0"]
        steps = steps_of(measured_recipe(args.recipe, sets, device), device)
        for _ in range(ROUNDS + 1):
            began = clock()
            _, (micro_batch,) = next(steps)
            loaded = clock()
            micro_batch.prepare()
            loads.append(loaded - began)
            prepares.append(clock() - loaded)
    load, prepare = (batch / median(times[1:]) for times in (loads, prepares))
    return load, prepare


def measured_rates(recipe: Recipe, args: argparse.Namespace, device: torch.device) -> Rates:
    """The rates of this machine, but for those that are given. A core is measured while the others
    are idle; where two share one, each loads less when both are busy.
    """
    step, core, prepare = args.step_rate, args.core_rate, args.prepare_rate
    if core is None or prepare is None:
        loaded, prepared = input_rates(recipe, args, device)
        core, prepare = core or loaded, prepare or prepared
    if step is None:
        batch = args.batch or recipe.optim.max_batch_per_process
        engine, clock = engine_of(without_data(recipe), device, batch), clock_of(device)
        step = batch / step_seconds(engine, clock, device)
    return Rates(step, core, prepare)


def print_plan(args: argparse.Namespace, device: torch.device) -> None:
    """Plan a recipe's run, and print it beside what would change it."""
    recipe = measured_recipe(args.recipe, args.set, device)
    rates = measured_rates(recipe, args, device)
    images, validation = args.images
    plan = plan_run(
        recipe, rates, images=images, validation=validation, gpus=args.gpus, cores=args.cores
    )
    print(
        f"\n{recipe.name}: {plan.epochs} epochs of {plan.images:,} images, a GPU trains "
        f"{rates.step:,.0f}/s and prepares {rates.prepare:,.0f}/s, a core loads {rates.core:,.0f}/s;"
        f" checkpoints take {disk_gib(recipe):.1f} GiB\n"
    )
    print(row_table(plan_rows(plan, args.limit_hours, args.start_seconds)))
    print("\n" + row_table([memory_row(recipe, args.card_gib)]))
