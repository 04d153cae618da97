"""Evaluate checkpoints exactly: every image of a data set counts once.

    python eval.py runs/deit_base-impulse-s0
    python eval.py runs/*/best.pt --data imagenet=/data/imagenet imagenet_r=/data/imagenet-r
    torchrun --nproc_per_node=8 eval.py deit_base_patch16_224.pth --recipe deit_base \\
        --data-dir /data/imagenet

Read this file from top to bottom:
    arguments → checkpoints and data sets → for each data set, for each model → report

A run folder (its last.pt is read) and the checkpoints in it contain their recipe; the model and its
moving average (EMA) are evaluated. For any other checkpoint, such as DeiT's own, --recipe describes
the model, unless it is a folder of transformers with its config.json; a line says what is assumed
that tensors do not show. Without --data each checkpoint is evaluated on the validation set of its
recipe. A single result is printed as a line, several as a table. One JSON object per checkpoint and
data set follows, or is written to the FILE of --json.

Two further sets are parts of a run's own training set, and go by names of their own: `train`, the
images that it was trained on, without augmentation (--train-images); and `held_out`, the validation
set of a run with data.held_out_per_class, whose test images go by --data like any other set.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)     # Ctrl-C during the imports prints no traceback

import argparse
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from vitinit.command_line import Parser, run_program
from vitinit.data.augment import ToDevice
from vitinit.data.datasets import DATA_SETS, Source, download, is_wnid, open_split, oriented
from vitinit.data.eval_sets import (EVAL_SETS, EvaluatedSet, NamedSet, TrainingPart, class_indices,
                                    imagenet_wnids, open_to_evaluate, own_set)
from vitinit.data.images import DataError
from vitinit.data.loader import EvalViews, start_fork_server
from vitinit.data.pipeline import EvaluationBatches, KeptViews
from vitinit.recipe.files import RecipeError, overrides, with_data
from vitinit.recipe.values import nearest
from vitinit.runs.report import Finding, report
from vitinit.runs.saved import Saved, add_options, open_all
from vitinit.train import distributed
from vitinit.train.device import describe_device, memory_for
from vitinit.train.distributed import DAY, Processes
from vitinit.train.engine import Evaluation, evaluate, set_precision
from vitinit.train.interruption import StopRequest
from vitinit.train.metrics import ProgressBar
from vitinit.train.throughput import TIMED_PASSES, WARMUP_PASSES, Throughput, throughput

# The keys that --set may change in a recipe that a checkpoint contains: how it is evaluated.
EVALUATION_KEYS = ("eval.crop_pct", "eval.interpolation", "eval.batch_size", "eval.cache_gib",
                   "data.workers", "data.on_device_gib", "engine.amp", "engine.compile",
                   "engine.channels_last", "engine.tf32")


def named_set(text: str) -> NamedSet:
    """Parse an argument of --data: NAME=DIR, or `shapes` alone, which needs no folder."""
    name, _, root = text.partition("=")
    if name not in (known := [*DATA_SETS, *EVAL_SETS]):
        raise argparse.ArgumentTypeError(f"there is no data set '{name}'{nearest(name, known)}")
    if bool(root) == (name == "shapes"):
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=DIR, or shapes without a folder")
    return NamedSet(name, root)


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
    add_options(parser, EVALUATION_KEYS)
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


def sets_of(saved: Saved, args: argparse.Namespace) -> list[EvaluatedSet]:
    """What a checkpoint is evaluated on: its training images, the sets of --data, or both.

    Without both options it is the validation set of its recipe.
    """
    data = saved.recipe.data
    chosen = [TrainingPart("train", data)] * args.train_images + (args.data or [])
    return list(dict.fromkeys(chosen or [own_set(data)]))


def open_sets(users: dict[EvaluatedSet, Saved], own: bool, processes: Processes
              ) -> dict[EvaluatedSet, Source]:
    """Open each data set; one that can be downloaded is, if it is not there.

    users: for each set a checkpoint that is evaluated on it. own: whether they are the recipes' own
    validation sets, which must then have the model's number of classes.
    """
    folders = dict.fromkeys((one.data.name, one.root) if isinstance(one, TrainingPart) else one
                            for one in users)
    with processes.together(within=DAY):
        for name, root in folders:
            if name in DATA_SETS and processes.local_rank == 0:
                download(name, root)
    with processes.together():
        sources: dict[EvaluatedSet, Source] = {
            one: one.open() if isinstance(one, TrainingPart) else
            open_split(*one, "val", saved.recipe.data.num_classes) if own else
            open_to_evaluate(*one) for one, saved in users.items()}
    for line in dict.fromkeys(source.left_out for source in sources.values() if source.left_out):
        if processes.is_main:
            print(line, flush=True)
    return sources


def columns_of(saved: Saved, eval_set: EvaluatedSet, source: Source) -> Tensor | None:
    """The indices (K,) int64 of the logits that belong to the data set's K classes, in order.

    None if the model has exactly these classes in this order. A model of 1000 classes whose names
    are not recorded counts as an ImageNet-1K model if the data set's classes are ImageNet's synset
    ids. Raises DataError if the model does not know a class of the data set.
    """
    count, found, classes = saved.recipe.data.num_classes, source.classes, saved.classes
    if saved.state.get("classes") is None and count == len(imagenet_wnids()):
        classes = imagenet_wnids() if all(map(is_wnid, found)) else None
    if classes is None and len(found) != count:
        raise DataError(f"{eval_set}: {len(found)} classes found, and {saved.name} is a model of "
                        f"{count} whose names it does not hold; expected the set that it was "
                        "trained on")
    if classes is None or list(classes) == list(found):
        return None
    try:
        return torch.tensor(class_indices(classes, found))
    except DataError as error:
        raise DataError(f"{eval_set}: {error}; the model is {saved.name}") from None


def run(args: argparse.Namespace, processes: Processes, stop: StopRequest) -> None:
    """Evaluate all checkpoints on all data sets and report the results."""
    with processes.together():
        opened = open_all(args.checkpoint, recipe=args.recipe, changes=overrides(sets=args.set),
                          changeable=EVALUATION_KEYS, image_size=args.image_size)
    checkpoints = opened if args.data_dir is None else [
        saved._replace(recipe=with_data(saved.recipe, root=args.data_dir)) for saved in opened]
    start_fork_server(max(saved.recipe.data.workers for saved in checkpoints))
    pairs = [(number, one) for number, saved in enumerate(checkpoints)
             for one in sets_of(saved, args)]
    sources = open_sets({one: checkpoints[number] for number, one in pairs}, not args.data,
                        processes)
    with processes.together():
        columns = {(number, one): columns_of(checkpoints[number], one, sources[one])
                   for number, one in pairs}
    models, speeds = [], []                          # on the CPU until they are needed
    for saved in checkpoints:
        with processes.together():
            own = {name: saved.model(name) for name in saved.weights}
        if processes.is_main and not saved.brings_recipe:
            print(saved.assumptions(own["model"]), file=sys.stderr, flush=True)
        models.append({name: torch.compile(model) if saved.recipe.engine.compile else model
                       for name, model in own.items()})
        speeds.append(speed(saved, models[-1]["model"], processes) if args.throughput else None)

    findings: dict[tuple[int, EvaluatedSet], Finding] = {}
    for eval_set, source in sources.items():
        kept: dict[tuple, KeptViews] = {}            # how views are made → the views, decoded once
        for number, saved in enumerate(checkpoints):
            if (number, eval_set) in columns:
                results = evaluate_on(eval_set.name, source, saved, models[number],
                                      columns[number, eval_set], kept, processes, stop)
                findings[number, eval_set] = Finding(
                    saved.name, saved.recipe.name, eval_set, saved.size,
                    saved.recipe.data.num_classes, list(source.classes), speeds[number], results)
    if processes.is_main:
        report([findings[pair] for pair in pairs], per_class=args.per_class, json_file=args.json)


def evaluate_on(title: str, source: Source, saved: Saved, models: dict[str, nn.Module],
                columns: Tensor | None, kept: dict[tuple, KeptViews], processes: Processes,
                stop: StopRequest) -> dict[str, Evaluation]:
    """Evaluate a checkpoint's models in one pass over a data set.

    columns: see `columns_of`. kept: the views that were made of the set so far, by how; those of
    this pass are added. What fits in data.on_device_gib or eval.cache_gib is decoded only once.
    """
    data, how, engine = saved.recipe.data, saved.recipe.eval, saved.recipe.engine
    view = dict(size=saved.size, crop_pct=how.crop_pct, interpolation=how.interpolation)
    key = (*view.values(), data.apply_exif_orientation)
    if key not in kept:
        views = EvalViews(oriented(source, data.apply_exif_orientation), **view,
                          rank=processes.rank, world_size=processes.world_size)
        kept[key] = KeptViews(views, processes.device, on_device_gib=data.on_device_gib,
                              cache_gib=how.cache_gib)
    prepare = ToDevice(processes.device, mean=data.mean, std=data.std,
                       channels_last=engine.channels_last)
    batches = EvaluationBatches(kept[key], batch_size=how.batch_size, workers=data.workers,
                                prepare=prepare)
    set_precision(engine.tf32)
    with (ProgressBar(f"validate {title}", len(batches), shown=processes.is_main) as bar,
          memory_for("eval.batch_size", how.batch_size, processes.rank)):
        on_device = [model.to(processes.device, memory_format=prepare.format)
                     for model in models.values()]
        found = evaluate(on_device, bar.over(batches), columns=columns, stop=stop,
                         amp=engine.amp, num_classes=len(source.classes), processes=processes)
    return dict(zip(models, found))


def speed(saved: Saved, model: nn.Module, processes: Processes) -> Throughput:
    """Measure and print the speed of a model's forward pass, alone on the device."""
    engine, device = saved.recipe.engine, processes.device
    set_precision(engine.tf32)
    with ProgressBar("throughput", WARMUP_PASSES + TIMED_PASSES, shown=processes.is_main) as bar:
        found = throughput(model.to(device), batch_size=saved.recipe.eval.batch_size,
                           size=saved.size, device=device, amp=engine.amp,
                           channels_last=engine.channels_last, bar=bar)
    model.cpu()                                      # the next one's memory is to be its own
    if processes.is_main:
        print(f"{saved.name}  {found.images_per_second:.1f} images/s, {found.milliseconds:.2f} "
              f"ms per batch of {found.batch_size} at {saved.size[0]}×{saved.size[1]}, amp "
              f"{engine.amp}, median of {TIMED_PASSES} passes after {WARMUP_PASSES}; peak "
              f"memory {found.peak_memory}, {describe_device(device)}", flush=True)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the program with these arguments (default: the command line); return the exit status."""
    def program() -> None:
        args = parse_arguments(arguments)
        with StopRequest() as stop, distributed.joined() as processes:
            run(args, processes, stop)
    return run_program("eval.py", program)


if __name__ == "__main__":
    sys.exit(main())
