"""Conditioned initialisation: the singular values of every head's matrices are all equal."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vitinit
from vitinit.init.mimetic import attentions

CASES = {"vit": ("vit_tiny", dict(image_size=20, patch_size=4, embed_dim=51, depth=2, num_heads=3)),
         "swin": ("swin_tiny", dict(image_size=24, patch_size=2, embed_dim=22, depths=(2, 1),
                                    num_heads=(2, 11), window_size=3))}
each_family = pytest.mark.parametrize("family", CASES)


def initialised(family: str, name: str = "conditioned", seed: int = 0, **options) -> nn.Module:
    model_name, sizes = CASES[family]
    model = vitinit.build_model(model_name, num_classes=7, **sizes).double()
    vitinit.init_weights(model, name, generator=torch.Generator().manual_seed(seed), **options)
    return model


@each_family
def test_every_heads_condition_number_is_one(family):
    """In the default init it is not, so that the test can fail."""
    for attention in attentions(initialised(family)):
        for weight in (attention.q_weight, attention.k_weight, attention.v_weight):
            values = torch.linalg.svdvals(weight.detach())               # (h, d)
            torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-12)
    values = torch.linalg.svdvals(attentions(initialised(family, "default"))[0].q_weight)
    assert (values[:, 0] / values[:, -1]).min() > 1.2


@each_family
def test_all_heads_values_together_are_the_tokens_themselves(family):
    for attention in attentions(initialised(family)):
        dim = attention.proj.in_features
        x = torch.randn(2, 5, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        assert torch.equal(x @ attention.v_weight.flatten(0, 1).T, x)


@each_family
@pytest.mark.parametrize("base", ["default", "torch"])
def test_nothing_else_is_written(family, base):
    reference = initialised(family, base).state_dict()
    for key, value in initialised(family, base=base).state_dict().items():
        assert torch.equal(value, reference[key]) != key.endswith("attn.qkv.weight"), key


@each_family
def test_every_head_and_block_has_its_own_draws_and_the_generator_alone_decides(family):
    model, again, other = (initialised(family, seed=seed) for seed in (3, 3, 4))
    drawn = []
    for block, same, different in zip(*map(attentions, (model, again, other))):
        assert torch.equal(block.qkv.weight, same.qkv.weight)
        assert not torch.equal(block.qkv.weight, different.qkv.weight)
        drawn += [*block.q_weight, *block.k_weight]
    for number, first in enumerate(drawn):
        assert all(first.shape != second.shape or not torch.equal(first, second)
                   for second in drawn[:number])
