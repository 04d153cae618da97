"""What inits write to: the one door to the tensors of a transformer's attention.

Shapes: D channels of the residual stream, h heads, d channels per head, N patches, n in a window.
"""

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..mixing.filters import Grid, Offset, neighbours
from ..models.attention import attention_weights

__all__ = ["Block", "Layout", "Rotation", "ShiftBlock", "SwinLayout", "WindowBlock"]


@dataclass(frozen=True)
class Rotation:
    """How an attention turns queries and keys by the places of their tokens."""

    pairs: Tensor  # (d / 2, 2), the channels of each pair
    turns: Tensor  # (T, h or 1, d / 2, 2), cosine and sine of each token's angle

    def __call__(self, x: Tensor) -> Tensor:
        """x (n, h, T, d), of the last T tokens, turned."""
        a, b = x[..., self.pairs].unbind(-1)  # (n, h, T, d / 2) each
        turns = self.turns[-x.shape[2] :].to(x)
        cos, sin = turns.transpose(0, 1).unbind(-1)  # (h or 1, T, d / 2) each
        turned = torch.empty_like(x)
        turned[..., self.pairs] = torch.stack([a * cos - b * sin, a * sin + b * cos], -1)
        return turned

    def frequencies(self, grid: Grid) -> Tensor:
        """ω of each pair in radians per (row, column) of the grid, (h or 1, d / 2, 2), float64.

        Raises ValueError unless the angles of the grid's tokens, the last, are a plane over it.
        """
        turns = self.turns[-prod(grid) :].double()
        waves = torch.view_as_complex(turns).unflatten(0, grid)  # (H, W, h or 1, d / 2)
        steps = []  # from each token to the next, down and across
        for axis, side in enumerate(grid):
            following = waves.narrow(axis, 1, side - 1)
            leading = waves.narrow(axis, 0, side - 1)
            steps.append((following * leading.conj()).flatten(0, 1).sum(0).angle())
        omega = torch.stack(steps, -1)  # (h or 1, d / 2, 2)
        cells = torch.cartesian_prod(*map(torch.arange, grid)).double().unflatten(0, grid)
        angles = (cells[:, :, None, None] * omega).sum(-1)
        plane = torch.polar(torch.ones(()).double(), angles)
        if (waves - waves[0, 0] * plane).abs().max() > 1e-3:
            raise ValueError(
                "the rotary frequencies are not one for the rows and one for the "
                "columns of each pair of channels, or were rounded: initialise in "
                "float32 and convert then"
            )
        return omega


@dataclass(frozen=True)
class ShiftBlock:
    """What a block that mixes by fixed shifts has of an attention, as views, as in `Block`."""

    v: Tensor  # (h, d, D)
    proj: Tensor  # (D, h, d)


@dataclass(frozen=True)
class Block:
    """The attention of one block, as views: writing to them writes to the model's parameters.

    Head i adds softmax(Qᵢ Kᵢᵀ / √d) Vᵢ @ proj[:, i].T to the stream, with Qᵢ = x @ q[i].T +
    q_bias[i], where x is the output of `norm`.
    """

    q: Tensor  # (h, d, D)
    k: Tensor  # (h, d, D)
    v: Tensor  # (h, d, D)
    proj: Tensor  # (D, h, d)
    q_bias: Tensor | None  # (h, d)
    k_bias: Tensor | None  # (h, d)
    v_bias: Tensor | None  # (h, d)
    proj_bias: Tensor | None  # (D,)
    norm: nn.LayerNorm  # before the attention
    attention: nn.Module | None = None  # the whole, by which the formula can be checked
    rotation: Rotation | None = None  # of Q and K; None: they are not turned
    around: nn.Module | None = None  # the block, with its MLP

    @property
    def bias(self) -> Tensor | None:
        """What is added to the logits, (h, T, T)."""
        return None

    def mixing_weights(self, y: Tensor) -> Tensor:
        """softmax(Q Kᵀ / √d + bias) of the norm's output y, (n, T, D): (n, h, T, T)."""
        q = projected(y, self.q, self.q_bias)
        k = projected(y, self.k, self.k_bias)
        if self.rotation is not None:
            q = self.rotation(q)
            k = self.rotation(k)
        return attention_weights(q, k, self.bias)

    def output(self, y: Tensor) -> Tensor:
        """What the attention makes of the norm's output: (n, T, D) → (n, T, D)."""
        values = projected(y, self.v, self.v_bias)
        mixed = self.mixing_weights(y) @ values  # (n, h, T, d)
        output = torch.einsum("bhtd, chd -> btc", mixed, self.proj)
        if self.proj_bias is None:
            return output
        return output + self.proj_bias


@dataclass(frozen=True, kw_only=True)
class WindowBlock(Block):
    """The attention of a Swin's block. Its y are whole windows, (windows, n, D), row by row."""

    window: Grid  # tokens down and across
    bias_table: Tensor  # (relative positions, h)
    bias_rows: Tensor  # (n, n), by query and key

    def bias_row(self, offset: Offset) -> int:
        """The row of `bias_table` for keys at this offset; ValueError unless there is one."""
        rows = self.bias_rows[neighbours(offset, self.window)].unique()
        if len(rows) != 1:
            raise ValueError(
                f"the relative position bias has {len(rows)} rows for the offset "
                f"{offset}, expected one"
            )
        return int(rows)

    @property
    def bias(self) -> Tensor:
        return self.bias_table[self.bias_rows].movedim(2, 0)


def projected(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Queries, keys or values of each head: y (n, T, D), weight (h, d, D) → (n, h, T, d)."""
    product = y[:, None] @ weight.mT
    if bias is None:
        return product
    return product + bias[:, None]


@dataclass(frozen=True)
class Attentions(ABC):
    """The blocks of a transformer, and what a probe (interop/in_place/probe.py) has seen of it."""

    model: nn.Module
    blocks: tuple[Block, ...]
    _: KW_ONLY
    image_shape: tuple[int, int, int] | None = None  # (channels, height, width), where known
    prefix: int = 0  # tokens before those of the patches
    checked: str = ""  # in words, what was checked
    sequence_first: bool = False  # whether the blocks read (T, n, D) in place of (n, T, D)
    family: ClassVar[str]  # whose inits write to it

    @property
    def first(self) -> Block:
        """The first of the blocks; ValueError if there is none, as all mix by shifts."""
        if not self.blocks:
            raise ValueError(
                "no block has queries and keys, which this init writes; expected shift_blocks below "
                "the depth, or an init without them, such as default"
            )
        return self.blocks[0]

    @property
    @abstractmethod
    def grids(self) -> list[Grid]:
        """The grid of the tokens that each block mixes; in a Swin, of its window."""

    def batch_first(self, x: Tensor) -> Tensor:
        """What a block reads as (n, T, D), a view."""
        if self.sequence_first and x.ndim == 3:
            return x.transpose(0, 1)
        return x


@dataclass(frozen=True)
class Layout(Attentions):
    """Where a ViT keeps what inits write, as its attributes or a user state it."""

    pos_embed: Tensor  # (rows, D), a view: of prefix tokens, then of the N patches by row;
    # without rows where positions are rotary alone
    grid: Grid = (0, 0)  # patch tokens down and across; (0, 0): only a probe can see them
    learned: bool = True  # whether pos_embed is a parameter, and no frozen sines and cosines
    tokens: tuple[Tensor, ...] = ()  # the prefix tokens, (…, D)
    _: KW_ONLY
    shifting: tuple[ShiftBlock, ...] = ()  # before the first of `blocks`, without queries and keys
    entry: nn.Module = nn.Identity()  # between the sum with positions and the first block: CLIP
    family = "vit"

    @property
    def rotary(self) -> bool:
        return bool(self.blocks) and self.blocks[0].rotation is not None

    @property
    def grids(self) -> list[Grid]:
        return [self.grid] * len(self.blocks)

    @property
    def positions(self) -> Tensor:
        """The position embedding of the patch tokens, (N, D), a view, or zeros if there is none."""
        patches = prod(self.grid)
        rows, dim = self.pos_embed.shape
        if rows == 0:
            return self.pos_embed.new_zeros(patches, dim)
        return self.pos_embed[-patches:]


@dataclass(frozen=True)
class SwinLayout(Attentions):
    """Where a Swin keeps what inits write: the relative biases of its windows, too."""

    blocks: tuple[WindowBlock, ...]
    family = "swin"

    @property
    def grids(self) -> list[Grid]:
        return [block.window for block in self.blocks]
