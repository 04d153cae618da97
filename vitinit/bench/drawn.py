"""Artificial photographs, for machines that have no real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def draw_photographs(folder: Path, count: int, *, height: int = 375, width: int = 500,
                     seed: int = 0, extension: str = "jpg") -> Path:
    """Write `count` images of smooth colours with noise, named 000.jpg and so on; return `folder`.

    At the default size of 500×375, their JPEG files are about as large as ImageNet's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for index in range(count):
        cloud = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        pixels = np.asarray(cloud.resize((width, height), Image.Resampling.BICUBIC), np.int16)
        pixels = (pixels + rng.integers(-24, 25, pixels.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:03}.{extension}", quality=90)
    return folder


def draw_classes(root: Path, *, train: int, val: int, side: int) -> Path:
    """Write an image folder of three classes that differ in brightness; return `root`.

    train, val: number of images per class. side: height in pixels; the width is 3 more.
    """
    for split, count in (("train", train), ("val", val)):
        for number, name in enumerate(("dark", "light", "middle")):
            draw_photographs(root / split / name, count, height=side, width=side + 3,
                             seed=1000 * number + (split == "val"), extension="png")
            for path in sorted((root / split / name).iterdir()):
                pixels = np.asarray(Image.open(path)) // (number + 1)
                Image.fromarray(pixels).save(path)
    return root
