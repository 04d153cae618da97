"""All initialisations: one literal table, name → function, and `init_weights`.

An init draws its base for every parameter from the generator that it is given, so that nothing a
constructor drew survives, and then overwrites the tensors that its docstring lists. It returns
nothing, prints nothing and touches no global state.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .baseline import default, torch_default
from .impulse import impulse
from .mimetic import mimetic

__all__ = ["INITS", "init_weights"]

INITS: dict[str, Callable[..., None]] = {
    "default": default,
    "torch": torch_default,
    "mimetic": mimetic,
    "impulse": impulse,
}


def init_weights(model: nn.Module, name: str, *, generator: torch.Generator,
                 **options: Any) -> None:
    """Initialise all of `model`, in place, by the init `name`.

    generator: a CPU generator; the same one in the same state gives the same weights.
    options: keyword options of that init, see its function (`vitinit.init.INITS[name]`).
    Raises ValueError for an unknown name, or a model or values that the init cannot serve.
    """
    if name not in INITS:
        near = difflib.get_close_matches(name, INITS, n=3) or sorted(INITS)
        raise ValueError(f"there is no init '{name}'; near: {', '.join(near)}")
    INITS[name](model, generator=generator, **options)
