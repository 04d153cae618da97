"""ViT against torchvision's, with every parameter re-drawn, and against the published counts."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torchvision.models import VisionTransformer as TorchvisionViT

import vitinit
from vitinit.mixing import mixing_matrices, target_mass
from vitinit.models import MODELS, model_class
from vitinit.models.convert import native_tensors

SMALL = dict(patch_size=4, embed_dim=15, depth=2, num_heads=3)


def redraw(model: torch.nn.Module) -> torch.nn.Module:
    """New values for every parameter: heads that start at zero would hide any error before them."""
    generator = torch.Generator().manual_seed(0)
    model.double()
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(values * 0.2 + (parameter.ndim == 1) * 0.5)
    return model


def test_outputs_and_gradients_equal_torchvisions():
    theirs = redraw(TorchvisionViT(image_size=20, patch_size=4, num_layers=3, num_heads=3,
                                   hidden_dim=21, mlp_dim=84, num_classes=11)).eval()
    ours = vitinit.build_model("vit_tiny", num_classes=11, image_size=20, patch_size=4,
                               embed_dim=21, depth=3, num_heads=3).double()
    ours.load_state_dict(native_tensors(theirs.state_dict()))
    images = torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(1),
                         dtype=torch.float64)
    logits = ours(images)
    assert logits.std() > 0.1                        # not a comparison of zeros
    torch.testing.assert_close(logits, theirs(images), rtol=0, atol=1e-9)
    logits.square().sum().backward()
    theirs(images).square().sum().backward()
    gradients = native_tensors({name: p.grad for name, p in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name, parameters, keys, width", [
    ("vit_tiny", 5_717_416, 152, 192), ("vit_small", 22_050_664, 152, 384),
    ("vit_base", 86_567_656, 152, 768), ("vit_tiny_distilled", 5_910_800, 155, 192),
    ("vit_small_distilled", 22_436_432, 155, 384), ("vit_base_distilled", 87_338_192, 155, 768)])
def test_sizes_and_names_are_the_published_ones(name, parameters, keys, width):
    with torch.device("meta"):
        model = vitinit.build_model(name, num_classes=1000, image_size=224)
    assert sum(p.numel() for p in model.parameters()) == parameters
    state, distilled = model.state_dict(), name.endswith("distilled")
    tokens = ["cls_token", "dist_token"] if distilled else ["cls_token"]
    layers = ["patch_embed.proj", "norm", "head"] + ["head_dist"] * distilled + [
        f"blocks.{index}.{layer}" for index in range(12) for layer in
        ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    assert len(state) == keys
    assert state.keys() == {"pos_embed", *tokens} | {
        f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    for token in tokens:
        assert state[token].shape == (1, 1, width)
    assert state["pos_embed"].shape == (1, 198 if distilled else 197, width)
    assert state["patch_embed.proj.weight"].shape == (width, 3, 16, 16)
    assert state["blocks.11.attn.qkv.weight"].shape == (3 * width, width)
    assert state["blocks.0.mlp.fc1.bias"].shape == (4 * width,)


@pytest.mark.parametrize("pool, pos_embed", [("class", "learned"), ("mean", "sincos")])
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
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-6, name


def distilled_written_out(state: dict[str, torch.Tensor], images: torch.Tensor, *, depth: int,
                          heads: int) -> torch.Tensor:
    """Both heads' logits of a distilled ViT, from the state dict alone: (2, B, classes)."""
    def linear(x, name):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    kernel = state["patch_embed.proj.weight"]
    patches = F.conv2d(images, kernel, state["patch_embed.proj.bias"], stride=kernel.shape[2:])
    prefix = torch.cat([state["cls_token"], state["dist_token"]], dim=1)
    x = torch.cat([prefix.repeat(len(images), 1, 1), patches.flatten(2).mT], dim=1)
    x = x + state["pos_embed"]
    for block in (f"blocks.{index}" for index in range(depth)):
        parts = linear(norm(x, f"{block}.norm1"), f"{block}.attn.qkv").chunk(3, dim=-1)
        mixed = []
        for q, k, v in zip(*(part.chunk(heads, dim=-1) for part in parts)):
            logits = torch.einsum("bqd,bkd->bqk", q, k) / q.shape[-1] ** 0.5
            mixed.append(torch.einsum("bqk,bkd->bqd", logits.softmax(dim=-1), v))
        x = x + linear(torch.cat(mixed, dim=-1), f"{block}.attn.proj")
        x = x + linear(F.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1")),
                       f"{block}.mlp.fc2")
    x = norm(x, "norm")
    return torch.stack([linear(x[:, 0], "head"), linear(x[:, 1], "head_dist")])


def test_a_distilled_vit_is_the_mean_of_two_heads_on_two_tokens():
    model = redraw(vitinit.build_model("vit_tiny_distilled", num_classes=13, image_size=(12, 20),
                                       **SMALL))
    assert model.num_prefix_tokens == 2 and model.pos_embed.shape == (1, 17, 15)
    images = torch.randn(7, 3, 12, 20, generator=torch.Generator().manual_seed(1)).double()
    first, second = distilled_written_out(model.state_dict(), images, depth=2, heads=3)
    assert (first - second).std() > 0.1              # else either head would do
    logits = model(images)
    torch.testing.assert_close(logits, (first + second) / 2, rtol=0, atol=1e-12)
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 1e-6, name


def test_without_positions_patches_could_be_shuffled():
    """Without positions mean pooling ignores the order of patches; with them it matters."""
    model, without = (vitinit.build_model("vit_tiny", num_classes=5, image_size=(8, 12), pool="mean",
                                          pos_embed=kind, **SMALL).double() for kind in ("learned", "none"))
    weights = redraw(model).state_dict()
    without.load_state_dict(weights | {"pos_embed": without.pos_embed})
    assert not without.learns_positions
    images = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(1)).double()
    swapped = torch.cat([images[..., 4:8], images[..., :4], images[..., 8:]], dim=-1)
    assert not torch.allclose(model(images), model(swapped), atol=1e-6)
    torch.testing.assert_close(without(images), without(swapped))


def test_drop_path_drops_branches_per_image_and_block():
    model = redraw(vitinit.build_model("vit_tiny", num_classes=5, image_size=8, drop_path=0.5,
                                       **SMALL))
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    ones = torch.ones(4, 3)
    torch.testing.assert_close(model(images, ones), model(images))
    drop_path = ones.clone()
    drop_path[:, 1] = 0                              # image 1 passes no branch at all
    logits = model(images, drop_path)
    torch.testing.assert_close(logits[[0, 2]], model(images)[[0, 2]])
    bare = model.head(model.norm(model.embed(images))[:, 0])
    torch.testing.assert_close(logits[1], bare[1])
    drop_path = ones.clone()
    drop_path[3, 2] = 0                              # the MLP of the second block, of image 2
    x = model.blocks[0](model.embed(images))
    second = model.blocks[1]
    x = x + second.attn(second.norm1(x))
    torch.testing.assert_close(model(images, drop_path)[2], model.head(model.norm(x)[:, 0])[2])


def test_every_model_of_the_table_is_built_by_its_name():
    for name, (family, sizes) in MODELS.items():
        kind = model_class(family)
        with torch.device("meta"):                   # shapes and no values
            model = vitinit.build_model(name, num_classes=2, image_size=224)
        assert type(model) is kind and model.family == family and model.num_classes == 2
        assert list(model.parameters())[-1].shape == (2,), name
        # One rate for each of the two branches per block, if `forward` can drop branches at all.
        blocks = sum(sizes["depths"]) if "depths" in sizes else sizes["depth"]
        drops = "drop_path" in inspect.signature(kind.features).parameters
        assert len(model.drop_path_rates) == 2 * blocks * drops, name


# Registers, and the norm after pooling -----------------------------------------------------------


@pytest.mark.parametrize("pool, distilled, fc_norm, pos_embed", [
    ("class", False, False, "learned"), ("class", True, False, "sincos"),
    ("mean", False, False, "sincos"), ("mean", False, True, "learned")])
def test_registers_take_part_in_attention_and_are_not_read(pool, distilled, fc_norm, pos_embed):
    """arXiv 2309.16588, §2.2: they come after the other prefix tokens and before the patches."""
    model = redraw(vitinit.build_model("vit_tiny", num_classes=13, image_size=(12, 20), pool=pool,
                                       distilled=distilled, num_registers=5, fc_norm=fc_norm,
                                       pos_embed=pos_embed, **SMALL | dict(embed_dim=12)))
    before = (pool == "class") + distilled + 5
    assert model.num_prefix_tokens == before and model.pos_embed.shape == (1, before + 15, 12)
    assert model.state_dict()["reg_token"].shape == (1, 5, 12)
    norms = {"norm.weight", "fc_norm.weight"} & model.state_dict().keys()
    assert norms == {"fc_norm.weight" if fc_norm else "norm.weight"}
    if pos_embed == "sincos":
        assert (model.pos_embed[:, :before] == 0).all() and (model.pos_embed[:, before:] != 0).any()
    images = torch.randn(7, 3, 12, 20, generator=torch.Generator().manual_seed(1)).double()
    tokens = [getattr(model, name) for name in ("cls_token", "dist_token", "reg_token")
              if hasattr(model, name)]
    x = torch.cat([*(token.repeat(7, 1, 1) for token in tokens), model.patch_embed(images)], dim=1)
    x = x + model.pos_embed
    torch.testing.assert_close(model.embed(images), x)
    for block in model.blocks:
        x = block(x)
    if distilled:
        x = model.norm(x)
        expected = (model.head(x[:, 0]) + model.head_dist(x[:, 1])) / 2
    elif fc_norm:
        expected = model.head(model.fc_norm(x[:, 5:].mean(1)))
    else:
        x = model.norm(x)
        expected = model.head(x[:, 0] if pool == "class" else x[:, 5:].mean(1))
    logits = model(images)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    logits.square().sum().backward()
    assert all(p.grad.abs().max() > 1e-6 for p in model.parameters())
    model.reg_token.data.neg_()                      # they are attended to
    assert not torch.allclose(model(images), logits, atol=1e-3)


@pytest.mark.parametrize("init", ["default", "impulse", "deep_impulse"])
def test_inits_work_with_registers(init):
    """Impulses aim at patches: the attention among them is the same without registers."""
    def built(**options):
        model = vitinit.build_model("vit_tiny", num_classes=13, image_size=32, patch_size=4,
                                    embed_dim=96, depth=2, num_heads=3, pool="mean", **options)
        given = dict(target_mass=(0.9, 0.9)) if init == "deep_impulse" else {}
        vitinit.init_weights(model, init, generator=torch.Generator().manual_seed(0), **given)
        return model
    model, plain = built(num_registers=3), built()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert model(images).isfinite().all()
    assert model.reg_token.std() > 0.01 and not torch.equal(*model.reg_token[0, :2])
    masses = []
    for one in (model, plain):
        weights = mixing_matrices(one, images, blocks=[0])[0]            # (B, h, N, N)
        assert weights.shape[-1] == 64 + one.num_prefix_tokens
        masses.append(target_mass(weights, [(0, 0), (-1, 0), (0, 1)], (8, 8)))
    if init in ("impulse", "deep_impulse"):
        torch.testing.assert_close(*masses, rtol=0, atol=0.1)
        assert masses[0].min() > 10 / 64
