"""Features are the tensors that classify: held against hooks on the modules that make them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vitinit
from vitinit.models import MODELS, SwinTransformer
from vitinit.models.features import block_numbers

VIT = dict(patch_size=(4, 5), embed_dim=22, depth=3, num_heads=2)
FAMILIES = {        # name in the table, sizes for images of 12×20 pixels, tokens before the patches
    "vit": ("vit_tiny", VIT, 1),
    "vit, mean": ("vit_tiny", VIT | dict(num_registers=3, pool="mean", fc_norm=True), 3),
    "vit, distilled": ("vit_tiny_distilled", VIT | dict(num_registers=5), 7),
    "swin": ("swin_tiny", dict(patch_size=2, embed_dim=6, depths=(2, 1), num_heads=(2, 3),
                               window_size=(3, 5)), 0),
    "mixer": ("mixer_s16", dict(patch_size=4, embed_dim=14, depth=3), 0),
    "conv_mixer": ("convmixer_256_8", dict(patch_size=4, embed_dim=11, depth=3, kernel_size=3), 0),
    "dense conv_mixer": ("convmixer_256_8", dict(patch_size=4, embed_dim=11, depth=3,
                                                 dense_filters=True), 0),
    "simple_vit": ("simple_vit", dict(patch_size=4, embed_dim=28, depth=3, num_heads=2), 0),
}
each_family = pytest.mark.parametrize("family", FAMILIES)
WITH_DROP_PATH = [family for family in FAMILIES if family.startswith(("vit", "swin", "mixer"))]


def built(family: str, **sizes) -> nn.Module:
    name, own, _ = FAMILIES[family]
    model = vitinit.build_model(name, **dict(num_classes=7, image_size=(12, 20)) | own | sizes)
    vitinit.init_weights(model, "torch", generator=torch.Generator().manual_seed(0))
    return model.eval()


def drawn_images(batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 3, 12, 20, generator=torch.Generator().manual_seed(batch))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, SwinTransformer):
        return [block for stage in model.layers for block in stage.blocks]
    return list(model.blocks)


def heads_of(model: nn.Module) -> list[nn.Module]:
    return [getattr(model, name) for name in ("head", "head_dist") if hasattr(model, name)]


@each_family
@pytest.mark.parametrize("chosen", [(), (1,), (2, 0), (-1, -3), (1, 1)])
@torch.no_grad()
def test_features_are_what_leaves_the_blocks_and_enters_the_head(family, chosen):
    model, seen, read = built(family), [], []
    for block in blocks_of(model):
        block.register_forward_hook(lambda module, inputs, output: seen.append(output))
    for head in heads_of(model):
        head.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    logits = model(drawn_images())
    features = model.features(drawn_images(), blocks=chosen)
    seen, behind = seen[:3], seen[3:]
    assert all(torch.equal(one, two) for one, two in zip(seen, behind, strict=True))

    for number, tokens in zip(chosen, features.blocks, strict=True):
        whole = seen[number]
        if "conv_mixer" in family:
            whole = whole.permute(0, 2, 3, 1)
        height, width, channels = tokens.map.shape[1:]
        flat = torch.cat([tokens.prefix, tokens.map.reshape(3, height * width, channels)], dim=1)
        assert torch.equal(flat, whole.reshape(3, -1, channels))
        assert tokens.prefix.shape[1] == FAMILIES[family][2]
        # Places: the token of row r and column c is number r · width + c.
        row, column = height - 1, width - 2
        assert torch.equal(tokens.map[:, row, column],
                           flat[:, FAMILIES[family][2] + row * width + column])
    assert torch.equal(features.pooled, torch.cat(read, dim=1))
    assert torch.equal(model.classify(features), logits)


@each_family
@torch.no_grad()
def test_the_last_tokens_are_normalised_and_make_the_pooled_vector(family):
    model = built(family)
    (behind,), last, pooled = model.features(drawn_images(), blocks=[-1])
    norm = getattr(model, "norm", nn.Identity())
    for one, two in zip(behind, last):
        torch.testing.assert_close(norm(one) if one.numel() else one, two)
    if family == "vit":
        assert torch.equal(pooled, last.prefix[:, 0])
    elif family == "vit, distilled":
        assert torch.equal(pooled, torch.cat([last.prefix[:, 0], last.prefix[:, 1]], dim=1))
    else:
        mean = last.map.mean(dim=(1, 2))
        torch.testing.assert_close(pooled, model.fc_norm(mean) if family == "vit, mean" else mean)


@pytest.mark.parametrize("family", WITH_DROP_PATH)
@torch.no_grad()
def test_features_take_the_drop_path_scales_of_forward(family):
    model = built(family)
    drop_path = torch.rand(6, 3, generator=torch.Generator().manual_seed(7)) * 2
    features = model.features(drawn_images(), drop_path)
    assert torch.equal(model.classify(features), model(drawn_images(), drop_path))
    assert not torch.equal(features.pooled, model.features(drawn_images()).pooled)


@each_family
@torch.no_grad()
def test_compiled_features_classify_as_the_compiled_model(family):
    torch._dynamo.reset()
    model = built(family)

    class Both(nn.Module):
        def forward(self, images):
            return model.classify(model.features(images, blocks=[0, -1]))

    theirs = torch.compile(model, fullgraph=True, backend="eager")(drawn_images())
    assert torch.equal(torch.compile(Both(), fullgraph=True, backend="eager")(drawn_images()), theirs)


@each_family
@torch.no_grad()
def test_a_model_without_classes_gives_what_the_head_would_read(family):
    whole, bare = built(family), built(family, num_classes=0)
    assert not any(name.startswith("head") for name in bare.state_dict())
    bare.load_state_dict({name: value for name, value in whole.state_dict().items()
                          if not name.startswith("head")})
    features = whole.features(drawn_images()).pooled
    assert torch.equal(bare(drawn_images()), features)
    assert torch.equal(bare.features(drawn_images()).pooled, features)


@pytest.mark.parametrize("init", ["default", "torch"])
@each_family
def test_a_model_without_classes_is_initialised(family, init):
    model = built(family, num_classes=0)
    vitinit.init_weights(model, init, generator=torch.Generator().manual_seed(3))
    assert model(drawn_images()).isfinite().all()


@each_family
@pytest.mark.parametrize("block", [3, -4, 100])
def test_a_block_that_is_not_there_is_one_line(family, block):
    with pytest.raises(ValueError, match=f"block {block} is asked for, but the model has blocks 0…2"):
        built(family).features(drawn_images(), blocks=[block])


@each_family
def test_fewer_than_no_classes_is_one_line(family):
    name, own, _ = FAMILIES[family]
    kind, table = MODELS[name]
    with pytest.raises(ValueError, match=r"num_classes is -1, expected at least 0 \(a model without"):
        kind(num_classes=-1, image_size=(12, 20), **table | own)


def test_block_numbers_count_from_either_end():
    assert block_numbers([0, -1, 4, -5], 5) == [0, 4, 4, 0]
