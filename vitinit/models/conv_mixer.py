"""ConvMixer (Trockman and Kolter, arXiv 2201.09792): depthwise and pointwise convolutions in turn.

    image → patches → activation, norm → blocks → mean → head

The depthwise convolution of a block mixes space, the pointwise one mixes channels. Names in the
state dict, parameter counts and outputs equal timm's. Feature maps are (B, C, H, W).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from .features import Features, Tokens, block_numbers, make_head, require_classes
from .layers import hidden_width, patch_grid, require_image_size, require_positive, to_pair

ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU}


class Residual(nn.Module):
    """x + fn(norm(x)), without a norm x + fn(x). `fn` is the name that timm and the paper use."""

    def __init__(self, fn: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.Identity() if norm is None else norm
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fn(self.norm(x))


class DepthwiseConv(nn.Conv2d):
    """Depthwise convolution with padding "same", in which channels may share filters.

    weight: (F, 1, k, k), where F is num_filters, or C if that is 0; channel c uses filter c mod F.
    bias: (C,).
    softmax: use the softmax of each filter's weight over its k² cells in place of the weight itself
        (arXiv 2401.12511, §5).
    """

    def __init__(self, dim: int, kernel_size: int, *, num_filters: int, softmax: bool) -> None:
        super().__init__(dim, dim, kernel_size, groups=dim, padding="same")
        self.softmax = softmax
        if num_filters:
            self.weight = nn.Parameter(self.weight.detach()[:num_filters].clone())

    def kernels(self) -> Tensor:
        """The filter of every channel: (C, 1, k, k)."""
        kernels = self.weight
        if self.softmax:
            kernels = kernels.flatten(1).softmax(1).view_as(kernels)
        if len(kernels) == self.out_channels:
            return kernels
        return kernels[torch.arange(self.out_channels, device=kernels.device) % len(kernels)]

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.kernels(), self.bias)


class DenseMixing(nn.Module):
    """Channel-wise spatial mixing, y = M x, with a free N×N matrix M in place of each filter.

    weight: (F, N, N); channel c uses matrix c mod F.
    bias: (C,).

    With the matrix of a kernel it is that convolution; with a permutation matrix, for example, it
    is something that no convolution can be (arXiv 2401.12511, §5).
    """

    def __init__(self, dim: int, num_tokens: int, *, num_filters: int) -> None:
        super().__init__()
        bound = num_tokens ** -0.5                   # the bound that PyTorch's layers use
        self.weight = nn.Parameter(torch.empty(num_filters or dim, num_tokens, num_tokens)
                                   .uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(dim).uniform_(-bound, bound))

    def matrices(self) -> Tensor:
        """The mixing matrix of every channel: (C, N, N)."""
        dim = len(self.bias)
        if len(self.weight) == dim:
            return self.weight
        return self.weight[torch.arange(dim, device=self.weight.device) % len(self.weight)]

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.einsum("cnm, bcm -> bcn", self.matrices(), x.flatten(2))
        return (mixed + self.bias[:, None]).unflatten(2, x.shape[2:])


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of each position, as in a transformer: (B, C, H, W) → the same."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


NORMS = {"batch": nn.BatchNorm2d, "layer": ChannelNorm}
NORM_PLACES = ("after", "before")
CHANNEL_RESIDUALS = ("mlp", "always", "never")


def conv_mixer_block(mixing: DepthwiseConv | DenseMixing, activation: type[nn.Module],
                     norm: type[nn.Module], dim: int, *, mlp_ratio: float, residual: bool,
                     norm_first: bool) -> nn.Sequential:
    """Spatial mixing with a residual, then channel mixing, each with activation and norm (§2).

    Channel mixing is one pointwise convolution, or, if mlp_ratio is not 0, an MLP.
    residual: whether channel mixing is added to its input, as spatial mixing is.
    norm_first: whether either is normalised before it, as in a transformer, not after it.
    """
    def part(layers: list[nn.Module], residual: bool) -> list[nn.Module]:
        """The layers with their norm, as one module if they are added to their input."""
        if not norm_first:
            layers = [*layers, norm(dim)]
            return [Residual(nn.Sequential(*layers))] if residual else layers
        return [Residual(nn.Sequential(*layers), norm(dim))] if residual else [norm(dim), *layers]

    if mlp_ratio:
        hidden = hidden_width(dim, mlp_ratio, "mlp_ratio")
        channels = [nn.Conv2d(dim, hidden, kernel_size=1), activation(),
                    nn.Conv2d(hidden, dim, kernel_size=1)]
    else:
        channels = [nn.Conv2d(dim, dim, kernel_size=1), activation()]
    return nn.Sequential(*part([mixing, activation()], True), *part(channels, residual))


class ConvMixer(nn.Module):
    """ConvMixer for images (B, 3, H, W) → logits (B, num_classes).

    num_classes: 0 builds a model without a head, whose output is the pooled features.
    image_size, patch_size: one integer or (height, width); the patches must tile the image. Without
        dense_filters no weight depends on image_size, so `forward` accepts images of any size that
        the patches tile, and raises ValueError for others.
    num_filters: number of distinct depthwise filters per block, which the channels share in turn; 0
        gives each channel its own.
    softmax_filters: see DepthwiseConv.
    dense_filters: see DenseMixing; images must then have the given image_size.
    norm: "batch" as in the paper, or "layer": LayerNorm over the channels of each position.
    norm_place: "after" the activation, as in the paper, or "before" each spatial and channel mixing
        and before pooling, as in a ViT.
    mlp_ratio: 0 mixes channels by one pointwise convolution, as in the paper; otherwise by an MLP of
        this ratio.
    channel_residual: whether channel mixing is added to its input: "mlp": an MLP is, as in a ViT,
        and a pointwise convolution is not, as in the paper; "always"; or "never".
    plain_stem: leaves out the activation and the norm of the stem, as in a ViT.
    train_filters: False freezes depthwise weights and biases, which excludes them from the
        optimiser and from weight decay (arXiv 2401.12511).

    There is no stochastic depth.
    """

    num_prefix_tokens = 0
    learns_positions = False
    drop_path_rates: tuple[float, ...] = ()

    def __init__(self, *, num_classes: int, image_size: int | tuple[int, int],
                 patch_size: int | tuple[int, int], embed_dim: int, depth: int, kernel_size: int,
                 activation: Literal["gelu", "relu"] = "gelu", num_filters: int = 0,
                 softmax_filters: bool = False, dense_filters: bool = False,
                 train_filters: bool = True, norm: Literal["batch", "layer"] = "batch",
                 norm_place: Literal["after", "before"] = "after", mlp_ratio: float = 0.0,
                 channel_residual: Literal["mlp", "always", "never"] = "mlp",
                 plain_stem: bool = False) -> None:
        super().__init__()
        require_classes(num_classes)
        require_positive(image_size=image_size, patch_size=patch_size, embed_dim=embed_dim,
                         depth=depth, kernel_size=kernel_size)
        for option, value, choices in (("activation", activation, ACTIVATIONS), ("norm", norm, NORMS),
                                       ("norm_place", norm_place, NORM_PLACES),
                                       ("channel_residual", channel_residual, CHANNEL_RESIDUALS)):
            if value not in choices:
                raise ValueError(f"{option} is {value!r}, expected one of {', '.join(choices)}")
        if not mlp_ratio >= 0.0:                     # also refuses NaN
            raise ValueError(f"mlp_ratio is {mlp_ratio}, expected mlp_ratio ≥ 0")
        if not 0 <= num_filters <= embed_dim:
            raise ValueError(f"num_filters is {num_filters}, expected 0 ≤ num_filters ≤ embed_dim = "
                             f"{embed_dim}")
        if softmax_filters and dense_filters:
            raise ValueError("softmax_filters and dense_filters are both true; expected at most one")
        act, patch = ACTIVATIONS[activation], to_pair(patch_size)
        self.num_classes, self.kernel_size = num_classes, kernel_size
        self.image_size, self.patch_size = to_pair(image_size), patch
        self.dense_filters = dense_filters
        self.grid = patch_grid(self.image_size, patch)
        self.stem = nn.Sequential(nn.Conv2d(3, embed_dim, kernel_size=patch, stride=patch))
        if not plain_stem:
            self.stem.extend([act(), NORMS[norm](embed_dim)])

        def mixing() -> DepthwiseConv | DenseMixing:
            if dense_filters:
                return DenseMixing(embed_dim, self.grid[0] * self.grid[1], num_filters=num_filters)
            return DepthwiseConv(embed_dim, kernel_size, num_filters=num_filters,
                                 softmax=softmax_filters)
        residual = channel_residual == "always" or (channel_residual == "mlp" and mlp_ratio > 0)
        first = norm_place == "before"
        self.blocks = nn.Sequential(*(
            conv_mixer_block(mixing(), act, NORMS[norm], embed_dim, mlp_ratio=mlp_ratio,
                             residual=residual, norm_first=first) for _ in range(depth)))
        self.norm = NORMS[norm](embed_dim) if first else nn.Identity()
        for block in self.blocks:
            self.depthwise(block).requires_grad_(train_filters)
        self.head = make_head(embed_dim, num_classes)

    @staticmethod
    def depthwise(block: nn.Sequential) -> DepthwiseConv | DenseMixing:
        """The layer of a block that mixes space, each channel separately."""
        return block[0].fn[0]

    def features(self, images: Tensor, *, blocks: Sequence[int] = ()) -> Features:
        """Return the tokens after the chosen blocks, and the pooled features that the head reads.

        images: (B, 3, H, W), normalised.
        blocks: block numbers, counted from 0; negative numbers count from the last block.
        """
        size = self.image_size if self.dense_filters else tuple(images.shape[-2:])
        require_image_size(images, size)
        patch_grid(size, self.patch_size)            # otherwise the stem would drop the last rows
        wanted, seen = block_numbers(blocks, len(self.blocks)), {}
        x = self.stem(images)                                            # (B, C, h, w)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number in wanted:
                seen[number] = self.tokens(x)
        x = self.norm(x)
        return Features(tuple(seen[number] for number in wanted), self.tokens(x),
                        x.mean(dim=(2, 3)))

    @staticmethod
    def tokens(x: Tensor) -> Tokens:
        """(B, C, h, w) → a feature map (B, h, w, C) as `Tokens`; there are no prefix tokens."""
        return Tokens(rearrange(x, "b c h w -> b h w c"), x.flatten(2).mT[:, :0])

    def classify(self, features: Features) -> Tensor:
        """The logits, (B, num_classes), from the pooled features."""
        return self.head(features.pooled)

    def forward(self, images: Tensor) -> Tensor:
        """images: (B, 3, H, W), normalised."""
        return self.classify(self.features(images))
