"""The models of other libraries that take our weights: their class, its arguments and its names.

A table per library states for each family which class it is, which arguments build it, and what it
has fixed. For transformers the arguments are what its config.json says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import FAMILIES, model_class
from .convert import (TORCHVISION_SWIN, TORCHVISION_VIT, TRANSFORMERS_SWIN, TRANSFORMERS_VIT,
                      WITH_TEACHER, Names)
from .layers import hidden_width, to_pair
from .swin import stage_grids

Options = Mapping[str, Any]


class Counterpart(NamedTuple):
    """A class or function of another library that makes a model of the same function as ours."""

    model: str                                      # its name in the library
    arguments: Callable[[Options], dict[str, Any]]  # by our options, plain values
    fixed: Options = {}                             # our options → the only value it can have
    names: Names = {}                               # our names → its own; see convert.py
    squares: tuple[str, ...] = ()                   # sizes of which it takes one number
    whole_windows: bool = False                     # it does not cut windows to a smaller grid


def of(options: Options, *names: str, **renamed: str) -> dict[str, Any]:
    """The options of these names; renamed: their argument → our option."""
    return {theirs: options[ours] for theirs, ours in (dict(zip(names, names)) | renamed).items()}


TIMM_VIT = ("embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias", "patch_size")
TIMM: dict[str, list[Counterpart]] = {
    "vit": [
        Counterpart("vision_transformer.VisionTransformer", lambda o: of(
            o, *TIMM_VIT, "fc_norm", img_size="image_size", reg_tokens="num_registers") | {
                "class_token": o["pool"] == "class",
                "global_pool": "token" if o["pool"] == "class" else "avg"},
            {"norm_eps": 1e-6, "distilled": False}),
        Counterpart("deit.VisionTransformerDistilled",
                    lambda o: of(o, *TIMM_VIT, img_size="image_size"),
                    {"norm_eps": 1e-6, "distilled": True, "num_registers": 0})],
    "swin": [Counterpart("swin_transformer.SwinTransformer", lambda o: of(
        o, "patch_size", "embed_dim", "depths", "num_heads", "window_size", "mlp_ratio", "qkv_bias",
        img_size="image_size"))],
    "mlp_mixer": [Counterpart("mlp_mixer.MlpMixer", lambda o: of(
        o, "patch_size", "embed_dim", img_size="image_size", num_blocks="depth") | {
            "mlp_ratio": [o["tokens_ratio"], o["channels_ratio"]]})],
    "conv_mixer": [
        Counterpart("convmixer.ConvMixer", lambda o: of(o, "depth", "kernel_size", "patch_size",
                                                        dim="embed_dim"),
                    {"num_filters": 0, "activation": "gelu"}),
        # An activation is a class, which no plain value states; this function has ReLU.
        Counterpart("convmixer.convmixer_768_32", lambda o: {}, {
            "num_filters": 0, "activation": "relu", "embed_dim": 768, "depth": 32, "kernel_size": 7,
            "patch_size": 7})],
}
TORCHVISION: dict[str, list[Counterpart]] = {
    "vit": [Counterpart("VisionTransformer", lambda o: of(
        o, "num_heads", num_layers="depth", hidden_dim="embed_dim") | {
            "image_size": o["image_size"][0], "patch_size": to_pair(o["patch_size"])[0],
            "mlp_dim": hidden_width(o["embed_dim"], o["mlp_ratio"], "mlp_ratio")},
        {"norm_eps": 1e-6, "distilled": False, "num_registers": 0, "pool": "class",
         "qkv_bias": True}, TORCHVISION_VIT, squares=("image_size", "patch_size"))],
    "swin": [Counterpart("SwinTransformer", lambda o: of(
        o, "embed_dim", "depths", "num_heads", "mlp_ratio") | {
            "patch_size": list(to_pair(o["patch_size"])),
            "window_size": list(to_pair(o["window_size"]))},
        {"qkv_bias": True}, TORCHVISION_SWIN, whole_windows=True)],
}

# Our options → keys of a config.json; of ViT and DeiT, and of Swin.
VIT_OPTIONS = {"embed_dim": "hidden_size", "depth": "num_hidden_layers",
               "num_heads": "num_attention_heads", "norm_eps": "layer_norm_eps"}
SWIN_OPTIONS = {key: key for key in ("embed_dim", "depths", "num_heads", "mlp_ratio")}


def vit_config(options: Options) -> dict[str, Any]:
    """The config.json of a ViT or DeiT, without what each is called."""
    hidden = hidden_width(options["embed_dim"], options["mlp_ratio"], "mlp_ratio")
    return common_config(options) | {theirs: options[ours] for ours, theirs in VIT_OPTIONS.items()
                                     } | {"intermediate_size": hidden, "hidden_dropout_prob": 0.0,
                                          "attention_probs_dropout_prob": 0.0}


def swin_config(options: Options) -> dict[str, Any]:
    return common_config(options) | of(options, *SWIN_OPTIONS) | {
        "model_type": "swin", "layer_norm_eps": 1e-5,
        "window_size": to_pair(options["window_size"])[0]}


def common_config(options: Options) -> dict[str, Any]:
    return {"patch_size": to_pair(options["patch_size"])[0], "num_channels": 3,
            "hidden_act": "gelu", "qkv_bias": options["qkv_bias"],
            "image_size": options["image_size"][0]}


OF_VIT = {"pool": "class", "num_registers": 0}
SIDES = ("image_size", "patch_size")
TRANSFORMERS: dict[str, list[Counterpart]] = {
    "vit": [
        Counterpart("ViTForImageClassification", lambda o: vit_config(o) | {"model_type": "vit"},
                    OF_VIT | {"distilled": False}, TRANSFORMERS_VIT, SIDES),
        Counterpart("DeiTForImageClassificationWithTeacher",
                    lambda o: vit_config(o) | {"model_type": "deit"},
                    OF_VIT | {"distilled": True}, TRANSFORMERS_VIT | WITH_TEACHER, SIDES)],
    "swin": [Counterpart("SwinForImageClassification", swin_config, {}, TRANSFORMERS_SWIN,
                                  (*SIDES, "window_size"), whole_windows=True)],
}
LIBRARIES = {"timm": ("timm.models", TIMM), "torchvision": ("torchvision.models", TORCHVISION),
             "transformers": ("transformers", TRANSFORMERS)}


def counterpart(library: str, family: str, *, image_size: tuple[int, int], **options: Any
                ) -> tuple[str, dict[str, Any], Names]:
    """The class or function of a library that takes the weights of a model built with `options`.

    library: one of LIBRARIES. Returns its full name, its arguments as plain values without
    the number of classes, and our names → its own. Raises ValueError, with the option that stands
    in the way, if the library has no model of the same function.
    """
    module, table = LIBRARIES[library]
    parameters = inspect.signature(model_class(family)).parameters.values()
    options = {one.name: one.default for one in parameters} | options
    options["image_size"] = list(image_size)
    lacking = []                                     # of each candidate, what it would need
    for found in table.get(family, ()):
        needs = [f"{key} = {value}" for key, value in found.fixed.items()
                 if options[key] not in (value, [value] * 2)]
        needs += [f"a square {key}" for key in found.squares if len({*to_pair(options[key])}) > 1]
        if found.whole_windows and cuts_windows(options):
            needs += ["a window_size within every grid"]
        if not needs:
            return f"{module}.{found.model}", found.arguments(options), found.names
        lacking.append(needs)
    nearest = " and ".join(min(lacking, key=len, default=["another family"]))
    raise ValueError(f"no model of {library} takes the weights of this {FAMILIES[family]}; "
                     f"expected {nearest}")


def cuts_windows(options: Options) -> bool:
    """Whether our Swin, like timm's, cuts a window to the smaller grid of a stage."""
    patch, window = to_pair(options["patch_size"]), to_pair(options["window_size"])
    grid = tuple(side // size for side, size in zip(options["image_size"], patch))
    return any(side < w for grid in stage_grids(grid, len(options["depths"]))
               for side, w in zip(grid, window))
