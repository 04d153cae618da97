"""Swin Transformer (Liu et al., arXiv 2103.14030): attention within windows.

    image → patches → stages of blocks; each stage but the first begins by merging 2×2 tokens
    → norm → mean → head

In every second block of a stage the windows are shifted by half their size, so that information
crosses their borders. Within a stage the tokens form a feature map (B, H, W, C). Names in the state
dict, parameter counts and outputs equal timm's. The shape legend is in attention.py; in addition, w
is the side of a window and M the number of windows of one feature map.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import product

import torch
from einops import rearrange
from torch import Tensor, nn

from ..base.messages import times
from .attention import Attention, attend, attention_logits
from .layers import (
    Classifier,
    Features,
    Mlp,
    Pair,
    PatchEmbed,
    Sides,
    add_branch,
    block_numbers,
    drop_path_rates,
    hidden_width,
    make_head,
    map_tokens,
    module_list,
    scales_by_block,
    to_pair,
)

MASKED = -100.0  # added to the logits of tokens that only the shift made neighbours


class WindowAttention(Attention):
    """Attention among the tokens of one window, with a learned bias for each relative position.

    relative_position_bias_table: ((2·w_h − 1)·(2·w_w − 1), h). Row
        (down + w_h − 1)·(2·w_w − 1) + right + w_w − 1 is added to the logit of a query that is
        `down` rows below and `right` columns to the right of its key (§3.2).
    relative_position_index: (w², w²), that row for each query and key.
    """

    relative_position_index: Tensor

    def __init__(self, dim: int, *, num_heads: int, window: Sides, qkv_bias: bool) -> None:
        super().__init__(dim, num_heads=num_heads, qkv_bias=qkv_bias)
        height, width = window
        self.window = window
        self.relative_position_bias_table = nn.Parameter(
            torch.zeros((2 * height - 1) * (2 * width - 1), num_heads)
        )
        cells = torch.cartesian_prod(torch.arange(height), torch.arange(width))  # (w², 2)
        down, right = (cells[:, None] - cells).unbind(-1)  # query − key, (w², w²)
        index = (down + height - 1) * (2 * width - 1) + right + width - 1
        self.register_buffer("relative_position_index", index, persistent=False)

    def bias(self, mask: Tensor | None) -> Tensor:
        """What is added to the logits: (1, M·h, w², w²), or (1, h, w², w²) without a mask.

        mask: (M, w², w²), 0 or MASKED, for the windows of a feature map in row-major order.
        """
        bias = self.relative_position_bias_table[self.relative_position_index]
        bias = rearrange(bias, "query key h -> h query key")
        if mask is None:
            return bias[None]
        return rearrange(bias + mask[:, None], "m h query key -> 1 (m h) query key")

    def folded(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(B·M, w², C) → Q, K, V, (B, M·h, w², d), to share one bias; unmasked (B·M, h, w², d)."""
        windows = 1 if mask is None else mask.shape[0]
        # Rearranged one by one: as views of one tensor, the values would keep the queries and keys
        # in memory until the backward pass.
        q, k, v = (
            rearrange(part, "(b m) h n d -> b (m h) n d", m=windows)
            for part in self.queries_keys_values(x)
        )
        return q, k, v

    def mixing_logits(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The logits of the attention that `forward` applies: (B·M, w², C) → (B·M, h, w², w²)."""
        q, k, _ = self.folded(x, mask)
        logits = attention_logits(q, k, self.bias(mask))
        return rearrange(logits, "b (m h) q k -> (b m) h q k", h=self.num_heads)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: (B·M, w², C), the windows of one image after those of another; mask: see `bias`."""
        q, k, v = self.folded(x, mask)  # each (B, M·h, w², d), or (B·M, h, w², d)
        x = attend(q, k, v, self.bias(mask))
        x = rearrange(x, "b (m h) n d -> (b m) n (h d)", h=self.num_heads)
        return self.proj(x)


def shift_mask(grid: Sides, window: Sides, shift: Sides) -> Tensor | None:
    """(M, w², w²): MASKED where only the shift made tokens neighbours (§3.2), else 0; or None."""
    if not any(shift):
        return None
    parts = []  # of the rows, and of the columns
    for w, s in zip(window, shift):
        cuts = [slice(0, -w), slice(-w, -s), slice(-s, None)] if s else [slice(None)]
        parts.append(cuts)
    regions = torch.zeros(grid)
    for number, (rows, columns) in enumerate(product(*parts)):
        regions[rows, columns] = number
    regions = rearrange(regions, "(a h) (b w) -> (a b) (h w)", h=window[0], w=window[1])
    apart = regions[:, :, None] != regions[:, None]  # (M, w², w²)
    return MASKED * apart.float()


class SwinBlock(nn.Module):
    """Pre-norm block on a feature map (B, H, W, C): attention in windows, then the MLP.

    window: at most the grid. shifted: whether windows are shifted by half their size, as in every
        second block, but not along a side where one spans the whole grid.
    """

    def __init__(
        self,
        dim: int,
        *,
        grid: Sides,
        num_heads: int,
        window: Sides,
        shifted: bool,
        mlp_ratio: float,
        qkv_bias: bool,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.window = window
        down, right = (w // 2 if shifted and w < side else 0 for w, side in zip(window, grid))
        self.shift = down, right
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, num_heads=num_heads, window=window, qkv_bias=qkv_bias)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, hidden_width(dim, mlp_ratio))
        self.register_buffer("mask", shift_mask(grid, window, self.shift), persistent=False)

    def mix_windows(self, x: Tensor) -> Tensor:
        """The attention branch on a normalised feature map: (B, H, W, C) → the same."""
        down, right = self.shift
        height, width = self.window
        if any(self.shift):
            x = x.roll((-down, -right), dims=(1, 2))
        windows = rearrange(x, "n (a h) (b w) c -> (n a b) (h w) c", h=height, w=width)
        windows = self.attn(windows, self.mask)  # (B·M, w², C)
        a = self.grid[0] // height  # windows, down
        b = self.grid[1] // width  # and across
        x = rearrange(windows, "(n a b) (h w) c -> n (a h) (b w) c", a=a, b=b, h=height)
        if any(self.shift):
            x = x.roll((down, right), dims=(1, 2))
        return x

    def forward(self, x: Tensor, drop_path: Sequence[Tensor | None] = (None, None)) -> Tensor:
        """x: (B, H, W, C); drop_path: the scales of the two branches, each (B,) or None."""
        mixed = self.mix_windows(self.norm1(x))
        x = add_branch(x, mixed, drop_path[0])
        hidden = self.mlp(self.norm2(x))
        return add_branch(x, hidden, drop_path[1])


class PatchMerging(nn.Module):
    """Merge 2×2 neighbours into one token of twice the width: (B, H, W, C) → (B, H/2, W/2, 2·C)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Channels of the upper left, lower left, upper right and lower right token, in this order.
        x = rearrange(x, "n (h down) (w right) c -> n h w (right down c)", down=2, right=2)
        return self.reduction(self.norm(x))


class SwinStage(nn.Module):
    """What `SwinTransformer.features` calls in turn: merging, or in stage 1 nothing, and blocks."""

    def __init__(self, downsample: nn.Module, blocks: Iterable[SwinBlock]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = module_list(blocks)


class SwinTransformer(Classifier):
    """Swin for images (B, 3, H, W) → logits (B, num_classes).

    What is not listed here, and the errors: see `Classifier`.

    image_size, patch_size, window_size: one integer or (height, width). In each stage the window is
        cut to the stage's grid, and must tile it. The grids of all stages but the last must be
        even. Raises ValueError, naming the stage, otherwise.
    embed_dim: width of the first stage; each merge doubles it.
    depths, num_heads: one entry per stage.
    drop_path: stochastic-depth rate of the last block; the rates rise linearly from 0 in the first.
    """

    family = "swin"

    def __init__(
        self,
        *,
        num_classes: int,
        image_size: Pair,
        in_channels: int = 3,
        patch_size: Pair,
        embed_dim: int,
        depths: tuple[int, ...],
        num_heads: tuple[int, ...],
        window_size: Pair = 7,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__(
            num_classes,
            in_channels,
            image_size=image_size,
            patch_size=patch_size,
            embed_dim=embed_dim,
            depths=depths,
            num_heads=num_heads,
            window_size=window_size,
            mlp_ratio=mlp_ratio,
        )
        if len(depths) != len(num_heads):
            raise ValueError(
                f"depths has {len(depths)} stages and num_heads {len(num_heads)}; expected as many"
            )
        self.drop_path_rates = drop_path_rates(drop_path, sum(depths))
        self.patch_embed = PatchEmbed(
            image_size, patch_size, embed_dim, in_channels=in_channels, norm=True
        )
        self.grid = self.patch_embed.grid
        stages = []
        for stage, grid in enumerate(stage_grids(self.grid, len(depths))):
            width = embed_dim * 2**stage
            window = window_on(grid, to_pair(window_size), stage)
            merging = PatchMerging(width // 2) if stage > 0 else nn.Identity()
            blocks = []
            for number in range(depths[stage]):
                block = SwinBlock(
                    width,
                    grid=grid,
                    num_heads=num_heads[stage],
                    window=window,
                    shifted=number % 2 == 1,
                    mlp_ratio=mlp_ratio,
                    qkv_bias=qkv_bias,
                )
                blocks.append(block)
            stages.append(SwinStage(merging, blocks))
        self.layers = module_list(stages)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(OrderedDict(fc=make_head(width, num_classes)))  # timm's name

    def features(
        self, images: Tensor, drop_path: Tensor | None = None, *, blocks: Sequence[int] = ()
    ) -> Features:
        """See `Classifier`; drop_path: (2·blocks, B). Blocks are counted through all stages."""
        depth = sum(len(stage.blocks) for stage in self.layers)
        wanted = block_numbers(blocks, depth)
        scales = scales_by_block(drop_path, depth)
        after = {}  # the wanted blocks, by their numbers
        number = 0
        x = self.patch_embed(images).unflatten(1, self.grid)  # (B, H, W, C)
        for stage in self.layers:
            x = stage.downsample(x)
            for block in stage.blocks:
                x = block(x, scales[number])
                if number in wanted:
                    after[number] = map_tokens(x)
                number += 1
        x = self.norm(x)
        of_blocks = tuple(after[number] for number in wanted)
        return Features(of_blocks, map_tokens(x), x.mean(dim=(1, 2)))


def stage_grids(grid: Sides, stages: int) -> list[Sides]:
    """The grid of each stage, halved by each merge; raises ValueError if it is odd before one."""
    grids = [grid]
    for stage in range(1, stages):
        height, width = grids[-1]
        if height % 2 or width % 2:
            raise ValueError(
                f"stage {stage} has a grid of {height}×{width} tokens, which does not "
                "merge into 2×2; image_size must be a multiple of patch_size · "
                f"{2 ** (stages - 1)}"
            )
        grids.append((height // 2, width // 2))
    return grids


def window_on(grid: Sides, window: Sequence[int], stage: int) -> Sides:
    """The window of a stage, cut to its grid; raises ValueError if it does not tile the grid."""
    height, width = (min(w, side) for w, side in zip(window, grid))
    if grid[0] % height or grid[1] % width:
        raise ValueError(
            f"stage {stage + 1} has a grid of {times(grid)} tokens, which windows of "
            f"{height}×{width} do not tile; choose window_size or image_size so that they do"
        )
    return height, width
