"""Parts shared by the models: patch embedding, MLP, stochastic depth, sin-cos position embeddings.

The shape legend is in attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

LARGEST = 2**63         # sizes of tensors are below this


def to_pair(value: int | Sequence[int]) -> tuple[int, int]:
    """(height, width); a single integer is used for both."""
    if isinstance(value, int):
        return value, value
    height, width = value
    return index(height), index(width)               # raises TypeError for a fraction


def require_positive(**sizes: float | Sequence[int]) -> None:
    """Raise ValueError, with the name of the size, unless all sizes are above 0 and below 2**63."""
    for name, value in sizes.items():
        for part in value if isinstance(value, Sequence) else [value]:
            if not part > 0:                         # also refuses NaN
                raise ValueError(f"{name} is {value}, expected more than 0")
            if part >= LARGEST:
                raise ValueError(f"{name} is {value}, expected less than 2**63")


def hidden_width(dim: int, ratio: float, name: str) -> int:
    """The hidden width of an MLP, dim · ratio rounded down.

    name: what the error message calls the ratio. Raises ValueError if the result would be 0.
    """
    if dim * ratio < 1:
        raise ValueError(f"{name} is {ratio}, which leaves an MLP of {dim} channels no hidden one; "
                         f"expected at least 1 / {dim}")
    return int(dim * ratio)


def patch_grid(image_size: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """The patches down and across. Raises ValueError if they do not tile the image."""
    if any(size % patch for size, patch in zip(image_size, patch_size)):
        raise ValueError(f"patches of {patch_size[0]}×{patch_size[1]} pixels do not tile an image of "
                         f"{image_size[0]}×{image_size[1]}; image_size must be a multiple of "
                         "patch_size on both sides")
    return image_size[0] // patch_size[0], image_size[1] // patch_size[1]


def require_image_size(images: Tensor, size: tuple[int, int]) -> None:
    """Raise ValueError unless images is (B, 3, *size).

    Sizes are compared as numbers, not as tensors, so that the check adds nothing to a compiled or
    exported model.
    """
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"the model takes images of shape (B, 3, {size[0]}, {size[1]}) and got "
                         f"{tuple(images.shape)}")
    if images.shape[2] != size[0] or images.shape[3] != size[1]:
        raise ValueError(f"the model was built for images of {size[0]}×{size[1]} pixels and got "
                         f"{images.shape[2]}×{images.shape[3]}")


class PatchEmbed(nn.Module):
    """Cut the image into patches and project each linearly: (B, 3, H, W) → (B, N, C).

    Token n is in row n // grid_width and column n % grid_width of the grid (ViT, arXiv 2010.11929,
    §3.1). Raises ValueError if the patches do not tile the image.
    """

    def __init__(self, *, image_size: tuple[int, int], patch_size: tuple[int, int],
                 embed_dim: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.grid = patch_grid(image_size, patch_size)
        self.proj = nn.Conv2d(3, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        require_image_size(images, self.image_size)
        return rearrange(self.proj(images), "b c h w -> b (h w) c")


class Mlp(nn.Module):
    """Linear → GELU → Linear on the last dimension. The GELU is exact, as in ViT and DeiT."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


# Stochastic depth (Huang et al., arXiv 1603.09382). The models hold no random state: the training
# loop draws a table of drop-path scales, one row per residual branch and one column per image, and
# passes it to `forward`. So the draw can be keyed by step, sliced by process, and repeated after a
# resume.


def drop_path_rates(rate: float, depth: int, branches: int = 2) -> tuple[float, ...]:
    """The drop rates of all branches: linear from 0 in the first block to `rate` in the last."""
    return tuple(float(r) for r in np.linspace(0.0, rate, depth) for _ in range(branches))


def draw_drop_path(rates: Sequence[float], batch: int, rng: np.random.Generator) -> Tensor:
    """Draw drop-path scales, (branches, batch): 0 with probability `rate`, else 1 / (1 − rate).

    The expectation of every scale is 1, so evaluation needs none.
    """
    rates = np.asarray(rates)[:, None]                                   # (branches, 1)
    kept = rng.random((len(rates), batch)) >= rates
    return torch.from_numpy((kept / (1.0 - rates)).astype(np.float32))


def add_branch(x: Tensor, branch: Tensor, scale: Tensor | None) -> Tensor:
    """x + scale · branch. x, branch: (B, …); scale: (B,), or None for no scaling."""
    if scale is None:
        return x + branch
    return x + branch * scale.to(branch.dtype).view(-1, *[1] * (branch.ndim - 1))


def sincos_frequencies(dim: int, temperature: float = 1e4) -> Tensor:
    """(dim / 4,) radians per token, geometric from 1 down to nearly 1 / temperature; float64."""
    return temperature ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))


def sincos_position_embedding(grid: tuple[int, int], dim: int, temperature: float = 1e4) -> Tensor:
    """Fixed 2-D sin-cos position embedding (MoCo v3, arXiv 2104.02057, §4): (grid cells, dim).

    A quarter of the channels each holds the sine of the column, the cosine of the column, the sine
    of the row and the cosine of the row, at `sincos_frequencies`. Raises ValueError unless dim is a
    multiple of 4.
    """
    if dim % 4:
        raise ValueError(f"2-D sin-cos position embeddings need an embed_dim that 4 divides, not {dim}")
    frequencies = sincos_frequencies(dim, temperature)
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    column_angles = columns.flatten()[:, None] * frequencies             # (N, dim/4)
    row_angles = rows.flatten()[:, None] * frequencies
    return torch.cat([column_angles.sin(), column_angles.cos(),
                      row_angles.sin(), row_angles.cos()], dim=1).float()
