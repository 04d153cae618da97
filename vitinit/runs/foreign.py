"""What is known about the checkpoint of another project beside its tensors, and what is assumed.

Tensors do not show the whole function: not the number of heads, the activation, the epsilon of
norms, or how images are prepared. Some projects write this into files beside the weights:

    transformers    config.json and preprocessor_config.json
    timm's hub      config.json, with the name of the architecture and how images are prepared

`described` reads them into changes of a recipe, `transformers_config` writes the first two. What
no file states is assumed from the recipe, and `assumptions` says what that is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from ..messages import in_brief
from ..models import MODELS, SwinTransformer, VisionTransformer
from ..models.convert import (TRANSFORMERS_SWIN, TRANSFORMERS_VIT, WITH_TEACHER, Names)
from ..models.layers import hidden_width, to_pair
from ..recipe.files import Override
from ..recipe.sections import Recipe
from ..train.checkpoint import CheckpointError
from .folder import FOREIGN_WEIGHTS
from .groups import keys_of

# Whole words of a checkpoint's name whose models have our tensors' names and shapes, but compute
# something else.
TRAPS = {"rope": "rotary positions", "rpn": "norms after attention and MLP in place of before them"}
RESAMPLE = {2: "bilinear", 3: "bicubic"}                # Pillow's numbers
PREPARATION = ("data.mean", "data.std", "eval.crop_pct", "eval.interpolation")   # of images

# The architectures of transformers that load: model_type → names of classes.
ARCHITECTURES = {
    "vit": ("ViTForImageClassification", "ViTModel"),
    "deit": ("DeiTForImageClassification", "DeiTForImageClassificationWithTeacher", "DeiTModel"),
    "dinov2": ("Dinov2Model", "Dinov2Backbone"),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersBackbone"),
    "swin": ("SwinForImageClassification", "SwinModel", "SwinBackbone"),
}


@dataclass(frozen=True)
class Description:
    """What the files beside a checkpoint say."""

    file: Path                  # config.json
    recipe: str                 # a recipe for all that they do not say; "": they do not say the model
    changes: tuple[Override, ...]       # of that recipe
    classes: tuple[str, ...] | None     # the class of each logit, in order
    notes: tuple[str, ...]      # where images are prepared differently there

    def value(self, key: str) -> Any:
        """The value that the files state for a key of recipes, such as "data.mean"; None without one."""
        return next((change.value for change in self.changes if change.key == key), None)


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def described(path: Path, architecture: str = "") -> Description | None:
    """What is written beside the checkpoint file `path`, or None if nothing is.

    architecture: its name, where the checkpoint itself states it, as timm's trainer does. Raises
    CheckpointError for a file that cannot be read, and for a model that no model of this package
    computes, as far as the names of files and what they say show it.
    """
    require_no_trap(architecture, path)
    require_no_trap(path.name, path)
    if path.name in FOREIGN_WEIGHTS:
        require_no_trap(path.absolute().parent.name, path)
    file = path.with_name("config.json")
    if path.name not in FOREIGN_WEIGHTS or not file.exists():
        return None
    config = _table(file)
    try:
        if "model_type" in config:
            return _of_transformers(config, file)
        if "pretrained_cfg" in config:
            require_no_trap(str(config.get("architecture", "")), file)
            return _of_timm(config["pretrained_cfg"], file)
    except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{file}: is not what transformers or timm writes ({in_brief(error)})") from None
    return None


def require_no_trap(name: str, path: Path) -> None:
    """Raise CheckpointError if a name says that the tensors of a checkpoint would fit and mislead.

    name: that of the file, of its folder, or of the architecture. path: what the message names.
    """
    for word in re.split(r"[._\-]", name.lower()):
        if word in TRAPS:
            raise CheckpointError(
                f"{path}: '{word}' in the name {name} stands for {TRAPS[word]}, whose tensors would fit "
                f"and compute another function here; if this model has none, rename it without '{word}'")


def _table(file: Path) -> dict[str, Any]:
    try:
        table = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{file}: holds a {type(table).__name__}, expected an object")
    return table


def _of_timm(config: Mapping[str, Any], file: Path) -> Description:
    """How timm prepares images; the model's sizes are not in its files."""
    keys = {"mean": "data.mean", "std": "data.std", "crop_pct": "eval.crop_pct",
            "interpolation": "eval.interpolation"}
    changes = {key: config[name] for name, key in keys.items() if name in config}
    return Description(file, "", _overrides(changes, file), None, ())


def _of_transformers(config: Mapping[str, Any], file: Path) -> Description:
    kind, names = config["model_type"], config.get("architectures") or ["no architecture"]
    if names[0] not in ARCHITECTURES.get(kind, ()):
        reason = ("its classifier reads the class token and the mean of the patches together; its "
                  "backbone alone loads" if names[0].startswith("Dinov2") else
                  "no model of this package computes that; ViT, DeiT, DINOv2's backbone and Swin load")
        raise CheckpointError(f"{file}: describes {names[0]} ({kind}) of transformers; {reason}")

    def refuse(what: str) -> NoReturn:
        raise CheckpointError(f"{file}: {what}, which none of the models here has")

    def stated(key: str) -> Any:
        if config.get(key) is None:
            raise CheckpointError(f"{file}: states no {key}, without which the model is not known")
        return config[key]

    if config.get("hidden_act", "gelu") != "gelu":
        refuse(f"the activation {config['hidden_act']} in place of the exact GELU")
    if config.get("use_swiglu_ffn"):
        refuse("SwiGLU in place of the MLP")
    if config.get("use_absolute_embeddings"):
        refuse("a position embedding added to Swin")
    if config.get("num_channels", 3) != 3:
        refuse(f"images of {config['num_channels']} channels")
    options = {"patch_size": stated("patch_size"), "qkv_bias": config.get("qkv_bias", True)}
    if kind == "swin":
        if config.get("layer_norm_eps", 1e-5) != 1e-5:
            refuse(f"Swin with a layer_norm_eps of {config['layer_norm_eps']}")
        recipe, model = "swin_tiny", "swin_tiny"
        options |= {key: stated(key) for key in ("embed_dim", "depths", "num_heads", "window_size",
                                                 "mlp_ratio")}
    else:
        recipe, model = "deit_base", "vit_base"
        width = stated("hidden_size")
        options |= {"embed_dim": width, "depth": stated("num_hidden_layers"),
                    "num_heads": stated("num_attention_heads"), "norm_eps": stated("layer_norm_eps"),
                    "distilled": names[0] == "DeiTForImageClassificationWithTeacher",
                    "num_registers": config.get("num_register_tokens", 0),
                    "mlp_ratio": config.get("mlp_ratio") or mlp_ratio(stated("intermediate_size"),
                                                                      width)}
        # A distillation token that no classifier reads takes part in attention, as a register does.
        options["num_registers"] += kind == "deit" and not options["distilled"]
    changes = {"model.name": model, "model.options": options, "data.image_size": stated("image_size")}
    labels = config.get("id2label")
    classes = None
    if isinstance(labels, dict) and labels:
        changes["data.num_classes"] = len(labels)
        if "LABEL_0" not in labels.values():         # transformers' stand-in for a name
            classes = tuple(str(labels.get(str(index), index)) for index in range(len(labels)))
    elif names[0].endswith(("Classification", "Teacher")):   # transformers omits its default of 2
        changes["data.num_classes"] = config.get("num_labels", 2)
    prepared, notes = _preparation(file.with_name("preprocessor_config.json"), changes)
    return Description(file, recipe, _overrides(changes | prepared, file), classes, notes)


def mlp_ratio(hidden: int, width: int) -> float:
    """The ratio with which the model makes an MLP of `hidden` channels."""
    ratio = hidden / width
    return ratio if hidden_width(width, ratio, "mlp_ratio") == hidden else (hidden + 0.5) / width


def _preparation(file: Path, model: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """How a preprocessor_config.json prepares images, as keys of a recipe, and what differs here."""
    if not file.exists():
        return {}, (f"there is no {file.name}, so how images are prepared is the recipe's",)
    config, notes = _table(file), []
    changes: dict[str, Any] = {}
    if config.get("do_normalize", True) and {"image_mean", "image_std"} <= config.keys():
        changes |= {"data.mean": config["image_mean"], "data.std": config["image_std"]}
    elif not config.get("do_normalize", True):
        changes |= {"data.mean": [0.0] * 3, "data.std": [1.0] * 3}
    if config.get("resample") in RESAMPLE:
        changes["eval.interpolation"] = RESAMPLE[config["resample"]]
    shorter, squeezed = _side(config.get("size"))
    cropped = config.get("do_center_crop", False) and _side(config.get("crop_size"))[0]
    side = cropped or shorter
    if shorter and side:
        changes["eval.crop_pct"] = min(side / shorter, 1.0)
    if squeezed:
        notes.append("transformers squeezes an image to a square; here its proportions are kept and "
                     "the centre is cut out")
    if side and [side] * 2 != list(to_pair(model["data.image_size"])):
        notes.append(f"transformers makes images of {side} pixels and resizes the position embedding for "
                     f"them; an image size of {side} does so here, by another interpolation")
    return changes, tuple(notes)


def _side(size: Any) -> tuple[int, bool]:
    """The shorter side that a size of transformers states, or 0; and whether it is a square's."""
    if isinstance(size, dict) and size.get("shortest_edge"):
        return size["shortest_edge"], False
    if isinstance(size, dict) and size.get("height"):
        return min(size["height"], size.get("width", size["height"])), True
    return (size, True) if isinstance(size, int) else (0, False)


def _overrides(changes: Mapping[str, Any], file: Path) -> tuple[Override, ...]:
    return tuple(Override(key, value, str(file)) for key, value in changes.items())


# ---------------------------------------------------------------------------------------------
# What is assumed
# ---------------------------------------------------------------------------------------------


def assumptions(model: nn.Module, recipe: Recipe, description: Description | None) -> str:
    """One line on all that the tensors do not show, as the built `model` and its recipe have it."""
    options = recipe.model.options
    activations = {nn.GELU: "exact GELU", nn.ReLU: "ReLU"}
    used = [name for kind, name in activations.items()
            if any(isinstance(module, kind) for module in model.modules())]
    epsilons = sorted({module.eps for module in model.modules() if hasattr(module, "eps")})
    heads = options.get("num_heads")
    parts = [f"{'-'.join(map(str, heads)) if isinstance(heads, list) else heads} heads"] * bool(heads)
    parts += [" and ".join(used), {"class": "class token"}.get(options.get("pool"), "mean") + " pooled",
              *(["windows of " + str(options["window_size"])] if "window_size" in options else []),
              *(["learned positions" if model.learns_positions else "fixed positions"]
                if "pos_embed" in options else []), f"norm eps {' and '.join(map(str, epsilons))}",
              "mean " + " ".join(f"{value:g}" for value in recipe.data.mean),
              "std " + " ".join(f"{value:g}" for value in recipe.data.std),
              f"crop {recipe.eval.crop_pct:g}", recipe.eval.interpolation]
    source, notes = f"recipe {recipe.name}", []
    if description is not None:
        source += f" and {description.file.name}"
        ours = keys_of(recipe.as_dict())
        notes = [*description.notes,
                 *(f"{change.key} is {change.value} in {description.file.name}"
                   for change in description.changes if change.key in PREPARATION
                   and ours[change.key] != change.value)]
    found = f"{', '.join(parts)} ({source})"
    return f"assumed, as tensors do not show it: {'; '.join([found, *notes])}"


def require_same_function(description: Description | None, recipe: Recipe) -> None:
    """Raise CheckpointError if the files beside a checkpoint state another function than the recipe.

    This is for fine-tuning, where the recipe's model takes the tensors: neither heads nor epsilon
    change a shape.
    """
    theirs = (description.value("model.options") if description else None) or {}
    for key in ("num_heads", "norm_eps"):
        ours = recipe.model.options.get(key)
        if key in theirs and ours not in (None, theirs[key]):
            raise CheckpointError(
                f"{description.file}: {key} is {theirs[key]}, in the recipe {ours}, and no tensor would "
                f"show it; expected --set model.options.{key}={str(theirs[key]).replace(' ', '')}")


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------
def transformers_config(recipe: Recipe, classes: Sequence[str], size: tuple[int, int]
                        ) -> tuple[dict[str, Any], Names, str]:
    """The config.json of the model of transformers that takes the weights, their names, and the prefix.

    classes: the class of each logit. size: (height, width) of the images. Names and prefix are as
    `transformers_names` takes them. Raises CheckpointError if transformers has no such model.
    """
    options, family = recipe.model.options, MODELS[recipe.model.name][0]
    labels = {str(index): name for index, name in enumerate(classes)}
    common = {"num_channels": 3, "hidden_act": "gelu", "qkv_bias": options.get("qkv_bias"),
              "image_size": size[0], "id2label": labels,
              "label2id": {name: int(index) for index, name in labels.items()}}
    def square(pair: int | Sequence[int]) -> bool:
        return len(set(to_pair(pair))) == 1

    whole = square(size) and square(options["patch_size"])
    if whole and family is VisionTransformer and options["pool"] == "class" and (
            not options["num_registers"]) and classes:
        kind, name, names = (("deit", ARCHITECTURES["deit"][1], TRANSFORMERS_VIT | WITH_TEACHER)
                             if options["distilled"] else
                             ("vit", ARCHITECTURES["vit"][0], TRANSFORMERS_VIT))
        width = options["embed_dim"]
        own = {"hidden_size": width, "num_hidden_layers": options["depth"],
               "num_attention_heads": options["num_heads"], "layer_norm_eps": options.get("norm_eps", 1e-6),
               "intermediate_size": hidden_width(width, options["mlp_ratio"], "mlp_ratio"),
               "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    elif whole and family is SwinTransformer and square(options["window_size"]) and classes:
        kind, name, names = "swin", ARCHITECTURES["swin"][0], TRANSFORMERS_SWIN
        own = {"layer_norm_eps": 1e-5, "window_size": to_pair(options["window_size"])[0],
               **{key: options[key] for key in ("embed_dim", "depths", "num_heads", "mlp_ratio")}}
    else:
        raise CheckpointError(
            f"recipe {recipe.name}: no model of transformers takes these weights; expected a ViT with a "
            "class token and without registers, distilled or not, or a Swin, for square images and "
            "with a classifier")
    return ({"model_type": kind, "architectures": [name], "patch_size": to_pair(options["patch_size"])[0]}
            | common | own, names, f"{kind}.")


def preprocessor_config(recipe: Recipe, size: tuple[int, int]) -> dict[str, Any]:
    """The preprocessor_config.json with which transformers prepares images as this recipe does."""
    height, width = size
    resample = {name: number for number, name in RESAMPLE.items()}[recipe.eval.interpolation]
    return {"image_processor_type": "BitImageProcessor", "do_resize": True, "do_center_crop": True,
            "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_convert_rgb": True,
            "size": {"shortest_edge": int(height / recipe.eval.crop_pct + 1e-9)},
            "crop_size": {"height": height, "width": width}, "resample": resample,
            "image_mean": list(recipe.data.mean), "image_std": list(recipe.data.std)}
