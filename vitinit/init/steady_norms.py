"""LayerNorms of a ViT that start as fixed scalings, the same for every token.

LayerNorm divides each token by the token's own standard deviation. So a patch of plain sky leaves it
as large as a patch with a strong edge: contrast is lost, and the noise of flat patches is amplified.
*Constant channels* prevent this at the start and leave the model a plain ViT: two channels of the
stream hold +a and −a on every token. If a is large, all tokens have nearly the same standard
deviation, and LayerNorm divides them by nearly the same number. Its weights make up for the smaller
scale; they are measured by passing images through the model, one LayerNorm after the other (as LSUV
does with weights, arXiv 1511.06422). Nothing is frozen: as the stream grows, the constant channels
matter less, and LayerNorm becomes itself again. No paper is known to us that starts a LayerNorm like
this. recipes/deep_impulse.md has what it was worth.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..models.vit import VisionTransformer

CONSTANTS = 2           # +a and −a: LayerNorm subtracts the mean over channels, which stays as it is
MOST_IMAGES = 512       # a pass of so many through a ViT-B at 224 px takes about a minute on a CPU
NOISE_IMAGES = 64


def constant_slice(first: int, share: float, dim: int) -> slice:
    """The constant channels, which stand behind the first `first` of `dim`; empty if share is 0.

    Raises ValueError for a share that is not in 0 … 1, and if no channel would be left behind them.
    """
    if not 0.0 <= share < 1.0:                       # also refuses NaN
        raise ValueError(f"constant_share is {share}, expected 0 ≤ constant_share < 1")
    stop = first + CONSTANTS * (share > 0.0)
    if first < dim <= stop:
        raise ValueError(f"constant_share is {share}, and its {CONSTANTS} channels behind the code's "
                         f"{first} leave none of {dim} for the image; lower code_channels")
    return slice(first, stop)


@torch.no_grad()
def write_steady_norms(model: VisionTransformer, *, constants: slice, share: float,
                       images: Tensor | None, generator: torch.Generator) -> None:
    """Write ±a into the constant channels of pos_embed, and the weight of every LayerNorm.

    constants: the constant channels, see `constant_slice`, to which no layer may write. The channels
        before them hold the code.
    share: of the variance of patch tokens over their channels, before the first block, how much is
        to be due to the constant channels. All other channels get the weight that makes up for them:
        the standard deviation of patch tokens with the constants over that without.
    images: (n, 3, H, W), normalised training images, of which the first MOST_IMAGES are used.
        Without them, images of white noise are drawn, and what layers read on photographs is then
        too small: a mean square of 0.8 in the first block and 0.5 in the last, where it should be
        1 (6 blocks, CIFAR-10).
    """
    if images is None:
        height, width = model.patch_embed.image_size
        images = torch.empty(NOISE_IMAGES, 3, height, width).normal_(generator=generator)
    training = model.training
    model.eval()
    x = model.embed(images[:MOST_IMAGES].to(model.pos_embed))            # (n, P + N, D)
    variance = share / (1.0 - share) * spread(x[:, model.num_prefix_tokens:])**2
    size = math.sqrt(variance * x.shape[2] / CONSTANTS)
    model.pos_embed[..., constants] = x[..., constants] = torch.tensor([size, -size]).to(x)

    def steady(norm: nn.LayerNorm, x: Tensor) -> Tensor:
        patches = x[:, model.num_prefix_tokens:] if x.ndim == 3 else x
        others = torch.cat([patches[..., :constants.start], patches[..., constants.stop:]], dim=-1)
        norm.weight.fill_(spread(patches) / spread(others))
        norm.weight[constants] = 0.0                 # otherwise they would be large inputs of all layers
        return norm(x)

    for block in model.blocks:
        x = x + block.attn(steady(block.norm1, x))
        x = x + block.mlp(steady(block.norm2, x))
    if isinstance(model.norm, nn.LayerNorm):
        steady(model.norm, x)
    else:                                            # the LayerNorm after the pooling
        steady(model.fc_norm, x[:, model.num_prefix_tokens:].mean(1))
    model.train(training)


def spread(x: Tensor) -> float:
    """The standard deviation over the channels of (…, D), as root mean square over all tokens."""
    return math.sqrt(x.var(-1, correction=0).mean().item())
