"""MLP-Mixer (Tolstikhin et al., arXiv 2105.01601): one MLP mixes tokens, another mixes channels.

    image → patches → blocks → norm → mean → head

Names in the state dict, parameter counts and outputs are timm's. Shape legend: see attention.py.
"""

from __future__ import annotations

from torch import Tensor, nn

from .layers import Mlp, PatchEmbed, add_branch, hidden_width, require_positive, to_pair

NORM_EPS = 1e-6


class Stem(PatchEmbed):
    """The patch embedding, under the name that timm gives it: stem.proj."""


class MixerBlock(nn.Module):
    """x + token_mixing(norm(x)), then x + channel_mixing(norm(x)) (§2, equation 1)."""

    def __init__(self, num_tokens: int, dim: int, *, tokens_hidden: int,
                 channels_hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp_tokens = Mlp(num_tokens, tokens_hidden)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp_channels = Mlp(dim, channels_hidden)

    def token_mixing(self, x: Tensor) -> Tensor:
        """(B, N, C) → the same; the MLP runs along the tokens, alike for all channels."""
        return self.mlp_tokens(x.mT).mT                                  # through (B, C, N)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """x: (B, N, C); keep: (2, B) stochastic-depth factors of the two branches, or None."""
        keep_tokens, keep_channels = (None, None) if keep is None else keep
        x = add_branch(x, self.token_mixing(self.norm1(x)), keep_tokens)
        return add_branch(x, self.mlp_channels(self.norm2(x)), keep_channels)


class MlpMixer(nn.Module):
    """MLP-Mixer for images (B, 3, H, W) → logits (B, num_classes).

    tokens_ratio, channels_ratio: hidden widths of the two MLPs over embed_dim.
    drop_path: stochastic-depth rate, the same in every block, as in timm.
    """

    num_prefix_tokens = 0
    learns_positions = False        # the token MLP knows each position by itself

    def __init__(self, *, num_classes: int, image_size: int | tuple[int, int],
                 patch_size: int | tuple[int, int], embed_dim: int, depth: int,
                 tokens_ratio: float = 0.5, channels_ratio: float = 4.0,
                 drop_path: float = 0.0) -> None:
        super().__init__()
        require_positive(num_classes=num_classes, image_size=image_size, patch_size=patch_size,
                         embed_dim=embed_dim, depth=depth, tokens_ratio=tokens_ratio,
                         channels_ratio=channels_ratio)
        if not 0.0 <= drop_path < 1.0:
            raise ValueError(f"drop_path is {drop_path}, expected 0 ≤ drop_path < 1")
        self.num_classes = num_classes
        self.drop_path_rates = (drop_path,) * (2 * depth)
        self.stem = Stem(image_size=to_pair(image_size), patch_size=to_pair(patch_size),
                         embed_dim=embed_dim)
        self.grid = self.stem.grid
        self.blocks = nn.ModuleList(
            MixerBlock(self.grid[0] * self.grid[1], embed_dim,
                       tokens_hidden=hidden_width(embed_dim, tokens_ratio, "tokens_ratio"),
                       channels_hidden=hidden_width(embed_dim, channels_ratio, "channels_ratio"))
            for _ in range(depth))
        self.norm = nn.LayerNorm(embed_dim, eps=NORM_EPS)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """images: (B, 3, H, W), normalised. keep: (2·depth, B) from `draw_keep`, or None."""
        x = self.stem(images)                                            # (B, N, C)
        kept = [None] * len(self.blocks) if keep is None else keep.unflatten(0, (-1, 2))
        for block, keep_of_block in zip(self.blocks, kept):
            x = block(x, keep_of_block)
        return self.head(self.norm(x).mean(dim=1))
