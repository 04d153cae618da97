"""Mimetic initialisation (Trockman and Kolter, arXiv 2305.09828).

Its weights resemble trained ones. In trained ViTs, W_Q W_Kᵀ of a head has a pronounced positive
diagonal, and W_V W_proj a negative one.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .baseline import Base, draw_base
from .layout import Block, Layout, layout_of


@torch.no_grad()
def mimetic(model: nn.Module | Layout, *, generator: torch.Generator, base: Base = "default",
            qk_init: Literal["mimetic", "base"] = "mimetic",
            qk_alpha: float = 0.7, qk_beta: float = 0.7,
            value_init: Literal["mimetic", "untransposed", "base"] = "mimetic",
            value_alpha: float = 0.4, value_beta: float = 0.4) -> None:
    """Make Q Kᵀ ≈ αZ + βI in every head and V·proj ≈ αZ − βI in every block (arXiv 2305.09828, §3).

    | tensor (every block)            | value                                                    |
    |---------------------------------|----------------------------------------------------------|
    | attn.qkv.weight, Q and K rows   | rank-d factors of qk_alpha · Z + qk_beta · I, with one Z |
    |                                 |   per head                                               |
    | attn.qkv.weight, V rows;        | factors of value_alpha · Z − value_beta · I, so that     |
    | attn.proj.weight                | x ↦ x @ (αZ − βI) where attention is the identity        |
    | everything else                 | as `base` drew it                                        |

    model: a ViT or a Swin, whose blocks differ in width.
    qk_init, value_init: "base" leaves that half of the attention as `base` drew it, so that the
        effect of the other half can be seen alone.
    value_init: "untransposed" as in the released code of arXiv 2505.19985 for its mimetic baseline.
        With αZ − βI = U S Wᵀ it assigns U√S to V's rows of qkv.weight and √S Wᵀ to proj.weight as
        they are, where x @ weight.T is computed. So where attention is the identity, x is
        multiplied by √S Uᵀ W √S, whose diagonal is negative on average, too. "mimetic" is the
        paper's product.

    Z is uniform with mean 0 and variance 1/D. The defaults are the paper's constants for ViT. As in
    that code, every head has its own Z and pos_embed is left alone (the mimetic paper adds sin-cos
    embeddings).
    """
    vit = layout_of(model)
    draw_base(vit.model, base, generator)
    for block in vit.blocks:
        if qk_init == "mimetic":
            write_queries_keys(block, alpha=qk_alpha, beta=qk_beta, generator=generator)
        if value_init != "base":
            write_values(block, alpha=value_alpha, beta=value_beta, generator=generator,
                         transposed=value_init == "mimetic")


@torch.no_grad()
def mimetic_simple_vit(model: nn.Module, *, generator: torch.Generator, base: Base = "default",
                       qk_alpha: float = 0.7 / 3**0.5, qk_beta: float = 0.7) -> None:
    """Make Q Kᵀ ≈ αZ + βI in every head, like the mimetic baseline in the code of arXiv 2401.12511.

    | tensor (every block)            | value                                                    |
    |---------------------------------|----------------------------------------------------------|
    | attn.qk.weight                  | rank-d factors of qk_alpha · Z + qk_beta · I, (C, C)     |
    | attn.query, attn.key, if free   | such factors of matrices (N, N), which are the logits    |
    | everything else                 | as `base` drew it, including V and proj                  |

    model: a SimpleViT.
    qk_alpha: as for `mimetic`. That code's is 0.7, but its Z has variance 1/(3D).
    """
    draw_base(model, base, generator)
    for attention in (block.attn for block in model.blocks):
        free = attention.reads == "free"
        like = attention.query if free else attention.qk.weight
        size = like.shape[1]                         # N tokens, or C channels
        for head in range(attention.num_heads):
            product = noisy_identity(size, qk_alpha, qk_beta, like, generator)
            unused = (0, max(attention.head_dim - size, 0))
            left, right = (F.pad(factor, unused) for factor in
                           balanced_factors(product, min(attention.head_dim, size)))  # (size, d)
            if free:
                attention.query[head], attention.key[head] = left, right
            else:
                attention.q_weight[head], attention.k_weight[head] = left.mT, right.mT


def write_queries_keys(block: Block, *, alpha: float, beta: float,
                       generator: torch.Generator) -> None:
    """Write Q and K of every head: rank-d factors of αZ + βI, with one Z per head."""
    heads, width, dim = block.q.shape
    for head in range(heads):
        product = noisy_identity(dim, alpha, beta, block.q, generator)
        left, right = balanced_factors(product, min(width, dim))         # each (D, d)
        unused = (0, 0, 0, max(width - dim, 0))
        block.q[head], block.k[head] = F.pad(left.mT, unused), F.pad(right.mT, unused)


def write_values(block: Block, *, alpha: float, beta: float, generator: torch.Generator,
                 first: int = 0, transposed: bool = True) -> None:
    """Write V and proj of one attention layer: balanced factors of αZ − βI.

    If attention is the identity and there are no biases, the layer is x ↦ x @ V.weightᵀ @
    proj.weightᵀ. The inner channels are in decreasing order of singular value, as in the released
    code, so the first head carries the most.

    first: only the channels of the stream from this one on; V and proj leave out those before it.
        Then the inner channels go to the heads at random, so that no head carries more than another
        (which trained better: recipes/cifar10_10k_deep_impulse.toml). `first` of them are left
        over: V is 0 there, and proj as it was, so that gradients reach V.
    transposed: False stores the factors as they are; see `mimetic`.
    """
    dim, inner = block.proj.shape[0], block.proj[0].numel()              # all heads' channels
    size = dim - first
    product = noisy_identity(size, alpha, -beta, block.proj, generator)
    value, projection = balanced_factors(product, min(size, inner))      # value @ projection.T
    if not transposed:
        if inner != dim:
            raise ValueError(f'value_init "untransposed" needs as many channels in the heads as in '
                             f"the stream, and the model has {inner} and {dim}")
        value, projection = value.mT, projection.mT
    count = value.shape[1]
    order = torch.randperm(inner, generator=generator)[:count] if first else slice(count)
    # New tensors, since Q, K and V may lie in one tensor that no flat view of V exists of.
    values, projections = (torch.zeros_like(block.v).flatten(0, 1), block.proj.flatten(1).clone())
    values[order, first:] = value.mT
    projections[first:, order] = projection
    block.v.copy_(values.view_as(block.v))
    block.proj.copy_(projections.view_as(block.proj))


def noisy_identity(dim: int, alpha: float, beta: float, like: Tensor,
                   generator: torch.Generator) -> Tensor:
    """(D, D): alpha · Z + beta · I, where Z is uniform with mean 0 and variance 1/D.

    Raises ValueError for a negative alpha, which would mean nothing new, or NaN.
    """
    if not alpha >= 0:
        raise ValueError(f"the factor of the noise Z is {alpha}, expected a number ≥ 0")
    bound = alpha * (3.0 / dim) ** 0.5               # U(-b, b) has variance b² / 3
    matrix = torch.empty(dim, dim, dtype=like.dtype).uniform_(-bound, bound, generator=generator)
    matrix.diagonal().add_(beta)
    return matrix


def balanced_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best rank-`rank` approximation U S Vᵀ of a matrix, as the factors U √S and V √S.

    matrix: (..., n, n). Returns (left, right), each (..., n, rank), in decreasing order of singular
        value; the approximation is left @ rightᵀ.

    The factors are computed from the eigenvectors of MᵀM, which for large matrices costs half as
    much as an SVD: left = M V / √S, so that left @ rightᵀ = M V Vᵀ is as exact as V is orthogonal.
    Squaring loses precision only in the balance between the factors: singular values below √eps
    times the largest are not split evenly but go to `right`.
    """
    squares, vectors = torch.linalg.eigh(matrix.mT @ matrix)             # in increasing order
    vectors = vectors[..., -rank:].flip(-1)                              # (..., n, r), decreasing
    values = squares[..., -rank:].flip(-1).clamp_min(0.0).sqrt()         # (..., r)
    floor = values[..., :1] * torch.finfo(matrix.dtype).eps ** 0.5
    roots = values.clamp_min(floor.clamp_min(torch.finfo(matrix.dtype).tiny)).sqrt()
    return matrix @ vectors / roots[..., None, :], vectors * roots[..., None, :]
