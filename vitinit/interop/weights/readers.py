"""What is known about the checkpoint of another project beside its tensors, and what is assumed.

Tensors do not show the whole function: not the number of heads, the activation, the epsilon of
norms, or how images are prepared. Some projects write this into files beside the weights:

    transformers    config.json and preprocessor_config.json
    timm's hub      config.json, with how images are prepared, and arguments of the model

`read_description` reads them into changes of a recipe; `preprocessor_config` writes the second.
What no file states is assumed from the recipe, and `assumptions` says what that is. Fine-tuning
keeps to its own recipe, which runs/start.py compares with them.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from PIL.Image import Resampling
from torch import Tensor

from ...base.files import CheckpointError, FileError, parse_json, read_bytes
from ...base.messages import in_brief
from ...base.values import Size, Table, convert, to_toml
from ...models.layers import hidden_width
from ...recipe.sections import WHOLE_IMAGE, Recipe
from ...runs.checkpoint import FOREIGN_WEIGHTS
from ...runs.start import FUNCTION, PREPARATION
from .libraries import SWIN_OPTIONS, VIT_OPTIONS, same
from .names import native_tensors

# Whole words of a model's name whose models have our tensors, but compute something else.
NEEDS_ROTARY = dict.fromkeys(("rope", "eva02"), "rotary positions (pos_embed = rope, learned+rope)")
TRAPS = NEEDS_ROTARY | {"rpn": "norms after attention and MLP in place of before them"}
RESAMPLE: dict[object, str] = {way.value: way.name.lower() for way in Resampling}
# Keys of a recipe that no tensor shows.
UNSEEN = (
    *FUNCTION,
    *(f"model.options.{key}" for key in ("pool", "pos_embed", "window_size")),
    "data.image_size",
    *PREPARATION,
)
# The architectures of transformers that load: model_type → names of classes.
ARCHITECTURES = {
    "vit": ("ViTForImageClassification", "ViTModel"),
    "deit": ("DeiTForImageClassification", "DeiTForImageClassificationWithTeacher", "DeiTModel"),
    "ijepa": ("IJepaForImageClassification", "IJepaModel"),
    "dinov2": ("Dinov2Model", "Dinov2Backbone"),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersBackbone"),
    "dinov3_vit": ("DINOv3ViTModel", "DINOv3ViTBackbone"),
    "swin": ("SwinForImageClassification", "SwinModel"),
}
# Arguments of timm's models → ours.
TIMM_ARGUMENTS = {
    "reg_tokens": "num_registers",
    "num_reg_tokens": "num_registers",
    "global_pool": "pool",
    "use_fc_norm": "fc_norm",
    "init_values": "layer_scale",
    "rope_temperature": "rope_base",
    **SWIN_OPTIONS,
    **same("patch_size", "depth", "qkv_bias", "fc_norm", "window_size", "qk_norm"),
}
FITS = {"center": "crop", "squash": "squash", "border": "pad"}  # timm's crop_mode → augment.fit
POOLS = {"token": "class", "avg": "mean"}  # timm's words → ours
# In names of timm's models that have a choice of it; Swins and mixers state theirs, too.
WITH_POOL = re.compile("vit|deit|eva")
CROPPED = "images were resized as by augment.fit {} and then cropped, which no recipe does; here {}"


class ForeignConfig(NamedTuple):
    """What the files beside a checkpoint say."""

    file: Path  # config.json
    recipe: str  # for all that they do not say; "": they do not say the model
    values: Table  # for keys of that recipe
    classes: tuple[str, ...] | None = None  # the class of each logit, in order
    lost: str = ""  # what no recipe can say, in words


class Reader:
    """How a checkpoint is read for models of this package: see `READERS` in runs/checkpoint.py.

    `config` is what files of another project beside it say, or None. Raises CheckpointError as
    `read_description`.
    """

    def __init__(self, path: Path, state: Table) -> None:
        self.path, self.state, self.is_ours = path, state, "recipe" in state
        self.config = None
        if "num_heads" in state and path.suffix == ".npz":  # whose tensors show it
            heads = {"model.options.num_heads": state["num_heads"]}
            self.config = ForeignConfig(path, "", heads)
        elif not self.is_ours:
            self.config = read_description(path)

    def native(self, tensors: Mapping[str, Tensor], options: Table) -> dict[str, Tensor]:
        """Its tensors under this package's names, as a model with these options has them."""
        if not self.is_ours:
            require_known(
                self.path, self.state.get("arch", ""), rotary="rope" in options.get("pos_embed", "")
            )
        return native_tensors(tensors, options)

    def assumptions(self, recipe: Recipe, *, files: bool = True) -> str:
        """A line on all that tensors do not show of a model that has this recipe: what the recipe
        says of it, by its keys. files: those beside the checkpoint were read into it.
        """
        rotary = "rope" in str(recipe.keys.get("model.options.pos_embed"))
        parts = []
        for key, value in recipe.keys.items():
            if key in UNSEEN and (rotary or ".rope_" not in key):
                parts.append(f"{key} {to_toml(value)}")
        read = f" and {self.config.file.name}" if files and self.config else ""
        lost = f"; {self.config.lost}" if self.config and self.config.lost else ""
        return (
            f"assumed, as tensors do not show it: {', '.join(parts)}, the exact GELU if no "
            f"other activation is named (recipe {recipe.name}{read}){lost}"
        )


def read_description(path: Path) -> ForeignConfig | None:
    """What is written beside the checkpoint file `path`, or None if nothing is. Raises
    CheckpointError for a file that cannot be read, and for a model that none of this package
    computes, as far as what the files say shows it.
    """
    file = path.with_name("config.json")  # if the folder is the model's
    config = _table(file) if path.name in FOREIGN_WEIGHTS else {}
    with as_they_write(file):
        if "model_type" in config:
            return _of_transformers(config, file)
        return _of_timm(config, file) if "pretrained_cfg" in config else None


@contextmanager
def as_they_write(file: Path) -> Iterator[None]:
    """A context that turns what is wrong with values of a file into CheckpointError, naming it."""
    try:
        yield
    except FileError:
        raise
    except (TypeError, LookupError, AttributeError, ArithmeticError, ValueError) as error:
        raise CheckpointError(
            f"{file}: is not what transformers or timm writes ({in_brief(error)})"
        ) from None


def require_known(path: Path, architecture: object, *, rotary: bool) -> None:
    """Raise CheckpointError if a name says that a model, `rotary` or not, computes something else.
    architecture: a name that the checkpoint itself states, as timm's trainer does, or any value.
    """
    names = [path.name, str(architecture)]
    if path.name in FOREIGN_WEIGHTS:
        config = _table(path.with_name("config.json"))
        names += [path.absolute().parent.name, str(config.get("architecture", ""))]
    words = re.split(r"[ ._-]", " ".join(names).lower())
    for word, meaning in TRAPS.items():
        if word in words and not (rotary and word in NEEDS_ROTARY):
            raise CheckpointError(
                f"{path}: '{word}' in its name stands for {meaning}, whose tensors would fit and "
                f"compute another function here; if this model has none, rename it without '{word}'"
            )


def _table(file: Path) -> Table:
    """The object in a file of JSON; {} if there is no file."""
    try:
        return dict(convert(parse_json(read_bytes(file, default=b"{}")), Mapping[str, Any]))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: is no object of JSON ({in_brief(error)})") from None


def flag(table: Table, name: str, default: bool = False) -> bool:
    """What a table says by true or false; TypeError for a text, of which "false" is one."""
    value = table.get(name)
    try:
        return default if value is None else convert(value, bool)
    except TypeError as error:
        raise TypeError(f"{name} is {error}") from None


def _of_timm(config: Table, file: Path) -> ForeignConfig:
    arguments = config.get("model_args") or {}
    if WITH_POOL.search(str(config.get("architecture"))):
        pool = config.get("global_pool")  # others, such as "map", show in the tensors
        arguments = {"global_pool": pool if pool in POOLS else None, **arguments}
    for name in ("act_layer", "norm_layer"):
        if arguments.get(name) not in (None, "gelu"):
            raise CheckpointError(f"{file}: {name} is {arguments[name]}, which is not known here")
    stated = config["pretrained_cfg"]
    changes, lost = _timm_preparation(stated)
    options = _timm_options(arguments)
    if flag(arguments, "use_rot_pos_emb"):
        options |= _eva_options(arguments, config["architecture"])
    for option, value in options.items():
        changes[f"model.options.{option}"] = value
    if "input_size" in stated:
        changes["data.image_size"] = convert(stated["input_size"][1:], Size)
    classes = config.get("num_classes")
    if classes:  # 0: a backbone
        changes["data.num_classes"] = classes
    names = _names(config.get("label_names"), classes, file)
    return ForeignConfig(file, "", changes, names, lost)


def _timm_preparation(stated: Table) -> tuple[Table, str]:
    changes, lost = {}, ""
    for key in PREPARATION:
        name = key.rpartition(".")[2]  # as timm calls it
        if name in stated:
            changes[key] = stated[name]
    fit = FITS.get(stated.get("crop_mode", ""), "crop")
    if fit != "crop":
        if changes.get("eval.crop_pct", 1.0) != 1.0:
            lost = CROPPED.format(fit, "they are not cropped")
        changes |= WHOLE_IMAGE | {"augment.fit": fit}
    return changes, lost


def _timm_options(arguments: Table) -> Table:
    options = {}
    for name, ours in TIMM_ARGUMENTS.items():
        value = arguments.get(name)
        if value is None or name == "mlp_ratio" and isinstance(value, list):  # two of a Mixer
            continue
        options[ours] = POOLS.get(value, value) if ours == "pool" else value
    if "no_embed_class" in arguments:
        options["prefix_positions"] = not flag(arguments, "no_embed_class")
    return options


def _eva_options(arguments: Table, architecture: str) -> Table:
    """Those of rotary positions, and others that an Eva has beside them, as `vitinit export`
    states them.
    """
    kind = arguments.get("rope_type", "cat")
    coordinates = "scaled" if arguments.get("ref_feat_shape") else "index"
    if kind == "dinov3":
        coordinates = "centred"
    return {
        "pos_embed": "learned+rope" if flag(arguments, "use_abs_pos_emb", True) else "rope",
        "mlp": "swiglu" if flag(arguments, "swiglu_mlp") else "gelu",
        "norm_eps": 1e-5 if "dinov3" in architecture else 1e-6,
        "rope_frequencies": "mixed" if kind == "mixed" else "axial",
        "rope_coordinates": coordinates,
    }


def _names(labels: Any, count: int | None, file: Path) -> tuple[str, ...] | None:
    """The name of each of `count` classes, of a list or of a table by their number."""
    if isinstance(labels, list):
        labels = dict(enumerate(labels))
    labels = {str(index): str(label) for index, label in (labels or {}).items()}
    if not labels or "LABEL_0" in labels.values():  # transformers' stand-in for a name
        return None
    missing = [index for index in map(str, range(len(labels))) if index not in labels]
    if len(labels) != count or missing:
        lacks = f", none of them for class {missing[0]}" if missing else ""
        raise CheckpointError(
            f"{file}: has {len(labels)} names of {count} classes{lacks}; expected a name of each, "
            "or none"
        )
    return tuple(labels[str(index)] for index in range(len(labels)))


def _of_transformers(config: Table, file: Path) -> ForeignConfig:
    kind = config["model_type"]
    name = (config.get("architectures") or ["no architecture"])[0]
    activation = "silu" if flag(config, "use_gated_mlp") else "gelu"  # of DINOv3's gate
    stated = config.get("hidden_act", "gelu")
    if name not in ARCHITECTURES.get(kind, ()) or stated != activation:
        raise CheckpointError(
            f"{file}: describes {name} ({kind}) of transformers, with the activation {stated}; "
            "ViT, DeiT, I-JEPA, DINOv2's and 3's backbone and Swin load, with the exact GELU"
        )
    if kind == "swin":
        recipe, model, options = "swin_tiny", "swin_tiny", _swin_options(config, file)
    else:
        recipe, model, options = "deit_base", "vit_base", _vit_options(config, name)
    changes = {
        "model.name": model,
        "model.options": options,
        "data.image_size": convert(config["image_size"], Size),
    }
    classes = None
    if "Classification" in name:  # transformers omits its default of 2 labels
        labels = config.get("id2label") or {}
        changes["data.num_classes"] = len(labels) or config.get("num_labels", 2)
        classes = _names(labels, len(labels), file)
    prepared = file.with_name("preprocessor_config.json")
    with as_they_write(prepared):
        preparation, lost = _preparation(_table(prepared))
    return ForeignConfig(file, recipe, changes | preparation, classes, lost)


def _swin_options(config: Table, file: Path) -> Table:
    if config.get("layer_norm_eps", 1e-5) != 1e-5:
        raise CheckpointError(
            f"{file}: layer_norm_eps is {config['layer_norm_eps']}; expected "
            "1e-05, as all Swins have it here"
        )
    options = {name: config[name] for name in ("patch_size", "window_size", *SWIN_OPTIONS)}
    return options | {"qkv_bias": config.get("qkv_bias", True)}


def _vit_options(config: Table, architecture: str) -> Table:
    kind = config["model_type"]
    options = {ours: config[name] for ours, name in VIT_OPTIONS.items()}
    options |= {
        "patch_size": config["patch_size"],
        "qkv_bias": config.get("qkv_bias", True),
        "distilled": architecture.endswith("WithTeacher"),
        "pool": "mean" if kind == "ijepa" else "class",
        "num_registers": config.get("num_register_tokens", 0),
    }
    if kind == "deit" and not options["distilled"]:
        # A distillation token that no classifier reads takes part in attention, as a register does.
        options["num_registers"] += 1
    options["mlp_ratio"] = config.get("mlp_ratio") or mlp_ratio(
        config["intermediate_size"], options["embed_dim"]
    )
    if kind == "dinov3_vit":
        options |= {
            "pos_embed": "rope",
            "rope_coordinates": "centred",
            "rope_base": config["rope_theta"],
            "layer_scale": config["layerscale_value"],
            "qkv_bias": config["query_bias"],
            "mlp": "swiglu" if flag(config, "use_gated_mlp") else "gelu",
        }
    return options


def mlp_ratio(hidden: int, width: int) -> float:
    """The ratio with which the model makes an MLP of `hidden` channels."""
    ratio = hidden / width
    return ratio if hidden_width(width, ratio, "mlp_ratio") == hidden else (hidden + 0.5) / width


def _preparation(config: Table) -> tuple[Table, str]:
    """How a preprocessor_config.json prepares images: keys of a recipe, and what these cannot say.
    transformers normalises pixels times rescale_factor, we those over 255.
    """
    factor = 255.0
    if flag(config, "do_rescale", True):
        factor = 255 * config.get("rescale_factor", 1 / 255)
    mean, std = config.get("image_mean"), config.get("image_std")
    if not flag(config, "do_normalize", True):
        mean, std = [0.0] * 3, [1.0] * 3
    size = _by_side(config.get("size"))
    crop = _by_side(config.get("crop_size")) if flag(config, "do_center_crop") else {}
    shorter = size.get("shortest_edge") or min(size.get("height", 0), size.get("width", 0))
    side = crop.get("height") or crop.get("shortest_edge") or shorter
    changes: Table = {}
    lost = ""
    if mean is not None:
        changes["data.mean"] = [value / factor for value in mean]
    if std is not None:
        changes["data.std"] = [value / factor for value in std]
    resample = config.get("resample")
    if resample is not None:
        changes["eval.interpolation"] = RESAMPLE.get(resample, resample)
    if side and shorter:
        changes["eval.crop_pct"] = min(side / shorter, 1.0)
    if "height" in size:  # whatever an image's proportions
        if crop in ({}, size):
            changes |= WHOLE_IMAGE | {"augment.fit": "squash"}
        else:
            lost = CROPPED.format("squash", "their shorter side is resized")
    return changes, lost


def _by_side(size: Any) -> Table:
    """A size as transformers writes it now, which was one number for both sides once."""
    if isinstance(size, int):
        return {"height": size, "width": size}
    return size or {}


def preprocessor_config(recipe: Recipe, size: tuple[int, int]) -> Table:
    """The preprocessor_config.json with which transformers prepares images as this recipe does;
    CheckpointError if it cannot, as of images that are padded.
    """
    height, width = size
    if recipe.augment.fit == "pad":
        raise CheckpointError(
            f"recipe {recipe.name}: augment.fit is pad, and transformers' image processors pad no "
            "image to its centre; expected --names timm, or none"
        )
    whole: Table = {"height": height, "width": width}
    shorter = {"shortest_edge": int(height / recipe.eval.crop_pct + 1e-9)}
    is_cropped = recipe.augment.fit == "crop"
    return {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "do_center_crop": is_cropped,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": recipe.data.channels == 3,
        "crop_size": whole,
        "size": shorter if is_cropped else whole,
        "resample": Resampling[recipe.eval.interpolation.upper()].value,
        "image_mean": list(recipe.data.mean),
        "image_std": list(recipe.data.std),
    }
