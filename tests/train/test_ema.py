"""The moving average, compared with its formula."""

from __future__ import annotations

import pytest
import torch
from launches import launches_of
from torch import nn

from vitinit.train.state import Ema


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


def test_an_update_is_one_call_for_each_kind_of_tensor():
    model = model_with_buffers()
    ema = Ema(model, decay=0.8, warmup=True)
    assert sorted(launches_of(ema.update).by_name) == [
        "aten::_foreach_copy_", "aten::_foreach_lerp_.Scalar"]
