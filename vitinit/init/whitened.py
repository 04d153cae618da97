"""Whitened patches: at the start, no component of a patch drowns the others.

Neighbouring pixels are alike. In 4×4 patches of CIFAR-10 the brightness of the whole patch has 35
times the mean square of a pixel, its slopes and its colour two to three times, and 21 of the 48
components less than a thousandth. Random weights pass this on, and LayerNorm keeps it: a token is
mostly the brightness of its patch. Here the patch embedding starts as a random rotation of whitened
patches, as the first layer of fast convolutional networks does (Jordan, arXiv 2404.00498). There it
is frozen; here nothing is. What it is worth: recipes/what_an_init_is_worth.md.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .baseline import Base, draw_base

FLOOR = 0.05                # of the components' mean square, in units of its mean over components


@torch.no_grad()
def whitened(model: nn.Module, *, generator: torch.Generator, base: Base = "default",
             images: Tensor | None = None) -> None:
    """Let the patch embedding of any of our models that has one as a convolution whiten patches.

    | tensor                                 | value                                              |
    |----------------------------------------|----------------------------------------------------|
    | weight of the patch embedding          | a rotation of whitened patches (`whiten_patches`)  |
    | everything else                        | as `base` drew it                                  |

    images: (n, 3, H, W), normalised training images, which train.py gives: they are no option.
        Without, white noise takes their place.
    """
    draw_base(model, base, generator)
    whiten_patches(model, images, generator)


def whiten_patches(model: nn.Module, images: Tensor | None, generator: torch.Generator) -> None:
    """Write the weight of the model's first convolution, (D, C, p, q), the patch embedding.

    It becomes R (M + floor)^(−1/2), where M is the mean of the products of a patch's components
    over all patches of `images`, R is a random matrix with orthogonal rows or columns, and the
    floor keeps what is noise small. The outputs keep the mean square that they have had on the
    images. Raises ValueError if it does not cut patches: if its kernel is not its stride.
    """
    layer = next((layer for layer in model.modules() if isinstance(layer, nn.Conv2d)), None)
    if layer is None or layer.kernel_size != layer.stride:
        raise ValueError("the patch embedding is not one convolution, and no other is whitened")
    weight = layer.weight.flatten(1)                                     # (D, P), P = C·p·q
    moments = torch.eye(weight.shape[1], dtype=weight.dtype)             # of white noise
    if images is not None:
        moments.zero_()
        for image in images.to(weight):
            patches = F.unfold(image, layer.kernel_size, stride=layer.stride)        # (P, N)
            moments.addmm_(patches, patches.T, alpha=1.0 / (len(images) * patches.shape[1]))
    values, vectors = torch.linalg.eigh(moments)
    scales = (values.clamp_min(0.0) + FLOOR * values.mean()).rsqrt()
    rotation = nn.init.orthogonal_(torch.empty_like(weight), generator=generator)
    white = rotation @ (vectors * scales) @ vectors.T
    before, after = (torch.sum(each @ moments * each) for each in (weight, white))
    layer.weight.copy_((white * (before / after).sqrt()).view_as(layer.weight))
