"""Recipes as files: read, overridden, checked, written out again.

Every key must be there and no key may be there twice or for nothing, so that `diff` between two
recipes shows every difference between two experiments. Whatever is wrong ends in a `RecipeError`
of one line that names the place, the key, what was expected and the nearest valid key.
Standard library only.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..messages import OneLineError
from .sections import SECTIONS, InitSection, ModelSection, Recipe, contradictions
from .upgrade import VERSION, processes_of, upgraded
from .values import convert, describe, nearest, nearest_choice, plain, shown, to_toml, within


class RecipeError(OneLineError):
    """What is wrong with a recipe or an override, in one line."""


class Override(NamedTuple):
    """One change to a recipe from the command line."""

    key: str                    # section.key
    value: Any
    text: str                   # what the user wrote, for errors to name


FREE_TABLES = ("model.options", "init.options")
# Runs began before these had to fit others; a run that has begun goes on, and is evaluated.
LATER_RULES = ("schedule.min_lr", "schedule.warmup_lr")


def parse_override(text: str) -> Override:
    """`section.key=value` as --set takes it: TOML's notation, bare words being strings."""
    key, equals, written = text.partition("=")
    key, written = key.strip(), written.strip()
    if not equals or "." not in key:
        raise RecipeError(f"--set {text}: expected section.key=value, for example "
                          "--set schedule.epochs=10")
    try:
        table = tomllib.loads(f"value = {written}")
    except (ValueError, RecursionError):             # no TOML, or nested too deeply to be read
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
    """Read the recipe at `path`, apply `overrides` in order, check everything; RecipeError.

    What a run wrote (it bears a version, or lies beside a run.json) may be of earlier days; what a
    person wrote is complete as it stands.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        runs = path.name == "recipe.toml" and os.path.exists(path.with_name("run.json"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:    # TOML's, Unicode's, too long or too deep
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    if "version" in table or runs:
        table = _of_today(table, str(path), processes_of(path.parent))
    return _build(table, path.stem, str(path), overrides)


def from_dict(table: Mapping[str, Any], source: str,
              overrides: Sequence[Override] = (), *, processes: int = 1) -> Recipe:
    """What `Recipe.as_dict` gave, for instance in a checkpoint; `source` is what errors name.

    It may be of any earlier version. processes: that its run had, see `upgraded`.
    """
    if not isinstance(table, Mapping):
        raise RecipeError(f"{source}: its recipe is {shown(table)}, expected a table of sections")
    sections = {name: value for name, value in table.items() if name != "name"}
    return _build(_of_today(sections, source, processes), str(table.get("name", "unnamed")), source,
                  overrides, tolerated=LATER_RULES)


def _of_today(table: Mapping[str, Any], source: str, processes: int) -> dict[str, Any]:
    try:
        return upgraded(table, processes=processes)
    except ValueError as error:
        raise RecipeError(f"{source}: {error}") from None


def with_options(recipe: Recipe, *, model: Mapping[str, Any], init: Mapping[str, Any]) -> Recipe:
    """The recipe with both free tables written out in full, as a run folder records it.

    Lists stay lists, as TOML has them, so that what is written reads back equal.
    """
    def with_table(section: ModelSection | InitSection, options: Mapping[str, Any]) -> ModelSection | InitSection:
        return dataclasses.replace(section, options=types.MappingProxyType(plain(options)))
    return dataclasses.replace(recipe, model=with_table(recipe.model, model),
                               init=with_table(recipe.init, init))


def _build(table: Mapping[str, Any], name: str, source: str, overrides: Sequence[Override], *,
           tolerated: Collection[str] = ()) -> Recipe:
    """tolerated: keys whose contradictions count only where an override names one of their keys."""
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
    for keys, problem in contradictions(recipe):
        if keys[0] in tolerated and not written.keys() & set(keys):
            continue
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


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as TOML that `load_recipe` reads back to an equal one (its name aside)."""
    lines = [f"version = {VERSION}", ""]
    for title, body in recipe.as_dict().items():
        if title in ("name", "version"):
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
