"""Turn uint8 batches into what the model takes, augmented and normalised, on the device.

The result for an image is the same, bit for bit, whatever batch it is in and whatever the device.
All random numbers were drawn before (draw.py) and come with the batch.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from .draw import Array, Augmentation, unpack
from .operations import GROUP
from .rand_augment import CPU_CHUNK, rand_augment

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def normalise(
    images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor
) -> Tensor:
    """Map (B, 3, H, W) uint8 to float32: (value / 255 - mean) / std, by a mean and std per channel."""
    # In float64 on the CPU, or where the numbers are: Apple's GPUs have none.
    mean = torch.as_tensor(mean, dtype=torch.float64).view(-1, 1, 1)
    std = torch.as_tensor(std, dtype=torch.float64).view(-1, 1, 1)
    scale = 1.0 / (255.0 * std)
    shift = mean / std
    # One product and one difference, because devices divide float32 in different ways.
    scale, shift = (part.float().to(images.device) for part in (scale, shift))
    return images.float().mul_(scale).sub_(shift)  # a CPU is slow at arithmetic on two types


def normal_quantiles() -> Tensor:
    """The quantiles of N(0, 1) at (i + ½) / 2¹⁶: (2¹⁶,) float32, from -4.3 to 4.3."""
    probabilities = (torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16
    return torch.special.ndtri(probabilities).float()


def hashed(keys: Array | int, counters: Array) -> Array:
    """64 random bits, as int64: output number `counter` of SplitMix64 with `key` as its seed.

    Steele et al., OOPSLA 2014. Products wrap around and shifts fill with zeros, as if unsigned.
    """

    def shifted(bits: Array, by: int) -> Array:
        without_sign = (1 << (64 - by)) - 1  # a shift of int64 repeats the sign, cleared here
        return (bits >> by) & without_sign

    # The constants of the paper as int64, less 2^64.
    bits = keys + (counters + 1) * (0x9E3779B97F4A7C15 - 2**64)
    bits = (bits ^ shifted(bits, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ shifted(bits, 27)) * (0x94D049BB133111EB - 2**64)
    return bits ^ shifted(bits, 31)


def erase(images: Tensor, erased: Tensor, num_erased: int, fill: str, quantiles: Tensor) -> Tensor:
    """Fill each image's erased box, in place; images: (B, 3, H, W) float32, normalised, contiguous.

    erased: (B, 5), as in `draw.Draws`. num_erased: how many values all boxes have (channels ·
    height · width each), which the host must know. fill: as the key augment.erase_fill. All tensors
    are on one device. Noise is looked up among the quantiles (of `normal_quantiles`) by a hash of
    the image's noise key and the position in the box (channel, row, column): the same bits on every
    device.
    """
    if num_erased == 0:
        return images
    count, channels, down, across = images.shape
    area = down * across
    whole = channels * area
    # Per box, (B,): the place of its first value among those of all images, its sizes and its key.
    top, left, height, width = erased[:, :4].long().unbind(1)
    first = torch.arange(0, whole * count, whole, device=images.device)
    corner = first + across * top + left
    pixels = height * width
    size = channels * pixels
    noise_key = erased[:, 4].view(torch.int64)
    # Per erased value, (num_erased,), box by box: its box's numbers, and where its box starts.
    box = torch.repeat_interleave(size, output_size=num_erased)
    start, corner, pixels, width, noise_key = (
        column.index_select(0, box)
        for column in (size.cumsum(0) - size, corner, pixels, width, noise_key)
    )
    position = torch.arange(num_erased, device=images.device).sub_(start)  # in its box
    channel = position // pixels
    row = (position - channel * pixels) // width
    # Its place in images.view(-1): as if the box were the whole image, and what lies beside it.
    place = corner.add_(position)
    place.add_(channel * (area - pixels))
    place.add_(row * (across - width))
    if fill == "const":
        values = images.new_zeros(num_erased)
    else:
        bits = hashed(noise_key, channel if fill == "rand" else position)
        values = quantiles.index_select(0, bits & (len(quantiles) - 1))
    images.view(-1).scatter_(0, place, values)
    return images


def erase_one_by_one(images: ndarray, erased: ndarray, fill: str, quantiles: ndarray) -> None:
    """The same as `erase` on the host, box by box, where numpy takes least time for each."""
    noise_keys = erased[:, 4].view(np.int64)
    for index in np.flatnonzero(erased[:, 2]):
        top, left, height, width = erased[index, :4].astype(int)
        box = images[index, :, top : top + height, left : left + width]
        shape = box.shape if fill == "pixel" else (len(box), 1, 1)
        bits = hashed(noise_keys[index], np.arange(prod(shape)).reshape(shape))
        box[:] = 0.0 if fill == "const" else quantiles[bits & (len(quantiles) - 1)]


def smooth_one_hot(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Labels (B,) → (B, K) float32: s/K, and 1 − s more for the label (arXiv 1512.00567, §7)."""
    off = np.float32(smoothing / num_classes)
    on = np.float32(1.0 - smoothing) + off
    targets = torch.full((len(labels), num_classes), float(off), device=labels.device)
    return targets.scatter_(1, labels[:, None], float(on))


def targets_of(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """What a model is to say, (B, K) float32, of labels (B,), or (B, K) of 0 and 1: those."""
    if labels.ndim == 2:
        return labels.float()
    return smooth_one_hot(labels, num_classes, smoothing)


def mix_images(images: Tensor, mixed: Tensor) -> Tensor:
    """Mix (B, 3, H, W) with partners, uint8 rounded; mixed: (B, 5), see `draw.Draws`."""
    share, top, left, height, width = mixed.view(-1, 5, 1, 1, 1).unbind(1)  # (B, 1, 1, 1) each
    rows = torch.arange(images.shape[2], device=images.device)[:, None]
    columns = torch.arange(images.shape[3], device=images.device)
    in_rows = (rows >= top) & (rows < top + height)  # (B, 1, H, 1)
    in_columns = (columns >= left) & (columns < left + width)  # (B, 1, 1, W)
    inside = (in_rows & in_columns).float()  # (B, 1, H, W)
    # An image that has a box stays as it is around it: weights of 1 and 0 change no bit.
    share = share.masked_fill(height * width > 0, 1.0)
    blended = blend(images, share.float() - inside, (1.0 - share).float() + inside)
    if images.is_floating_point():
        return blended
    return blended.round_().to(images.dtype)


def mix_targets(targets: Tensor, mixed: Tensor) -> Tensor:
    """Mix targets (B, K) float32 with their partners'; mixed: as for `mix_images`."""
    share = mixed[:, :1]  # (B, 1)
    return blend(targets, share.float(), (1.0 - share).float())


def blend(batch: Tensor, weight: Tensor, partner_weight: Tensor) -> Tensor:
    """weight · batch + partner_weight · partners, in float32. The partner of image i of a
    micro-batch is its image B − 1 − i, see `BatchPlan.positions`, so flip(0) puts it there.
    """
    partners = batch.flip(0).float()
    return partners.mul_(partner_weight).add_(batch * weight)


class ToDevice:
    """Prepare evaluation batches: normalised images (B, 3, H, W) float32 and labels (B,)."""

    def __init__(
        self,
        device: torch.device,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        channels_last: bool,
    ) -> None:
        self.goes_to = device
        if device.type == "mps":  # which has no float64, as draws and statistics are
            device = torch.device("cpu")
        self.device = device  # where batches are prepared
        self.statistics = torch.tensor([mean, std], dtype=torch.float64, device=device)
        self.format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = (part.to(self.device, non_blocking=True) for part in batch)
        images = normalise(images, *self.statistics)
        images = images.contiguous(memory_format=self.format)
        return images.to(self.goes_to), labels.to(self.goes_to)


class TrainToDevice(ToDevice):
    """Prepare training batches: augmented images (B, 3, H, W) float32, and targets (B, K) float32,
    or the visible patches (B, n) int64 of a model that is to reconstruct the others.

    as_input: those of `ToDevice`. A CPU normalises, erases and mixes what fits into its cache at
    once, and a GPU the whole micro-batch, which takes fewest launches; the bits are the same.
    """

    def __init__(
        self, device: torch.device, augmentation: Augmentation, *, num_classes: int, **as_input: Any
    ) -> None:
        super().__init__(device, **as_input)
        device = self.device
        self.augmentation = augmentation
        self.num_classes = num_classes
        self.chunk = CPU_CHUNK if device.type == "cpu" else 2**62  # pixels at once
        self.fill = torch.tensor(augmentation.rand_augment.fill, dtype=torch.uint8, device=device)
        self.quantiles = normal_quantiles().to(device)

    def __call__(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Augment a micro-batch, a `loader.Batch` of images with their mixing partners."""
        images, labels, packed = (part.to(self.device, non_blocking=True) for part in batch)
        draws = unpack(packed)
        on_host = unpack(batch[2].numpy())  # the same, where reading it waits for no GPU
        mix = self.augmentation.mix
        targets = labels
        if self.augmentation.masks is None:
            targets = targets_of(labels, self.num_classes, mix.label_smoothing)
        if mix.mixes:
            targets = mix_targets(targets, draws.mixed)
        operation_groups = on_host.operations[..., GROUP]
        images = rand_augment(images, draws.operations, self.fill, groups=operation_groups)
        count, _, height, width = images.shape
        if count * height * width <= self.chunk:
            inputs = self.finish(images, draws.erased, on_host.erased, draws.mixed)
            return inputs.to(self.goes_to), targets.to(self.goes_to)
        inputs = torch.empty(images.shape, memory_format=self.format, device=self.device)
        for rows in pairs_in_chunks(count, self.chunk // (height * width)):  # of a CPU
            inputs[rows] = self.finish(
                images.index_select(0, rows),
                draws.erased[rows],
                on_host.erased[rows.numpy()],
                draws.mixed[rows],
            )
        return inputs.to(self.goes_to), targets.to(self.goes_to)

    def finish(self, images: Tensor, erased: Tensor, on_host: ndarray, mixed: Tensor) -> Tensor:
        """Turn uint8 images (n, 3, H, W) into what the model takes; on_host: `erased` there.

        normalise → erase → mix     the order of DeiT
        mix → normalise → erase     with erase_after_mix: the order of timm with its prefetcher,
                                    which mixes uint8 images in workers
        """
        augment = self.augmentation.augment
        mixes = self.augmentation.mix.mixes
        if mixes and augment.erase_after_mix:
            images = mix_images(images, mixed)
        images = normalise(images, *self.statistics)
        if self.device.type == "cpu":
            erase_one_by_one(images.numpy(), on_host, augment.erase_fill, self.quantiles.numpy())
        else:
            num_erased = int(images.shape[1] * on_host[:, 2] @ on_host[:, 3])
            images = images.contiguous()  # views are channels-last where no operation copied them
            erase(images, erased, num_erased, augment.erase_fill, self.quantiles)
        if mixes and not augment.erase_after_mix:
            images = mix_images(images, mixed)
        return images.contiguous(memory_format=self.format)


def pairs_in_chunks(count: int, most: int) -> Iterator[Tensor]:
    """Yield the indices of `count` images, about `most` at a time, without parting partners."""
    for front in torch.arange((count + 1) // 2).split(max(1, most // 2)):
        back = count - 1 - front.flip(0)
        yield torch.cat([front, back[back > front[-1]]])
