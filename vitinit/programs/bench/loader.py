"""Images/s out of files, beside torchvision's pipeline, and whether they feed a step."""

import argparse
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from ...base.messages import OneLineError
from ...data.augment import IMAGENET_MEAN, IMAGENET_STD
from ...data.images import FORMATS
from ...data.sources import LooseImages
from ...recipe.sections import Recipe
from ...train.metrics import Pace
from ...watch.slowness import waits_for
from ..shared.steps import (
    clock_of,
    given_step,
    measured_recipe,
    set_up,
    steps_of,
    train_on,
    wall_clock,
)
from .step import synthetic_batch
from .training import ResultRow, interleave, row_table, times_as_fast

PHOTOGRAPHS = 200  # files that are read; an epoch has each of them many times
AUGMENTED_TOGETHER = 50  # images that are augmented together
LOADER = "+ crop, flip, draws: the loader"
WHOLE = "+ RandAugment, normalise, erase, mix: the whole"
PILLOW = "torchvision's pipeline on Pillow"
PAIRS = 3  # of steps that are fed from files, and steps that are not


def image_folder(root: Path, source: Path | None, count: int) -> list[str]:
    """Make `root` a data set of `count` links to photographs; return overrides that select it.

    source: a folder of photographs, of which PHOTOGRAPHS are taken; None: 50 are drawn. All are in
    the disk's cache, so that the disk is not measured. Raises DataError if there are none.
    """
    if source:
        paths = [*map(Path, LooseImages(source, PHOTOGRAPHS).paths)]
    else:
        paths = draw_photographs(root / "drawn", 50)
    for split, number in (("train", count), ("val", 2)):
        for label in ("one", "two"):
            (root / split / label).mkdir(parents=True)
        for index, path in zip(range(number), itertools.cycle(paths)):
            label = "two" if index % 2 else "one"
            link = root / split / label / f"{index:06}{path.suffix.lower()}"
            link.symlink_to(path.resolve())
    whole = ("images_per_class=0", "subset=1.0", "held_out_per_class=0", "held_out=0.0")
    parts = ("name=image_folder", f"root={root}", "num_classes=2", *whole)
    return [f"data.{part}" for part in parts]


def draw_photographs(folder: Path, count: int) -> list[Path]:
    """Draw smooth colours with noise, 500×375, whose JPEG files are as large as ImageNet's."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for index in range(count):
        cloud = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        smooth = np.asarray(cloud.resize((500, 375), Image.Resampling.BICUBIC), np.int16)
        noisy = (smooth + rng.integers(-24, 25, smooth.shape)).clip(0, 255)
        Image.fromarray(noisy.astype(np.uint8)).save(folder / f"{index:03}.jpg", quality=90)
    return sorted(folder.iterdir())


def in_batches(batch: int) -> list[str]:
    """Overrides for steps of `batch` images in one micro-batch, at any learning rate."""
    return [
        f"optim.global_batch={batch}",
        f"optim.max_batch_per_process={batch}",
        f"mix.group={batch}",
        "schedule.warmup_lr=0",
        "schedule.min_lr=0",
    ]


def loader_rows(name: str, sets: list[str], root: Path, device: torch.device) -> list[ResultRow]:
    """Views/s of each part of a recipe's pipeline on one core and the device; and torchvision's."""
    recipe = measured_recipe(
        name, [*sets, *in_batches(AUGMENTED_TOGETHER), "data.workers=0", "data.on_device_gib=0"]
    )

    pipeline = transforms.Compose(
        [  # DeiT's, without mixing and somewhat milder
            transforms.RandomResizedCrop(
                recipe.data.image_size, interpolation=InterpolationMode.BICUBIC
            ),
            transforms.RandomHorizontalFlip(),
            transforms.RandAugment(2, 9),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            transforms.RandomErasing(0.25, value="random"),
        ]
    )
    source = LooseImages(root / "train", AUGMENTED_TOGETHER)
    steps = steps_of(recipe, device)

    once = range(0, AUGMENTED_TOGETHER, recipe.augment.repeats)

    def use_pillow() -> None:
        for path in source.paths:
            pipeline(Image.open(path, formats=FORMATS).convert("RGB"))

    parts: dict[str, Callable[[], object]] = {
        "decoding alone, each image once": lambda: [*map(source.image, once)],
        LOADER: lambda: next(steps),
        WHOLE: lambda: next(steps)[1][0].prepare(),
        PILLOW: use_pillow,
    }
    seconds = interleave(parts, clock_of(device))
    whole, pillow = seconds[WHOLE], seconds[PILLOW]
    title = "on one core and the GPU" if device.type == "cuda" else "on one core"
    return [
        {
            title: part,
            "views/s": AUGMENTED_TOGETHER / median(times),
            "× as fast as torchvision's": times_as_fast(times, pillow),
            "% of the whole": 100 * median(times) / median(whole),
        }
        for part, times in seconds.items()
    ]


def fed_steps(workers: int) -> tuple[int, int]:
    """How many steps pass before those that are measured, since they may be loaded by then, and how
    many are measured. `PAIRS` of both are in one epoch, at whose start workers have nothing ready.
    """
    return 2 * workers + 2, max(4, 2 * workers)


def fed_rows(recipe: Recipe, device: torch.device, counts: list[int]) -> list[ResultRow]:
    """A step fed from files, beside the same step on a synthetic batch, by loader processes.

    Both on the wall clock, since the work is that of several processes; steps that loader processes
    had ready before the clock started are not counted. counts: numbers of loader processes.
    """
    rows, clock = [], wall_clock(device)
    batch = recipe.optim.global_batch
    state, forward = set_up(recipe, device)
    part = synthetic_batch(recipe, batch, device)
    for workers in counts:
        steps = steps_of(recipe.with_data(workers=workers), device)
        ahead, count = fed_steps(workers)
        given = [given_step(number, [part]) for number in range(count)]

        def seconds(work: Iterator) -> float:
            began = clock()
            train_on(state, work, forward=forward, amp=recipe.engine.amp)
            return (clock() - began) / count

        pairs = []
        for _ in range(PAIRS):
            seconds(itertools.islice(steps, ahead))
            fed = seconds(itertools.islice(steps, count))  # first: loading goes on meanwhile
            pairs.append((seconds(iter(given)), fed))
        without, with_loader = zip(*pairs)
        rows.append(
            {
                "recipe": recipe.name,
                "batch": batch,
                "workers": workers,
                "synthetic, images/s": batch / median(without),
                "fed, images/s": batch / median(with_loader),
                "fed ÷ synthetic": times_as_fast(with_loader, without),
            }
        )
    return rows


def fed_in_words(row: ResultRow, recipe: Recipe, device: torch.device) -> str:
    """What bounds a fed step: its input, with what would help, or the step itself."""
    images, fed = row["batch"], row["batch"] / row["fed, images/s"]  # seconds of a step
    unfed = images / row["synthetic, images/s"]
    waiting = 1 - unfed / fed
    pace = Pace(fed, unfed, waiting, waiting)
    if recipe.data.decode == "cuda":
        return f"a step waits {waiting:.0%} of the time for images, which workers and the GPU make"
    line = waits_for([pace], device, images=images, workers=row["workers"])
    return f"bound by its input, {line}" if line else "bound by the step, see bench step"


def print_loader(args: argparse.Namespace, device: torch.device) -> None:
    """Measure a recipe's loader, alone and feeding a step."""
    recipe = measured_recipe(args.recipe, args.set)
    if not recipe.task.kind.learns_classes:
        raise OneLineError(
            f"{args.recipe}: learns no classes, and steps are fed with labels; expected another recipe"
        )
    batch = args.batch or recipe.optim.max_batch_per_process
    with tempfile.TemporaryDirectory() as folder:
        count = max(50, PAIRS * batch * sum(fed_steps(max(args.workers))))
        sets = [*args.set, *image_folder(Path(folder), args.data_dir, count)]
        recipe = measured_recipe(args.recipe, [*sets, *in_batches(batch)], device)
        if recipe.data.decode == "cpu":  # else a thread works on in the time of other parts
            parts = loader_rows(args.recipe, sets, Path(folder), device)
            print("\n" + row_table(parts), flush=True)
        rows = fed_rows(recipe, device, args.workers)
        print(f"\n{row_table(rows)}\n\n{args.recipe}: {fed_in_words(rows[-1], recipe, device)}")
