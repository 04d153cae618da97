"""Foreign checkpoints: other people's tensors become ours (whose names are timm's).

DeiT's and timm's ViT, DeiT, Swin, Mixer and ConvMixer checkpoints need nothing. Every other layout is
recognised by a name that only it has:

    torchvision ViT     class_token
    torchvision Swin    features.1.0.attn.relative_position_bias_table
    Microsoft's Swin    layers.0.downsample.norm.weight
    ConvMixer's own     3.0.fn.0.weight, from a flat nn.Sequential
    DINOv2's own        register_tokens

All of them pack q, k, v and order merged patches as we do, so that a name is all that changes, but for
two things that ViTs differ in and that have an exact equal here:

    LayerScale          DINOv2, DeiT-III and others multiply what attention and MLP add by a vector γ:
                        γ ⊙ (W x + b) = (γ ⊙ W) x + γ ⊙ b, so γ goes into the rows of the last layer.
    position entries    DeiT-III adds positions to patches alone, DINOv2 with registers to the class
                        token and the patches. A token without a position has a position of zeros here.

What still does not fit afterwards is listed, on both sides, by whoever loads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isqrt

import torch
from torch import Tensor

from .vit import PREFIX_TOKENS

DROPPED = ("relative_position_index", "attn_mask")   # buffers that follow from the sizes
Rules = list[tuple[str, str | Callable[[re.Match], str]]]

TORCHVISION_VIT: Rules = [
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.layers\.encoder_layer_", "blocks."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.ln_", ".norm"),
    (r"\.mlp\.0\.", ".mlp.fc1."),
    (r"\.mlp\.3\.", ".mlp.fc2."),
    (r"\.mlp\.linear_", ".mlp.fc"),                  # before torchvision 0.12
    (r"^encoder\.ln\.", "norm."),
    (r"^heads\.head\.", "head."),
]

# features: 0 the patches; 1, 3, 5, 7 the stages; 2, 4, 6 the merges before stages 1, 2, 3.
TORCHVISION_SWIN: Rules = [
    (r"^features\.0\.0\.", "patch_embed.proj."),
    (r"^features\.0\.2\.", "patch_embed.norm."),
    (r"^features\.([1357])\.", lambda found: f"layers.{int(found[1]) // 2}.blocks."),
    (r"^features\.([246])\.", lambda found: f"layers.{int(found[1]) // 2}.downsample."),
    (r"\.mlp\.0\.", ".mlp.fc1."),
    (r"\.mlp\.3\.", ".mlp.fc2."),
    (r"^head\.", "head.fc."),
]

# Microsoft merges at the end of a stage, timm at the beginning of the next.
MICROSOFT_SWIN: Rules = [
    (r"^layers\.(\d+)\.downsample\.", lambda found: f"layers.{int(found[1]) + 1}.downsample."),
    (r"^head\.", "head.fc."),
]

DINOV2: Rules = [(r"^register_tokens$", "reg_token")]        # inserted behind the class token

# The γ of attention and of the MLP: timm's and DINOv2's name, or DeiT-III's own (models_v2.py).
LAYER_SCALE = re.compile(r"^(blocks\.\d+)\.(?:ls([12])\.gamma|gamma_([12]))$")
SCALED_LAYER = {"1": "attn.proj", "2": "mlp.fc2"}


def native_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same function's tensors under our names; of an unknown layout they come back as they are."""
    return fold_layer_scale(add_prefix_positions(native_names(tensors)))


def native_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under our names."""
    if "class_token" in tensors:
        rules = TORCHVISION_VIT
    elif "features.1.0.attn.relative_position_bias_table" in tensors:
        rules = TORCHVISION_SWIN
    elif "layers.0.downsample.norm.weight" in tensors:
        rules = MICROSOFT_SWIN
    elif "3.0.fn.0.weight" in tensors:
        rules = flat_conv_mixer(tensors)
    elif "register_tokens" in tensors:
        rules = DINOV2
    else:
        return dict(tensors)
    return {_renamed(name, rules): value for name, value in tensors.items()
            if not name.endswith(DROPPED)}


def flat_conv_mixer(tensors: Mapping[str, Tensor]) -> Rules:
    """ConvMixer's own layers: 0 … 2 the stem, then the blocks, pooling, flattening, the head."""
    head = max(int(name.partition(".")[0]) for name in tensors)

    def place(found: re.Match) -> str:
        layer = int(found[1])
        if layer == head:
            return "head."
        return f"stem.{layer}." if layer < 3 else f"blocks.{layer - 3}."
    return [(r"^(\d+)\.", place)]


def _renamed(name: str, rules: Rules) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def fold_layer_scale(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """γ of each branch (Touvron et al., arXiv 2103.17239, §2.1) into the layer that it multiplies.

    Products are rounded once, to float32 or what the weights have. A γ whose layer is missing or of
    another width stays, so that whoever loads it refuses it.
    """
    folded = dict(tensors)
    for name, gamma in tensors.items():
        found = LAYER_SCALE.match(name)
        layer = found and f"{found[1]}.{SCALED_LAYER[found[2] or found[3]]}"
        weight = layer and tensors.get(f"{layer}.weight")
        if weight is None or gamma.shape != weight.shape[:1]:
            continue
        del folded[name]
        for part in ("weight", "bias"):
            value = tensors.get(f"{layer}.{part}")   # (C, inputs) or (C,)
            if value is not None:
                scaled = gamma.double().view(-1, *[1] * (value.ndim - 1)) * value.double()
                folded[f"{layer}.{part}"] = scaled.to(torch.promote_types(value.dtype, torch.float32))
    return folded


def add_prefix_positions(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """pos_embed with an entry for each token before the patches, zeros where it has none.

    Only where the checkpoint alone tells: registers or LayerScale say that it may be such a layout,
    and its patches make a square grid only if some or all of those tokens have no entry.
    """
    pos_embed, registers = tensors.get("pos_embed"), tensors.get("reg_token")
    scaled = any(map(LAYER_SCALE.match, tensors))
    if pos_embed is None or pos_embed.ndim != 3 or (registers is None and not scaled):
        return dict(tensors)
    before = sum(tensors[name].shape[1] for name in PREFIX_TOKENS if name in tensors)
    registers = 0 if registers is None else registers.shape[1]
    for entries in (before, before - registers, 0):  # all of them, all but registers, none
        patches = pos_embed.shape[1] - entries
        if patches > 0 and isqrt(patches) ** 2 == patches:
            zeros = pos_embed.new_zeros(1, before - entries, pos_embed.shape[2])
            pos_embed = torch.cat([pos_embed[:, :entries], zeros, pos_embed[:, entries:]], dim=1)
            return {**tensors, "pos_embed": pos_embed}
    return dict(tensors)
