"""Whether the code of this checkout still computes what an earlier commit does, to the bit.

    python .ci/guard.py [--base COMMIT] [--only PATTERN] [--cache FOLDER] [--list]

It is for changes that are to move code and change no number. Many tiny runs are trained by the
earlier commit, which is unpacked beside this checkout, and by the files of this checkout as they
are now, committed or not: on the same CPU, with one thread each, one after the other. Compared are
all rows of metrics.jsonl and steps.jsonl but for times, and every tensor of last.pt: of the model,
its moving average, the optimiser and the loss scaler. Some runs are also compared with others of
this checkout that have to be the same, such as one that was never interrupted. What the earlier
commit computes is kept in a folder, so that a second call runs this checkout alone.

There are two interfaces that both must have: the arguments of train.py, and `vitinit.Run`. Nothing
else of the package is imported, since modules may move.

Not covered: GPUs, torch.compile, data sets other than image_folder, and all programs but train.py.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
BASE = "f0be52c"
PATIENCE = 300  # seconds for a process that runs train.py
# Entries of rows that are measured, and so differ between two runs of the same code.
TIMES = (
    "seconds",
    "images_per_second",
    "waiting_seconds",
    "waiting",
    "cpu_seconds",
    "tflops_per_device",
    "peak_memory_gib",
)
READY = "ready\n"  # what the process of all runs writes once it has the package
PARTS = ("model", "ema", "optimizer", "scaler", "grid", "step", "classes")  # of last.pt

Result = dict[str, Any]  # {"metrics": rows, "steps": rows, "state": {name: leaf}}, or
# {"error": text}
Variants = dict[str, dict[str, Any]]  # the end of a case's name → what sets it apart


# ---------------------------------------------------------------------------------- the cases

# fmt: off
SMALL = {
    "data.name": "image_folder", "data.num_classes": 3, "data.image_size": 8, "data.workers": 0,
    "data.images_per_class": 0,
    "eval.batch_size": 8, "optim.global_batch": 12, "optim.max_batch_per_process": 12,
    "optim.base_lr": 1e-2, "optim.lr_scaling": "none", "optim.eps": 1e-4, "schedule.epochs": 2,
    "schedule.warmup_epochs": 1, "schedule.warmup_lr": 0.0, "schedule.min_lr": 0.0,
    "schedule.cooldown_epochs": 0, "mix.group": 4, "engine.amp": "off", "engine.compile": False}
# fmt: on
QUICK = {"schedule.epochs": 1, "schedule.warmup_epochs": 0, "data.images_per_class": 8}  # 2 steps
ALL_AUGMENTATIONS = {
    "augment.repeats": 2,
    "augment.crop_scale": [0.3, 1.0],
    "augment.crop_ratio": [0.75, 1.25],
    "augment.crop_padding": 0,
    "augment.interpolation": "random",
    "augment.erase_probability": 0.5,
    "rand_augment.layers": 2,
    "rand_augment.interpolation": "random",
    "mix.mixup_alpha": 0.8,
    "mix.cutmix_alpha": 1.0,
    "mix.label_smoothing": 0.1,
}
EVERYTHING = ALL_AUGMENTATIONS | {
    "optim.name": "muon",
    "optim.layer_decay": 0.7,
    "optim.clip_norm": 1.0,
    "optim.max_batch_per_process": 4,
    "ema.decay": 0.99,
    "ema.warmup": True,
    "model.options.drop_path": 0.3,
}
RECONSTRUCT = {
    "task.name": "reconstruct",
    "task.options.decoder_dim": 8,
    "task.options.decoder_depth": 1,
    "task.options.decoder_heads": 2,
    "checkpoint.best_by": "val_loss",
}

# Family → the recipe whose model it is, and the changes that make that model tiny.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("quickstart", dict(patch_size=2, embed_dim=12, depth=2, num_heads=3)),
    "rotary_vit": ("cifar10_10k_rotary", dict(patch_size=2, embed_dim=24, depth=2, num_heads=3)),
    "swin": (
        "cifar10_swin_tiny",
        dict(patch_size=2, embed_dim=12, depths=[2, 1], num_heads=[3, 3], window_size=2),
    ),
    "mlp_mixer": ("cifar10_mixer", dict(patch_size=2, embed_dim=12, depth=2, tokens_ratio=1.5)),
    "conv_mixer": ("cifar10_convmixer", dict(patch_size=2, embed_dim=12, depth=2, kernel_size=3)),
    "simple_vit": ("cifar10_simple_vit", dict(patch_size=2, embed_dim=24, depth=2, num_heads=3)),
}
# The inits that each family takes, and further options of some.
INITS: dict[str, tuple[str, ...]] = {
    "vit": (
        "default",
        "torch",
        "lecun",
        "mimetic",
        "impulse",
        "deep_impulse",
        "whitened",
        "norm_matched",
        "impulse_gd",
    ),
    "rotary_vit": ("default", "torch", "lecun", "impulse", "deep_impulse", "whitened"),
    "swin": ("default", "torch", "lecun", "mimetic", "impulse", "whitened"),
    "mlp_mixer": ("default", "torch", "lecun", "impulse", "whitened"),
    "conv_mixer": ("default", "torch", "lecun", "impulse", "whitened", "filters"),
    "simple_vit": ("default", "torch", "lecun", "mimetic", "impulse", "impulse_gd"),
}
INIT_OPTIONS: dict[tuple[str, str], Variants] = {
    ("vit", "impulse"): {
        "random offsets": dict(offsets="random"),
        "base values": dict(value_init="base", base="torch"),
    },
    ("vit", "deep_impulse"): {"whitened patches": dict(patch_init="whitened")},
    ("vit", "mimetic"): {"values alone": dict(qk_init="base", value_init="untransposed")},
    ("rotary_vit", "impulse"): {"whitened patches": dict(patch_init="whitened")},
    ("conv_mixer", "filters"): {"box": dict(kind="box"), "gaussian": dict(kind="gaussian")},
}


@dataclass(frozen=True)
class Case:
    """One tiny run.

    how: "Run" trains it by `vitinit.Run` in the process that does all of these; "python -c" in a
        process of its own; "train.py" and "two processes" by that program; "SIGTERM" and "SIGKILL"
        also interrupt it there after its first row, and then go on.
    images: which of the folders that `draw_images` draws.
    teacher, start: the case whose run is its distill.teacher, or its init.checkpoint.
    same_as: the case whose results it has to have, too.
    """

    name: str
    recipe: str
    init: str | None
    sets: dict[str, Any] = field(default_factory=dict)
    how: str = "Run"
    images: str = "png"
    teacher: str = ""
    start: str = ""
    same_as: str = ""

    @property
    def needs(self) -> list[str]:
        """The cases that have to be run before it."""
        return [name for name in (self.teacher, self.start, self.same_as) if name]


def case(
    name: str,
    family: str = "vit",
    init: str | None = "default",
    *,
    how: str = "Run",
    images: str = "png",
    teacher: str = "",
    start: str = "",
    same_as: str = "",
    **sets: Any,
) -> Case:
    """A case of the tiny model of a family. sets: "section__key", or "model" with its options."""
    recipe, options = FAMILIES[family]
    options = options | sets.pop("model", {})
    changes = {key.replace("__", "."): value for key, value in sets.items()}
    changes = SMALL | {f"model.options.{key}": value for key, value in options.items()} | changes
    return Case(name, recipe, init, changes, how, images, teacher, start, same_as)


def keyed(sets: dict[str, Any]) -> dict[str, Any]:
    """Changes of a recipe as keyword arguments of `case`."""
    return {key.replace(".", "__"): value for key, value in sets.items()}


def cases() -> Iterator[Case]:
    """All of them, each after those that it needs."""
    for family in FAMILIES:
        yield case(
            f"family/{family}",
            family,
            "impulse",
            ema__decay=0.9,
            mix__mixup_alpha=0.8,
            augment__erase_probability=0.5,
        )
    yield from cases_of_inits()
    yield from cases_of_models()
    yield from cases_of_data()
    yield from cases_of_training()
    yield from cases_of_processes()


def cases_of_inits() -> Iterator[Case]:
    for family, inits in INITS.items():
        for init in inits:
            name, few = f"init/{family}/{init}", keyed(QUICK)
            if init == "impulse_gd":
                few["init__options__steps"] = 20
            if (family, init) == ("rotary_vit", "deep_impulse"):  # its recipe is of one mass
                few["init__options__target_mass"] = [0.66, 0.025]
            yield case(name, family, init, **few)
            for words, options in INIT_OPTIONS.get((family, init), {}).items():
                more = {f"init__options__{key}": value for key, value in options.items()}
                yield case(f"{name}, {words}", family, init, **few | more)


def cases_of_models() -> Iterator[Case]:
    quick = keyed(QUICK)
    variants: Variants = {
        "class token": dict(pool="class"),
        "fc_norm": dict(fc_norm=True),
        "sincos": dict(pos_embed="sincos"),
        "no positions": dict(pos_embed="none"),
        "qk_norm, layer scale, swiglu": dict(qk_norm=True, layer_scale=0.1, mlp="swiglu"),
        "distilled": dict(pool="class", distilled=True),
        "registers, no bias": dict(num_registers=2, qkv_bias=False),
        "drop path": dict(drop_path=0.5),
    }
    for words, options in variants.items():
        yield case(f"model/vit, {words}", model=options, **quick)
    variants = {
        "axial": dict(rope_frequencies="axial"),
        "mixed, scaled": dict(rope_frequencies="mixed", rope_coordinates="scaled"),
        "learned+rope, centred": dict(pos_embed="learned+rope", rope_coordinates="centred"),
    }
    for words, options in variants.items():
        yield case(f"model/rotary_vit, {words}", "rotary_vit", model=options, **quick)
    yield case("model/swin, drop path", "swin", model=dict(drop_path=0.5), **quick)
    yield case("model/mlp_mixer, drop path", "mlp_mixer", model=dict(drop_path=0.5), **quick)
    yield case(
        "model/conv_mixer, few filters, relu",
        "conv_mixer",
        model=dict(num_filters=2, train_filters=False, activation="relu"),
        **quick,
    )
    yield case(
        "model/simple_vit, content",
        "simple_vit",
        model=dict(reads="content", input_pos_embed=True, values=False),
        **quick,
    )


def cases_of_data() -> Iterator[Case]:
    crops = {
        "augment__crop_scale": [0.3, 1.0],
        "augment__crop_ratio": [0.75, 1.25],
        "augment__crop_padding": 0,
    }
    variants: Variants = {
        "none": dict(augment__flip=0.0, augment__crop_padding=0),
        "padded crops": dict(augment__crop_padding=2),
        "resized crops": crops,
        "bilinear": dict(augment__interpolation="bilinear", **crops),
        "random interpolation": dict(augment__interpolation="random", **crops),
        "randaugment": dict(rand_augment__layers=2, rand_augment__probability=1.0),
        "randaugment, random interpolation": dict(
            rand_augment__layers=2, rand_augment__interpolation="random"
        ),
        "erasing, pixel": dict(augment__erase_probability=1.0),
        "erasing, rand": dict(augment__erase_probability=0.5, augment__erase_fill="rand"),
        "erasing, const, after mixing": dict(
            augment__erase_probability=0.5,
            augment__erase_fill="const",
            augment__erase_after_mix=True,
            mix__mixup_alpha=0.8,
        ),
        "mixup": dict(mix__mixup_alpha=0.8),
        "cutmix": dict(mix__cutmix_alpha=1.0),
        "mixup, cutmix, smoothing": dict(
            mix__mixup_alpha=0.8,
            mix__cutmix_alpha=1.0,
            mix__label_smoothing=0.1,
            mix__probability=0.7,
        ),
        "repeats": dict(augment__repeats=3),
        "all": keyed(ALL_AUGMENTATIONS),
    }
    for words, changes in variants.items():
        yield case(f"augment/{words}", **changes)
    for operation in (
        "AutoContrast",
        "Equalize",
        "Invert",
        "Rotate",
        "Posterize",
        "Solarize",
        "SolarizeAdd",
        "Color",
        "Contrast",
        "Brightness",
        "Sharpness",
        "ShearX",
        "ShearY",
        "TranslateX",
        "TranslateY",
    ):
        yield case(
            f"randaugment/{operation}",
            images="jpeg",
            rand_augment__layers=1,
            rand_augment__probability=1.0,
            rand_augment__operations=[operation],
            **keyed(QUICK),
        )
    padded = dict(augment__crop_padding=2, images="square")
    decoded = dict(data__on_device_gib=0.0, same_as="data/images on the device")
    variants = {
        "images on the device": padded,
        "decoded in each epoch": padded | decoded | dict(eval__cache_gib=0.0),
        "two workers": padded | decoded | dict(data__workers=2),
        "jpeg": dict(images="jpeg", **crops),
        "jpeg as stored": dict(images="jpeg", data__apply_exif_orientation=False, **crops),
        "oblong": dict(
            images="jpeg",
            data__image_size=[8, 12],
            eval__crop_pct=0.875,
            eval__interpolation="bilinear",
        ),
        "subset": dict(data__subset=0.8, data__subset_seed="run", run__seed=3),
        "held out": dict(data__held_out_per_class=4, data__subset_seed=5),
    }
    for words, changes in variants.items():
        yield case(f"data/{words}", **changes)


def cases_of_training() -> Iterator[Case]:
    variants: Variants = {
        "adamw": dict(optim__name="adamw"),
        "muon": dict(optim__name="muon"),
        "muon, factor, momentum": dict(
            optim__name="muon", optim__muon_factor=2.5, optim__muon_momentum=0.9
        ),
        "layer decay": dict(optim__layer_decay=0.7, optim__weight_decay=0.5),
        "clipping": dict(optim__clip_norm=0.1),
        "no clipping": dict(optim__clip_norm=0.0),
        "linear scaling": dict(optim__lr_scaling="linear", optim__base_lr=0.1),
        "accumulation": dict(optim__max_batch_per_process=4, mix__mixup_alpha=0.8),
        "moving average": dict(ema__decay=0.9),
        "moving average with warm-up": dict(ema__decay=0.99, ema__warmup=True),
        "one cycle": dict(schedule__shape="one_cycle", schedule__warmup_epochs=0),
        "cosine after warm-up": dict(schedule__cosine_after_warmup=True),
        "epochs and a cool-down": dict(
            schedule__step_on="epoch", schedule__min_lr=1e-3, schedule__cooldown_epochs=1
        ),
        "bf16": dict(engine__amp="bf16"),
        "contiguous": dict(engine__channels_last=False),
        "seed": dict(run__seed=7),
    }
    for words, changes in variants.items():
        yield case(f"train/{words}", **changes)
    yield case("train/everything", init="mimetic", **keyed(EVERYTHING))
    yield case("train/everything, bf16", init="mimetic", **keyed(EVERYTHING), engine__amp="bf16")
    yield case(
        "train/conv_mixer, accumulation, muon",
        "conv_mixer",
        "impulse",
        optim__name="muon",
        optim__max_batch_per_process=4,
        mix__mixup_alpha=0.8,
    )
    yield case("train/head", start="family/vit", optim__train="head", ema__decay=0.9)
    yield case(
        "train/finetuned, larger images",
        start="family/vit",
        init=None,
        data__image_size=12,
        init__checkpoint_weights="ema",
    )
    yield case("reconstruct", **keyed(RECONSTRUCT))
    yield case(
        "reconstruct, everything",
        init="mimetic",
        **keyed(
            EVERYTHING
            | RECONSTRUCT
            | {"mix.mixup_alpha": 0.0, "mix.cutmix_alpha": 0.0, "mix.label_smoothing": 0.0}
        ),
        task__options__mask_ratio=0.5,
    )
    yield case("reconstruct, then classify", start="reconstruct")
    yield case("teacher/hard", teacher="family/conv_mixer", distill__kind="hard")
    yield case(
        "teacher/soft",
        teacher="family/conv_mixer",
        distill__kind="soft",
        distill__tau=1.7,
        distill__alpha=0.3,
        **keyed(ALL_AUGMENTATIONS),
    )
    yield case(
        "teacher/two heads",
        teacher="family/vit",
        distill__kind="soft",
        distill__weights="ema",
        model=dict(pool="class", distilled=True),
    )


def cases_of_processes() -> Iterator[Case]:
    everything = keyed(EVERYTHING)
    yield case("train.py", init="mimetic", how="train.py", same_as="train/everything", **everything)
    yield case(
        "python -c", init="mimetic", how="python -c", same_as="train/everything", **everything
    )
    yield case("two processes/vit", init="mimetic", how="two processes", **everything)
    yield case(
        "two processes/conv_mixer",
        "conv_mixer",
        "impulse",
        how="two processes",
        optim__max_batch_per_process=3,
        ema__decay=0.9,
        mix__mixup_alpha=0.8,
    )
    long = everything | dict(schedule__epochs=25)
    yield case("interrupted/never", init="mimetic", **long)
    yield case(
        "interrupted/SIGTERM", init="mimetic", how="SIGTERM", same_as="interrupted/never", **long
    )
    yield case(
        "interrupted/SIGKILL",
        init="mimetic",
        how="SIGKILL",
        same_as="interrupted/never",
        **long,
        checkpoint__every_steps=3,
    )


def with_needed(names: Iterable[str]) -> list[str]:
    """The names of these cases and of those that they need, in the order of `cases`."""
    needs, wanted = {one.name: one.needs for one in cases()}, set(names)
    while more := {need for name in wanted for need in needs[name]} - wanted:
        wanted |= more
    return [name for name in needs if name in wanted]


def chosen(pattern: str) -> list[str]:
    """The names of the cases in whose names the pattern is found, and of those that they need."""
    return with_needed(one.name for one in cases() if re.search(pattern, one.name))


# ---------------------------------------------------------------------------------- the images


def draw_images(root: Path) -> None:
    """Write png/ (10×14 pixels), square/ (8×8) and jpeg/ (40×56, some of them turned by EXIF):
    train/ and val/ of three classes, 17 and 7 noisy images each that differ in hue.
    """
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for kind, size in {"png": (10, 14), "square": (8, 8), "jpeg": (40, 56)}.items():
        for split, count in (("train", 17), ("val", 7)):
            for channel, name in enumerate(("red", "green", "blue")):
                folder = root / kind / split / name
                folder.mkdir(parents=True)
                for index in range(count):
                    pixels = rng.integers(0, 160, (*size, 3))
                    pixels[..., channel] += 40
                    image = Image.fromarray(pixels.astype(np.uint8))
                    if kind == "jpeg":
                        orientation = Image.Exif()
                        orientation[0x0112] = 1 + index % 8
                        image.save(folder / f"{index:02}.jpg", quality=90, exif=orientation)
                    else:
                        image.save(folder / f"{index:02}.png")


# ------------------------------------------------------------------------- the runs of one tree


@dataclass(frozen=True)
class Place:
    """Where runs are: the code's tree, the folder of images, and the folder of all runs."""

    tree: Path
    images: Path
    runs: Path

    def folder(self, name: str) -> Path:
        """The folder of a case's run."""
        return self.runs / re.sub(r"\W+", "_", name)

    def sets(self, one: Case) -> dict[str, Any]:
        """The changes of the recipe, with the runs that a case builds upon."""
        sets = dict(one.sets)
        if one.teacher:
            sets["distill.teacher"] = str(self.folder(one.teacher))
        if one.start:
            sets["init.checkpoint"] = str(self.folder(one.start))
        return sets


def environment(tree: Path) -> dict[str, str]:
    """Variables of a process that imports the package of this tree, and has one thread."""
    return os.environ | {
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def arguments_of(one: Case, place: Place) -> list[str]:
    """The arguments of train.py. JSON's texts, lists, numbers and booleans are those of TOML."""
    words = [
        "--recipe",
        one.recipe,
        "--data-dir",
        str(place.images / one.images),
        "--out-dir",
        str(place.folder(one.name)),
    ]
    if one.init is not None:
        words += ["--init", one.init]
    for key, value in place.sets(one).items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def keywords_of(one: Case, place: Place) -> dict[str, Any]:
    """The arguments of `vitinit.Run`."""
    return dict(
        recipe=one.recipe,
        init=one.init,
        data_dir=str(place.images / one.images),
        out_dir=str(place.folder(one.name)),
        overrides=place.sets(one),
    )


def train_here(one: Case, place: Place) -> None:
    import vitinit

    vitinit.Run(**keywords_of(one, place)).train()


def train_by_code(one: Case, place: Place) -> None:
    code = f"import vitinit; vitinit.Run(**{keywords_of(one, place)!r}).train()"
    require(
        0,
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=place.tree,
            timeout=PATIENCE,
            env=environment(place.tree),
        ).returncode,
    )


def train_by_program(one: Case, place: Place, *, processes: int = 1) -> None:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    require(
        0,
        subprocess.run(
            [*launcher, str(place.tree / "train.py"), *arguments_of(one, place)],
            cwd=place.tree,
            env=environment(place.tree),
            timeout=PATIENCE,
        ).returncode,
    )


def train_interrupted(one: Case, place: Place, *, number: signal.Signals) -> None:
    """End a run by a signal as soon as it has a row, and go on with it."""
    folder = place.folder(one.name)
    rows = folder / "metrics.jsonl"
    program = [sys.executable, str(place.tree / "train.py")]
    with subprocess.Popen(
        [*program, *arguments_of(one, place)], cwd=place.tree, env=environment(place.tree)
    ) as process:
        end = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < end:
            if rows.exists() and rows.stat().st_size:
                break
            time.sleep(0.005)
        process.send_signal(number)
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()
    require(128 + number if number == signal.SIGTERM else -number, process.returncode)
    require(
        0,
        subprocess.run(
            [*program, "--resume", str(folder)],
            cwd=place.tree,
            timeout=PATIENCE,
            env=environment(place.tree),
        ).returncode,
    )


def require(expected: int, status: int) -> None:
    """Raise RuntimeError unless a process has ended with the status that is expected."""
    if status != expected:
        raise RuntimeError(f"a process ended with status {status}, expected {expected}")


WAYS: dict[str, Callable[[Case, Place], None]] = {
    "Run": train_here,
    "python -c": train_by_code,
    "train.py": train_by_program,
    "two processes": partial(train_by_program, processes=2),
    "SIGTERM": partial(train_interrupted, number=signal.SIGTERM),
    "SIGKILL": partial(train_interrupted, number=signal.SIGKILL),
}


def result_of(folder: Path) -> Result:
    """What a finished run has left."""
    import torch

    saved = torch.load(folder / "last.pt", weights_only=True, map_location="cpu")
    return {
        "metrics": rows_of(folder / "metrics.jsonl"),
        "steps": rows_of(folder / "steps.jsonl"),
        "state": dict(leaves({part: saved.get(part) for part in PARTS})),
    }


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file without times; a run of fewer than ten steps has no steps.jsonl."""
    if not path.exists():
        return []
    rows = map(json.loads, path.read_text().splitlines())
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Names and contents of all that is in nested containers; of a tensor a text with its type,
    shape, norm and digest.
    """
    import torch

    if isinstance(value, torch.Tensor):
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(content).hexdigest()
        kind = str(value.dtype).removeprefix("torch.")
        yield name, f"{kind} {list(value.shape)} of norm {value.double().norm():.9g}, {digest}"
    elif isinstance(value, (dict, list, tuple)):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            yield from leaves(entry, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def work(place: Place, names: list[str]) -> None:
    """Train the cases of these names by the code in one tree. Writes READY and then a line [name,
    result] of JSON each to what was the standard output; what runs print goes to a log beside their
    folders.
    """
    lines = os.fdopen(os.dup(1), "w")
    place.runs.mkdir(parents=True, exist_ok=True)
    log = os.open(place.runs / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import vitinit

    found = Path(vitinit.__file__).resolve().parent
    if found != (place.tree / "vitinit").resolve():
        raise SystemExit(f"the package of {found} was imported, and not that of {place.tree}")
    lines.write(READY)
    lines.flush()
    for one in cases():
        if one.name in names:
            print(f"\n==== {one.name}", flush=True)
            try:
                WAYS[one.how](one, place)
                result = result_of(place.folder(one.name))
            except Exception as error:  # the other cases are run nevertheless
                result = {
                    "error": f"{type(error).__name__}: {error}".replace(
                        str(place.runs), "RUNS"
                    ).replace(str(place.tree), "TREE")
                }
            lines.write(json.dumps([one.name, result]) + "\n")
            lines.flush()


# ------------------------------------------------------------------------------- the comparison


def results_of(place: Place, names: list[str], log: Path) -> Iterator[tuple[str, Result]]:
    """Train the cases of these names in a process of its own; yield the results as they come. A
    case that ends the process is told, and the others are run in a new one. What the runs have
    printed is put at `log`.
    """
    left = list(names)
    while left:
        command = [
            sys.executable,
            __file__,
            "--work",
            json.dumps([str(place.tree), str(place.images), str(place.runs), left]),
        ]
        with subprocess.Popen(
            command,
            env=environment(place.tree),
            stdout=subprocess.PIPE,
            text=True,
            cwd=place.images,
        ) as process:
            try:
                assert process.stdout is not None
                is_ready = process.stdout.readline() == READY
                for line in process.stdout:
                    name, result = json.loads(line)
                    left.remove(name)
                    yield name, result
                process.wait()
            finally:
                process.kill()
                if (place.runs / "log.txt").exists():
                    shutil.copyfile(place.runs / "log.txt", log)
        ended = {"error": f"the process of all runs ended, with status {process.returncode}"}
        guilty = left[:1] if is_ready else left  # without the package there are no runs at all
        for name in guilty:
            yield name, ended
        left = left[len(guilty) :]


def difference(before: Result, now: Result) -> str:
    """The first thing that differs between two results, with both values; "" if nothing does."""
    for result, whose in ((before, "the base"), (now, "this checkout")):
        if "error" in result:
            return f"{whose} fails: {result['error']}"
    for part in ("metrics", "steps"):
        if len(before[part]) != len(now[part]):
            return f"{part}.jsonl has {len(before[part])} rows, now {len(now[part])}"
        for number, rows in enumerate(zip(before[part], now[part]), 1):
            if words := first_entry(*rows):
                return f"{part}.jsonl, row {number}: {words}"
    words = first_entry(before["state"], now["state"])
    return f"last.pt: {words}" if words else ""


def first_entry(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The first entry that differs, in words; "" if none does. NaN equals NaN."""
    for key in dict.fromkeys([*before, *now]):
        old, new = (
            json.dumps(entries[key]) if key in entries else "nothing" for entries in (before, now)
        )
        if old != new:
            return f"{key} is {shortened(old)}, now {shortened(new)}"
    return ""


def shortened(text: str) -> str:
    """The text with the digests in it cut to a few digits."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", text)


def commit_of(name: str) -> str:
    """The full hash of a commit of this repository; the program ends where there is none."""
    found = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"],
        cwd=CHECKOUT,
        text=True,
        stdout=subprocess.PIPE,
    )
    if found.returncode:
        raise SystemExit(f"guard.py: --base {name}: no such commit in {CHECKOUT}")
    return found.stdout.strip()


def unpack(commit: str, folder: Path) -> None:
    """Write the files of a commit."""
    folder.mkdir()
    with subprocess.Popen(
        ["git", "archive", commit], cwd=CHECKOUT, stdout=subprocess.PIPE
    ) as archive:
        subprocess.run(["tar", "-x", "-C", str(folder)], stdin=archive.stdout, check=True)
    require(0, archive.returncode)


def machine() -> str:
    """What decides how numbers are rounded, besides the code: the CPU and the libraries."""
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line for line in lines if line.startswith("model name")), cpu)
    versions = [importlib.metadata.version(name) for name in ("torch", "numpy", "pillow")]
    return " ".join([cpu, platform.python_version(), *versions])


def results_of_base(
    commit: str, names: list[str], cache: Path, images: Path, parent: Path
) -> dict[str, Result]:
    """The results of a commit, from the cache as far as they are there. parent: a folder for its
    files and runs, that is removed later.
    """
    key = [commit, hashlib.sha256(Path(__file__).read_bytes()).hexdigest(), machine()]
    file = cache / f"{commit[:12]}-{hashlib.sha256(repr(key).encode()).hexdigest()[:12]}.json"
    known: dict[str, Result] = json.loads(file.read_text()) if file.exists() else {}
    missing = [name for name in names if name not in known]
    if missing:
        start = time.monotonic()
        unpack(commit, parent / "base")
        wanted = with_needed(missing)
        place = Place(parent / "base", images, parent / "base_runs")
        known |= results_of(place, wanted, cache / "base.log")
        file.write_text(
            json.dumps({name: result for name, result in known.items() if "error" not in result})
        )
        print(
            f"base    {commit[:12]}: {len(wanted)} cases in {time.monotonic() - start:.0f} s, "
            f"kept in {file}",
            flush=True,
        )
    else:
        print(f"base    {commit[:12]}: {len(names)} cases, from {file}", flush=True)
    return known


def compare(base: str, pattern: str, cache: Path) -> int:
    """Print a line per case and a summary; return the exit status."""
    names = chosen(pattern)
    if not names:
        raise SystemExit(f"guard.py: --only {pattern}: no case has such a name; see --list")
    same_as = {one.name: one.same_as for one in cases()}
    commit = commit_of(base)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{CHECKOUT.name}-guard-", dir=CHECKOUT.parent) as made:
        parent = Path(made)
        images = parent / "images"
        draw_images(images)
        before = results_of_base(commit, names, cache, images, parent)
        start = time.monotonic()
        log = cache / "now.log"
        now, differing = dict[str, Result](), list[str]()
        for name, result in results_of(Place(CHECKOUT, images, parent / "runs"), names, log):
            now[name] = result
            words = difference(before[name], result)
            if not words and same_as[name]:
                words = difference(now[same_as[name]], result)
                words = words and f"differs from {same_as[name]}: {words}"
            print(f"{name:<42}  {words or 'equal to the bit'}", flush=True)
            if words:
                differing.append(name)
    print(
        f"\n{len(names) - len(differing)} of {len(names)} cases are equal to the bit to those of "
        f"{commit[:12]}, in {time.monotonic() - start:.0f} s; what they printed: {log}"
    )
    for name in differing:
        print(f"differs {name}")
    return 1 if differing else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", default=BASE, help=f"the earlier commit; default {BASE}")
    parser.add_argument(
        "--only",
        default="",
        metavar="PATTERN",
        help="the cases in whose names this regular expression is found",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        help="folder of what the base computes; default "
        "vitinit-guard in the user's folder of caches",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases alone")
    parser.add_argument("--work", help=argparse.SUPPRESS)  # how this program calls itself
    args = parser.parse_args()
    if args.work:
        tree, images, runs, names = json.loads(args.work)
        work(Place(Path(tree), Path(images), Path(runs)), names)
        return 0
    if args.list:
        print("\n".join(chosen(args.only)))
        return 0
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return compare(args.base, args.only, args.cache or caches / "vitinit-guard")


if __name__ == "__main__":
    sys.exit(main())
