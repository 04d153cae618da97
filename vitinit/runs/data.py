"""The data of a run: its images, this process's batches of them, and views for the model."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..base.keys import Purpose, keyed_generator
from ..base.messages import ProgressBar, say
from ..data.augment import ToDevice, TrainToDevice, normalise
from ..data.datasets import download, open_split
from ..data.draw import Augmentation, Masks
from ..data.images import DataError, fit_whole, resize_and_centre_crop
from ..data.loader import EvalViews, prepare_workers
from ..data.pipeline import Data, EvaluationBatches, TrainingBatches
from ..data.sampler import BatchPlan, TrainSampler, plan_batches
from ..data.sources import (
    HeldOut,
    Source,
    file_sizes,
    fingerprint,
    folder_of,
    held_out_part,
    read_as,
    stratified_part,
)
from ..models.layers import patch_grid, to_pair
from ..recipe.files import building
from ..recipe.sections import DataSection, Recipe
from ..tasks import Task
from ..train.distributed import Processes
from .model import task_of

REHEARSED_IMAGES = 8  # of a dry run's forward pass, which a CPU has to do in seconds


def open_training_set(
    data: DataSection, run_seed: int, classes: Sequence[str] | None = ()
) -> tuple[Source, Source]:
    """The whole training set of a recipe, and the part of it that is trained on, perhaps drawn by
    the recipe's run.seed. classes: in the order that a run began with, if it has begun; None: a
    run of a commit that sorted a list's as numbers. Raises DataError if the set cannot be opened,
    or has a single class.
    """
    stored = open_split(data.name, data.root, "train", data.num_classes)
    if classes is None and data.name == "image_list":
        if all(map(str.isdecimal, stored.classes)):
            classes = sorted(stored.classes, key=int)
    whole = read_as(stored.in_order(classes or ()), data.channels, data.apply_exif_orientation)
    if len(whole.classes) < 2 and data.name != "images":
        raise DataError(
            f"{data.root}: one class found, '{whole.classes[0]}'; expected two at least"
        )
    part = stratified_part(
        whole,
        share=data.subset,
        images_per_class=data.images_per_class,
        held_out=held_out_of(data),
        seed=run_seed if data.subset_seed == "run" else data.subset_seed,
    )
    return whole, part


def held_out_of(data: DataSection) -> HeldOut:
    """Which images are held out, by the subset's seed, unless that is the run's own."""
    seed = 0 if data.subset_seed == "run" else data.subset_seed
    return HeldOut(data.held_out, data.held_out_per_class, seed)


def open_held_out(data: DataSection, whole: Source) -> Source:
    """The images of a whole training set that are not trained on, to validate on them."""
    return held_out_part(whole, held_out_of(data))


def open_sets(recipe: Recipe, classes: Sequence[str] | None = ()) -> tuple[Source, Source, Source]:
    """The whole training set of a recipe, the part that is trained on, and what validates it, which
    is empty if eval.every_epochs says that nothing does. classes: as of `open_training_set`.
    """
    data = recipe.data
    whole, part = open_training_set(data, recipe.run.seed, classes)
    if data.holds_out:
        if whole.to_validate_on:
            key = "data.held_out" if data.held_out else "data.held_out_per_class"
            whole.note(
                f"left out: {whole.to_validate_on} in {data.root}, as {key} validates on images to "
                "train on"
            )
        return whole, part, open_held_out(data, whole)
    if not recipe.eval.every_epochs:
        return whole, part, whole.part(np.arange(0))
    held = open_split(data.name, data.root, "val", len(whole.classes))
    held = read_as(held.in_order(whole.classes), data.channels, data.apply_exif_orientation)
    return whole, part, held


def require_labels(recipe: Recipe, source: Source, name: str) -> None:
    """Raise DataError if the images have several labels each and the recipe's task or sampling
    takes one, or the other way round. name: of the set.
    """
    takes_several = recipe.task.kind.several_labels
    if source.several_labels and recipe.data.sampling == "balanced":
        raise DataError(
            f"{name}: its images have several labels each, and data.sampling = balanced takes one; "
            "expected shuffled"
        )
    if source.several_labels and not takes_several and recipe.task.kind.learns_classes:
        raise DataError(
            f"{name}: its images have several labels each, and task.name = {recipe.task.name} takes "
            "one; expected multi_label, with loss.name = binary_cross_entropy and "
            "checkpoint.best_by = val_map"
        )
    if takes_several and not source.several_labels:
        raise DataError(
            f"{name}: its images have one label each, in a column label, and task.name = "
            f"{recipe.task.name} takes several; expected a column labels, or one for each class"
        )


def masks_of(recipe: Recipe) -> Masks | None:
    """How the patches of images are masked by [task]; None if a model sees all of them."""
    if not recipe.task.kind.hides_patches:
        return None
    with building(f"recipe {recipe.name}", "task"):
        patch_size = to_pair(recipe.model.options["patch_size"])
        rows, columns = patch_grid(recipe.data.image_size, patch_size)
        patches = rows * columns
        return Masks(patches, task_of(recipe).visible(patches))


def evaluation_batches(
    recipe: Recipe,
    source: Source,
    size: tuple[int, int],
    device: torch.device,
    *,
    rank: int = 0,
    world_size: int = 1,
    batch_size: int | None = None,
) -> EvaluationBatches:
    """A data set's images as the recipe evaluates its model on them, at this size: every
    `world_size`-th of them, from number `rank` on. batch_size: None: the recipe's.
    """
    data, how = recipe.data, recipe.eval
    views = EvalViews(
        read_as(source, data.channels, data.apply_exif_orientation),
        rank=rank,
        world_size=world_size,
        size=size,
        view=evaluation_view(recipe, size),
        masks=masks_of(recipe),
    )
    prepare = ToDevice(
        device, mean=data.mean, std=data.std, channels_last=recipe.engine.channels_last
    )
    return EvaluationBatches(
        views,
        prepare,
        batch_size=batch_size or how.batch_size,
        workers=data.workers,
        on_device_gib=data.on_device_gib,
        cache_gib=how.cache_gib,
    )


def validation_bar(batches: EvaluationBatches, what: str, processes: Processes) -> ProgressBar:
    """A bar over this process's batches, which the main process shows; its rate is that of all.
    what: the words before it.
    """
    return ProgressBar(
        what,
        len(batches),
        items=batches,
        shown=processes.is_main,
        scale=batches.batch_size * processes.world_size,
    )


def open_data(
    recipe: Recipe,
    processes: Processes,
    *,
    dry_run: bool = False,
    strided: bool = False,
    classes: Sequence[str] | None = (),
) -> Data:
    """Open the data sets and make this process's batches. dry_run: neither download nor decode, and
    validate on few images at once, since workers decode several batches ahead of the first.
    strided: as in `BatchPlan`, also of a recipe whose model needs no strided pairs. classes: as of
    `open_training_set`.
    """
    data = recipe.data
    if data.decode == "cuda" and processes.device.type != "cuda":
        raise DataError(
            f"data.decode = cuda, and this process computes on {processes.device.type}; expected "
            "data.decode = cpu"
        )
    prepare_workers(data.workers)
    with processes.together():
        if processes.local_rank == 0 and not dry_run:
            download(data.name, data.root)
    with processes.together():
        whole_set, train_set, val_set = open_sets(recipe, classes)
        require_labels(recipe, whole_set, data.root)
        require_labels(recipe, val_set, data.root)
        with building(f"recipe {recipe.name}", "optim"):
            plan = plan_of(recipe, processes, strided=strided)
            sampler = TrainSampler(
                len(train_set),
                plan,
                rank=processes.rank,
                seed=recipe.run.seed,
                repeats=recipe.augment.repeats,
                labels=train_set.labels if data.sampling == "balanced" else None,
            )
    prepare = augmentation_of(recipe, len(whole_set.classes), processes.device)
    bar = ProgressBar("decode", len(train_set), shown=processes.is_main)
    with bar, processes.together():
        train_batches = TrainingBatches(
            train_set,
            sampler,
            prepare,
            workers=data.workers,
            budget_gib=0.0 if dry_run else data.on_device_gib,
            on_device=data.decode == "cuda",
            advance=bar.update,
        )
    val_batches = evaluation_batches(
        recipe,
        val_set,
        data.image_size,
        processes.device,
        rank=processes.rank,
        world_size=processes.world_size,
        batch_size=REHEARSED_IMAGES if dry_run else None,
    )
    learned = list(map(str, whole_set.classes)) if recipe.task.kind.learns_classes else []
    return Data(whole_set, train_set, val_set, plan, train_batches, val_batches, learned)


def plan_of(recipe: Recipe, processes: Processes, *, strided: bool) -> BatchPlan:
    """How a global batch is shared among processes and micro-batches; ValueError if it cannot."""
    optim, mix = recipe.optim, recipe.mix
    return plan_batches(
        optim.global_batch,
        optim.max_batch_per_process,
        processes.world_size,
        group=mix.group if mix.mixes else 1,
        strided=strided or recipe.model.name.startswith("convmixer"),
    )


def augmentation_of(recipe: Recipe, classes: int, device: torch.device) -> TrainToDevice:
    """What makes training images and targets of views, on the device. classes: of the data."""
    data = recipe.data
    with building(f"recipe {recipe.name}", "rand_augment"):
        recipe.rand_augment.require_channels(data.channels)
    augmentation = Augmentation(
        recipe.run.seed,
        data.image_size,
        recipe.augment,
        recipe.rand_augment,
        recipe.mix,
        masks_of(recipe),
        border_of(recipe),
        recipe.three_augment,
    )
    return TrainToDevice(
        device,
        augmentation,
        mean=data.mean,
        std=data.std,
        channels_last=recipe.engine.channels_last,
        num_classes=classes,
    )


def facts_of(
    recipe: Recipe,
    data: Data,
    task: Task,
    objective: Callable[..., Tensor] | None,
    processes: Processes,
    *,
    dry_run: bool = False,
) -> dict[str, Any]:
    """What run.json records of the data and of what is learned, and a run that goes on has to find
    again. Raises LaunchError, on all processes, if these have other images. objective: in place of
    the task's, if any. dry_run: without the sizes of files.
    """
    root, sources = recipe.data.root, (data.train_set, data.val_set)
    facts: dict[str, Any] = {
        "training images": len(data.train_set),
        "validation images": len(data.val_set),
        "files and labels": "".join(fingerprint(source, root) for source in sources),
        "teacher": task.digest,
        "objective": "the task's" if objective is None else name_of(objective),
    }
    if task.learns_classes and data.val_set.class_images.any():
        facts["score by guessing"] = guessing(task, data.val_set)
    if recipe.model.name.startswith("convmixer"):  # whose BatchNorm sees a micro-batch
        facts["images per micro-batch"] = data.plan.micro_batch_size
    facts["strided pairs"] = data.plan.strided
    processes.require_equal(facts)
    if processes.is_main and not dry_run:
        facts |= file_sizes(sources, recipe.run.seed)
    facts["root"] = root and str(folder_of(root).absolute())
    return facts


def guessing(task: Task, val_set: Source) -> float:
    """The score of a task, in percent, that guesses have which see no image: top-1 of the largest
    class; of several labels the mean precision of random orders.
    """
    counts = val_set.class_images
    share = counts[counts > 0].mean() if task.several_labels else counts.max()
    return round(100.0 * float(share) / len(val_set), 1)


def name_of(function: Callable[..., Any]) -> str:
    """The function's name, or that of its class, for the record."""
    return getattr(function, "__qualname__", type(function).__qualname__)


def border_of(recipe: Recipe) -> tuple[int, ...] | None:
    """The colour beside a whole image, which is near 0 once normalised; None if none is padded."""
    if recipe.augment.fit != "pad":
        return None
    return tuple(round(255 * value) for value in recipe.data.mean)


def evaluation_view(
    recipe: Recipe, size: tuple[int, int] | None = None
) -> Callable[[Tensor], Tensor]:
    """What makes of an image (3, H, W) uint8 a view as the recipe's evaluation does, resized and
    centre-cropped, or whole. size: (height, width); None: the recipe's image size.
    """
    size, how = size or recipe.data.image_size, recipe.eval
    if recipe.augment.fit != "crop":
        border = border_of(recipe)
        return partial(fit_whole, size=size, interpolation=how.interpolation, border=border)
    return partial(
        resize_and_centre_crop,
        size=size,
        crop_pct=how.crop_pct,
        interpolation=how.interpolation,
    )


def as_input(views: Tensor, recipe: Recipe) -> Tensor:
    """Normalise views (B, 3, H, W) uint8 by the recipe's mean and std → (B, 3, H, W) float32."""
    return normalise(views, recipe.data.mean, recipe.data.std)


def training_views(recipe: Recipe, source: Source, count: int) -> Tensor:
    """Normalised evaluation views (n, 3, H, W) of `count` training images, or of all if there are
    fewer. Which ones is keyed by the run's seed.
    """
    order = keyed_generator(recipe.run.seed, Purpose.INIT_IMAGES).permutation(len(source))
    view = evaluation_view(recipe)
    views = [source.image(int(index), view) for index in order[:count]]
    return as_input(torch.stack(views), recipe)


def problems(
    images: Sequence[tuple[Source, int]], threads: int, *, shown: bool = True
) -> Iterator[str]:
    """Decode each image of a source by its number, and yield what is wrong with it, or "". Threads
    do so, since decoders do not hold Python's lock. shown: with a bar.
    """

    def problem(image: tuple[Source, int]) -> str:
        try:
            image[0].image(image[1])
        except DataError as error:
            return str(error)
        return ""

    bar = ProgressBar("read", len(images), shown=shown)
    with bar, ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(images), 1_024):  # all at once, they would take gigabytes
            for line in pool.map(problem, images[start : start + 1_024]):
                bar.update()
                yield line


def read_images(recipe: Recipe, data: Data, processes: Processes) -> int:
    """Decode each image of the run once, by data.workers threads per process, print a line for each
    that cannot be, and count these.
    """
    images = [
        (source, index)
        for source in (data.train_set, data.val_set)
        for index in range(processes.rank, len(source), processes.world_size)
    ]
    found = 0
    for line in filter(None, problems(images, recipe.data.workers or 1, shown=processes.is_main)):
        say(line)
        found += 1
    total, broken = processes.sum(torch.tensor([len(images), found])).tolist()
    if broken:
        processes.say(f"images  {broken:,} of {total:,} cannot be read; nothing was written")
    else:
        processes.say(f"images  all {total:,} can be read")
    return broken
