"""Pure batched functions on (B, 3, H, W), on whatever device the batch is.

    rand_augment   uint8 → uint8     each image through its own operations
    normalise      uint8 → float32
    erase          float32 → float32

Everything random was drawn before (draw.py); here arguments go in, one an image. An image's result
does not depend, to the bit, on the batch it is in or on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .draw import Draws, Operation
from .operations import GEOMETRIC, PLAIN, affine, affine_matrix

CACHED_PIXELS = 2**17           # about 2.6 images of 224×224
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def put(values: np.ndarray, device: torch.device) -> Tensor:
    """A small array onto the device, without waiting for the work that is queued there."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)


# ---------------------------------------------------------------------------------------------
# RandAugment
# ---------------------------------------------------------------------------------------------


def rand_augment(images: Tensor, draws: Draws, fill: Sequence[int]) -> Tensor:
    """(B, 3, H, W) uint8 → the same: every image through its operations, in order.

    draws: on the host, B of them. fill: the colour that geometric operations bring in, 0 to 255.
    """
    if not draws.operations.any():
        return images
    images = images.clone(memory_format=torch.contiguous_format)
    for codes, arguments, bicubic in zip(draws.operations.T, draws.arguments.T, draws.bicubic.T):
        for operation, function in PLAIN.items():
            _replace(images, codes == operation,
                     lambda part, rows: function(part, put(arguments[rows, None, None, None],
                                                           images.device)))
        for (axes, operations), smooth in itertools.product(GEOMETRIC.items(), (False, True)):
            _replace(images, np.isin(codes, operations) & (bicubic == smooth),
                     lambda part, rows: affine(part, put(np.stack([
                         affine_matrix(Operation(code), argument, *images.shape[2:])
                         for code, argument in zip(codes[rows], arguments[rows])]),
                         images.device), bicubic=smooth, fill=fill, axes=axes))
    return images


def _replace(images: Tensor, which: np.ndarray, change: Callable[[Tensor, np.ndarray], Tensor]
             ) -> None:
    """Put the images for which `which` is true through `change`, in place."""
    chosen = np.flatnonzero(which)
    # A CPU is twice as fast while what lies between fits into its cache.
    on_cpu = images.device.type == "cpu"
    step = 1 + (CACHED_PIXELS // images[0, 0].numel() if on_cpu else len(chosen))
    for start in range(0, len(chosen), step):
        rows = chosen[start:start + step]
        index = put(rows, images.device)
        images.index_copy_(0, index, change(images.index_select(0, index), rows))


# ---------------------------------------------------------------------------------------------
# Normalising and erasing
# ---------------------------------------------------------------------------------------------


def normalise(images: Tensor, mean: Sequence[float] | Tensor,
              std: Sequence[float] | Tensor) -> Tensor:
    """(B, 3, H, W) uint8 → float32: (value / 255 - mean) / std by channel.

    mean, std: three numbers, or float64 tensors that are on the images' device already.
    """
    mean, std = (torch.as_tensor(values, dtype=torch.float64, device=images.device).view(3, 1, 1)
                 for values in (mean, std))
    # One product and one sum: devices divide by a number in different ways.
    return (images * (1.0 / (255.0 * std)).float()).sub_((mean / std).float())


def normal_quantiles(count: int = 2**16) -> Tensor:
    """The quantiles (i + ½) / count of N(0, 1): (count,) float32, from -4.3 to 4.3."""
    shares = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return torch.special.ndtri(shares).float()


def hashed(keys: Tensor, counters: Tensor) -> Tensor:
    """SplitMix64 (Steele et al., OOPSLA 2014): 64 random bits for each key and counter, int64.

    The counter-th output of the generator that starts from the key. Multiplications wrap, as
    int64's do; shifts are those of unsigned numbers.
    """
    def shifted(bits: Tensor, by: int) -> Tensor:
        return (bits >> by) & ((1 << (64 - by)) - 1)
    bits = keys + (counters + 1) * _signed(0x9E3779B97F4A7C15)
    bits = (bits ^ shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ shifted(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ shifted(bits, 31)


def _signed(word: int) -> int:
    """An unsigned 64-bit constant as the int64 with the same bits."""
    return word - 2**64 if word >= 2**63 else word


def erase(images: Tensor, draws: Draws, fill: Literal["pixel", "rand", "const"],
          quantiles: Tensor) -> Tensor:
    """Fill every image's box in (B, 3, H, W) float32, normalised.

    draws: on the host. quantiles: those of N(0, 1) on the images' device. Noise is looked up in
    them by a hash of the image's key and the place in the box (channel, row, column), so that it is
    the same to the bit on every device.
    """
    rows = np.flatnonzero(draws.erase_boxes[:, 2])
    if not len(rows):
        return images
    device = images.device
    _, _, heights, widths = draws.erase_boxes[rows].T
    sizes = 3 * heights * widths
    # The values of all boxes one after another; `box` says of each in which box it is.
    count = int(sizes.sum())
    box = torch.repeat_interleave(put(sizes, device), output_size=count)
    starts = put(np.cumsum(sizes) - sizes, device)
    place = torch.arange(count, device=device) - starts[box]             # (values,) in their box
    tops, lefts, heights, widths = put(draws.erase_boxes[rows], device)[box].unbind(1)
    channel, within = place // (heights * widths), place % (heights * widths)
    if fill == "const":
        noise = torch.zeros((), device=device)
    else:
        keys = put(draws.noise_keys[rows], device)[box]
        bits = hashed(keys, channel if fill == "rand" else place)
        noise = quantiles[bits & (len(quantiles) - 1)]
    erased = images.clone()
    erased[put(rows, device)[box], channel, tops + within // widths, lefts + within % widths] = noise
    return erased
