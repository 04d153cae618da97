"""The data of a run: which images it reads, and the batches that this process makes of them."""

from __future__ import annotations

from ..command_line import building
from ..data.augment import ToDevice, TrainToDevice
from ..data.datasets import download, open_split
from ..data.draw import Augmentation
from ..data.images import DataError
from ..data.loader import EvalViews, start_fork_server
from ..data.pipeline import Data, EvaluationBatches, KeptViews, TrainingBatches
from ..data.sampler import TrainSampler, plan_batches
from ..data.sources import Source, held_out_part, oriented, stratified_part
from ..recipe.sections import DataSection, Recipe
from ..train.distributed import Processes
from ..train.metrics import ProgressBar


def open_training_set(data: DataSection) -> tuple[Source, Source]:
    """The whole training set of a recipe, and the part of it that is trained on.

    Raises DataError if the data set cannot be opened, or has a single class.
    """
    whole = oriented(open_split(data.name, data.root, "train", data.num_classes),
                     data.apply_exif_orientation)
    if len(whole.classes) < 2:
        raise DataError(f"{data.root}: one class found, '{whole.classes[0]}'; expected two at least, a "
                        "folder each")
    return whole, stratified_part(whole, share=data.subset, images_per_class=data.images_per_class,
                                  held_out=data.held_out_per_class, seed=data.subset_seed)


def open_data(recipe: Recipe, processes: Processes, *, dry_run: bool) -> Data:
    """Open the data sets of the recipe and build the batches of this process.

    A dry run downloads nothing and does not decode the training set into memory.
    """
    data, optim, augment = recipe.data, recipe.optim, recipe.augment
    start_fork_server(data.workers)
    with processes.together():
        if processes.local_rank == 0 and not dry_run:
            download(data.name, data.root)
    with processes.together():
        whole_set, train_set = open_training_set(data)
        classes = len(whole_set.classes)
        if data.held_out_per_class:                  # validate on these; the test set stays unused
            val_set = held_out_part(whole_set, images_per_class=data.held_out_per_class,
                                    seed=data.subset_seed)
        else:
            val_set = oriented(open_split(data.name, data.root, "val", classes),
                               data.apply_exif_orientation)

    # Which images each step uses, and which of them this process loads.
    with processes.together(), building(f"recipe {recipe.name}", "optim"):
        plan = plan_batches(optim.global_batch, optim.max_batch_per_process, processes.world_size,
                            group=recipe.mix.group if recipe.mix.mixes else 1)
        sampler = TrainSampler(len(train_set), plan, rank=processes.rank, seed=recipe.run.seed,
                               repeats=augment.repeats)

    # How an image is augmented on its way to the model.
    augmentation = Augmentation(recipe.run.seed, data.image_size, augment, recipe.rand_augment,
                                recipe.mix)
    as_input = dict(mean=data.mean, std=data.std, channels_last=recipe.engine.channels_last)
    prepare = TrainToDevice(processes.device, augmentation, **as_input, num_classes=classes)
    with (ProgressBar("decode", len(train_set), shown=processes.is_main) as bar,
          processes.together()):
        train_batches = TrainingBatches(train_set, sampler, prepare, workers=data.workers,
                                        budget_gib=0.0 if dry_run else data.on_device_gib,
                                        advance=bar.advance)

    # How an image is evaluated.
    views = EvalViews(val_set, rank=processes.rank, world_size=processes.world_size,
                      size=data.image_size, crop_pct=recipe.eval.crop_pct,
                      interpolation=recipe.eval.interpolation)
    kept = KeptViews(views, processes.device, on_device_gib=data.on_device_gib,
                     cache_gib=recipe.eval.cache_gib)
    with processes.together():
        val_batches = EvaluationBatches(kept, batch_size=recipe.eval.batch_size,
                                        workers=data.workers,
                                        prepare=ToDevice(processes.device, **as_input))
    return Data(whole_set, train_set, val_set, plan, train_batches, val_batches)
