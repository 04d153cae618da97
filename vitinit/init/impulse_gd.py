"""Impulse initialisation by gradient descent: what the closed form's two forerunners do.

It needs no full-rank position embedding, so it is what fixed sin-cos embeddings need.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..filters import convolution_matrix, impulse_kernel, offsets_on_grid
from ..models import SimpleViT, VisionTransformer
from .baseline import draw_base
from .impulse import head_offsets

PseudoInput = Literal["pos_embed", "uniform", "normal", "pos_embed+uniform", "pos_embed+normal"]
PSEUDO_INPUTS = get_args(PseudoInput)


@torch.no_grad()
def impulse_gd(model: VisionTransformer | SimpleViT, *, generator: torch.Generator,
               base: Literal["default", "torch"] = "default",
               kernel_size: int = 3,
               offsets: Literal["ordered", "random"] = "random",
               pseudo_input: PseudoInput = "pos_embed",
               share_blocks: bool = True,
               steps: int = 1000,
               step_size: float = 1e-4,
               renorm_every: int = 100) -> None:
    """Adam on Q and K until softmax(σ X̃ Q Kᵀ X̃ᵀ) is near the impulse maps of all heads.

    | tensor (every block)                 | value                                               |
    |--------------------------------------|-----------------------------------------------------|
    | attn.qkv.weight, Q, K rows (ViT);    | the solution; V, proj and biases stay               |
    |   attn.qk.weight, or attn.query and  |                                                     |
    |   attn.key where they are free       |                                                     |
    |   (SimpleViT)                        |                                                     |
    | everything else                      | as `base` drew it                                   |

    kernel_size, offsets: as for `impulse`; both papers draw an offset a head, with replacement. 5 in
        arXiv 2401.12511, 3 or 5 in arXiv 2404.01139.
    pseudo_input: X̃. The position embedding: of a ViT after LayerNorm, as in the second paper, of a
        SimpleViT as it is, as in the first; or noise, uniform on ±√3 or normal; or a sum. Free Q
        and K have none.
    share_blocks: one solution for all blocks (second paper) or one a block (first).
    steps, step_size: of Adam on the mean squared error of the maps. The papers take 10,000 steps.
    renorm_every: after so many steps every column of Q, and of Kᵀ, is brought back to the mean norm
        that Q's had at first; 1 or 100 in the papers' code. That bounds the logits, so that little is
        gained by further steps. 0: never; then maps sharpen for as long as it runs. Free Q and K
        (Model III) hardly leave uniform maps either way.

    Measured on the position embedding alone, mass on the targets, one busy core, beside the closed forms:

    | what                                                   | 1,000 steps | 10,000 | closed form  |
    |--------------------------------------------------------|-------------|--------|--------------|
    | SimpleViT, width 512, 16×16, fixed embedding, kernel 5,     | .21 in 13 s | .22    | ≥ .90, .03 s |
    |   σ .1, renorm_every 100, as the first paper's code    |             |        |              |
    | the same with free Q, K, σ 1 (Model III), renorm 0     | .004        | .006   | .95, .03 s   |
    | ViT, width 96, 8×8, learned embedding, off-centre heads     | .74 in 2 s  | .93 *  | .99, .04 s   |
    | the same, renorm_every 0                               | .89         | .98 *  |              |

    * after 3,000 steps.

    σ is the model's own scale of logits. Raises ValueError for options out of range, and for a fixed
    position embedding beside a class token, which has none: it would draw all attention to itself.
    """
    if pseudo_input not in PSEUDO_INPUTS:
        raise ValueError(f"pseudo_input is {pseudo_input!r}, expected one of "
                         f"{', '.join(PSEUDO_INPUTS)}")
    if model.num_prefix_tokens and not model.learns_positions:
        raise ValueError('init \'impulse_gd\' solves on the patches\' fixed position embedding, and the class '
                         'token, which has none, would draw the attention; set pool = "mean"')
    if offsets not in ("ordered", "random"):
        raise ValueError(f'offsets is {offsets!r}, expected "ordered" or "random"')
    if steps < 1 or not step_size > 0 or renorm_every < 0:
        raise ValueError(f"steps is {steps}, step_size {step_size} and renorm_every {renorm_every}; "
                         "expected steps ≥ 1, step_size > 0 and renorm_every ≥ 0")
    cells = offsets_on_grid(kernel_size, model.grid)     # checks kernel_size, before any draw
    draw_base(model, base, generator)

    solution = None
    for block in model.blocks:
        attention = block.attn
        if solution is None or not share_blocks:
            heads = head_offsets(attention.num_heads, cells, offsets, generator)
            maps = torch.stack([convolution_matrix(impulse_kernel(cell, kernel_size), model.grid)
                                for cell in heads]).to(model.pos_embed.dtype)  # (h, N, N)
            free = isinstance(model, SimpleViT) and attention.reads == "free"
            tokens = None if free else draw_pseudo_input(model, pseudo_input, generator)
            scale = getattr(attention, "logit_scale", attention.head_dim ** -0.5)
            solution = solve(maps, tokens, rank=attention.head_dim, logit_scale=scale, steps=steps,
                             step_size=step_size, renorm_every=renorm_every, generator=generator)
        query, key = solution                                            # (h, d, C or N) each
        if free:
            attention.query.copy_(query.mT)                              # (h, N, d)
            attention.key.copy_(key.mT)
        else:
            attention.q_weight.copy_(query)
            attention.k_weight.copy_(key)


def draw_pseudo_input(model: VisionTransformer | SimpleViT, kind: PseudoInput,
                      generator: torch.Generator) -> Tensor:
    """X̃, (N, C): what Q and K are solved on."""
    if isinstance(model, SimpleViT):
        positions = model.pos_embed
    else:
        positions = model.pos_embed[0, model.num_prefix_tokens:]
        positions = F.layer_norm(positions, positions.shape[-1:], eps=model.blocks[0].norm1.eps)
    noise = torch.zeros_like(positions)
    if "uniform" in kind:
        noise.uniform_(-3.0 ** 0.5, 3.0 ** 0.5, generator=generator)
    elif "normal" in kind:
        noise.normal_(generator=generator)
    return positions + noise if kind.startswith("pos_embed") else noise


def solve(maps: Tensor, tokens: Tensor | None, *, rank: int, logit_scale: float, steps: int,
          step_size: float, renorm_every: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Q and K, each (h, rank, C), with softmax(logit_scale · X̃ Qᵀ K X̃ᵀ) ≈ maps, (h, N, N).

    tokens: X̃, (N, C), or None for the identity: then Q and K are (h, rank, N) and mixed directly.
    """
    heads, count, _ = maps.shape
    rows = count if tokens is None else tokens.shape[1]
    bound = (rank * heads) ** -0.5
    query, key = (maps.new_empty(heads, rows, rank).uniform_(-bound, bound, generator=generator)
                  .requires_grad_() for _ in range(2))                   # as the papers' code has them
    norm = query.detach().norm(dim=1).mean()
    optimizer = torch.optim.Adam([query, key], lr=step_size)
    for step in range(steps):
        if renorm_every and step % renorm_every == 0:
            # Columns of Q (C, rank), but of Kᵀ (rank, C): as the papers' code has it.
            for factor, axis in ((query, 1), (key, 2)):
                factor.detach().mul_(norm / factor.detach().norm(dim=axis, keepdim=True))
        with torch.enable_grad():
            left, right = (query, key) if tokens is None else (tokens @ query, tokens @ key)
            loss = F.mse_loss((logit_scale * left @ right.mT).softmax(-1), maps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return query.detach().mT, key.detach().mT
