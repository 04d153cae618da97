"""The content of tokens at the start: how large it is beside the position embedding, and its filters.

The content of a patch token is the output of the patch embedding. At the first LayerNorm it is added
to the position embedding, and the LayerNorm divides the sum by its standard deviation. So the ratio of
the two decides how much of what the first block reads is image, and how much is position. A patch
embedding of standard deviation 0.02 on 48 pixels makes the content less than half as large as the
position embedding of `impulse`; `content_scale` sets the ratio directly.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor

from ..models.vit import VisionTransformer
from .options import require_not_negative

# Assumed mean square of normalised pixels: 1 on average, but many patches have more.
PIXELS = 2.0
# Added to every variance before a direction is scaled to variance 1, as a share of the mean variance.
# Without it, directions in which JPEG files hold nothing but rounding would be as large as all others.
FLOOR = 1e-3


def write_content(model: VisionTransformer, *, patch_embed: str, content_scale: float,
                  images: Tensor | None, first: int = 0) -> float | None:
    """Write what the options `patch_embed` and `content_scale` of an init ask for.

    patch_embed: "base" leaves the patch embedding as it was drawn, "whitened" writes principal
        directions of `images`, (n, 3, H, W), from channel `first` on.
    content_scale: see `scale_content`. pos_embed must have been written by then.

    Returns what `known_content` says of it.
    """
    if patch_embed not in ("base", "whitened"):
        raise ValueError(f'patch_embed is {patch_embed!r}, expected "base" or "whitened"')
    require_not_negative(content_scale=content_scale)
    scale_content(model, content_scale,
                  whiten_patches(model, images, first) if patch_embed == "whitened" else None)
    return known_content(model, patch_embed=patch_embed, content_scale=content_scale, first=first)


def known_content(model: VisionTransformer, *, patch_embed: str, content_scale: float,
                  first: int = 0, constants: slice = slice(0)) -> float | None:
    """The content's mean square over all D channels, after `write_content`; None if it was left alone.

    It is what the options ask for. Without a content_scale, whitened channels have variance 1.
    constants: see `position_mean_square`.
    """
    if content_scale:
        return content_scale**2 * position_mean_square(model, constants)
    if patch_embed == "whitened":
        return 2 * direction_count(model, first) / len(model.patch_embed.proj.weight)
    return None


def position_mean_square(model: VisionTransformer, constants: slice = slice(0)) -> float:
    """The mean square of the patches' position embedding over all D channels.

    constants: channels that count as 0, because they hold no position (steady_norms.py).
    """
    positions = model.pos_embed[0, model.num_prefix_tokens:].clone()     # (N, D)
    positions[:, constants] = 0.0
    return positions.square().mean().item()


def direction_count(model: VisionTransformer, first: int) -> int:
    """How many principal directions, two channels each, the patch embedding has from `first` on."""
    weight = model.patch_embed.proj.weight                               # (D, 3, p, q)
    return min(weight[0].numel(), (len(weight) - first) // 2)


def content_mean_square(model: VisionTransformer, first: int = 0) -> float:
    """The expected mean square of the patch embedding's output over its channels from `first` on.

    A weight matrix drawn at random gives PIXELS · ‖w‖² + b² per channel on average over draws,
    whatever the correlation between pixels.
    """
    weight, bias = (parameter[first:] for parameter in (model.patch_embed.proj.weight,
                                                        model.patch_embed.proj.bias))
    return (PIXELS * weight.flatten(1).square().sum(1) + bias.square()).mean().item()


def scale_content(model: VisionTransformer, content_scale: float, mean_square: float | None = None
                  ) -> None:
    """Multiply the patch embedding so that its content has `content_scale` times the positions' rms.

    Both root mean squares are over all patch tokens and channels. mean_square: of the content as it
    is, where it is known; None: see `content_mean_square`. Does nothing if content_scale is 0.
    """
    if content_scale == 0.0:
        return
    if mean_square is None:
        mean_square = content_mean_square(model)
    gain = content_scale * math.sqrt(position_mean_square(model) / mean_square)
    for parameter in model.patch_embed.proj.parameters():
        parameter.mul_(gain)


def whiten_patches(model: VisionTransformer, images: Tensor | None, first: int = 0) -> float:
    """Write principal directions of image patches into the patch embedding, from channel `first` on.

    images: (n, 3, H, W), normalised training images of the size that the model takes.

    With u_i the principal directions of all patches of the images, λ_i the variances along them in
    falling order and m the mean patch, channels `first` + 2i and `first` + 2i + 1 become
    ±u_iᵀ(x − m) / √(λ_i + ε): both signs, because what follows may be one-sided, and variance 1 in
    each (a little less where ε matters; see FLOOR). Channels beyond the last direction become 0.
    airbench (K. Jordan, arXiv 2404.00498) does the same with 2×2 patches, and freezes it.

    Returns the mean square of the content over all D channels, on these images. Raises ValueError
    without images, and for images that are all alike.
    """
    if images is None:
        raise ValueError('patch_embed = "whitened" reads training images, and none were given; '
                         "train.py hands them over")
    proj = model.patch_embed.proj
    height, width = proj.kernel_size
    patches = rearrange(images.double(), "n c (h p) (w q) -> (n h w) (c p q)", p=height, q=width)
    mean = patches.mean(0)                                               # (3·p·q,)
    centred = patches - mean
    values, directions = torch.linalg.eigh(centred.T @ centred / len(patches))       # rising
    values, directions = values.flip(0), directions.flip(1).T            # falling; one per row
    if not values[0] > 0:
        raise ValueError('patch_embed = "whitened": all patches of the images given are equal')
    # The sign of an eigenvector is arbitrary; its largest entry decides, so that runs agree.
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    filters = directions * largest.sign() / (values + FLOOR * values.mean()).sqrt()[:, None]
    count = direction_count(model, first)
    pairs = torch.stack([filters[:count], -filters[:count]], dim=1).flatten(0, 1)    # (2·count, 3·p·q)
    proj.weight.zero_()
    proj.bias.zero_()
    proj.weight[first:first + 2 * count] = pairs.view(-1, *proj.weight.shape[1:]).to(proj.weight)
    proj.bias[first:first + 2 * count] = -(pairs @ mean).to(proj.bias)
    return (centred @ pairs.T).square().sum(1).mean().item() / len(proj.weight)
