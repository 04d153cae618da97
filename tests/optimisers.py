"""The optimisers of a recipe, with few settings of a test's own, and what they train."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from vitinit.recipe.files import RECIPES, load_recipe
from vitinit.train.metrics import Progress
from vitinit.train.optim import optimizer_for
from vitinit.train.state import Ema, TrainState

OPTIM = load_recipe(RECIPES / "quickstart.toml").optim


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    """AdamW for all parameters. settings: fields of `Optim`."""
    return optimizer_for(model, replace(OPTIM, name="adamw", **settings))


def muon(
    model: nn.Module, *, factor: float, momentum: float, **settings: Any
) -> torch.optim.Optimizer:
    """Muon for the matrices of the blocks, and AdamW for all other parameters."""
    settings = {"muon_dtype": "float32", **settings}
    return optimizer_for(
        model, replace(OPTIM, name="muon", muon_factor=factor, muon_momentum=momentum, **settings)
    )


OF_ADAMW = dict(weight_decay=0.05, betas=(0.9, 0.99), eps=1e-8)
OPTIMISERS = {
    "adamw": partial(adamw, **OF_ADAMW),
    "muon": partial(muon, factor=1.3, momentum=0.95, **OF_ADAMW),
}


def state_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    ema: Ema | None = None,
    scaler: torch.amp.GradScaler | None = None,
    progress: Progress | None = None,
) -> TrainState:
    """A training state, by default at step 0, without loss scaling and moving average."""
    device = next(model.parameters()).device
    return TrainState(
        model,
        optimizer,
        scaler or torch.amp.GradScaler(device.type, enabled=False),
        ema,
        progress or Progress(),
    )
