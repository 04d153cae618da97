"""DCT initialisation: one of the three projections is the cosine transform of the channels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import vitinit
from vitinit.init.dct import dct_matrix
from vitinit.init.mimetic import attentions

CASES = {"vit": ("vit_tiny", dict(image_size=20, patch_size=4, embed_dim=51, depth=2, num_heads=3)),
         "swin": ("swin_tiny", dict(image_size=24, patch_size=2, embed_dim=22, depths=(2, 1),
                                    num_heads=(2, 11), window_size=3))}
PROJECTIONS = ("query", "key", "value")              # in the order of the packed rows
each_family = pytest.mark.parametrize("family", CASES)
each_projection = pytest.mark.parametrize("projection", PROJECTIONS)


def initialised(family: str, name: str = "dct", **options) -> nn.Module:
    model_name, sizes = CASES[family]
    model = vitinit.build_model(model_name, num_classes=7, **sizes).double()
    vitinit.init_weights(model, name, generator=torch.Generator().manual_seed(0), **options)
    return model


@pytest.mark.parametrize("size", [1, 2, 7, 22])
def test_every_entry_is_the_cosine_of_the_formula(size):
    matrix = dct_matrix(size)
    for k in range(size):
        scale = math.sqrt((2 if k else 1) / size)
        for n in range(size):
            expected = scale * math.cos(math.pi * k * (2 * n + 1) / (2 * size))
            assert matrix[k, n].item() == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("size", [7, 22, 769])
def test_it_is_orthonormal(size):
    matrix = dct_matrix(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size).double(), rtol=0, atol=1e-13)


def test_rows_are_the_vibrations_of_a_free_string():
    """Row k is the eigenvector of second differences with reflecting ends, at 2 − 2 cos(πk / size)."""
    size = 23
    differences = torch.diag(torch.full((size,), 2.0).double())
    differences[0, 0] = differences[-1, -1] = 1.0
    differences -= torch.diag(torch.ones(size - 1), 1) + torch.diag(torch.ones(size - 1), -1)
    for k, row in enumerate(dct_matrix(size)):
        eigenvalue = 2 - 2 * math.cos(math.pi * k / size)
        torch.testing.assert_close(differences @ row, eigenvalue * row, rtol=0, atol=1e-13)


@each_family
@each_projection
def test_outputs_of_the_projection_are_the_transform_of_the_tokens(family, projection):
    model = initialised(family, projection=projection)
    for attention in attentions(model):
        dim = attention.proj.in_features
        x = torch.randn(2, 5, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        outputs = attention.queries_keys_values(x)[PROJECTIONS.index(projection)]    # (B, h, N, d)
        coefficients = outputs.detach().transpose(1, 2).flatten(2)                   # (B, N, C)
        torch.testing.assert_close(coefficients, x @ dct_matrix(dim).T, rtol=0, atol=1e-12)
        # Orthonormal: no token's norm changes.
        torch.testing.assert_close(coefficients.norm(dim=2), x.norm(dim=2), rtol=1e-12, atol=0)


@each_family
@each_projection
@pytest.mark.parametrize("base", ["default", "torch"])
def test_all_other_rows_and_tensors_are_the_bases_to_the_bit(family, projection, base):
    reference = initialised(family, base).state_dict()
    for key, value in initialised(family, base=base, projection=projection).state_dict().items():
        if not key.endswith("attn.qkv.weight"):
            assert torch.equal(value, reference[key]), key
            continue
        for name, ours, theirs in zip(PROJECTIONS, value.chunk(3), reference[key].chunk(3)):
            assert torch.equal(ours, theirs) != (name == projection), f"{key}, {name}"


def test_keys_are_the_default():
    default, keys = initialised("vit").state_dict(), initialised("vit", projection="key").state_dict()
    assert all(torch.equal(value, keys[key]) for key, value in default.items())


def test_another_projection_is_refused_in_one_line_before_anything_is_drawn():
    model, generator = initialised("vit"), torch.Generator().manual_seed(0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = generator.get_state()
    with pytest.raises(ValueError, match='projection is \'proj\', expected "query", "key" or "value"'):
        vitinit.init_weights(model, "dct", generator=generator, projection="proj")
    assert torch.equal(generator.get_state(), state)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
