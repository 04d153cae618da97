"""Random values in float64: the zeros and ones that layers start with would hide errors."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def redraw(module: nn.Module, spread: float = 0.3, first: int = 0) -> nn.Module:
    """New values for all parameters and running statistics; in float64. first: of the seeds."""
    module.double()
    statistics = [(name, value) for name, value in module.named_buffers() if "running" in name]
    for seed, (name, value) in enumerate([*module.named_parameters(), *statistics], first):
        values = drawn(*value.shape, seed=seed) * spread + (value.ndim == 1) * 0.5
        value.data.copy_(values.abs() + 0.1 if name.endswith("running_var") else values)
    return module


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_gradients(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """Each parameter's gradient is the one `expected` under its name."""
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-9, msg=name)
