"""Which spatial mixing does a model currently apply?

All models of this package alternate channel mixing with spatial mixing X ← M X:

| family            | M of a block                                         | one M per         |
|-------------------|------------------------------------------------------|-------------------|
| VisionTransformer | softmax(Q Kᵀ / √d)                                   | image and head    |
| SwinTransformer   | the same within windows, with bias and mask; else 0  | image and head    |
| MlpMixer          | the Jacobian of the token MLP at its input           | image and channel |
| SimpleViT         | softmax(σ Q Kᵀ), from content, positions or neither  | (image and) head  |
| ConvMixer         | the matrix of the depthwise kernel, without its bias | channel           |

`mixing_matrices` returns these matrices, without the skip connection. `target_mass` measures which
share of an attention matrix lies on the token that an impulse filter would pick.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from ..models.attention import Attention
from ..models.conv_mixer import DepthwiseConv
from ..models.layers import Classifier, Mlp, block_numbers, uncompiled
from ..models.mlp_mixer import MixerBlock
from ..models.shift import Shift
from ..models.simple_vit import SimpleAttention, SimpleBlock
from ..models.swin import SwinBlock
from ..models.vit import VitBlock
from .filters import Grid, Offset, convolution_matrix, kernel_offsets, neighbours

__all__ = ["block_grids", "mean_kernel", "mixing_matrices", "target_mass"]

AT_ONCE = 8  # images per forward pass, whose attention matrices are all computed

Heads = slice | list[int]  # heads, or channels of a Mixer or ConvMixer


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """A context after which the modes of a model's modules, and its buffers, are as before."""
    modules = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, training, buffers in modules:
            module.training = training
            module._buffers.update(buffers)  # caches
        for buffer, value in values:  # counters
            buffer.copy_(value)


@torch.no_grad()
def run(
    model: nn.Module,
    images: Tensor,
    *,
    before: Mapping[nn.Module, Callable] | None = None,
    after: Mapping[nn.Module, Callable] | None = None,
) -> None:
    """Pass images through a model in evaluation mode; its modes, buffers and the random state stay.

    before: by module, what is called with the module's input. after: with all its inputs and its
    output. PyTorch takes its fast paths for whole layers, which call no module, only without hooks.
    """
    with restored(model), torch.random.fork_rng(devices=[]), ExitStack() as hooks:
        for module, read in (before or {}).items():
            # Without positional inputs, of a module that is called by keywords, it is None.
            handle = module.register_forward_pre_hook(
                lambda _, inputs, read=read: read(*inputs[:1] or [None])
            )
            hooks.enter_context(handle)
        for module, call in (after or {}).items():
            handle = module.register_forward_hook(
                lambda _, inputs, output, call=call: call(inputs, output)
            )
            hooks.enter_context(handle)
        model.eval()
        model(images)


def mixing_matrices(
    model: nn.Module,
    images: Tensor,
    *,
    blocks: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    summarise: Callable[[Tensor], Tensor] | None = None,
) -> dict[int, Tensor]:
    """The matrices with which the model mixes the tokens of `images`, by block.

    images: (B, 3, H, W), normalised as for the model, and of the size that it was built for.
    blocks: their numbers, through a Swin's stages, negative ones from the last; all by default.
        `block_grids` has their grids.
    heads: their numbers; all by default. Of a Mixer or ConvMixer, channels: all take gigabytes.
    summarise: what is kept of a block's matrices, so that those of all blocks need no memory.

    Returns {block: (B, len(heads), N, N)}; N includes the prefix tokens. The model runs as in
    `run`. Raises ValueError for a model of another family or a block that the model does not have.
    """
    by_block = list(mixers(model))
    if blocks is None:
        blocks = range(len(by_block))
    chosen: Heads = slice(None) if heads is None else list(heads)
    matrices = {}

    def record(block: int, inputs: tuple, _: Tensor) -> None:
        weights = by_block[block].read(chosen, *inputs)
        matrices[block] = weights if summarise is None else summarise(weights)

    wanted = block_numbers(blocks, len(by_block))
    run(model, images, after={by_block[block].module: partial(record, block) for block in wanted})
    return matrices


def mean_shares(
    model: nn.Module,
    images: Tensor,
    readers: Sequence[tuple[nn.Module, Callable]],
    grids: Sequence[Grid],
) -> list[Tensor]:
    """By block, the `shares_of_patches` on its grid, (h, cells, cells): means of images, windows.

    readers: by block, a module and a function of its inputs and its output that gives attention
        weights, (n, h, N, N). images: (B, 3, H, W), of which AT_ONCE go through the model at once.
    """
    means: list[Any] = [0.0] * len(readers)

    def add(block: int, read: Callable, inputs: tuple, output: Tensor) -> None:
        shares = shares_of_patches(read(inputs, output), grids[block])  # of images, or windows
        means[block] = means[block] + len(batch) / len(images) * shares.mean(0)

    after = {module: partial(add, block, read) for block, (module, read) in enumerate(readers)}
    for batch in images.split(AT_ONCE):
        run(model, batch, after=after)
    return means


class Mixer(NamedTuple):
    """What mixes the tokens in one block."""

    module: nn.Module
    grid: Grid  # of the patch tokens that it mixes
    read: Callable  # (heads, *inputs) → (B, len(heads), N, N)


def mixers(model: nn.Module) -> Iterator[Mixer]:
    """Yield the mixer of each block; raises ValueError for a model that is not of this package."""
    model = uncompiled(model)
    if not isinstance(model, Classifier):
        raise ValueError(f"spatial mixing of a {type(model).__name__} is not defined here")
    for module in model.modules():
        if isinstance(module, SwinBlock):
            yield Mixer(module.attn, module.grid, partial(_read_windows, module))
        elif isinstance(module, MixerBlock):
            mlp = module.mlp_tokens
            yield Mixer(mlp, model.grid, partial(_read_token_mlp, mlp))
        elif isinstance(module, DepthwiseConv):
            yield Mixer(module, model.grid, partial(_read_depthwise, module))
        elif isinstance(module, (VitBlock, SimpleBlock)):
            yield Mixer(module.attn, model.grid, partial(_read_attention, module.attn))


def block_grids(model: nn.Module) -> list[Grid]:
    """The grid (rows, columns) of patch tokens that each block of a model of this package mixes."""
    return [mixer.grid for mixer in mixers(model)]


def _read_attention(
    attention: Attention | Shift | SimpleAttention, heads: Heads, x: Tensor, *pos_embed: Tensor
) -> Tensor:
    weights = attention.mixing_weights(x, *pos_embed)[:, heads]
    return weights.expand(len(x), -1, -1, -1)  # some SimpleViTs have one for all images


def _read_windows(block: SwinBlock, heads: Heads, x: Tensor, mask: Tensor | None) -> Tensor:
    """The matrices of all windows as one (N, N), by token number on the unshifted map."""
    weights = block.attn.mixing_weights(x, mask)[:, heads]  # (B·M, h, w², w²)
    tokens = torch.arange(prod(block.grid), device=x.device).view(block.grid)
    tokens = tokens.roll([-shift for shift in block.shift], dims=(0, 1))
    down, across = block.window
    tokens = rearrange(tokens, "(a h) (b w) -> (a b) (h w)", h=down, w=across)  # (M, w²)
    weights = rearrange(weights, "(n m) h q k -> n h m q k", m=len(tokens))
    matrices = weights.new_zeros(*weights.shape[:2], tokens.numel(), tokens.numel())
    matrices[:, :, tokens[:, :, None], tokens[:, None]] = weights
    return matrices


def _read_token_mlp(mlp: Mlp, channels: Heads, x: Tensor) -> Tensor:
    """J = fc2 · diag(GELU′(fc1 x + b)) · fc1, with each channel's own x."""
    hidden = mlp.fc1(x[:, channels])  # (B, c, hidden)
    with torch.inference_mode(False), torch.enable_grad():
        hidden = hidden.detach().clone().requires_grad_(True)
        (slopes,) = torch.autograd.grad(mlp.act(hidden).sum(), hidden)
    return torch.einsum("nh, bch, hm -> bcnm", mlp.fc2.weight, slopes, mlp.fc1.weight)


def _read_depthwise(layer: DepthwiseConv, channels: Heads, x: Tensor) -> Tensor:
    grid = x.shape[-2], x.shape[-1]
    matrices = [convolution_matrix(kernel, grid) for kernel in layer.kernels()[channels, 0]]
    return torch.stack(matrices).expand(len(x), -1, -1, -1)  # the same for all images


def among_patches(weights: Tensor, grid: Grid) -> Tensor:
    """(..., N, N) → (..., cells, cells): without prefix tokens, in float32 or higher precision."""
    cells = prod(grid)
    return weights[..., -cells:, -cells:].to(torch.promote_types(weights.dtype, torch.float32))


def shares_of_patches(weights: Tensor, grid: Grid) -> Tensor:
    """`among_patches`, each row divided by its sum; a row that is all on prefix tokens is 0."""
    patches = among_patches(weights, grid)
    sums = patches.sum(dim=-1, keepdim=True)
    return patches / sums.clamp(min=torch.finfo(torch.float32).tiny)


def target_mass(weights: Tensor, offsets: Sequence[Offset], grid: Grid) -> Tensor:
    """The share of each head's attention on its target token, (h,): 1 is a perfect shift.

    weights: (..., h, N, N), of which `shares_of_patches` are taken. offsets: one (down, right) per
    head; raises ValueError otherwise. The mean is over tokens with a target on the grid, else NaN.
    """
    masses = []
    by_head = shares_of_patches(weights, grid).unbind(-3)
    for shares, offset in zip(by_head, offsets, strict=True):
        tokens, targets = neighbours(offset, grid)
        masses.append(shares[..., tokens, targets].mean())
    return torch.stack(masses)


def mean_kernel(weights: Tensor, grid: Grid, radius: int) -> Tensor:
    """Mean attention by offset, (..., 2·radius + 1, 2·radius + 1), as a convolution kernel.

    weights: (..., N, N), of which `shares_of_patches` are taken. grid: (rows, columns) of the
    patches. radius: of the kernel, in patches. Entry [radius + down, radius + right] is the average
    over the tokens with a neighbour at that offset; 0 if there are none.
    """
    return by_offset(shares_of_patches(weights, grid), grid, radius)


def by_offset(patches: Tensor, grid: Grid, radius: int) -> Tensor:
    """`mean_kernel` of matrices among the patches, (..., cells, cells), as they are."""
    size = 2 * radius + 1
    means = []
    for offset in kernel_offsets(size):
        tokens, targets = neighbours(offset, grid)
        sums = patches[..., tokens, targets].sum(dim=-1)
        means.append(sums / max(len(tokens), 1))
    return torch.stack(means, dim=-1).unflatten(-1, (size, size))
