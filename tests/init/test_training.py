"""Every init of every family can be trained: a few steps on a batch of the embedded images."""

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


@pytest.mark.parametrize("family, name, amp", [
    (family, name, ("float32", "bfloat16")[number % 2]) for number, (family, name) in enumerate(PAIRS)])
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
