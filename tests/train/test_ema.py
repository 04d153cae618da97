"""The moving average, compared with its formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitinit.train.ema import Ema


def model_with_buffers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()


def train_a_little(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model.train()(torch.randn(7, 3, generator=generator, dtype=torch.float64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("warmup", [False, True])
def test_the_average_is_the_formula_over_parameters_and_buffers(warmup):
    model = model_with_buffers()
    ema = Ema(model, decay=0.8, warmup=warmup)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for update in range(11):
        train_a_little(model, seed=update)
        decay = min(0.8, 1 - (1 + update) ** (-2 / 3)) if warmup else 0.8
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                expected[name] = decay * expected[name] + (1 - decay) * value
            else:
                expected[name] = value.clone()
        ema.update()
    state = ema.model.state_dict()
    assert state["1.num_batches_tracked"] == 11
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("warmup", [False, True])
def test_a_skipped_update_is_none_whether_the_host_knows_or_the_device(warmup):
    """With `skipped` given as a boolean tensor, the update changes nothing and does not count."""
    model = model_with_buffers()
    told, knew = (Ema(model, decay=0.8, warmup=warmup) for _ in range(2))
    for update, skipped in enumerate([True, False, True, False, False, True]):
        train_a_little(model, seed=update)
        told.update(torch.tensor(skipped))
        if not skipped:
            knew.update()
    assert told.updates == knew.updates == told.state_dict()["updates"] == 3
    for name, value in knew.model.state_dict().items():
        torch.testing.assert_close(told.model.state_dict()[name], value, rtol=1e-12, atol=1e-12)
    resumed = Ema(model, decay=0.8, warmup=warmup)
    resumed.load_state_dict(told.state_dict())
    for ema in (told, resumed):
        ema.update(torch.tensor(False))
        ema.update(torch.tensor(False))
    for name, value in told.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


class Calls(TorchDispatchMode):
    """Records the names of the operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*arguments, **keywords or {})


def test_an_update_is_one_call_for_each_kind_of_tensor():
    model = model_with_buffers()
    ema = Ema(model, decay=0.8, warmup=True)
    with Calls() as calls:
        ema.update()
    assert sorted(calls.names) == ["_foreach_copy_", "_foreach_lerp_"]


def test_it_shares_nothing_with_the_model_and_needs_no_gradient():
    model = model_with_buffers()
    ema = Ema(model, decay=0.9, warmup=False)
    before = ema.model[0].weight.clone()
    train_a_little(model, seed=0)
    assert torch.equal(ema.model[0].weight, before)
    assert not any(p.requires_grad for p in ema.model.parameters()) and not ema.model.training


def test_it_resumes_exactly():
    model = model_with_buffers()
    straight, stopped = (Ema(model, decay=0.9, warmup=True) for _ in range(2))
    for update in range(5):
        train_a_little(model, seed=update)
        straight.update()
        stopped.update()
        if update == 2:
            state = stopped.state_dict()
            stopped = Ema(model, decay=0.9, warmup=True)
            stopped.load_state_dict(state)
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, stopped.model.state_dict()[name]), name
