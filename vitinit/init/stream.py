"""The residual stream of any ViT: what writes to it beside attention, and images that pass it."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from .views import Attentions, Layout


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

    writers: tuple[Tensor, ...]  # (D, …): of the patch embedding, and of the last layer of
    # each MLP and of each attention
    norms: tuple[nn.LayerNorm, ...]  # of the blocks, but for those before attention
    ends: tuple[nn.LayerNorm, ...]  # outside; the first after the blocks counts


def stream_of(vit: Layout) -> ResidualStream:
    """Find the stream of a ViT in its modules; raises ValueError if it is not all there."""
    modules, dim = list(vit.model.modules()), vit.blocks[0].proj.shape[0]
    inside = set()  # the blocks
    writers: list[nn.Module] = []
    for block in vit.blocks:
        of_block = [] if block.around is None else list(block.around.modules())
        of_attention = set() if block.attention is None else set(block.attention.modules())
        writers += [
            layer
            for layer in of_block
            if layer not in of_attention
            and isinstance(layer, nn.Linear)
            and layer.out_features == dim
        ][-1:]
        inside.update(of_block)
    outside = [module for module in modules if module not in inside]
    writers = patch_embedding(outside, dim)[-1:] + writers
    before_attention = [block.norm for block in vit.blocks]
    norms = [
        module
        for module in modules
        if isinstance(module, nn.LayerNorm)
        and module.normalized_shape == (dim,)
        and module not in {*writers, *before_attention}
    ]
    of_blocks = tuple(norm for norm in norms if norm in inside)
    if (
        len(writers) != len(vit.blocks) + 1
        or len(of_blocks) != len(vit.blocks)
        or any(norm.weight is None for norm in (*norms, *before_attention))
    ):
        raise ValueError(
            "this init needs the patch embedding, the last layer of each MLP and a "
            "LayerNorm before it, and finds no such in the model"
        )
    tensors = [
        *(tensor for layer in writers for tensor in (layer.weight, layer.bias)),
        *(tensor for block in vit.blocks for tensor in (block.proj, block.proj_bias)),
    ]
    return ResidualStream(
        tuple(tensor.detach() for tensor in tensors if isinstance(tensor, Tensor)),
        of_blocks,
        tuple(norm for norm in norms if norm not in inside),
    )


def noise_images(layout: Attentions, count: int, generator: Generator) -> Tensor:
    """White noise like the model's images, (count, C, H, W); ValueError if it states no size."""
    if layout.image_shape is None:
        raise ValueError(
            "the size of its images is not seen in the model; give images=, or "
            "describe it by a Layout with image_shape"
        )
    noise = torch.randn(count, *layout.image_shape, generator=generator, dtype=torch.float32)
    return noise.to(layout.blocks[0].q)
