"""ViT checkpoints of other projects: the same function here, or a one-line error that says why not.
Each original is written out, from the forward pass of its paper or repository, in float64."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from refused import refused
from same_run import assert_identical
from small_models import redraw, state_of
from torch import Tensor, nn
from written_vit import CLASSES, DEPTH, HEADS, PATCH, REGISTERS, WIDTH, drawn_tensors, written_out

import vitinit
from vitinit.base.files import CheckpointError
from vitinit.interop.weights.names import native_tensors
from vitinit.runs.transfer import load_exactly, start_from

PATH = Path("theirs.pth")

# Arguments of `drawn_tensors` and `written_out`.
LAYOUTS = {
    "DINOv2": dict(scale="ls{}.gamma", positions="class and patches", read="class", head=False),
    "DINOv2 with registers": dict(
        scale="ls{}.gamma",
        registers="register_tokens",
        positions="class and patches",
        read="class",
        head=False,
    ),
    "DINOv2 with registers, timm": dict(
        scale="ls{}.gamma", registers="reg_token", positions="patches", read="class", head=False
    ),
    "registers with positions, timm": dict(registers="reg_token", positions="all", read="class"),
    "DeiT-III": dict(scale="gamma_{}", positions="patches", read="class"),
    "DeiT-III, timm": dict(scale="ls{}.gamma", positions="patches", read="class"),
    "MAE, fine-tuned": dict(positions="all", read="mean"),
    "mean-pooled, timm": dict(class_token=False, positions="all", read="mean"),
    "mean-pooled with registers, timm": dict(
        class_token=False, registers="reg_token", positions="patches", read="mean"
    ),
    "mean-pooled with both, timm": dict(registers="reg_token", positions="all", read="mean"),
}
squares = [name for name, layout in LAYOUTS.items() if "scale" in layout or "registers" in layout]


def theirs(name: str, grid: tuple[int, int] = (5, 5)) -> dict[str, Tensor]:
    return drawn_tensors(grid=grid, **LAYOUTS[name])


def images(grid: tuple[int, int] = (5, 5)) -> Tensor:
    return torch.randn(
        2,
        3,
        PATCH[0] * grid[0],
        PATCH[1] * grid[1],
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(4),
    )


def ours(name: str, grid: tuple[int, int] = (5, 5), **sizes) -> nn.Module:
    """Our model for the layout `name`, with random weights, in float64."""
    layout = LAYOUTS[name]
    read, extra = layout["read"], bool(layout.get("registers")) * REGISTERS
    if read == "mean":
        extra += layout.get("class_token", True)  # a class token that is not pooled
    options = (
        dict(num_classes=CLASSES, pool=read, fc_norm=read == "mean", num_registers=extra) | sizes
    )
    return redraw(
        vitinit.build_model(
            "vit_tiny",
            patch_size=PATCH,
            depth=DEPTH,
            embed_dim=WIDTH,
            num_heads=HEADS,
            image_size=(PATCH[0] * grid[0], PATCH[1] * grid[1]),
            **options,
        )
    ).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", LAYOUTS)
def test_features_and_outputs_are_the_originals(name, held_against):
    """Token maps after each block, tokens before the patches, what the classifier reads, logits.
    Also on a grid that is not square, where only the model tells which tokens have positions."""
    layout, has_head = LAYOUTS[name], LAYOUTS[name].get("head", True)
    for grid in ((5, 5), (3, 11)):
        tensors, blocks = theirs(name, grid), []
        before = {key: value.clone() for key, value in tensors.items()}
        expected = written_out(tensors, images(grid), **layout)
        pooled = written_out(tensors, images(grid), **layout | {"head": False}, after_blocks=blocks)
        assert expected.std() > 0.1
        # For evaluation; a bare backbone gets a classifier that returns its input.
        exact = ours(name, grid)
        load_exactly(
            exact,
            native_tensors(
                tensors
                if has_head
                else tensors
                | {"head.weight": torch.eye(WIDTH)[:CLASSES], "head.bias": torch.zeros(CLASSES)}
            ),
            PATH,
        )
        torch.testing.assert_close(exact(images(grid)), expected[:, :CLASSES], rtol=0, atol=1e-10)
        held_against(exact(images(grid)), expected[:, :CLASSES], cases=2)
        # For fine-tuning; the classifier of a bare backbone is new.
        model, given = ours(name, grid), native_tensors(tensors)
        report = start_from(model, given, PATH, None)
        assert given.keys() == native_tensors(tensors).keys()
        assert report.resized == [] and report.dropped == []
        assert report.kept == ([] if has_head else ["head.weight", "head.bias"])
        assert all(
            torch.equal(value, exact.state_dict()[key])
            for key, value in model.state_dict().items()
            if key not in report.kept
        )
        features = model.features(images(grid), blocks=range(DEPTH))
        for found, x in zip(features.blocks, blocks, strict=True):  # x: (2, N, WIDTH)
            patches = grid[0] * grid[1]
            torch.testing.assert_close(
                found.map, x[:, -patches:].unflatten(1, grid), rtol=0, atol=1e-10
            )
            torch.testing.assert_close(found.prefix, x[:, :-patches], rtol=0, atol=1e-10)
            tokens = torch.cat([found.prefix, found.map.flatten(1, 2)], 1)
            held_against(tokens, x, cases=0)
        torch.testing.assert_close(features.pooled, pooled, rtol=0, atol=1e-10)
        assert all(torch.equal(tensors[key], value) for key, value in before.items())


@torch.no_grad()
@pytest.mark.parametrize("name", squares)
def test_resized_positions_are_those_of_the_patches_alone(name):
    """Square grids are recognised without the model's; tokens before the patches keep their own.
    The line says which tokens are taken to have no position: their number alone shows it."""
    tensors = native_tensors(theirs(name))
    model, same = ours(name, (3, 7)), ours(name)
    report = start_from(model, tensors, PATH, None)
    start_from(same, tensors, PATH, None)
    before = model.num_prefix_tokens
    lacking = {
        "all": [],
        "class and patches": ["reg_token"],
        "patches": ["cls_token", "reg_token"],
    }[LAYOUTS[name]["positions"]]
    without = ", ".join(key for key in lacking if key in tensors)
    assert report.resized == [f"pos_embed 5×5{without and f' without {without}'} → 3×7"]
    assert torch.equal(model.pos_embed[:, :before], same.pos_embed[:, :before])
    # In the checkpoint the patches' entries come last, after any others.
    image = tensors["pos_embed"][:, -25:].float().mT.unflatten(2, (5, 5))
    expected = F.interpolate(image, (3, 7), mode="bicubic", antialias=True).flatten(2).mT
    torch.testing.assert_close(model.pos_embed[:, before:].float(), expected, rtol=0, atol=1e-6)


def test_what_belongs_to_pretraining_is_dropped_and_named():
    tensors, plain, model = theirs("DeiT-III"), ours("DeiT-III"), ours("DeiT-III")
    load_exactly(plain, native_tensors(tensors), PATH)
    pretraining = {
        name: torch.zeros(1, 26, WIDTH)
        for name in (
            "mask_token",
            "decoder_embed.weight",
            "decoder_blocks.0.norm1.weight",
            "decoder_pos_embed",
            "decoder_pred.bias",
            "head.mlp.0.weight",
            "dino_head.last_layer.bias",
        )
    }
    load_exactly(model, native_tensors(tensors | pretraining), PATH)
    assert_identical(model.state_dict(), plain.state_dict())
    report = start_from(model, native_tensors(tensors | pretraining), PATH, None)
    assert report.dropped == list(pretraining)


@pytest.mark.parametrize("head", ["none", "other classes"])
def test_a_new_classifier_may_follow_another_norm(head):
    """As in MAE's main_finetune.py: the encoder's norm is dropped; fc_norm and head are new."""
    tensors = drawn_tensors(grid=(5, 5), positions="all", read="class", head=head != "none")
    if head == "other classes":
        tensors |= {"head.weight": torch.zeros(13, WIDTH), "head.bias": torch.zeros(13)}
    model = ours("MAE, fine-tuned")
    own = state_of(model)
    report = start_from(model, native_tensors(tensors), PATH, None)
    assert report.kept == ["fc_norm.weight", "fc_norm.bias", "head.weight", "head.bias"]
    assert report.dropped[:2] == ["norm.weight", "norm.bias"]
    assert all(torch.equal(model.state_dict()[key], own[key]) for key in report.kept)
    assert torch.equal(model.reg_token, tensors["cls_token"])
    same_classes = tensors | {
        "head.weight": torch.zeros(CLASSES, WIDTH),
        "head.bias": torch.zeros(CLASSES),
    }
    message = refusal(start_from, ours("MAE, fine-tuned"), same_classes)
    assert "missing: fc_norm.weight, fc_norm.bias; surplus: norm.weight, norm.bias" in message


def test_registers_may_be_added():
    tensors = drawn_tensors(grid=(5, 5), positions="all", read="class")
    model = ours("DINOv2 with registers")
    own, positions = state_of(model), tensors["pos_embed"]
    report = start_from(model, tensors, PATH, None)
    assert report.kept == ["reg_token"] and torch.equal(model.reg_token, own["reg_token"])
    assert torch.equal(
        model.pos_embed,
        torch.cat([positions[:, :1], own["pos_embed"][:, 1:6], positions[:, 1:]], dim=1),
    )


def refusal(load, model: nn.Module, tensors: dict[str, Tensor]) -> str:
    """The one-line error for the checkpoint; also checks that the model has not changed."""
    before, grid = state_of(model), (None,) * (load is start_from)
    message = refused(CheckpointError, load, model, native_tensors(tensors), PATH, *grid)
    assert_identical(model.state_dict(), before)
    assert message.startswith(f"{PATH}: ")
    return message


@pytest.mark.parametrize("load", [start_from, load_exactly])
def test_a_tensor_on_one_side_only_is_one_line_that_names_it(load):
    for stranger in ("norm_pre.weight", "blocks.1.attn.q_norm.weight", "rope.periods"):
        tensors = theirs("DeiT-III") | {stranger: torch.ones(WIDTH)}
        assert f"surplus: {stranger}" in refusal(load, ours("DeiT-III"), tensors)
    siglip = theirs("DINOv2") | {"attn_pool.latent": torch.ones(1, 1, WIDTH)}  # no classifier
    assert "surplus: attn_pool.latent" in refusal(load, ours("DINOv2"), siglip)
    for lost in ("blocks.0.norm1.bias", "norm.weight", "pos_embed", "patch_embed.proj.bias"):
        tensors = drawn_tensors(grid=(5, 5), positions="all", read="class")
        del tensors[lost]
        assert f"missing: {lost}" in refusal(load, ours("DINOv2"), tensors)


@torch.no_grad()
@pytest.mark.parametrize("name", ["DeiT-III", "DeiT-III, timm"])
def test_deit_iii_loads_unfolded_into_a_model_that_has_its_parts(name):
    """γ and the positions of patches alone are parameters, as in training by its recipe."""
    tensors, parts = theirs(name), dict(layer_scale=1e-4, prefix_positions=False)
    exact = ours(name, **parts)
    load_exactly(exact, native_tensors(tensors, parts), PATH)
    state = exact.state_dict()
    assert torch.equal(state["pos_embed"], tensors["pos_embed"])
    gamma = LAYOUTS[name]["scale"].format(2)
    assert torch.equal(state["blocks.1.ls2.gamma"], tensors[f"blocks.1.{gamma}"])
    expected = written_out(tensors, images(), **LAYOUTS[name])
    torch.testing.assert_close(exact(images()), expected, rtol=0, atol=1e-10)
