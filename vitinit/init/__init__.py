"""All initialisations: the table `INITS`, name → model family → function, and `init_weights`.

An init first draws its base for every parameter from the generator that it is given, so that
nothing the constructor drew remains, and then overwrites the tensors that its docstring lists. It
returns nothing, prints nothing and changes no global state.

What a seed reproduces. All random draws are made on the CPU, so a seed gives the same draws on any
machine. The weights computed from them are equal to the bit given the same number of threads and
the same kernels (CPU and torch build). Otherwise the products Q·Kᵀ of each head and V·proj agree to
1e-4 of their norm, but the factors Q, K, V and proj may differ, most of all in the signs of rows
that cancel in the product. Models that must start equal should therefore share weights, not only a
seed; in train.py the first process sends its weights to all others.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, nn

from ..base.messages import in_brief, unknown
from ..base.table import attribute, find
from ..base.values import convert_options
from ..models import FAMILIES, MODELS
from ..models.layers import uncompiled

# Parameters of inits that a caller gives; they are no options.
GIVEN = ("generator", "images")
ROTARY = "rotary_vit"  # a ViT with rotary attention, in the table below

# The inits: by name and family, a function, or where it is, see base/table.py.
INITS: dict[str, dict[str, str | Callable[..., None]]] = {
    "default": {
        "vit": ".init.baseline:default",
        ROTARY: ".init.baseline:default",
        "swin": ".init.baseline:default",
        "mlp_mixer": ".init.baseline:mixer_default",
        "conv_mixer": ".init.baseline:torch_default",
        "simple_vit": ".init.baseline:torch_default",
    },
    "torch": dict.fromkeys((*FAMILIES, ROTARY), ".init.baseline:torch_default"),
    "lecun": dict.fromkeys((*FAMILIES, ROTARY), ".init.baseline:lecun"),
    "mimetic": {
        "vit": ".init.mimetic:mimetic",
        "swin": ".init.mimetic:mimetic",
        "simple_vit": ".init.mimetic:mimetic_simple_vit",
    },
    "impulse": {
        "vit": ".init.impulse:impulse",
        ROTARY: ".init.impulse_rotary:impulse_rotary",
        "swin": ".init.impulse:impulse_swin",
        "mlp_mixer": ".init.mixers:impulse_mixer",
        "conv_mixer": ".init.mixers:impulse_conv_mixer",
        "simple_vit": ".init.impulse_simple_vit:impulse_simple_vit",
    },
    "deep_impulse": {
        "vit": ".init.deep_impulse:deep_impulse",
        ROTARY: ".init.impulse_rotary:deep_impulse_rotary",
    },
    "whitened": dict.fromkeys(
        ("vit", ROTARY, "swin", "mlp_mixer", "conv_mixer"), ".init.baseline:whitened"
    ),
    "norm_matched": {"vit": ".init.impulse:norm_matched"},
    "filters": {"conv_mixer": ".init.mixers:filters_conv_mixer"},
    "impulse_gd": {
        "vit": ".init.impulse_gd:impulse_gd",
        "simple_vit": ".init.impulse_gd:impulse_gd",
    },
}
# For models of any library, in place; for Python they are names of this module.
IN_PLACE = {
    name: f".interop.in_place.initialise:{name}"
    for name in ("deep_impulse_", "describe", "impulse_", "init_", "mimetic_")
}
BASES = ("default", "torch", "lecun")
WIDE = (torch.float32, torch.float64)  # in which inits draw and solve

__all__ = ["GIVEN", "INITS", "init_function", "init_weights", "reads_images", *IN_PLACE]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name, IN_PLACE)


def family_of(model: Any) -> str:
    """The family of a model of ours or a layout, a key of INITS' rows; of any other its class."""
    family = getattr(model, "family", type(model).__name__)
    return ROTARY if family == "vit" and model.rotary else family


def stated_family(model: str, options: Mapping[str, Any]) -> str:
    """The same of the model of this name in `MODELS`, built with these options."""
    family, _ = MODELS[model]
    return ROTARY if family == "vit" and "rope" in options.get("pos_embed", "") else family


def init_function(name: str, family: str) -> Callable[..., None]:
    """The function that performs the init `name` on models of `family`, such as "vit".

    Raises ValueError for an unknown name, or if the init is not defined for the family.
    """
    if name not in INITS:
        raise ValueError(unknown("init", name, INITS))
    if family not in INITS[name]:
        others = [other for other, families in INITS.items() if family in families]
        advice = "expected one of these, or vitinit.init.init_ for a model of another library"
        if others:
            advice = f"it has: {', '.join(others)}"
        raise ValueError(
            f"init '{name}' is for {', '.join(INITS[name])}, the keys of its row in INITS, and not "
            f"defined for the family {family}; {advice}"
        )
    return find(INITS[name][family])


def reads_images(name: str, family: str) -> bool:
    """Whether the init `name` of a family reads training images; raises as `init_function`."""
    return "images" in inspect.signature(init_function(name, family)).parameters


@torch.autocast("cpu", enabled=False)
def init_weights(
    model: nn.Module,
    name: str,
    *,
    generator: Generator,
    images: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Initialise all weights of `model` in place by the init `name`.

    model: in float32 or float64, on the CPU; it may be compiled by torch.compile.
    generator: a CPU generator. The same generator in the same state gives the same weights, within
        the limits that the module's docstring describes.
    images: (n, 3, H, W), normalised training images, for inits that read some; see `reads_images`.
    options: keyword options of the init; see its function, `init_function(name, family_of(model))`,
        whose `family_of` tells a ViT with rotary attention from one without.

    Raises ValueError, with a message of one line, for an unknown name, for a model or values that
    the init cannot handle, and for values with which weights would not be finite; and TypeError,
    with one that lists the options, for an unknown option.
    """
    model = uncompiled(model)
    family = family_of(model)
    function = init_function(name, family)
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        fits = tensor.device.type == "cpu" and tensor.dtype in WIDE
        if tensor.is_floating_point() and not fits:
            raise ValueError(
                f"{tensor_name} is {str(tensor.dtype).removeprefix('torch.')} on "
                f"{tensor.device}; inits draw and solve on the CPU in float32 or "
                "float64: call init_weights before .half(), .bfloat16() or "
                ".to(device)"
            )
    read = {"images": images} if reads_images(name, family) else {}
    apply(function, model, model, options, name=name, generator=generator, **read)


def apply(
    function: Callable[..., None],
    model: nn.Module,
    target: Any,
    options: Mapping[str, Any],
    *,
    name: str,
    generator: Generator,
    **given: Any,
) -> None:
    """Let an init write to `target`, a model or its layout; raises as `init_weights`."""
    signature = inspect.signature(function)
    try:
        signature.bind(target, generator=generator, **given, **options)
    except TypeError as error:
        _, *known = [key for key in signature.parameters if key not in GIVEN]  # less the target
        raise TypeError(f"init '{name}' {error}; it has: {', '.join(known) or 'none'}") from None
    options = convert_options(options, function)
    if generator.device.type != "cpu":
        raise ValueError(
            f"the generator is on {generator.device}; inits draw on the CPU: use torch.Generator()"
        )
    try:
        function(target, generator=generator, **given, **options)
        require_finite(model)
    except (ArithmeticError, RuntimeError) as error:  # overflow, or a failed decomposition
        values = ", ".join(f"{key}={value}" for key, value in options.items())
        raise ValueError(
            f"init '{name}' with {values or 'its defaults'} cannot be computed: "
            f"{in_brief(error, 80)}; use values nearer to the defaults"
        ) from error


def require_finite(model: nn.Module) -> None:
    """Raise ArithmeticError for a parameter with infinities or NaN."""
    for name, tensor in model.named_parameters():
        # These show in the extremes, which takes an eighth of the time of isfinite().all().
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise ArithmeticError(f"{name} would be infinite or NaN")
