"""Every model of the table at full size: one image forward, as it is first initialised."""

from __future__ import annotations

import pytest
import torch

import vitinit
from vitinit.models import MODELS

SIZE = {"simple_vit": 32, "convmixer_512_8": 32, "convmixer_256_8": 32}


@pytest.mark.parametrize("name", MODELS)
def test_one_forward_pass(name):
    size = SIZE.get(name, 224)
    model = vitinit.build_model(name, num_classes=11, image_size=size)
    generator = torch.Generator().manual_seed(0)
    vitinit.init_weights(model, "torch", generator=generator)
    with torch.no_grad():
        logits = model.eval()(torch.randn(1, 3, size, size, generator=generator))
    assert logits.shape == (1, 11) and logits.isfinite().all() and logits.std() > 0
