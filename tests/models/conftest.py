"""What the tests of every model family share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def assert_bfloat16_is_near() -> Callable[[torch.nn.Module, torch.Tensor], None]:
    """Logits under bf16 autocast are near float32's, not equal, and gradients are finite."""
    def check(model: torch.nn.Module, images: torch.Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = model(images)
        assert low.dtype == torch.bfloat16
        full = model(images)
        assert 0 < (low - full).norm() / full.norm() < 0.03
        low.square().sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
    return check
