"""Exact accuracy of checkpoints over every image of data sets, each counted once.

    python eval.py runs/deit_base-impulse-s0
    python eval.py runs/*/best.pt --data imagenet=/data/imagenet imagenet_r=/data/imagenet-r
    torchrun --nproc_per_node=8 eval.py deit_base_patch16_224.pth --recipe deit_base \\
        --data-dir /data/imagenet

Read it from top to bottom:
    arguments → checkpoints and data sets → models → passes over the pictures → report

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitinit.command_line import Parser, run_program
from vitinit.data.class_subsets import class_indices, imagenet_wnids
from vitinit.data.datasets import DATA_SETS, Source, download, is_wnid, open_split
from vitinit.data.eval_sets import EVAL_SETS, Place, open_to_evaluate
from vitinit.data.images import DataError
from vitinit.data.kept import KeptViews, kept_views
from vitinit.data.loader import EvalViews
from vitinit.data.pipeline import EvaluationBatches
from vitinit.data.to_device import ToDevice
from vitinit.recipe.files import Override, RecipeError, find_recipe, from_dict
from vitinit.recipe.resolve import moved, overrides, resolve_recipe
from vitinit.recipe.sections import Recipe
from vitinit.recipe.values import nearest
from vitinit.runs.folder import checkpoint_file
from vitinit.runs.report import Finding, report
from vitinit.runs.trained import loaded
from vitinit.train import distributed
from vitinit.train.checkpoint import load
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


def named_set(text: str) -> Place:
    """NAME=DIR as --data takes it; `shapes` stands alone."""
    name, _, root = text.partition("=")
    known = [*DATA_SETS, *EVAL_SETS]
    if name not in known:
        raise argparse.ArgumentTypeError(f"there is no data set '{name}'{nearest(name, known)}")
    if bool(root) == (name == "shapes"):
        raise argparse.ArgumentTypeError(
            f"{text}: expected " + ("shapes alone, which lies in no folder" if root else
                                    f"{name}=DIR, the folder of the data set"))
    return Place(name, root)


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


class Subject(NamedTuple):
    """A checkpoint and what is known of it."""

    path: Path
    state: dict[str, Any]
    recipe: Recipe
    classes: list[str] | None   # the model's, in order; None: nobody wrote them down
    size: tuple[int, int]       # (height, width) of the views

    @property
    def weights(self) -> list[str]:
        return [name for name in ("model", "ema") if name == "model" or self.state.get(name)]


def open_checkpoints(args: argparse.Namespace) -> list[Subject]:
    """Every checkpoint with the recipe that says how to evaluate it, and its classes' names."""
    # Tensors stay on disk until a model takes them; an optimiser's are none that one takes.
    files = [(path, {key: part for key, part in load(path, mmap=True).items()
                     if key not in ("optimizer", "scaler")})
             for path in map(checkpoint_file, args.checkpoint)]
    if args.recipe is not None and all("recipe" in state for _, state in files):
        raise RecipeError(f"--recipe {args.recipe}: {files[0][0]} brings its own recipe; --recipe "
                          "is for checkpoints that hold none")
    subjects = []
    for path, state in files:
        if "recipe" in state:
            recipe = moved(from_dict(state["recipe"], str(path), for_evaluation(args)),
                           args.data_dir)
        elif args.recipe is None:
            raise RecipeError(f"{path}: holds no recipe; say with --recipe what it is a checkpoint "
                              "of")
        else:
            recipe = resolve_recipe(find_recipe(args.recipe, REPOSITORY / "recipes"),
                                    overrides(data_dir=args.data_dir, sets=args.set))
        subjects.append(Subject(path, state, recipe, state.get("classes"),
                                args.image_size or recipe.data.image_size))
    return subjects


def for_evaluation(args: argparse.Namespace) -> list[Override]:
    """What of --set applies to a run's own recipe, too; the rest needs a --recipe to apply to."""
    changes = overrides(sets=args.set)
    for change in changes:
        if change.key not in EVALUATION_KEYS and args.recipe is None:
            raise RecipeError(f"{change.text}: the checkpoint brings its own recipe, of which only "
                              f"how to evaluate can change{nearest(change.key, EVALUATION_KEYS)}")
    return [change for change in changes if change.key in EVALUATION_KEYS]


def open_sets(places: Sequence[Sequence[Place]], subjects: Sequence[Subject],
              own: bool) -> dict[Place, Source]:
    """Each data set once; a recipe's `own` must have as many classes as the recipe says."""
    sources: dict[Place, Source] = {}
    for subject, its_places in zip(subjects, places):
        for place in its_places:
            if place not in sources:
                sources[place] = open_split(*place, "val", subject.recipe.data.num_classes) \
                    if own else open_to_evaluate(*place)
    return sources


def columns_of(subject: Subject, place: Place, source: Source) -> Tensor | None:
    """Which of the model's logits belong to the set's classes, (K,); None: all, in this order.

    A model of 1000 classes that nobody named is taken for ImageNet-1K's by a set of wnids.
    """
    count, found, classes = subject.recipe.data.num_classes, source.classes, subject.classes
    if classes is None and count == len(imagenet_wnids()) and all(map(is_wnid, found)):
        classes = imagenet_wnids()
    if classes is None and len(found) != count:
        raise DataError(f"{place}: {len(found)} classes found, and {subject.path} is a model of "
                        f"{count} whose names it does not hold; expected the set that it was "
                        "trained on")
    if classes is None or classes == list(found):
        return None
    try:
        return torch.tensor(class_indices(classes, found))
    except DataError as error:
        raise DataError(f"{place}: {error}; the model is {subject.path}") from None


# ---------------------------------------------------------------------------------------------
# Passes over the pictures
# ---------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """What models must share for an image to be decoded once for all of them."""

    place: Place
    size: tuple[int, int]       # (height, width)
    crop_pct: float
    interpolation: str


class Pass(NamedTuple):
    """What they must share beside it to be evaluated in one pass: how to calculate."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    batch_size: int
    amp: str
    channels_last: bool
    tf32: bool


def look_of(subject: Subject, place: Place) -> Look:
    how = subject.recipe.eval
    return Look(place, subject.size, how.crop_pct, how.interpolation)


def pass_of(subject: Subject) -> Pass:
    data, how, engine = subject.recipe.data, subject.recipe.eval, subject.recipe.engine
    return Pass(data.mean, data.std, how.batch_size, engine.amp, engine.channels_last, engine.tf32)


def views_for(look: Look, source: Source, recipes: Sequence[Recipe], passes: int,
              processes: Processes) -> KeptViews:
    """The views of this process, kept from one pass to the next where there is one.

    recipes: of the models; the one that gives the most room decides.
    """
    views = EvalViews(source, rank=processes.rank, world_size=processes.world_size, size=look.size,
                      crop_pct=look.crop_pct, interpolation=look.interpolation)
    if passes == 1:
        return KeptViews(views, None)
    return kept_views(views, processes.device,
                      on_device_gib=max(recipe.data.on_device_gib for recipe in recipes),
                      cache_gib=max(recipe.eval.cache_gib for recipe in recipes))


def one_pass(views: KeptViews, name: str, how: Pass, models: Sequence[nn.Module],
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
    together = processes.together
    subjects: list[Subject] = together(lambda: open_checkpoints(args))
    numbers = range(len(subjects))
    places = [list(dict.fromkeys(args.data or [Place(subject.recipe.data.name,
                                                     subject.recipe.data.root)]))
              for subject in subjects]
    wanted = dict.fromkeys(place for its_places in places for place in its_places)
    together(lambda: [download(*place) for place in wanted if place.name in DATA_SETS]
             if processes.local_rank == 0 else None)
    sources = together(lambda: open_sets(places, subjects, own=not args.data))
    columns = together(lambda: {(number, place): columns_of(subjects[number], place, sources[place])
                                for number in numbers for place in places[number]})

    # Models, on the CPU until they are needed. --------------------------------------------------
    models = together(lambda: [[loaded(subject.recipe, subject.state, subject.path, name,
                                       subject.size) for name in subject.weights]
                               for subject in subjects])
    subjects = [subject._replace(state=dict.fromkeys(subject.weights, True)) for subject in subjects]
    models = [[torch.compile(model) if subject.recipe.engine.compile else model
               for model in its_models] for subject, its_models in zip(subjects, models)]
    speeds = [speed(subject, its_models[0], processes) if args.throughput else None
              for subject, its_models in zip(subjects, models)]

    # One decoding of a data set for all models that look at it alike, one pass for all of them that
    # calculate alike. ---------------------------------------------------------------------------
    looks: dict[Look, dict[Pass, list[int]]] = {}
    for number in numbers:
        for place in places[number]:
            passes = looks.setdefault(look_of(subjects[number], place), {})
            passes.setdefault(pass_of(subjects[number]), []).append(number)
    results: dict[tuple[int, Place], list[Evaluation]] = {}
    for look, passes in looks.items():
        recipes = [subjects[number].recipe for members in passes.values() for number in members]
        views = views_for(look, sources[look.place], recipes, len(passes), processes)
        for how, members in passes.items():
            set_precision(how.tf32)
            found = iter(one_pass(
                views, look.place.name, how, [model for number in members for model in models[number]],
                [columns[number, look.place] for number in members for _ in models[number]],
                max(recipe.data.workers for recipe in recipes), processes, stop))
            for number in members:
                results[number, look.place] = [next(found) for _ in models[number]]

    if processes.is_main:
        report([Finding(str(subject.path), subject.recipe.name, place, subject.size,
                        subject.recipe.data.num_classes, list(sources[place].classes),
                        speeds[number], dict(zip(subject.weights, results[number, place])))
                for number, subject in enumerate(subjects) for place in places[number]],
               per_class=args.per_class, json_file=args.json)


def speed(subject: Subject, model: nn.Module, processes: Processes) -> Throughput:
    """Alone on the device, so that the memory is its own."""
    recipe, device = subject.recipe, processes.device
    set_precision(recipe.engine.tf32)
    with ProgressBar("throughput", WARMUP_PASSES + TIMED_PASSES, shown=processes.is_main) as bar:
        found = throughput(model.to(device), batch_size=recipe.eval.batch_size, size=subject.size,
                           device=device, amp=recipe.engine.amp,
                           channels_last=recipe.engine.channels_last, bar=bar)
    model.cpu()
    if processes.is_main:
        print(f"{subject.path}  {found.images_per_second:.1f} images/s, {found.milliseconds:.2f} "
              f"ms a batch of {found.batch_size} at {subject.size[0]}×{subject.size[1]}, amp "
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
    distributed.leave_program(main())
