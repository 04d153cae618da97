"""Every init of every family can be trained: a step on a batch of the embedded images."""

from __future__ import annotations

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
    "simple_vit, free": ("simple_vit", dict(patch_size=8, embed_dim=36, depth=2, num_heads=3,
                                            reads="free", input_pos_embed=False)),
    "swin": ("swin_tiny", dict(patch_size=4, embed_dim=18, depths=(2, 2), num_heads=(2, 3),
                               window_size=4)),
    "mixer, wide": ("mixer_s16", dict(patch_size=8, embed_dim=74, depth=2)),
    "mixer, narrow": ("mixer_s16", dict(patch_size=8, embed_dim=38, depth=2)),
    "conv_mixer": ("convmixer_256_8", dict(patch_size=4, embed_dim=22, depth=2, kernel_size=3)),
}
OPTIONS = {"impulse_gd": dict(steps=3)}              # it optimises, for a thousand steps by default


def built(family: str) -> torch.nn.Module:
    model_name, sizes = FAMILIES[family]
    return vitinit.build_model(model_name, num_classes=10, image_size=32, **sizes)


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    images, labels = zip(*(draw_image(rng) for _ in range(23)))
    images = (torch.from_numpy(np.stack(images)).float() / 255.0 - 0.5) / 0.25
    return images, torch.tensor(labels)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_lowers_the_loss_and_every_gradient_is_finite(batch, family):
    """In bfloat16 for every second init; the step is one of gradient descent."""
    images, labels = batch
    inits = [name for name, functions in INITS.items() if MODELS[FAMILIES[family][0]][0] in functions]
    for number, name in enumerate(inits):
        model = built(family)
        vitinit.init_weights(model, name, generator=torch.Generator().manual_seed(0),
                             **OPTIONS.get(name, {}))
        losses = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 1):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            losses.append(loss.item())
            model.zero_grad()
            loss.backward()
            square = sum(p.grad.square().sum() for p in model.parameters())
            assert square.isfinite(), name
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad / square.sqrt()
        assert losses[1] < losses[0], name


def test_no_family_is_left_out():
    classes = {MODELS[model_name][0] for model_name, _ in FAMILIES.values()}
    assert classes == {family for functions in INITS.values() for family in functions}
    assert classes == {family for family, _ in MODELS.values()}


@pytest.mark.parametrize("name, model_name, message", [
    ("impulze", "swin_tiny", "there is no init 'impulze'; near: impulse"),
    ("xyz", "swin_tiny", f"there is no init 'xyz'; near: {', '.join(sorted(INITS))}$"),
    ("mimetic", "mixer_s16", "not defined for a MlpMixer; it has: default, torch, lecun, impulse"),
    ("filters", "simple_vit", "not defined for a SimpleViT; it has: default, torch, lecun, mimetic, "
                              "impulse, impulse_gd$"),
])
def test_an_init_that_is_not_there_names_those_that_are(name, model_name, message):
    with pytest.raises(ValueError, match=message):
        init_function(name, MODELS[model_name][0])
