"""ConvMixer (Trockman and Kolter, arXiv 2201.09792): depthwise and pointwise convolutions in turn.

    image → patches → activation, norm → blocks → mean → head

The depthwise convolution of a block mixes space, the pointwise one mixes channels. Names in the
state dict, parameter counts and outputs equal timm's. Feature maps are (B, C, H, W).
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from .layers import (
    Classifier,
    Features,
    Pair,
    make_head,
    map_tokens,
    patch_grid,
    require_image_size,
    run_blocks,
    to_pair,
)

Activation = Literal["gelu", "relu"]
ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU}


class Residual(nn.Module):
    """x + fn(x). `fn` is the name that timm and the paper use."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fn(x)


class DepthwiseConv(nn.Conv2d):
    """Depthwise convolution with padding "same", in which channels may share filters.

    weight: (F, 1, k, k), where F is num_filters, or C if that is 0; channel c uses filter c mod F.
    """

    bias: Tensor

    def __init__(self, dim: int, kernel_size: int, num_filters: int) -> None:
        super().__init__(dim, dim, kernel_size, groups=dim, padding="same")
        if num_filters:
            self.weight = nn.Parameter(self.weight.detach()[:num_filters].clone())

    def kernels(self) -> Tensor:
        """The filter of every channel: (C, 1, k, k)."""
        if len(self.weight) == self.out_channels:
            return self.weight
        channels = torch.arange(self.out_channels, device=self.weight.device)
        return self.weight[channels % len(self.weight)]

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.kernels(), self.bias)


def conv_mixer_block(
    dim: int, kernel_size: int, num_filters: int, act: type[nn.Module]
) -> nn.Sequential:
    """Depthwise convolution with a residual, then pointwise convolution (§2)."""
    depthwise = DepthwiseConv(dim, kernel_size, num_filters)
    spatial = nn.Sequential(depthwise, act(), nn.BatchNorm2d(dim))
    pointwise = nn.Conv2d(dim, dim, kernel_size=1)
    return nn.Sequential(Residual(spatial), pointwise, act(), nn.BatchNorm2d(dim))


class ConvMixer(Classifier):
    """ConvMixer for images (B, 3, H, W) → logits (B, num_classes).

    What is not listed here, and the errors: see `Classifier`.

    image_size, patch_size: one integer or (height, width). Any image that patches tile will do.
    num_filters: number of distinct depthwise filters per block; 0 gives each channel its own.
    train_filters: False freezes depthwise weights and biases, also for the optimiser (both options
        are those of arXiv 2401.12511).
    """

    family = "conv_mixer"

    def __init__(
        self,
        *,
        num_classes: int,
        image_size: Pair,
        in_channels: int = 3,
        patch_size: Pair,
        embed_dim: int,
        depth: int,
        kernel_size: int,
        activation: Activation = "gelu",
        num_filters: int = 0,
        train_filters: bool = True,
    ) -> None:
        super().__init__(
            num_classes,
            in_channels,
            image_size=image_size,
            patch_size=patch_size,
            embed_dim=embed_dim,
            depth=depth,
            kernel_size=kernel_size,
        )
        if not 0 <= num_filters <= embed_dim:
            raise ValueError(
                f"num_filters is {num_filters}, expected 0 ≤ num_filters ≤ embed_dim = {embed_dim}"
            )
        act = ACTIVATIONS[activation]
        self.kernel_size = kernel_size
        self.patch_size = to_pair(patch_size)
        self.grid = patch_grid(to_pair(image_size), self.patch_size)
        patch_embed = nn.Conv2d(in_channels, embed_dim, self.patch_size, stride=self.patch_size)
        self.stem = nn.Sequential(patch_embed, act(), nn.BatchNorm2d(embed_dim))
        blocks = [conv_mixer_block(embed_dim, kernel_size, num_filters, act) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        for layers in self.blocks:
            self.depthwise(layers).requires_grad_(train_filters)
        self.head = make_head(embed_dim, num_classes)

    @staticmethod
    def depthwise(block: nn.Module) -> DepthwiseConv:
        """The layer of a block that mixes space, each channel separately."""
        return next(layer for layer in block.modules() if isinstance(layer, DepthwiseConv))

    def features(self, images: Tensor, *, blocks: Sequence[int] = ()) -> Features:
        height, width = images.shape[-2:]
        require_image_size(images, self.in_channels, (height, width))
        patch_grid((height, width), self.patch_size)  # else the stem would drop the last rows
        x = self.stem(images)  # (B, C, h, w)
        x, after = run_blocks(self.blocks, x, blocks)
        of_blocks = tuple(map_tokens(part.movedim(1, -1)) for part in after)
        return Features(of_blocks, map_tokens(x.movedim(1, -1)), x.mean(dim=(2, 3)))
