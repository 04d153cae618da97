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
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..messages import in_brief
from ..models import ConvMixer, MlpMixer, SimpleViT, SwinTransformer, VisionTransformer
from .baseline import default, lecun, torch_default
from .conditioned import conditioned
from .dct import dct
from .deep_impulse import deep_impulse
from .filters_conv_mixer import filters_conv_mixer
from .impulse import impulse
from .impulse_conv_mixer import deep_impulse_conv_mixer, impulse_conv_mixer
from .impulse_gd import impulse_gd
from .impulse_mixer import impulse_mixer
from .impulse_simple_vit import impulse_simple_vit
from .impulse_swin import deep_impulse_swin, impulse_swin
from .mimetic import mimetic, mimetic_simple_vit
from .options import GIVEN, given_numbers, require_kinds

__all__ = ["GIVEN", "INITS", "init_function", "init_weights", "reads_images"]

INITS: dict[str, dict[type[nn.Module], Callable[..., None]]] = {
    "default": {VisionTransformer: default, SwinTransformer: default, MlpMixer: default,
                ConvMixer: default, SimpleViT: default},
    "torch": {VisionTransformer: torch_default, SwinTransformer: torch_default,
              MlpMixer: torch_default, ConvMixer: torch_default, SimpleViT: torch_default},
    "lecun": {VisionTransformer: lecun, SwinTransformer: lecun, MlpMixer: lecun, ConvMixer: lecun,
              SimpleViT: lecun},
    "mimetic": {VisionTransformer: mimetic, SwinTransformer: mimetic,
                SimpleViT: mimetic_simple_vit},
    "impulse": {VisionTransformer: impulse, SwinTransformer: impulse_swin,
                MlpMixer: impulse_mixer, ConvMixer: impulse_conv_mixer,
                SimpleViT: impulse_simple_vit},
    "deep_impulse": {VisionTransformer: deep_impulse, SwinTransformer: deep_impulse_swin,
                     MlpMixer: impulse_mixer, ConvMixer: deep_impulse_conv_mixer},
    "conditioned": {VisionTransformer: conditioned, SwinTransformer: conditioned},
    "dct": {VisionTransformer: dct, SwinTransformer: dct},
    "filters": {ConvMixer: filters_conv_mixer},
    "impulse_gd": {VisionTransformer: impulse_gd, SimpleViT: impulse_gd},
}


def init_function(name: str, family: type[nn.Module]) -> Callable[..., None]:
    """The function that performs the init `name` on models of class `family` or of its subclasses.

    Raises ValueError for an unknown name, or if the init is not defined for the family.
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


def reads_images(options: Mapping[str, Any]) -> bool:
    """Whether an init with these options reads training images.

    `init_weights` says which options cannot do without them.
    """
    return (options.get("patch_embed") == "whitened" or options.get("calibrated") is True
            or bool(options.get("constant_share")))


def init_weights(model: nn.Module, name: str, *, generator: torch.Generator,
                 images: torch.Tensor | None = None, **options: Any) -> None:
    """Initialise all weights of `model` in place by the init `name`.

    model: in float32 or float64, on the CPU; it may be compiled by torch.compile.
    generator: a CPU generator. The same generator in the same state gives the same weights, within
        the limits that the module's docstring describes.
    images: (n, 3, H, W), normalised training images, for inits that read some; see `reads_images`.
    options: keyword options of the init; see its function, `init_function(name, type(model))`.

    Raises ValueError, with a message of one line, for an unknown name, for a model or values that
    the init cannot handle, and for values with which weights would not be finite.
    """
    model = getattr(model, "_orig_mod", model)       # the model that torch.compile wrapped
    function = init_function(name, type(model))
    _require_cpu_and_full_precision(model, generator)
    require_kinds(function, options)
    try:
        given = {"images": images} if reads_images(options) else {}
        function(model, generator=generator, **given, **options)
    except (ArithmeticError, RuntimeError) as error:     # overflow, or a failed decomposition
        raise ValueError(f"init '{name}'{given_numbers(options)} cannot be computed "
                         f"({in_brief(error, 60)}); use values nearer to the defaults") from error
    for parameter_name, parameter in model.named_parameters():
        # A NaN or an infinity shows in the extremes: an eighth of the time of isfinite().all().
        if parameter.numel() and not torch.stack(parameter.aminmax()).isfinite().all():
            raise ValueError(f"init '{name}'{given_numbers(options)} makes {parameter_name} infinite "
                             "or NaN; use values nearer to the defaults")


def _require_cpu_and_full_precision(model: nn.Module, generator: torch.Generator) -> None:
    """Raise ValueError unless both are on the CPU and the model is in float32 or float64."""
    if generator.device.type != "cpu":
        raise ValueError(f"the generator is on {generator.device}; inits draw on the CPU: use "
                         "torch.Generator()")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point() and (value.device.type != "cpu"
                                          or value.dtype not in (torch.float32, torch.float64)):
            raise ValueError(f"{name} is {str(value.dtype).removeprefix('torch.')} on {value.device}; "
                             "inits draw and solve on the CPU in float32 or float64: call "
                             "init_weights before .half(), .bfloat16() or .to(device)")
