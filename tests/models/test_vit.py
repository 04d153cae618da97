"""ViT against torchvision's, with every parameter re-drawn, and against the published counts."""

from __future__ import annotations

import pytest
import torch
from torchvision.models import VisionTransformer as TorchvisionViT

import vitinit
from vitinit.models import MODELS

SMALL = dict(patch_size=4, embed_dim=15, depth=2, num_heads=3)


def redraw(model: torch.nn.Module) -> torch.nn.Module:
    """New values for every parameter: heads that start at zero would hide any error before them."""
    generator = torch.Generator().manual_seed(0)
    model.double()
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(values * 0.2 + (parameter.ndim == 1) * 0.5)
    return model


def from_torchvision(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """torchvision's names as ours."""
    names = {"class_token": "cls_token", "conv_proj": "patch_embed.proj",
             "encoder.pos_embedding": "pos_embed", "encoder.layers.encoder_layer_": "blocks.",
             "self_attention.in_proj_": "attn.qkv.", "self_attention.out_proj": "attn.proj",
             "ln_1": "norm1", "ln_2": "norm2", "mlp.0": "mlp.fc1", "mlp.3": "mlp.fc2",
             "encoder.ln": "norm", "heads.head": "head"}
    converted = {}
    for name, value in state.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        converted[name] = value
    return converted


def test_outputs_and_gradients_equal_torchvisions():
    theirs = redraw(TorchvisionViT(image_size=20, patch_size=4, num_layers=3, num_heads=3,
                                   hidden_dim=21, mlp_dim=84, num_classes=11)).eval()
    ours = vitinit.build_model("vit_tiny", num_classes=11, image_size=20, patch_size=4,
                               embed_dim=21, depth=3, num_heads=3).double()
    ours.load_state_dict(from_torchvision(theirs.state_dict()))
    images = torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(1),
                         dtype=torch.float64)
    logits = ours(images)
    assert logits.std() > 0.1                        # not a comparison of zeros
    torch.testing.assert_close(logits, theirs(images), rtol=0, atol=1e-9)
    logits.square().sum().backward()
    theirs(images).square().sum().backward()
    gradients = from_torchvision({name: p.grad for name, p in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-9)


def test_vit_base_equals_torchvisions_vit_b_16():
    from torchvision.models import vit_b_16
    theirs = vit_b_16(weights=None).eval().double()
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():            # variance-preserving, at this size
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(values / (parameter[0].numel() if parameter.ndim > 1 else 4) ** 0.5)
    ours = vitinit.build_model("vit_base", num_classes=1000, image_size=224).double()
    ours.load_state_dict(from_torchvision(theirs.state_dict()))
    images = torch.randn(1, 3, 224, 224, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        logits = ours(images)
        assert logits.std() > 0.1
        torch.testing.assert_close(logits, theirs(images), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name, parameters", [
    ("vit_tiny", 5_717_416), ("vit_small", 22_050_664), ("vit_base", 86_567_656)])
def test_sizes_are_the_published_ones(name, parameters):
    model = vitinit.build_model(name, num_classes=1000, image_size=224)
    assert sum(p.numel() for p in model.parameters()) == parameters
    state = model.state_dict()
    assert len(state) == 152
    width = state["cls_token"].shape[-1]
    assert state["cls_token"].shape == (1, 1, width)
    assert state["pos_embed"].shape == (1, 197, width)
    assert state["patch_embed.proj.weight"].shape == (width, 3, 16, 16)
    assert state["blocks.11.attn.qkv.weight"].shape == (3 * width, width)
    assert state["blocks.0.mlp.fc1.bias"].shape == (4 * width,)
    assert {name.split(".")[0] for name in state} == {"cls_token", "pos_embed", "patch_embed",
                                                      "blocks", "norm", "head"}


def test_fewer_classes_take_away_only_rows_of_the_head():
    model = vitinit.build_model("vit_tiny", num_classes=37, image_size=224)
    assert sum(p.numel() for p in model.parameters()) == 5_717_416 - (1000 - 37) * (192 + 1)


@pytest.mark.parametrize("pool", ["class", "mean"])
@pytest.mark.parametrize("pos_embed", ["learned", "sincos"])
def test_rectangular_images_and_both_poolings(pool, pos_embed):
    model = redraw(vitinit.build_model("vit_tiny", num_classes=13, image_size=(12, 20), pool=pool,
                                       pos_embed=pos_embed, **SMALL | dict(embed_dim=12)))
    tokens = 15 + (pool == "class")
    assert model.grid == (3, 5) and model.pos_embed.shape == (1, tokens, 12)
    assert model.learns_positions == (pos_embed == "learned")
    assert "pos_embed" in model.state_dict()
    images = torch.randn(7, 3, 12, 20, generator=torch.Generator().manual_seed(1)).double()
    x = model.embed(images)
    for block in model.blocks:
        x = block(x)
    x = model.norm(x)
    pooled = x[:, 0] if pool == "class" else x.mean(1)
    torch.testing.assert_close(model(images), model.head(pooled))
    model(images).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_without_positions_patches_could_be_shuffled():
    """Mean pooling with a zero code cannot see the order of patches; a code makes it matter."""
    model = redraw(vitinit.build_model("vit_tiny", num_classes=5, image_size=(8, 12), pool="mean",
                                       **SMALL))
    images = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(1)).double()
    swapped = torch.cat([images[..., 4:8], images[..., :4], images[..., 8:]], dim=-1)
    assert not torch.allclose(model(images), model(swapped), atol=1e-6)
    model.pos_embed.data.zero_()
    torch.testing.assert_close(model(images), model(swapped))


def test_keep_drops_branches_per_image_and_block():
    model = redraw(vitinit.build_model("vit_tiny", num_classes=5, image_size=8, drop_path=0.5,
                                       **SMALL))
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    ones = torch.ones(4, 3)
    torch.testing.assert_close(model(images, ones), model(images))
    keep = ones.clone()
    keep[:, 1] = 0                                   # image 1 passes no branch at all
    logits = model(images, keep)
    torch.testing.assert_close(logits[[0, 2]], model(images)[[0, 2]])
    torch.testing.assert_close(logits[1], model.head(model.pooled(model.embed(images)))[1])
    keep = ones.clone()
    keep[3, 2] = 0                                   # the MLP of the second block, of image 2
    x = model.blocks[0](model.embed(images))
    second = model.blocks[1]
    x = x + second.attn(second.norm1(x))
    torch.testing.assert_close(model(images, keep)[2], model.head(model.pooled(x))[2])


def test_qkv_bias_can_be_left_out():
    model = vitinit.build_model("vit_tiny", num_classes=5, image_size=8, qkv_bias=False, **SMALL)
    assert "blocks.0.attn.qkv.bias" not in model.state_dict()


def test_an_unknown_name_lists_the_near_ones():
    with pytest.raises(ValueError, match="no model 'vit_tinny'; near: vit_tiny"):
        vitinit.build_model("vit_tinny", num_classes=10, image_size=32)


@pytest.mark.parametrize("sizes, message", [
    (dict(drop_path=1.0), "drop_path is 1.0"), (dict(pool="max"), "pool is 'max'"),
    (dict(patch_size=5), "do not tile"), (dict(num_heads=7), "does not divide into num_heads 7")])
def test_impossible_sizes_are_errors(sizes, message):
    with pytest.raises(ValueError, match=message):
        vitinit.build_model("vit_tiny", num_classes=10, image_size=32, **sizes)


def test_every_model_of_the_table_is_built_by_its_name():
    for name, (kind, _) in MODELS.items():
        assert type(vitinit.build_model(name, num_classes=2, image_size=32, depth=1)) is kind
