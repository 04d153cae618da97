"""Convert checkpoints of other implementations to the names of this package, which are timm's.

Checkpoints of DeiT and of timm's ViT, DeiT, Swin, Mixer and ConvMixer need no conversion. Each of
the other layouts is a table of names, recognised by a name that occurs only in it: those of
torchvision (ViT, Swin), Hugging Face's transformers (ViT and DeiT, DINOv2 and 3, Swin; as it
writes them to files, and as release 5 has them in memory), timm's Eva (EVA-02, RoPE-ViT, DINOv3),
Microsoft (Swin) and DINOv2's authors. Some also serve to write them (`vitinit export --names`).

All layouts order heads and merged patches as this package does. Queries, keys and values in three
layers are stacked into one; keys without a bias get one of zeros where queries have one.
LayerScale, by which DINOv2, DeiT-III and others multiply the output of attention and MLP, is folded
for a model that has none: γ ⊙ (W x + b) = (γ ⊙ W) x + γ ⊙ b.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

# Our names → theirs, up to any dot; {} is the number of a block or stage. Of several entries that
# match, the first counts; names without an entry stay. Our one layer may be several of theirs,
# whose rows follow one another.
Names = dict[str, str | tuple[str, ...]]

STAGES = range(9)  # more than any Swin has


def within(ours: str, prefix: str, names: Names) -> Names:
    """Entries whose names, ours and the others', begin with these."""
    return {
        f"{ours}.{name}": f"{prefix}.{other}"
        if isinstance(other, str)
        else tuple(f"{prefix}.{part}" for part in other)
        for name, other in names.items()
    }


# fmt: off
TORCHVISION_VIT = {
    "cls_token": "class_token", "pos_embed": "encoder.pos_embedding",
    "patch_embed.proj": "conv_proj", "norm": "encoder.ln", "head": "heads.head",
    **within("blocks.{}", "encoder.layers.encoder_layer_{}", {
        "norm1": "ln_1", "norm2": "ln_2", "mlp.fc1": "mlp.0", "mlp.fc2": "mlp.3",
        "attn.qkv.weight": "self_attention.in_proj_weight",
        "attn.qkv.bias": "self_attention.in_proj_bias", "attn.proj": "self_attention.out_proj"})}
# fmt: on
# The weights that torchvision publishes are of its release 0.12, and it renames these on loading.
TORCHVISION_VIT_PUBLISHED = {
    **TORCHVISION_VIT,
    **within(
        "blocks.{}.mlp",
        "encoder.layers.encoder_layer_{}.mlp",
        {"fc1": "linear_1", "fc2": "linear_2"},
    ),
}

# features: 0 is the patch embedding; 1, 3, 5, 7 are the stages; 2, 4, 6 the merges before them.
TORCHVISION_SWIN: Names = {
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

# Microsoft merges at the end of a stage, timm at the beginning of the next.
MICROSOFT_SWIN: Names = {
    "head.fc": "head",
    **{f"layers.{stage}.downsample": f"layers.{stage - 1}.downsample" for stage in STAGES[1:]},
}
DINOV2: Names = {"reg_token": "register_tokens"}  # placed after the class token

HUGGING_BLOCK: Names = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "attn.proj": "attention.output.dense",
}
TRANSFORMERS_VIT: Names = {
    **within(
        "blocks.{}",
        "encoder.layer.{}",
        HUGGING_BLOCK
        | {"attn.qkv": tuple(f"attention.attention.{part}" for part in ("query", "key", "value"))},
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
WITH_TEACHER: Names = {"head": "cls_classifier"}  # beside a distillation_classifier
DINO_BLOCK: Names = {
    "norm1": "norm1",
    "norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "ls1.gamma": "layer_scale1.lambda1",
    "ls2.gamma": "layer_scale2.lambda1",
}
TRANSFORMERS_DINOV2 = TRANSFORMERS_VIT | within("blocks.{}", "encoder.layer.{}", DINO_BLOCK)
TRANSFORMERS_SWIN: Names = {
    **within(
        "layers.{}.blocks.{}",
        "encoder.layers.{}.blocks.{}",
        HUGGING_BLOCK
        | {
            "attn.relative_position_bias_table": "attention.self.relative_position_bias_table",
            "attn.qkv": tuple(f"attention.self.{part}" for part in ("query", "key", "value")),
        },
    ),
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "patch_embed.norm": "embeddings.norm",
    "norm": "layernorm",
    "head.fc": "classifier",
    **{
        f"layers.{stage}.downsample": f"encoder.layers.{stage - 1}.downsample"
        for stage in STAGES[1:]
    },
}

# What release 5 of transformers calls otherwise in memory than in the files that it writes.
IN_MEMORY: Names = {
    "attn.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
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
        | {"mlp.fc1": ("mlp.gate_proj", "mlp.up_proj"), "mlp.fc2": "mlp.down_proj"},
    ),
    "patch_embed.proj": "embeddings.patch_embeddings",
    "norm": "norm",
}

# timm's Eva, also as its attention without a bias of the keys, and a gate apart, name them.
TIMM_EVA = within("blocks.{}", "blocks.{}", {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"})
EVA_APART = {
    **TIMM_EVA,
    **within(
        "blocks.{}",
        "blocks.{}",
        {
            "attn.qkv.bias": tuple(f"attn.{part}_bias" for part in "qkv"),
            "mlp.fc1": ("mlp.fc1_g", "mlp.fc1_x"),
        },
    ),
}
BIAS_OF_QUERIES = re.compile(r"\.q(_bias|_proj\.bias)$")
FREQUENCIES = "blocks.{}.attn.rotary.frequencies"  # of all blocks (2, depth, h, d / 2) in Eva

# A name that occurs in one layout only → the layout; the first one found counts.
LAYOUTS: dict[str, Names] = {
    "encoder.layers.encoder_layer_0.mlp.linear_1.weight": TORCHVISION_VIT_PUBLISHED,
    "class_token": TORCHVISION_VIT,
    "features.1.0.attn.relative_position_bias_table": TORCHVISION_SWIN,
    "layers.0.downsample.norm.weight": MICROSOFT_SWIN,
    "register_tokens": DINOV2,
    "layers.0.attention.q_proj.weight": VIT_IN_MEMORY,
    "layer.0.attention.q_proj.weight": TRANSFORMERS_DINOV3,
    **dict.fromkeys(("blocks.0.attn.q_bias", "blocks.0.gamma_1", "rope.freqs"), EVA_APART),
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
LAYER_SCALE = re.compile(r"^(blocks\.\d+)\.ls([12])\.gamma$")  # of attention, of the MLP
ROTATED = re.compile(r"\.attn\.(qkv|[qk]_norm)\.(weight|bias)$")
# In each head: its pairs of channels with the rows' before the columns', or as two halves.
ROWS_FIRST, HALVES = (
    f"(heads {order}) ... -> heads along n part ..." for order in ("along n part", "part along n")
)


def layout_of(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Names | None]:
    """The tensors without transformers' prefix, and their layout, if it is known."""
    rest = {TRANSFORMERS_PREFIX.sub("", name): value for name, value in tensors.items()}
    return rest, next((names for mark, names in LAYOUTS.items() if mark in rest), None)


def native_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under this package's names; of an unknown layout they keep theirs.

    A layer of ours of which a part is missing becomes too narrow, so that loading fails visibly.
    """
    rest, names = layout_of(tensors)
    if names is None:
        return dict(tensors)
    if "cls_classifier.weight" in rest:
        names = names | WITH_TEACHER
    rest = {
        name: value for name, value in rest.items() if value.numel() and not DROPPED.search(name)
    }  # transformers' registers may be none
    for name in filter(BIAS_OF_QUERIES.search, list(rest)):
        rest.setdefault(BIAS_OF_QUERIES.sub(r".k\1", name), torch.zeros_like(rest[name]))
    rows: dict[str, list[Tensor]] = {}  # our name → its parts, one after another
    for ours, other in names.items():
        for pattern in map(_pattern, [other] if isinstance(other, str) else other):
            for match in list(filter(None, map(pattern.match, rest))):
                name = ours.format(*match.groups()) + match.string[match.end() :]
                rows.setdefault(name, []).append(rest.pop(match.string))
    rest |= {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in rows.items()}
    # RoPE-ViT's are per column, then per row. timm's other attention has the rows first by default.
    if "blocks.0.attn.q_bias" not in tensors and "rope.freqs" in rest and rest["rope.freqs"].ndim:
        for block, frequencies in enumerate(rest.pop("rope.freqs").flip(0).movedim(0, -1)):
            rest[FREQUENCIES.format(block)] = frequencies.contiguous()
    return rest


def foreign_names(
    tensors: Mapping[str, Tensor], names: Names, prefix: str = ""
) -> dict[str, Tensor]:
    """The inverse of `native_names`; prefix: before all names but classifiers', such as "vit."."""
    rules = [
        (_pattern(ours), (other,) if isinstance(other, str) else other)
        for ours, other in names.items()
    ]
    renamed = {}
    for ours, value in tensors.items():
        match, parts = next(
            ((match, parts) for pattern, parts in rules if (match := pattern.match(ours))),
            (None, (ours,)),
        )
        for part, rows in zip(parts, value.chunk(len(parts)) if len(parts) > 1 else [value]):
            name = part.format(*match.groups()) + ours[match.end() :] if match else part
            renamed[name if "classifier" in name else prefix + name] = rows.contiguous()
    if names and FREQUENCIES.format(0) in renamed:
        learned = [*map(renamed.pop, [*filter(_pattern(FREQUENCIES).match, renamed)])]
        renamed["rope.freqs"] = torch.stack(learned).movedim(-1, 0).flip(0)
    return renamed


def _pattern(name: str) -> re.Pattern:
    """Matches `name`, with numbers in place of {}, up to a dot or the end."""
    return re.compile("^" + re.escape(name).replace(r"\{\}", r"(\d+)") + r"(?=\.|$)")


def native_tensors(
    tensors: Mapping[str, Tensor], options: Mapping[str, Any] = {}
) -> dict[str, Tensor]:
    """`native_names` for a model with these options: each LayerScale γ (arXiv 2103.17239, §2.1) is
    folded into its layer if the model has none, biases of zeros are left out if it has no qkv_bias,
    and the channels of rotary attention are reordered.

    Products are computed in float64 and rounded once, to float32 or a wider type of the weights. A
    γ whose layer is missing or has another width stays, so that loading it fails visibly.

    Our pairs of channels are neighbours, those for columns first; so are RoPE-ViT's, and those of
    unknown names. transformers' DINOv3 has them in halves, i and i + d / 2, those for rows first.
    timm's Eva has ours where its keys have a bias, as RoPE-ViT's. Where they have none, tensors do
    not show it, but the model's coordinates do: halves if "centred" (DINOv3), neighbours with those
    for rows first if "scaled" (EVA-02, vit_…_rope_reg…). Raises ValueError for any others. Mixed
    frequencies are stored with their pairs, whose order is free.
    """
    rest, layout = layout_of(tensors)
    tensors, coordinates = native_names(tensors), options.get("rope_coordinates")
    if (
        "rope" in options.get("pos_embed", "")
        and options["rope_frequencies"] != "mixed"
        and (
            layout is TRANSFORMERS_DINOV3
            or layout is EVA_APART
            and "blocks.0.attn.qkv.bias" not in rest
        )
    ):
        orders = {"centred": HALVES} | ({"scaled": ROWS_FIRST} if layout is EVA_APART else {})
        if coordinates not in orders:
            raise ValueError(
                f"rope_coordinates is {coordinates}, and its tensors do not show in "
                f"which order channels are turned; expected {' or '.join(orders)}"
            )
        tensors = {
            name: _reordered(value, orders[coordinates], options["embed_dim"], options["num_heads"])
            if ROTATED.search(name)
            else value
            for name, value in tensors.items()
        }
    if not options.get("qkv_bias", True):
        tensors = {
            name: value
            for name, value in tensors.items()
            if not name.endswith("qkv.bias") or value.any()
        }
    return tensors if options.get("layer_scale") else _folded(tensors)


def _reordered(packed: Tensor, order: str, dim: int, heads: int) -> Tensor:
    """The channels of queries and keys in our order: of (3·C, …), or, of a head's norms, (d,)."""
    count = dim // max(4 * heads, 1)  # of pairs in a head for each axis
    if not packed.ndim or not count or len(packed[: 2 * dim]) % (4 * count):
        return packed  # loading it fails visibly
    pairs = rearrange(packed[: 2 * dim], order, along=2, part=2, n=count)
    return torch.cat([pairs.flip(1).flatten(0, 3), packed[2 * dim :]])


def _folded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    folded = dict(tensors)
    for match in filter(None, map(LAYER_SCALE.match, tensors)):
        layer = f"{match[1]}.{'attn.proj' if match[2] == '1' else 'mlp.fc2'}"
        gamma, weight = tensors[match.string], tensors.get(f"{layer}.weight")
        if weight is None or gamma.shape != weight.shape[:1]:
            continue
        del folded[match.string]
        for name in (f"{layer}.weight", f"{layer}.bias"):
            if (value := tensors.get(name)) is not None:  # (C, inputs) or (C,)
                scaled = gamma.double().view(-1, *[1] * (value.ndim - 1)) * value.double()
                folded[name] = scaled.to(torch.promote_types(value.dtype, torch.float32))
    return folded
