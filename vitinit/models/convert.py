"""Convert checkpoints of other implementations to the names of this package, which are timm's.

Checkpoints of DeiT and of timm's ViT, DeiT, Swin, Mixer and ConvMixer need no conversion. Each of
the other layouts is recognised by a name that occurs only in it:

    torchvision ViT         class_token
    torchvision Swin        features.1.0.attn.relative_position_bias_table
    Microsoft's Swin        layers.0.downsample.norm.weight
    ConvMixer's authors     3.0.fn.0.weight, from a flat nn.Sequential
    DINOv2's authors        register_tokens

All of them pack q, k and v and order merged patches as this package does, so renaming is enough.
Two further differences between ViTs have an exact equivalent here:

    LayerScale            DINOv2, DeiT-III and others multiply the output of attention and MLP by a
                          vector γ. As γ ⊙ (W x + b) = (γ ⊙ W) x + γ ⊙ b, γ is multiplied into the
                          rows of the last layer.
    entries of pos_embed  DeiT-III adds positions to the patches alone, DINOv2 with registers to the
                          class token and the patches. Here every token has an entry, so the missing
                          ones become zeros.

Tensors that still do not fit are reported, on both sides, by the code that loads the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isqrt

import torch
from torch import Tensor

from .vit import PREFIX_TOKENS

DROPPED = ("relative_position_index", "attn_mask")   # buffers computed from the sizes
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
    (r"\.mlp\.linear_", ".mlp.fc"),                  # torchvision before 0.12
    (r"^encoder\.ln\.", "norm."),
    (r"^heads\.head\.", "head."),
]

# features: 0 is the patch embedding; 1, 3, 5, 7 are the stages; 2, 4, 6 the merges before stages
# 1, 2, 3.
TORCHVISION_SWIN: Rules = [
    (r"^features\.0\.0\.", "patch_embed.proj."),
    (r"^features\.0\.2\.", "patch_embed.norm."),
    (r"^features\.([1357])\.", lambda match: f"layers.{int(match[1]) // 2}.blocks."),
    (r"^features\.([246])\.", lambda match: f"layers.{int(match[1]) // 2}.downsample."),
    (r"\.mlp\.0\.", ".mlp.fc1."),
    (r"\.mlp\.3\.", ".mlp.fc2."),
    (r"^head\.", "head.fc."),
]

# Microsoft merges at the end of a stage, timm at the beginning of the next.
MICROSOFT_SWIN: Rules = [
    (r"^layers\.(\d+)\.downsample\.", lambda match: f"layers.{int(match[1]) + 1}.downsample."),
    (r"^head\.", "head.fc."),
]

DINOV2: Rules = [(r"^register_tokens$", "reg_token")]        # placed after the class token

# The γ of attention and of the MLP, as timm and DINOv2 or as DeiT-III (models_v2.py) name it.
LAYER_SCALE = re.compile(r"^(blocks\.\d+)\.(?:ls([12])\.gamma|gamma_([12]))$")
SCALED_LAYER = {"1": "attn.proj", "2": "mlp.fc2"}


def native_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under this package's names, with LayerScale and missing positions converted.

    The model that they make computes the same function. Tensors of an unknown layout are returned
    unchanged.
    """
    return fold_layer_scale(add_prefix_positions(native_names(tensors)))


def native_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under this package's names."""
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
    """The rules for ConvMixer's flat nn.Sequential: stem (0 … 2), blocks, pooling, …, head."""
    head = max(int(name.partition(".")[0]) for name in tensors)

    def rename(match: re.Match) -> str:
        layer = int(match[1])
        if layer == head:
            return "head."
        return f"stem.{layer}." if layer < 3 else f"blocks.{layer - 3}."
    return [(r"^(\d+)\.", rename)]


def _renamed(name: str, rules: Rules) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def fold_layer_scale(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply each LayerScale γ (Touvron et al., arXiv 2103.17239, §2.1) into the layer before it.

    Products are computed in float64 and rounded once, to float32 or to the weights' type if that is
    wider. A γ whose layer is missing or has another width stays in the result, so that loading it
    fails visibly.
    """
    folded = dict(tensors)
    for name, gamma in tensors.items():
        match = LAYER_SCALE.match(name)
        layer = match and f"{match[1]}.{SCALED_LAYER[match[2] or match[3]]}"
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
    """Extend pos_embed to one entry per prefix token, with zeros where the checkpoint has none.

    It changes something only if the checkpoint shows that entries are missing: it has registers or
    LayerScale, and its patch entries form a square grid only on the assumption that some or all
    prefix tokens have no entry.
    """
    pos_embed, registers = tensors.get("pos_embed"), tensors.get("reg_token")
    scaled = any(map(LAYER_SCALE.match, tensors))
    if pos_embed is None or pos_embed.ndim != 3 or (registers is None and not scaled):
        return dict(tensors)
    before = sum(tensors[name].shape[1] for name in PREFIX_TOKENS if name in tensors)
    registers = 0 if registers is None else registers.shape[1]
    for entries in (before, before - registers, 0):  # with entries: all, all but registers, none
        patches = pos_embed.shape[1] - entries
        if patches > 0 and isqrt(patches) ** 2 == patches:
            zeros = pos_embed.new_zeros(1, before - entries, pos_embed.shape[2])
            pos_embed = torch.cat([pos_embed[:, :entries], zeros, pos_embed[:, entries:]], dim=1)
            return {**tensors, "pos_embed": pos_embed}
    return dict(tensors)
