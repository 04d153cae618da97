"""A constant added to a row of fc1 changes nothing at the start, so no init here writes one.

vitinit/init/README.md has the derivation: the LayerNorm before the MLP sums to 0 over channels.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitinit


def small(**options) -> nn.Module:
    model = vitinit.build_model("vit_tiny", num_classes=7, image_size=12, patch_size=4, embed_dim=33,
                                depth=2, num_heads=3, **options).double()
    vitinit.init_weights(model, "default", generator=torch.Generator().manual_seed(0))
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(5, 3, 12, 12, dtype=torch.float64, generator=generator),
            torch.randint(7, (5,), generator=generator))


@torch.no_grad()
def add_means(model: nn.Module) -> None:
    """Add another constant, about 1 in size, to each row of every fc1."""
    generator = torch.Generator().manual_seed(2)
    for block in model.blocks:
        weight = block.mlp.fc1.weight                                    # (4·C, C)
        weight += torch.randn(len(weight), 1, dtype=weight.dtype, generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("pool", ["class", "mean"])
def test_outputs_do_not_change(pool):
    model, (images, _) = small(pool=pool), batch()
    before = model(images)
    add_means(model)
    assert before.std() > 1e-3                       # not a comparison of zeros
    torch.testing.assert_close(model(images), before, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_outputs_change_once_training_has_moved_the_layer_norm(part):
    """So it is the LayerNorm's weight of 1 and bias of 0 on which this depends."""
    model, (images, _) = small(), batch()
    for block in model.blocks:
        getattr(block.norm2, part)[0] += 0.1
    before = model(images)
    add_means(model)
    assert (model(images) - before).abs().max() > 1e-3


@pytest.mark.parametrize("means", [False, True])
def test_no_gradient_points_along_a_constant_either(means):
    """Each row of fc1's gradient sums to 0, with such constants and without."""
    model, (images, labels) = small(), batch()
    if means:
        add_means(model)
    F.cross_entropy(model(images), labels).backward()
    for block in model.blocks:
        gradient = block.mlp.fc1.weight.grad                             # (4·C, C)
        assert gradient.abs().max() > 1e-6
        assert gradient.sum(1).abs().max() < 1e-12 * gradient.abs().max() * gradient.shape[1]
