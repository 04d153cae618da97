"""The residual stream of any ViT: what writes to it beside attention, and images that pass it."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from .layout import block_paths, stated
from .views import Attentions, Layout, SwinLayout


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


class ResidualStream(NamedTuple):
    """What `deep_impulse`, and in part `impulse_rotary`, writes beside queries, keys and values."""

    writers: tuple[Tensor, ...]          # (D, …): of the patch embedding, and of the last layer of
                                         # each MLP and of each attention
    norms: tuple[nn.LayerNorm, ...]      # of the blocks, but for those before attention
    ends: tuple[nn.LayerNorm, ...]       # outside; the first after the blocks counts


def stream_of(vit: Layout) -> ResidualStream:
    """Find the stream of a ViT in its modules; raises ValueError if it is not all there."""
    modules, dim = dict(vit.model.named_modules()), vit.blocks[0].proj.shape[0]
    inside: set[nn.Module] = set()                   # the blocks
    writers: list[nn.Module] = []
    for attention, path in block_paths(vit.model).items():
        of_attention = set(modules[attention].modules())
        writers += [layer for layer in modules[path].modules() if layer not in of_attention
                    and isinstance(layer, nn.Linear) and layer.out_features == dim][-1:]
        inside.update(modules[path].modules())
    outside = [module for module in modules.values() if module not in inside]
    writers = patch_embedding(outside, dim)[-1:] + writers
    before_attention = [block.norm for block in vit.blocks]
    norms = [module for module in modules.values() if isinstance(module, nn.LayerNorm)
             and module.normalized_shape == (dim,) and module not in {*writers, *before_attention}]
    of_blocks = tuple(norm for norm in norms if norm in inside)
    if len(writers) != len(vit.blocks) + 1 or len(of_blocks) != len(vit.blocks) or any(
            norm.weight is None for norm in (*norms, *before_attention)):
        raise ValueError("this init needs the patch embedding, the last layer of each MLP and a "
                         "LayerNorm before it, and finds no such in the model")
    tensors = [*(tensor for layer in writers for tensor in (layer.weight, layer.bias)),
               *(tensor for block in vit.blocks for tensor in (block.proj, block.proj_bias))]
    return ResidualStream(
        tuple(tensor.detach() for tensor in tensors if isinstance(tensor, Tensor)),
        of_blocks, tuple(norm for norm in norms if norm not in inside))


def image_shape_of(layout: Attentions) -> tuple[int, int, int] | None:
    """(channels, height, width) of the images, as far as the model states their size.

    That is an attribute, or follows from the grid and the size of its patches. Where a Swin, which
    takes images of any size, states none, it is that of one window in the last stage.
    """
    if layout.image_shape:
        return layout.image_shape
    modules, blocks = list(layout.model.modules()), layout.blocks
    owners = [*modules, *(getattr(module, "config", None) for module in modules)]
    embedding = patch_embedding(modules, blocks[0].proj.shape[0])
    convolution = next((module for module in modules if isinstance(module, nn.Conv2d)), None)
    patch = next(filter(None, (stated(owner, "patch_size") for owner in owners)), None)
    if patch is None and convolution is not None and convolution in embedding:
        patch = convolution.stride[0], convolution.stride[1]
    grid, merged = layout.grids[-1], 1
    if isinstance(layout, SwinLayout):               # channels double by stage, as tokens merge
        merged = blocks[-1].q.shape[-1] // blocks[0].q.shape[-1]
    size = next(filter(None, (stated(owner, "image_size", "img_size") for owner in owners)),
                patch and all(grid) and (merged * grid[0] * patch[0], merged * grid[1] * patch[1]))
    if size and convolution is not None:
        return convolution.in_channels, *size
    if size and patch and embedding and isinstance(embedding[0], nn.Linear):
        return embedding[0].in_features // (patch[0] * patch[1]), *size
    return None


def noise_images(layout: Attentions, count: int, generator: Generator) -> Tensor:
    """White noise like the model's images, (count, C, H, W); ValueError if it states no size."""
    if (shape := image_shape_of(layout)) is None:
        raise ValueError("the size of its images is not seen in the model; give images=, or "
                         "describe it by a Layout with image_shape")
    noise = torch.randn(count, *shape, generator=generator, dtype=torch.float32)
    return noise.to(layout.blocks[0].q)
