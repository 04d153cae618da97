"""Images/s out of files, beside torchvision's pipeline, and whether they feed a step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from ..data.sources import LooseImages
from ..recipe.sections import Recipe
from ..runs.data import open_data
from .step import synthetic_batch
from .training import (Row, alone, clock_of, given_step, interleave, recipe_of, set_up,
                       times_as_fast, train_on)

PHOTOGRAPHS = 200               # files that are read; an epoch has each of them many times
BATCH = 50                      # images that are augmented together
# Overrides that leave what a worker does (decoding, cropping, flipping) and normalising.
PLAIN = ("rand_augment.layers=0", "augment.erase_probability=0", "mix.mixup_alpha=0",
         "mix.cutmix_alpha=0")


def image_folder(root: Path, source: Path | None, count: int) -> list[str]:
    """Make `root` a data set of `count` links to photographs; return overrides that select it.

    source: a folder of photographs, of which PHOTOGRAPHS are taken; None: 50 are drawn. All are in
    the disk's cache, so that the disk is not measured. Raises DataError if there are none.
    """
    paths = draw_photographs(root / "drawn", 50) if source is None else [
        Path(path) for path in LooseImages(source, PHOTOGRAPHS).paths]
    for split, number in (("train", count), ("val", 2)):
        folders = [root / split / label for label in ("one", "two")]
        for folder in folders:
            folder.mkdir(parents=True)
        for index, path in zip(range(number), itertools.cycle(paths)):
            (folders[index % 2] / f"{index:06}{path.suffix.lower()}").symlink_to(path.resolve())
    return ["data.name=image_folder", f"data.root={root}", "data.num_classes=2"]


def draw_photographs(folder: Path, count: int) -> list[Path]:
    """Draw smooth colours with noise, 500×375, whose JPEG files are as large as ImageNet's."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for index in range(count):
        cloud = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        pixels = np.asarray(cloud.resize((500, 375), Image.Resampling.BICUBIC), np.int16)
        pixels = (pixels + rng.integers(-24, 25, pixels.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:03}.jpg", quality=90)
    return sorted(folder.iterdir())


def in_batches(batch: int) -> list[str]:
    """Overrides for steps of `batch` images in one micro-batch, at any learning rate."""
    return [f"optim.global_batch={batch}", f"optim.max_batch_per_process={batch}",
            f"mix.group={batch}", "augment.repeats=1", "schedule.warmup_lr=0", "schedule.min_lr=0"]


def steps_of(recipe: Recipe, device: torch.device) -> Iterator:
    """The recipe's training steps on one process, epoch after epoch."""
    data = open_data(recipe, alone(device), dry_run=False)
    for epoch in itertools.count():
        yield from data.train_batches.steps(epoch)


def torchvisions_pipeline(size: tuple[int, int]) -> transforms.Compose:
    """DeiT's augmentation by torchvision, on Pillow images, without mixing and somewhat milder."""
    return transforms.Compose([
        transforms.RandomResizedCrop(size, interpolation=InterpolationMode.BICUBIC),
        transforms.RandomHorizontalFlip(), transforms.RandAugment(2, 9), transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        transforms.RandomErasing(0.25, value="random")])


def loader_rows(name: str, sets: list[str], root: Path, device: torch.device) -> list[Row]:
    """Images/s that one core and the device prepare as a recipe of `image_folder`'s set says."""
    batches = [*in_batches(BATCH), "data.workers=0", "data.on_device_gib=0"]
    paths = sorted((root / "train").rglob("*.*"))[:BATCH]
    recipe = recipe_of(name, [*sets, *batches]).with_data(root=str(root))
    pipeline = torchvisions_pipeline(recipe.data.image_size)
    source = open_data(recipe, alone(device), dry_run=False).train_set

    def prepared(*more: str) -> Callable[[], object]:
        steps = steps_of(recipe_of(name, [*sets, *batches, *more]), device)
        return lambda: [micro_batch.prepare() for micro_batch in next(steps)[1]]
    seconds = interleave({
        "decoding alone": lambda: [source.image(index) for index in range(BATCH)],
        "+ crop, flip, normalise: a worker's part": prepared(*PLAIN),
        "+ RandAugment, erase, mix: the whole": prepared(),
        "torchvision's pipeline on Pillow": lambda: [
            pipeline(Image.open(path).convert("RGB")) for path in paths]}, clock_of(device))
    decoding, pillow = seconds["decoding alone"], seconds["torchvision's pipeline on Pillow"]
    return [{"on one core" + (" and the GPU" if device.type == "cuda" else ""): part,
             "images/s": BATCH / median(times), "× as fast as torchvision's":
             times_as_fast(times, pillow), "% of decoding": 100 * median(decoding) / median(times)}
            for part, times in seconds.items()]


def fed_rows(name: str, sets: list[str], device: torch.device, batch: int,
             counts: list[int]) -> list[Row]:
    """A step fed from files, beside the same step on a synthetic batch, by loader processes.

    Both on the wall clock, since the work is that of several processes; steps that loader processes
    had ready before the clock started are not counted. counts: numbers of loader processes.
    """
    rows, batches = [], in_batches(batch)
    state, forward = set_up(recipe_of(name, [*sets, *batches], device), device)
    for workers in counts:
        recipe = recipe_of(name, [*sets, *batches, f"data.workers={workers}"], device)
        steps, part = steps_of(recipe, device), synthetic_batch(recipe, batch, device)
        ahead, count = 2 * workers + 2, max(4, 2 * workers)
        given = [given_step(number, [part]) for number in range(count)]

        def seconds(work: Iterator) -> float:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            train_on(state, work, forward=forward, amp=recipe.engine.amp)
            return (time.perf_counter() - began) / count
        pairs = []
        for _ in range(3):
            seconds(itertools.islice(steps, ahead))
            fed = seconds(itertools.islice(steps, count))    # first: loading goes on meanwhile
            pairs.append((seconds(iter(given)), fed))
        without, with_loader = zip(*pairs)
        rows.append({"recipe": recipe.name, "batch": batch, "workers": workers,
                     "synthetic, images/s": batch / median(without),
                     "fed, images/s": batch / median(with_loader),
                     "fed ÷ synthetic": times_as_fast(with_loader, without)})
    return rows
