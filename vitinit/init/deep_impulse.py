"""Deep impulse initialisation: every block of a ViT starts as a convolution, not only the first.

`impulse` (arXiv 2505.19985) solves Q and K of each head so that every token attends to one of its
neighbours, which the head recognises by the position embedding. The effect fades with depth: V,
proj and the MLPs write over the position embedding, and LayerNorm divides it by more and more.
`deep_impulse` reserves ten channels of the residual stream, to which no layer writes at the start:

- The *code*, eight channels: cosine and sine of four waves over the token grid. Moving by an offset
  turns each pair by an angle that is the same for every token. So if K selects the pairs, and Q
  selects them and turns them by the head's offset, the logit at displacement Δ from a query's
  target is ℓ times the mean of the waves' cosines at Δ: largest, ℓ, at the target.
- Two *constants*, ±a on every token, which hold most of the variance that LayerNorm divides by. So
  it divides all tokens by nearly the same number, and its weight makes up for that.

All sizes are measured: while the model is written, training images pass through it. Nothing is
frozen. No paper describes this initialisation.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ..filters import head_offsets, offsets_on_grid
from ..mixing import logit_for
from ..models.vit import PREFIX_TOKENS, VisionTransformer
from .baseline import Base, draw_base
from .mimetic import write_values

WAVES = ((1, 0), (0, 1), (1, 1), (1, -1))   # turns over the height, and over the width, of the grid
PHASE = math.pi * (3.0 - math.sqrt(5.0))    # from wave to wave: the golden angle, so that no token
                                            # is at the peak of all of them
CODE_RMS = 0.36         # of what the code adds to pos_embed, over all channels; as in `impulse`
CONSTANT_SHARE = 0.95   # of the tokens' variance before the first block
MOST_IMAGES, NOISE_IMAGES = 512, 64             # used of those given; drawn where none are
LEAST_MASS = 1.25       # in units of uniform attention, where Q, K and their gradients are 0


def waves_of(model: VisionTransformer) -> tuple[Tensor, Tensor]:
    """The frequencies of the K waves, (K, 2) in radians per row and column, and all cells, (N, 2).

    A head reads two channels per wave: K is 4, or less for a head_dim below 8. Raises ValueError.
    """
    head_dim, dim = model.blocks[0].attn.head_dim, model.pos_embed.shape[2]
    count = min(len(WAVES), head_dim // 2)
    if not model.learns_positions or count < 2 or dim <= 2 * count + 2:
        raise ValueError("init 'deep_impulse' writes pos_embed = \"learned\", and needs head_dim ≥ "
                         f"4 and embed_dim > 10; the model has head_dim {head_dim}, embed_dim {dim}"
                         + ("" if model.learns_positions else " and a fixed position embedding"))
    cells = torch.cartesian_prod(*map(torch.arange, model.grid)).float()
    return 2.0 * math.pi * torch.tensor(WAVES[:count]) / torch.tensor(model.grid), cells


def write_positions(model: VisionTransformer, waves: Tensor, cells: Tensor, first: int) -> None:
    """Write the code into pos_embed, and zero what else writes to the channels before `first`."""
    angles = cells @ waves.T + PHASE * torch.arange(len(waves))          # (N, K)
    amplitude = CODE_RMS * math.sqrt(model.pos_embed.shape[2] / len(waves))
    model.pos_embed[..., :first] = 0.0
    model.pos_embed[0, model.num_prefix_tokens:, :2 * len(waves)] = amplitude * torch.cat(
        [angles.cos(), angles.sin()], 1)
    for layer in [model.patch_embed.proj] + [layer for block in model.blocks
                                             for layer in (block.attn.proj, block.mlp.fc2)]:
        layer.weight[:first] = 0.0
        layer.bias[:first] = 0.0
    for name in PREFIX_TOKENS:
        if hasattr(model, name):
            getattr(model, name)[..., :first] = 0.0


@torch.no_grad()
def deep_impulse(model: VisionTransformer, *, generator: torch.Generator, base: Base = "lecun",
                 kernel_size: int = 3, target_mass: tuple[float, float] = (0.66, 0.025),
                 value_init: Literal["mimetic", "base"] = "mimetic",
                 value_alpha: float = 0.4, value_beta: float = 0.4,
                 images: Tensor | None = None) -> None:
    """Let every head of every block of a ViT attend to one neighbour, as a convolution does.

    | tensor                                | value                                               |
    |---------------------------------------|-----------------------------------------------------|
    | pos_embed, the first ten channels     | the code, on patch tokens; the constants, on all    |
    | what writes to these channels: rows   | 0                                                   |
    |   of patch_embed, proj, fc2; prefix   |                                                     |
    |   tokens; columns of V                |                                                     |
    | every block: Q and K                  | select the code, Q turned; 0 elsewhere, also biases |
    | every block: V, proj.weight           | "mimetic": factors of αZ − βI on other channels     |
    | LayerNorms, weight                    | makes the variance of other channels 1; constants 0 |
    | everything else                       | as `base` drew it                                   |

    kernel_size: heads go through its offsets in turn, on from block to block (9 for 3×3).
    target_mass: the share of a head's attention among the patch tokens that lies on the head's
        target, in the first block and in the last; in between, the logit changes linearly. (The
        same logit is another mass on another grid: 10 gives .998 on 4×4 tokens, .66 on 8×8, .23 on
        14×14.) A mass below 1.25 times that of uniform attention is raised to it. Queries whose
        target is off the grid attend to the opposite border.
    value_init, value_alpha, value_beta: as for `mimetic`; "base" leaves V and proj as drawn.
    images: (n, 3, H, W), normalised training images; white noise, if there are none. train.py gives
        them: they are no option.
    """
    if not all(0.0 < mass < 1.0 for mass in target_mass) or value_init not in ("mimetic", "base"):
        raise ValueError(f"target_mass is {target_mass} and value_init {value_init!r}; expected "
                         '0 < mass < 1 in the first block and in the last, and "mimetic" or "base"')
    (waves, cells), offsets = waves_of(model), offsets_on_grid(kernel_size, model.grid)
    shape = (cells @ waves.T).cos().mean(1).double()                     # (N,), target at cell 0
    floor = min(LEAST_MASS / len(cells), 0.999)
    ends = [logit_for(max(mass, floor), shape, target=0) for mass in target_mass]
    if None in ends:
        raise ValueError(f"target_mass is {target_mass}, which no logit below 1,000 gives to one "
                         f"of {len(cells)} tokens; lower it")
    logits = torch.linspace(*ends, len(model.blocks)).tolist()
    code, first = 2 * len(waves), 2 * len(waves) + 2     # channels of the code; where others begin
    draw_base(model, base, generator)

    write_positions(model, waves, cells, first)

    # Measure and write, block by block.
    prefix = model.num_prefix_tokens
    if images is None:
        images = torch.randn(NOISE_IMAGES, 3, *model.patch_embed.image_size, generator=generator)
    training = model.training
    model.eval()
    x = model.embed(images[:MOST_IMAGES].to(model.pos_embed))            # (n, P + N, D)

    def variance(tokens: Tensor) -> float:
        """What LayerNorm divides by, squared: over channels, on average over tokens."""
        return tokens.var(-1, correction=0).mean().item()

    size = CONSTANT_SHARE / (1.0 - CONSTANT_SHARE) * variance(x[:, prefix:]) * x.shape[2] / 2
    x[..., code:first] = model.pos_embed[..., code:first] = size**0.5 * torch.tensor([1.0, -1.0])

    def normalised(norm: nn.LayerNorm, x: Tensor, skip: int = prefix) -> Tensor:
        others = torch.cat([x[..., :code], x[..., first:]], dim=-1)
        norm.weight.fill_(math.sqrt(variance(x[:, skip:]) / variance(others[:, skip:])))
        norm.weight[code:first] = 0.0                # else they would be large inputs of all layers
        return norm(x)

    for number, (block, logit) in enumerate(zip(model.blocks, logits)):
        attention, y = block.attn, normalised(block.norm1, x)
        attention.v_weight[..., :first] = 0.0
        if value_init == "mimetic":
            write_values(attention, alpha=value_alpha, beta=value_beta, generator=generator,
                         first=first)
        power = y[:, prefix:, :code].square().sum(-1).mean().item()      # what Q and K read of it
        gain = math.sqrt(logit * math.sqrt(attention.head_dim) / power)
        heads = head_offsets(attention.num_heads, offsets, "rotating", generator,
                             first=number * attention.num_heads)
        for packed in (attention.q_weight, attention.k_weight, attention.q_bias, attention.k_bias):
            if packed is not None:
                packed.zero_()
        turn = torch.tensor(heads).float() @ waves.T                     # (h, K)
        cos, sin = turn.cos().diag_embed(), turn.sin().diag_embed()      # (h, K, K)
        # cos(a + t) = cos t · cos a − sin t · sin a;  sin(a + t) = sin t · cos a + cos t · sin a
        attention.q_weight[:, :code, :code] = gain * torch.cat(
            [torch.cat([cos, -sin], 2), torch.cat([sin, cos], 2)], 1)
        attention.k_weight[:, :code, :code] = gain * torch.eye(code)
        x = x + attention(y)
        x = x + block.mlp(normalised(block.norm2, x))
    if isinstance(model.norm, nn.LayerNorm):
        normalised(model.norm, x)
    else:                                            # after the pooling
        normalised(model.fc_norm, x[:, prefix:].mean(1, keepdim=True), skip=0)
    model.train(training)
