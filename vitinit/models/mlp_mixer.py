"""MLP-Mixer (Tolstikhin et al., arXiv 2105.01601): one MLP mixes tokens, another mixes channels.

    image → patches → blocks → norm → mean → head

Names in the state dict, parameter counts and outputs equal timm's. Shapes: see attention.py.
"""

from collections.abc import Sequence
from math import prod

from torch import Tensor, nn

from .layers import (
    Classifier,
    Features,
    Mlp,
    Pair,
    PatchEmbed,
    add_branch,
    drop_path_rates,
    hidden_width,
    make_head,
    module_list,
    run_blocks,
    scales_by_block,
)

NORM_EPS = 1e-6


class MixerBlock(nn.Module):
    """x + token_mixing(norm(x)), then x + channel_mixing(norm(x)) (§2, equation 1)."""

    def __init__(self, num_tokens: int, dim: int, tokens_hidden: int, channels_hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp_tokens = Mlp(num_tokens, tokens_hidden)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp_channels = Mlp(dim, channels_hidden)

    def token_mixing(self, x: Tensor) -> Tensor:
        """(B, N, C) → the same: the MLP acts along the tokens, alike for all channels."""
        return self.mlp_tokens(x.mT).mT  # via (B, C, N)

    def forward(self, x: Tensor, drop_path: Sequence[Tensor | None] = (None, None)) -> Tensor:
        """x: (B, N, C); drop_path: the scales of the two branches, each (B,) or None."""
        mixed = self.token_mixing(self.norm1(x))
        x = add_branch(x, mixed, drop_path[0])
        hidden = self.mlp_channels(self.norm2(x))
        return add_branch(x, hidden, drop_path[1])


class MlpMixer(Classifier):
    """MLP-Mixer for images (B, 3, H, W) → logits (B, num_classes).

    What is not listed here, and the errors: see `Classifier`.

    tokens_ratio, channels_ratio: hidden widths of the two MLPs, divided by embed_dim.
    drop_path: stochastic-depth rate, the same in every block, as in timm.
    """

    family = "mlp_mixer"

    def __init__(
        self,
        *,
        num_classes: int,
        image_size: Pair,
        in_channels: int = 3,
        patch_size: Pair,
        embed_dim: int,
        depth: int,
        tokens_ratio: float = 0.5,
        channels_ratio: float = 4.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__(
            num_classes,
            in_channels,
            image_size=image_size,
            patch_size=patch_size,
            embed_dim=embed_dim,
            depth=depth,
            tokens_ratio=tokens_ratio,
            channels_ratio=channels_ratio,
        )
        self.drop_path_rates = drop_path_rates(drop_path, depth, first=drop_path)
        self.stem = PatchEmbed(image_size, patch_size, embed_dim, in_channels=in_channels)
        self.grid = self.stem.grid
        tokens_hidden = hidden_width(embed_dim, tokens_ratio, "tokens_ratio")
        channels_hidden = hidden_width(embed_dim, channels_ratio, "channels_ratio")
        self.blocks = module_list(
            MixerBlock(prod(self.grid), embed_dim, tokens_hidden, channels_hidden)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=NORM_EPS)
        self.head = make_head(embed_dim, num_classes)

    def features(
        self, images: Tensor, drop_path: Tensor | None = None, *, blocks: Sequence[int] = ()
    ) -> Features:
        """See `Classifier`; drop_path: (2·depth, B) or None."""
        x = self.stem(images)  # (B, N, C)
        scales = scales_by_block(drop_path, len(self.blocks))
        x, after = run_blocks(self.blocks, x, blocks, scales)
        x = self.norm(x)
        of_blocks = tuple(map(self.tokens, after))
        return Features(of_blocks, self.tokens(x), x.mean(dim=1))
