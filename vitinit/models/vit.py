"""Vision Transformer (Dosovitskiy et al., arXiv 2010.11929), as DeiT trains it (arXiv 2012.12877).

    image → patches → + class token, + position code → blocks → norm → class token or mean → head

Names in the state dict, parameter counts and outputs are those of timm and of DeiT's checkpoints.
Shape legend: see attention.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from .attention import Attention
from .layers import (Mlp, PatchEmbed, add_branch, drop_path_rates, require_positive,
                     sincos_position_code, to_pair)

NORM_EPS = 1e-6         # of every LayerNorm in ViT and DeiT (PyTorch's own default is 1e-5)


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, dim: int, *, num_heads: int, mlp_ratio: float, qkv_bias: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.attn = Attention(dim, num_heads=num_heads, qkv_bias=qkv_bias)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """x: (B, N, C); keep: (2, B) stochastic-depth factors of the two branches, or None."""
        keep_attention, keep_mlp = (None, None) if keep is None else keep
        x = add_branch(x, self.attn(self.norm1(x)), keep_attention)
        return add_branch(x, self.mlp(self.norm2(x)), keep_mlp)


class VisionTransformer(nn.Module):
    """ViT for images (B, 3, H, W) → logits (B, num_classes).

    image_size, patch_size: one integer or (height, width); the patches must tile the image.
    pool: "class" reads the class token, "mean" has none and averages the patch tokens.
    pos_embed: "learned", or "sincos", which is fixed (a buffer, zeros for the class token).
    distilled: DeiT's distillation token and its head beside the class token's; the logits are the
        mean of both heads' (arXiv 2012.12877, §4). There is no teacher here.
    drop_path: stochastic-depth rate of the last block, rising linearly from 0 in the first; used by
        `forward` only through the `keep` table that the caller draws (`layers.draw_keep`).

    Weights are what PyTorch's layers draw; call `vitinit.init_weights` before training.
    """

    def __init__(self, *, num_classes: int, image_size: int | tuple[int, int],
                 patch_size: int | tuple[int, int], embed_dim: int, depth: int, num_heads: int,
                 mlp_ratio: float = 4.0, qkv_bias: bool = True, drop_path: float = 0.0,
                 pool: Literal["class", "mean"] = "class",
                 pos_embed: Literal["learned", "sincos"] = "learned",
                 distilled: bool = False) -> None:
        super().__init__()
        require_positive(num_classes=num_classes, image_size=image_size, patch_size=patch_size,
                         embed_dim=embed_dim, depth=depth, num_heads=num_heads,
                         mlp_ratio=mlp_ratio)
        if not 0.0 <= drop_path < 1.0:
            raise ValueError(f"drop_path is {drop_path}, expected 0 ≤ drop_path < 1")
        if pool not in ("class", "mean") or pos_embed not in ("learned", "sincos"):
            raise ValueError(f'pool is {pool!r} and pos_embed is {pos_embed!r}; expected "class" or '
                             '"mean", and "learned" or "sincos"')
        if distilled and pool != "class":
            raise ValueError(f'a distillation token stands beside a class token; pool is "{pool}", '
                             'expected "class"')
        self.num_classes = num_classes
        self.drop_path_rates = drop_path_rates(drop_path, depth)
        self.num_prefix_tokens = (pool == "class") + distilled

        self.patch_embed = PatchEmbed(image_size=to_pair(image_size),
                                      patch_size=to_pair(patch_size), embed_dim=embed_dim)
        self.grid = self.patch_embed.grid
        if self.num_prefix_tokens:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        if distilled:
            self.dist_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        num_tokens = self.num_prefix_tokens + self.grid[0] * self.grid[1]
        code = torch.zeros(1, num_tokens, embed_dim)
        if pos_embed == "learned":
            self.pos_embed = nn.Parameter(code)
        else:
            code[0, self.num_prefix_tokens:] = sincos_position_code(self.grid, embed_dim)
            self.register_buffer("pos_embed", code)
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads=num_heads, mlp_ratio=mlp_ratio, qkv_bias=qkv_bias)
            for _ in range(depth))
        self.norm = nn.LayerNorm(embed_dim, eps=NORM_EPS)
        self.head = nn.Linear(embed_dim, num_classes)
        if distilled:
            self.head_dist = nn.Linear(embed_dim, num_classes)

    @property
    def learns_positions(self) -> bool:
        return isinstance(self.pos_embed, nn.Parameter)

    def embed(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) → (B, N, C): patches, class and distillation token before them, the code."""
        x = self.patch_embed(images)
        before = [getattr(self, name) for name in ("cls_token", "dist_token")[:self.num_prefix_tokens]]
        x = torch.cat([*(token.expand(len(x), -1, -1) for token in before), x], dim=1)
        return x + self.pos_embed

    def classify(self, x: Tensor) -> Tensor:
        """(B, N, C) → (B, num_classes): the head on the class token, or on the tokens' mean."""
        x = self.norm(x)
        if self.num_prefix_tokens == 0:
            return self.head(x.mean(dim=1))
        if self.num_prefix_tokens == 1:
            return self.head(x[:, 0])
        return (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """images: (B, 3, H, W), normalised. keep: (2·depth, B) from `draw_keep`, or None."""
        x = self.embed(images)
        for block, kept in zip(self.blocks, self._keep_of_blocks(keep)):
            x = block(x, kept)                                           # (B, N, C)
        return self.classify(x)

    def _keep_of_blocks(self, keep: Tensor | None) -> Iterator[Tensor | None]:
        return iter([None] * len(self.blocks) if keep is None else keep.unflatten(0, (-1, 2)))
