"""The models by name: the table `MODELS`, name → (family, sizes), and `build_model`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ..base.messages import in_brief, unknown
from ..base.table import attribute, find
from ..base.values import convert_options

if TYPE_CHECKING:
    from .layers import Classifier

# Family → the class of its models, or where it is: see base/table.py.
FAMILIES: dict[str, Any] = {
    "vit": ".models.vit:VisionTransformer",
    "swin": ".models.swin:SwinTransformer",
    "mlp_mixer": ".models.mlp_mixer:MlpMixer",
    "conv_mixer": ".models.conv_mixer:ConvMixer",
    "simple_vit": ".models.simple_vit:SimpleViT",
}
FAMILY_OF_CLASS = {
    row.partition(":")[2]: family for family, row in FAMILIES.items()
}  # imported if asked

__all__ = ["FAMILIES", "MODELS", "build_model", "model_class", *FAMILY_OF_CLASS]

VIT_TINY = dict(patch_size=16, embed_dim=192, depth=12, num_heads=3)
VIT_SMALL = dict(patch_size=16, embed_dim=384, depth=12, num_heads=6)
VIT_BASE = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)
VIT_LARGE = dict(patch_size=16, embed_dim=1024, depth=24, num_heads=16)
SWIN_SMALL = dict(patch_size=4, embed_dim=96, depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24))

# The models by name: family, and keyword arguments of its class.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # arXiv 2010.11929, table 1 (B, L); DeiT, arXiv 2012.12877, table 1 (T, S) and §4 (distilled)
    "vit_tiny": ("vit", VIT_TINY),
    "vit_small": ("vit", VIT_SMALL),
    "vit_base": ("vit", VIT_BASE),
    "vit_large": ("vit", VIT_LARGE),
    "vit_tiny_distilled": ("vit", VIT_TINY | dict(distilled=True)),
    "vit_small_distilled": ("vit", VIT_SMALL | dict(distilled=True)),
    "vit_base_distilled": ("vit", VIT_BASE | dict(distilled=True)),
    # arXiv 2103.14030, §3.3
    "swin_tiny": ("swin", SWIN_SMALL | dict(depths=(2, 2, 6, 2))),
    "swin_small": ("swin", SWIN_SMALL),
    "swin_base": ("swin", SWIN_SMALL | dict(embed_dim=128, num_heads=(4, 8, 16, 32))),
    # arXiv 2105.01601, table 1
    "mixer_s32": ("mlp_mixer", dict(patch_size=32, embed_dim=512, depth=8)),
    "mixer_s16": ("mlp_mixer", dict(patch_size=16, embed_dim=512, depth=8)),
    "mixer_b32": ("mlp_mixer", dict(patch_size=32, embed_dim=768, depth=12)),
    "mixer_b16": ("mlp_mixer", dict(patch_size=16, embed_dim=768, depth=12)),
    "mixer_l16": ("mlp_mixer", dict(patch_size=16, embed_dim=1024, depth=24)),
    # arXiv 2201.09792, table 1 (width, depth), and small ones for 32 pixels (arXiv 2401.12511)
    "convmixer_1536_20": (
        "conv_mixer",
        dict(patch_size=7, embed_dim=1536, depth=20, kernel_size=9),
    ),
    "convmixer_1024_20": (
        "conv_mixer",
        dict(patch_size=14, embed_dim=1024, depth=20, kernel_size=9),
    ),
    "convmixer_768_32": (
        "conv_mixer",
        dict(patch_size=7, embed_dim=768, depth=32, kernel_size=7, activation="relu"),
    ),
    "convmixer_512_8": ("conv_mixer", dict(patch_size=2, embed_dim=512, depth=8, kernel_size=5)),
    "convmixer_256_8": ("conv_mixer", dict(patch_size=2, embed_dim=256, depth=8, kernel_size=5)),
    # arXiv 2401.12511, §5
    "simple_vit": ("simple_vit", dict(patch_size=2, embed_dim=512, depth=6, num_heads=8)),
}


def model_class(family: str) -> type[Classifier]:
    """The class of a family, a key of FAMILIES; raises KeyError for any other, and ValueError for a
    class that calls itself otherwise, whose inits would be another family's.
    """
    model = find(FAMILIES[family])
    if model.family != family:
        raise ValueError(
            f"FAMILIES['{family}'] is {model.__name__}, whose family is '{model.family}'; expected "
            "the same name"
        )
    return model


def __getattr__(name: str) -> Any:  # from vitinit.models import VisionTransformer
    return attribute(__name__, name, {cls: FAMILIES[row] for cls, row in FAMILY_OF_CLASS.items()})


def build_model(
    name: str, *, num_classes: int, image_size: int | tuple[int, int], **sizes: Any
) -> Classifier:
    """Build the model `name` with the sizes of its table entry, which `sizes` override or extend.

    For example `build_model("vit_tiny", num_classes=10, image_size=32, patch_size=2)`.

    num_classes: of the logits; 0: a model without a head, which returns pooled features.
    image_size: in pixels, one integer for a square, or (height, width).
    sizes: also in_channels, of the images, which is 3 by default.

    Returns a model that turns images (B, in_channels, H, W) into logits (B, num_classes), with weights as
    PyTorch's layers draw them; `vitinit.init_weights` initialises them. Raises ValueError, of one
    line, for an unknown name, for an option of another type, and for sizes that do not fit together
    or for whose weights no memory can be had; TypeError for an unknown option.
    """
    if name not in MODELS:
        raise ValueError(unknown("model", name, MODELS))
    family, defaults = MODELS[name]
    model = model_class(family)
    arguments = dict(num_classes=num_classes, image_size=image_size, **defaults | sizes)
    inspect.signature(model).bind(**arguments)
    arguments = convert_options(arguments, model)
    try:
        return model(**arguments)
    except (TypeError, RuntimeError, ArithmeticError, MemoryError) as error:
        raise ValueError(f"{name} cannot be built with these sizes: {in_brief(error)}") from None
