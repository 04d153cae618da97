"""The residual stream of any ViT: what writes to it beside attention, and images that pass it."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from .attentions import Attentions, Block, Layout


def patch_embedding(modules: Iterable[nn.Module], dim: int) -> list[nn.Module]:
    """The layer that reads the patches, and the one that writes them to the stream of `dim`
    channels: a convolution, which is both, or a linear layer and a norm; empty if there is none.
    """
    for module in modules:
        if isinstance(module, nn.Conv2d) and module.out_channels == dim:
            return [module]
        if isinstance(module, nn.Sequential) and isinstance(module[-1], nn.LayerNorm):
            linear = [layer for layer in module if isinstance(layer, nn.Linear)]
            if linear:
                return [linear[0], module[-1]]
    return []


def modules_of(module: nn.Module | None) -> list[nn.Module]:
    """A module and all modules within it; none of None."""
    return [] if module is None else list(module.modules())


def ends_of_mlp(block: Block, dim: int) -> list[nn.Linear]:
    """The last layer of a block's MLP, which writes to the stream of `dim` channels; empty if there
    is none.
    """
    of_attention = modules_of(block.attention)
    linear = [layer for layer in modules_of(block.around) if isinstance(layer, nn.Linear)]
    layers = [layer for layer in linear if layer.out_features == dim and layer not in of_attention]
    return layers[-1:]


class ResidualStream(NamedTuple):
    """What `deep_impulse`, and in part `impulse_rotary`, writes beside queries, keys and values."""

    writers: list[Tensor]  # (D, …): of the patch embedding, and of the last layer of each MLP
    # and of each attention
    norms: set[nn.LayerNorm]  # of the blocks, but for those before attention
    ends: set[nn.LayerNorm]  # outside; the first after the blocks counts


def norms_of(modules: Iterable[nn.Module], dim: int) -> set[nn.LayerNorm]:
    """The LayerNorms of the stream of `dim` channels among some modules."""
    norms = {module for module in modules if isinstance(module, nn.LayerNorm)}
    return {norm for norm in norms if norm.normalized_shape == (dim,)}


def stream_of(vit: Layout) -> ResidualStream:
    """Find the stream of a ViT in its modules; raises ValueError if it is not all there."""
    dim = vit.first.proj.shape[0]
    inside = set[nn.Module]()  # the blocks
    for block in vit.blocks:
        inside.update(modules_of(block.around))
    outside = [module for module in vit.model.modules() if module not in inside]
    writers = patch_embedding(outside, dim)[-1:]
    for block in vit.blocks:
        writers += ends_of_mlp(block, dim)
    before_attention = {block.norm for block in vit.blocks}
    norms = norms_of(inside, dim) - before_attention
    ends = norms_of(outside, dim) - before_attention - {*writers}
    complete = len(writers) == len(vit.blocks) + 1 and len(norms) == len(vit.blocks)
    if not complete or any(norm.weight is None for norm in norms | ends | before_attention):
        raise ValueError(
            "this init needs the patch embedding, the last layer of each MLP and a "
            "LayerNorm before it, and finds no such in the model"
        )
    tensors = list[object]()
    for layer in writers:
        tensors += [layer.weight, layer.bias]
    for block in vit.blocks:
        tensors += [block.proj, block.proj_bias]
    present = [tensor.detach() for tensor in tensors if isinstance(tensor, Tensor)]
    return ResidualStream(present, norms, ends)


def noise_images(layout: Attentions, count: int, generator: Generator) -> Tensor:
    """White noise like the model's images, (count, C, H, W); ValueError if it states no size."""
    if layout.image_shape is None:
        raise ValueError(
            "the size of its images is not seen in the model; give images=, or "
            "describe it by a Layout with image_shape"
        )
    noise = torch.randn(count, *layout.image_shape, generator=generator, dtype=torch.float32)
    return noise.to(layout.first.q)
