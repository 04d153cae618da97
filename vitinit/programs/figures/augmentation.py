"""The figures `operations` and `batch`: what augmentation does to photographs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ...data.draw import SampleKey, Samples, unpack
from ...data.images import decode_image, resize_and_centre_crop
from ...data.loader import TrainViews
from ...data.rand_augment import Operation, for_device, rand_augment
from ...data.sources import LooseImages
from ...recipe.files import load_recipe
from ...runs.data import augmentation_of
from ..shared.plot import pixels, save, subplots

MAGNITUDE = 9.0  # of the operations, as DeiT has it


def operations_figure(out: Path, photograph: Path) -> None:
    """Draw one photograph under each of RandAugment's operations, of positive sign and bicubic."""
    image = resize_and_centre_crop(decode_image(str(photograph)), (224, 224), 0.875, "bicubic")
    settings = load_recipe("deit_base").rand_augment
    operations = np.array(Operation)[:-1]  # of RandAugment; the first, NONE, is the photograph
    ones = np.ones(operations.shape)
    arguments = settings.arguments(operations, MAGNITUDE * ones, ones)
    drawn = np.stack([operations, arguments, ones], 1)[:, None]
    described = torch.from_numpy(for_device(drawn, (224, 224)))
    images = rand_augment(image.expand(len(ones), -1, -1, -1), described, settings.fill)
    figure, axes = subplots(4, 4, 6.4, 7.0)
    for axis, tile, operation, argument in zip(axes.flat, images, Operation, arguments):
        title = operation.name if operation else "original"
        if argument:
            title += f" {argument:.3g}"
        axis.imshow(pixels(tile))
        axis.set_title(title, fontsize=9)
        axis.set_axis_off()
    save(figure, out, f"RandAugment's operations at magnitude {MAGNITUDE:g}")


def draw_batch(out: Path, folder: Path, *, seed: int) -> None:
    """Draw two batches of six images after DeiT's whole augmentation, mixed by mixup and by cutmix.

    folder: the first 12 images in it are used, again from the first if there are fewer.
    """
    source = LooseImages(folder, 12)
    count = 6
    figure, axes = subplots(2, count, 1.4 * count, 3.4)
    deit = load_recipe("deit_base")
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (deit.data.mean, deit.data.std))
    run = replace(deit.run, seed=seed)
    kinds = {
        "mixup": replace(deit.mix, cutmix_alpha=0.0),
        "cutmix": replace(deit.mix, mixup_alpha=0.0),
    }
    for step, (row, (kind, mixing)) in enumerate(zip(axes, kinds.items())):
        recipe = replace(deit, mix=mixing, run=run)
        prepare = augmentation_of(recipe, 1, torch.device("cpu"))
        keys = [SampleKey(0, (step * count + column) % len(source)) for column in range(count)]
        views = TrainViews(source, prepare.augmentation)
        batch = views[Samples(step, keys, np.zeros(count, np.int64))]
        images, _ = prepare(batch)
        # Undo the normalisation; noise in erased boxes is clamped to black and white.
        mixed = (images * std + mean).clamp(0, 1)
        share = unpack(batch.draws).mixed[0, 0].item()
        for column, (axis, tile) in enumerate(zip(row, mixed)):
            axis.imshow(pixels(tile))
            axis.set_title(
                f"{share:.2f} × {column + 1} + {1 - share:.2f} × {count - column}", fontsize=8
            )
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(kind, fontsize=10)
    heading = "Two augmented batches: each image with its partner, targets in these shares"
    save(figure, out, heading)
