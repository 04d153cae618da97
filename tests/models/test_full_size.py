"""A model of each family at full size: one image forward, as it is first initialised."""

from __future__ import annotations

import pytest
import torch

import vitinit


@pytest.mark.parametrize("name, size", [("vit_tiny_distilled", 224), ("swin_tiny", 224), ("mixer_s32", 224),
                                        ("convmixer_1024_20", 224), ("simple_vit", 32)])
def test_one_forward_pass(name, size):
    model = vitinit.build_model(name, num_classes=11, image_size=size)
    generator = torch.Generator().manual_seed(0)
    vitinit.init_weights(model, "torch", generator=generator)
    with torch.no_grad():
        logits = model.eval()(torch.randn(1, 3, size, size, generator=generator))
    assert logits.shape == (1, 11) and logits.isfinite().all() and logits.std() > 0
