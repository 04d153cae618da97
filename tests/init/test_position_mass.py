"""The mass that an init reaches, on images and on positions alone, and how it is reported."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import vitinit
from vitinit.filters import head_offsets, ordered_offsets
from vitinit.init.position_mass import Mass, mass_on_images, position_mass, shortfall
from vitinit.init.impulse import normalised_positions
from vitinit.init.mimetic import attentions
from vitinit.mixing import mixing_matrices, target_mass

VIT = ("vit_tiny", dict(image_size=(20, 28), patch_size=4, embed_dim=57, depth=3, num_heads=3))


def initialised(name: str, sizes: dict, init: str, **options) -> nn.Module:
    model = vitinit.build_model(name, num_classes=7, **sizes)
    vitinit.init_weights(model, init, generator=torch.Generator().manual_seed(3), **options)
    return model


def measured(init: str, sizes: dict | None = None, **options) -> Mass:
    return position_mass(initialised(VIT[0], VIT[1] | (sizes or {}), init, **options), init, options)


@torch.no_grad()
def written_out(model: nn.Module, block: int, offsets: list[tuple[int, int]]) -> torch.Tensor:
    """(h,) masses by the formula, with biases and 1/√d."""
    positions, attention = normalised_positions(model).double(), model.blocks[block].attn
    dim, width = attention.proj.in_features, attention.head_dim
    query, key = (positions @ attention.qkv.weight.double()[rows].T + attention.qkv.bias.double()[rows]
                  for rows in (slice(0, dim), slice(dim, 2 * dim)))      # (N, D) each
    masses = []
    for head, offset in enumerate(offsets):
        rows = slice(head * width, (head + 1) * width)
        logits = (query[:, rows] @ key[:, rows].T / width**0.5).exp()
        masses.append(target_mass((logits / logits.sum(1, keepdim=True))[None], [offset],
                                  model.grid)[0])
    return torch.stack(masses)


@pytest.mark.parametrize("options", [dict(offsets="rotating", qk_norm=4.0), dict(offsets="random")])
def test_of_impulse_it_is_the_attention_on_the_normalised_position_embedding(options):
    """Random offsets are found if a head clearly attends to one; the true ones are drawn again
    here.
    """
    model = initialised(*VIT, "impulse", **options)
    found = position_mass(model, "impulse", options)
    generator = torch.Generator().manual_seed(3)
    vitinit.init_weights(vitinit.build_model(VIT[0], num_classes=7, **VIT[1]),
                         options.get("base", "default"), generator=generator)
    cells = ordered_offsets(options.get("kernel_size", 3))
    # After block 0 its noise and values are drawn, so that only its random offsets are known here.
    for block in range(1 if options.get("offsets") == "random" else 3):
        offsets = head_offsets(3, cells, options.get("offsets", "ordered"), generator,
                               first=3 * block)
        masses = written_out(model, block, offsets)
        centre = torch.tensor([offset == (0, 0) for offset in offsets])
        for values, chosen in ((found.centre, centre), (found.others, ~centre)):
            expected = masses[chosen].mean().item()              # NaN where there is none
            assert values[block] == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert found.uniform == [1 / 35] * 3


@pytest.mark.parametrize("options, expected", [
    ({}, [0.3, 0.1119, 1.25 / 35]),                  # of 35 tokens; the odds .429, .126, .037
    (dict(target_mass=0.9), [0.9] * 3), (dict(target_mass=(0.8, 0.2)), [0.8, 0.5, 0.2]),
    (dict(reserve=False, bias_channels=False, target_mass=0.5), [0.5] * 3)])
def test_of_deep_impulse_it_is_the_mass_that_was_asked_for(options, expected):
    """The solution wraps around the borders; rows with a target on the grid have the mass, too."""
    found = measured("deep_impulse", **options)
    for values in (found.centre, found.others):
        for value, wanted in zip(values, expected):
            assert math.isnan(value) or value == pytest.approx(wanted, abs=1e-4)
    assert sum(map(math.isnan, found.centre)) == 2   # of 9 heads one attends to its own token


def test_of_a_swin_it_is_what_the_bias_gives_within_a_window(init="impulse", mass=0.6):
    sizes = dict(image_size=(24, 40), patch_size=2, embed_dim=22, depths=(2, 2), num_heads=(2, 11),
                 window_size=(3, 5))
    model = initialised("swin_tiny", sizes, init, target_mass=mass)
    found = position_mass(model, init, dict(target_mass=mass))
    assert len(found.uniform) == 4 and found.uniform[0] == 1 / 15
    for value in found.centre + found.others:
        assert math.isnan(value) or value == pytest.approx(mass, abs=1e-5)


@pytest.mark.parametrize("reads", ["content", "free"])
def test_of_a_simple_vit_it_is_at_least_what_was_asked_for(reads):
    sizes = dict(image_size=(20, 28), patch_size=4, embed_dim=132, depth=2, num_heads=11, reads=reads,
                 input_pos_embed=reads == "content")
    model = initialised("simple_vit", sizes, "impulse", target_mass=0.8)
    found = position_mass(model, "impulse", dict(target_mass=0.8))
    least = 0.79 if reads == "content" else 0.8
    assert least < min(found.centre + found.others) <= max(found.centre + found.others) < 0.95


def test_of_mimetic_it_is_the_mass_on_the_token_itself():
    found = measured("mimetic")
    assert min(found.centre) > 0.5 and all(map(math.isnan, found.others))
    assert measured("mimetic", qk_init="base") is None


@pytest.mark.parametrize("name, sizes, init", [
    (*VIT, "default"),
    ("mixer_s16", dict(image_size=12, patch_size=4, embed_dim=20, depth=1), "impulse"),
    ("convmixer_256_8", dict(image_size=12, patch_size=4, embed_dim=9, depth=1), "impulse"),
    ("swin_tiny", dict(image_size=8, patch_size=2, embed_dim=6, depths=(1,), num_heads=(2,),
                       window_size=4), "mimetic")])
def test_where_attention_cannot_miss_there_is_nothing_to_measure(name, sizes, init):
    assert position_mass(initialised(name, sizes, init), init, {}) is None


def test_measuring_leaves_weights_modes_and_random_states_alone():
    model = initialised(*VIT, "impulse", offsets="random")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    position_mass(model, "impulse", dict(offsets="random"), sharper=2.0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(parameter.grad is None for parameter in model.parameters())


# ---------------------------------------------------------------------------------------------
# On images
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, sizes, init, options", [
    (*VIT, "deep_impulse", dict(constant_share=0.9)), (*VIT, "impulse", dict(offsets="random")),
    (*VIT, "mimetic", {}), ("simple_vit", dict(image_size=(20, 28), patch_size=4, embed_dim=132, depth=2,
                                               num_heads=11), "impulse", {})])
def test_on_images_it_is_the_attention_with_which_the_model_mixes_them(name, sizes, init, options):
    """In evaluation mode, over more images than pass at once; the content of patches counts."""
    model = initialised(name, sizes, init, **options).train()
    images = 2.0 * torch.randn(11, 3, 20, 28, generator=torch.Generator().manual_seed(1))
    found = mass_on_images(model, init, options, images)
    assert model.training and not any(block.attn._forward_pre_hooks for block in model.blocks)
    heads = model.blocks[0].attn.num_heads
    assignment = options.get("offsets", "rotating" if init == "deep_impulse" else "ordered")
    cells = [(0, 0)] if init == "mimetic" else ordered_offsets(3)
    for block, weights in mixing_matrices(model, images).items():
        masses = torch.stack([target_mass(weights, [cell] * heads, model.grid) for cell in cells])
        offsets = ([cells[index] for index in masses.argmax(0)] if assignment == "random" else
                   head_offsets(heads, cells, assignment, torch.Generator(), first=block * heads))
        of_heads = [masses[cells.index(offset), head].item() for head, offset in enumerate(offsets)]
        for values, is_centre in ((found.centre, True), (found.others, False)):
            expected = [mass for mass, offset in zip(of_heads, offsets)
                        if (offset == (0, 0)) == is_centre]
            mean = sum(expected) / len(expected) if expected else math.nan
            assert values[block] == pytest.approx(mean, abs=1e-5, nan_ok=True)


def test_on_images_a_swin_has_its_bias_within_windows():
    """The bias decides alone where queries are zero, except where the shift's mask cuts targets off."""
    sizes = dict(image_size=24, patch_size=2, embed_dim=22, depths=(2,), num_heads=(11,), window_size=3)
    model = initialised("swin_tiny", sizes, "impulse", target_mass=0.9)
    for layer in attentions(model):
        torch.nn.init.zeros_(layer.q_weight)
        torch.nn.init.zeros_(layer.q_bias)
    found = mass_on_images(model, "impulse", dict(target_mass=0.9), torch.randn(2, 3, 24, 24))
    alone = position_mass(model, "impulse", dict(target_mass=0.9))
    assert found.others[0] == pytest.approx(alone.others[0], abs=1e-5)
    assert 0.5 < found.others[1] < 0.9 < found.centre[1]


# ---------------------------------------------------------------------------------------------
# In words
# ---------------------------------------------------------------------------------------------


def test_the_line_has_means_or_every_block_where_they_differ():
    nan = math.nan
    assert str(Mass([0.987, 0.991], [0.05, 0.049], [1 / 784] * 2)) == (
        ".99 / .05 (uniform .0013) on the targets of centre / other heads")
    assert str(Mass([nan] * 3, [0.3, nan, 0.02], [0.0051] * 3)) == (
        ".30 – .02 (uniform .0051) on the targets of other heads")
    assert str(Mass([1.0], [nan], [0.25])) == "1.00 (uniform .25) on the targets of centre heads"


LARGE = dict(image_size=56, patch_size=4, embed_dim=96, num_heads=3, depth=1)         # 196 tokens


def test_what_a_warning_promises_of_qk_norm_is_what_that_gives():
    model = initialised("vit_tiny", LARGE, "impulse")
    found = position_mass(model, "impulse", {})
    line = shortfall(found, model, "impulse", {})
    promised = position_mass(model, "impulse", {}, sharper=2.0)
    given = position_mass(initialised("vit_tiny", LARGE, "impulse", qk_norm=14.0), "impulse", {})
    assert promised.others == pytest.approx(given.others, rel=1e-3)
    assert found.others[0] < 0.3 and given.others[0] > 1.1 * found.others[0]
    text = f"{given.others[0]:.2g}".removeprefix("0")
    assert "other heads have only ." in line and f"qk_norm = 14 would give {text}, " in line
    assert "deep_impulse" in line and "\n" not in line and len(line) < 260


def test_short_is_less_than_three_tenths_or_than_nine_tenths_of_what_was_asked_for():
    model = initialised(*VIT, "deep_impulse")
    exact = dict(target_mass=0.9)
    for others, options, short in (([0.31] * 3, exact, False), ([0.31, 0.29, 0.31], exact, True),
                                   ([0.05] * 3, dict(target_mass=0.05), False),
                                   ([0.04] * 3, dict(target_mass=0.05), True),
                                   ([0.3, 0.11, 0.04], dict(target_mass=[0.3, 0.05]), True),
                                   ([0.3, 0.13, 0.05], dict(target_mass=[0.3, 0.05]), False),
                                   ([0.3, 0.1, 0.03], {}, True),         # of .30, .11, .036
                                   ([0.3, 0.102, 0.033], {}, False),
                                   ([math.nan] * 3, exact, False)):
        mass = Mass([1.0] * 3, others, [1 / 35] * 3)
        assert bool(shortfall(mass, model, "deep_impulse", options)) == short, (others, options)
    mass = Mass([0.1] * 3, [0.1] * 3, [1 / 35] * 3)
    assert shortfall(mass, model, "deep_impulse", exact).startswith("centre heads have only .10 of")
    assert shortfall(mass, model, "mimetic", {}) == ""


def test_gradient_descent_is_told_what_sharpens_it():
    model = initialised(*VIT, "impulse_gd", steps=2, offsets="ordered")
    mass = position_mass(model, "impulse_gd", dict(offsets="ordered"))
    line = shortfall(mass, model, "impulse_gd", {})
    assert "renorm_every = 0" in line
