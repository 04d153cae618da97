"""What all families share: features, image sizes, precision, torch.compile, torch.export, bad sizes."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import nn

import vitinit
from vitinit.models import MODELS, SwinTransformer, model_class
from vitinit.models.layers import block_numbers

VIT = dict(patch_size=(4, 5), embed_dim=22, depth=3, num_heads=2)
FAMILIES = {        # name in the table, sizes for images of 12×20 pixels, tokens before the patches
    "vit": ("vit_tiny", VIT, 1),
    "vit, mean": ("vit_tiny", VIT | dict(num_registers=3, pool="mean", fc_norm=True), 3),
    "vit, distilled": ("vit_tiny_distilled", VIT | dict(num_registers=5), 7),
    "swin": ("swin_tiny", dict(patch_size=2, embed_dim=6, depths=(2, 1), num_heads=(2, 3),
                               window_size=(3, 5)), 0),
    "mixer": ("mixer_s16", dict(patch_size=4, embed_dim=14, depth=3), 0),
    "conv_mixer": ("convmixer_256_8", dict(patch_size=4, embed_dim=11, depth=3, kernel_size=3,
                                           num_filters=5), 0),
    "simple_vit": ("simple_vit", dict(patch_size=4, embed_dim=28, depth=3, num_heads=2), 0),
}
each_family = pytest.mark.parametrize("family", FAMILIES)
ONE_EACH = ("vit, distilled", "swin", "mixer", "conv_mixer", "simple_vit")
one_of_each = pytest.mark.parametrize("family", ONE_EACH)


def built(family: str, **sizes) -> nn.Module:
    """Drawn by PyTorch's own init; for evaluation."""
    name, own, _ = FAMILIES[family]
    model = vitinit.build_model(name, **dict(num_classes=7, image_size=(12, 20)) | own | sizes)
    vitinit.init_weights(model, "torch", generator=torch.Generator().manual_seed(0))
    return model.eval()


def drawn_images(batch: int = 3, height: int = 12, width: int = 20) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(batch))


# ---------------------------------------------------------------------------------------------
# Features: held against hooks on the modules that make them
# ---------------------------------------------------------------------------------------------


@each_family
@torch.no_grad()
def test_features_are_what_leaves_the_blocks_and_enters_the_head(family):
    model, seen, read = built(family), [], []
    blocks = (model.blocks if not isinstance(model, SwinTransformer) else
              [block for stage in model.layers for block in stage.blocks])
    for block in blocks:
        block.register_forward_hook(lambda module, inputs, output: seen.append(output))
    for head in (getattr(model, name) for name in ("head", "head_dist") if hasattr(model, name)):
        head.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    logits = model(drawn_images())
    chosen = [2, 0, -1, -3, 1, 1]
    features = model.features(drawn_images(), blocks=chosen)
    assert torch.equal(features.pooled, torch.cat(read, dim=1))
    assert torch.equal(model.classify(features), logits)
    for number, tokens in zip(chosen, features.blocks, strict=True):
        whole = seen[number].permute(0, 2, 3, 1) if family == "conv_mixer" else seen[number]
        height, width, channels = tokens.map.shape[1:]
        flat = torch.cat([tokens.prefix, tokens.map.reshape(3, height * width, channels)], dim=1)
        assert torch.equal(flat, whole.reshape(3, -1, channels))
        assert tokens.prefix.shape[1] == model.num_prefix_tokens == FAMILIES[family][2]
    norm = getattr(model, "norm", nn.Identity())
    for one, two in zip(features.blocks[2], features.last):
        torch.testing.assert_close(norm(one) if one.numel() else one, two)
    if "vit" in family and model.num_prefix_tokens in (1, 7):            # the class token is read
        count = 2 if family == "vit, distilled" else 1
        assert torch.equal(features.pooled, features.last.prefix[:, :count].flatten(1))
    else:
        mean = features.last.map.mean(dim=(1, 2))
        torch.testing.assert_close(features.pooled, getattr(model, "fc_norm", nn.Identity())(mean))
    for block in (3, -4):
        with pytest.raises(ValueError, match=f"block {block} is asked for, but the model has blocks 0…2"):
            model.features(drawn_images(), blocks=[block])


@pytest.mark.parametrize("family", ["vit, distilled", "swin", "mixer"])
@torch.no_grad()
def test_features_take_the_drop_path_scales_of_forward(family):
    model = built(family)
    drop_path = torch.rand(6, 3, generator=torch.Generator().manual_seed(7)) * 2
    features = model.features(drawn_images(), drop_path)
    assert torch.equal(model.classify(features), model(drawn_images(), drop_path))
    assert not torch.equal(features.pooled, model.features(drawn_images()).pooled)


@each_family
@torch.no_grad()
def test_a_model_without_classes_gives_what_the_head_would_read(family):
    whole, bare = built(family), built(family, num_classes=0)
    assert not any(name.startswith("head") for name in bare.state_dict())
    bare.load_state_dict({name: value for name, value in whole.state_dict().items()
                          if not name.startswith("head")})
    assert torch.equal(bare(drawn_images()), whole.features(drawn_images()).pooled)
    vitinit.init_weights(bare, "default", generator=torch.Generator().manual_seed(3))
    assert bare(drawn_images()).isfinite().all()
    with pytest.raises(ValueError, match=r"num_classes is -1, expected at least 0 \(a model without"):
        built(family, num_classes=-1)


def test_block_numbers_count_from_either_end():
    assert block_numbers([0, -1, 4, -5], 5) == [0, 4, 4, 0]


# ---------------------------------------------------------------------------------------------
# Images
# ---------------------------------------------------------------------------------------------


@each_family
def test_images_of_another_size_or_shape_are_one_line(family):
    model = built(family)
    for size in ((20, 12), (24, 20), (11, 20), (12, 21)):
        expected = f"the model was built for images of 12×20 pixels and got {size[0]}×{size[1]}"
        if family == "conv_mixer":                   # its weights know no size
            if size[0] % 4 == size[1] % 4 == 0:
                assert model(drawn_images(2, *size)).shape == (2, 7)
                continue
            expected = f"patches of 4×4 pixels do not tile an image of {size[0]}×{size[1]};"
        with pytest.raises(ValueError) as caught:
            model(drawn_images(2, *size))
        assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)
    for shape in ((3, 12, 20), (2, 1, 12, 20), (1, 2, 3, 12, 20)):
        with pytest.raises(ValueError) as caught:
            model(torch.zeros(shape))
        message = str(caught.value)
        assert message.startswith("the model takes images of shape (B, 3, ") and "\n" not in message
        assert message.endswith(f"and got {shape}")


# ---------------------------------------------------------------------------------------------
# Precision, compiling, exporting, full size
# ---------------------------------------------------------------------------------------------


@each_family
@torch.no_grad()
def test_a_model_in_half_precision_is_near_itself(family):
    full = built(family)(drawn_images())
    for dtype, near in ((torch.float16, 0.01), (torch.bfloat16, 0.06)):
        half = built(family).to(dtype)(drawn_images().to(dtype))
        assert half.dtype == dtype
        assert 0 < (half - full).norm() / full.norm() < near


@one_of_each
@torch.no_grad()
def test_a_compiled_model_is_one_graph_also_where_it_returns_features(family):
    torch._dynamo.reset()
    model = built(family)

    class Both(nn.Module):
        def forward(self, images):
            return model.classify(model.features(images, blocks=[0, -1])), model(images)

    for logits in torch.compile(Both(), fullgraph=True, backend="eager")(drawn_images()):
        torch.testing.assert_close(logits, model(drawn_images()), rtol=0, atol=1e-6)


@one_of_each
@torch.no_grad()
def test_an_exported_model_takes_any_batch(family):
    model = built(family)
    program = torch.export.export(model, (drawn_images(),), strict=False,
                                  dynamic_shapes={"images": {0: torch.export.Dim("batch")}})
    for count in (1, 7):
        images = drawn_images(count)
        torch.testing.assert_close(program.module()(images), model(images), rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------------
# Sizes that cannot be
# ---------------------------------------------------------------------------------------------

EXTREMES = (0, -1, 2**31, 2**62, 2**63, 10**30)
FRACTIONS = (0.0, -1.0, 1e-9, math.nan, math.inf, -math.inf, 1e308, 0.01)


@pytest.mark.filterwarnings("error")                 # of layers without a single channel
@one_of_each
def test_every_numeric_option_builds_or_is_one_line(family):
    name, own, _ = FAMILIES[family]
    family, table = MODELS[name]
    kind = model_class(family)
    fine = table | own | dict(num_classes=7, image_size=(12, 20))
    tried = 0
    for option, parameter in inspect.signature(kind).parameters.items():
        if parameter.annotation in ("bool", "Reading") or "Literal" in parameter.annotation:
            continue
        for extreme in FRACTIONS if parameter.annotation == "float" else EXTREMES:
            values = {extreme} if not parameter.annotation.startswith("tuple") else set()
            if "tuple" in parameter.annotation:
                values |= {(extreme, 4), (4, extreme)}
            for value in values:
                tried += 1
                try:
                    vitinit.build_model(name, **fine | {option: value})
                except ValueError as error:
                    message = str(error)
                    assert "\n" not in message and len(message) <= 250, (option, value, message)
    assert tried > 50


@pytest.mark.parametrize("family, sizes, message", [
    ("vit", dict(mlp_ratio=0.01), "mlp_ratio is 0.01, which leaves an MLP of 22 channels no hidden "
                                  "one; expected at least 1 / 22"),
    ("vit", dict(mlp_ratio=math.nan), "mlp_ratio is nan, expected more than 0"),
    ("mixer", dict(tokens_ratio=0.05), "tokens_ratio is 0.05, which leaves an MLP of 14 channels"),
    ("swin", dict(depths=(2, 10**9)), r"swin_tiny with these sizes has weights of [\d,]+ GiB"),
    ("mixer", dict(embed_dim=10**6), r"mixer_s16 with these sizes has weights of [\d,]+ GiB, and this "),
    ("vit", dict(num_registers=-1), "num_registers is -1, expected at least 0"),
    ("vit", dict(fc_norm=True), 'fc_norm stands after mean pooling; pool is "class", expected "mean"'),
    ("vit", dict(distilled=True, pool="mean"), 'beside a class token; pool is "mean", expected "class"'),
    ("vit", dict(pool="max"), "pool is 'max'"),
    ("vit", dict(num_heads=7), "does not divide into num_heads 7"),
    ("mixer", dict(drop_path=1.0), "drop_path is 1.0, expected 0 ≤ drop_path < 1"),
])
def test_the_line_names_the_option_and_what_would_do(family, sizes, message):
    with pytest.raises(ValueError, match=message):
        built(family, **sizes)


def test_a_ratio_of_exactly_one_hidden_channel_builds():
    assert built("vit", mlp_ratio=1 / 22).blocks[0].mlp.fc1.out_features == 1


def test_an_unknown_name_lists_the_near_ones():
    with pytest.raises(ValueError, match="no model 'vit_tinny'; near: vit_tiny"):
        vitinit.build_model("vit_tinny", num_classes=10, image_size=32)


def test_building_touches_no_random_numbers_but_the_layers_own():
    """The sizes are tried out without storage first, which draws nothing."""
    name, sizes, _ = FAMILIES["vit"]
    torch.manual_seed(5)
    ours = vitinit.build_model(name, num_classes=7, image_size=(12, 20), **sizes)
    torch.manual_seed(5)
    family, table = MODELS[name]
    theirs = model_class(family)(num_classes=7, image_size=(12, 20), **table | sizes)
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key
