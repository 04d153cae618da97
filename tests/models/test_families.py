"""What all families share: image sizes, half precision, torch.compile and torch.export, bad sizes."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import nn

import vitinit
from vitinit.models import MODELS

VIT = dict(patch_size=(4, 5), embed_dim=22, depth=1, num_heads=2)
FAMILIES = {        # name in the table, sizes for images of 12×20 pixels
    "vit": ("vit_tiny", VIT),
    "vit, registers": ("vit_tiny", VIT | dict(num_registers=3, pool="mean", fc_norm=True)),
    "vit, distilled": ("vit_tiny_distilled", VIT | dict(num_registers=5)),
    "swin": ("swin_tiny", dict(patch_size=2, embed_dim=6, depths=(2, 1), num_heads=(2, 3),
                               window_size=(3, 5))),
    "mixer": ("mixer_s16", dict(patch_size=4, embed_dim=14, depth=1)),
    "conv_mixer": ("convmixer_256_8", dict(patch_size=4, embed_dim=11, depth=1, kernel_size=3)),
    "shared conv_mixer": ("convmixer_256_8", dict(patch_size=4, embed_dim=11, depth=1, num_filters=3,
                                                  softmax_filters=True)),
    "dense conv_mixer": ("convmixer_256_8", dict(patch_size=4, embed_dim=11, depth=1,
                                                 dense_filters=True)),
    "simple_vit": ("simple_vit", dict(patch_size=4, embed_dim=28, depth=1, num_heads=2)),
    "simple_vit, positions": ("simple_vit", dict(patch_size=4, embed_dim=28, depth=1, num_heads=2,
                                                 reads="position", input_pos_embed=False)),
}
each_family = pytest.mark.parametrize("family", FAMILIES)


def built(family: str, **sizes) -> nn.Module:
    """Drawn by PyTorch's own init; for evaluation."""
    name, own = FAMILIES[family]
    model = vitinit.build_model(name, num_classes=7, image_size=(12, 20), **own | sizes)
    vitinit.init_weights(model, "torch", generator=torch.Generator().manual_seed(0))
    return model.eval()


def drawn_images(batch: int, height: int = 12, width: int = 20) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(batch))


# ---------------------------------------------------------------------------------------------
# Images
# ---------------------------------------------------------------------------------------------


@each_family
@pytest.mark.parametrize("size", [(20, 12), (24, 20), (12, 40), (11, 20), (12, 21)])
def test_images_of_another_size_are_one_line_that_names_both(family, size):
    model = built(family)
    if family in ("conv_mixer", "shared conv_mixer"):        # their weights know no size
        if size[0] % 4 == size[1] % 4 == 0:
            assert model(drawn_images(2, *size)).shape == (2, 7)
            return
        expected = f"patches of 4×4 pixels do not tile an image of {size[0]}×{size[1]};"
    else:
        expected = f"the model was built for images of 12×20 pixels and got {size[0]}×{size[1]}"
    with pytest.raises(ValueError) as caught:
        model(drawn_images(2, *size))
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


@each_family
@pytest.mark.parametrize("shape", [(3, 12, 20), (2, 1, 12, 20), (2, 12, 20, 3), (1, 2, 3, 12, 20)])
def test_images_of_another_shape_are_one_line(family, shape):
    with pytest.raises(ValueError) as caught:
        built(family)(torch.zeros(shape))
    message = str(caught.value)
    assert message.startswith("the model takes images of shape (B, 3, ") and "\n" not in message
    assert message.endswith(f"and got {shape}")


# ---------------------------------------------------------------------------------------------
# Precision, compiling, exporting
# ---------------------------------------------------------------------------------------------


@each_family
@pytest.mark.parametrize("dtype, near", [(torch.float16, 0.01), (torch.bfloat16, 0.06)])
def test_a_model_in_half_precision_is_near_itself(family, dtype, near):
    model, images = built(family), drawn_images(3)
    with torch.no_grad():
        full = model(images)
        half = model.to(dtype)(images.to(dtype))
    assert half.dtype == dtype
    assert 0 < (half - full).norm() / full.norm() < near


@each_family
def test_a_compiled_model_is_one_graph(family):
    torch._dynamo.reset()
    model = built(family)
    compiled, images = torch.compile(model, fullgraph=True, backend="eager"), drawn_images(3)
    torch.testing.assert_close(compiled(images), model(images), rtol=0, atol=1e-6)


@each_family
def test_an_exported_model_takes_any_batch(family):
    model = built(family)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (drawn_images(3),), strict=False,
                                  dynamic_shapes={"images": {0: batch}})
    with torch.no_grad():
        for count in (1, 2, 7):
            images = drawn_images(count)
            torch.testing.assert_close(program.module()(images), model(images), rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------------
# Sizes that cannot be
# ---------------------------------------------------------------------------------------------

EXTREMES = (0, -1, 2**31, 2**62, 2**63, 10**30)
FRACTIONS = (0.0, -1.0, 1e-9, math.nan, math.inf, -math.inf, 1e308, 0.01)
ONE_EACH = ("vit, distilled", "swin", "mixer", "conv_mixer", "dense conv_mixer", "simple_vit")


@pytest.mark.filterwarnings("error")                 # of layers without a single channel
@pytest.mark.parametrize("family", ONE_EACH)
def test_every_numeric_option_builds_or_is_one_line(family):
    name, own = FAMILIES[family]
    kind, table = MODELS[name]
    fine = table | own | dict(num_classes=7, image_size=(12, 20))
    tried = 0
    for option, parameter in inspect.signature(kind).parameters.items():
        if parameter.annotation in ("bool",) or "Literal" in parameter.annotation \
                or parameter.annotation == "Reading":
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
    ("swin", dict(mlp_ratio=0.1), "mlp_ratio is 0.1, which leaves an MLP of 6 channels"),
    ("mixer", dict(tokens_ratio=0.05), "tokens_ratio is 0.05, which leaves an MLP of 14 channels"),
    ("mixer", dict(channels_ratio=0.05), "channels_ratio is 0.05, which leaves an MLP of 14"),
    ("simple_vit", dict(mlp_ratio=0.02), "mlp_ratio is 0.02, which leaves an MLP of 28 channels"),
    ("simple_vit", dict(logit_scale=math.inf), "logit_scale inf"),
    ("vit", dict(depth=10**9), r"vit_tiny with these sizes has weights of [\d,]+ GiB, and this "),
    ("swin", dict(depths=(2, 10**9)), r"swin_tiny with these sizes has weights of [\d,]+ GiB"),
    ("mixer", dict(embed_dim=10**6), r"mixer_s16 with these sizes has weights of [\d,]+ GiB"),
    ("vit", dict(num_registers=-1), "num_registers is -1, expected at least 0"),
    ("vit", dict(fc_norm=True), 'fc_norm stands after mean pooling; pool is "class", expected "mean"'),
])
def test_the_line_names_the_option_and_what_would_do(family, sizes, message):
    with pytest.raises(ValueError, match=message):
        built(family, **sizes)


def test_a_ratio_of_exactly_one_hidden_channel_builds():
    assert built("vit", mlp_ratio=1 / 22).blocks[0].mlp.fc1.out_features == 1


def test_building_touches_no_random_numbers_but_the_layers_own():
    """The sizes are tried out without storage first, which draws nothing."""
    name, sizes = FAMILIES["vit"]
    torch.manual_seed(5)
    ours = vitinit.build_model(name, num_classes=7, image_size=(12, 20), **sizes)
    torch.manual_seed(5)
    kind, table = MODELS[name]
    theirs = kind(num_classes=7, image_size=(12, 20), **table | sizes)
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key
