"""Impulse initialisation ("Structured Initialization for Vision Transformers", arXiv 2505.19985).

Q and K of each head are solved so that its attention map approximates the convolution matrix of an
impulse kernel, a kernel that is 1 at a single offset: every token attends to one neighbour. The
heads of a block then act as a convolution, whose weights are V and proj. Nothing is frozen.

Options of `impulse`. The defaults are those of the released code, some of which the paper does not
state. H is the convolution matrix of a head's impulse kernel, (N, N).

base: the baseline that first draws every weight; see baseline.py.
kernel_size: f of the f×f impulse kernels; 3 in the paper.
offsets: "ordered": head h of every block takes offset number h of `filters.ordered_offsets`, modulo
    their number (for 3×3 the released order). "random": one draw per head and block.
pos_embed_scale: factor on the base's pos_embed. The default raises its standard deviation from
    0.02 to 0.36, so that the content of patches does not swamp it. Not in the paper.
qk_norm: γ, the Frobenius norm of each head's Q and K. The paper's 2 leaves ViT-T nearly uniform.
rank: how many directions of the position embedding are used, up to head_dim; 0: `default_rank`.
impulse_scale, noise_scale, noise_std: the map to be factorised is impulse_scale · H where H is
    not zero and noise elsewhere, noise_scale times a normal of standard deviation noise_std cut
    at ±2 (in the paper 40 · H + Z, with Z normal). A row whose target is off the grid is therefore
    all noise. The noise is drawn anew for every head and block.
value_init: "mimetic" as in the released code, or "base" as the paper's text says.
value_alpha, value_beta: of the mimetic V·proj (arXiv 2305.09828).
"""

import copy
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ..base.values import AtLeastOne, Count, NonNegative, PositiveNumber, ProperFraction
from ..mixing.filters import Order, head_offsets, offsets_on_grid, shift_matrix
from ..models.attention import attention_weights
from .attentions import Layout, SwinLayout
from .baseline import Base, draw_base, truncated_normal_
from .layout import swin_layout, vit_layout
from .mimetic import write_values


@torch.no_grad()
def impulse(
    model: nn.Module | Layout,
    *,
    generator: Generator,
    base: Base = "default",
    kernel_size: AtLeastOne = 3,
    offsets: Order = "ordered",
    pos_embed_scale: float = 18.0,
    qk_norm: PositiveNumber = 7.0,
    rank: Count = 0,
    impulse_scale: PositiveNumber = 1000.0,
    noise_scale: float = 3.0,
    noise_std: NonNegative = 0.6,
    value_init: Literal["mimetic", "base"] = "mimetic",
    value_alpha: NonNegative = 0.4,
    value_beta: float = 0.4,
) -> None:
    """Solve Q and K so that softmax(X Qᵀ K Xᵀ) is near an impulse convolution in every head.

    Algorithm 1 of arXiv 2505.19985. X: (N, D), the position embedding after LayerNorm; Q and K of a
    head: (d, D); D channels. Options: see the module's docstring.

    | tensor                                    | value                                            |
    |-------------------------------------------|--------------------------------------------------|
    | pos_embed, all rows                       | base × pos_embed_scale                           |
    | every block: attn.qkv.weight, Q, K rows   | factors of impulse_scale · H + noise, see below  |
    | every block: attn.qkv.weight, V rows,     | value_init "mimetic": factors of αZ − βI         |
    |   attn.proj.weight                        |                                                  |
    | everything else                           | as `base` drew it                                |

    As in the released code, the solution takes no account of the class token's row of pos_embed or
    of attention's factor 1/√d. Raises ValueError for a position embedding that is fixed or has too
    few independent directions, for options out of range, and if all maps come out nearly uniform.
    """
    vit = vit_layout(model)
    if not vit.learned:
        _refuse(vit.positions, "the model's fixed position embedding")
    choices = offsets_on_grid(kernel_size, vit.grid)  # checks kernel_size, before any draw
    draw_base(vit.model, base, generator)

    vit.pos_embed.mul_(pos_embed_scale)
    # What the first attention would read if the patches had no content, (N, D).
    positions = F.layer_norm(vit.positions, vit.positions.shape[1:], eps=vit.first.norm.eps)
    directions = int(torch.linalg.matrix_rank(positions))
    tokens, dim = positions.shape
    if directions < min(tokens, dim - 1):  # LayerNorm removes one
        _refuse(positions, f"the model's position embedding, pos_embed_scale = {pos_embed_scale:g}")
    head_dim = vit.first.q.shape[1]
    rank = min(rank or default_rank(tokens, dim), head_dim, directions)
    basis = position_basis(positions, rank)

    for number, block in enumerate(vit.blocks):
        of_heads = head_offsets(len(block.q), choices, offsets, generator)
        shifts = [shift_matrix(offset, vit.grid) for offset in of_heads]
        impulses = impulse_scale * torch.stack(shifts).to(positions)  # (h, N, N)
        noise = torch.zeros_like(impulses)  # (h, N, N)
        if noise_std > 0:  # truncated_normal_ divides by it
            truncated_normal_(noise, std=noise_std, cut=2.0, generator=generator)
        maps = torch.where(impulses == 0, noise_scale * noise, impulses)
        query, key = query_key_factors(maps, basis, head_dim, qk_norm)  # each (h, d, D)
        block.q.copy_(query)
        block.k.copy_(key)
        if number == 0:
            weights = attention_weights(positions @ query.mT, positions @ key.mT)
            _refuse_uniform(weights, impulses)
        if value_init == "mimetic":
            write_values(block, value_alpha, value_beta, generator)


def default_rank(tokens: int, dim: int) -> int:
    """How many directions of a position embedding, (N, D), to use: min(max(64, N // 2), D // 3).

    The rule is ours. With more directions, the smallest take most of the norm and the maps become
    flat, however wide a head is: a ViT-T/16 with one head of 192 channels has a mass of .81 with
    the rank 64 and of .006 with 192. Heads of at most 64 channels use all that they can, if there
    are three or more. On a grid of many more tokens than directions, a larger `qk_norm` helps.
    """
    return max(min(max(64, tokens // 2), dim // 3), 1)  # 64: the head_dim of ViT-T, S and B


def position_basis(positions: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The part of a position embedding that can be inverted: its `rank` largest directions.

    positions: X, (N, D), after LayerNorm. rank: at most the numerical rank. Let XᵀX = W diag(s) Wᵀ,
    cut to the `rank` largest eigenvalues s. Returns W, (D, rank), with orthonormal columns, and
    diag(1/s) Wᵀ Xᵀ, (rank, N), whose product is the pseudo-inverse of X at that rank.

    The truncation, which the released code has and the paper does not mention, is essential: the
    smallest directions, divided by s, would take most of Q's and K's norm: a flat map (lesson 3).
    """
    # The SVD of X gives √s and W without squaring the condition number, as XᵀX would.
    _, singular, directions = torch.linalg.svd(positions, full_matrices=False)  # m = min(N, D)
    singular = singular[:rank]  # √s: of (m,) the largest, (r,)
    directions = directions[:rank].mT  # W: of (m, D) the largest, (D, r)
    inverse = positions @ directions / singular**2  # (N, r)
    return directions, inverse.mT


def query_key_factors(
    maps: Tensor, basis: tuple[Tensor, Tensor], width: int, norm: float
) -> tuple[Tensor, Tensor]:
    """Q and K, each (..., width, D), for which X Qᵀ K Xᵀ is proportional to what is nearest to `maps`
    at the basis' rank.

    maps: (..., N, N), of which the size does not count. basis: see `position_basis`. width: of the
    head; rows of Q and K beyond the rank are zero. norm: the Frobenius norm of Q and of K.

    This is Algorithm 1 of arXiv 2505.19985: M̂ = X⁺ M X⁺ᵀ = U S Vᵀ, Qᵀ = U√S and Kᵀ = V√S. Since
    M̂ = W C Wᵀ with orthonormal W, it suffices to compute the SVD of the (rank, rank) matrix C.
    """
    directions, inverse = basis
    left, values, right = torch.linalg.svd(inverse @ maps @ inverse.mT)  # (..., r, r)
    roots = values[..., None, :width].sqrt()  # (..., 1, ≤ width)

    def factor(vectors: Tensor) -> Tensor:
        columns = directions @ (vectors[..., :width] * roots)  # (..., D, ≤ width)
        columns = norm * columns / torch.linalg.matrix_norm(columns, keepdim=True)
        return F.pad(columns, (0, width - columns.shape[-1])).mT  # (..., width, D)

    return factor(left), factor(right.mT)


def _refuse_uniform(weights: Tensor, impulses: Tensor) -> None:
    """Raise ValueError unless a head's weights, (h, N, N), are well above uniform on its target."""
    targets = impulses > 0
    mass = (weights * targets).sum((1, 2)) / targets.sum((1, 2))  # (h,)
    best = mass.max().item()
    uniform = 1.0 / weights.shape[-1]
    if not best >= min(2.0 * uniform, 0.5 + 0.5 * uniform):  # refuses NaN, too
        raise ValueError(
            f"init 'impulse' gives nearly uniform attention in all heads: at best "
            f"{best:.2g} of a head's attention is on its target, where {uniform:.2g} "
            "is uniform; use more, narrower heads, a larger qk_norm, or init "
            "'deep_impulse'"
        )


def _refuse(positions: Tensor, what: str) -> None:
    """Raise ValueError: `what`, described by its numerical rank, cannot be inverted."""
    rank = int(torch.linalg.matrix_rank(F.layer_norm(positions, positions.shape[-1:])))
    raise ValueError(
        f"init 'impulse' cannot use {what}: after LayerNorm its numerical rank is "
        f"{rank} for {len(positions)} tokens, too low to tell them apart, "
        'so every map would come out uniform; use pos_embed = "learned"'
    )


@torch.no_grad()
def impulse_swin(
    model: nn.Module | SwinLayout,
    *,
    generator: Generator,
    base: Base = "default",
    kernel_size: AtLeastOne = 3,
    offsets: Order = "ordered",
    target_mass: ProperFraction = 0.9,
) -> None:
    """Make every head attend to one neighbour within the window (arXiv 2505.19985, §5).

    The paper gives neither magnitudes nor code; these are ours.

    | tensor (every block)                    | value                                            |
    |-----------------------------------------|--------------------------------------------------|
    | attn.relative_position_bias_table       | β where query − key is minus the head's offset,  |
    |                                         |   0 elsewhere                                    |
    | everything else                         | as `base` drew it                                |

    β = ln(m (n − 1) / (1 − m)) gives the target the mass m = target_mass among the n tokens of a
    window, since e^β / (e^β + n − 1) = m. The base's logits Q Kᵀ, near 0 at the start, are added to
    it. Where the shift masks part of a window the mass is higher. A token whose target is outside
    its window, or masked, spreads its attention evenly over the tokens that it can attend to.

    kernel_size, offsets: as for `impulse`. Raises ValueError for a kernel beyond the
    smallest window.
    """
    swin = swin_layout(model)
    cells = offsets_on_grid(kernel_size, min(swin.grids, key=min))  # checks it, before any draw
    draw_base(swin.model, base, generator)

    for block in swin.blocks:
        tokens = len(block.bias_rows)
        targets = head_offsets(len(block.q), cells, offsets, generator)
        block.bias_table.zero_()
        if tokens > 1:  # a token alone in its window attends to itself
            beta = math.log(target_mass * (tokens - 1) / (1.0 - target_mass))
            for head, offset in enumerate(targets):
                block.bias_table[block.bias_row(offset), head] = beta


@torch.no_grad()
def norm_matched(
    model: nn.Module | Layout, *, generator: Generator, base: Base = "default"
) -> None:
    """A control for `impulse`: draw the base, and scale what `impulse` would write to its norms.

    The authors of arXiv 2505.19985 asked whether larger positions, queries and keys explain the
    gain of `impulse`; their code multiplies the default's by constants (`default{p}_{q}_{v}`).

    | tensor                                        | value                                   |
    |-----------------------------------------------|-----------------------------------------|
    | pos_embed                                     | base × one factor                       |
    | every block: attn.qkv.weight, Q, K, V rows    | base × one factor per head, for each    |
    |                                               |   of Q, K and V                         |
    | every block: attn.proj.weight                 | base × one factor                       |
    | everything else                               | as `base` drew it                       |

    base: also of `impulse`, whose options are the defaults otherwise; raises ValueError as it does.
    """
    vit = vit_layout(model)
    before = copy.deepcopy(vit.model.state_dict())
    impulse(vit, generator=generator, base=base)
    norms = [norm for _, norm in written(vit)]
    vit.model.load_state_dict(before)
    draw_base(vit.model, base, generator)
    for (tensor, drawn), norm in zip(written(vit), norms):
        tensor.mul_(norm / drawn)


def written(vit: Layout) -> list[tuple[Tensor, Tensor]]:
    """What `impulse` writes, each with its norm; of Q, K and V, (h, d, D), one per head."""
    norm = torch.linalg.vector_norm
    parts = [(vit.pos_embed, norm(vit.pos_embed))]
    for block in vit.blocks:
        parts.append((block.proj, norm(block.proj)))
        for tensor in (block.q, block.k, block.v):
            parts.append((tensor, norm(tensor, dim=(1, 2), keepdim=True)))
    return parts
