"""ViT checkpoints of other projects: the same function here, or a one-line error that says why not.

Each original is written out, from the forward pass of its paper or repository, in float64.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from redrawn import redraw, snapshot
from refused import refused
from same_run import assert_identical
from torch import Tensor, nn

import vitinit
from vitinit.models.convert import native_tensors
from vitinit.train.checkpoint import CheckpointError
from vitinit.train.transfer import load_exactly, start_from

PATH = Path("theirs.pth")
WIDTH, HEADS, DEPTH, CLASSES, REGISTERS = 21, 3, 2, 7, 5
HIDDEN = 4 * WIDTH
PATCH = (2, 3)

# Layout: which tokens there are, to which of them positions are added, the name of LayerScale, and
# what the classifier reads.
LAYOUTS = {
    "DINOv2": dict(scale="ls{}.gamma", positions="class and patches", read="class", head=False),
    "DINOv2 with registers": dict(scale="ls{}.gamma", registers="register_tokens",
                                  positions="class and patches", read="class", head=False),
    "DINOv2 with registers, timm": dict(scale="ls{}.gamma", registers="reg_token",
                                        positions="patches", read="class", head=False),
    "registers with positions, timm": dict(registers="reg_token", positions="all", read="class"),
    "DeiT-III": dict(scale="gamma_{}", positions="patches", read="class"),
    "DeiT-III, timm": dict(scale="ls{}.gamma", positions="patches", read="class"),
    "MAE, fine-tuned": dict(positions="all", read="mean"),
    "mean-pooled, timm": dict(class_token=False, positions="all", read="mean"),
    "mean-pooled with registers, timm": dict(class_token=False, registers="reg_token",
                                             positions="patches", read="mean"),
    "mean-pooled with both, timm": dict(registers="reg_token", positions="all", read="mean"),
}
squares = [name for name, layout in LAYOUTS.items() if "scale" in layout or "registers" in layout]


def theirs(name: str, grid: tuple[int, int] = (5, 5)) -> dict[str, Tensor]:
    """A checkpoint of the layout `name`, with random tensors."""
    return drawn_tensors(grid=grid, **LAYOUTS[name])


def drawn_tensors(*, positions: str, read: str, grid: tuple[int, int], scale: str = "",
                  registers: str = "", class_token: bool = True, head: bool = True
                  ) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    entries = {"all": class_token + REGISTERS * bool(registers), "class and patches": 1,
               "patches": 0}[positions]
    shapes = {"cls_token": (1, 1, WIDTH)} if class_token else {}
    shapes |= {"pos_embed": (1, entries + grid[0] * grid[1], WIDTH),
               "patch_embed.proj.weight": (WIDTH, 3, *PATCH), "patch_embed.proj.bias": (WIDTH,)}
    shapes |= {registers: (1, REGISTERS, WIDTH)} if registers else {}
    for block in range(DEPTH):
        layers = {"norm1": (WIDTH,), "attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH),
                  "norm2": (WIDTH,), "mlp.fc1": (HIDDEN, WIDTH), "mlp.fc2": (WIDTH, HIDDEN)}
        for layer, shape in layers.items():
            shapes[f"blocks.{block}.{layer}.weight"] = shape
            shapes[f"blocks.{block}.{layer}.bias"] = shape[:1]
        shapes |= {f"blocks.{block}.{scale.format(branch)}": (WIDTH,) for branch in "12" if scale}
    norm = "norm" if read == "class" else "fc_norm"
    shapes |= {f"{norm}.weight": (WIDTH,), f"{norm}.bias": (WIDTH,)}
    shapes |= {"head.weight": (CLASSES, WIDTH), "head.bias": (CLASSES,)} if head else {}
    return {key: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4
            for key, shape in shapes.items()}


def images(grid: tuple[int, int] = (5, 5)) -> Tensor:
    return torch.randn(2, 3, PATCH[0] * grid[0], PATCH[1] * grid[1], dtype=torch.float64,
                       generator=torch.Generator().manual_seed(4))


def written_out(tensors: dict[str, Tensor], images: Tensor, *, positions: str, read: str,
                scale: str = "", registers: str = "", class_token: bool = True, head: bool = True,
                after_blocks: list[Tensor] | None = None) -> Tensor:
    """The original model's logits, or, without a classifier, what one would read.

    after_blocks: a list to which the tokens (B, N, C) after each block are appended.
    """
    def norm(x: Tensor, layer: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return scaled * tensors[f"{layer}.weight"] + tensors[f"{layer}.bias"]

    def linear(x: Tensor, layer: str) -> Tensor:
        return x @ tensors[f"{layer}.weight"].T + tensors[f"{layer}.bias"]

    patches = F.conv2d(images, tensors["patch_embed.proj.weight"],
                       tensors["patch_embed.proj.bias"], stride=PATCH).flatten(2).mT
    one = [tensors["cls_token"].repeat(2, 1, 1)] if class_token else []
    some = [tensors[registers].repeat(2, 1, 1)] if registers else []
    if positions == "patches":                       # DeiT-III, timm's no_embed_class
        x = torch.cat([*one, *some, patches + tensors["pos_embed"]], dim=1)
    elif positions == "class and patches":           # DINOv2: registers are inserted afterwards
        x = torch.cat([*one, patches], dim=1) + tensors["pos_embed"]
        x = torch.cat([x[:, :1], *some, x[:, 1:]], dim=1)
    else:
        x = torch.cat([*one, *some, patches], dim=1) + tensors["pos_embed"]

    for block in (f"blocks.{index}" for index in range(DEPTH)):
        gammas = [tensors[f"{block}.{scale.format(branch)}"] if scale else 1.0 for branch in "12"]
        q, k, v = linear(norm(x, f"{block}.norm1"), f"{block}.attn.qkv").split(WIDTH, dim=-1)
        mixed = []
        for part in torch.arange(WIDTH).chunk(HEADS):
            logits = q[..., part] @ k[..., part].mT / len(part) ** 0.5
            mixed.append(logits.softmax(-1) @ v[..., part])
        x = x + gammas[0] * linear(torch.cat(mixed, dim=-1), f"{block}.attn.proj")
        hidden = linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1")
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
        x = x + gammas[1] * linear(hidden, f"{block}.mlp.fc2")
        if after_blocks is not None:
            after_blocks.append(x)

    if read == "class":
        x = norm(x, "norm")[:, 0]
    else:                                            # tokens before the patches are not averaged
        x = norm(x[:, x.shape[1] - patches.shape[1]:].mean(1), "fc_norm")
    return linear(x, "head") if head else x


def ours(name: str, grid: tuple[int, int] = (5, 5), **sizes) -> nn.Module:
    """Our model for the layout `name`, with random weights, in float64."""
    layout = LAYOUTS[name]
    read, extra = layout["read"], bool(layout.get("registers")) * REGISTERS
    if read == "mean":
        extra += layout.get("class_token", True)     # a class token that is not pooled
    options = dict(num_classes=CLASSES, pool=read, fc_norm=read == "mean",
                   num_registers=extra) | sizes
    return redraw(vitinit.build_model(
        "vit_tiny", patch_size=PATCH, depth=DEPTH, embed_dim=WIDTH, num_heads=HEADS,
        image_size=(PATCH[0] * grid[0], PATCH[1] * grid[1]), **options)).eval()


# The same function ----------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", LAYOUTS)
def test_features_and_outputs_are_the_originals(name):
    """Token maps after each block, tokens before the patches, what the classifier reads, logits.

    Also on a grid that is not square, where only the model tells which tokens have positions.
    """
    layout, has_head = LAYOUTS[name], LAYOUTS[name].get("head", True)
    for grid in ((5, 5), (3, 11)):
        tensors, blocks = theirs(name, grid), []
        before = {key: value.clone() for key, value in tensors.items()}
        expected = written_out(tensors, images(grid), **layout)
        pooled = written_out(tensors, images(grid), **layout | {"head": False}, after_blocks=blocks)
        assert expected.std() > 0.1
        # For evaluation; a bare backbone gets a classifier that returns its input.
        exact = ours(name, grid)
        load_exactly(exact, native_tensors(tensors if has_head else tensors | {
            "head.weight": torch.eye(WIDTH)[:CLASSES], "head.bias": torch.zeros(CLASSES)}), PATH)
        torch.testing.assert_close(exact(images(grid)), expected[:, :CLASSES], rtol=0, atol=1e-10)
        # For fine-tuning; the classifier of a bare backbone is new.
        model, given = ours(name, grid), native_tensors(tensors)
        report = start_from(model, given, PATH, None)
        assert given.keys() == native_tensors(tensors).keys()
        assert report.resized == [] and report.dropped == []
        assert report.kept == ([] if has_head else ["head.weight", "head.bias"])
        assert all(torch.equal(value, exact.state_dict()[key])
                   for key, value in model.state_dict().items() if key not in report.kept)
        features = model.features(images(grid), blocks=range(DEPTH))
        for found, x in zip(features.blocks, blocks, strict=True):       # x: (2, N, WIDTH)
            patches = grid[0] * grid[1]
            torch.testing.assert_close(found.map, x[:, -patches:].unflatten(1, grid), rtol=0,
                                       atol=1e-10)
            torch.testing.assert_close(found.prefix, x[:, :-patches], rtol=0, atol=1e-10)
        torch.testing.assert_close(features.pooled, pooled, rtol=0, atol=1e-10)
        assert all(torch.equal(tensors[key], value) for key, value in before.items())


@torch.no_grad()
@pytest.mark.parametrize("name", squares)
def test_resized_positions_are_those_of_the_patches_alone(name):
    """Square grids are recognised without the model's; tokens before the patches keep their own.

    The line says which tokens are taken to have no position: their number alone shows it.
    """
    tensors = native_tensors(theirs(name))
    model, same = ours(name, (3, 7)), ours(name)
    report = start_from(model, tensors, PATH, None)
    start_from(same, tensors, PATH, None)
    before = model.num_prefix_tokens
    lacking = {"all": [], "class and patches": ["reg_token"],
               "patches": ["cls_token", "reg_token"]}[LAYOUTS[name]["positions"]]
    without = ", ".join(key for key in lacking if key in tensors)
    assert report.resized == [f"pos_embed 5×5{without and f' without {without}'} → 3×7"]
    assert torch.equal(model.pos_embed[:, :before], same.pos_embed[:, :before])
    # In the checkpoint the patches' entries come last, after any others.
    image = tensors["pos_embed"][:, -25:].float().mT.unflatten(2, (5, 5))
    expected = F.interpolate(image, (3, 7), mode="bicubic", antialias=True).flatten(2).mT
    torch.testing.assert_close(model.pos_embed[:, before:].float(), expected, rtol=0, atol=1e-6)


# What no forward pass reads, and what may be new ----------------------------------------------


def test_what_belongs_to_pretraining_is_dropped_and_named():
    tensors, plain, model = theirs("DeiT-III"), ours("DeiT-III"), ours("DeiT-III")
    load_exactly(plain, native_tensors(tensors), PATH)
    pretraining = {name: torch.zeros(1, 26, WIDTH) for name in (
        "mask_token", "decoder_embed.weight", "decoder_blocks.0.norm1.weight",
        "decoder_pos_embed", "decoder_pred.bias", "head.mlp.0.weight", "dino_head.last_layer.bias")}
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
    own = snapshot(model)
    report = start_from(model, native_tensors(tensors), PATH, None)
    assert report.kept == ["fc_norm.weight", "fc_norm.bias", "head.weight", "head.bias"]
    assert report.dropped[:2] == ["norm.weight", "norm.bias"]
    assert all(torch.equal(model.state_dict()[key], own[key]) for key in report.kept)
    assert torch.equal(model.reg_token, tensors["cls_token"])
    same_classes = tensors | {"head.weight": torch.zeros(CLASSES, WIDTH),
                              "head.bias": torch.zeros(CLASSES)}
    message = refusal(start_from, ours("MAE, fine-tuned"), same_classes)
    assert "missing: fc_norm.weight, fc_norm.bias; surplus: norm.weight, norm.bias" in message


def test_registers_may_be_added():
    tensors = drawn_tensors(grid=(5, 5), positions="all", read="class")
    model = ours("DINOv2 with registers")
    own, positions = snapshot(model), tensors["pos_embed"]
    report = start_from(model, tensors, PATH, None)
    assert report.kept == ["reg_token"] and torch.equal(model.reg_token, own["reg_token"])
    assert torch.equal(model.pos_embed, torch.cat([
        positions[:, :1], own["pos_embed"][:, 1:6], positions[:, 1:]], dim=1))


# What is refused ------------------------------------------------------------------------------


def refusal(load, model: nn.Module, tensors: dict[str, Tensor]) -> str:
    """The one-line error for the checkpoint; also checks that the model has not changed."""
    before, grid = snapshot(model), (None,) * (load is start_from)
    message = refused(CheckpointError, load, model, native_tensors(tensors), PATH, *grid)
    assert_identical(model.state_dict(), before)
    assert message.startswith(f"{PATH}: ")
    return message


@pytest.mark.parametrize("load", [start_from, load_exactly])
def test_a_tensor_on_one_side_only_is_one_line_that_names_it(load):
    for stranger in ("norm_pre.weight", "blocks.1.attn.q_norm.weight", "blocks.0.gamma_1_1",
                     "blocks.0.attn.relative_position_bias_table", "rope.periods"):
        tensors = theirs("DeiT-III") | {stranger: torch.ones(WIDTH)}
        assert f"surplus: {stranger}" in refusal(load, ours("DeiT-III"), tensors)
    siglip = theirs("DINOv2") | {"attn_pool.latent": torch.ones(1, 1, WIDTH)}   # no classifier
    assert "surplus: attn_pool.latent" in refusal(load, ours("DINOv2"), siglip)
    for lost in ("blocks.0.norm1.bias", "norm.weight", "pos_embed", "patch_embed.proj.bias"):
        tensors = drawn_tensors(grid=(5, 5), positions="all", read="class")
        del tensors[lost]
        assert f"missing: {lost}" in refusal(load, ours("DINOv2"), tensors)
