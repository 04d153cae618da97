"""LayerNorms that start as fixed scalings: constant channels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitinit
from vitinit.init.position_mass import position_mass
from vitinit.init.steady_norms import constant_slice

# 37 of 111 channels hold the code (17 waves and 3 bias channels), the next two are the constants.
SIZES = dict(num_classes=5, image_size=32, patch_size=4, embed_dim=111, depth=3, num_heads=3)
LARGE_CODE = dict(code_channels=1 / 3, bias_channels=True)
CODE, CONSTANTS, CONTENT = slice(0, 37), slice(37, 39), slice(39, 111)
each_pooling = pytest.mark.parametrize("model_options", [
    dict(pool="class"), dict(pool="mean", num_registers=2), dict(pool="mean", fc_norm=True)],
    ids=["class", "registers", "fc_norm"])


def initialised(model_options: dict = {}, images: Tensor | None = None, **options) -> nn.Module:
    model = vitinit.build_model("vit_tiny", **SIZES, **{"pool": "mean"} | model_options)
    vitinit.init_weights(model, "deep_impulse", generator=torch.Generator().manual_seed(3),
                         images=images, **LARGE_CODE | options)
    return model.eval()


def norms(model: nn.Module) -> list[nn.LayerNorm]:
    return [module for module in model.modules() if isinstance(module, nn.LayerNorm)]


@torch.no_grad()
def read_and_returned(model: nn.Module, images: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What each LayerNorm reads and returns, of patch tokens alone: each (patches, D)."""
    seen = []

    def keep(norm: nn.LayerNorm, inputs: tuple[Tensor], output: Tensor) -> None:
        both = (inputs[0], output)
        if output.ndim == 3:
            both = [x[:, model.num_prefix_tokens:].flatten(0, 1) for x in both]
        seen.append(tuple(both))
    hooks = [norm.register_forward_hook(keep) for norm in norms(model)]
    model(images)
    for hook in hooks:
        hook.remove()
    return seen


# ---------------------------------------------------------------------------------------------
# Constant channels
# ---------------------------------------------------------------------------------------------


@each_pooling
def test_the_constants_have_the_share_that_was_asked_for(model_options, images):
    """On the images that the init reads; of all other channels nothing changes but LayerNorm."""
    model = initialised(model_options, images, constant_share=0.83)
    before, _ = read_and_returned(model, images)[0]
    others = torch.cat([before[:, CODE], before[:, CONTENT]], dim=1)
    # The variance over 111 channels of ± a and 0, and that of the others among themselves.
    constant = before[:, CONSTANTS].square().sum(1).mean() / 111
    assert before[:, CONSTANTS].std(0).max() == 0.0 and before[0, 37] == -before[0, 38] > 0.0
    share = constant / (constant + others.var(1, correction=0).mean())
    assert share.item() == pytest.approx(0.83, abs=0.01)


@each_pooling
def test_every_token_is_divided_by_nearly_the_same_number(model_options, images):
    """Beside a plain LayerNorm, in front of every layer; behind pooling, all tokens are alike."""
    plain = read_and_returned(initialised(model_options), images)
    steady = read_and_returned(initialised(model_options, images, constant_share=0.97), images)
    for (before, _), (after, _) in zip(plain, steady):
        varied, even = (x.std(1).std() / x.std(1).mean() for x in (before, after))
        assert even < 0.02 and (even < 0.2 * varied or len(before) == len(images))


def test_contrast_reaches_the_first_block(images):
    """An image of a fifth of the contrast is a fifth of the content; to a plain LayerNorm it is more."""
    faint = 0.2 * images
    for share, most, least in ((0.97, 0.22, 0.18), (0.0, 0.8, 0.3)):
        model = initialised(constant_share=share, value_init="base")
        loud, soft = (read_and_returned(model, x)[0][1][:, CONTENT] for x in (images, faint))
        ratio = (soft.square().mean() / loud.square().mean()).sqrt()
        assert least < ratio < most, share


@pytest.mark.parametrize("given", [True, False])
def test_what_layers_read_is_as_large_as_without_constants(given, images):
    """On the images that the init was given; on white noise if it was given none."""
    noise = torch.randn(67, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    model = initialised({}, images if given else None, constant_share=0.97)
    for _, returned in read_and_returned(model, images if given else noise):
        others = torch.cat([returned[:, CODE], returned[:, CONTENT]], dim=1)
        assert others.var(1, correction=0).mean().item() == pytest.approx(1.0, rel=0.03)
        assert not returned[:, CONSTANTS].any()


@each_pooling
def test_nothing_else_changes(model_options, images):
    """Neither draws nor logits; only what would write to or read from the two channels."""
    before = initialised(model_options).state_dict()
    model = initialised(model_options, constant_share=0.9)
    for name, value in model.state_dict().items():
        if "norm" in name:
            assert name.endswith("weight") or torch.equal(value, before[name])
        elif name in ("pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"):
            kept = value.movedim(-1, 0) if name == "pos_embed" else value
            expected = before[name].movedim(-1, 0) if name == "pos_embed" else before[name]
            assert torch.equal(kept[CODE], expected[CODE]), name
            assert torch.equal(kept[CONTENT], expected[CONTENT]), name
        elif "mlp.fc1" in name or name.startswith("head"):
            assert torch.equal(value, before[name]), name
    writers = [model.patch_embed.proj] + [layer for block in model.blocks
                                          for layer in (block.attn.proj, block.mlp.fc2)]
    assert not any(part[CONSTANTS].any() for layer in writers for part in layer.parameters())
    assert not any(block.attn.v_weight[..., CONSTANTS].any() for block in model.blocks)


@pytest.mark.parametrize("options", [dict(), dict(code="random")])
def test_the_mass_on_positions_is_that_without_constants(options):
    masses = [position_mass(initialised(constant_share=share, **options), "deep_impulse",
                            LARGE_CODE | options | dict(constant_share=share)) for share in (0.0, 0.9)]
    torch.testing.assert_close(masses[1].others, masses[0].others, rtol=2e-2, atol=0)


# ---------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, message", [
    (dict(constant_share=1.0), "constant_share is 1.0, expected 0 ≤ constant_share < 1"),
    (dict(constant_share=float("nan")), "constant_share is nan, expected"),
    (dict(constant_share=0.9, reserve=False, bias_channels=False), "constant_share needs reserve = true")])
def test_what_cannot_be_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        initialised(**options)
    assert "\n" not in str(caught.value)


def test_constants_leave_a_channel_for_the_image():
    assert constant_slice(108, 0.9, 111) == slice(108, 110) and constant_slice(111, 0.0, 111).stop == 111
    with pytest.raises(ValueError, match="2 channels behind the code's 109 leave none of 111"):
        constant_slice(109, 0.9, 111)
