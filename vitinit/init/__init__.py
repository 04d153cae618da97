"""All initialisations: one literal table, name → model family → function, and `init_weights`.

An init draws its base for every parameter from the generator that it is given, so that nothing a
constructor drew survives, and then overwrites the tensors that its docstring lists. It returns
nothing, prints nothing and touches no global state. A family that an init is not defined for is
missing from its row.

What is the same everywhere: the draws are the CPU's, so one seed gives the same numbers on any machine.
What is computed from them is the same to the bit with equal numbers of threads and equal kernels (CPU
and torch build). Otherwise Q·Kᵀ of each head and V·proj agree to 1e-4 of their norm, while the factors
Q, K, V and proj may differ, above all in the signs of rows that cancel in the product. So models
that are to start alike share weights, not seeds alone; train.py has its first process give them to
all others.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..messages import in_brief
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
from .options import given_numbers, require_kinds

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
    """The function that does the init `name` on models of that class, or of one that it extends.

    Raises ValueError for an unknown name, or one that the family has not.
    """
    if name not in INITS:
        near = difflib.get_close_matches(name, INITS, n=3) or sorted(INITS)
        raise ValueError(f"there is no init '{name}'; near: {', '.join(near)}")
    for ancestor in family.__mro__:
        if ancestor in INITS[name]:
            return INITS[name][ancestor]
    others = [other for other, families in INITS.items() if families.keys() & set(family.__mro__)]
    raise ValueError(f"init '{name}' is not defined for a {family.__name__}; it has: "
                     f"{', '.join(others) or 'none'}")


def init_weights(model: nn.Module, name: str, *, generator: torch.Generator,
                 **options: Any) -> None:
    """Initialise all of `model`, in place, by the init `name`.

    model: in float32 or float64, on the CPU; or what torch.compile made of such a one.
    generator: a CPU generator; the same one in the same state gives the same weights, as far as the
        top of this file says.
    options: keyword options of that init, see its function (`init_function(name, type(model))`).
    Raises ValueError, in one line, for an unknown name, a model or values that the init cannot serve,
    and values for which weights would not be finite.
    """
    model = getattr(model, "_orig_mod", model)       # what torch.compile wraps
    function = init_function(name, type(model))
    _require_place(model, generator)
    require_kinds(function, options)
    try:
        function(model, generator=generator, **options)
    except (ArithmeticError, RuntimeError) as error:     # an overflow, a decomposition that fails
        raise ValueError(f"init '{name}'{given_numbers(options)} cannot be computed "
                         f"({in_brief(error, 60)}); use values nearer to the defaults") from error
    for parameter_name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"init '{name}'{given_numbers(options)} makes {parameter_name} infinite "
                             "or NaN; use values nearer to the defaults")


def _require_place(model: nn.Module, generator: torch.Generator) -> None:
    """ValueError unless everything is drawn and solved on the CPU, in full precision."""
    if generator.device.type != "cpu":
        raise ValueError(f"the generator is on {generator.device}; inits draw on the CPU: use "
                         "torch.Generator()")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point() and (value.device.type != "cpu"
                                          or value.dtype not in (torch.float32, torch.float64)):
            raise ValueError(f"{name} is {str(value.dtype).removeprefix('torch.')} on {value.device}; "
                             "inits draw and solve on the CPU in float32 or float64: call "
                             "init_weights before .half(), .bfloat16() or .to(device)")
