"""The residual stream of a ViT: what writes to it beside attention, and images to pass through it.

These parts are found in the models of this package and of other libraries, as `layout.py` finds
their attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .layout import Layout, block_paths, stated


def patch_embedding(modules: Iterable[nn.Module], dim: int) -> list[nn.Module]:
    """The layer that reads the patches, and the one that writes them to the stream of `dim`
    channels: a convolution, which is both, or a linear layer and a norm; empty if there is none.
    """
    for module in modules:
        if isinstance(module, nn.Conv2d) and module.out_channels == dim:
            return [module]
        if isinstance(module, nn.Sequential) and isinstance(module[-1], nn.LayerNorm):
            if linear := [layer for layer in module if isinstance(layer, nn.Linear)]:
                return [linear[0], module[-1]]
    return []


@dataclass(frozen=True)
class Stream:
    """What `deep_impulse` writes beside attention.

    writers: weights and biases, the first dimension D, of the layers that write to the stream: of
        the patch embedding and of each block's MLP. norms: the other LayerNorms of the blocks.
        ends: those outside, of which the first after the blocks counts.
    """

    writers: tuple[Tensor, ...]
    norms: tuple[nn.Module, ...]
    ends: tuple[nn.Module, ...]


def stream_of(vit: Layout) -> Stream:
    """Find the stream of a ViT in its modules; raises ValueError if it is not all there."""
    modules, dim = dict(vit.model.named_modules()), vit.blocks[0].proj.shape[0]
    inside, last = set(), []
    for attention, path in block_paths(vit.model).items():
        of_attention = set(modules[attention].modules())
        mlp = [layer for layer in modules[path].modules() if layer not in of_attention
               and isinstance(layer, nn.Linear) and layer.out_features == dim]
        last += mlp[-1:]
        inside.update(modules[path].modules())
    outside = [module for module in modules.values() if module not in inside]
    writers = [*patch_embedding(outside, dim)[-1:], *last]
    skipped = {*writers, *(block.norm for block in vit.blocks)}
    norms = [module for module in modules.values() if isinstance(module, nn.LayerNorm)
             and module.normalized_shape == (dim,) and module not in skipped]
    others = tuple(norm for norm in norms if norm in inside)
    if len(writers) != len(vit.blocks) + 1 or len(others) != len(vit.blocks) or any(
            norm.weight is None for norm in (*norms, *(block.norm for block in vit.blocks))):
        raise ValueError("init 'deep_impulse' writes the patch embedding, the last layer of each "
                         "MLP and a LayerNorm before it, and finds no such in the model")
    return Stream(tuple(tensor.detach() for layer in writers
                        for tensor in (layer.weight, layer.bias) if tensor is not None),
                  others, tuple(norm for norm in norms if norm not in inside))


def image_shape_of(vit: Layout) -> tuple[int, int, int] | None:
    """(channels, height, width) of the images, as far as the model states their size.

    That of images is an attribute, or follows from the grid and the size of its patches. Where a
    Swin states none, which takes images of any size, it is that of one window in the last stage.
    None where it is not found.
    """
    if vit.image_shape:
        return vit.image_shape
    modules, grid = list(vit.model.modules()), vit.grid
    layers = patch_embedding(modules, vit.blocks[0].proj.shape[0])
    convolution = next((module for module in modules if isinstance(module, nn.Conv2d)), None)
    patch = next(filter(None, (stated(module, "patch_size") for module in modules)), None)
    if patch is None and convolution in layers:
        patch = tuple(convolution.stride)
    if vit.in_windows:
        last = vit.blocks[-1]
        scale = last.q.shape[-1] // vit.blocks[0].q.shape[-1]            # channels double by stage
        grid = tuple(scale * side for side in last.window)
    size = next(filter(None, (stated(module, "image_size", "img_size") for module in modules)),
                patch and grid and (grid[0] * patch[0], grid[1] * patch[1]))
    if not size or not (convolution or layers and patch):
        return None
    channels = (convolution.in_channels if convolution else
                layers[0].in_features // (patch[0] * patch[1]))
    return channels, *size


def noise_images(vit: Layout, count: int, generator: torch.Generator) -> Tensor:
    """White noise of the size and type of the model's images, (count, channels, height, width)."""
    return torch.randn(count, *image_shape_of(vit), generator=generator).to(vit.pos_embed)
