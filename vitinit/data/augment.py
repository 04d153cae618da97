"""The way of a batch on the device, from bytes to what the model takes: augmented and normalised.

The result for an image is the same, bit for bit, whatever batch it is in and whatever the device.
All random numbers were drawn before (draw.py) and come with the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from .draw import Augmentation
from .loader import Batch
from .mix import mix_images, mix_targets, smooth_one_hot
from .operations import CPU_CHUNK, rand_augment, upload

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


# ---------------------------------------------------------------------------------------------
# Normalising
# ---------------------------------------------------------------------------------------------


class Normalise:
    """Map (B, 3, H, W) uint8 to float32: (value / 255 - mean) / std, per channel.

    mean, std: three numbers each, of values in [0, 1]. device: that of the images.
    """

    def __init__(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor,
                 device: torch.device) -> None:
        mean, std = (torch.as_tensor(values, dtype=torch.float64, device=device).view(3, 1, 1)
                     for values in (mean, std))
        # Written as one product and one difference, because devices divide in different ways.
        self.scale, self.shift = (1.0 / (255.0 * std)).float(), (mean / std).float()

    def __call__(self, images: Tensor) -> Tensor:
        return (images * self.scale).sub_(self.shift)


def normalise(images: Tensor, mean: Sequence[float] | Tensor,
              std: Sequence[float] | Tensor) -> Tensor:
    """Normalise one batch; see `Normalise`, which is cheaper for many."""
    return Normalise(mean, std, images.device)(images)


# ---------------------------------------------------------------------------------------------
# Erasing
# ---------------------------------------------------------------------------------------------


def normal_quantiles(count: int = 2**16) -> Tensor:
    """The quantiles of N(0, 1) at (i + ½) / count: (count,) float32, from -4.3 to 4.3."""
    shares = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return torch.special.ndtri(shares).float()


def hashed(keys: Tensor | int, counters: Tensor) -> Tensor:
    """64 random bits per pair of key and counter, as int64.

    This is SplitMix64 (Steele et al., OOPSLA 2014): output number `counter` of the generator whose
    seed is `key`. Products wrap around, as is usual for int64, and shifts to the right fill with
    zeros, as for unsigned integers.
    """
    def shifted(bits: Tensor, by: int) -> Tensor:
        return (bits >> by) & ((1 << (64 - by)) - 1)
    # The constants 0x9E37…, 0xBF58… and 0x94D0… of the paper as int64, less 2^64.
    bits = keys + (counters + 1) * (0x9E3779B97F4A7C15 - 2**64)
    bits = (bits ^ shifted(bits, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ shifted(bits, 27)) * (0x94D049BB133111EB - 2**64)
    return bits ^ shifted(bits, 31)


def erase(images: Tensor, erased: Tensor, count: int, fill: str, quantiles: Tensor) -> Tensor:
    """Fill each image's erased box, in place; images: (B, 3, H, W) float32, normalised.

    erased: (B, 5), as in `draw.Draws`, on the images' device. count: how many values all boxes have
    (3 · height · width each), which the host must know. fill: "pixel" (noise per value), "rand"
    (noise per channel) or "const" (zeros). quantiles: `normal_quantiles`, on the same device.

    Noise is not drawn by a generator of the device. It is looked up among the quantiles by a hash
    of the image's noise key and the position in the box (channel, row, column), so that it is the
    same, bit for bit, on every device.
    """
    if not count:
        return images
    area, across = images.shape[2] * images.shape[3], images.shape[3]
    top, left, height, width, key = erased.unbind(1)                     # (B,) each
    rows = torch.arange(len(images), device=images.device)
    sizes = 3 * height * width
    corners = 3 * area * rows + across * top + left
    box = torch.repeat_interleave(rows, sizes, output_size=count)        # of each value
    starts, corners, pixels, widths, keys = (
        column.index_select(0, box)                                      # (count,) each
        for column in (sizes.cumsum(0) - sizes, corners, height * width, width, key))
    position = torch.arange(count, device=images.device).sub_(starts)    # in its box
    channel = position // pixels
    row = (position - channel * pixels) // widths
    # A value's place: as in an image of the box's size, but for what lies beside the box.
    index = corners.add_(position).add_(channel * (area - pixels)).add_(row * (across - widths))
    values = torch.zeros(count, device=images.device)
    if fill != "const":
        bits = hashed(keys, channel if fill == "rand" else position)
        values = quantiles.index_select(0, bits & (len(quantiles) - 1))
    images.view(-1).scatter_(0, index, values)
    return images


# ---------------------------------------------------------------------------------------------
# The way of a batch on the device
# ---------------------------------------------------------------------------------------------


class ToDevice:
    """Prepare evaluation batches: normalised images (B, 3, H, W) float32 and labels (B,).

    mean, std: per channel, of values in [0, 1]. channels_last: the memory format of the images.
    """

    def __init__(self, device: torch.device, *, mean: Sequence[float], std: Sequence[float],
                 channels_last: bool) -> None:
        self.device = device
        self.normalise = Normalise(mean, std, device)
        self.format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = (part.to(self.device, non_blocking=True) for part in batch)
        return self.normalise(images).contiguous(memory_format=self.format), labels


class TrainToDevice(ToDevice):
    """Prepare training batches: augmented images (B, 3, H, W) float32, and targets (B, K) float32.

    chunk: how many pixels are normalised, erased and mixed at once. By default a CPU does so with
        what fits into its cache, and a GPU with the whole micro-batch, which takes fewest launches;
        the bits are the same.
    """

    def __init__(self, device: torch.device, augmentation: Augmentation, *, num_classes: int,
                 mean: Sequence[float], std: Sequence[float], channels_last: bool,
                 chunk: int | None = None) -> None:
        super().__init__(device, mean=mean, std=std, channels_last=channels_last)
        self.augmentation, self.num_classes = augmentation, num_classes
        self.chunk = chunk if chunk is not None else CPU_CHUNK if device.type == "cpu" else 2**62
        self.quantiles = normal_quantiles().to(device)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Augment a micro-batch, which holds every image with its mixing partner."""
        images, labels, erased, mixed = (part.to(self.device, non_blocking=True) for part in (
            batch.images, batch.labels, batch.draws.erased, batch.draws.mixed))
        settings = self.augmentation
        images = rand_augment(images, batch.draws.operations.numpy(), settings.rand_augment.fill)
        targets = smooth_one_hot(labels, self.num_classes, settings.mix.label_smoothing)
        if settings.mix.mixes:
            targets = mix_targets(targets, mixed)
        count, _, height, width = images.shape
        values = 3 * batch.draws.erased.numpy()[:, 2:4].prod(1)          # (B,), erased of each
        if count * height * width <= self.chunk:
            return self.finish(images, erased, int(values.sum()), mixed), targets
        done = torch.empty(images.shape, memory_format=self.format, device=self.device)
        for chunk in pairs_in_chunks(count, self.chunk // (height * width)):
            rows = upload(chunk, self.device)
            done.index_copy_(0, rows, self.finish(
                images.index_select(0, rows), erased[rows], int(values[chunk].sum()), mixed[rows]))
        return done, targets

    def finish(self, images: Tensor, erased: Tensor, count: int, mixed: Tensor) -> Tensor:
        """Turn uint8 images (n, 3, H, W) into what the model takes; count: as in `erase`.

            normalise → erase → mix     the order of DeiT
            mix → normalise → erase     with erase_after_mix: the order of timm with its prefetcher,
                                        which mixes uint8 images in workers
        """
        augment, mixes = self.augmentation.augment, self.augmentation.mix.mixes
        if mixes and augment.erase_after_mix:
            images = mix_images(images, mixed)
        images = erase(self.normalise(images), erased, count, augment.erase_fill, self.quantiles)
        if mixes and not augment.erase_after_mix:
            images = mix_images(images, mixed)
        return images.contiguous(memory_format=self.format)


def pairs_in_chunks(count: int, most: int) -> Iterator[np.ndarray]:
    """Yield the indices of `count` images in chunks that hold each image with its mixing partner.

    Partners stand opposite each other, so a chunk is indices from the front of the batch and from
    its end; an odd batch has one image in the middle. most: how many images a chunk may have, which
    has at least one pair.
    """
    pairs = max(1, most // 2)
    for first in range(0, (count + 1) // 2, pairs):
        front = np.arange(first, min(first + pairs, (count + 1) // 2))
        back = count - 1 - front[::-1]
        yield np.concatenate([front, back[back > front[-1]]])
