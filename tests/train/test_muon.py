"""Muon: its iteration, its update, which weights it trains, what it launches; skipped steps."""

import copy
import re

import pytest
import torch
from launches import launches_of
from optimisers import OPTIMISERS, SMALL, adamw, built, muon, put_gradients, vit_b_with_gradients
from same_run import assert_identical
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vitinit.train.muon import COEFFICIENTS, orthogonalised
from vitinit.train.optim import hidden_matrices, layer_numbers, set_learning_rate

OF_ADAMW = dict(weight_decay=0.3, betas=(0.9, 0.97), eps=1e-6)
OPTIONS = dict(factor=2.3, momentum=0.83, **OF_ADAMW)
MATRICES = re.compile(
    r"(.*blocks\.\d\.(1|(attn|mlp\w*)\.(qkv|qk|value|proj|fc1|fc2))"
    r"|layers\.1\.downsample\.reduction)\.weight"
)


def iterated_singular_values(matrix: Tensor) -> Tensor:
    """The iteration in float64, on the singular values: they are mapped by its polynomial alone."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    a, b, c = COEFFICIENTS
    values = values / max(float(values.square().sum().sqrt()), 1e-7)
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize(
    "rows, columns, dtype, tolerance",
    [
        (7, 13, torch.float64, 1e-11),
        (13, 7, torch.float32, 1e-4),
        (11, 11, torch.bfloat16, 0.05),
        (1, 5, torch.float64, 1e-11),
    ],
)
def test_the_iteration_maps_singular_values_by_its_polynomial(rows, columns, dtype, tolerance):
    """They come near one, and zeros stay. The scale of a matrix does not matter."""
    matrices = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(0)).double()
    matrices[0], matrices[1] = 0.0, 1e-4 * matrices[1]
    expected = torch.stack([iterated_singular_values(matrix) for matrix in matrices])
    found = orthogonalised(matrices, dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert torch.equal(found[0], matrices[0]) and torch.linalg.matrix_norm(found[1:], 2).max() < 1.3


@pytest.mark.parametrize(
    "muon_dtype, dtype",
    [("bf16", torch.bfloat16), ("float32", torch.float32), ("bf16_on_gpu", torch.float32)],
)
def test_the_recipe_chooses_the_precision_of_the_iteration(muon_dtype, dtype):
    """On a CPU, where bf16_on_gpu, which is what version 12 did, is float32."""
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(7, 11)])})
    put_gradients(model, 0)
    weight = model["blocks"][0].weight
    optimizer = muon(model, muon_dtype=muon_dtype, **OPTIONS | {"weight_decay": 0.0})
    set_learning_rate(optimizer, 1.0)
    before, gradient = weight.detach().clone(), weight.grad.clone()
    optimizer.step()
    momentum = (1.0 - 0.83) * gradient
    direction = gradient.lerp(momentum, 0.83)
    expected = orthogonalised(direction[None], dtype)[0]
    torch.testing.assert_close(
        (before - weight.detach()) / (2.3 * 0.2 * 11**0.5), expected, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    "family, by_muon", [*((family, True) for family in SMALL), ("vit", False), ("swin", False)]
)
def test_an_update_is_its_formula_in_float64(family, by_muon, held_against):
    """The class's docstring for the matrices of the blocks, and torch's AdamW for all other
    parameters; with layer decay. Vectors, position embeddings and tokens do not decay."""
    model, theirs = built(family), built(family)
    numbers = layer_numbers(name for name, _ in model.named_parameters())
    matrices, last = set(filter(MATRICES.fullmatch, numbers)), max(numbers.values())
    assert hidden_matrices(model) == matrices
    if by_muon:
        optimizer = muon(model, layer_decay=0.7, **OPTIONS)
    else:
        optimizer, matrices = adamw(model, layer_decay=0.7, **OF_ADAMW), set()
    others = torch.optim.AdamW(
        [
            {
                "params": [p],
                "weight_decay": 0.3
                if p.ndim > 1
                and "pos_embed" not in name
                and not name.endswith(("_token", "_table", ".frequencies"))
                else 0.0,
                "layer": numbers[name],
            }
            for name, p in theirs.named_parameters()
            if name not in matrices
        ],
        betas=OF_ADAMW["betas"],
        eps=OF_ADAMW["eps"],
    )
    momenta = {name: torch.zeros(()) for name in matrices}
    for step in range(3):
        rate = 0.01 * (step + 1)
        put_gradients(model, step), put_gradients(theirs, step)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        for group in others.param_groups:
            group["lr"] = rate * 0.7 ** (last - group["layer"])
        others.step()
        for name, weight in theirs.named_parameters():
            if name in matrices:
                eta, gradient = rate * 0.7 ** (last - numbers[name]), weight.grad.flatten(1)
                momenta[name] = 0.83 * momenta[name] + 0.17 * gradient
                direction = iterated_singular_values(0.17 * gradient + 0.83 * momenta[name])
                size = 0.2 * max(direction.shape) ** 0.5 * 2.3 * eta
                weight.data = weight.data * (1 - 0.3 * eta) - size * direction.view_as(weight)
    for (name, ours), other in zip(model.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-5, msg=lambda m: f"{name}: {m}")
    held_against([*model.parameters()], [*theirs.parameters()], cases=3)


def operations(optimizer: torch.optim.Optimizer) -> int:
    set_learning_rate(optimizer, 1e-3)
    optimizer.step()  # not counted: the state is made
    return launches_of(optimizer.step).count


def test_an_update_of_vit_b_launches_few_operations():
    """On fake CUDA tensors. torch.optim.Muon goes matrix by matrix."""
    with FakeTensorMode():
        model = vit_b_with_gradients()
        matrices = [model.get_parameter(name) for name in hidden_matrices(model)]
        ours, theirs = operations(muon(model, **OPTIONS)), operations(torch.optim.Muon(matrices))
        # Of each of two groups: a kernel for all weights, another for their steps, and two marks.
        assert operations(adamw(model, **OF_ADAMW)) <= 2 * 4
    assert ours <= 150 and 8 * ours < theirs


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_closure_is_called_before_the_update_with_gradients_on(optimiser):
    """As torch's optimisers do, also where the caller has switched gradients off."""
    model, plain = built("vit"), built("vit")
    optimizer, other = (OPTIMISERS[optimiser](one) for one in (model, plain))
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()

    def closure() -> Tensor:
        loss = model(images)[0].square().mean()
        loss.backward()
        return loss

    plain(images)[0].square().mean().backward()
    set_learning_rate(optimizer, 0.1), set_learning_rate(other, 0.1)
    other.step()
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.requires_grad
    assert_identical(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("optimiser", ["muon", "lamb"])
@pytest.mark.parametrize(
    "bad, clipped",
    [("blocks.1.mlp.fc1.weight", True), ("head.bias", False), (None, False), (None, True)],
)
def test_an_overflow_in_any_weight_skips_all(optimiser, bad, clipped):
    """Through GradScaler, by Muon with AdamW, and by LAMB: nothing changes, to the bit; without an overflow, as without it."""
    model, plain = built("vit", torch.float32), built("vit", torch.float32)
    optimizer, other = (OPTIMISERS[optimiser](one) for one in (model, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(2):
        for target in (optimizer, other):
            set_learning_rate(target, 0.1)
        put_gradients(plain, step), put_gradients(model, step)
        for parameter in model.parameters():
            parameter.grad *= 8.0
        scaler.scale(torch.ones(()))
        if step and bad:
            model.get_parameter(bad).grad.view(-1)[3] = float("inf")
        before = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
        if clipped:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        other.step()
    if not bad:
        before = [plain.state_dict(), other.state_dict()["state"]]
    assert_identical([model.state_dict(), optimizer.state_dict()["state"]], before)
    assert scaler.get_scale() == (4.0 if bad else 8.0)
