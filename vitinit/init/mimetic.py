"""Mimetic initialisation (Trockman and Kolter, arXiv 2305.09828).

As in trained ViTs, W_Q W_Kᵀ of a head has a positive diagonal, and W_V W_proj a negative one.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ..base.values import NonNegative
from ..models.simple_vit import SimpleViT
from .attentions import Attentions, Block, ShiftBlock
from .baseline import Base, draw_base
from .layout import layout_of


@torch.no_grad()
def mimetic(
    model: nn.Module | Attentions,
    *,
    generator: Generator,
    base: Base = "default",
    qk_init: Literal["mimetic", "base"] = "mimetic",
    qk_alpha: NonNegative = 0.7,
    qk_beta: float = 0.7,
    value_init: Literal["mimetic", "untransposed", "base"] = "mimetic",
    value_alpha: NonNegative = 0.4,
    value_beta: float = 0.4,
) -> None:
    """Make Q Kᵀ ≈ αZ + βI and V·proj ≈ αZ − βI in every attention (arXiv 2305.09828, §3).

    | tensor (every attention)        | value                                                    |
    |---------------------------------|----------------------------------------------------------|
    | attn.qkv.weight, Q and K rows   | rank-d factors of qk_alpha · Z + qk_beta · I, with one Z |
    |                                 |   per head                                               |
    | attn.qkv.weight, V rows;        | factors of value_alpha · Z − value_beta · I, so that     |
    | attn.proj.weight                | x ↦ x @ (αZ − βI) where attention is the identity        |
    | everything else                 | as `base` drew it                                        |

    qk_init, value_init: "base" leaves that half of the attention as `base` drew it.
    value_init: "mimetic" is the paper's product. "untransposed" is that of the mimetic baseline in
        the released code of arXiv 2505.19985: with αZ − βI = U S Wᵀ it assigns U√S to V's rows of
        qkv.weight and √S Wᵀ to proj.weight as they are, where x @ weight.T is computed, so that x
        is multiplied by √S Uᵀ W √S, whose diagonal is negative on average, too.

    Z is uniform with mean 0 and variance 1/D, as in that code, and normal in the paper. The defaults
    are the paper's constants for ViT. As in that code, every head has its own Z, and pos_embed, to
    which the paper adds sin-cos, is left.
    """
    layout = layout_of(model)
    draw_base(layout.model, base, generator)
    for block in layout.blocks:
        if qk_init == "mimetic":
            write_queries_keys(block.q.mT, block.k.mT, qk_alpha, qk_beta, generator)
        if value_init != "base":
            write_values(
                block, value_alpha, value_beta, generator, transposed=value_init == "mimetic"
            )


@torch.no_grad()
def mimetic_simple_vit(
    model: SimpleViT,
    *,
    generator: Generator,
    base: Base = "default",
    qk_alpha: NonNegative = 0.7 / 3**0.5,
    qk_beta: float = 0.7,
) -> None:
    """Make Q Kᵀ ≈ αZ + βI in every head, like the mimetic baseline in the code of arXiv 2401.12511.

    | tensor (every block)            | value                                                    |
    |---------------------------------|----------------------------------------------------------|
    | attn.qk.weight                  | rank-d factors of qk_alpha · Z + qk_beta · I, (C, C)     |
    | attn.query, attn.key, if free   | such factors of matrices (N, N), which are the logits    |
    | everything else                 | as `base` drew it, including V and proj                  |

    qk_alpha: as for `mimetic`. That code's is 0.7, but its Z has variance 1/(3D).
    """
    draw_base(model, base, generator)
    for block in model.blocks:
        write_queries_keys(*block.attn.factors, qk_alpha, qk_beta, generator)


def write_queries_keys(
    query: Tensor, key: Tensor, alpha: float, beta: float, generator: Generator
) -> None:
    """Write factors of αZ + βI into views of Q and K, (h, n, d); zero beyond the rank, n."""
    _, size, width = query.shape
    for views in zip(query, key):
        product = noisy_identity(size, alpha, beta, query, generator)
        factors = balanced_factors(product, min(width, size))
        for view, factor in zip(views, factors):
            view.copy_(F.pad(factor, (0, width - factor.shape[1])))


def write_values(
    block: Block | ShiftBlock,
    alpha: float,
    beta: float,
    generator: Generator,
    *,
    first: int = 0,
    shuffled: bool = False,
    transposed: bool = True,
) -> None:
    """Write V and proj of one attention layer: balanced factors of αZ − βI.

    As in the released code, the first head carries the most: singular values decrease.

    first: only the channels of the stream from this one on; V and proj leave out those before it.
        `first` inner channels are left over: V is 0 there, and proj as it was, so that gradients
        reach V.
    shuffled: the inner channels go to the heads at random, so that no head carries more than
        another (which trained better: recipes/cifar10_10k_deep_impulse.toml).
    transposed: False stores the factors as they are; see `mimetic`.
    """
    dim, inner = block.proj.shape[0], block.proj[0].numel()  # all heads' channels
    size = dim - first
    product = noisy_identity(size, alpha, -beta, block.proj, generator)
    value, projection = balanced_factors(product, min(size, inner))  # value @ projection.T
    if not transposed:
        if inner != dim:
            raise ValueError(
                f'value_init "untransposed" needs as many channels in the heads as in '
                f"the stream, and the model has {inner} and {dim}"
            )
        value, projection = value.mT, projection.mT
    order = torch.arange(inner)
    if shuffled:
        order = torch.randperm(inner, generator=generator)
    order = order[: value.shape[1]]
    # New tensors, since Q, K and V may lie in one tensor that no flat view of V exists of.
    values = torch.zeros_like(block.v).flatten(0, 1)  # (h·d, D)
    projections = block.proj.flatten(1).clone()  # (D, h·d)
    values[order, first:] = value.mT
    projections[first:, order] = projection
    block.v.copy_(values.view_as(block.v))
    block.proj.copy_(projections.view_as(block.proj))


def noisy_identity(
    dim: int, alpha: float, beta: float, like: Tensor, generator: Generator
) -> Tensor:
    """(D, D): alpha · Z + beta · I, Z uniform of variance 1/D."""
    bound = alpha * (3.0 / dim) ** 0.5  # U(-b, b) has variance b² / 3
    matrix = torch.empty(dim, dim, dtype=like.dtype).uniform_(-bound, bound, generator=generator)
    matrix.diagonal().add_(beta)
    return matrix


def balanced_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best rank-`rank` approximation U S Vᵀ of a matrix, as the factors U √S and V √S.

    matrix: (..., n, n). Returns (left, right), each (..., n, rank), in decreasing order of singular
        value; the approximation is left @ rightᵀ.

    The eigenvectors of MᵀM cost half as much as an SVD of a large matrix: left = M V / √S, so that
    left @ rightᵀ = M V Vᵀ is as exact as V is orthogonal. Squaring loses precision only in the
    balance: singular values below √eps times the largest are not split evenly but go to `right`.
    """
    squares, vectors = torch.linalg.eigh(matrix.mT @ matrix)  # in increasing order
    vectors = vectors[..., -rank:].flip(-1)  # (..., n, r), decreasing
    values = squares[..., -rank:].flip(-1).clamp_min(0.0).sqrt()  # (..., r)
    precision = torch.finfo(matrix.dtype)
    floor = values[..., :1] * precision.eps**0.5
    floor = floor.clamp_min(precision.tiny)
    roots = values.clamp_min(floor).sqrt()[..., None, :]  # (..., 1, r)
    return matrix @ vectors / roots, vectors * roots
