"""How far RandAugment's operations on photographs differ from Pillow's, pixel by pixel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor
from tqdm import trange

from ..data.augment import rand_augment
from ..data.datasets import LooseImages
from ..data.draw import ALL_OPERATIONS, Draws, Operation, RandAugment, stack_draws
from ..data.images import from_pillow, resize_and_centre_crop
from ..data.operations import GEOMETRIC

RESAMPLING = {False: Image.Resampling.BILINEAR, True: Image.Resampling.BICUBIC}
BATCH = 20                      # photographs that are augmented together


def with_pillow(image: Image.Image, operation: Operation, argument: float, bicubic: bool,
                fill: tuple[int, int, int]) -> Image.Image:
    """Apply one operation by the calls of Pillow that AutoAugment's and timm's code make.

    argument: factor, angle, threshold or share of the side, as the operation has it. fill: colour
    of pixels from outside the image. Posterising to 0 bits, which Pillow refuses, gives black.
    """
    match operation.name:
        case "NONE":
            return image
        case "AutoContrast":
            return ImageOps.autocontrast(image)
        case "Equalize":
            return ImageOps.equalize(image)
        case "Invert":
            return ImageOps.invert(image)
        case "Posterize" if argument == 0:                   # which Pillow refuses
            return Image.new("RGB", image.size, "black")
        case "Posterize":
            return ImageOps.posterize(image, int(argument))
        case "Solarize":
            return ImageOps.solarize(image, int(argument))
        case "SolarizeAdd":
            table = [min(255, level + int(argument)) if level < 128 else level
                     for level in range(256)]
            return image.point(table * 3)
        case "Color" | "Contrast" | "Brightness" | "Sharpness" as name:
            return getattr(ImageEnhance, name)(image).enhance(argument)
        case "Rotate":
            return image.rotate(argument, RESAMPLING[bicubic], fillcolor=fill)
    matrix = {"ShearX": (1, argument, 0, 0, 1, 0), "ShearY": (1, 0, 0, argument, 1, 0),
              "TranslateX": (1, 0, argument * image.width, 0, 1, 0),
              "TranslateY": (1, 0, 0, 0, 1, argument * image.height)}[operation.name]
    return image.transform(image.size, Image.Transform.AFFINE, matrix, RESAMPLING[bicubic],
                           fillcolor=fill)


def decibels(one: Tensor, two: Tensor) -> float:
    """The peak signal-to-noise ratio of two uint8 images in dB; infinite if they are equal."""
    mean_square = (one.double() - two.double()).square().mean().item()
    return 10 * math.log10(255**2 / mean_square) if mean_square else math.inf


def distances(views: Tensor, settings: RandAugment, seed: int) -> Iterator[tuple[float, int]]:
    """Augment each view here and by Pillow; yield PSNR and largest difference of the two results.

    views: (N, 3, H, W) uint8. The difference is in grey levels, 0 to 255.
    """
    rng = np.random.default_rng(seed)
    nothing = np.zeros(4, np.int64), np.array(0)
    draws = stack_draws([Draws(*settings.draw(rng), *nothing) for _ in views])
    for view, ours, *layers in zip(views, rand_augment(views, draws, settings.fill),
                                   draws.operations, draws.arguments, draws.bicubic):
        image = Image.fromarray(view.permute(1, 2, 0).numpy())
        for code, argument, bicubic in zip(*layers):
            image = with_pillow(image, Operation(code), float(argument), bool(bicubic),
                                settings.fill)
        pillows = from_pillow(image)
        yield decibels(ours, pillows), int((ours.int() - pillows.int()).abs().max())


def bench_pixels(folder: Path, size: int, count: int, rounds: int) -> None:
    """Print how many results equal Pillow's, the lowest PSNR and the largest difference.

    count: number of photographs. rounds: draws per photograph. Draws are DeiT's (magnitude 9 ± 0.5,
    fifteen operations), but every drawn operation is applied.
    """
    source = LooseImages(folder, count)
    torch.set_num_threads(1)                         # for so few images a second thread only waits
    geometric = [operation.name for operations in GEOMETRIC.values() for operation in operations]
    colour = [name for name in ALL_OPERATIONS if name not in geometric]
    columns = {"one of the ten on colours": dict(layers=1, operations=colour)}
    for interpolation in ("bilinear", "bicubic"):
        columns[f"one geometric, {interpolation}"] = dict(
            layers=1, operations=geometric, interpolation=interpolation)
        columns[f"two of fifteen, {interpolation}"] = dict(layers=2, interpolation=interpolation)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in columns}
    for start in trange(0, len(source), BATCH, leave=False, disable=None):
        chosen = range(start, min(start + BATCH, len(source)))
        views = torch.stack([resize_and_centre_crop(source.image(index), (size, size), 0.875,
                                                    "bicubic") for index in chosen])
        for number, (name, changes) in enumerate(columns.items()):
            settings = RandAugment(probability=1.0, **changes)
            for turn in range(rounds):
                found[name] += distances(views, settings, (start, number, turn))
    print(f"{len(source)} photographs at {size} px, {rounds} draws each, against Pillow "
          f"{Image.__version__}\n{'':28}{'equal':>8}{'lowest PSNR':>14}{'levels apart':>15}")
    for name, pairs in found.items():
        print(row(name, pairs))


def row(name: str, pairs: Sequence[tuple[float, int]]) -> str:
    """A printed row. pairs: (PSNR, largest difference) of each image."""
    equal = sum(levels == 0 for _, levels in pairs) / len(pairs)
    return (f"{name:28}{100 * equal:6.1f} %{min(psnr for psnr, _ in pairs):11.1f} dB"
            f"{max(levels for _, levels in pairs):15}")
