"""Evaluate checkpoints exactly: every image of a data set counts once.

    python eval.py runs/deit_base-impulse-s0
    python eval.py runs/*/best.pt --data imagenet=/data/imagenet imagenet_r=/data/imagenet-r
    torchrun --nproc_per_node=8 eval.py deit_base_patch16_224.pth --recipe deit_base \\
        --data-dir /data/imagenet

Read this file from top to bottom:
    arguments → checkpoints and data sets → models → passes over the images → report

A run folder (its last.pt is read) and the checkpoints in it contain their recipe; the model and its
moving average (EMA) are evaluated. For any other checkpoint, such as DeiT's own, --recipe describes
the model, unless it is a folder of transformers with its config.json; a line says what is assumed
that tensors do not show. Without --data each checkpoint is evaluated on the validation set of its
recipe. A single result is printed as a line, several as a table. One JSON object per checkpoint and
data set follows, or is written to the FILE of --json.

Two further sets are parts of a run's own training set, and go by names of their own: `train`, the
images that it was trained on, without augmentation (--train-images); and `held_out`, the validation
set of a run with data.held_out_per_class. --set data.held_out_per_class=0 evaluates such a run on
the test images of its data set.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)     # Ctrl-C during the imports prints no traceback

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitinit.command_line import Parser, run_program
from vitinit.data.datasets import DATA_SETS, Source, download, is_wnid, open_split, oriented
from vitinit.data.eval_sets import (EVAL_SETS, EvaluatedSet, NamedSet, TrainingPart, class_indices,
                                    imagenet_wnids, open_to_evaluate)
from vitinit.data.images import DataError
from vitinit.data.kept import KeptViews, kept_views
from vitinit.data.loader import EvalViews
from vitinit.data.pipeline import EvaluationBatches
from vitinit.data.to_device import ToDevice
from vitinit.data.workers import start_fork_server
from vitinit.recipe.files import RECIPES, Override, RecipeError, find_recipe
from vitinit.recipe.resolve import moved, overrides
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

HELD_OUT = "data.held_out_per_class"    # --set may only change it to 0, see `changeable_keys`
# The keys that --set may change in a recipe that a checkpoint contains: how it is evaluated.
EVALUATION_KEYS = ("eval.crop_pct", "eval.interpolation", "eval.batch_size", "eval.cache_gib",
                   "data.workers", "data.on_device_gib", HELD_OUT, "engine.amp", "engine.compile",
                   "engine.channels_last", "engine.tf32")


# ---------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------


def named_set(text: str) -> NamedSet:
    """Parse an argument of --data: NAME=DIR, or `shapes` alone, which needs no folder."""
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
    """Parse the argument of --image-size, N or H,W in pixels → (height, width)."""
    sides = text.split(",")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"{text}: expected a number of pixels, such as 288, or "
                                         "height and width, such as 192,256")
    return int(sides[0]), int(sides[-1])


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; RecipeError for options that contradict each other."""
    parser = Parser(prog="eval.py", description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="+",
                        help="run folders and checkpoint files")
    parser.add_argument("--data", type=named_set, nargs="+", action="extend", metavar="NAME=DIR",
                        help=f"data sets: {', '.join([*DATA_SETS, *EVAL_SETS])}")
    parser.add_argument("--train-images", action="store_true",
                        help="evaluate each model on the images that it was trained on, without "
                             "augmentation; with --data, on these too")
    parser.add_argument("--data-dir", help="data.root: folder of the recipe's own data set")
    parser.add_argument("--image-size", type=image_size, metavar="N or H,W",
                        help="evaluate at another resolution than the recipe's")
    parser.add_argument("--recipe", help="describes checkpoints that contain no recipe")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="override any key of the recipe given by --recipe, and of any recipe "
                             f"{', '.join(EVALUATION_KEYS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON to this file")
    parser.add_argument("--per-class", action="store_true", help="print top-1 of every class")
    parser.add_argument("--throughput", action="store_true",
                        help="print images/s of each model's forward pass, and its memory")
    args = parser.parse_args(arguments)
    if args.data and args.data_dir is not None and not args.train_images:
        raise RecipeError(f"--data-dir {args.data_dir}: the folder of the recipe's own data set, "
                          "which --data replaces; expected one of the two")
    if args.json and (os.path.isdir(args.json) or not os.path.isdir(args.json.parent)):
        raise RecipeError(f"--json {args.json}: expected a file in a folder that exists")
    return args


# ---------------------------------------------------------------------------------------------
# Checkpoints and data sets
# ---------------------------------------------------------------------------------------------


def open_checkpoints(args: argparse.Namespace) -> list[Saved]:
    """Open every checkpoint, with the recipe by which it is evaluated and its class names.

    Raises RecipeError or CheckpointError for the first one that cannot be opened, and RecipeError
    if --recipe is given but no checkpoint needs it.
    """
    recipe = None if args.recipe is None else find_recipe(args.recipe, RECIPES)
    changes = overrides(sets=args.set)
    found = [open_saved(path, recipe=recipe, changes=changes, image_size=args.image_size,
                        changeable=changeable_keys(changes, args)) for path in args.checkpoint]
    if recipe is not None and all(saved.brings_recipe for saved in found):
        raise RecipeError(f"--recipe {args.recipe}: {found[0].path} brings its own recipe; --recipe "
                          "is for checkpoints that hold none")
    return [saved._replace(recipe=moved(saved.recipe, args.data_dir)) for saved in found]


def changeable_keys(changes: Sequence[Override], args: argparse.Namespace) -> list[str]:
    """Those of EVALUATION_KEYS that `changes` may change in a recipe which a checkpoint contains.

    Which images were held out was settled before the training, so HELD_OUT can only become 0: the
    model is then evaluated on the data set's own test images. Raises RecipeError for another value,
    unless it is for the recipe of --recipe, and where other options name what to evaluate on.
    """
    keys = list(EVALUATION_KEYS)
    for change in changes:
        if change.key != HELD_OUT:
            continue
        if change.value != 0 and args.recipe is None:
            raise RecipeError(f"{change.text}: a run's held-out images were chosen before it was "
                              "trained; expected 0, for the test images of its data set")
        if change.value != 0:
            keys = [key for key in keys if key != HELD_OUT]
        elif args.data or args.train_images:
            option = "--train-images" if args.train_images else "--data"
            raise RecipeError(f"{change.text}: chooses the validation set, in place of which {option} "
                              "names what to evaluate on; expected one of the two")
    return keys


def sets_of(saved: Saved, args: argparse.Namespace) -> list[EvaluatedSet]:
    """What a checkpoint is evaluated on: its training images, the sets of --data, or both.

    Without both options it is the validation set of its recipe.
    """
    data = saved.recipe.data
    whole = NamedSet(data.name, data.root)
    chosen: list[EvaluatedSet] = list(args.data or [])
    if args.train_images:
        chosen.insert(0, TrainingPart("train", whole, data.num_classes, data.subset,
                                      data.images_per_class, data.held_out_per_class,
                                      data.subset_seed))
    elif not chosen and data.held_out_per_class:     # how many are trained on does not matter here
        chosen.append(TrainingPart("held_out", whole, data.num_classes, 1.0, 0,
                                   data.held_out_per_class, data.subset_seed))
    return list(dict.fromkeys(chosen or [whole]))


def open_sets(eval_sets: Sequence[Sequence[EvaluatedSet]], checkpoints: Sequence[Saved],
              own: bool) -> dict[EvaluatedSet, Source]:
    """Open each data set once.

    eval_sets: those of each checkpoint. own: whether they are the recipes' own validation sets,
    whose number of classes must then be data.num_classes. Raises DataError if a data set cannot be
    opened.
    """
    sources: dict[EvaluatedSet, Source] = {}
    for saved, group in zip(checkpoints, eval_sets):
        for eval_set in group:
            if eval_set in sources:
                continue
            if isinstance(eval_set, TrainingPart):
                sources[eval_set] = eval_set.open()
            elif own:
                sources[eval_set] = open_split(*eval_set, "val", saved.recipe.data.num_classes)
            else:
                sources[eval_set] = open_to_evaluate(*eval_set)
    return sources


def download_sets(eval_sets: Iterable[EvaluatedSet]) -> None:
    """Download each data set, whole, of which images are used, if it is one that can be downloaded."""
    whole = [one.data_set if isinstance(one, TrainingPart) else one for one in eval_sets]
    for name, root in dict.fromkeys(whole):
        if name in DATA_SETS:
            download(name, root)


def columns_of(saved: Saved, eval_set: EvaluatedSet, source: Source) -> Tensor | None:
    """The indices (K,) int64 of the logits that belong to the data set's K classes, in order.

    None if the model has exactly these classes in this order. A model of 1000 classes whose names
    are not recorded counts as an ImageNet-1K model if the data set's classes are ImageNet's synset
    ids. Raises DataError if the model does not know a class of the data set.
    """
    count, found, classes = saved.recipe.data.num_classes, source.classes, saved.classes
    if classes is None and count == len(imagenet_wnids()) and all(map(is_wnid, found)):
        classes = imagenet_wnids()
    if classes is None and len(found) != count:
        raise DataError(f"{eval_set}: {len(found)} classes found, and {saved.name} is a model of "
                        f"{count} whose names it does not hold; expected the set that it was "
                        "trained on")
    if classes is None or classes == list(found):
        return None
    try:
        return torch.tensor(class_indices(classes, found))
    except DataError as error:
        raise DataError(f"{eval_set}: {error}; the model is {saved.name}") from None


# ---------------------------------------------------------------------------------------------
# Passes over the images
# ---------------------------------------------------------------------------------------------


class ViewSettings(NamedTuple):
    """The settings that models must share for each image to be decoded only once for all of them."""

    eval_set: EvaluatedSet
    size: tuple[int, int]       # (height, width)
    crop_pct: float
    interpolation: str
    apply_exif_orientation: bool


class PassSettings(NamedTuple):
    """The settings that models must also share to be evaluated in one pass over the images."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    batch_size: int
    amp: str
    channels_last: bool
    tf32: bool


def view_settings_of(saved: Saved, eval_set: EvaluatedSet) -> ViewSettings:
    """Those of one checkpoint on one data set."""
    how = saved.recipe.eval
    return ViewSettings(eval_set, saved.size, how.crop_pct, how.interpolation,
                        saved.recipe.data.apply_exif_orientation)


def pass_settings_of(saved: Saved) -> PassSettings:
    """Those of one checkpoint."""
    data, how, engine = saved.recipe.data, saved.recipe.eval, saved.recipe.engine
    return PassSettings(data.mean, data.std, how.batch_size, engine.amp, engine.channels_last,
                        engine.tf32)


def views_for(view: ViewSettings, source: Source, recipes: Sequence[Recipe], passes: int,
              processes: Processes) -> KeptViews:
    """The evaluation views of this process, cached if more than one pass reads them.

    recipes: those of the models; the largest of their data.on_device_gib and eval.cache_gib apply.
    """
    views = EvalViews(oriented(source, view.apply_exif_orientation), rank=processes.rank,
                      world_size=processes.world_size, size=view.size, crop_pct=view.crop_pct,
                      interpolation=view.interpolation)
    if passes == 1:
        return KeptViews(views, None)
    return kept_views(views, processes.device,
                      on_device_gib=max(recipe.data.on_device_gib for recipe in recipes),
                      cache_gib=max(recipe.eval.cache_gib for recipe in recipes))


def one_pass(views: KeptViews, name: str, how: PassSettings, models: Sequence[nn.Module],
             columns: Sequence[Tensor | None], workers: int, processes: Processes,
             stop: StopRequest) -> list[Evaluation]:
    """Evaluate `models` over all images of the data set `name`; see `evaluate` for `columns`."""
    prepare = ToDevice(processes.device, mean=how.mean, std=how.std,
                       channels_last=how.channels_last)
    batches = EvaluationBatches(views, batch_size=how.batch_size, workers=workers, prepare=prepare)
    with (ProgressBar(f"validate {name}", len(batches), shown=processes.is_main) as bar,
          memory_for("eval.batch_size", how.batch_size, processes.rank)):
        models = [model.to(processes.device, memory_format=prepare.format) for model in models]
        return evaluate(models, bar.over(batches), columns=columns, amp=how.amp, stop=stop,
                        num_classes=len(views.views.source.classes), processes=processes)


def run(args: argparse.Namespace, processes: Processes, stop: StopRequest) -> None:
    """Evaluate all checkpoints on all data sets and report the results."""
    on_all = processes.on_all
    checkpoints: list[Saved] = on_all(lambda: open_checkpoints(args))
    start_fork_server(max(saved.recipe.data.workers for saved in checkpoints))
    numbers = range(len(checkpoints))
    eval_sets = [sets_of(saved, args) for saved in checkpoints]
    processes.on_each_machine(
        lambda: download_sets(eval_set for group in eval_sets for eval_set in group))
    sources = on_all(lambda: open_sets(eval_sets, checkpoints, own=not args.data))
    for line in dict.fromkeys(source.left_out for source in sources.values() if source.left_out):
        if processes.is_main:
            print(line, flush=True)
    columns = on_all(lambda: {
        (number, eval_set): columns_of(checkpoints[number], eval_set, sources[eval_set])
        for number in numbers for eval_set in eval_sets[number]})

    # Models, on the CPU until they are needed. --------------------------------------------------
    models = on_all(lambda: [[saved.model(name) for name in saved.weights]
                             for saved in checkpoints])
    if processes.is_main:
        for saved, group in zip(checkpoints, models):
            if not saved.brings_recipe:
                print(saved.assumptions(group[0]), file=sys.stderr, flush=True)
    # The checkpoints' own tensors are no longer needed, only the names of their weights.
    checkpoints = [saved._replace(state=dict.fromkeys(saved.weights, True))
                   for saved in checkpoints]
    models = [[torch.compile(model) if saved.recipe.engine.compile else model
               for model in group] for saved, group in zip(checkpoints, models)]
    speeds = [speed(saved, group[0], processes) if args.throughput else None
              for saved, group in zip(checkpoints, models)]

    # Decode a data set once for all models of equal view settings; evaluate those of equal pass
    # settings in one pass. ----------------------------------------------------------------------
    by_view: dict[ViewSettings, dict[PassSettings, list[int]]] = {}
    for number in numbers:
        for eval_set in eval_sets[number]:
            passes = by_view.setdefault(view_settings_of(checkpoints[number], eval_set), {})
            passes.setdefault(pass_settings_of(checkpoints[number]), []).append(number)
    results: dict[tuple[int, EvaluatedSet], list[Evaluation]] = {}
    for view, passes in by_view.items():
        recipes = [checkpoints[number].recipe for members in passes.values() for number in members]
        views = views_for(view, sources[view.eval_set], recipes, len(passes), processes)
        for how, members in passes.items():
            set_precision(how.tf32)
            found = iter(one_pass(
                views, view.eval_set.name, how,
                [model for number in members for model in models[number]],
                [columns[number, view.eval_set] for number in members for _ in models[number]],
                max(recipe.data.workers for recipe in recipes), processes, stop))
            for number in members:
                results[number, view.eval_set] = [next(found) for _ in models[number]]

    if processes.is_main:
        report([Finding(saved.name, saved.recipe.name, eval_set, saved.size,
                        saved.recipe.data.num_classes, list(sources[eval_set].classes),
                        speeds[number], dict(zip(saved.weights, results[number, eval_set])))
                for number, saved in enumerate(checkpoints) for eval_set in eval_sets[number]],
               per_class=args.per_class, json_file=args.json)


def speed(saved: Saved, model: nn.Module, processes: Processes) -> Throughput:
    """Measure and print the speed of a model's forward pass.

    The model is alone on the device, so that the memory reported is its own.
    """
    recipe, device = saved.recipe, processes.device
    set_precision(recipe.engine.tf32)
    with ProgressBar("throughput", WARMUP_PASSES + TIMED_PASSES, shown=processes.is_main) as bar:
        found = throughput(model.to(device), batch_size=recipe.eval.batch_size, size=saved.size,
                           device=device, amp=recipe.engine.amp,
                           channels_last=recipe.engine.channels_last, bar=bar)
    model.cpu()
    if processes.is_main:
        print(f"{saved.name}  {found.images_per_second:.1f} images/s, {found.milliseconds:.2f} "
              f"ms per batch of {found.batch_size} at {saved.size[0]}×{saved.size[1]}, amp "
              f"{recipe.engine.amp}, median of {TIMED_PASSES} passes after {WARMUP_PASSES}; peak "
              f"memory {found.peak_memory}, {describe_device(device)}", flush=True)
    return found


# ---------------------------------------------------------------------------------------------
# The program
# ---------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Run the program with these arguments (default: the command line); return the exit status."""
    def program() -> None:
        args = parse_arguments(arguments)
        with StopRequest() as stop, distributed.joined() as processes:
            run(args, processes, stop)
    return run_program("eval.py", program)


if __name__ == "__main__":
    sys.exit(main())
