"""All initialisations: the table `INITS`, name → model family → function, and `init_weights`.

An init first draws its base for every parameter from the generator that it is given, so that
nothing the constructor drew remains, and then overwrites the tensors that its docstring lists. It
returns nothing, prints nothing and changes no global state. If an init is not defined for a model
family, the family is missing from its row.

What a seed reproduces. All random draws are made on the CPU, so a seed gives the same draws on any
machine. The weights computed from them are equal to the bit given the same number of threads and
the same kernels (CPU and torch build). Otherwise the products Q·Kᵀ of each head and V·proj agree to
1e-4 of their norm, but the factors Q, K, V and proj may differ, most of all in the signs of rows
that cancel in the product. Models that must start equal should therefore share weights, not only a
seed; in train.py the first process sends its weights to all others.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..models import FAMILIES
from .baseline import default, lecun, torch_default
from .deep_impulse import deep_impulse
from .filters_conv_mixer import filters_conv_mixer
from .impulse import impulse
from .impulse_conv_mixer import impulse_conv_mixer
from .impulse_gd import impulse_gd
from .impulse_mixer import impulse_mixer
from .impulse_simple_vit import impulse_simple_vit
from .impulse_swin import impulse_swin
from .in_place import call, deep_impulse_, describe, impulse_, init_, mimetic_
from .mimetic import mimetic, mimetic_simple_vit
from .norm_matched import norm_matched

__all__ = ["GIVEN", "INITS", "deep_impulse_", "describe", "impulse_", "init_", "init_function",
           "init_weights", "mimetic_", "reads_images"]

GIVEN = ("generator", "images")       # parameters of inits that a caller gives; they are no options
INITS: dict[str, dict[str, Callable[..., None]]] = {
    "default": dict.fromkeys(FAMILIES, default),
    "torch": dict.fromkeys(FAMILIES, torch_default),
    "lecun": dict.fromkeys(FAMILIES, lecun),
    "mimetic": {"vit": mimetic, "swin": mimetic, "simple_vit": mimetic_simple_vit},
    "impulse": {"vit": impulse, "swin": impulse_swin, "mlp_mixer": impulse_mixer,
                "conv_mixer": impulse_conv_mixer, "simple_vit": impulse_simple_vit},
    "deep_impulse": {"vit": deep_impulse},
    "norm_matched": {"vit": norm_matched},
    "filters": {"conv_mixer": filters_conv_mixer},
    "impulse_gd": {"vit": impulse_gd, "simple_vit": impulse_gd},
}


def family_of(model: nn.Module) -> str:
    """The family of one of our models, a key of INITS' rows; the class's name of any other."""
    return getattr(model, "family", type(model).__name__)


def init_function(name: str, family: str) -> Callable[..., None]:
    """The function that performs the init `name` on models of `family`, such as "vit".

    Raises ValueError for an unknown name, or if the init is not defined for the family.
    """
    if name not in INITS:
        near = difflib.get_close_matches(name, INITS, n=3) or sorted(INITS)
        raise ValueError(f"there is no init '{name}'; near: {', '.join(near)}")
    if family in INITS[name]:
        return INITS[name][family]
    others = [other for other, families in INITS.items() if family in families]
    raise ValueError(f"init '{name}' is not defined for a {FAMILIES.get(family, family)}; it has: "
                     f"{', '.join(others) or 'none'}")


def reads_images(name: str, family: str) -> bool:
    """Whether the init `name` of a family reads training images; raises as `init_function`."""
    return "images" in inspect.signature(init_function(name, family)).parameters


def init_weights(model: nn.Module, name: str, *, generator: torch.Generator,
                 images: torch.Tensor | None = None, **options: Any) -> None:
    """Initialise all weights of `model` in place by the init `name`.

    model: in float32 or float64, on the CPU; it may be compiled by torch.compile.
    generator: a CPU generator. The same generator in the same state gives the same weights, within
        the limits that the module's docstring describes.
    images: (n, 3, H, W), normalised training images, for inits that read some; see `reads_images`.
    options: keyword options of the init; see its function, `init_function(name, family_of(model))`.

    Raises ValueError, with a message of one line, for an unknown name, for a model or values that
    the init cannot handle, and for values with which weights would not be finite.
    """
    model = getattr(model, "_orig_mod", model)       # the model that torch.compile wrapped
    function = init_function(name, family_of(model))
    if generator.device.type != "cpu":
        raise ValueError(f"the generator is on {generator.device}; inits draw on the CPU: use "
                         "torch.Generator()")
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and (tensor.device.type != "cpu"
                                           or tensor.dtype not in (torch.float32, torch.float64)):
            raise ValueError(f"{tensor_name} is {str(tensor.dtype).removeprefix('torch.')} on "
                             f"{tensor.device}; inits draw and solve on the CPU in float32 or "
                             f"float64: "
                             "call init_weights before .half(), .bfloat16() or .to(device)")
    read = {"images": images} if reads_images(name, family_of(model)) else {}
    call(function, model, name, options, generator=generator, **read)
