"""What inits write to: the one door to the tensors of a transformer's attention.

Shapes: D channels of the residual stream, h heads, d channels per head, N patches, n in a window.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn

from ..filters import Offset, neighbours


@dataclass(frozen=True)
class Block:
    """The attention of one block, as views: writing to them writes to the model's parameters.

    Head i adds softmax(Qᵢ Kᵢᵀ / √d) Vᵢ @ proj[:, i].T to the stream, with Qᵢ = x @ q[i].T +
    q_bias[i], where x is the output of `norm`.
    """

    q: Tensor                   # (h, d, D)
    k: Tensor                   # (h, d, D)
    v: Tensor                   # (h, d, D)
    proj: Tensor                # (D, h, d)
    q_bias: Tensor | None       # (h, d)
    k_bias: Tensor | None       # (h, d)
    v_bias: Tensor | None       # (h, d)
    proj_bias: Tensor | None    # (D,)
    norm: nn.LayerNorm          # before the attention
    attention: nn.Module | None = None           # the whole, by which the formula can be checked

    def logits(self, y: Tensor) -> Tensor:
        """Q Kᵀ / √d of the norm's output y, (n, T, D): (n, h, T, T)."""
        query, key = projected(y, self.q, self.q_bias), projected(y, self.k, self.k_bias)
        return query @ key.mT * self.q.shape[1] ** -0.5

    def mixing_weights(self, y: Tensor) -> Tensor:
        """The softmax of `logits`: (n, h, T, T)."""
        return self.logits(y).softmax(-1)

    def output(self, y: Tensor) -> Tensor:
        """What the attention makes of the norm's output: (n, T, D) → (n, T, D)."""
        mixed = self.mixing_weights(y) @ projected(y, self.v, self.v_bias)       # (n, h, T, d)
        output = torch.einsum("bhtd, chd -> btc", mixed, self.proj)
        return output if self.proj_bias is None else output + self.proj_bias


@dataclass(frozen=True, kw_only=True)
class WindowBlock(Block):
    """The attention of a Swin's block: within windows, with bias_table[bias_rows] in the logits."""

    window: tuple[int, int]     # tokens down and across
    bias_table: Tensor          # (relative positions, h)
    bias_rows: Tensor           # (n, n), by query and key

    def bias_row(self, offset: Offset) -> int:
        """The row of `bias_table` for keys at this offset; ValueError unless there is one."""
        rows = self.bias_rows[neighbours(offset, self.window)].unique()
        if len(rows) != 1:
            raise ValueError(f"the relative position bias has {len(rows)} rows for the offset "
                             f"{offset}, expected one")
        return int(rows)

    def logits(self, y: Tensor) -> Tensor:
        """As of any block, and the bias, (h, n, n); y is of whole windows, row by row."""
        return super().logits(y) + self.bias_table[self.bias_rows].movedim(2, 0)


def projected(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Queries, keys or values of each head: y (n, T, D), weight (h, d, D) → (n, h, T, d)."""
    return y[:, None] @ weight.mT + (0.0 if bias is None else bias[:, None])


@dataclass(frozen=True)
class Attentions:
    """The blocks of a transformer, and what a probe (`probe.py`) has seen of it."""

    model: nn.Module
    blocks: tuple[Block, ...]
    _: KW_ONLY
    image_shape: tuple[int, int, int] | None = None      # (channels, height, width), where known
    prefix: int = 0             # tokens before those of the patches
    checked: str = ""           # in words, what was checked


@dataclass(frozen=True)
class Layout(Attentions):
    """Where a ViT keeps what inits write, as its attributes or a user state it."""

    pos_embed: Tensor           # (rows, D), a view: of prefix tokens, then of the N patches by row
    grid: tuple[int, int] | None         # patch tokens down and across; None if it is not stated
    learned: bool = True        # whether pos_embed is a parameter, and no frozen sines and cosines
    tokens: tuple[Tensor, ...] = ()      # the prefix tokens, (…, D)


@dataclass(frozen=True)
class VitLayout(Layout):
    """A `Layout` whose grid is known: it was stated, or a probe has seen it."""

    grid: tuple[int, int]
    sequence_first: bool = False         # whether the blocks read (T, n, D) in place of (n, T, D)
    entry: nn.Module = nn.Identity()     # between the sum with positions and the first block: CLIP
    family = "vit"              # whose inits write to it

    @property
    def grids(self) -> list[tuple[int, int]]:
        """The grid of the tokens that each block mixes."""
        return [self.grid] * len(self.blocks)

    @property
    def positions(self) -> Tensor:
        """The position embedding of the patch tokens, (N, D), a view."""
        return self.pos_embed[-self.grid[0] * self.grid[1]:]

    def batch_first(self, x: Tensor) -> Tensor:
        """What a block reads as (n, T, D), a view."""
        return x.transpose(0, 1) if self.sequence_first and x.ndim == 3 else x


@dataclass(frozen=True)
class SwinLayout(Attentions):
    """The same of a Swin, whose heads find their target by the relative bias of their window."""

    blocks: tuple[WindowBlock, ...]
    family = "swin"

    @property
    def grids(self) -> list[tuple[int, int]]:
        """The window of each block."""
        return [block.window for block in self.blocks]
