"""Recipes: one experiment each, as a complete and flat TOML file.

A recipe is read once, checked once and then frozen:

    file  →  --init, --seed, --data-dir, --set  →  typed sections  →  cross-checks  →  Recipe

Every key must be there and no key may be there twice or for nothing, so that `diff` between two
recipes shows every difference between two experiments. Whatever is wrong ends in a `RecipeError`
of one line that names the place, the key, what was expected and the nearest valid key.

The two free tables, `[model.options]` and `[init.options]`, hold departures from documented
defaults; `resolve_options` checks them against the signature of the function that takes them.
Standard library only.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .values import (PAIR, convert, describe, nearest, nearest_choice, number, plain, shown, to_toml,
                     within)


class RecipeError(ValueError):
    """What is wrong with a recipe or an override, in one line."""

    def __init__(self, message: str) -> None:
        super().__init__("\\n".join(message.splitlines()))   # a newline in what was quoted


class Override(NamedTuple):
    """One change to a recipe from the command line."""

    key: str                    # section.key
    value: Any
    text: str                   # what the user wrote, for errors to name


# ---------------------------------------------------------------------------------------------
# Sections. A field without a default is a key that every recipe must state.
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    seed: int = number(minimum=0, below=2**63)      # keys every random draw of the run


@dataclass(frozen=True)
class Data:
    name: Literal["shapes", "image_folder", "cifar10", "cifar100"]
    root: str                                       # folder of the data set; "" for `shapes`
    num_classes: int = number(minimum=2)
    image_size: PAIR = number(minimum=1)            # (height, width) that the model sees
    mean: tuple[float, float, float] = number(minimum=0.0, maximum=1.0)  # per channel, of [0, 1]
    std: tuple[float, float, float] = number(above=0.0)
    workers: int = number(minimum=0)                # loader processes, per training process


@dataclass(frozen=True)
class Augment:
    """One random crop, resized to the image size, then a flip.

    Pad-and-shift is the special case crop_scale = crop_ratio = [1, 1] with crop_padding > 0.
    """

    crop_scale: tuple[float, float] = number(above=0.0, maximum=1.0)  # share of the image's area
    crop_ratio: tuple[float, float] = number(above=0.0)               # width over height
    crop_padding: int = number(minimum=0)           # black pixels on each side before the crop
    flip: float = number(minimum=0.0, maximum=1.0)  # probability of a horizontal flip
    interpolation: Literal["bilinear", "bicubic"]


@dataclass(frozen=True)
class Eval:
    crop_pct: float = number(above=0.0, maximum=1.0)  # resize to image_size / crop_pct, then crop
    interpolation: Literal["bilinear", "bicubic"]
    batch_size: int = number(minimum=1)             # images a process and forward pass
    every_epochs: int = number(minimum=1)           # the last epoch is always evaluated


@dataclass(frozen=True)
class Model:
    name: str
    options: Mapping[str, Any]                      # keyword sizes of that model


@dataclass(frozen=True)
class Init:
    name: str
    options: Mapping[str, Any]                      # departures from that init's defaults


@dataclass(frozen=True)
class Optim:
    global_batch: int = number(minimum=1)           # images a step, over all processes
    max_batch_per_process: int = number(minimum=1)  # images a forward pass; the rest accumulates
    base_lr: float = number(above=0.0)
    lr_scaling: Literal["linear", "none"]           # linear: base_lr · global_batch / 512
    weight_decay: float = number(minimum=0.0)
    betas: tuple[float, float] = number(minimum=0.0, below=1.0)
    eps: float = number(above=0.0)
    clip_norm: float = number(minimum=0.0)          # global gradient norm; 0: no clipping
    label_smoothing: float = number(minimum=0.0, below=1.0)


@dataclass(frozen=True)
class Schedule:
    epochs: int = number(minimum=1)                 # length of warm-up and cosine together
    cooldown_epochs: int = number(minimum=0)        # further epochs at min_lr
    warmup_epochs: int = number(minimum=0)
    warmup_lr: float = number(minimum=0.0)          # where the warm-up starts, absolute
    min_lr: float = number(minimum=0.0)             # where the cosine ends, absolute
    step_on: Literal["epoch", "update"]             # when the learning rate changes


@dataclass(frozen=True)
class Ema:
    decay: float = number(minimum=0.0, below=1.0)   # 0: no moving average is kept
    warmup: bool                                    # decay min(decay, 1 - (1 + update)^(-2/3))


@dataclass(frozen=True)
class Engine:
    amp: Literal["off", "bf16", "fp16"]             # autocast; fp16 adds a GradScaler
    compile: bool                                   # torch.compile
    channels_last: bool                             # memory format of the input batch
    tf32: bool                                      # TensorFloat-32 matrix products on CUDA


@dataclass(frozen=True)
class Checkpoint:
    every_epochs: int = number(minimum=1)           # last.pt; the last epoch always writes it
    every_steps: int = number(minimum=0)            # last.pt also every so many steps; 0: never
    keep_epochs: tuple[int, ...] = number(minimum=0)  # epochs kept for good; 0: the initial model
    best_by: Literal["val_top1", "val_loss", "ema_top1"]


@dataclass(frozen=True)
class Recipe:
    name: str                                       # the file's stem, not a key
    run: Run
    data: Data
    augment: Augment
    eval: Eval
    model: Model
    init: Init
    optim: Optim
    schedule: Schedule
    ema: Ema
    engine: Engine
    checkpoint: Checkpoint

    def as_dict(self) -> dict[str, Any]:
        """Plain nested containers; `from_dict` reads them back."""
        return {name: ({key: plain(value) for key, value in vars(section).items()}
                       if dataclasses.is_dataclass(section) else section)
                for name, section in vars(self).items()}


SECTIONS = {name: kind for name, kind in typing.get_type_hints(Recipe).items() if name != "name"}
FREE_TABLES = ("model.options", "init.options")


def parse_override(text: str) -> Override:
    """`section.key=value` as --set takes it: TOML's notation, bare words being strings."""
    key, equals, written = text.partition("=")
    key, written = key.strip(), written.strip()
    if not equals or "." not in key:
        raise RecipeError(f"--set {text}: expected section.key=value, for example "
                          "--set schedule.epochs=10")
    try:
        table = tomllib.loads(f"value = {written}")
    except ValueError:
        return Override(key, written, f"--set {text}")
    if len(table) > 1:
        raise RecipeError(f"--set {text}: expected one value, and one --set for each key")
    value = table["value"]
    return Override(key, value, f"--set {text}")


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def find_recipe(name: str, folder: Path) -> Path:
    """A recipe by name (looked up in `folder`) or by path (anything that ends in .toml)."""
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    if not os.path.isfile(path):                     # never raises, however odd the name
        if name.endswith(".toml"):
            raise RecipeError(f"--recipe {name}: no such file")
        shipped = [recipe.stem for recipe in folder.glob("*.toml")]
        raise RecipeError(f"--recipe {name}: no such recipe in {folder}{nearest(name, shipped)}")
    return path


def load_recipe(path: Path, overrides: Sequence[Override] = ()) -> Recipe:
    """Read the recipe at `path`, apply `overrides` in order, check everything; RecipeError."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:    # TOML's, Unicode's, too long or too deep
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    return _build(table, Path(path).stem, str(path), overrides)


def from_dict(table: Mapping[str, Any], source: str) -> Recipe:
    """What `Recipe.as_dict` gave, for instance in a checkpoint; `source` is what errors name."""
    sections = {name: value for name, value in table.items() if name != "name"}
    return _build(sections, str(table.get("name", "unnamed")), source, ())


def with_options(recipe: Recipe, *, model: Mapping[str, Any], init: Mapping[str, Any]) -> Recipe:
    """The recipe with both free tables written out in full, as a run folder records it."""
    return dataclasses.replace(recipe,
                               model=Model(recipe.model.name, types.MappingProxyType(dict(model))),
                               init=Init(recipe.init.name, types.MappingProxyType(dict(init))))


def _build(table: Mapping[str, Any], name: str, source: str,
           overrides: Sequence[Override]) -> Recipe:
    table = plain(table)
    for title, body in table.items():
        if title not in SECTIONS:
            what = "section" if isinstance(body, dict) else "key outside of a section:"
            raise RecipeError(f"{source}: unknown {what} '{title}'{nearest(title, SECTIONS)}")
        if not isinstance(body, dict):
            raise RecipeError(f"{source}: '{title}' is {shown(body)}, expected a section [{title}]")
    for title in SECTIONS:
        if title not in table:
            raise RecipeError(f"{source}: section [{title}] is missing")
    for title in ("model", "init"):                 # an options table that is empty may be left out
        table[title].setdefault("options", {})

    written = _apply(table, overrides)
    recipe = Recipe(name=name, **{title: _section(section, title, table[title], source, written)
                                  for title, section in SECTIONS.items()})
    for keys, problem in _contradictions(recipe):
        place = next((written[key] for key in keys if key in written), source)
        raise RecipeError(f"{place}: {keys[0]} {problem}")
    return recipe


def _apply(table: dict[str, Any], overrides: Sequence[Override]) -> dict[str, str]:
    """Write the overrides into `table`; returns dotted key → what the user wrote."""
    written: dict[str, str] = {}
    for key, value, text in overrides:
        *parents, last = key.split(".")
        if parents[0] not in SECTIONS:
            raise RecipeError(f"{text}: there is no section '{parents[0]}'"
                              f"{nearest(parents[0], SECTIONS)}")
        if len(parents) == 2 and parents[0] in ("model", "init") and parents[1] != "options":
            raise RecipeError(f"{text}: [{parents[0]}] has no table '{parents[1]}'"
                              f"{nearest(parents[1], ['options'])}")
        if ".".join(parents) not in (*SECTIONS, *FREE_TABLES):
            raise RecipeError(f"{text}: '{key}' is nested too deeply; expected section.key=value")
        place = table
        for parent in parents:
            place = place[parent]
            if not isinstance(place, dict):
                raise RecipeError(f"{text}: {'.'.join(parents)} is {shown(place)}, expected a "
                                  "table")
        place[last] = value
        written[key] = text
    return written


def _section(section: type, title: str, body: dict[str, Any], source: str,
             written: Mapping[str, str]) -> Any:
    kinds = typing.get_type_hints(section)
    fields = {item.name: item for item in dataclasses.fields(section)}
    for key in body:
        if key not in fields:
            raise RecipeError(f"{written.get(f'{title}.{key}', source)}: [{title}] has no key "
                              f"'{key}'{nearest(key, fields)}")
    values = {}
    for key, item in fields.items():
        expected = describe(kinds[key], item.metadata)
        if key not in body:
            raise RecipeError(f"{source}: [{title}] lacks the key '{key}' ({expected})")
        try:
            values[key] = convert(body[key], kinds[key])
            fits = not item.metadata or within(values[key], item.metadata)
        except TypeError:
            fits = False
        if not fits:
            raise RecipeError(f"{written.get(f'{title}.{key}', source)}: {title}.{key} is "
                              f"{shown(body[key])}, expected {expected}"
                              f"{nearest_choice(body[key], kinds[key])}")
    return section(**values)


def _contradictions(recipe: Recipe) -> Iterable[tuple[tuple[str, ...], str]]:
    """(keys, what is wrong with the first) for values that are fine alone, impossible together."""
    total = recipe.schedule.epochs + recipe.schedule.cooldown_epochs
    for key in ("crop_scale", "crop_ratio"):
        low, high = getattr(recipe.augment, key)
        if low > high:
            yield (f"augment.{key}",), f"is [{low:g}, {high:g}], expected the smaller value first"
    if recipe.data.root == "" and recipe.data.name != "shapes":
        yield (("data.root", "data.name"), f'is empty, but data.name = "{recipe.data.name}" needs '
               "a folder; give it by --data-dir")
    if recipe.schedule.warmup_epochs > recipe.schedule.epochs:
        yield (("schedule.warmup_epochs", "schedule.epochs"),
               f"is {recipe.schedule.warmup_epochs}, more than schedule.epochs = "
               f"{recipe.schedule.epochs}")
    if recipe.ema.decay == 0.0 and recipe.ema.warmup:
        yield ("ema.warmup", "ema.decay"), "is true, but ema.decay = 0 keeps no moving average"
    if recipe.ema.decay == 0.0 and recipe.checkpoint.best_by == "ema_top1":
        yield (("checkpoint.best_by", "ema.decay"),
               'is "ema_top1", but ema.decay = 0 keeps no moving average')
    for epoch in recipe.checkpoint.keep_epochs:
        if epoch > total:
            yield (("checkpoint.keep_epochs", "schedule.epochs", "schedule.cooldown_epochs"),
                   f"holds {epoch}, but the run ends after {total} epochs")


# ---------------------------------------------------------------------------------------------
# Options, comparing, writing
# ---------------------------------------------------------------------------------------------


def resolve_options(function: Callable, options: Mapping[str, Any], *, title: str,
                    source: Callable[[str], str], fixed: Mapping[str, Any],
                    given: Iterable[str]) -> dict[str, Any]:
    """All keyword options of `function`: its defaults, then `fixed`, then `options`, type-checked.

    function: a function or class whose keyword-only parameters are the options.
    title: how errors call the table. source: option → where its value was written.
    given: keyword parameters that the caller passes itself; they are no options.
    """
    kinds = typing.get_type_hints(function.__init__ if isinstance(function, type) else function)
    known = {name: parameter for name, parameter in inspect.signature(function).parameters.items()
             if parameter.kind is parameter.KEYWORD_ONLY and name not in set(given)}
    resolved = {name: parameter.default for name, parameter in known.items()
                if parameter.default is not parameter.empty} | dict(fixed)
    for name, value in options.items():
        if name not in known:
            raise RecipeError(f"{source(name)}: {title} has no key '{name}'{nearest(name, known)}")
        try:
            resolved[name] = convert(value, kinds[name])
        except TypeError:
            raise RecipeError(f"{source(name)}: {title} {name} is {shown(value)}, expected "
                              f"{describe(kinds[name])}{nearest_choice(value, kinds[name])}"
                              ) from None
    return resolved


def differences(ours: Recipe, overrides: Sequence[Override]) -> list[str]:
    """What the user wrote that differs from a run's own recipe, one phrase an override."""
    found = []
    for key, value, text in overrides:
        place: Any = ours.as_dict()
        try:
            for part in key.split("."):
                place = place[part]
        except (KeyError, TypeError):
            valid = place if isinstance(place, dict) else SECTIONS
            raise RecipeError(f"{text}: there is no '{part}'{nearest(part, valid)}") from None
        same_size = key == "data.image_size" and place == [value, value]
        if plain(value) != place and not same_size:
            found.append(f"{text} differs from the run's {key} = {to_toml(place)}")
    return found


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as TOML that `load_recipe` reads back to an equal one (its name aside)."""
    lines = []
    for title, body in recipe.as_dict().items():
        if title == "name":
            continue
        lines.append(f"[{title}]")
        lines += [f"{key} = {to_toml(value)}" for key, value in body.items()
                  if not isinstance(value, dict)]
        for key, value in body.items():
            if isinstance(value, dict):
                lines += ["", f"[{title}.{key}]"]
                lines += [f"{name} = {to_toml(item)}" for name, item in value.items()]
        lines.append("")
    return "\n".join(lines)
