"""Foreign checkpoints: other people's names for the same tensors become ours (which are timm's).

DeiT's and timm's ViT, DeiT, Swin, Mixer and ConvMixer checkpoints need nothing. Every other layout is
recognised by a name that only it has:

    torchvision ViT     class_token
    torchvision Swin    features.1.0.attn.relative_position_bias_table
    Microsoft's Swin    layers.0.downsample.norm.weight
    ConvMixer's own     3.0.fn.0.weight, from a flat nn.Sequential

Values stay as they are: all of them pack q, k, v and order merged patches as we do. What still does
not fit afterwards is listed, on both sides, by whoever loads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from torch import Tensor

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


def native_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under our names; a state dict of unknown layout comes back as it is."""
    if "class_token" in tensors:
        rules = TORCHVISION_VIT
    elif "features.1.0.attn.relative_position_bias_table" in tensors:
        rules = TORCHVISION_SWIN
    elif "layers.0.downsample.norm.weight" in tensors:
        rules = MICROSOFT_SWIN
    elif "3.0.fn.0.weight" in tensors:
        rules = flat_conv_mixer(tensors)
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
