"""Evaluate checkpoints exactly: every image of a data set counts once.

    python eval.py runs/deit_base-impulse-s0
    python eval.py runs/*/best.pt --data imagenet=/data/imagenet imagenet_r=/data/imagenet-r
    torchrun --nproc_per_node=8 eval.py deit_base_patch16_224.pth --recipe deit_base \\
        --data-dir /data/imagenet

An installed package has the same program as `vitinit eval`.

A run folder (its last.pt is read) and the checkpoints in it contain their recipe; the model and its
moving average (EMA) are evaluated. For any other checkpoint, such as DeiT's own, --recipe describes
the model, unless it is a folder of transformers with its config.json; a line says what is assumed
that tensors do not show. Without --data each checkpoint is evaluated on the validation set of its
recipe. Classes are matched by name; --classes states those of checkpoints without names, whose
outputs are else taken to be in the data set's order. --fit-temperature stores beside a checkpoint
what its logits are divided by from then on, here and by `vitinit predict`. --flips and --shifts
average the logits of several views of each image, which is said beside each number. A single result
is printed as a line per set of weights, several as a table. One JSON object per checkpoint and data
set is written to the FILE of --json, or printed after them by --json -.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..base.messages import nearest, say, times
from ..data.classes import class_indices
from ..data.datasets import (
    DATA_SETS,
    EVAL_SETS,
    data_set_of,
    download,
    is_wnid,
    unnamed_classes,
)
from ..data.images import DataError
from ..data.loader import prepare_workers
from ..data.pipeline import EvaluationBatches
from ..data.sources import Source
from ..recipe.files import RecipeError, overrides
from ..recipe.sections import EngineSection
from ..runs.data import border_of, evaluation_batches, require_labels, validation_bar
from ..runs.load import Saved, open_saved
from ..runs.model import compiled, task_of
from ..tasks import Task
from ..train import distributed
from ..train.device import memory_for
from ..train.distributed import Processes
from ..train.interruption import StopRequest
from ..train.loop import set_precision
from ..train.metrics import Evaluation
from ..watch.survey import dark_in_16_bits
from .shared.command_line import Output, Parser, add_options, run_program
from .shared.evaluated import EvaluatedSet, own_set, require_same_images, trained_set
from .shared.orders import order_taken
from .shared.results import Finding, print_results
from .shared.sureness import Sureness, require_one_label, store_temperatures
from .shared.views import AIRBENCH, AS_IT_IS, Shift, Views, in_words, parse_shifts, reach_of

# The keys that --set may change in a recipe that a checkpoint contains: how it is evaluated.
EVALUATION_KEYS = (
    "eval.crop_pct",
    "eval.interpolation",
    "eval.batch_size",
    "eval.cache_gib",
    "data.workers",
    "data.on_device_gib",
    "engine.amp",
    "engine.compile",
    "engine.channels_last",
    "engine.tf32",
    "task.options.threshold",
)


def named_set(text: str) -> EvaluatedSet:
    """Parse an argument of --data: NAME=DIR, or the name alone of a set that is drawn."""
    name, _, root = text.partition("=")
    known = [*DATA_SETS, *EVAL_SETS]
    if name not in known:
        raise argparse.ArgumentTypeError(f"there is no data set '{name}'{nearest(name, known)}")
    drawn = data_set_of(name).drawn
    if bool(root) == drawn:
        expected = f"{name}, which needs no folder" if drawn else f"{name}=DIR"
        raise argparse.ArgumentTypeError(f"{text}: expected {expected}")
    return EvaluatedSet(name, root, whole=name in ("image_folder", "image_list"))


def parse_arguments(arguments: list[str] | None, name: str = "eval.py") -> argparse.Namespace:
    """Parse the command line; RecipeError for options that contradict each other."""
    parser = Parser(prog=name, description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="+", help="run folders and checkpoint files")
    parser.add_argument(
        "--data",
        type=named_set,
        nargs="+",
        action="extend",
        metavar="NAME=DIR",
        help=f"data sets: {', '.join([*DATA_SETS, *EVAL_SETS])}",
    )
    parser.add_argument(
        "--train-images",
        action="store_true",
        help="evaluate on the images that each was trained on; with --data, too",
    )
    parser.add_argument("--data-dir", help="data.root: folder of the recipe's own data set")
    add_options(parser, EVALUATION_KEYS)
    parser.add_argument("--flips", action="store_true", help="view each image also mirrored")
    parser.add_argument(
        "--shifts",
        type=parse_shifts,
        nargs="?",
        default=AS_IT_IS,
        const=AIRBENCH,
        metavar="'DOWN,RIGHT:WEIGHT …'",
        help="view each image several times, shifted by pixels over a border that mirrors it; by "
        f"default airbench's '{' '.join(map(str, AIRBENCH))}'",
    )
    parser.add_argument(
        "--json",
        type=Output(".json", ".jsonl", prints=True),
        metavar="FILE",
        help="write the results as JSON to this file; -: to the terminal",
    )
    parser.add_argument(
        "--per-class", action="store_true", help="print top-1, or average precision, of every class"
    )
    parser.add_argument(
        "--fit-temperature",
        action="store_true",
        help="fit on validation images what logits are divided by, and store it for predict",
    )
    args = parser.parse_args(arguments)
    views = in_words(args.shifts, args.flips)
    if args.fit_temperature and (args.data or args.train_images or views):
        raise RecipeError(
            "--fit-temperature: is fitted on one view of each image that the recipe validates on; "
            "expected none of --data, --train-images, --flips and --shifts, and --data-dir if the "
            "images are elsewhere"
        )
    if args.data and args.data_dir is not None and not args.train_images:
        raise RecipeError(
            f"--data-dir {args.data_dir}: the folder of the recipe's own data set, "
            "which --data replaces; expected one of the two"
        )
    return args


def open_set(eval_set: EvaluatedSet, processes: Processes) -> Source:
    """Open a data set; it is downloaded first if it is not there and can be."""
    name = eval_set.name if eval_set.data is None else eval_set.data.name
    with processes.together():
        if name in DATA_SETS and processes.local_rank == 0:
            download(name, eval_set.root)
    with processes.together():
        source = eval_set.open()
    if source.left_out:
        processes.say(source.left_out)
    dark = dark_in_16_bits(source.some_paths())
    if dark:
        processes.say(f"warning {dark}")
    return source


def known_classes(saved: Saved, labels: Sequence[str]) -> Sequence[str] | None:
    """The class of each logit of a model, or None if nothing names them. A model of 1000 classes
    that no synset ids name counts as an ImageNet-1K model if these labels, of a data set, are
    ImageNet's synset ids.
    """
    classes = saved.classes
    named = saved.state.get("classes") is not None
    if classes is not None and all(map(is_wnid, classes)):
        named = True
    if not named and all(map(is_wnid, labels)):  # config.json may call them by words
        return unnamed_classes(saved.recipe.data.num_classes) or classes
    return classes


def columns_of(saved: Saved, eval_set: EvaluatedSet, source: Source) -> Tensor | None:
    """The indices (K,) int64 of the logits that belong to the data set's K classes, in order; None
    if the model has exactly these classes in this order, or as many without names. Raises DataError
    if the model does not know a class of the data set.
    """
    count = saved.recipe.data.num_classes
    labels = source.classes
    classes = known_classes(saved, labels)
    if count == 0:
        raise DataError(
            f"{saved.name}: learned to reconstruct images, and has no classes to "
            "evaluate; init.checkpoint starts a classifier from it"
        )
    if classes is not None and len(classes) != count:
        raise DataError(
            f"{saved.name}: is a model of {count} classes with {len(classes)} names; expected a "
            "name of each"
        )
    if classes is None and len(labels) != count:
        raise DataError(
            f"{eval_set}: {len(labels)} classes found, and {saved.name} is a model of "
            f"{count} whose names it does not hold; expected the set that it was "
            "trained on"
        )
    if classes is None or list(classes) == list(labels):
        return None
    try:
        return torch.tensor(class_indices(classes, labels))
    except DataError as error:
        raise DataError(f"{eval_set}: {error}; the model is {saved.name}") from None


def evaluate_checkpoints(
    checkpoints: Sequence[Saved],
    pairs: Sequence[tuple[EvaluatedSet, int]],
    processes: Processes,
    stop: StopRequest,
    *,
    shifts: Sequence[Shift],
    mirrored: bool,
    fit: bool,
) -> Iterator[tuple[tuple[EvaluatedSet, int], Finding]]:
    """Evaluate each of `pairs`, a data set and the number of a checkpoint, and yield it with what
    was found. They come set by set, so that checkpoints can share decoded images (`batches_of`).
    shifts, mirrored: as of `Views`. fit: logits are kept, and a temperature fitted to them
    (`store_temperatures`).
    """
    prepare_workers(max(saved.recipe.data.workers for saved in checkpoints))
    sources = {eval_set: open_set(eval_set, processes) for eval_set in dict(pairs)}
    columns = {}
    with processes.together():
        for eval_set, number in pairs:
            saved, source = checkpoints[number], sources[eval_set]
            require_same_images(eval_set, source, saved.path.parent)
            require_labels(saved.recipe, source, str(eval_set))
            columns[eval_set, number] = columns_of(saved, eval_set, source)
            taken = order_taken(source.classes)
            if taken and known_classes(saved, source.classes) is None:
                processes.say(f"{saved.name}: {taken}")
    views = in_words(shifts, mirrored)
    models = [models_of(saved, processes, shifts, mirrored, fit=fit) for saved in checkpoints]
    for eval_set, source in sources.items():
        made: dict[tuple, EvaluationBatches] = {}  # how batches are made → them, decoded once
        for number, saved in enumerate(checkpoints):
            pair = eval_set, number
            if pair not in columns:
                continue
            batches = batches_of(source, saved, made, processes)
            task = task_of(saved.recipe, source.classes)
            sureness = {}
            if not task.several_labels:
                sureness = {
                    name: Sureness(saved.recipe.loss, model.temperature, keeps=fit)
                    for name, model in models[number].items()
                }
            results = results_of(
                list(models[number].values()),
                batches,
                saved.recipe.engine,
                processes,
                stop,
                what=f"validate {eval_set.name}",
                task=task,
                columns=columns[pair],
                sureness=list(sureness.values()),
            )
            yield (
                pair,
                Finding(
                    saved.name,
                    saved.recipe.name,
                    eval_set,
                    saved.size,
                    saved.recipe.data.num_classes,
                    list(source.classes),
                    dict(zip(models[number], results)),
                    views,
                    sureness,
                ),
            )
            if fit:
                store_temperatures(saved, sureness, eval_set.name, processes)


def results_of(
    models: Sequence[nn.Module],
    batches: EvaluationBatches,
    engine: EngineSection,
    processes: Processes,
    stop: StopRequest,
    *,
    what: str,
    task: Task,
    columns: Tensor | None,
    sureness: Sequence[Sureness],
) -> list[Evaluation]:
    """Evaluate models, which are on the device meanwhile. what: the words before the bar. task: of
    the images' classes. columns: as of `columns_of`. sureness: of each model, to add to; or none.
    """
    seen = {}
    if sureness:
        seen["seen"] = lambda number, *batch: sureness[number].add(*batch)
    set_precision(engine.tf32)
    bar = validation_bar(batches, what, processes)
    with bar, memory_for("eval.batch_size", batches.batch_size):
        for model in models:
            model.to(processes.device).to(memory_format=batches.prepare.format)
        results = task.measure(
            models,
            bar,
            loss=task.loss,
            amp=engine.amp,
            stop=stop,
            processes=processes,
            columns=columns,
            **seen,
        )
    for each in sureness:
        each.gather(processes)
    for model in models:
        model.cpu()  # or the memory of many would add up
    return results


class Tempered(nn.Module):
    """A model whose logits are divided by a temperature."""

    def __init__(self, model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).float() / self.temperature


def models_of(
    saved: Saved,
    processes: Processes,
    shifts: Sequence[Shift],
    mirrored: bool,
    *,
    fit: bool,
) -> Mapping[str, Tempered]:
    """A checkpoint's model and, if it has one, its moving average, by name, on the CPU, with the
    temperatures that are stored beside it, unless others are to `fit`. shifts, mirrored: as of
    `Views`.
    """
    models = {}
    for name in saved.weights:
        with processes.together():
            model: nn.Module = saved.model(name)
            temperature = 1.0 if fit else saved.temperature(name)
        if temperature != 1.0:
            processes.say(
                f"{saved.name}: logits of {name} are divided by {temperature:.4f}, of calibration.json"
            )
        if in_words(shifts, mirrored):
            model = Views(model, shifts, mirrored)
        models[name] = Tempered(compiled(model, saved.recipe.engine), temperature)
    if processes.is_main and not saved.brings_recipe:
        say(f"{saved.path}: {saved.assumptions()}", sys.stderr)
    return models


def batches_of(
    source: Source, saved: Saved, made: dict[tuple, EvaluationBatches], processes: Processes
) -> EvaluationBatches:
    """The images of a data set as a checkpoint's model takes them. Checkpoints whose views are made
    alike share the batches in `made`, so that images that are kept are decoded once.
    """
    recipe = saved.recipe
    batches = evaluation_batches(
        recipe,
        source,
        saved.size,
        processes.device,
        rank=processes.rank,
        world_size=processes.world_size,
    )
    how = (
        saved.view,
        border_of(recipe),
        recipe.data.channels,
        recipe.data.apply_exif_orientation,
        recipe.eval.batch_size,
    )
    shared = made.setdefault(how, batches)  # perhaps those of an earlier checkpoint
    shared.prepare = batches.prepare  # by this one's mean and std
    return shared


def sets_for(
    saved: Saved, named: Sequence[EvaluatedSet], *, train_images: bool
) -> list[EvaluatedSet]:
    """What a checkpoint is evaluated on, each set once: those that are named, and the images that
    it was trained on, if they are asked for; without either, what its recipe validates on.
    """
    sets = [trained_set(saved.recipe), *named] if train_images else list(named)
    parts = list(dict.fromkeys(sets)) or [own_set(saved.recipe.data)]
    order = tuple(saved.classes or ())
    return [part._replace(order=order) if part.data else part for part in parts]


def main(arguments: list[str] | None = None, name: str = "eval.py") -> int:
    """Run the program with these arguments; messages begin with `name`. Return the exit status."""

    def program() -> None:
        args = parse_arguments(arguments, name)
        with StopRequest() as stop, distributed.joined() as processes:
            with processes.together():
                checkpoints = [
                    open_saved(
                        path,
                        recipe=args.recipe,
                        changes=overrides(sets=args.set),
                        changeable=EVALUATION_KEYS,
                        image_size=args.image_size,
                        classes=args.classes,
                    )
                    for path in args.checkpoint
                ]
            if args.data_dir is not None:
                checkpoints = [
                    saved._replace(recipe=saved.recipe.with_data(root=args.data_dir))
                    for saved in checkpoints
                ]
            pairs = []
            for number, saved in enumerate(checkpoints):
                if reach_of(args.shifts) >= min(saved.size):
                    raise RecipeError(
                        f"--shifts: by {reach_of(args.shifts)} pixels, and {saved.name} takes "
                        f"{times(saved.size)}; expected less, as the border mirrors the image"
                    )
                if args.fit_temperature:
                    require_one_label(saved)
                for eval_set in sets_for(saved, args.data or [], train_images=args.train_images):
                    pairs.append((eval_set, number))
            findings = {}
            try:
                found = evaluate_checkpoints(
                    checkpoints,
                    pairs,
                    processes,
                    stop,
                    shifts=args.shifts,
                    mirrored=args.flips,
                    fit=args.fit_temperature,
                )
                for pair, finding in found:
                    findings[pair] = finding
            finally:  # what is measured is not lost by the next set
                if processes.is_main and findings:
                    print_results(
                        [findings[pair] for pair in pairs if pair in findings],
                        per_class=args.per_class,
                        json_file=args.json,
                    )

    return run_program(name, program)
