"""The whole path of an image on fake CUDA tensors: shapes and devices without a GPU.

FakeTensorMode computes shapes and devices alone, so that an operation between two devices, a value
read on the host (`.item()`) or a shape that depends on values raises. Its backward needs a driver.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import vitinit
from vitinit.data.augment import IMAGENET_MEAN, IMAGENET_STD
from vitinit.data.draw import RandAugment, SampleDraws, SampleKey, stack_draws
from vitinit.data.loader import Batch, TrainBatch
from vitinit.data.mix import Mixing
from vitinit.data.to_device import ToDevice, TrainToDevice
from vitinit.models.layers import draw_keep

CUDA, SIZE, BATCH, CLASSES = torch.device("cuda", 0), 16, 6, 7
MODELS = {
    "vit_tiny": dict(patch_size=4, embed_dim=12, depth=2, num_heads=3, drop_path=0.3),
    "swin_tiny": dict(patch_size=2, embed_dim=12, depths=(2, 1), num_heads=(3, 3), window_size=4,
                      drop_path=0.3),
    "mixer_s16": dict(patch_size=4, embed_dim=12, depth=2, drop_path=0.3),
    "convmixer_256_8": dict(patch_size=2, embed_dim=12, depth=2, kernel_size=3),
    "simple_vit": dict(patch_size=4, embed_dim=24, depth=2, num_heads=3),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_device_is_mixed_up_and_nothing_is_waited_for(name, monkeypatch):
    # autocast would switch itself off where there is no GPU.
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *arguments, **options: True)
    draws = SampleDraws(0, (SIZE, SIZE), rand_augment=RandAugment(probability=1.0))
    drawn = stack_draws([draws.for_device(SampleKey(0, index)) for index in range(BATCH)])
    with FakeTensorMode():
        images = torch.zeros(BATCH, 3, SIZE, SIZE, dtype=torch.uint8)
        labels = torch.zeros(BATCH, dtype=torch.int64)
        as_input = dict(mean=IMAGENET_MEAN, std=IMAGENET_STD, channels_last=True)
        prepare = TrainToDevice(CUDA, **as_input, fill=(1, 2, 3), erase_fill="pixel",
                                erase_after_mix=False, mixing=Mixing(), num_classes=CLASSES, seed=0)
        with CUDA:                                   # fake modules cannot be moved
            model = vitinit.build_model(name, num_classes=CLASSES, image_size=SIZE, **MODELS[name])
        prepared, targets = prepare(TrainBatch(images, labels, drawn), 0,
                                    np.zeros(BATCH, np.int64))
        assert prepared.device == targets.device == CUDA
        assert prepared.shape == (BATCH, 3, SIZE, SIZE) and targets.shape == (BATCH, CLASSES)
        keep = ()
        if any(model.drop_path_rates):
            keep = (draw_keep(model.drop_path_rates, BATCH, np.random.default_rng(0)).to(CUDA),)
        for amp in (torch.float32, torch.bfloat16, torch.float16):
            with torch.autocast("cuda", dtype=amp, enabled=amp != torch.float32):
                logits = model.train()(prepared, *keep)
            assert logits.device == CUDA and logits.shape == (BATCH, CLASSES)
            assert logits.dtype == amp
        measured, truth = ToDevice(CUDA, **as_input)(Batch(images, labels))
        with torch.no_grad():
            assert model.eval()(measured).device == truth.device == CUDA
