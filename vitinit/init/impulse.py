"""Impulse initialisation ("Structured Initialization for Vision Transformers", arXiv 2505.19985).

Q and K of each head are solved so that its attention map approximates the convolution matrix of an
impulse kernel, a kernel that is 1 at a single offset: every token attends to one neighbour. The
heads of a block together then act as a convolution, whose weights are V and proj. Nothing is
frozen; training may turn the attention into anything else.

Options. The defaults are those of the released code, some of which the paper does not state. H is the
convolution matrix of a head's impulse kernel, Z the noise matrix of mimetic initialisation.

base: the baseline that first draws every weight, "default", "torch" or "lecun"; see baseline.py.
kernel_size: f of the f×f impulse kernels; 3 in the paper.
offsets: how offsets are assigned to heads. "ordered": head h of every block takes offset number
    h of `filters.ordered_offsets`, modulo the number of offsets (for 3×3 the released order).
    "rotating" (not in the paper): each block continues where the block before it stopped.
    "random": one draw per head and block.
pos_embed_scale: factor on the base's pos_embed. The default raises its standard deviation from
    0.02 to 0.36, so that the content of patches does not swamp it. Not in the paper.
qk_norm: γ, the Frobenius norm of each head's Q and K. The paper has 2, with which the maps of
    ViT-T stay nearly uniform.
rank: how many directions of the position embedding are used, at most head_dim; 0 chooses by
    `default_rank`.
impulse_scale, noise_scale, noise_std: the map to be factorised is impulse_scale · H where H is
    not zero and noise elsewhere, noise_scale times a normal of standard deviation noise_std cut
    at ±2 (in the paper 40 · H + Z, Z normal). A row whose target is off the grid is therefore
    all noise. The noise is drawn anew for every head and block.
value_init: "mimetic" as in the released code; "base" as the paper's text says; or "identity" (ours):
    each head shifts its own channels, see values.py.
value_alpha, value_beta: of the mimetic V·proj (arXiv 2305.09828).
value_scale: V·proj is value_scale · I with "identity"; it may be negative.
content_scale: the root mean square of the patches' content relative to that of the position
    embedding before the first block; 0 leaves it as the base draws it. Content enlarges the
    standard deviation by which LayerNorm divides, so Q and K are multiplied by its expected
    growth, and the logits of positions stay those that were solved for. Ours.
patch_embed: "whitened" writes principal directions of patches of training images instead of the
    base's draw; see content.py. Ours.
images: (n, 3, H, W), normalised training images that "whitened" reads; no option, train.py gives them.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from ..filters import Offset, convolution_matrix, impulse_kernel, offsets_on_grid
from ..mixing import target_mass
from ..models.attention import attention_weights
from ..models.vit import VisionTransformer
from .baseline import Base, draw_base, truncated_normal_
from .content import write_content
from .factorize import numerical_rank, position_basis, query_key_factors
from .mimetic import write_values
from .options import require_not_negative
from .values import write_identity_values

OFFSETS = ("ordered", "rotating", "random")
VALUE_INITS = ("mimetic", "identity", "base")
RELEASED_RANK = 64      # head_dim of ViT-T, S and B
NEAR_UNIFORM = 2.0      # in multiples of uniform attention: the least that one head must reach


@torch.no_grad()
def impulse(model: VisionTransformer, *, generator: torch.Generator,
            base: Base = "default",
            kernel_size: int = 3,
            offsets: Literal["ordered", "rotating", "random"] = "ordered",
            pos_embed_scale: float = 18.0,
            qk_norm: float = 7.0, rank: int = 0,
            impulse_scale: float = 1000.0,
            noise_scale: float = 3.0, noise_std: float = 0.6,
            value_init: Literal["mimetic", "identity", "base"] = "mimetic",
            value_alpha: float = 0.4, value_beta: float = 0.4, value_scale: float = 1.0,
            content_scale: float = 0.0,
            patch_embed: Literal["base", "whitened"] = "base",
            images: Tensor | None = None) -> None:
    """Solve Q and K so that softmax(P Q Kᵀ Pᵀ) is near an impulse convolution in every head.

    This is Algorithm 1 of arXiv 2505.19985. P is the position embedding, H the convolution matrix
    of a head's impulse kernel, Z the noise matrix of mimetic initialisation.

    | tensor                                    | value                                            |
    |-------------------------------------------|--------------------------------------------------|
    | pos_embed, all rows                       | base × pos_embed_scale                           |
    | every block: attn.qkv.weight, Q, K rows   | factors of impulse_scale · H + noise, see below  |
    | every block: attn.qkv.weight, V rows,     | value_init "mimetic": factors of                 |
    |   attn.proj.weight                        |   αZ − βI; "identity": value_scale · I           |
    | unless patch_embed is "base": patch_embed | principal directions of patches of `images`      |
    | unless content_scale is 0: patch_embed,   | multiplied by one factor; Q and K by             |
    |   and Q, K                                |   √(1 + content_scale²)                          |
    | everything else                           | as `base` drew it                                |

    The module's docstring explains the options.

    As in the released code, the solution takes no account of the class token's row of pos_embed or
    of attention's factor 1/√d. Raises ValueError for a position embedding that is fixed or has too
    few independent directions, for options out of range, and if the maps of all heads come out
    nearly uniform.
    """
    if not model.learns_positions:
        _refuse(model.pos_embed[0, model.num_prefix_tokens:],
                "the model's fixed 2-D sin-cos position embedding")
    check_options(offsets=offsets, value_init=value_init, rank=rank, qk_norm=qk_norm,
                  impulse_scale=impulse_scale)
    require_not_negative(noise_scale=noise_scale, noise_std=noise_std, value_alpha=value_alpha)
    cells = offsets_on_grid(kernel_size, model.grid)     # checks kernel_size, before any draw
    draw_base(model, base, generator)

    model.pos_embed.mul_(pos_embed_scale)
    positions = normalised_positions(model)                              # (N, D)
    directions = numerical_rank(positions)
    if directions < min(len(positions), positions.shape[1] - 1):
        _refuse(positions, f"the model's position embedding, pos_embed_scale = {pos_embed_scale:g}")
    head_dim = model.blocks[0].attn.head_dim
    basis = position_basis(positions,
                           min(rank or default_rank(*positions.shape), head_dim, directions))

    write_content(model, patch_embed=patch_embed, content_scale=content_scale, images=images)

    # The same impulse maps recur in every block; only their noise is drawn anew.
    @cache
    def impulse_map(cell: Offset) -> Tensor:
        kernel = impulse_kernel(cell, kernel_size).to(positions.dtype)
        return impulse_scale * convolution_matrix(kernel, model.grid)    # (N, N)

    for number, block in enumerate(model.blocks):
        heads = head_offsets(block.attn.num_heads, cells, offsets, generator,
                             first=number * block.attn.num_heads)
        maps = with_noise(torch.stack([impulse_map(cell) for cell in heads]), noise_scale,
                          noise_std, generator)                          # (h, N, N)
        query, key = query_key_factors(maps, basis, head_dim, qk_norm)   # each (h, d, D)
        block.attn.q_weight.copy_(query)
        block.attn.k_weight.copy_(key)
        if number == 0:
            _refuse_uniform(attention_weights(positions @ query.mT, positions @ key.mT), heads,
                            model.grid)
        if value_init == "mimetic":
            write_values(block.attn, alpha=value_alpha, beta=value_beta, generator=generator)
        elif value_init == "identity":
            write_identity_values(block.attn, 0, value_scale)
        block.attn.q_weight.mul_(math.sqrt(1.0 + content_scale**2))
        block.attn.k_weight.mul_(math.sqrt(1.0 + content_scale**2))


def check_options(*, offsets: str, value_init: str, rank: int, qk_norm: float,
                  impulse_scale: float) -> None:
    """Raise ValueError for a word that is no choice, and for numbers out of range."""
    if offsets not in OFFSETS or value_init not in VALUE_INITS:
        raise ValueError(f"offsets is {offsets!r} and value_init is {value_init!r}; expected one of "
                         f"{', '.join(OFFSETS)}, and one of {', '.join(VALUE_INITS)}")
    if rank < 0 or qk_norm <= 0 or impulse_scale <= 0:
        raise ValueError(f"rank is {rank}, qk_norm {qk_norm} and impulse_scale {impulse_scale}; "
                         "expected rank ≥ 0 and the others > 0")


def default_rank(tokens: int, dim: int) -> int:
    """How many directions of a position embedding, (N, D), to use: min(max(64, N // 2), D // 3).

    The rule is ours. With more directions the maps become flat, however wide a head is, because the
    weakest of them take most of the norm of Q and K. 64 is the head_dim of every released model.
    README.md of this package says what the rule does on a small grid and for models with few wide
    heads.
    """
    return max(min(max(RELEASED_RANK, tokens // 2), dim // 3), 1)


def with_noise(maps: Tensor, scale: float, std: float, generator: torch.Generator) -> Tensor:
    """`maps` with noise where they are zero: `scale` times a normal of std `std`, cut at ±2."""
    noise = torch.zeros_like(maps)
    if std > 0:                                      # truncated_normal_ divides by std
        truncated_normal_(noise, std=std, cut=2.0, generator=generator)
    return torch.where(maps == 0, scale * noise, maps)


def normalised_positions(model: VisionTransformer) -> Tensor:
    """The position embedding of the patch tokens after a LayerNorm of gain 1 and bias 0: (N, D).

    This is what attention would read if the patches had no content.
    """
    positions = model.pos_embed[0, model.num_prefix_tokens:]
    return nn.functional.layer_norm(positions, positions.shape[-1:], eps=model.blocks[0].norm1.eps)


def head_offsets(num_heads: int, cells: list[Offset], offsets: str, generator: torch.Generator,
                 *, first: int = 0) -> list[Offset]:
    """The offset of each head of one block.

    offsets: "ordered", "rotating" or "random". first: number of heads in all blocks before this
        one, from which "rotating" goes on counting.
    """
    if offsets == "random":
        draws = torch.randint(len(cells), (num_heads,), generator=generator)
        return [cells[draw] for draw in draws]
    start = first if offsets == "rotating" else 0
    return [cells[(start + head) % len(cells)] for head in range(num_heads)]


def _refuse_uniform(weights: Tensor, offsets: list[Offset], grid: tuple[int, int]) -> None:
    """Raise ValueError unless at least one head is well above uniform attention.

    weights: (h, N, N), the maps on the position embedding alone.
    """
    uniform = 1.0 / (grid[0] * grid[1])
    best = target_mass(weights, offsets, grid).max().item()
    if not best >= min(NEAR_UNIFORM * uniform, 0.5 + 0.5 * uniform):     # also refuses NaN
        raise ValueError(f"init 'impulse' gives nearly uniform attention in all heads: at best {best:.2g} "
                         f"of a head's attention is on its target, where {uniform:.2g} is uniform; use "
                         "more, narrower heads, a larger qk_norm, or init 'deep_impulse'")


def _refuse(positions: Tensor, what: str) -> None:
    """Raise ValueError: `what`, described by its numerical rank, cannot be inverted."""
    tokens = len(positions)
    centred = nn.functional.layer_norm(positions, positions.shape[-1:])
    raise ValueError(f"init 'impulse' cannot use {what}: after LayerNorm its numerical rank is "
                     f"{numerical_rank(centred)} for {tokens} tokens, too low to tell them apart, "
                     'so every map would come out uniform; use pos_embed = "learned"')
