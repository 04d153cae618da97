"""The models of other libraries that take our weights: their class, its arguments and its names.

A table per library states for each family which class it is, and how that class states each of our
options that it knows; any other has to be at its default. For transformers the arguments are what
its config.json says.
"""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from ...models import MODELS, model_class
from ...models.layers import Sides, hidden_width, to_pair
from ...models.swin import stage_grids
from .names import (
    TIMM_EVA,
    TORCHVISION_SWIN,
    TORCHVISION_VIT,
    TRANSFORMERS_SWIN,
    TRANSFORMERS_VIT,
    WITH_TEACHER,
    Names,
)

Options = Mapping[str, Any]


class Counterpart(NamedTuple):
    """A class or function of another library that makes a model of the same function as ours.

    stated: all of our options that it knows, and how it states each: as its argument of this name;
        by arguments that follow from all our options, or else, in words, by what it needs instead;
        or not at all (None), as it makes no difference or another option states it, too.
    """

    model: str  # its name in the library
    stated: Options
    names: Names = {}  # our names → its own; see names.py
    constants: Options = {}  # further arguments

    def state(self, options: Options, defaults: Options) -> tuple[dict[str, Any], list[str]]:
        """Its arguments for a model of ours, and what would have to be otherwise in that model."""
        arguments = dict(self.constants)
        needs = []
        statements = {**only(**defaults), **UNSTATED, **self.stated}
        for option, statement in statements.items():
            if isinstance(statement, str):
                arguments[statement] = options[option]
            elif statement is not None:
                stated = statement(options)
                if isinstance(stated, str):
                    needs.append(stated)
                else:
                    arguments |= stated
        return arguments, needs


def same(*names: str) -> dict[str, str]:
    """Options that the library calls as we do."""
    return dict(zip(names, names))


def only(**values: Any) -> dict[str, Any]:
    """Options of which the library has one value, which it does not state."""

    def statement(option: str, value: Any, options: Options) -> Options | str:
        if options[option] in (value, [value] * 2):
            return {}
        return f"{option} = {value}"

    return {option: partial(statement, option, value) for option, value in values.items()}


def square(name: str, options: Options) -> Options | str:
    """The statement of a size as one number."""
    height, width = to_pair(options[name])
    return {name: height} if height == width else f"a square {name}"


def whole_windows(options: Options) -> Options | str:
    """The need of a library that, unlike our Swin and timm's, cuts no window to a smaller grid."""
    patch, window = to_pair(options["patch_size"]), to_pair(options["window_size"])
    grid = tuple(side // size for side, size in zip(options["image_size"], patch))
    for rows, columns in stage_grids(grid, len(options["depths"])):
        if rows < window[0] or columns < window[1]:
            return "a window_size within every grid"
    return {}


def mlp_width(name: str, options: Options) -> Options:
    """The statement of mlp_ratio by the width itself."""
    return {name: hidden_width(options["embed_dim"], options["mlp_ratio"], "mlp_ratio")}


def rotation(options: Options) -> Options | str:
    """timm's statement of rotary positions which turn the channels of queries and keys as ours."""
    if "rope" not in options["pos_embed"]:
        return "pos_embed = rope"
    kind, coordinates = options["rope_frequencies"], options["rope_coordinates"]
    if kind == "linear" or kind == "mixed" and coordinates != "index":
        return "rope_frequencies = axial"
    if kind == "axial":
        kind = "dinov3" if coordinates == "centred" else "cat"
    arguments = {"rope_type": kind, "use_abs_pos_emb": options["pos_embed"] != "rope"}
    if coordinates == "scaled":
        arguments["ref_feat_shape"] = [16, 16]
    return arguments


# For all: what training alone reads, and what is seen in a tensor that every library has.
UNSTATED = {
    "drop_path": None,
    "constant_drop_path": None,
    "shift_kernel": None,
    "train_filters": None,
    "pos_embed": lambda o: "no rotary pos_embed" if "rope" in o.get("pos_embed", "") else {},
}
TIMM_CHANNELS = {
    "in_channels": lambda o: {} if o["in_channels"] == 3 else {"in_chans": o["in_channels"]}
}
SIDES = {
    "image_size": partial(square, "image_size"),
    "patch_size": partial(square, "patch_size"),
}
PLAIN = only(
    distilled=False, num_registers=0, prefix_positions=True, shift_blocks=0
)  # what most libraries' ViTs are
SWIN_OPTIONS = same("embed_dim", "depths", "num_heads", "mlp_ratio")  # as all libraries do

# timm: the models, by their modules.
TIMM_VIT = {
    **same("embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias", "patch_size"),
    **only(distilled=False, norm_eps=1e-6, shift_blocks=0),
    **TIMM_CHANNELS,
    "image_size": "img_size",
    "qk_norm": lambda o: {"qk_norm": True} if o["qk_norm"] else {},
    "layer_scale": lambda o: {"init_values": o["layer_scale"]} if o["layer_scale"] else {},
    "prefix_positions": lambda o: {} if o["prefix_positions"] else {"no_embed_class": True},
}
TIMM_POOL = {
    "pool": lambda o: {
        "class_token": o["pool"] == "class",
        "global_pool": "token" if o["pool"] == "class" else "avg",
    }
}
EVA_OPTIONS = {
    **TIMM_VIT,
    **TIMM_POOL,
    "fc_norm": "use_fc_norm",
    "num_registers": "num_reg_tokens",
    "mlp": lambda o: {"swiglu_mlp": True} if o["mlp"] == "swiglu" else {},
    "pos_embed": rotation,
    "rope_base": "rope_temperature",
    "rope_frequencies": None,
    "rope_coordinates": None,
    "qkv_bias": None,
}
# Its attention whose keys have a bias; without one, names.py takes Eva's to have other pairs.
EVA_CONSTANTS = {
    "attn_type": "rope",
    "use_rot_pos_emb": True,
    "rope_grid_indexing": "xy",
    "qkv_bias": True,
}
TIMM_MIXER = {
    **TIMM_CHANNELS,
    "image_size": "img_size",
    "channels_ratio": None,
    "tokens_ratio": lambda o: {"mlp_ratio": [o["tokens_ratio"], o["channels_ratio"]]},
}
TIMM_CONV_MIXER = {
    **TIMM_CHANNELS,
    "image_size": None,
    **only(num_filters=0, activation="gelu"),
}
EVA = Counterpart("eva.Eva", EVA_OPTIONS, TIMM_EVA, EVA_CONSTANTS)
# Norms with another epsilon are a class, which no plain value states; this function has them.
EVA_DINOV3 = Counterpart(
    "eva.vit_small_patch16_dinov3",
    {
        **EVA_OPTIONS,
        **only(norm_eps=1e-5),
        "layer_scale": lambda o: (
            {"init_values": o["layer_scale"]} if o["layer_scale"] else "a layer_scale"
        ),
    },
    TIMM_EVA,
    {**EVA_CONSTANTS, "rope_rotate_half": False, "dynamic_img_size": False},
)
# An activation is a class, which no plain value states; this function has ReLU.
WITH_RELU = Counterpart("convmixer_768_32", TIMM_CONV_MIXER | only(**MODELS["convmixer_768_32"][1]))
TIMM = {
    "vit": [
        EVA,
        EVA_DINOV3,
        Counterpart(
            "vision_transformer.VisionTransformer",
            {**TIMM_VIT, **TIMM_POOL, "fc_norm": "fc_norm", "num_registers": "reg_tokens"},
        ),
        Counterpart(
            "deit.VisionTransformerDistilled",
            {
                **TIMM_VIT,
                **only(distilled=True, num_registers=0, pool="class", prefix_positions=True),
            },
        ),
    ],
    "swin": [
        Counterpart(
            "swin_transformer.SwinTransformer",
            {
                **SWIN_OPTIONS,
                **same("patch_size", "window_size", "qkv_bias"),
                **TIMM_CHANNELS,
                "image_size": "img_size",
            },
        )
    ],
    "mlp_mixer": [
        Counterpart(
            "mlp_mixer.MlpMixer",
            {**TIMM_MIXER, **same("patch_size", "embed_dim"), "depth": "num_blocks"},
        )
    ],
    "conv_mixer": [
        Counterpart(
            "convmixer.ConvMixer",
            {
                **TIMM_CONV_MIXER,
                **same("depth", "kernel_size", "patch_size"),
                "embed_dim": "dim",
            },
        ),
        WITH_RELU._replace(model="convmixer.convmixer_768_32"),
    ],
}
NAMED_VITS = (  # a name for each of these
    "eva_giant_patch14_224",
    "vit_small_patch16_dinov3",
    "vit_base_patch16_224",
    "deit_base_distilled_patch16_224",
)
# The functions that timm's create_model knows by name. Those of the mixers fix sizes.
TIMM_FUNCTIONS = {
    "vit": [vit._replace(model=name) for vit, name in zip(TIMM["vit"], NAMED_VITS)],
    "swin": [TIMM["swin"][0]._replace(model="swin_tiny_patch4_window7_224")],
    "mlp_mixer": [
        Counterpart(f"{name}_224", TIMM_MIXER | only(**sizes))
        for name, (family, sizes) in MODELS.items()
        if family == "mlp_mixer"
    ],
    "conv_mixer": [
        WITH_RELU,
        Counterpart("convmixer_1536_20", TIMM_CONV_MIXER | only(**MODELS["convmixer_1536_20"][1])),
        Counterpart(
            "convmixer_1024_20_ks9_p14", TIMM_CONV_MIXER | only(**MODELS["convmixer_1024_20"][1])
        ),
    ],
}

TORCHVISION = {
    "vit": [
        Counterpart(
            "VisionTransformer",
            {
                **PLAIN,
                **SIDES,
                **only(norm_eps=1e-6, pool="class", qkv_bias=True),
                "num_heads": "num_heads",
                "depth": "num_layers",
                "embed_dim": "hidden_dim",
                "mlp_ratio": partial(mlp_width, "mlp_dim"),
            },
            TORCHVISION_VIT,
        )
    ],
    "swin": [
        Counterpart(
            "SwinTransformer",
            {
                **SWIN_OPTIONS,
                **only(qkv_bias=True),
                "patch_size": lambda o: {"patch_size": list(to_pair(o["patch_size"]))},
                "window_size": lambda o: {"window_size": list(to_pair(o["window_size"]))},
                "image_size": whole_windows,
            },
            TORCHVISION_SWIN,
        )
    ],
}

# Our options → keys of a config.json; of ViT and DeiT.
VIT_OPTIONS = {
    "embed_dim": "hidden_size",
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "norm_eps": "layer_norm_eps",
}
CHANNELS = {"in_channels": "num_channels"}
STATED_OF_VIT = {
    **PLAIN,
    **CHANNELS,
    **SIDES,
    **VIT_OPTIONS,
    "qkv_bias": "qkv_bias",
    "mlp_ratio": partial(mlp_width, "intermediate_size"),
}
A_CONFIG = {"hidden_act": "gelu"}
CONFIG_OF_VIT = {
    **A_CONFIG,
    "model_type": "vit",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TRANSFORMERS = {
    "vit": [
        Counterpart(
            "ViTForImageClassification",
            STATED_OF_VIT | only(pool="class"),
            TRANSFORMERS_VIT,
            CONFIG_OF_VIT,
        ),
        Counterpart(
            "DeiTForImageClassificationWithTeacher",
            STATED_OF_VIT | only(pool="class", distilled=True),
            TRANSFORMERS_VIT | WITH_TEACHER,
            CONFIG_OF_VIT | {"model_type": "deit"},
        ),
        Counterpart(
            "IJepaForImageClassification",
            STATED_OF_VIT | only(pool="mean", fc_norm=False),
            TRANSFORMERS_VIT,
            CONFIG_OF_VIT | {"model_type": "ijepa"},
        ),
    ],
    "swin": [
        Counterpart(
            "SwinForImageClassification",
            {
                **SWIN_OPTIONS,
                **CHANNELS,
                **SIDES,
                "qkv_bias": "qkv_bias",
                "window_size": lambda o: whole_windows(o) or square("window_size", o),
            },
            TRANSFORMERS_SWIN,
            A_CONFIG | {"model_type": "swin", "layer_norm_eps": 1e-5},
        )
    ],
}
LIBRARIES = {
    "timm": ("timm.models", TIMM),
    "torchvision": ("torchvision.models", TORCHVISION),
    "transformers": ("transformers", TRANSFORMERS),
    "timm.create_model": ("timm", TIMM_FUNCTIONS),
}


def counterpart(
    library: str, family: str, *, image_size: Sides, **options: Any
) -> tuple[str, dict[str, Any], Names]:
    """The class or function of a library that takes the weights of a model built with `options`.

    library: one of LIBRARIES. Returns its full name, its arguments as plain values, but for the
    number of classes, and our names → its own. Raises ValueError, with what stands in the way, if
    the library has no such model.
    """
    module, table = LIBRARIES[library]
    model = model_class(family)
    defaults = {}
    for name, parameter in inspect.signature(model).parameters.items():
        default = parameter.default
        if name != "num_classes":
            defaults[name] = list(default) if isinstance(default, tuple) else default
    options = defaults | options | {"image_size": list(image_size)}
    lacking = []  # of each candidate, what it would need
    for candidate in table.get(family, ()):
        arguments, needs = candidate.state(options, defaults)
        if not needs:
            return f"{module}.{candidate.model}", arguments, candidate.names
        lacking.append(needs)
    nearest = min(lacking, key=len, default=["another family"])
    raise ValueError(
        f"no model of {library} takes the weights of this {model.__name__}; expected "
        f"{' and '.join(nearest)}"
    )
