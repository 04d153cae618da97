"""How long a run will take, and what binds it, from rates that were measured or are given.

    one step of all GPUs = the slower of   each GPU: its step, and the preparation of its images
                                           all cores: loading these images

A GPU adds what it prepares to what it trains, since both use its memory at full rate: two fed
steps of an H200 took 2 % longer than this says. Workers load meanwhile.
"""

import argparse
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...recipe.sections import Recipe
from ...runs.model import build, task_of, trained_model, without_data
from .loader import AUGMENTED_TOGETHER, LOADER, WHOLE, image_folder, loader_rows
from .step import STEPS, engine_of, memory_row
from .training import ResultRow, bench_recipe, clock_of, row_table

FORWARD = 1 / 3  # of a step's time; the backward pass takes two
COPIES = 3  # of the weights that a run keeps: last.pt, previous.pt, best.pt
FLOATS = {
    "adamw": 3,
    "lamb": 3,
    "muon": 2,
}  # of a parameter in such a file: itself, and its moments
PARTS = (LOADER, WHOLE)  # of what is measured of an input


@dataclass(frozen=True)
class Rates:
    """Images/s of each part alone. Infinite is a part that costs nothing."""

    step: float  # of one GPU's training step, on images that are there
    core: float  # that one core loads beside the others
    prepare: float = math.inf  # that one GPU augments, and decodes if it does, and mixes


@dataclass(frozen=True)
class Plan:
    """A run on so many GPUs and cores: images/s of all GPUs, seconds, and what binds it."""

    images: int  # of an epoch
    validation: int  # images of each validation, by the model and its average
    epochs: int
    gpus: int
    cores: int
    rates: Rates
    weights: int = 1  # models that a validation measures

    @property
    def of_gpus(self) -> float:
        return self.gpus / (1 / self.rates.step + 1 / self.rates.prepare)

    @property
    def of_cores(self) -> float:
        return self.cores * self.rates.core

    @property
    def rate(self) -> float:
        return min(self.of_gpus, self.of_cores)

    @property
    def bound(self) -> str:
        return "loading" if self.of_cores < self.of_gpus else "the GPU"

    @property
    def epoch_seconds(self) -> float:
        """Training, and a validation whose images have been decoded before."""
        evaluated = self.weights * self.validation * FORWARD / (self.gpus * self.rates.step)
        return self.images / self.rate + evaluated

    @property
    def hours(self) -> float:
        return self.epochs * self.epoch_seconds / 3600

    @property
    def cores_needed(self) -> int:
        """Cores with which loading does not bind."""
        return math.ceil(self.of_gpus / self.rates.core)

    def jobs(self, limit_hours: float, start_seconds: float) -> int:
        """Jobs of `limit_hours` that the run takes, each of which first compiles and starts."""
        return math.ceil(self.hours / (limit_hours - start_seconds / 3600))


def plan_run(
    recipe: Recipe, rates: Rates, *, images: int, validation: int, gpus: int, cores: int
) -> Plan:
    """The plan of a recipe's run. images, validation: of its sets."""
    return Plan(
        images=round(images * recipe.data.subset),
        validation=validation if recipe.eval.every_epochs else 0,
        epochs=recipe.schedule.total_epochs,
        gpus=gpus,
        cores=cores,
        rates=rates,
        weights=2 if recipe.ema.decay else 1,
    )


def changes_of(plan: Plan) -> dict[str, Plan]:
    """The plan with other hardware or another input, by what is changed."""
    free = replace(plan.rates, prepare=math.inf)
    return {
        f"{plan.cores} cores": plan,
        f"{plan.cores_needed} cores": replace(plan, cores=plan.cores_needed),
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
    count = sum(parameter.numel() for parameter in model.parameters())
    floats = FLOATS[recipe.optim.name] + (recipe.ema.decay > 0.0)
    return 4 * count * floats * (COPIES + len(recipe.checkpoint.keep_epochs)) / 2**30


def measured_rates(recipe: Recipe, args: argparse.Namespace, device: torch.device) -> Rates:
    """The rates of this machine, but for those that are given. A core is measured while the others
    are idle; where two share one, each loads less when both are busy.
    """
    step, core, prepare = args.step_rate, args.core_rate, args.prepare_rate
    if step is None:
        batch = args.batch or recipe.optim.max_batch_per_process
        engine, clock = engine_of(without_data(recipe), device, batch), clock_of(device)
        engine.run()
        began = clock()
        engine.run()
        step = batch * STEPS[device.type] / (clock() - began)
    if core is None or prepare is None:
        with tempfile.TemporaryDirectory() as folder:
            photographs = image_folder(Path(folder), args.data_dir, AUGMENTED_TOGETHER)
            rows = loader_rows(args.recipe, [*args.set, *photographs], Path(folder), device)
        loaded, whole = (next(row for row in rows if part in row.values()) for part in PARTS)
        core = core or loaded["views/s"]
        prepare = prepare or 1 / (1 / whole["views/s"] - 1 / loaded["views/s"])
    return Rates(step, core, prepare)


def print_plan(args: argparse.Namespace, device: torch.device) -> None:
    """Plan a recipe's run, and print it beside what would change it."""
    recipe = bench_recipe(args.recipe, args.set, device)
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
