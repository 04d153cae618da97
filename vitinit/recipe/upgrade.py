"""Upgrade recipes that runs of earlier versions wrote, so that they have the present keys.

A recipe that a run writes (in recipe.toml and in checkpoints) states its `version`: the number of
the set of keys that it was written with. Each function `to_N` below changes a recipe of version N −
1 into one of version N, and gives each new key, and each option whose default changed, the value
with which training does what it did before. Recipes that people write need no version. Without one
they must have all present keys, so that a forgotten key is an error.

A change of the keys or of an option's default adds one to VERSION and one function to STEPS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .values import plain

VERSION = 12
Table = dict[str, Any]


def keep_deep_impulse(table: Table, **earlier: Any) -> None:
    """Give a `deep_impulse` of a ViT these earlier values of options that it does not state."""
    if table["init"]["name"] == "deep_impulse" and table["model"]["name"].startswith("vit_"):
        table["init"]["options"] = earlier | table["init"].get("options", {})


def to_2(table: Table, processes: int) -> None:
    """DeiT's augmentation got keys, and label smoothing moved from [optim] to [mix]."""
    table["augment"] |= {
        "repeats": 1, "erase_probability": 0.0, "erase_area": [0.02, 1 / 3],
        "erase_ratio": [0.3, 10 / 3], "erase_fill": "pixel", "erase_after_mix": False}
    table["rand_augment"] = {
        "layers": 0, "probability": 0.5, "magnitude": 9.0, "magnitude_std": 0.5,
        "fill": [128, 128, 128], "interpolation": "bicubic",
        "operations": ["AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize",
                       "SolarizeAdd", "Color", "Contrast", "Brightness", "Sharpness", "ShearX",
                       "ShearY", "TranslateX", "TranslateY"],
        "rotate_degrees": 30.0, "shear_factor": 0.3, "translate_share": 0.45,
        "enhance_factor": 0.9, "posterize_bits": 4, "solarize_levels": 256,
        "solarize_add_levels": 110}
    table["mix"] = {
        "mixup_alpha": 0.0, "cutmix_alpha": 0.0, "probability": 1.0, "switch_probability": 0.5,
        "label_smoothing": table["optim"].pop("label_smoothing")}
    table["init"] |= {"checkpoint": "", "checkpoint_weights": "model"}


def to_3(table: Table, processes: int) -> None:
    """Keys for weight selection and for ConvMixer's schedule were added."""
    table["init"]["checkpoint_fit"] = "exact"
    table["schedule"]["shape"] = "cosine"


def to_4(table: Table, processes: int) -> None:
    """Keys for subsets of a data set and for small sets on the device were added."""
    table["data"] |= {"subset": 1.0, "images_per_class": 0, "subset_seed": 0, "on_device_gib": 0.0}


def to_5(table: Table, processes: int) -> None:
    """Images are mixed in groups, and `deep_impulse` has an option `marks`.

    Before, the images of a micro-batch were mixed with one draw, so the group has its size. `marks`
    changed what the init does, so it is off. From this version on recipes state their version.
    """
    mix, optim = table["mix"], table["optim"]
    most = min(optim["max_batch_per_process"], optim["global_batch"] // processes)
    groups = [size for size in range(2, most + 1, 2)             # a group consists of pairs
              if optim["global_batch"] // processes % size == 0]
    mix.setdefault("group", groups[-1] if groups else 2)
    keep_deep_impulse(table, marks=False)


def to_6(table: Table, processes: int) -> None:
    """Evaluation views may be stored in memory; before, they were decoded for every evaluation."""
    table["eval"]["cache_gib"] = 0.0


# Options that were renamed in version 7: (section, old name) → new name.
RENAMED = {("init", "marks"): "bias_channels", ("model", "input_code"): "input_pos_embed"}


def to_7(table: Table, processes: int) -> None:
    """Some options of models and inits, and values of `pseudo_input`, were renamed."""
    for (title, old), new in RENAMED.items():
        options = table[title].get("options", {})
        table[title]["options"] = {new if key == old else key: value
                                   for key, value in options.items()}
    options = table["init"]["options"]
    if "pseudo_input" in options:
        options["pseudo_input"] = options["pseudo_input"].replace("code", "pos_embed")


def to_8(table: Table, processes: int) -> None:
    """Keys for held-out images and for the learning rates of parts of the model were added."""
    table["data"]["held_out_per_class"] = 0
    table["optim"]["lr_scales"] = {"qk": 1.0, "pos_embed": 1.0, "patch_embed": 1.0, "head": 1.0,
                                   "layer_decay": 1.0}
    table["optim"]["hold_epochs"] = {"qk": 0, "pos_embed": 0, "patch_embed": 0, "head": 0}


def to_9(table: Table, processes: int) -> None:
    """`deep_impulse` of a ViT got other defaults: base "lecun" and a mass that falls with depth."""
    keep_deep_impulse(table, base="default", target_mass=0.9)


def to_10(table: Table, processes: int) -> None:
    """`deep_impulse` of a ViT got a smaller code, without bias channels."""
    keep_deep_impulse(table, code_channels=1 / 3, bias_channels=True)


def to_11(table: Table, processes: int) -> None:
    """Muon was added; rates of parts of the model and held parts went, except for the layer decay.

    What else a recipe states of them stays in it, so that its records can be read; it is no recipe
    that can be trained with.
    """
    optim = table["optim"]
    scales, held = optim.pop("lr_scales"), optim.pop("hold_epochs")
    optim |= {"name": "adamw", "layer_decay": scales.pop("layer_decay"), "muon_factor": 1.0,
              "muon_momentum": 0.95}
    gone = {"lr_scales": {part: scale for part, scale in scales.items() if scale != 1.0},
            "hold_epochs": {part: epochs for part, epochs in held.items() if epochs}}
    optim |= {key: parts for key, parts in gone.items() if parts}


def to_12(table: Table, processes: int) -> None:
    """The orientation in photographs' EXIF data may be applied; before, it was ignored."""
    table["data"]["apply_exif_orientation"] = False


STEPS: dict[int, Callable[[Table, int], None]] = {2: to_2, 3: to_3, 4: to_4, 5: to_5, 6: to_6,
                                                  7: to_7, 8: to_8, 9: to_9, 10: to_10,
                                                  11: to_11, 12: to_12}


# Options that were removed, at the values at which they did nothing; 09cb91f is the last commit with
# them. Other values stay in a recipe, and are refused where it is trained with.
GONE = {"init": {"content_scale": 0.0, "patch_embed": "base", "value_scale": 1.0, "calibrated": False,
                 "length_scale": 1.0, "envelope_width": 2.0},
        "model": {"softmax_filters": False, "dense_filters": False, "norm": "batch",
                  "norm_place": "after", "channel_residual": "mlp", "plain_stem": False}}


def drop_gone(table: Table) -> None:
    """Remove options that are no more from a recipe in which they did nothing."""
    for title, gone in GONE.items():
        options = table.get(title, {}).get("options", {})
        if title == "model" and str(table[title].get("name")).startswith("convmixer"):
            gone = gone | {"mlp_ratio": 0.0}
        for key, value in gone.items():
            if key in options and options[key] == value:
                del options[key]


def version_of(table: Mapping[str, Any]) -> Any:
    """The version of a run's recipe. Versions 1 to 4 state none and are recognised by their keys."""
    if "version" in table:
        return table["version"]
    mix, schedule, data = (table.get(title) for title in ("mix", "schedule", "data"))
    if not isinstance(mix, Mapping):
        return 1
    if not isinstance(schedule, Mapping) or "shape" not in schedule:
        return 2
    return 4 if isinstance(data, Mapping) and "subset" in data else 3


def upgraded(table: Mapping[str, Any], *, processes: int = 1) -> Table:
    """A run's recipe of any version, upgraded to the present keys; the key `version` is removed.

    processes: how many the run was started with, because training of earlier versions depended on
    it. Raises ValueError for a version that this code does not know, and for a table that lacks
    keys of its version.
    """
    table = plain(table)
    version = version_of(table)
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ValueError(f"is a recipe of version {version!r}, and this code knows 1 to {VERSION}; "
                         "newer code wrote it")
    for step in range(version + 1, VERSION + 1):
        try:
            STEPS[step](table, processes)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"is no recipe of version {version}: {error} is missing or something "
                             "else") from None
    drop_gone(table)
    return {key: value for key, value in table.items() if key != "version"}


def processes_of(run: Path) -> int:
    """How many processes the run in this folder had when it was last started; 1 if unknown."""
    try:
        processes = json.loads((run / "run.json").read_text(encoding="utf-8"))[-1]["processes"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return 1
    return processes if type(processes) is int and processes > 0 else 1


def notes(table: Mapping[str, Any]) -> list[str]:
    """One line for each way in which training differs from before when a run of this recipe resumes."""
    mix = table.get("mix", {})
    mixes = mix.get("probability") and (mix.get("mixup_alpha") or mix.get("cutmix_alpha"))
    if "group" in mix or not mixes:
        return []
    return ["this run began when images were mixed by micro-batches; from here on they are mixed by "
            "groups of mix.group images, so results differ slightly from those of the earlier code"]
