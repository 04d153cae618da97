"""Parts shared by the models. The shape legend is in attention.py."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import index
from typing import NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..base.messages import times

Layer = TypeVar("Layer", bound=nn.Module)
Sides = tuple[int, int]  # height and width, or rows and columns
Pair = int | Sides  # one integer stands for both
MOST_BLOCKS = 1000
PREFIX_TOKENS = ("cls_token", "dist_token", "reg_token")  # before the patches, in this order


class Tokens(NamedTuple):
    """The tokens after a layer: patch tokens on their grid, and the prefix tokens before them."""

    map: Tensor  # (B, H, W, C): patch tokens by row and column
    prefix: Tensor  # (B, P, C): class, distillation, register tokens in this order; P ≥ 0


class Features(NamedTuple):
    """The features of images (B, 3, H, W); 3 stands for in_channels."""

    blocks: tuple[Tokens, ...]  # after each chosen block, without the last norm
    last: Tokens  # after the last block and the last norm, if there is one
    pooled: Tensor  # (B, C), what the head reads; (B, 2·C) for a distilled ViT


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that torch.compile wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)


class Classifier(nn.Module):
    """The base of every model family: logits = classify(features(images)).

    A family defines `features(images, drop_path, blocks=…)`, which returns the tokens after these
    blocks (see `block_numbers`) and the pooled features that the head reads:

    images: (B, 3, H, W), normalised.
    drop_path: (branches, B) from `draw_drop_path`, or None; only in families with such rates.

    The constructors leave the weights as PyTorch's layers draw them; `vitinit.init_weights` writes
    them. Options of all families:

    num_classes: of the logits; 0: no head. in_channels: of the images; 3 are RGB, and stand for any
        number in the shapes (B, 3, H, W).
    image_size, patch_size: in pixels, one integer or (height, width).
    embed_dim, depth, num_heads: channels of a token, blocks, and heads of each block.
    mlp_ratio: width of the MLP's hidden layer, divided by embed_dim. qkv_bias: whether queries,
        keys and values have biases. drop_path: probability with which a branch is left out, where
        `forward` is given `draw_drop_path(model.drop_path_rates, B, rng)`; a loop draws it itself.

    They raise ValueError for sizes that are not above 0 or do not fit together. Words, such as
    pool="mean", are checked by `build_model` alone.
    """

    family: str  # the name of its file, one of `vitinit.models.FAMILIES`
    head: nn.Module  # the identity in a model without classes
    grid: Sides  # patches down and across
    features: Callable[..., Features]
    num_prefix_tokens = 0  # class, distillation and register tokens
    learns_positions = False  # whether there is a position embedding that is a parameter
    rotary = False  # whether queries and keys are turned by their tokens' places
    drop_path_rates: tuple[float, ...] = ()

    def __init__(self, num_classes: int, in_channels: int, **sizes: float | Sequence[int]) -> None:
        """num_classes: 0 for no head. sizes: by the options' names; raises ValueError unless all
        are above 0, and for more than MOST_BLOCKS blocks, which a file from elsewhere may ask for.
        """
        super().__init__()
        if num_classes < 0:
            raise ValueError(
                f"num_classes is {num_classes}, expected at least 0 (a model without a head)"
            )
        for name, value in {"in_channels": in_channels, **sizes}.items():
            parts = value if isinstance(value, Sequence) else [value]
            if not all(part > 0 for part in parts):
                raise ValueError(f"{name} is {value}, expected more than 0")
            if name.startswith("depth") and sum(parts) > MOST_BLOCKS:
                raise ValueError(f"{name} is {value}, expected at most {MOST_BLOCKS} blocks")
        self.num_classes, self.in_channels = num_classes, in_channels

    def tokens(self, x: Tensor) -> Tokens:
        """(B, N, C) → the patch tokens on their grid, and the prefix tokens."""
        prefix = self.num_prefix_tokens
        patches = x[:, prefix:].unflatten(1, self.grid)  # (B, H, W, C)
        return Tokens(patches, x[:, :prefix])

    def classify(self, features: Features) -> Tensor:
        """The logits, (B, num_classes), from the pooled features."""
        return self.head(features.pooled)

    def forward(self, images: Tensor, drop_path: Tensor | None = None) -> Tensor:
        """The logits, (B, num_classes), of images (B, 3, H, W); drop_path: see `Classifier`."""
        if drop_path is None:  # some families take no scales
            return self.classify(self.features(images))
        return self.classify(self.features(images, drop_path))


def module_list(layers: Iterable[Layer]) -> Sequence[Layer]:
    """An nn.ModuleList, with a type that says which layers it holds."""
    return cast(Sequence[Layer], nn.ModuleList(layers))


def map_tokens(map: Tensor) -> Tokens:
    """A feature map (B, H, W, C) as `Tokens`, of which none are prefix tokens."""
    return Tokens(map, map.flatten(1, 2)[:, :0])


def block_numbers(blocks: Sequence[int], depth: int) -> list[int]:
    """Block numbers as 0 … depth − 1; negative ones count from the last. Raises ValueError."""
    for block in blocks:
        if not -depth <= block < depth:
            raise ValueError(f"block {block} is asked for, but the model has blocks 0…{depth - 1}")
    return [block % depth for block in blocks]


def run_blocks(
    blocks: nn.Sequential | Sequence[nn.Module],
    x: Tensor,
    numbers: Sequence[int],
    *arguments: Sequence | Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """x after all blocks, and after each of the `numbers`; block i gets item i of each argument."""
    wanted = block_numbers(numbers, len(blocks))
    after = {}
    for number, block in enumerate(blocks):
        x = block(x, *[of_blocks[number] for of_blocks in arguments])
        if number in wanted:
            after[number] = x
    return x, [after[number] for number in wanted]


def recompute_blocks(model: nn.Module) -> int:
    """Let the backward pass compute each block of a model again, from its input alone, which is all
    that the forward pass keeps then (Chen et al., arXiv 1604.06174): less memory, the same bits.
    Returns how many blocks there are.
    """
    count = 0
    for name, module in model.named_modules():
        if name.endswith("blocks") and isinstance(module, nn.ModuleList):
            for block in module:
                # Draws are arguments, so that there is no state of random numbers to keep.
                block.forward = partial(
                    checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
                )
                count += 1
    return count


def make_head(dim: int, num_classes: int) -> nn.Module:
    """The last layer, (B, dim) → (B, num_classes); the identity for num_classes = 0."""
    return nn.Linear(dim, num_classes) if num_classes else nn.Identity()


def to_pair(value: int | Sequence[int]) -> Sides:
    """(height, width); a single integer is used for both."""
    if isinstance(value, int):
        value = value, value
    height, width = value
    return index(height), index(width)  # raises TypeError for a fraction


def head_width(dim: int, heads: int) -> int:
    """The channels of each head. Raises ValueError if the heads do not share `dim` evenly."""
    if dim % heads:
        raise ValueError(f"embed_dim {dim} does not divide into num_heads {heads}")
    return dim // heads


def hidden_width(dim: int, ratio: float, name: str = "mlp_ratio") -> int:
    """An MLP's hidden width, dim · ratio rounded down. Raises ValueError, by `name`, if it is 0."""
    if dim * ratio < 1:
        raise ValueError(
            f"{name} is {ratio}, which leaves an MLP of {dim} channels no hidden one; "
            f"expected at least 1 / {dim}"
        )
    return int(dim * ratio)


def patch_grid(image_size: Sides, patch_size: Sides) -> Sides:
    """The patches down and across. Raises ValueError if they do not tile the image."""
    if any(size % patch for size, patch in zip(image_size, patch_size)):
        raise ValueError(
            f"patches of {times(patch_size)} pixels do not tile an image of {times(image_size)}; "
            "image_size must be a multiple of patch_size on both sides"
        )
    return image_size[0] // patch_size[0], image_size[1] // patch_size[1]


def require_image_size(images: Tensor, in_channels: int, size: Sides) -> None:
    """Raise ValueError unless images is (B, in_channels, *size); compiled models contain no check."""
    if images.ndim != 4 or images.shape[1] != in_channels:
        raise ValueError(
            f"the model takes images of shape (B, {in_channels}, {size[0]}, {size[1]}) and got "
            f"{tuple(images.shape)}"
        )
    if images.shape[2:] != size:
        raise ValueError(
            f"the model was built for images of {times(size)} pixels and got "
            f"{times(images.shape[2:])}"
        )


def patches_of(images: Tensor, patch: Sides) -> Tensor:
    """Images (B, 3, H, W) → the values of each patch, (B, N, p·q·3), the channels innermost."""
    return rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=patch[0], q=patch[1])


class PatchEmbed(nn.Module):
    """Cut the image into patches and project each linearly (ViT, arXiv 2010.11929, §3.1).

    (B, 3, H, W) → (B, N, C), token n from row n // grid_width and column n % grid_width of the
    grid. norm: whether a LayerNorm follows. Raises ValueError if the patches do not tile the image.
    """

    def __init__(
        self,
        image_size: Pair,
        patch_size: Pair,
        embed_dim: int,
        *,
        in_channels: int = 3,
        norm: bool = False,
    ) -> None:
        super().__init__()
        patch = to_pair(patch_size)
        self.image_size = to_pair(image_size)
        self.grid = patch_grid(self.image_size, patch)
        self.proj = nn.Conv2d(in_channels, embed_dim, kernel_size=patch, stride=patch)
        self.norm = nn.LayerNorm(embed_dim) if norm else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        require_image_size(images, self.proj.in_channels, self.image_size)
        if images.device.type == "cpu":  # to the bit what it was to runs of earlier versions
            x = self.proj(images)  # (B, C, rows, columns)
            x = rearrange(x, "b c h w -> b (h w) c")  # (B, patches, C)
        else:
            x = self.product(images)
        return self.norm(x)

    def product(self, images: Tensor) -> Tensor:
        """The convolution as a matrix product, up to rounding, which GPUs compute faster."""
        weight = rearrange(self.proj.weight, "d c p q -> d (p q c)")
        return F.linear(patches_of(images, to_pair(self.proj.kernel_size)), weight, self.proj.bias)


class Mlp(nn.Module):
    """Linear → GELU → Linear on the last dimension. The GELU is exact, as in DeiT; ViT's code has
    its approximation by tanh."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class SwiGlu(nn.Module):
    """Linear → SiLU of one half times the other → Linear (Shazeer, arXiv 2002.05202, §2), as in
    EVA-02 and DINOv3. Both halves, the one for SiLU first, are packed in fc1.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 2 * hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1)  # (…, hidden) each
        return self.fc2(F.silu(gate) * value)


class LayerScale(nn.Module):
    """γ ⊙ x: a learned factor for each channel of a branch (CaiT, arXiv 2103.17239, §2.1)."""

    def __init__(self, dim: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


# Stochastic depth (Huang et al., arXiv 1603.09382). The models hold no random state: the training
# loop draws a table of drop-path scales, one row per residual branch and one column per image, and
# passes it to `forward`. So the draw is keyed by step, sliced by process, repeated after a resume.
def drop_path_rates(rate: float, depth: int, first: float = 0.0) -> tuple[float, ...]:
    """The rates of both branches of each block, from `first` to `rate`; raises ValueError."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"drop_path is {rate}, expected 0 ≤ drop_path < 1")
    return tuple(np.linspace(first, rate, depth).repeat(2).tolist())


def draw_drop_path(rates: Sequence[float], batch: int, rng: np.random.Generator) -> Tensor:
    """Draw scales, (branches, batch), of mean 1: 0 with probability `rate`, else 1 / (1 − rate)."""
    column = np.asarray(rates)[:, None]  # (branches, 1)
    kept = rng.random((len(column), batch)) >= column
    scales = kept / (1.0 - column)
    return torch.from_numpy(scales.astype(np.float32))


def scales_by_block(drop_path: Tensor | None, depth: int) -> Tensor | list[tuple[None, None]]:
    """(2·depth, B) → the scales of both branches of each block, (depth, 2, B); of None, Nones."""
    if drop_path is None:
        return [(None, None)] * depth
    return drop_path.unflatten(0, (depth, 2))


def add_branch(x: Tensor, branch: Tensor, scale: Tensor | None) -> Tensor:
    """x + scale · branch. x, branch: (B, …); scale: (B,), or None for no scaling."""
    if scale is None:
        return x + branch
    scale = scale.to(branch.dtype).view(-1, *[1] * (branch.ndim - 1))  # (B, 1, …)
    return x + branch * scale


def sincos_frequencies(dim: int) -> Tensor:
    """(dim / 4,) radians per token, geometric from 1 down to nearly 1e-4; float64."""
    count = dim // 4
    exponents = torch.arange(count, dtype=torch.float64) / count
    return 1e4**-exponents


def sincos_position_embedding(grid: Sides, dim: int) -> Tensor:
    """Fixed 2-D sin-cos position embedding (MoCo v3, arXiv 2104.02057, §5): (grid cells, dim).

    A quarter of the channels each holds sine and cosine of the column, sine and cosine of the row,
    at `sincos_frequencies`. Raises ValueError unless dim is a multiple of 4.
    """
    if dim % 4:
        raise ValueError(f"sin-cos position embeddings need an embed_dim that 4 divides, not {dim}")
    cells = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1]))  # (N, 2)
    angles = cells[..., None] * sincos_frequencies(dim)  # (N, 2, dim / 4)
    rows, columns = angles.unbind(1)
    quarters = [columns.sin(), columns.cos(), rows.sin(), rows.cos()]
    return torch.cat(quarters, dim=1).float()
