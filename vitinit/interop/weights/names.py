"""Convert checkpoints of other implementations to the names of this package, which are timm's.

Checkpoints of DeiT and of timm's ViT, DeiT, Swin, Mixer and ConvMixer need no conversion. Each of
the other layouts is a table of names, recognised by a name that occurs only in it: those of
torchvision (ViT, Swin), Hugging Face's transformers (ViT and DeiT, DINOv2 and 3, Swin; as it
writes them to files, and as release 5 has them in memory), timm's Eva (EVA-02, RoPE-ViT, DINOv3),
Microsoft (Swin), DINOv2's authors, mmpretrain (ViT, DeiT) and Flax (Google's ViT and Mixer). Some
also serve to write them (`vitinit export --names`).

All layouts order heads and merged patches as this package does. Queries, keys and values in three
layers are stacked into one; keys without a bias get one of zeros where queries have one.
LayerScale, by which DINOv2, DeiT-III and others multiply the output of attention and MLP, is folded
for a model that has none: γ ⊙ (W x + b) = (γ ⊙ W) x + γ ⊙ b.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

# Our names → theirs, up to any dot; {} is the number of a block or stage. Of several entries that
# match, the first counts; names without an entry stay. Our one layer may be several of theirs,
# whose rows follow one another: then their names stand in one string.
Names = dict[str, str]
Tensors = Mapping[str, Tensor]

STAGES = range(9)  # more than any Swin has


def within(ours: str, prefix: str, names: Names) -> Names:
    """Entries whose names, ours and the others', begin with these."""
    entries = {}
    for name, theirs in names.items():
        entries[f"{ours}.{name}"] = " ".join(f"{prefix}.{part}" for part in theirs.split())
    return entries


TORCHVISION_VIT = {
    "cls_token": "class_token",
    "pos_embed": "encoder.pos_embedding",
    "patch_embed.proj": "conv_proj",
    "norm": "encoder.ln",
    "head": "heads.head",
    **within(
        "blocks.{}",
        "encoder.layers.encoder_layer_{}",
        {
            "norm1": "ln_1",
            "norm2": "ln_2",
            "mlp.fc1": "mlp.0",
            "mlp.fc2": "mlp.3",
            "attn.qkv.weight": "self_attention.in_proj_weight",
            "attn.qkv.bias": "self_attention.in_proj_bias",
            "attn.proj": "self_attention.out_proj",
        },
    ),
}
# The weights that torchvision publishes are of its release 0.12, and it renames these on loading.
TORCHVISION_VIT_PUBLISHED = {
    **TORCHVISION_VIT,
    "blocks.{}.mlp.fc1": "encoder.layers.encoder_layer_{}.mlp.linear_1",
    "blocks.{}.mlp.fc2": "encoder.layers.encoder_layer_{}.mlp.linear_2",
}

# features: 0 is the patch embedding; 1, 3, 5, 7 are the stages; 2, 4, 6 the merges before them.
TORCHVISION_SWIN = {
    "patch_embed.proj": "features.0.0",
    "patch_embed.norm": "features.0.2",
    "head.fc": "head",
    **{f"layers.{stage}.downsample": f"features.{2 * stage}" for stage in STAGES[1:]},
    **{
        f"layers.{stage}.blocks.{{}}.{ours}": f"features.{2 * stage + 1}.{{}}.{other}"
        for stage in STAGES
        for ours, other in {
            "norm1": "norm1",
            "attn": "attn",
            "norm2": "norm2",
            "mlp.fc1": "mlp.0",
            "mlp.fc2": "mlp.3",
        }.items()
    },
}

# Microsoft and transformers merge at the end of a stage, timm at the beginning of the next.
MERGES = {f"{stage}.downsample": f"{stage - 1}.downsample" for stage in STAGES[1:]}
MICROSOFT_SWIN = {"head.fc": "head", **within("layers", "layers", MERGES)}
DINOV2 = {"reg_token": "register_tokens"}  # placed after the class token

HUGGING_BLOCK = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "attn.proj": "attention.output.dense",
}
TRANSFORMERS_VIT = {
    **within(
        "blocks.{}",
        "encoder.layer.{}",
        {
            **HUGGING_BLOCK,
            "attn.qkv": "attention.attention.query attention.attention.key attention.attention.value",
        },
    ),
    "cls_token": "embeddings.cls_token",
    "dist_token": "embeddings.distillation_token",
    "reg_token": "embeddings.register_tokens",
    "mask_token": "embeddings.mask_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
    "head": "classifier",
    "head_dist": "distillation_classifier",
}
WITH_TEACHER = {"head": "cls_classifier"}  # beside a distillation_classifier
DINO_BLOCK = {
    "norm1": "norm1",
    "norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "ls1.gamma": "layer_scale1.lambda1",
    "ls2.gamma": "layer_scale2.lambda1",
}
TRANSFORMERS_DINOV2 = TRANSFORMERS_VIT | within("blocks.{}", "encoder.layer.{}", DINO_BLOCK)
TRANSFORMERS_SWIN = {
    **within(
        "layers.{}.blocks.{}",
        "encoder.layers.{}.blocks.{}",
        {
            **HUGGING_BLOCK,
            "attn.relative_position_bias_table": "attention.self.relative_position_bias_table",
            "attn.qkv": "attention.self.query attention.self.key attention.self.value",
        },
    ),
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "patch_embed.norm": "embeddings.norm",
    "norm": "layernorm",
    "head.fc": "classifier",
    **within("layers", "encoder.layers", MERGES),
}

# What release 5 of transformers calls otherwise in memory than in the files that it writes.
IN_MEMORY = {
    "attn.qkv": "attention.q_proj attention.k_proj attention.v_proj",
    "attn.proj": "attention.o_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
VIT_IN_MEMORY = TRANSFORMERS_VIT | within("blocks.{}", "layers.{}", HUGGING_BLOCK | IN_MEMORY)
DINOV2_IN_MEMORY = TRANSFORMERS_DINOV2 | within("blocks.{}", "encoder.layer.{}", IN_MEMORY)
SWIN_IN_MEMORY = {
    **TRANSFORMERS_SWIN,
    **within(
        "layers.{}.blocks.{}",
        "encoder.layers.{}.blocks.{}",
        IN_MEMORY
        | {
            "attn.relative_position_bias_table": "attention.relative_position_bias.relative_position_bias_table"
        },
    ),
}
TRANSFORMERS_DINOV3 = {
    **TRANSFORMERS_VIT,
    **within(
        "blocks.{}",
        "layer.{}",
        DINO_BLOCK
        | IN_MEMORY
        | {"mlp.fc1": "mlp.gate_proj mlp.up_proj", "mlp.fc2": "mlp.down_proj"},
    ),
    "patch_embed.proj": "embeddings.patch_embeddings",
    "norm": "norm",
}

# timm's Eva, also as its attention without a bias of the keys, and a gate apart, name them.
TIMM_EVA = {"blocks.{}.ls1.gamma": "blocks.{}.gamma_1", "blocks.{}.ls2.gamma": "blocks.{}.gamma_2"}
EVA_APART = {
    **TIMM_EVA,
    "blocks.{}.attn.qkv.bias": "blocks.{}.attn.q_bias blocks.{}.attn.k_bias blocks.{}.attn.v_bias",
    "blocks.{}.mlp.fc1": "blocks.{}.mlp.fc1_g blocks.{}.mlp.fc1_x",
}
BIAS_OF_QUERIES = re.compile(r"\.q(_bias|_proj\.bias)$")
FREQUENCIES = "blocks.{}.attn.rotary.frequencies"  # of all blocks (2, depth, h, d / 2) in Eva


def flax_vit(attention: str, mlp: str, second_norm: str, positions: str) -> Names:
    """Names of a ViT in Flax, where parts without a name are counted by class within a block."""
    return {
        "cls_token": "cls",
        "pos_embed": positions,
        "patch_embed.proj": "embedding",
        "norm": "Transformer.encoder_norm",
        **within(
            "blocks.{}",
            "Transformer.encoderblock_{}",
            {
                "norm1": "LayerNorm_0",
                "norm2": second_norm,
                "attn.qkv": f"{attention}.query {attention}.key {attention}.value",
                "attn.proj": f"{attention}.out",
                "mlp.fc1": f"{mlp}.Dense_0",
                "mlp.fc2": f"{mlp}.Dense_1",
            },
        ),
    }


# As flax.py reads them. Google's first code counted all parts of a block together.
FLAX_VIT = flax_vit(
    "MultiHeadDotProductAttention_1",
    "MlpBlock_3",
    "LayerNorm_2",
    "Transformer.posembed_input.pos_embedding",
)
BIG_VISION_VIT = flax_vit(
    "MultiHeadDotProductAttention_0", "MlpBlock_0", "LayerNorm_1", "pos_embedding"
)
FLAX_MIXER = {
    "stem.proj": "stem",
    "norm": "pre_head_layer_norm",
    **within(
        "blocks.{}",
        "MixerBlock_{}",
        {
            "norm1": "LayerNorm_0",
            "norm2": "LayerNorm_1",
            "mlp_tokens.fc1": "token_mixing.Dense_0",
            "mlp_tokens.fc2": "token_mixing.Dense_1",
            "mlp_channels.fc1": "channel_mixing.Dense_0",
            "mlp_channels.fc2": "channel_mixing.Dense_1",
        },
    ),
}

MMPRETRAIN_VIT = {
    "patch_embed.proj": "patch_embed.projection",
    "norm": "ln1",
    "head": "head.layers.head",
    "head_dist": "head.layers.head_dist",
    **within(
        "blocks.{}",
        "layers.{}",
        {
            "norm1": "ln1",
            "norm2": "ln2",
            "attn": "attn",
            "mlp.fc1": "ffn.layers.0.0",
            "mlp.fc2": "ffn.layers.1",
        },
    ),
}

# A name that occurs in one layout only → the layout; the first one found counts.
LAYOUTS = {
    "encoder.layers.encoder_layer_0.mlp.linear_1.weight": TORCHVISION_VIT_PUBLISHED,
    "class_token": TORCHVISION_VIT,
    "features.1.0.attn.relative_position_bias_table": TORCHVISION_SWIN,
    "layers.0.downsample.norm.weight": MICROSOFT_SWIN,
    "register_tokens": DINOV2,
    "layers.0.attention.q_proj.weight": VIT_IN_MEMORY,
    "layer.0.attention.q_proj.weight": TRANSFORMERS_DINOV3,
    "layers.0.ffn.layers.0.0.weight": MMPRETRAIN_VIT,
    "Transformer.encoderblock_0.MlpBlock_3.Dense_0.weight": FLAX_VIT,
    "Transformer.encoderblock_0.MlpBlock_0.Dense_0.weight": BIG_VISION_VIT,
    "pre_head_layer_norm.weight": FLAX_MIXER,
    "blocks.0.attn.q_bias": EVA_APART,
    "blocks.0.gamma_1": EVA_APART,
    "rope.freqs": EVA_APART,
    "encoder.layer.0.attention.q_proj.weight": DINOV2_IN_MEMORY,
    "encoder.layers.0.blocks.0.attention.q_proj.weight": SWIN_IN_MEMORY,
    "encoder.layer.0.layernorm_before.weight": TRANSFORMERS_VIT,
    "encoder.layer.0.norm1.weight": TRANSFORMERS_DINOV2,
    "encoder.layers.0.blocks.0.layernorm_before.weight": TRANSFORMERS_SWIN,
}
# transformers puts this before all names but those of the classifiers, or of DINOv3's blocks.
TRANSFORMERS_PREFIX = re.compile(
    r"^(vit|deit|ijepa|dinov2|dinov2_with_registers|swin"
    r"|model(?=\.layer\.))\."
)
# Not converted: buffers that follow from the sizes, and a layer after the class token which
# transformers' ViTModel has and its classifiers do not read.
DROPPED = re.compile(r"\.(relative_position_index|attn_mask)$|^pooler\.dense\.")
LAYER_SCALE = re.compile(r"^(blocks\.\d+)\.(ls[12])\.gamma$")
SCALED = {"ls1": "attn.proj", "ls2": "mlp.fc2"}  # the layer whose output each LayerScale multiplies
ROTATED = re.compile(r"\.attn\.(qkv|[qk]_norm)\.(weight|bias)$")
# In each head: its pairs of channels with the rows' before the columns', or as two halves.
ROWS_FIRST = "(heads along n part) ... -> heads along n part ..."
HALVES = "(heads part along n) ... -> heads along n part ..."


def named_layout_of(tensors: Tensors) -> tuple[dict[str, Tensor], Names | None]:
    """The tensors without transformers' prefix, and their layout, if it is known."""
    rest = {TRANSFORMERS_PREFIX.sub("", name): value for name, value in tensors.items()}
    return rest, next((names for mark, names in LAYOUTS.items() if mark in rest), None)


def native_names(tensors: Tensors) -> dict[str, Tensor]:
    """The same tensors under this package's names; of an unknown layout they keep theirs.

    A layer of ours of which a part is missing becomes too narrow, and parts of unlike shapes stay
    apart, so that loading fails visibly.
    """
    rest, names = named_layout_of(tensors)
    if names is None:
        return dict(tensors)
    if "cls_classifier.weight" in rest:
        names = names | WITH_TEACHER
    for name, value in list(rest.items()):
        if value.numel() == 0 or DROPPED.search(name):  # transformers' registers may be none
            del rest[name]
        elif BIAS_OF_QUERIES.search(name):
            rest.setdefault(BIAS_OF_QUERIES.sub(r".k\1", name), torch.zeros_like(value))
    stack(rest, names)
    # RoPE-ViT's are per column, then per row. timm's other attention has the rows first by default.
    if "blocks.0.attn.q_bias" not in tensors and "rope.freqs" in rest and rest["rope.freqs"].ndim:
        by_block = rest.pop("rope.freqs").flip(0).movedim(0, -1)  # (depth, h, d / 2, 2)
        for block, frequencies in enumerate(by_block):
            rest[FREQUENCIES.format(block)] = frequencies.contiguous()
    return rest


def stack(tensors: dict[str, Tensor], names: Names) -> None:
    """Rename tensors from the others' names to ours, and put the parts of our layers together."""
    # Our name → its parts, one after another, by theirs.
    rows: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for ours, theirs in names.items():
        for part in theirs.split():
            pattern = _pattern(part)
            for name in list(tensors):
                match = pattern.match(name)
                if match:
                    rows[_filled(ours, match)][name] = tensors.pop(name)
    for name, parts in rows.items():
        values = [*parts.values()]
        if len(values) == 1:
            tensors[name] = values[0]
        elif all(part.ndim and part.shape[1:] == values[0].shape[1:] for part in values):
            tensors[name] = torch.cat(values)
        else:
            tensors.update(parts)


def foreign_names(tensors: Tensors, names: Names, prefix: str = "") -> dict[str, Tensor]:
    """The inverse of `native_names`; prefix: before all names but classifiers', such as "vit."."""
    rules = {_pattern(ours): theirs.split() for ours, theirs in names.items()}
    renamed = {}
    for name, value in tensors.items():
        parts = [name]
        for pattern, theirs in rules.items():
            match = pattern.match(name)
            if match:
                parts = [_filled(part, match) for part in theirs]
                break
        values = value.chunk(len(parts)) if len(parts) > 1 else [value]
        for part, rows in zip(parts, values):
            key = part if "classifier" in part else prefix + part
            renamed[key] = rows.contiguous()
    if names and FREQUENCIES.format(0) in renamed:
        learned = filter(_pattern(FREQUENCIES).match, list(renamed))
        by_block = torch.stack([renamed.pop(name) for name in learned])  # (depth, h, d / 2, 2)
        renamed["rope.freqs"] = by_block.movedim(-1, 0).flip(0)
    return renamed


def _pattern(name: str) -> re.Pattern:
    """Matches `name`, with numbers in place of {}, up to a dot or the end."""
    return re.compile(re.escape(name).replace(r"\{\}", r"(\d+)") + r"(?=\.|$)")


def _filled(name: str, match: re.Match) -> str:
    """A name with the numbers of what matched, and all that follows it."""
    return name.format(*match.groups()) + match.string[match.end() :]


def native_tensors(tensors: Tensors, options: Mapping[str, Any] = {}) -> dict[str, Tensor]:
    """`native_names` for a model with these options: each LayerScale γ (arXiv 2103.17239, §2.1) is
    folded into its layer if the model has none, biases of zeros are left out if it has no qkv_bias,
    and the channels of rotary attention are reordered.

    Products are computed in float64 and rounded once, to float32 or a wider type of the weights. A
    γ whose layer is missing or has another shape stays, so that loading it fails visibly.
    """
    native = native_names(tensors)
    order = order_of_channels(tensors, options)
    if order is not None:
        for name in filter(ROTATED.search, native):
            native[name] = _reordered(
                native[name], order, options["embed_dim"], options["num_heads"]
            )
    if not options.get("qkv_bias", True):
        for name in list(native):
            if name.endswith("qkv.bias") and not native[name].any():
                del native[name]
    return native if options.get("layer_scale") else _folded(native)


def order_of_channels(tensors: Tensors, options: Mapping[str, Any]) -> str | None:
    """In which order the heads of rotary attention have their channels; None if as ours.

    Our pairs of channels are neighbours, those for columns first; so are RoPE-ViT's, and those of
    unknown names. transformers' DINOv3 has them in halves, i and i + d / 2, those for rows first.
    timm's Eva has ours where its keys have a bias, as RoPE-ViT's. Where they have none, tensors do
    not show it, but the model's coordinates do: halves if "centred" (DINOv3), neighbours with those
    for rows first if "scaled" (EVA-02, vit_…_rope_reg…). Raises ValueError for any others. Mixed
    frequencies are stored with their pairs, whose order is free.
    """
    if "rope" not in options.get("pos_embed", "") or options["rope_frequencies"] == "mixed":
        return None
    rest, layout = named_layout_of(tensors)
    if layout is TRANSFORMERS_DINOV3:
        orders = {"centred": HALVES}
    elif layout is EVA_APART and "blocks.0.attn.qkv.bias" not in rest:
        orders = {"centred": HALVES, "scaled": ROWS_FIRST}
    else:
        return None
    coordinates = options.get("rope_coordinates")
    if coordinates not in orders:
        raise ValueError(
            f"rope_coordinates is {coordinates}, and its tensors do not show in "
            f"which order channels are turned; expected {' or '.join(orders)}"
        )
    return orders[coordinates]


def _reordered(packed: Tensor, order: str, dim: int, heads: int) -> Tensor:
    """The channels of queries and keys in our order: of (3·C, …), or, of a head's norms, (d,)."""
    count = dim // max(4 * heads, 1)  # of pairs in a head for each axis
    if packed.ndim == 0 or count == 0:
        return packed  # loading it fails visibly, here and below
    turned, values = packed[: 2 * dim], packed[2 * dim :]
    if len(turned) % (4 * count):
        return packed
    pairs = rearrange(turned, order, along=2, part=2, n=count)
    return torch.cat([pairs.flip(1).flatten(0, 3), values])


def _folded(tensors: Tensors) -> dict[str, Tensor]:
    """Each LayerScale in the linear layer before it, if that is there and as wide."""
    folded = dict(tensors)
    for name, gamma in tensors.items():
        match = LAYER_SCALE.match(name)
        if match is None:
            continue
        layer = f"{match[1]}.{SCALED[match[2]]}"
        weight = tensors.get(f"{layer}.weight")
        bias = tensors.get(f"{layer}.bias", gamma)  # it may have none
        if weight is None or weight.ndim != 2:
            continue
        if not gamma.shape == bias.shape == weight.shape[:1]:
            continue
        del folded[name]
        for part, factor in (("weight", gamma[:, None]), ("bias", gamma)):
            value = tensors.get(f"{layer}.{part}")  # (C, inputs) or (C,)
            if value is not None:
                scaled = factor.double() * value.double()
                wide = torch.promote_types(value.dtype, torch.float32)
                folded[f"{layer}.{part}"] = scaled.to(wide)
    return folded
