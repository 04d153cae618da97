"""All initialisations: one literal table, name → model family → function, and `init_weights`.

An init draws its base for every parameter from the generator that it is given, so that nothing a
constructor drew survives, and then overwrites the tensors that its docstring lists. It returns
nothing, prints nothing and touches no global state. A family that an init is not defined for is
missing from its row.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..models import ConvMixer, MlpMixer, SimpleViT, SwinTransformer, VisionTransformer
from .baseline import default, torch_default
from .conditioned import conditioned
from .deep_impulse import deep_impulse
from .filters_conv_mixer import filters_conv_mixer
from .impulse import impulse
from .impulse_conv_mixer import deep_impulse_conv_mixer, impulse_conv_mixer
from .impulse_gd import impulse_gd
from .impulse_mixer import impulse_mixer
from .impulse_simple_vit import impulse_simple_vit
from .impulse_swin import deep_impulse_swin, impulse_swin
from .mimetic import mimetic, mimetic_simple_vit

__all__ = ["INITS", "init_function", "init_weights"]

INITS: dict[str, dict[type[nn.Module], Callable[..., None]]] = {
    "default": {VisionTransformer: default, SwinTransformer: default, MlpMixer: default,
                ConvMixer: default, SimpleViT: default},
    "torch": {VisionTransformer: torch_default, SwinTransformer: torch_default,
              MlpMixer: torch_default, ConvMixer: torch_default, SimpleViT: torch_default},
    "mimetic": {VisionTransformer: mimetic, SwinTransformer: mimetic,
                SimpleViT: mimetic_simple_vit},
    "impulse": {VisionTransformer: impulse, SwinTransformer: impulse_swin,
                MlpMixer: impulse_mixer, ConvMixer: impulse_conv_mixer,
                SimpleViT: impulse_simple_vit},
    "deep_impulse": {VisionTransformer: deep_impulse, SwinTransformer: deep_impulse_swin,
                     MlpMixer: impulse_mixer, ConvMixer: deep_impulse_conv_mixer},
    "conditioned": {VisionTransformer: conditioned, SwinTransformer: conditioned},
    "filters": {ConvMixer: filters_conv_mixer},
    "impulse_gd": {VisionTransformer: impulse_gd, SimpleViT: impulse_gd},
}


def init_function(name: str, family: type[nn.Module]) -> Callable[..., None]:
    """The function that does the init `name` on models of that class.

    Raises ValueError for an unknown name, or one that the family has not.
    """
    if name not in INITS:
        near = difflib.get_close_matches(name, INITS, n=3) or sorted(INITS)
        raise ValueError(f"there is no init '{name}'; near: {', '.join(near)}")
    if family not in INITS[name]:
        others = [other for other, families in INITS.items() if family in families]
        raise ValueError(f"init '{name}' is not defined for a {family.__name__}; it has: "
                         f"{', '.join(others) or 'none'}")
    return INITS[name][family]


def init_weights(model: nn.Module, name: str, *, generator: torch.Generator,
                 **options: Any) -> None:
    """Initialise all of `model`, in place, by the init `name`.

    generator: a CPU generator; the same one in the same state gives the same weights.
    options: keyword options of that init, see its function (`init_function(name, type(model))`).
    Raises ValueError for an unknown name, or a model or values that the init cannot serve.
    """
    init_function(name, type(model))(model, generator=generator, **options)
