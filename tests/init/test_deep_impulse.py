"""deep_impulse: a closed form in float64, and what its parts are for."""

import importlib
import math

import pytest
import torch
from small_models import written
from torch import Tensor, nn

import vitinit
from vitinit.init.layout import layout_of
from vitinit.mixing.filters import logit_for, ordered_offsets
from vitinit.watch.mass import mass_on_images

deep_impulse = importlib.import_module("vitinit.init.deep_impulse")
CODE, CONSTANTS, CONTENT = slice(0, 8), slice(8, 10), slice(10, None)
# (height, width) in patches of 4 pixels, and what else the model has.
MODELS = {
    "mean": dict(image_size=32, pool="mean"),
    "class": dict(image_size=(28, 44), pool="class", qkv_bias=False),
    "distilled": dict(image_size=(44, 20), pool="class", distilled=True),
    "registers": dict(image_size=(20, 28), pool="mean", num_registers=2, fc_norm=True),
}
each_model = pytest.mark.parametrize("name", MODELS)


def built(name: str) -> nn.Module:
    shape = dict(num_classes=5, patch_size=4, embed_dim=51, depth=5, num_heads=3) | MODELS[name]
    return vitinit.build_model("vit_tiny", **shape)


def initialised(name: str = "mean", images: Tensor | None = None, **options) -> nn.Module:
    return written("deep_impulse", built(name), 3, images=images, **options).eval()


def noise(name: str, count: int = 31) -> Tensor:
    size = MODELS[name]["image_size"]
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(11))


def wanted_maps(grid: tuple[int, int], logit: float, offsets: list[tuple[int, int]]) -> Tensor:
    """Each head's attention, (h, N, N): by its definition, the logit times the mean cosine of the
    four waves."""
    places = torch.cartesian_prod(*(torch.arange(side).double() for side in grid))  # (N, 2)
    away = places - places[:, None] - torch.tensor(offsets)[:, None, None]  # (h, N, N, 2)
    y, x = (away / torch.tensor(grid)).unbind(-1)  # in turns
    waves = [(2 * math.pi * turns).cos() for turns in (y, x, y + x, y - x)]
    return (logit * sum(waves) / 4).softmax(-1)


@each_model
@torch.no_grad()
def test_on_the_code_alone_every_block_is_its_closed_form(name, held_against):
    """On the code at the size that was measured, the heads' maps are exact."""
    model = initialised(name, noise(name), target_mass=(0.7, 0.1)).double()
    waves, places = deep_impulse.waves_of(layout_of(model))
    shape = (places @ waves.T).cos().mean(1).double()
    logits = torch.linspace(*(logit_for(mass, shape, 0) for mass in (0.7, 0.1)), 5).tolist()
    cells, code = (
        ordered_offsets(3),
        torch.zeros_like(model.pos_embed[:, model.num_prefix_tokens :]),
    )
    code[..., CODE] = model.pos_embed[:, model.num_prefix_tokens :, CODE]  # (1, N, D)
    for number, (block, logit) in enumerate(zip(model.blocks, logits)):
        size = (power_read(model, number, noise(name)) / code.square().sum(-1).mean()).sqrt()
        weights = block.attn.mixing_weights(size * code)[0]
        wanted = wanted_maps(
            model.grid, logit, [cells[(3 * number + head) % 9] for head in range(3)]
        )
        assert torch.allclose(weights, wanted, atol=1e-6)
        held_against(weights, wanted, cases=3)


@torch.no_grad()
def power_read(model: nn.Module, number: int, images: Tensor) -> Tensor:
    """The code's squared norm in what the attention of a block reads, averaged over tokens."""
    found = []
    hook = model.blocks[number].attn.register_forward_pre_hook(
        lambda layer, inputs: found.append(inputs[0][:, model.num_prefix_tokens :, CODE])
    )
    model(images.to(model.pos_embed))
    hook.remove()
    return found[0].square().sum(-1).mean()


def test_on_images_the_mass_is_what_was_asked_for(images):
    for asked in ((0.66, 0.025), (0.3, 0.2)):
        model = initialised(images=images, target_mass=asked)
        mass = mass_on_images(model, "deep_impulse", dict(target_mass=asked), images[:13])
        for block, wanted in ((0, asked[0]), (4, asked[1])):
            assert mass.others[block] == pytest.approx(wanted, rel=0.1)
            assert math.isnan(mass.centre[block]) or mass.centre[block] == pytest.approx(
                wanted, rel=0.1
            )


def test_a_mass_below_uniform_attention_is_raised_above_it(images):
    """Else Q and K would be zero, and stay it."""
    low, least = (
        initialised(images=images, target_mass=(mass, mass)) for mass in (1e-3, 1.25 / 64)
    )
    assert torch.equal(low.blocks[0].attn.k_weight, least.blocks[0].attn.k_weight)
    assert low.blocks[4].attn.k_weight.abs().max() > 0.1


@pytest.mark.parametrize("name, share", [*zip(MODELS, (0.0, 0.5, 0.95, 0.5))])
@torch.no_grad()
def test_the_constants_have_their_share_of_the_variance(name, share):
    images = noise(name)
    model = initialised(name, images, constant_variance=share)
    x = model.embed(images)[:, model.num_prefix_tokens :]  # (n, N, 51)
    of_constants = x[..., CONSTANTS].square().sum(-1).mean() / 51
    assert (of_constants / x.var(-1, correction=0).mean()).item() == pytest.approx(share, abs=1e-3)


@each_model
@torch.no_grad()
def test_no_layer_writes_to_the_ten_channels_and_norms_are_fixed_scalings(name):
    """Every block reads the same positions, and all else with a mean square of 1."""
    images = noise(name)
    model = initialised(name, images)
    x, prefix = model.embed(images), model.num_prefix_tokens
    others = [channel for channel in range(51) if channel not in (8, 9)]
    for block in model.blocks:
        for norm, branch in ((block.norm1, block.attn), (block.norm2, block.mlp)):
            assert torch.equal(x[..., :10], model.pos_embed[..., :10].expand(len(x), -1, -1))
            y = norm(x)
            assert y[:, prefix:, others].square().mean().item() == pytest.approx(1.0, abs=0.02)
            assert not y[..., CONSTANTS].any() and norm.weight.unique().numel() == 2
            x = x + branch(y)
    last = (
        model.fc_norm(x[:, prefix:].mean(1)) if name == "registers" else model.norm(x)[:, prefix:]
    )
    assert last[..., others].square().mean().item() == pytest.approx(1.0, abs=0.02)


@each_model
def test_it_writes_what_its_docstring_lists_and_nothing_else(name):
    """All else is as the base drew it, to the bit; V and proj too, with value_init "base"."""
    model = initialised(name, noise(name), value_init="base")
    drawn = written("lecun", built(name), 3).state_dict()
    for key, value in model.state_dict().items():
        was = drawn[key]
        if key == "pos_embed":
            assert torch.equal(value[..., CONTENT], was[..., CONTENT])
        elif key.endswith(
            (
                "patch_embed.proj.weight",
                "patch_embed.proj.bias",
                "attn.proj.weight",
                "attn.proj.bias",
                "fc2.weight",
                "fc2.bias",
            )
        ):
            assert torch.equal(value[CONTENT], was[CONTENT]) and not value[:10].any()
        elif key in ("cls_token", "dist_token", "reg_token"):
            assert torch.equal(value[..., CONTENT], was[..., CONTENT]) and not value[..., :10].any()
        elif key.endswith("qkv.weight"):
            assert torch.equal(value[102:, CONTENT], was[102:, CONTENT])
            assert not value[102:, :10].any() and not value[:102, CODE.stop :].any()
        elif key.endswith("qkv.bias"):
            assert torch.equal(value[102:], was[102:]) and not value[:102].any()
        elif "norm" not in key or key.endswith("bias"):
            assert torch.equal(value, was), key


def test_on_other_channels_values_are_mimetic_patches_white_and_all_weights_get_gradients(images):
    model = initialised(images=images, value_alpha=0.0, value_beta=0.3)
    attention = model.blocks[2].attn
    product = torch.einsum("chd, hdk -> ck", attention.proj_weight, attention.v_weight)
    wanted = -0.3 * torch.eye(51)
    wanted[:10] = 0.0
    assert torch.allclose(product, wanted, atol=1e-6)
    model = initialised(images=images)
    model(images[:7]).square().sum().backward()
    assert all(parameter.grad.any() for parameter in model.parameters())
    model = initialised(images=images, patch_init="whitened")
    whitened = written("whitened", built("mean"), 3, base="lecun", images=images)
    ours, theirs = (each.patch_embed.proj.weight for each in (model, whitened))
    assert torch.equal(ours[CONTENT], theirs[CONTENT]) and not ours[:10].any()
