"""The figures `maps` and `kernels`: a grid of maps, one for each head of a ViT or SimpleViT.

`maps` shows Q Kᵀ, P Q Kᵀ Pᵀ and its softmax, as arXiv 2305.09828 (mimetic initialisation) and
2505.19985 (structured initialisation) do. Q and K are a head's query and key weights, P is the
position embedding. `kernels` shows the mean attention by the offset from query to key, which is the
convolution kernel that the head starts as.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..mixing import mean_kernel, mixing_matrices
from ..models.attention import attention_weights
from ..models.simple_vit import SimpleViT
from .plot import FigureError, Row, draw_grid
from .subjects import VITS, Subject, Vit, indices, photographs, unfit

# kind: label of the colour bar, vertical axis, horizontal axis, whether colours are centred at 0
KINDS = {
    "qk": ("Q Kᵀ", "channel of Q", "channel of K", True),
    "logits": ("P Q Kᵀ Pᵀ", "query token", "key token", True),
    "softmax": ("attention on P alone", "query token", "key token", False),
}
RADIUS = 3                      # largest offset of a kernel, in patches
SHOWN = 0.995                   # share of Q Kᵀ's entries within the colour scale


@torch.no_grad()
def position_maps(model: Vit, block: int, kind: str) -> Tensor:
    """One kind of map for every head of a block.

    kind: one of KINDS.
    Returns (h, D, D) for "qk", else (h, N, N) with N patch tokens. P, (N, D), is the position
    embedding as it reaches the queries and keys where the content is 0: after the block's own first
    norm, in a SimpleViT also weighted and read as the model does. Biases of queries and keys are
    left out, as in the papers; "softmax" includes the model's factor on the logits. Raises
    FigureError for a "qk" of a SimpleViT whose queries and keys are free parameters.
    """
    norm, attention = model.blocks[block].norm1, model.blocks[block].attn
    if kind == "qk":
        if getattr(attention, "reads", "") == "free":
            raise FigureError('Q and K of this model (reads = "free") are no weights of channels; '
                              "expected --kinds logits softmax")
        return attention.q_weight.mT @ attention.k_weight                # (h, D, d) @ (h, d, D)
    if isinstance(model, SimpleViT):
        attention = model.blocks[block].attn
        share = 1.0 - model.alpha if model.input_pos_embed else 0.0      # of P in the input
        x = norm(share * model.pos_embed)[None]                          # (1, N, D)
        if kind == "softmax":
            return attention.mixing_weights(x, model.pos_embed)[0]
        query, key = attention.queries_keys(x, model.pos_embed)          # (1, h, N, d) each
        return (query @ key.mT)[0]
    positions = norm(model.pos_embed[0, model.num_prefix_tokens:])       # (N, D)
    query, key = positions @ attention.q_weight.mT, positions @ attention.k_weight.mT  # (h, N, d)
    return query @ key.mT if kind == "logits" else attention_weights(query, key)


def draw_maps(out: Path, subjects: Iterable[Subject], *, kinds: Sequence[str],
              blocks: Sequence[int], heads: Sequence[int] | None) -> None:
    """Draw one row per kind, model and block, with one column per head.

    Each kind has one colour scale. heads: indices; None: all heads.
    """
    rows: dict[str, list[Row]] = {kind: [] for kind in kinds}
    for subject in subjects:
        if not isinstance(model := subject.model, VITS):
            raise unfit(subject, "maps", VITS)
        for block in indices("block", blocks, len(model.blocks)):
            for kind in kinds:
                unit, down, across, diverging = KINDS[kind]
                maps = position_maps(model, block, kind)
                maps = maps[indices("head", heads, len(maps))]
                # If colours reached the few largest entries of Q Kᵀ, such as a diagonal's, all
                # other entries would be pale.
                peak = np.quantile(maps.abs().numpy(), SHOWN) if kind == "qk" else 0.0
                rows[kind].append(Row(f"{subject.state}\nblock {block}", maps, unit, down, across,
                                      diverging, peak=peak))
    draw_grid(out, [row for kind in kinds for row in rows[kind]], heads,
              subject.heading("each head on the position embedding P"))


def draw_kernels(out: Path, subjects: Iterable[Subject], *, folder: Path | None, count: int,
                 blocks: Sequence[int], heads: Sequence[int] | None) -> None:
    """Draw mean attention by offset, with one row per model and block and one column per head.

    folder, count: the mean is over `count` images (`photographs`) and all query tokens.
    heads: indices; None: all heads.
    """
    rows = []
    for subject in subjects:
        if not isinstance(model := subject.model, VITS):
            raise unfit(subject, "kernels", VITS)
        images = photographs(folder, count, subject.recipe)
        numbers = indices("block", blocks, len(model.blocks))
        for block, weights in mixing_matrices(model, images, blocks=numbers).items():
            weights = weights[:, indices("head", heads, weights.shape[1])]       # (B, h, N, N)
            kernel = mean_kernel(weights, model.grid, RADIUS).mean(0)
            rows.append(Row(f"{subject.state}\nblock {block}", kernel, "mean attention",
                            "patches down", "patches right", diverging=False, centred=True))
    draw_grid(out, rows, heads,
              subject.heading(f"what each head attends to, mean over {count} images"))
