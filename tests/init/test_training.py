"""Every init of every family can be trained: a few steps on a batch of the embedded images."""

from __future__ import annotations

import copy
import importlib

import numpy as np
import pytest
import torch
from torch import Tensor

import vitinit
from vitinit.data.shapes import draw_image
from vitinit.init import INITS, init_function
from vitinit.models import MODELS

FAMILIES = {        # name in the table of models, sizes for images of 32×32 pixels
    "vit": ("vit_tiny", dict(patch_size=8, embed_dim=36, depth=2, num_heads=3)),
    "simple_vit": ("simple_vit", dict(patch_size=8, embed_dim=36, depth=2, num_heads=3)),
    **{f"simple_vit, {reads}": ("simple_vit", dict(
        patch_size=8, embed_dim=36, depth=2, num_heads=3, reads=reads, input_pos_embed=False))
       for reads in ("mixed", "position", "free")},
    "swin": ("swin_tiny", dict(patch_size=4, embed_dim=18, depths=(2, 2), num_heads=(2, 3),
                               window_size=4)),
    "mixer, wide": ("mixer_s16", dict(patch_size=8, embed_dim=74, depth=2)),
    "mixer, narrow": ("mixer_s16", dict(patch_size=8, embed_dim=38, depth=2)),
    "conv_mixer": ("convmixer_256_8", dict(patch_size=4, embed_dim=22, depth=2, kernel_size=3)),
    "conv_mixer, dense": ("convmixer_256_8", dict(patch_size=4, embed_dim=22, depth=2,
                                                  kernel_size=3, dense_filters=True)),
}
OPTIONS = {"impulse_gd": dict(steps=3)}              # it optimises, for a thousand steps by default
PAIRS = [(family, name) for family, (model_name, _) in FAMILIES.items()
         for name, functions in INITS.items() if MODELS[model_name][0] in functions]


def built(family: str) -> torch.nn.Module:
    model_name, sizes = FAMILIES[family]
    return vitinit.build_model(model_name, num_classes=10, image_size=32, **sizes)


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    images, labels = zip(*(draw_image(rng) for _ in range(23)))
    images = (torch.from_numpy(np.stack(images)).float() / 255.0 - 0.5) / 0.25
    return images, torch.tensor(labels)


@pytest.mark.parametrize("amp", ["float32", "bfloat16"])
@pytest.mark.parametrize("family, name", PAIRS)
def test_three_steps_lower_the_loss_and_leave_everything_finite(batch, family, name, amp):
    model = built(family)
    vitinit.init_weights(model, name, generator=torch.Generator().manual_seed(0),
                         **OPTIONS.get(name, {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, labels = batch
    losses = []
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp == "bfloat16"):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        losses.append(loss.item())
        if len(losses) < 4:
            optimizer.zero_grad()
            loss.backward()
            assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
            optimizer.step()
    assert all(np.isfinite(losses)) and losses[-1] < losses[0]
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_no_family_is_left_out():
    classes = {MODELS[model_name][0] for model_name, _ in FAMILIES.values()}
    assert classes == {family for functions in INITS.values() for family in functions}
    assert classes == {family for family, _ in MODELS.values()}


FUNCTIONS = {       # the table of inits a second time, by module and function name
    "default": dict.fromkeys(("vit", "swin", "mixer", "conv_mixer", "simple_vit"), "baseline.default"),
    "torch": dict.fromkeys(("vit", "swin", "mixer", "conv_mixer", "simple_vit"),
                           "baseline.torch_default"),
    "lecun": dict.fromkeys(("vit", "swin", "mixer", "conv_mixer", "simple_vit"), "baseline.lecun"),
    "mimetic": {"vit": "mimetic.mimetic", "swin": "mimetic.mimetic",
                "simple_vit": "mimetic.mimetic_simple_vit"},
    "impulse": {"vit": "impulse.impulse", "swin": "impulse_swin.impulse_swin",
                "mixer": "impulse_mixer.impulse_mixer",
                "conv_mixer": "impulse_conv_mixer.impulse_conv_mixer",
                "simple_vit": "impulse_simple_vit.impulse_simple_vit"},
    "deep_impulse": {"vit": "deep_impulse.deep_impulse", "swin": "impulse_swin.deep_impulse_swin",
                     "mixer": "impulse_mixer.impulse_mixer",
                     "conv_mixer": "impulse_conv_mixer.deep_impulse_conv_mixer"},
    "conditioned": {"vit": "conditioned.conditioned", "swin": "conditioned.conditioned"},
    "dct": {"vit": "dct.dct", "swin": "dct.dct"},
    "filters": {"conv_mixer": "filters_conv_mixer.filters_conv_mixer"},
    "impulse_gd": {"vit": "impulse_gd.impulse_gd", "simple_vit": "impulse_gd.impulse_gd"},
}


def test_the_table_has_every_init_of_every_family():
    pairs = [(family.partition(",")[0], name) for family, name in PAIRS]
    assert set(pairs) == {(family, name) for name, families in FUNCTIONS.items() for family in families}


@pytest.mark.parametrize("family, name", PAIRS)
def test_an_init_by_its_name_is_the_function_of_the_models_family(family, name):
    """The same weights, from the same seed, whether by name or by the function itself."""
    module, _, function_name = FUNCTIONS[name][family.partition(",")[0]].partition(".")
    function = getattr(importlib.import_module(f"vitinit.init.{module}"), function_name)
    by_name, by_function, options = built(family), built(family), OPTIONS.get(name, {})
    vitinit.init_weights(by_name, name, generator=torch.Generator().manual_seed(5), **options)
    function(by_function, generator=torch.Generator().manual_seed(5), **options)
    ours, theirs = by_name.state_dict(), by_function.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("name, model_name, message", [
    ("impulze", "swin_tiny", "there is no init 'impulze'; near: impulse"),
    ("xyz", "swin_tiny", f"there is no init 'xyz'; near: {', '.join(sorted(INITS))}$"),
    ("mimetic", "mixer_s16", "not defined for a MlpMixer; it has: default, torch, lecun, impulse"),
    ("mimetic", "convmixer_256_8", "not defined for a ConvMixer; it has: default, torch, lecun, impulse"),
    ("filters", "simple_vit", "not defined for a SimpleViT; it has: default, torch, lecun, mimetic, "
                              "impulse, impulse_gd$"),
])
def test_an_init_that_is_not_there_names_those_that_are(name, model_name, message):
    with pytest.raises(ValueError, match=message):
        init_function(name, MODELS[model_name][0])


@torch.no_grad()
def test_what_an_init_is_not_defined_for_is_left_as_it_was():
    model, generator = built("mixer, wide"), torch.Generator().manual_seed(0)
    before, state = copy.deepcopy(model.state_dict()), generator.get_state()
    with pytest.raises(ValueError, match="not defined for a MlpMixer"):
        vitinit.init_weights(model, "mimetic", generator=generator)
    assert torch.equal(generator.get_state(), state)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
