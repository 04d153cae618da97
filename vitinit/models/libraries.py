"""The models of other libraries that take our weights: their class, its arguments and its names.

A table per library states for each family which class it is, and how that class states each of our
options that it knows. Any other option, such as one that is new here, has to be at its default. For
transformers the arguments are what its config.json says.
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
# How a library states one of our options: as its argument of this name; by a table of all values
# that it can have, with the arguments of each; or by what a function makes of all our options.
Statement = str | Mapping[Any, Options] | Callable[[Options], Options]


class Counterpart(NamedTuple):
    """A class or function of another library that makes a model of the same function as ours."""

    model: str                                      # its name in the library
    stated: Mapping[str, Statement]                 # all of our options that it knows
    names: Names = {}                               # our names → its own; see convert.py
    squares: tuple[str, ...] = ()                   # sizes of which it takes one number
    whole_windows: bool = False                     # it does not cut windows to a smaller grid
    constants: Options = {}                         # further arguments

    def needs(self, options: Options, defaults: Options) -> list[str]:
        """What would have to be otherwise in a model of ours with these options, in words."""
        needs = []
        for option, value in options.items():
            way = self.stated.get(option, [defaults[option]])
            if isinstance(way, (Mapping, list)) and value not in list(way):
                needs.append(f"{option} = {' or '.join(map(str, way))}")
        needs += [f"a square {key}" for key in self.squares if len({*to_pair(options[key])}) > 1]
        if self.whole_windows and cuts_windows(options):
            needs.append("a window_size within every grid")
        return needs

    def arguments(self, options: Options) -> dict[str, Any]:
        """Its arguments, as plain values, for a model with these options, which it can express."""
        arguments = dict(self.constants)
        for option, way in self.stated.items():
            value = options[option]
            if isinstance(way, str):
                arguments[way] = to_pair(value)[0] if option in self.squares else value
            else:
                arguments |= way(options) if callable(way) else way[value]
        return arguments


def same(*names: str) -> dict[str, Statement]:
    """Options that the library calls as we do."""
    return {name: name for name in names}


def only(**values: Any) -> dict[str, Statement]:
    """Options of which the library has one value, which it does not state."""
    return {option: {value: {}} for option, value in values.items()}


def unstated(options: Options) -> Options:
    """The statement of an option that no model for evaluation needs, or that tensors show."""
    return {}


# The position embedding is a tensor of the checkpoint, wherever it is from.
POSITIONS = {"pos_embed": dict.fromkeys(("learned", "sincos", "none"), {})}
NO_TRAINING = {"drop_path": unstated}
PLAIN = {"distilled": False, "num_registers": 0}     # what most libraries' ViTs are

TIMM_VIT = same("embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias", "patch_size") | {
    "image_size": "img_size"} | only(norm_eps=1e-6) | POSITIONS | NO_TRAINING
TIMM_CONV_MIXER = {"image_size": unstated, "train_filters": unstated} | only(num_filters=0)
TIMM: dict[str, list[Counterpart]] = {
    "vit": [
        Counterpart("vision_transformer.VisionTransformer", TIMM_VIT | only(distilled=False) | {
            "fc_norm": "fc_norm", "num_registers": "reg_tokens",
            "pool": {"class": {"class_token": True, "global_pool": "token"},
                     "mean": {"class_token": False, "global_pool": "avg"}}}),
        Counterpart("deit.VisionTransformerDistilled", TIMM_VIT | only(
            distilled=True, num_registers=0, pool="class"))],
    "swin": [Counterpart("swin_transformer.SwinTransformer", same(
        "patch_size", "embed_dim", "depths", "num_heads", "window_size", "mlp_ratio", "qkv_bias"
        ) | {"image_size": "img_size"} | NO_TRAINING)],
    "mlp_mixer": [Counterpart("mlp_mixer.MlpMixer", same("patch_size", "embed_dim") | {
        "image_size": "img_size", "depth": "num_blocks",
        "tokens_ratio": lambda o: {"mlp_ratio": [o["tokens_ratio"], o["channels_ratio"]]},
        "channels_ratio": unstated} | NO_TRAINING)],         # stated beside the other
    "conv_mixer": [
        Counterpart("convmixer.ConvMixer", TIMM_CONV_MIXER | only(activation="gelu") | same(
            "depth", "kernel_size", "patch_size") | {"embed_dim": "dim"}),
        # An activation is a class, which no plain value states; this function has ReLU.
        Counterpart("convmixer.convmixer_768_32", TIMM_CONV_MIXER | only(
            activation="relu", embed_dim=768, depth=32, kernel_size=7, patch_size=7))],
}
TORCHVISION: dict[str, list[Counterpart]] = {
    "vit": [Counterpart("VisionTransformer", same("num_heads", "image_size", "patch_size") | {
        "depth": "num_layers", "embed_dim": "hidden_dim", "mlp_ratio": lambda o: {
            "mlp_dim": hidden_width(o["embed_dim"], o["mlp_ratio"], "mlp_ratio")}}
        | only(norm_eps=1e-6, pool="class", qkv_bias=True, **PLAIN) | POSITIONS | NO_TRAINING,
        TORCHVISION_VIT, squares=("image_size", "patch_size"))],
    "swin": [Counterpart("SwinTransformer", same(
        "embed_dim", "depths", "num_heads", "mlp_ratio") | only(qkv_bias=True) | NO_TRAINING | {
        "patch_size": lambda o: {"patch_size": list(to_pair(o["patch_size"]))},
        "window_size": lambda o: {"window_size": list(to_pair(o["window_size"]))},
        "image_size": unstated},
        TORCHVISION_SWIN, whole_windows=True)],
}

# Our options → keys of a config.json; of ViT and DeiT, and of Swin.
VIT_OPTIONS = {"embed_dim": "hidden_size", "depth": "num_hidden_layers",
               "num_heads": "num_attention_heads", "norm_eps": "layer_norm_eps"}
SWIN_OPTIONS = {key: key for key in ("embed_dim", "depths", "num_heads", "mlp_ratio")}
SIDES = ("image_size", "patch_size")
OF_TRANSFORMERS = same(*SIDES, "qkv_bias") | NO_TRAINING
A_CONFIG = {"num_channels": 3, "hidden_act": "gelu"}


def transformers_vit(name: str, kind: str, names: Names, **values: Any) -> Counterpart:
    """A ViT of transformers, whose model_type is `kind`. values: those of `PLAIN` and pool."""
    return Counterpart(name, VIT_OPTIONS | OF_TRANSFORMERS | POSITIONS | only(**PLAIN | values) | {
        "mlp_ratio": lambda o: {"intermediate_size": hidden_width(o["embed_dim"], o["mlp_ratio"],
                                                                  "mlp_ratio")}},
        names, SIDES, constants=A_CONFIG | {"model_type": kind, "hidden_dropout_prob": 0.0,
                                            "attention_probs_dropout_prob": 0.0})


TRANSFORMERS: dict[str, list[Counterpart]] = {
    "vit": [
        transformers_vit("ViTForImageClassification", "vit", TRANSFORMERS_VIT, pool="class"),
        transformers_vit("DeiTForImageClassificationWithTeacher", "deit",
                         TRANSFORMERS_VIT | WITH_TEACHER, pool="class", distilled=True),
        transformers_vit("IJepaForImageClassification", "ijepa", TRANSFORMERS_VIT, pool="mean",
                         fc_norm=False)],
    "swin": [Counterpart("SwinForImageClassification", SWIN_OPTIONS | OF_TRANSFORMERS | same(
        "window_size"), TRANSFORMERS_SWIN, (*SIDES, "window_size"), whole_windows=True,
        constants=A_CONFIG | {"model_type": "swin", "layer_norm_eps": 1e-5})],
}
# timm's registered functions of its classes: the name, and the arguments that it fixes.
TIMM_FUNCTIONS = {
    "VisionTransformer": {"vit_base_patch16_224": {}},
    "VisionTransformerDistilled": {"deit_base_distilled_patch16_224": {}},
    "SwinTransformer": {"swin_tiny_patch4_window7_224": {}},
    "MlpMixer": {f"mixer_{size}{patch}_224": {"patch_size": patch, "embed_dim": width,
                                              "num_blocks": depth}
                 for size, width, depth in (("s", 512, 8), ("b", 768, 12), ("l", 1024, 24))
                 for patch in (32, 16)},
    "ConvMixer": {name: {"dim": width, "depth": 20, "kernel_size": 9, "patch_size": patch}
                  for name, width, patch in (("convmixer_1536_20", 1536, 7),
                                             ("convmixer_1024_20_ks9_p14", 1024, 14))},
    "convmixer_768_32": {"convmixer_768_32": {}},
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
    defaults, options = ({name: list(value) if isinstance(value, tuple) else value
                          for name, value in table.items()} for table in (
        {parameter.name: parameter.default for parameter in parameters}, options))
    del defaults["num_classes"]
    options = defaults | options | {"image_size": list(image_size)}
    for name in {"patch_size", "window_size"} & options.keys():
        height, width = to_pair(options[name])
        options[name] = height if height == width else [height, width]
    lacking = []                                     # of each candidate, what it would need
    for candidate in table.get(family, ()):
        needs = candidate.needs(options, defaults)
        if not needs:
            return f"{module}.{candidate.model}", candidate.arguments(options), candidate.names
        lacking.append(needs)
    nearest = " and ".join(min(lacking, key=len, default=["another family"]))
    raise ValueError(f"no model of {library} takes the weights of this {FAMILIES[family]}; "
                     f"expected {nearest}")


def timm_function(model: str, arguments: Options) -> tuple[str, dict[str, Any]]:
    """The name of a registered function of timm and the arguments with which it makes the model.

    model, arguments: of `counterpart`. Raises ValueError if there is no such function.
    """
    functions = TIMM_FUNCTIONS[model.rpartition(".")[2]]
    for name, fixed in functions.items():
        if fixed.items() <= arguments.items():
            return name, {key: value for key, value in arguments.items() if key not in fixed}
    raise ValueError(f"timm makes no such {model.rpartition('.')[2]} by a name, as a folder needs; "
                     f"expected the sizes of {', '.join(functions)}")


def cuts_windows(options: Options) -> bool:
    """Whether our Swin, like timm's, cuts a window to the smaller grid of a stage."""
    patch, window = to_pair(options["patch_size"]), to_pair(options["window_size"])
    grid = tuple(side // size for side, size in zip(options["image_size"], patch))
    return any(side < w for grid in stage_grids(grid, len(options["depths"]))
               for side, w in zip(grid, window))
