"""The figures `operations` and `batch`: what augmentation does to photographs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ..data.augment import (IMAGENET_MEAN, IMAGENET_STD, erase, erased_boxes, normal_quantiles,
                            normalise)
from ..data.datasets import LooseImages
from ..data.draw import Operation, SampleDraws, SampleKey
from ..data.images import decode_image, resize_and_centre_crop
from ..data.loader import TrainViews, train_loader
from ..data.mix import mix_images, mixing_of
from ..data.operations import operation_tables, rand_augment
from ..data.to_device import upload
from ..keys import Stream, keyed_generator
from ..recipe.files import RECIPES, load_recipe
from .plot import pyplot, save


def draw_operations(out: Path, photograph: Path, *, magnitude: float) -> None:
    """Draw one photograph under each of RandAugment's operations.

    All have the same magnitude, 0 to 10, with positive sign. Geometric ones interpolate
    bicubically.
    """
    plt = pyplot()
    image = resize_and_centre_crop(decode_image(str(photograph)), (224, 224), 0.875, "bicubic")
    settings = load_recipe(RECIPES / "deit_base.toml").rand_augment
    operations = np.array(Operation)                 # the first, NONE, is the photograph
    ones = np.ones(operations.shape)
    arguments = settings.arguments(operations, magnitude * ones, ones)
    tables = operation_tables(np.stack([operations, arguments, ones], 1)[:, None], (224, 224),
                              settings.fill, at_once=False)
    images = rand_augment(image.expand(len(operations), -1, -1, -1),
                          *upload(image.device, [tables]))
    figure, axes = plt.subplots(4, 4, figsize=(9.0, 9.7), layout="constrained")
    for axis, tile, operation, argument in zip(axes.flat, images, Operation, arguments):
        axis.imshow(tile.permute(1, 2, 0).numpy())
        axis.set_title(f"{operation.name} {argument:.3g}" if argument else
                       operation.name if operation else "original", fontsize=9)
        axis.set_axis_off()
    figure.suptitle(f"RandAugment's operations at magnitude {magnitude:g}", fontsize=11)
    save(figure, out, dpi=72, few_colours="dithered")


def draw_batch(out: Path, folder: Path, *, seed: int) -> None:
    """Draw two batches of six images after DeiT's whole augmentation, mixed by mixup and by cutmix.

    folder: the first 12 images in it are used, again from the first if there are fewer.
    """
    plt = pyplot()
    source, size, count = LooseImages(folder, 12), (224, 224), 6
    deit = load_recipe(RECIPES / "deit_base.toml")
    views = TrainViews(source, SampleDraws(seed, size, deit.augment, deit.rand_augment))
    keys = [[SampleKey(0, (row * count + column) % len(source)) for column in range(count)]
            for row in range(2)]
    figure, axes = plt.subplots(2, count, figsize=(2.05 * count, 4.9), layout="constrained")
    kinds = {"mixup": replace(deit.mix, cutmix_alpha=0.0),
             "cutmix": replace(deit.mix, mixup_alpha=0.0)}
    batches = train_loader(views, keys, workers=0, pin_memory=False)
    for step, (row, batch, (kind, mixing)) in enumerate(zip(axes, batches, kinds.items())):
        mix = mixing.draw(keyed_generator(seed, Stream.MIX, step, 0), *size)
        operations, erased = (part.numpy() for part in batch.draws)
        operations, boxes, mixes = upload(batch.images.device, [
            operation_tables(operations, size, deit.rand_augment.fill, at_once=False),
            erased_boxes(erased, size), mixing_of([mix] * count)])
        images = normalise(rand_augment(batch.images, operations), IMAGENET_MEAN, IMAGENET_STD)
        images = erase(images, boxes, "pixel", normal_quantiles(), at_once=False)
        # Undo the normalisation; noise in erased boxes is clamped to black and white.
        mixed = mix_images(images, mixes, at_once=False) * torch.tensor(IMAGENET_STD).view(3, 1, 1)
        mixed = (mixed + torch.tensor(IMAGENET_MEAN).view(3, 1, 1)).clamp(0, 1)
        for column, (axis, tile) in enumerate(zip(row, mixed)):
            axis.imshow(tile.permute(1, 2, 0).numpy())
            axis.set_title(f"{mix.share:.2f} × {column + 1} + "
                           f"{1 - mix.share:.2f} × {count - column}", fontsize=9)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(kind, fontsize=10)
    figure.suptitle("Two augmented batches: each image with its partner, targets in these shares",
                    fontsize=11)
    save(figure, out, dpi=72, few_colours="dithered")
