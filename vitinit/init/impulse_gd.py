"""Impulse initialisation by gradient descent, as in the two papers that preceded the closed form.

It needs no position embedding of full rank, so it also works for fixed sin-cos embeddings.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ..base.values import AtLeastOne, Count, PositiveNumber
from ..mixing.filters import Order, head_offsets, offsets_on_grid, shift_matrix
from ..models.simple_vit import SimpleViT
from .attentions import Layout
from .baseline import Base, draw_base
from .layout import vit_layout

PseudoInput = Literal["pos_embed", "uniform", "normal", "pos_embed+uniform", "pos_embed+normal"]


@torch.no_grad()
def impulse_gd(
    model: nn.Module | Layout,
    *,
    generator: Generator,
    base: Base = "default",
    kernel_size: AtLeastOne = 3,
    offsets: Order = "random",
    pseudo_input: PseudoInput = "pos_embed",
    share_blocks: bool = True,
    steps: AtLeastOne = 1000,
    step_size: PositiveNumber = 1e-4,
    renorm_every: Count = 100,
) -> None:
    """Optimise Q and K until softmax(σ X̃ Q Kᵀ X̃ᵀ) is near the impulse maps of all heads.

    By Adam; σ is the model's factor on the logits. The papers: arXiv 2401.12511, then 2404.01139.

    | tensor                                                                   | value             |
    |--------------------------------------------------------------------------|-------------------|
    | ViT: attn.qkv.weight, Q, K rows                                          | the solution      |
    | SimpleViT: attn.qk.weight, or attn.query and attn.key where they are free| the solution      |
    | everything else                                                          | as `base` drew it |

    kernel_size, offsets: as for `impulse`. Both papers draw one offset per head, with replacement;
        the kernel size is 5 in the first paper, 3 or 5 in the second.
    pseudo_input: what X̃ is: the position embedding, or noise, uniform on ±1 or normal of variance
        ½, or the sum of both; after LayerNorm for a ViT, as in the second paper's code, and as it
        is for a SimpleViT, as in the first's ("pos_embed" alone). Free Q and K have no X̃.
    share_blocks: one solution for all blocks (second paper) or one per block (first paper).
    steps, step_size: of Adam, on the mean squared error of the maps. The papers take 10,000 steps.
    renorm_every: before steps 0, n, 2n …, n being this, each column of Q and of Kᵀ is scaled to the
        mean norm that Q's columns had at the start. The papers' code has 1 or 100. This bounds the
        logits, so that further steps gain little; with 0 it is never done. Free Q and K (Model III)
        hardly leave uniform maps either way.

    The closed forms (`impulse`, `impulse_simple_vit`) give sharper maps and are faster by orders of
    magnitude: for a SimpleViT of 16×16 tokens, 1,000 steps gave a mass of .21 in 13 seconds, and
    the closed form .90 in .03. Raises ValueError for options out of range, for a fixed position
    embedding in a model with a class token, and for none where they are all that X̃ is.
    """
    if isinstance(model, SimpleViT):
        positions = model.pos_embed  # (N, C)
        grid = model.grid
        norm_eps = None
        free = model.blocks[0].attn.reads == "free"
        scale = model.blocks[0].attn.logit_scale
        pairs = [block.attn.factors for block in model.blocks]  # Q, K, (h, C, d); free (h, N, d)
    else:
        vit = vit_layout(model)
        if vit.tokens and not vit.learned:
            raise ValueError(
                "init 'impulse_gd' solves on fixed positions of patches, and prefix "
                "tokens, which have none, would draw the attention; set pool = "
                '"mean" and num_registers = 0'
            )
        model = vit.model
        positions = vit.positions
        grid = vit.grid
        norm_eps = vit.first.norm.eps
        free = False
        scale = vit.first.q.shape[1] ** -0.5
        pairs = [(block.q.mT, block.k.mT) for block in vit.blocks]  # views, (h, D, d)
    cells = offsets_on_grid(kernel_size, grid)  # checks kernel_size, before any draw
    draw_base(model, base, generator)
    solution = None
    for query, key in pairs:
        if solution is None or not share_blocks:
            targets = head_offsets(len(query), cells, offsets, generator)
            maps = torch.stack([shift_matrix(cell, grid) for cell in targets])  # (h, N, N)
            maps = maps.to(positions.dtype)
            tokens = None
            if not free:
                tokens = draw_pseudo_input(positions, pseudo_input, norm_eps, generator)
            solution = solve(
                maps, tokens, query.shape[2], scale, steps, step_size, renorm_every, generator
            )
        query.copy_(solution[0].mT)
        key.copy_(solution[1].mT)


def draw_pseudo_input(
    positions: Tensor, kind: PseudoInput, norm_eps: float | None, generator: Generator
) -> Tensor:
    """X̃, (N, C): the tokens on which Q and K are solved; norm_eps: of their LayerNorm, if any."""
    noise = torch.zeros_like(positions)
    if "uniform" in kind:
        noise.uniform_(-1.0, 1.0, generator=generator)
    elif "normal" in kind:
        noise.normal_(std=0.5**0.5, generator=generator)
    tokens = positions + noise if kind.startswith("pos_embed") else noise
    if not tokens.any():
        raise ValueError(
            "init 'impulse_gd' solves on positions, and this model has none; expected another "
            "pos_embed, or noise as pseudo_input"
        )
    if norm_eps is None:
        return tokens
    return F.layer_norm(tokens, tokens.shape[-1:], eps=norm_eps)


def solve(
    maps: Tensor,
    tokens: Tensor | None,
    rank: int,
    logit_scale: float,
    steps: int,
    step_size: float,
    renorm_every: int,
    generator: Generator,
) -> tuple[Tensor, Tensor]:
    """Optimise Q and K, each (h, C, rank): softmax(logit_scale · X̃ Q Kᵀ X̃ᵀ) ≈ maps, (h, N, N).

    tokens: X̃, (N, C), or None for the identity, with C = N. Returns Qᵀ and Kᵀ, each (h, rank, C).
    """
    rows = maps.shape[1] if tokens is None else tokens.shape[1]
    bound = (rank * len(maps)) ** -0.5  # as in the papers' code
    query = maps.new_empty(len(maps), rows, rank)
    key = torch.empty_like(query)
    for factor in (query, key):
        factor.uniform_(-bound, bound, generator=generator)
        factor.requires_grad = True
    norm = query.detach().norm(dim=1).mean()
    optimizer = torch.optim.Adam([query, key], lr=step_size)
    for step in range(steps):
        if renorm_every and step % renorm_every == 0:
            for factor, axis in ((query, 1), (key, 2)):  # columns of Q, but of Kᵀ, as in that code
                factor.detach().mul_(norm / factor.detach().norm(dim=axis, keepdim=True))
        with torch.enable_grad():
            left, right = query, key
            if tokens is not None:
                left, right = tokens @ query, tokens @ key
            logits = logit_scale * left @ right.mT  # (h, N, N)
            loss = F.mse_loss(logits.softmax(-1), maps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return query.detach().mT, key.detach().mT
