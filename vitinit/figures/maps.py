"""The figure `maps`: Q Kᵀ, P Q Kᵀ Pᵀ and its softmax for each head of a ViT.

arXiv 2305.09828 (mimetic initialisation) and 2505.19985 (structured initialisation) show these
maps. Q and K are a head's query and key weights, P is the position embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..models import VisionTransformer
from ..models.attention import attention_weights
from .plot import Row, draw_grid
from .subjects import Subject, require_family, require_indices

# kind: label of the colour bar, vertical axis, horizontal axis, whether colours are centred at 0
KINDS = {
    "qk": ("Q Kᵀ", "channel of Q", "channel of K", True),
    "logits": ("P Q Kᵀ Pᵀ", "query token", "key token", True),
    "softmax": ("attention on P alone", "query token", "key token", False),
}
SHOWN = 0.995                   # share of Q Kᵀ's entries within the colour scale


@torch.no_grad()
def position_maps(model: VisionTransformer, block: int, kind: str) -> Tensor:
    """One kind of map for every head of a block.

    kind: one of KINDS.
    Returns (h, D, D) for "qk", else (h, N, N) with N patch tokens. P, (N, D), is the patch tokens'
    position embedding after the block's own first norm. Biases of queries and keys are left out, as
    in the papers; "softmax" includes the model's factor 1/√d.
    """
    attention = model.blocks[block].attn
    query, key = attention.q_weight.mT, attention.k_weight.mT            # (h, D, d)
    if kind == "qk":
        return query @ key.mT                                            # (h, D, D)
    positions = model.blocks[block].norm1(model.pos_embed[0, model.num_prefix_tokens:])  # (N, D)
    query, key = positions @ query, positions @ key                      # (h, N, d)
    if kind == "logits":
        return query @ key.mT                                            # (h, N, N)
    return attention_weights(query, key)


def draw_maps(out: Path, subjects: Iterable[Subject], *, kinds: Sequence[str],
              blocks: Sequence[int], heads: Sequence[int] | None) -> None:
    """Draw one row per model, block and kind, with one column per head.

    Each row has one colour scale. heads: indices; None: all heads.
    """
    rows, most = [], 0
    for subject in subjects:
        require_family(subject, "maps", VisionTransformer)
        require_indices("block", blocks, len(subject.model.blocks))
        for block in blocks:
            count = subject.model.blocks[block].attn.num_heads
            chosen = list(range(count)) if heads is None else list(heads)
            require_indices("head", chosen, count)
            most = max(most, len(chosen))
            for kind in kinds:
                unit, down, across, diverging = KINDS[kind]
                maps = position_maps(subject.model, block, kind)[chosen]
                # If colours reached the few largest entries of Q Kᵀ, such as a diagonal's, all
                # other entries would be pale.
                peak = np.quantile(maps.abs().numpy(), SHOWN) if kind == "qk" else 0.0
                rows.append(Row(f"{subject.state}\nblock {block}", maps, unit, down, across,
                                diverging, peak=peak))
    draw_grid(out, rows, [f"head {head}" for head in heads or range(most)],
              f"{subject.recipe.name}: each head on the position embedding P")
