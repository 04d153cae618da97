"""From a folder of images to a trained model, within so many minutes.

    vitinit fit photos/ --minutes 20
    vitinit fit photos/ --minutes 20 --dry-run

photos/ holds a folder per class, perhaps below train/ and val/, or lists of images (train.csv).
Without images to validate on, some of each class are held out. fit looks at the images, measures
this machine, and chooses the recipe, image size and number of epochs; it says why, trains, and
writes into --out-dir, beside what every run writes:

    report.html       curves, classes, mistakes
    predictions.csv   what the model says of each image to validate on
    model/            the model to hand on; with --recipe photos or --weights for timm, too, if
                      `safetensors` is installed

Its last lines say how good the model is, what it confuses, and whether more images or more minutes
would help most. The choice is a recipe like any other, recipe.toml in that folder. The same command
goes on with a run that was interrupted. On one CPU thread (OMP_NUM_THREADS=1) minutes are of the
processor's time, otherwise of the clock.
"""

import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from ...base.files import CheckpointError
from ...base.messages import OneLineError, counted, say
from ...base.values import to_toml
from ...data.images import FORMATS, DataError, heif_formats
from ...data.lists import LISTS
from ...data.sources import Source, folder_of
from ...recipe.files import load_recipe, overrides
from ...run import Run
from ...runs.data import open_sets, open_training_set
from ...runs.folder import RunFolder
from ...runs.load import PUBLISHED, fetch_published, kept_file
from ...runs.summary import FEW_IMAGES
from ...train.device import cores, this_device
from ...train.interruption import Interrupted
from ...watch.survey import Headers, are_photographs, survey
from ..shared.command_line import Parser, add_set, integer, main_of, real
from ..shared.steps import clock_of
from .choice import GRIDS, Images, choose
from .findings import finish
from .measure import measuring_seconds, plan_of
from .unreadable import list_others, lists_images_of, unreadable_in

HELD_OUT = 400  # images to hold out, within shares of
LEAST_SHARE, LARGEST_SHARE = 0.1, 0.25
AT_ONCE = 4  # loader processes beside a GPU
READ_SHARE = 0.1  # of the minutes, in which all images are read, or as many as can be
COLUMNS = (
    "shown   of each epoch, a pass over the images to train on: loss, how wrong the model is on "
    "them; where it was looked at, val, how wrong on those to validate on, and top-1, % of these "
    "that are right; EMA, the same by weights averaged over the last steps; images per second"
)
SMALL_WEIGHTS = "deit_tiny"  # published ones, to fine-tune for few images


def parse_arguments(arguments: list[str]) -> Namespace:
    parser = Parser(prog="vitinit fit", description=__doc__)
    parser.add_argument("data", metavar="PHOTOS", help="folder of images or lists, by class")
    parser.add_argument("--minutes", type=real(above=0), required=True, help="that it may take")
    parser.add_argument("--out-dir", type=Path, help="folder of the run; default runs/fit-<folder>")
    beginning = parser.add_mutually_exclusive_group()
    beginning.add_argument(
        "--weights",
        help="a checkpoint to fine-tune, or the name of published ones; none: from scratch; "
        f"default: {SMALL_WEIGHTS} for fewer than {FEW_IMAGES:,} images, if they can be fetched",
    )
    beginning.add_argument(
        "--recipe",
        choices=list(GRIDS),
        help="for photographs from scratch; default: photos_ahead, or photos, whose model timm has, "
        "too, for small images and where few epochs fit",
    )
    parser.add_argument("--seed", type=integer(0, 2**63), default=0, help="run.seed")
    parser.add_argument(
        "--dry-run", action="store_true", help="look, measure, choose, and say why; train nothing"
    )
    add_set(parser, "override any key of the recipe that is chosen; may be repeated")
    args = parser.parse_args(arguments)
    args.words = arguments  # for the run's record
    return args


def fit(args: Namespace) -> None:
    device = this_device()
    clock = clock_of(device)
    of_thread = clock is time.process_time
    kind = "of one CPU thread" if of_thread else "by the clock"
    began, on_the_wall = clock(), time.perf_counter()
    out = args.out_dir or Path("runs", f"fit-{Path(args.data).resolve().name}")
    folder = RunFolder(out)
    if folder.holds_checkpoint() and not args.dry_run:
        photos = folder_of(args.data)
        root = Path(folder.data_of(-1).get("root", photos))
        if root.resolve() != photos.resolve() and not lists_images_of(root, photos):
            raise OneLineError(
                f"{out}: holds a run on the images in {root}; expected another --out-dir for those "
                f"in {args.data}"
            )
        say(
            f"{out}: goes on with the run that is there, as it was chosen, whatever --minutes, "
            "--weights, --seed and --set are now; another --out-dir begins anew"
        )
        train(Run(resume=out, quiet=True, imports=args.imports))
        finish(out)
        return
    with TemporaryDirectory() as spare:  # as a dry run writes nothing
        until = began + 60 * READ_SHARE * args.minutes
        lists = Path(spare) if args.dry_run else out / "readable"
        images = look(args, device, lists, in_time=lambda: clock() < until)
        stated = "none" if args.recipe else args.weights
        weights = weights_for(images, stated, dry_run=args.dry_run)
        seconds = measuring_seconds(args.minutes)
        say(
            "measure how long images take to train on here: "
            f"{seconds:.0f} to {2 * seconds:.0f} seconds {kind}"
        )
        planned = partial(plan_of, device=device, minutes=args.minutes)
        choice, plan = choose(
            images,
            lambda: args.minutes - (clock() - began) / 60,
            weights,
            planned,
            args.recipe,
        )
    epochs = choice.changes["schedule.epochs"]
    say(f"choice  the recipe {choice.recipe} with {', '.join(choice.in_words())}")
    for reason in choice.reasons:
        say(f"why     {reason}")
    say(
        f"plan    {epochs * plan.epoch_seconds / 60:.1f} minutes {kind} to train: an epoch, each image "
        f"once, takes {plan.epoch_seconds:.3g} s, {plan.rate:,.0f} images/s"
    )
    if args.dry_run:
        say("dry run: nothing was written")
        return
    say(COLUMNS)
    run = Run(
        choice.recipe,
        seed=args.seed,
        out_dir=out,
        overrides=choice.sets(),
        quiet=True,
        imports=args.imports,
        command=["vitinit", "fit", *args.words],
    )
    train(run)
    finish(out)
    spent, passed = (clock() - began) / 60, (time.perf_counter() - on_the_wall) / 60
    words = f"{spent:.1f} minutes {kind}"
    if of_thread:
        words += f", {passed:.1f} by the clock"
    say(f"took    {words}, of {args.minutes:g} asked for")


def train(run: Run) -> None:
    """Do the run; if it is stopped, also say which command goes on."""
    try:
        run.train()
    except Interrupted:
        say("the same command of fit goes on, too, and ends with how good the model is")
        raise


def look(args: Namespace, device: torch.device, lists: Path, in_time: Callable[[], bool]) -> Images:
    """Open the images, and say what they are like. lists: the folder for lists of those that can be
    read, if some cannot. in_time: whether there is still time to read them all. Raises DataError.
    """
    root = folder_of(args.data)
    listed = any((root / name).is_file() for name in LISTS)
    sets = [
        f"data.root={to_toml(args.data)}",
        f"data.name={'image_list' if listed else 'image_folder'}",
        "data.num_classes=0",
        # The cores of a machine without a GPU are the model's.
        f"data.workers={0 if device.type == 'cpu' else min(AT_ONCE, cores())}",
    ]
    # Whatever else is stated is held against the recipe that is chosen.
    of_images = [text for text in args.set if text.startswith(("data.", "eval."))]
    recipe = load_recipe("photos", overrides(sets=[*sets, *of_images]))
    if not recipe.eval.every_epochs:
        raise OneLineError(
            "--set eval.every_epochs=0: fit ends with how good the model is; expected 1 at least"
        )
    whole, _ = open_training_set(recipe.data, args.seed)
    if whole.several_labels:
        raise OneLineError(
            f"{args.data}: its images have several labels each, and fit takes one; expected train.py "
            "with --set task.name=multi_label"
        )
    if not whole.to_validate_on and not recipe.data.holds_out:
        share = min(LARGEST_SHARE, max(LEAST_SHARE, HELD_OUT / len(whole)))
        recipe = recipe.with_data(held_out=round(share, 2))
        sets.append(f"data.held_out={recipe.data.held_out}")
    _, train_set, val_set = open_sets(recipe)
    sources = [whole] if recipe.data.holds_out else [whole, val_set]
    unreadable = unreadable_in(sources, in_time)
    if unreadable:
        list_others(sources, unreadable, lists)
        sets += [f"data.root={to_toml(str(lists))}", "data.name=image_list"]
        recipe = recipe.with_data(root=str(lists), name="image_list")
        _, train_set, val_set = open_sets(recipe)
    use = "held out" if recipe.data.holds_out else "to validate on"
    say(
        f"images  {len(train_set):,} to train on, {len(val_set):,} {use}, "
        f"{counted(len(whole.classes), 'class')}"
    )
    seen = survey(train_set, val_set, side=0)
    for line in (*seen.lines, *(f"warning {caution}" for caution in seen.cautions)):
        say(line)
    side = median(shorter_sides(val_set))
    return Images(len(train_set), len(val_set), len(whole.classes), side, sets, args.set)


def shorter_sides(source: Source) -> list[int]:
    """The shorter sides of some images, in pixels. Raises DataError if none of them can be read."""
    paths = source.some_paths()
    sides: list[int] = []
    if are_photographs(source, paths[0]):
        sides += map(min, Headers(paths, FORMATS + heif_formats()).sizes)
    else:
        for index in range(0, len(source), len(source) // len(paths)):  # evenly, as the paths are
            with suppress(DataError):
                sides.append(min(source.image(index).shape[1:]))
    if not sides:
        raise DataError(f"{paths[0]}: neither this nor any other image looked at can be read")
    return sides


def weights_for(images: Images, stated: str | None, *, dry_run: bool) -> str:
    """The weights to fine-tune: those that the user states, or published ones for few images, if
    they are here or can be fetched; or "".
    """
    if stated is not None:
        return "" if stated == "none" else stated
    if images.train >= FEW_IMAGES:
        return ""
    published = PUBLISHED[SMALL_WEIGHTS]
    if dry_run and not kept_file(published).exists():
        say(
            f"weights of {SMALL_WEIGHTS} are not here; without --dry-run they are fetched, if they can"
        )
        return ""
    try:
        fetch_published(published)
    except CheckpointError as error:
        say(f"weights none, so from scratch: {error}")
        return ""
    return SMALL_WEIGHTS


main = main_of("vitinit fit", parse_arguments, fit)
