"""Checks for a GPU, or else the CPU; `bench all` puts them in its report."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from outcomes import pytest_exception_interact, pytest_report_teststatus  # noqa: F401
from small_models import SMALL, written
from torch import Tensor, nn

from vitinit import build_model
from vitinit.models.layers import draw_drop_path

SIZE, BATCH, CLASSES = 16, 12, 7
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic; read when CUDA starts


@pytest.fixture
def device() -> torch.device:
    """The device to check, with its index, so that it equals the `device` of tensors on it."""
    kind = os.environ.get("VITINIT_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


@pytest.fixture
def cuda(device) -> torch.device:
    """The GPU; without one the test is skipped."""
    if device.type == "cpu":
        pytest.skip("a question about GPUs only")
    return device


@pytest.fixture(params=SMALL)
def small_model(request) -> nn.Module:
    """A small model of each family in turn, on the CPU, with the same weights every time."""
    return model_of(request.param)


@pytest.fixture
def a_vit() -> nn.Module:
    return model_of("vit_tiny")


def model_of(name: str) -> nn.Module:
    model = written("torch", build_model(name, num_classes=CLASSES, image_size=SIZE, **SMALL[name]))
    model.small_name = name
    return model


@pytest.fixture
def batch_of() -> Callable[..., tuple[Tensor, Tensor]]:
    """Makes noise images (count, 3, SIZE, SIZE) and random soft targets (count, CLASSES)."""

    def make(
        count: int = BATCH, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(count, 3, SIZE, SIZE, generator=generator)
        targets = torch.randn(count, CLASSES, generator=generator).softmax(dim=1)
        return images.to(device, dtype), targets.to(device, dtype)

    return make


@pytest.fixture
def drop_path_of() -> Callable[[nn.Module], Tensor | None]:
    """Draws drop-path scales (branches, BATCH) for a model with stochastic depth, else None."""
    return lambda model: (
        draw_drop_path(model.drop_path_rates, BATCH, np.random.default_rng(4))
        if any(model.drop_path_rates)
        else None
    )
