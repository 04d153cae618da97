"""Impulse of rotary attention: a closed form in float64, the mass on content, and what is muted."""

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from small_models import drawn, seeded, written
from torch import Tensor, nn

import vitinit
from vitinit.init.attentions import Rotation
from vitinit.init.impulse_rotary import mean_mass
from vitinit.init.layout import layout_of
from vitinit.mixing import target_mass
from vitinit.mixing.filters import Offset, neighbours, ordered_offsets
from vitinit.models.attention import attention_weights
from vitinit.models.rotary import frequencies_of
from vitinit.watch.mass import has_targets, mass_on_images

GRID = (7, 11)
MODELS = {  # for images of 28×44 pixels
    "rope": dict(pool="mean"),
    "learned+rope": dict(pos_embed="learned+rope", distilled=True),
    "mixed": dict(rope_frequencies="mixed", num_registers=2, layer_scale=0.1),
    "no biases": dict(qkv_bias=False, rope_coordinates="centred", rope_base=10_000.0, mlp="swiglu"),
    "linear": dict(rope_frequencies="linear", pool="mean", qkv_bias=False),
}
IMAGES = torch.randn(7, 3, 28, 44, generator=seeded(1))


def initialised(name: str, init: str = "impulse", **options) -> nn.Module:
    sizes = dict(patch_size=4, embed_dim=132, depth=3, num_heads=3, pos_embed="rope")
    return written(
        init,
        vitinit.build_model("vit_tiny", num_classes=5, image_size=(28, 44), **sizes | MODELS[name]),
        3,
        **options,
    ).eval()


def wanted_logits(omega: Tensor, offsets: Sequence[Offset], size: Tensor) -> Tensor:
    """ℓ Σ a cos(ω · (Δ − δ)), (h, N, N), from ω, (h, d / 2, 2), and ℓ, (h,), by its definition."""
    places = torch.cartesian_prod(*map(torch.arange, GRID)).double()
    away = (places - places[:, None] - torch.tensor(offsets)[:, None, None]).double()
    share = omega.square().sum(2) / omega.square().sum((1, 2))[:, None]
    return size[:, None, None] * torch.einsum(
        "hqkf, hf -> hqk", torch.einsum("hqkx, hfx -> hqkf", away, omega).cos(), share
    )


@pytest.mark.parametrize("name", ["rope", "mixed", "linear", "no biases"])
@torch.no_grad()
def test_without_content_every_block_is_its_closed_form_and_has_the_mass(name, held_against):
    """The logits depend on the displacement alone, and are the same in all blocks but for ℓ."""
    model = initialised(name, "deep_impulse", base="default", target_mass=(0.8, 0.6)).double()
    kind, base = MODELS[name].get("rope_frequencies", "axial"), MODELS[name].get("rope_base", 100.0)
    omega = frequencies_of(kind, 3, 44, base)
    if name == "no biases":  # 4π / n of a unit is one row, or column
        omega = omega * 4 * math.pi / torch.tensor(GRID)
    for number, block in enumerate(layout_of(model).blocks):
        constant = (block.q if block.q_bias is None else block.q_bias[..., None])[..., 0]
        size = constant.square().sum(1) / math.sqrt(44)
        weights = block.mixing_weights(block.norm(torch.zeros(1, 77, 132).double()))[0]
        targets = ordered_offsets(3)[3 * number : 3 * number + 3]  # in turn
        expected = wanted_logits(omega, targets, size)
        assert torch.allclose(weights, expected.softmax(-1), atol=1e-5)
        held_against(weights, expected.softmax(-1), cases=3)
        mass = target_mass(weights, targets, GRID)
        assert torch.allclose(mass, torch.tensor(0.8 - 0.1 * number).double(), atol=0.02)


@pytest.mark.parametrize("name", MODELS)
def test_on_images_the_mean_mass_is_what_was_asked_for(name):
    for base, asked, most in (("default", 0.66, 0.02), ("torch", 0.9, 0.06)):
        model = initialised(name, base=base, target_mass=asked, kernel_size=5)
        mass = mass_on_images(model, "impulse", dict(target_mass=asked, kernel_size=5), IMAGES)
        assert mass.others == pytest.approx([asked] * 3, abs=most)


def test_blocks_of_shifts_have_no_targets_of_an_init():
    options = dict(num_classes=2, image_size=(28, 44), patch_size=4, embed_dim=96, depth=3)
    options |= dict(num_heads=3, pool="mean", pos_embed="rope", shift_blocks=2, shift_kernel=5)
    model = written("impulse", vitinit.build_model("vit_tiny", **options))
    mass = mass_on_images(model, "impulse", {}, IMAGES)
    assert [math.isnan(value) for value in mass.others] == [True, True, False]
    assert mass.others[2] == pytest.approx(0.9, abs=0.06)
    alone = vitinit.build_model("vit_tiny", **options | dict(shift_blocks=3))
    assert has_targets(model, "impulse", {}) and not has_targets(alone, "impulse", {})


def test_patches_are_whitened_by_images_where_that_is_asked_for():
    ours, theirs = (
        initialised("rope", init, base="lecun", images=IMAGES, **how).patch_embed.proj
        for init, how in (("impulse", dict(patch_init="whitened")), ("whitened", {}))
    )
    assert torch.equal(ours.weight, theirs.weight)


def test_the_mean_mass_is_that_of_a_softmax_of_drawn_content():
    """d 6, ℓ 17, content of variance .03 and .05 a channel: the mean over 100 draws is a little
    above, as the sum of competitors varies, and without content it is above both."""
    omega, offset, root = drawn(3, 2), (1, -2), math.sqrt(6)
    share = omega.square().sum(1) / omega.square().sum()
    cells = torch.cartesian_prod(*(torch.arange(1.0 - side, side) for side in GRID)).double()
    formula = partial(
        mean_mass, 17.0, ((cells @ omega.T).cos() @ share).view(13, 21), neighbours(offset, GRID)[1]
    )
    size, phase = (17.0 * share * root).sqrt(), omega @ omega.new_tensor(offset)
    constants = [
        torch.view_as_real(torch.polar(size, angle)).flatten() for angle in (phase, 0 * phase)
    ]
    angles = torch.cartesian_prod(*map(torch.arange, GRID)).double() @ omega.T  # (N, 3)
    rotation = Rotation(
        torch.arange(6).view(3, 2),  # turns: (N, 1, 3, 2)
        torch.stack([angles.cos(), angles.sin()], -1)[:, None],
    )
    content = drawn(2, 100, 1, 77, 6) * torch.tensor([0.03, 0.05]).view(2, 1, 1, 1, 1).sqrt()
    masses = [
        target_mass(
            attention_weights(
                *(rotation(constant + scale * noise) for constant, noise in zip(constants, content))
            ),
            [offset],
            GRID,
        ).item()
        for scale in (0.0, 1.0)
    ]
    assert formula((0.0, 0.0, 0.0)) == pytest.approx(masses[0], abs=1e-9)
    expected = formula((0.03 / root, 0.05 / root / 2, 0.03 * 0.05 / 2))
    assert masses[1] - 0.02 < expected < masses[1] < masses[0] - 0.02


def test_frequencies_are_read_up_to_a_turn_and_refused_unless_planar():
    places = torch.cartesian_prod(*map(torch.arange, GRID)).double()
    omega = drawn(3, 5, 2).clamp(-3, 3)
    angles = (places[:, None, None] * omega).sum(-1) + 0.7  # of an offset
    turns = torch.stack([angles.cos(), angles.sin()], -1)  # (N, 3, 5, 2)
    rotation = partial(Rotation, torch.arange(10).view(5, 2))
    assert torch.allclose(rotation(turns.float()).frequencies(GRID), omega, atol=1e-6)
    for bent in (angles + 0.01 * places[:, :1, None] ** 2, angles.flip(1)[torch.randperm(77)]):
        with pytest.raises(ValueError, match="not one for the rows and one for the columns"):
            rotation(torch.stack([bent.cos(), bent.sin()], -1)).frequencies(GRID)


@pytest.mark.parametrize("name", ["learned+rope", "mixed", "no biases"])
@torch.no_grad()
def test_prefix_tokens_are_without_the_constants_in_every_block(name):
    """Their queries spread over all tokens, and no patch attends to them, as both have no place."""
    model = initialised(name, base="default", target_mass=0.8)
    read: list[Tensor] = []
    for block in model.blocks:
        block.attn.register_forward_hook(
            lambda attention, inputs, _: read.append(attention.mixing_weights(*inputs))
        )
    model(IMAGES)
    prefix = model.num_prefix_tokens
    for weights in read:
        assert weights[:, :, :prefix].max() < 0.03 and weights[..., prefix:, :prefix].max() < 0.01
    x = model.embed(IMAGES)
    for block in model.blocks:
        x = block(x)
        assert not x[:, prefix:, -1].any() and x[:, :prefix, -1].std() < 1e-4


@torch.no_grad()
def test_mimetic_values_are_a_noisy_negative_identity_also_in_blocks_of_shifts():
    """proj · V = αZ − βI over all heads, Z uniform of variance 1/D; by default as they were drawn."""
    sizes = dict(image_size=(28, 44), patch_size=4, embed_dim=132, depth=3, num_heads=3)
    kinds = dict(pos_embed="rope", rope_frequencies="linear", pool="mean", shift_blocks=2)
    drawn_alone, by_default, mimetic = (
        written(
            init, vitinit.build_model("vit_tiny", num_classes=5, **sizes, **kinds), 3, **options
        )
        for init, options in (
            ("torch", {}),
            ("impulse", {}),
            ("impulse", dict(value_init="mimetic", value_alpha=0.3, value_beta=0.5)),
        )
    )
    layouts = map(layout_of, (drawn_alone, by_default, mimetic))
    parts = [[*layout.shifting, *layout.blocks] for layout in layouts]
    assert len(parts[0]) == 3
    for before, kept, new in zip(*parts):
        assert torch.equal(before.v, kept.v) and torch.equal(before.proj, kept.proj)
        noise = torch.einsum("chd, hdk -> ck", new.proj, new.v) + 0.5 * torch.eye(132)
        bound = 0.3 * (3 / 132) ** 0.5
        assert 0.99 * bound < noise.abs().max() <= bound * 1.001
        assert noise.square().mean().item() == pytest.approx(bound**2 / 3, rel=0.05)
        sizes_of_heads = new.v.square().sum((1, 2))  # alike, as no head carries more
        assert sizes_of_heads.max() < 1.5 * sizes_of_heads.min()
