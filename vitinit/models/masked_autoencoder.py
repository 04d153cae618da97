"""A ViT that learns without labels: the masked autoencoder (He et al., arXiv 2111.06377).

    image → patches → the visible quarter of them → encoder → + mask tokens → decoder
    → pixels of the hidden patches

The encoder is a ViT, which never sees a mask token, and from which a classifier starts; the decoder
is small, and thrown away. The shape legend is in attention.py; n of N patches are visible, and P
tokens, such as the class token, stand before them.
"""

from math import prod

import torch
from torch import Tensor, nn

from ..base.values import AtLeastOne
from .attention import Attention
from .layers import (
    Sides,
    module_list,
    patches_of,
    run_blocks,
    scales_by_block,
    sincos_position_embedding,
    to_pair,
)
from .shift import Shift
from .vit import VisionTransformer, VitBlock

EPS = 1e-6  # added to a patch's variance; of the paper's code


def take(tokens: Tensor, indices: Tensor) -> Tensor:
    """Of tokens (B, N, C) those at indices (B, n): (B, n, C)."""
    return tokens.gather(1, indices[..., None].expand(-1, -1, tokens.shape[2]))


def mean_and_deviation(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Patches (B, N, values) → means and unbiased deviations, (B, N, 1), as in the paper's code."""
    variance, mean = torch.var_mean(patches, dim=2, keepdim=True)
    return mean, (variance + EPS).sqrt()


class Decoder(nn.Module):
    """Encoded visible patches → pixels of the hidden ones (arXiv 2111.06377, §3 and appendix A.1).

    Each hidden patch begins as the same learned vector plus its fixed sin-cos position. A linear
    layer to the decoder's width, transformer blocks, a norm, and a linear layer to pixels.
    """

    def __init__(
        self,
        encoder_dim: int,
        pixels: int,
        grid: tuple[int, int],
        prefix: int,
        *,
        dim: int,
        depth: int,
        num_heads: int,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.embed = nn.Linear(encoder_dim, dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions: Tensor
        positions = sincos_position_embedding(grid, dim)  # (N, dim)
        positions = nn.functional.pad(positions, (0, 0, prefix, 0))  # (P + N, dim)
        self.register_buffer("positions", positions, persistent=False)
        self.blocks = module_list(
            VitBlock(Attention(dim, num_heads=num_heads), dim) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pixels = nn.Linear(dim, pixels)

    def forward(self, encoded: Tensor, visible: Tensor, hidden: Tensor) -> Tensor:
        """(B, P + n, C), (B, n), (B, N − n) → (B, N − n, pixels of a patch)."""
        x = self.embed(encoded)  # (B, P + n, dim)
        masked = self.mask_token.to(x.dtype).expand(*hidden.shape, -1)  # (B, N − n, dim)
        x = torch.cat([x, masked], dim=1)  # (B, P + N, dim), not in the order of the image
        patches = torch.cat([visible, hidden], dim=1)  # (B, N)
        x = x + self.positions[with_prefix(patches, self.prefix)]
        x, _ = run_blocks(self.blocks, x, ())
        x = x[:, -hidden.shape[1] :]  # (B, N − n, dim)
        return self.pixels(self.norm(x))


def visible_patches(patches: int, mask_ratio: float) -> int:
    """How many patches are visible, as in the paper's code; ValueError if none is, or all are."""
    visible = int(patches * (1.0 - mask_ratio))
    if not 0 < visible < patches:
        raise ValueError(
            f"mask_ratio is {mask_ratio}, which leaves none of {patches} patches "
            "visible, or none hidden; the paper's is .75"
        )
    return visible


def with_prefix(patches: Tensor, prefix: int) -> Tensor:
    """Numbers of patches, (B, n) → of tokens, (B, P + n): all prefix tokens, then these patches."""
    before = torch.arange(prefix, device=patches.device).expand(len(patches), -1)
    return torch.cat([before, patches + prefix], dim=1)


class MaskedAutoencoder(nn.Module):
    """A ViT without a head, `encoder`, and the decoder that it is trained with.

    mask_ratio: the share of patches that is hidden; .75 in the paper (§4.1).
    decoder_dim, decoder_depth, decoder_heads: 512, 8 and 16 in the paper, beside ViT-L.
    normalise_targets: reconstruct each patch less its mean, by its standard deviation (§4.1).
    """

    def __init__(
        self,
        encoder: VisionTransformer,
        *,
        mask_ratio: float = 0.75,
        decoder_dim: AtLeastOne = 512,
        decoder_depth: AtLeastOne = 8,
        decoder_heads: AtLeastOne = 16,
        normalise_targets: bool = True,
    ) -> None:
        super().__init__()
        if decoder_dim % 4 or decoder_dim % decoder_heads:  # by sine and cosine of two axes
            raise ValueError(
                f"decoder_dim is {decoder_dim}, expected a multiple of 4, and of "
                f"decoder_heads = {decoder_heads}"
            )
        if any(isinstance(block.attn, Shift) for block in encoder.blocks):
            raise ValueError(
                "shifts move the tokens of a whole grid, and some are hidden here; expected "
                "shift_blocks = 0"
            )
        self.encoder = encoder
        self.grid = encoder.grid
        self.prefix = encoder.num_prefix_tokens
        self.drop_path_rates = encoder.drop_path_rates
        self.normalise_targets = normalise_targets
        self.patches = prod(self.grid)
        self.visible = visible_patches(self.patches, mask_ratio)
        projection = encoder.patch_embed.proj
        self.patch: Sides = to_pair(projection.kernel_size)
        self.decoder = Decoder(
            projection.out_channels,
            projection.weight[0].numel(),
            self.grid,
            self.prefix,
            dim=decoder_dim,
            depth=decoder_depth,
            num_heads=decoder_heads,
        )

    def targets(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) → what is to be predicted of each patch, (B, N, 3·p·q), ≥ float32."""
        patches = patches_of(images, self.patch)
        patches = patches.to(torch.promote_types(patches.dtype, torch.float32))
        if not self.normalise_targets:
            return patches
        mean, deviation = mean_and_deviation(patches)
        return (patches - mean) / deviation

    def encode(self, images: Tensor, visible: Tensor, drop_path: Tensor | None = None) -> Tensor:
        """The encoder's tokens of the visible patches (B, n) alone: (B, P + n, C)."""
        tokens = with_prefix(visible, self.prefix)  # (B, P + n)
        x = take(self.encoder.embed(images), tokens)
        blocks = self.encoder.blocks
        scales = scales_by_block(drop_path, len(blocks))
        x, _ = run_blocks(blocks, x, (), scales, [tokens] * len(blocks))
        return self.encoder.fc_norm(self.encoder.norm(x))  # one is the identity

    def reconstruct(
        self, images: Tensor, visible: Tensor, drop_path: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The hidden patches of images of which `visible` (B, n), ascending, are seen: their
        indices (B, N − n), ascending, and what the decoder says of them, (B, N − n, 3·p·q).
        """
        seen = torch.zeros(len(visible), self.patches, dtype=torch.bool, device=visible.device)
        seen = seen.scatter(1, visible, True)  # (B, N)
        order = seen.int().argsort(dim=1, stable=True)  # False sorts first
        hidden = order[:, : self.patches - visible.shape[1]]
        encoded = self.encode(images, visible, drop_path)
        return hidden, self.decoder(encoded, visible, hidden)

    def forward(
        self, images: Tensor, drop_path: Tensor | None = None, *, visible: Tensor
    ) -> Tensor:
        """The loss of each image, (B,): the mean squared error over all values of its hidden
        patches (§3). visible: (B, n) int64, the patches that are seen, ascending.
        """
        hidden, predicted = self.reconstruct(images, visible, drop_path)
        targets = take(self.targets(images), hidden)
        errors = predicted.to(targets.dtype) - targets  # (B, N − n, 3·p·q)
        return errors.square().mean(dim=(1, 2))
