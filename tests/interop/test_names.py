"""Checkpoints of other implementations under our names; ours and unknown ones stay."""

import re

import pytest
import torch
from refused import refused
from same_run import assert_identical
from small_models import SMALL, redraw
from torchvision.models import VisionTransformer as TorchvisionViT

import vitinit
from vitinit.interop.weights.names import (
    EVA_APART,
    TIMM_EVA,
    TRANSFORMERS_DINOV3,
    foreign_names,
    native_tensors,
)


def same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(ours[name] is theirs[name] for name in ours)


def test_the_vits_that_torchvision_publishes_have_older_names_in_their_mlps():
    new = TorchvisionViT(
        image_size=8, patch_size=4, num_layers=2, num_heads=3, hidden_dim=15, mlp_dim=60
    ).state_dict()
    old = {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): value
        for name, value in new.items()
    }
    assert old.keys() != new.keys() and same_tensors(native_tensors(old), native_tensors(new))


def test_microsofts_swin_merges_a_stage_earlier_and_carries_buffers():
    model = redraw(
        vitinit.build_model(
            "swin_tiny",
            num_classes=11,
            image_size=(24, 48),
            patch_size=2,
            embed_dim=6,
            depths=(2, 2, 3),
            num_heads=(3, 2, 2),
            window_size=3,
        )
    )
    ours, theirs = dict(model.state_dict()), {}
    for name, value in ours.items():
        for stage in (1, 2):
            name = name.replace(f"layers.{stage}.downsample", f"layers.{stage - 1}.downsample")
        theirs[name.replace("head.fc.", "head.")] = value
    for name, buffer in model.named_buffers():  # the masks and the indices of every block
        theirs[name.replace(".mask", ".attn_mask")] = buffer
    for name in (
        "head.weight",
        "layers.1.downsample.reduction.weight",
        "layers.0.blocks.1.attn_mask",
        "layers.2.blocks.2.attn.relative_position_index",
    ):
        assert name in theirs
    assert same_tensors(native_tensors(theirs), ours)


def test_mmpretrains_vits_have_an_mlp_in_two_layers_and_their_classifiers_in_a_list():
    """mmpretrain 1.2.0's ViT and DeiT gave the same logits, to the bit."""
    sizes = dict(num_classes=11, image_size=8, patch_size=4, embed_dim=6, depth=2, num_heads=2)
    ours = dict(redraw(vitinit.build_model("vit_tiny_distilled", **sizes)).state_dict())
    theirs = {}
    for name, value in ours.items():
        name = re.sub("^head", "head.layers.head", name)
        name = re.sub(r"^norm|\bnorm(?=\d)", lambda norm: "ln" + "1" * (not norm.start()), name)
        for before, after in (
            ("blocks.", "layers."),
            ("mlp.fc1", "ffn.layers.0.0"),
            ("mlp.fc2", "ffn.layers.1"),
            ("patch_embed.proj", "patch_embed.projection"),
        ):
            name = name.replace(before, after)
        theirs[name] = value
    names = ("ln1.bias", "layers.1.ln2.bias", "layers.0.attn.qkv.weight", "cls_token")
    assert {*names, "head.layers.head_dist.bias", "layers.0.ffn.layers.0.0.bias"} <= theirs.keys()
    assert same_tensors(native_tensors(theirs), ours)


def test_our_own_names_and_those_of_unknown_layouts_stay():
    for state in (
        *(
            dict(vitinit.build_model(name, num_classes=11, image_size=16, **sizes).state_dict())
            for name, sizes in SMALL.items()
        ),
        {
            name: torch.zeros(3)
            for name in (
                "0.weight",
                "features.0.weight",
                "head.weight",
                "attn_mask",
                "layers.0.downsample.weight",
            )
        },
    ):
        converted = native_tensors(state)
        assert same_tensors(converted, state) and converted is not state
        assert list(converted) == list(state)


# Of each of their channels in a head of 12 ours: pairs (2i, 2i + 1), those for columns first.
ROWS_FIRST = [6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5]
HALVES = [6, 8, 10, 0, 2, 4, 7, 9, 11, 1, 3, 5]
BLOCK = "blocks.1.{}".format


@pytest.mark.parametrize(
    "layout, order, options, names",
    [
        (TIMM_EVA, None, {}, {BLOCK("gamma_1"), BLOCK("attn.qkv.bias")}),  # RoPE-ViT
        (EVA_APART, ROWS_FIRST, dict(rope_coordinates="scaled"), {BLOCK("attn.q_bias")}),
        (
            EVA_APART,
            HALVES,
            dict(rope_coordinates="centred"),
            {BLOCK("attn.v_bias"), BLOCK("mlp.fc1_g.weight"), BLOCK("mlp.fc1_x.bias")},
        ),
        (TIMM_EVA, ROWS_FIRST, dict(rope_coordinates="scaled", qkv_bias=False), {BLOCK("gamma_2")}),
        (
            TIMM_EVA,
            HALVES,
            dict(rope_coordinates="centred", qkv_bias=False),
            {BLOCK("mlp.fc1.bias")},
        ),
        (TIMM_EVA, None, dict(rope_frequencies="mixed"), {"rope.freqs"}),
        (
            TRANSFORMERS_DINOV3,
            HALVES,
            dict(rope_coordinates="centred", qk_norm=False),
            {
                "embeddings.register_tokens",
                "embeddings.patch_embeddings.bias",
                "norm.weight",
                "layer.1.norm2.bias",
                "layer.1.attention.v_proj.bias",
                "layer.1.attention.o_proj.weight",
                "layer.1.mlp.gate_proj.bias",
                "layer.1.mlp.up_proj.weight",
                "layer.1.mlp.down_proj.bias",
                "layer.1.layer_scale2.lambda1",
            },
        ),
    ],
)
def test_channels_of_rotary_attention_are_reordered_as_names_and_coordinates_say(
    layout, order, options, names
):
    """With real models of timm 1.0.31 and transformers 5.24.0, and with angles in float64, outputs
    were equal to 1.3e-15 and gradients to 7e-15; with angles as they round them, to 4e-8."""
    options = (
        dict(
            image_size=16,
            patch_size=4,
            embed_dim=36,
            depth=2,
            num_heads=3,
            mlp="swiglu",
            num_registers=2,
            pos_embed="rope",
            rope_frequencies="axial",
            qk_norm=True,
            layer_scale=0.1,
            rope_coordinates="index",
        )
        | options
    )
    ours = redraw(vitinit.build_model("vit_tiny", num_classes=7, **options)).state_dict()
    theirs = dict(ours)
    for name, value in ours.items() if order else ():
        if name.endswith("qkv.bias"):
            value[36:72] = 0  # their keys have none
        if ".qkv." in name:
            queries_keys = value[:72].unflatten(0, (6, 12))[:, order].flatten(0, 1)
            theirs[name] = torch.cat([queries_keys, value[72:]])
        elif "q_norm" in name or "k_norm" in name:
            theirs[name] = value[order]
    theirs = {
        name: value
        for name, value in foreign_names(theirs, layout).items()
        if not name.endswith(("k_bias", "k_proj.bias"))
    }
    assert names <= theirs.keys()
    if "rope.freqs" in names:  # times the column, then times the row
        for by, axis in enumerate((1, 0)):
            assert torch.equal(
                theirs["rope.freqs"][by, 1], ours[BLOCK("attn.rotary.frequencies")][..., axis]
            )
    assert_identical(native_tensors(theirs, options), ours)
    folded = native_tensors(theirs, options | {"layer_scale": 0.0})
    assert len(folded) == len(ours) - 4 and BLOCK("ls1.gamma") not in folded
    if order:
        assert "expected centred" in refused(
            ValueError, native_tensors, theirs, options | {"rope_coordinates": "index"}
        )
