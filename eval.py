"""Exact accuracy of checkpoints over every image of data sets, each counted once.

    python eval.py runs/deit_base-impulse-s0
    python eval.py runs/*/best.pt --data imagenet=/data/imagenet imagenet_r=/data/imagenet-r
    torchrun --nproc_per_node=8 eval.py deit_base_patch16_224.pth --recipe deit_base \\
        --data-dir /data/imagenet

Read it from top to bottom:
    arguments → checkpoints and data sets → models → passes over the images → report

A run folder (its last.pt) or a checkpoint of ours knows its recipe; model and EMA are evaluated.
For any other checkpoint, such as DeiT's own, --recipe says what it is a checkpoint of. Without
--data each is evaluated on its own recipe's validation set. One result is a line, several are a
table; the last lines, or FILE of --json, are JSON, one object for each checkpoint and data set.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)     # no traceback of what is being imported

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitinit.command_line import Parser, run_program
from vitinit.data.class_subsets import class_indices, imagenet_wnids
from vitinit.data.datasets import DATA_SETS, Source, download, is_wnid, open_split
from vitinit.data.eval_sets import EVAL_SETS, NamedSet, open_to_evaluate
from vitinit.data.images import DataError
from vitinit.data.kept import KeptViews, kept_views
from vitinit.data.loader import EvalViews
from vitinit.data.pipeline import EvaluationBatches
from vitinit.data.to_device import ToDevice
from vitinit.data.workers import start_fork_server
from vitinit.recipe.files import Override, RecipeError, find_recipe
from vitinit.recipe.resolve import moved, overrides, resolve_recipe
from vitinit.recipe.sections import Recipe
from vitinit.recipe.values import nearest
from vitinit.runs.report import Finding, report
from vitinit.runs.trained import Saved, open_saved
from vitinit.train import distributed
from vitinit.train.device import describe_device, memory_for
from vitinit.train.distributed import Processes
from vitinit.train.engine import Evaluation, evaluate, set_precision
from vitinit.train.interruption import StopRequest
from vitinit.train.metrics import ProgressBar
from vitinit.train.throughput import TIMED_PASSES, WARMUP_PASSES, Throughput, throughput

REPOSITORY = Path(__file__).resolve().parent
# What --set changes beside a run's own recipe: how to evaluate, not what was trained.
EVALUATION_KEYS = ("eval.crop_pct", "eval.interpolation", "eval.batch_size", "eval.cache_gib",
                   "data.workers", "data.on_device_gib", "engine.amp", "engine.compile",
                   "engine.channels_last", "engine.tf32")


# ---------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------


def named_set(text: str) -> NamedSet:
    """NAME=DIR as --data takes it; `shapes` stands alone."""
    name, _, root = text.partition("=")
    known = [*DATA_SETS, *EVAL_SETS]
    if name not in known:
        raise argparse.ArgumentTypeError(f"there is no data set '{name}'{nearest(name, known)}")
    if bool(root) == (name == "shapes"):
        raise argparse.ArgumentTypeError(
            f"{text}: expected " + ("shapes alone, which lies in no folder" if root else
                                    f"{name}=DIR, the folder of the data set"))
    return NamedSet(name, root)


def image_size(text: str) -> tuple[int, int]:
    """N, or H,W, in pixels, as --image-size takes it: (height, width)."""
    sides = text.split(",")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"{text}: expected a number of pixels, such as 288, or "
                                         "height and width, such as 192,256")
    return int(sides[0]), int(sides[-1])


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="eval.py", description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="+",
                        help="run folders and checkpoint files")
    parser.add_argument("--data", type=named_set, nargs="+", action="extend", metavar="NAME=DIR",
                        help=f"data sets: {', '.join([*DATA_SETS, *EVAL_SETS])}")
    parser.add_argument("--data-dir", help="data.root: folder of the recipe's own data set")
    parser.add_argument("--image-size", type=image_size, metavar="N or H,W",
                        help="evaluate at another resolution than the recipe's")
    parser.add_argument("--recipe", help="what checkpoints without a recipe are checkpoints of")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="override any key of the recipe given by --recipe, and of any recipe "
                             f"{', '.join(EVALUATION_KEYS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON there")
    parser.add_argument("--per-class", action="store_true", help="print top-1 of every class")
    parser.add_argument("--throughput", action="store_true",
                        help="print images/s of each model alone, and memory")
    args = parser.parse_args(arguments)
    if args.data and args.data_dir is not None:
        raise RecipeError(f"--data-dir {args.data_dir}: the folder of the recipe's own data set, "
                          "which --data replaces; expected one of the two")
    if args.json and (os.path.isdir(args.json) or not os.path.isdir(args.json.parent)):
        raise RecipeError(f"--json {args.json}: expected a file in a folder that exists")
    return args


# ---------------------------------------------------------------------------------------------
# Checkpoints and data sets
# ---------------------------------------------------------------------------------------------


def open_checkpoints(args: argparse.Namespace) -> list[Saved]:
    """Every checkpoint with the recipe that says how to evaluate it, and its classes' names."""
    foreign = None if args.recipe is None else resolve_recipe(
        find_recipe(args.recipe, REPOSITORY / "recipes"),
        overrides(data_dir=args.data_dir, sets=args.set))
    changes = for_evaluation(args)
    found = [open_saved(path, recipe=foreign, changes=changes, image_size=args.image_size)
             for path in args.checkpoint]
    if foreign is not None and all(saved.brings_recipe for saved in found):
        raise RecipeError(f"--recipe {args.recipe}: {found[0].path} brings its own recipe; --recipe "
                          "is for checkpoints that hold none")
    return [saved._replace(recipe=moved(saved.recipe, args.data_dir)) for saved in found]


def for_evaluation(args: argparse.Namespace) -> list[Override]:
    """What of --set applies to a run's own recipe, too; the rest needs a --recipe to apply to."""
    changes = overrides(sets=args.set)
    for change in changes:
        if change.key not in EVALUATION_KEYS and args.recipe is None:
            raise RecipeError(f"{change.text}: the checkpoint brings its own recipe, of which only "
                              f"how to evaluate can change{nearest(change.key, EVALUATION_KEYS)}")
    return [change for change in changes if change.key in EVALUATION_KEYS]


def open_sets(eval_sets: Sequence[Sequence[NamedSet]], checkpoints: Sequence[Saved],
              own: bool) -> dict[NamedSet, Source]:
    """Each data set once; a recipe's `own` must have as many classes as the recipe says."""
    sources: dict[NamedSet, Source] = {}
    for saved, its_sets in zip(checkpoints, eval_sets):
        for eval_set in its_sets:
            if eval_set not in sources:
                sources[eval_set] = open_split(*eval_set, "val", saved.recipe.data.num_classes) \
                    if own else open_to_evaluate(*eval_set)
    return sources


def columns_of(saved: Saved, eval_set: NamedSet, source: Source) -> Tensor | None:
    """Which of the model's logits belong to the set's classes, (K,); None: all, in this order.

    A model of 1000 classes that nobody named is taken for ImageNet-1K's by a set of wnids.
    """
    count, found, classes = saved.recipe.data.num_classes, source.classes, saved.classes
    if classes is None and count == len(imagenet_wnids()) and all(map(is_wnid, found)):
        classes = imagenet_wnids()
    if classes is None and len(found) != count:
        raise DataError(f"{eval_set}: {len(found)} classes found, and {saved.path} is a model of "
                        f"{count} whose names it does not hold; expected the set that it was "
                        "trained on")
    if classes is None or classes == list(found):
        return None
    try:
        return torch.tensor(class_indices(classes, found))
    except DataError as error:
        raise DataError(f"{eval_set}: {error}; the model is {saved.path}") from None


# ---------------------------------------------------------------------------------------------
# Passes over the images
# ---------------------------------------------------------------------------------------------


class ViewSettings(NamedTuple):
    """What models must share for an image to be decoded once for all of them."""

    eval_set: NamedSet
    size: tuple[int, int]       # (height, width)
    crop_pct: float
    interpolation: str


class PassSettings(NamedTuple):
    """What they must share beside it to be evaluated in one pass: how to calculate."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    batch_size: int
    amp: str
    channels_last: bool
    tf32: bool


def view_settings_of(saved: Saved, eval_set: NamedSet) -> ViewSettings:
    how = saved.recipe.eval
    return ViewSettings(eval_set, saved.size, how.crop_pct, how.interpolation)


def pass_settings_of(saved: Saved) -> PassSettings:
    data, how, engine = saved.recipe.data, saved.recipe.eval, saved.recipe.engine
    return PassSettings(data.mean, data.std, how.batch_size, engine.amp, engine.channels_last, engine.tf32)


def views_for(view: ViewSettings, source: Source, recipes: Sequence[Recipe], passes: int,
              processes: Processes) -> KeptViews:
    """The views of this process, kept from one pass to the next where there is one.

    recipes: of the models; the one that gives the most room decides.
    """
    views = EvalViews(source, rank=processes.rank, world_size=processes.world_size, size=view.size,
                      crop_pct=view.crop_pct, interpolation=view.interpolation)
    if passes == 1:
        return KeptViews(views, None)
    return kept_views(views, processes.device,
                      on_device_gib=max(recipe.data.on_device_gib for recipe in recipes),
                      cache_gib=max(recipe.eval.cache_gib for recipe in recipes))


def one_pass(views: KeptViews, name: str, how: PassSettings, models: Sequence[nn.Module],
             columns: Sequence[Tensor | None], workers: int, processes: Processes,
             stop: StopRequest) -> list[Evaluation]:
    """All `models` over all images of the set called `name`."""
    prepare = ToDevice(processes.device, mean=how.mean, std=how.std,
                       channels_last=how.channels_last)
    batches = EvaluationBatches(views, batch_size=how.batch_size, workers=workers, prepare=prepare)
    with (ProgressBar(f"validate {name}", len(batches), shown=processes.is_main) as bar,
          memory_for("eval.batch_size", how.batch_size, processes.rank)):
        return evaluate([model.to(processes.device) for model in models], bar.over(batches),
                        columns=columns, num_classes=len(views.views.source.classes), amp=how.amp,
                        processes=processes, stop=stop)


def run(args: argparse.Namespace, processes: Processes, stop: StopRequest) -> None:
    on_all = processes.on_all
    checkpoints: list[Saved] = on_all(lambda: open_checkpoints(args))
    start_fork_server(max(saved.recipe.data.workers for saved in checkpoints))
    numbers = range(len(checkpoints))
    eval_sets = [list(dict.fromkeys(args.data or [NamedSet(saved.recipe.data.name,
                                                          saved.recipe.data.root)]))
                 for saved in checkpoints]
    wanted = dict.fromkeys(eval_set for its_sets in eval_sets for eval_set in its_sets)
    on_all(lambda: [download(*eval_set) for eval_set in wanted if eval_set.name in DATA_SETS]
           if processes.local_rank == 0 else None)
    sources = on_all(lambda: open_sets(eval_sets, checkpoints, own=not args.data))
    columns = on_all(lambda: {(number, eval_set): columns_of(checkpoints[number], eval_set, sources[eval_set])
                              for number in numbers for eval_set in eval_sets[number]})

    # Models, on the CPU until they are needed. --------------------------------------------------
    models = on_all(lambda: [[saved.model(name) for name in saved.weights]
                             for saved in checkpoints])
    checkpoints = [saved._replace(state=dict.fromkeys(saved.weights, True)) for saved in checkpoints]
    models = [[torch.compile(model) if saved.recipe.engine.compile else model
               for model in its_models] for saved, its_models in zip(checkpoints, models)]
    speeds = [speed(saved, its_models[0], processes) if args.throughput else None
              for saved, its_models in zip(checkpoints, models)]

    # One decoding of a data set for all models that look at it alike, one pass for all of them that
    # calculate alike. ---------------------------------------------------------------------------
    by_view: dict[ViewSettings, dict[PassSettings, list[int]]] = {}
    for number in numbers:
        for eval_set in eval_sets[number]:
            passes = by_view.setdefault(view_settings_of(checkpoints[number], eval_set), {})
            passes.setdefault(pass_settings_of(checkpoints[number]), []).append(number)
    results: dict[tuple[int, NamedSet], list[Evaluation]] = {}
    for view, passes in by_view.items():
        recipes = [checkpoints[number].recipe for members in passes.values() for number in members]
        views = views_for(view, sources[view.eval_set], recipes, len(passes), processes)
        for how, members in passes.items():
            set_precision(how.tf32)
            found = iter(one_pass(
                views, view.eval_set.name, how, [model for number in members for model in models[number]],
                [columns[number, view.eval_set] for number in members for _ in models[number]],
                max(recipe.data.workers for recipe in recipes), processes, stop))
            for number in members:
                results[number, view.eval_set] = [next(found) for _ in models[number]]

    if processes.is_main:
        report([Finding(str(saved.path), saved.recipe.name, eval_set, saved.size,
                        saved.recipe.data.num_classes, list(sources[eval_set].classes),
                        speeds[number], dict(zip(saved.weights, results[number, eval_set])))
                for number, saved in enumerate(checkpoints) for eval_set in eval_sets[number]],
               per_class=args.per_class, json_file=args.json)


def speed(saved: Saved, model: nn.Module, processes: Processes) -> Throughput:
    """Alone on the device, so that the memory is its own."""
    recipe, device = saved.recipe, processes.device
    set_precision(recipe.engine.tf32)
    with ProgressBar("throughput", WARMUP_PASSES + TIMED_PASSES, shown=processes.is_main) as bar:
        found = throughput(model.to(device), batch_size=recipe.eval.batch_size, size=saved.size,
                           device=device, amp=recipe.engine.amp,
                           channels_last=recipe.engine.channels_last, bar=bar)
    model.cpu()
    if processes.is_main:
        print(f"{saved.path}  {found.images_per_second:.1f} images/s, {found.milliseconds:.2f} "
              f"ms a batch of {found.batch_size} at {saved.size[0]}×{saved.size[1]}, amp "
              f"{recipe.engine.amp}, median of {TIMED_PASSES} passes after {WARMUP_PASSES}; peak "
              f"memory {found.peak_memory}, {describe_device(device)}", flush=True)
    return found


# ---------------------------------------------------------------------------------------------
# The program
# ---------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    def program() -> None:
        args = parse_arguments(arguments)
        with StopRequest() as stop, distributed.joined() as processes:
            run(args, processes, stop)
    return run_program("eval.py", program)


if __name__ == "__main__":
    sys.exit(main())
