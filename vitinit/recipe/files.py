"""Recipe files: reading, overriding, checking and writing them.

A recipe must state every key, and may not have unknown keys or a key twice. So `diff` between two
recipes shows every difference between two experiments. Every error is a `RecipeError` of one line
that names the file or option, the key, what was expected, and the nearest valid key. This module
uses the standard library only.
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
from .sections import (FREE_TABLES, SECTIONS, InitSection, ModelSection, Recipe, contradictions)
from .upgrade import VERSION, processes_of, upgraded
from .values import convert, describe, nearest, nearest_choice, plain, shown, to_toml, within


# In the repository the recipes lie beside the package; an installed package contains them.
PACKAGE = Path(__file__).resolve().parents[1]
RECIPES = (PACKAGE if (PACKAGE / "recipes").is_dir() else PACKAGE.parent) / "recipes"


class RecipeError(OneLineError):
    """Something is wrong with a recipe or an override; the message is one line."""


class Override(NamedTuple):
    """One change to a recipe from the command line."""

    key: str                    # section.key
    value: Any
    text: str                   # what the user wrote, quoted by error messages


# Keys that may contradict others in the recipe of a checkpoint, because its run may be older than
# the rule that forbids this. Such a run can still be resumed and evaluated.
LATER_RULES = ("schedule.min_lr", "schedule.warmup_lr")


def parse_override(text: str) -> Override:
    """Parse `section.key=value`, the argument of --set. The value is in TOML's notation.

    A value that is not valid TOML, such as a word without quotes, is a string. Raises RecipeError.
    """
    key, equals, written = text.partition("=")
    key, written = key.strip(), written.strip()
    if not equals or "." not in key:
        raise RecipeError(f"--set {text}: expected section.key=value, for example "
                          "--set schedule.epochs=10")
    try:
        table = tomllib.loads(f"value = {written}")
    except (ValueError, RecursionError):             # not TOML, or nested too deeply to be read
        return Override(key, written, f"--set {text}")
    if len(table) > 1:
        raise RecipeError(f"--set {text}: expected one value, and one --set for each key")
    value = table["value"]
    return Override(key, value, f"--set {text}")


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def find_recipe(name: str, folder: Path) -> Path:
    """The path of a recipe, given by name (looked up in `folder`) or by path (if it ends in .toml).

    Raises RecipeError if there is no such file.
    """
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    if not os.path.isfile(path):                     # unlike Path.is_file, it never raises
        if name.endswith(".toml"):
            raise RecipeError(f"recipe {name}: no such file")
        shipped = [recipe.stem for recipe in folder.glob("*.toml")]
        raise RecipeError(f"recipe {name}: no such recipe in {folder}{nearest(name, shipped)}")
    return path


def load_recipe(path: Path, overrides: Sequence[Override] = ()) -> Recipe:
    """Read the recipe at `path`, apply `overrides` in order, and check everything.

    A recipe that a run has written (it has a version, or there is a run.json beside it) may be of
    an earlier version and is upgraded. A recipe that a person has written must have all keys.
    Raises RecipeError.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        is_of_run = path.name == "recipe.toml" and os.path.exists(path.with_name("run.json"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:    # no TOML or UTF-8, too long a number, too deep
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    if "version" in table or is_of_run:
        table = _upgraded(table, str(path), processes_of(path.parent))
    return _build(table, path.stem, str(path), overrides)


def from_dict(table: Mapping[str, Any], source: str,
              overrides: Sequence[Override] = (), *, processes: int = 1) -> Recipe:
    """The recipe of which `Recipe.as_dict` made `table`, for instance in a checkpoint.

    It may be of any earlier version. source: how error messages call it. overrides: applied in
    order. processes: how many its run had, see `upgraded`. Raises RecipeError.
    """
    if not isinstance(table, Mapping):
        raise RecipeError(f"{source}: its recipe is {shown(table)}, expected a table of sections")
    sections = {name: value for name, value in table.items() if name != "name"}
    return _build(_upgraded(sections, source, processes), str(table.get("name", "unnamed")), source,
                  overrides, tolerated=LATER_RULES)


def _upgraded(table: Mapping[str, Any], source: str, processes: int) -> dict[str, Any]:
    """`upgraded`, with errors as RecipeError that names `source`."""
    try:
        table = upgraded(table, processes=processes)
    except ValueError as error:
        raise RecipeError(f"{source}: {error}") from None
    gone = [f"optim.{key}.{part}" for key in ("lr_scales", "hold_epochs")
            for part in table["optim"].get(key, {})]
    if gone:
        raise RecipeError(f"{source}: trains with {', '.join(gone)}, which commit 09cb91f is the last "
                          "to know")
    return table


def with_options(recipe: Recipe, *, model: Mapping[str, Any], init: Mapping[str, Any]) -> Recipe:
    """The recipe with all options of model and init written out, as a run's folder records it.

    Tuples become lists, as in TOML, so that the recipe equals what is read back from its file.
    """
    def with_table(section: ModelSection | InitSection, options: Mapping[str, Any]
                   ) -> ModelSection | InitSection:
        return dataclasses.replace(section, options=types.MappingProxyType(plain(options)))
    return dataclasses.replace(recipe, model=with_table(recipe.model, model),
                               init=with_table(recipe.init, init))


def _build(table: Mapping[str, Any], name: str, source: str, overrides: Sequence[Override], *,
           tolerated: Collection[str] = ()) -> Recipe:
    """Apply the overrides to a table of sections, check it, and make a Recipe of it.

    tolerated: keys that may contradict others, unless an override names a key of the contradiction.
    """
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
    for inner in FREE_TABLES:                        # an empty table may be left out
        title, _, key = inner.partition(".")
        table[title].setdefault(key, {})

    written = _apply(table, overrides)
    recipe = Recipe(name=name, **{title: _section(section, title, table[title], source, written)
                                  for title, section in SECTIONS.items()})
    for keys, problem in contradictions(recipe):
        if keys[0] in tolerated and not written.keys() & set(keys):
            continue
        where = next((written[key] for key in keys if key in written), source)
        raise RecipeError(f"{where}: {keys[0]} {problem}")
    return recipe


def _apply(table: dict[str, Any], overrides: Sequence[Override]) -> dict[str, str]:
    """Write the overrides into `table`; returns dotted key → what the user wrote."""
    written: dict[str, str] = {}
    for key, value, text in overrides:
        *parents, last = key.split(".")
        if parents[0] not in SECTIONS:
            raise RecipeError(f"{text}: there is no section '{parents[0]}'"
                              f"{nearest(parents[0], SECTIONS)}")
        tables = [name.partition(".")[2] for name in FREE_TABLES
                  if name.startswith(f"{parents[0]}.")]
        if len(parents) == 2 and tables and parents[1] not in table[parents[0]]:
            raise RecipeError(f"{text}: [{parents[0]}] has no table '{parents[1]}'"
                              f"{nearest(parents[1], tables)}")
        if ".".join(parents) not in (*SECTIONS, *FREE_TABLES):
            raise RecipeError(f"{text}: '{key}' is nested too deeply; expected section.key=value")
        body = table
        for parent in parents:
            body = body[parent]
            if not isinstance(body, dict):
                raise RecipeError(f"{text}: {'.'.join(parents)} is {shown(body)}, expected a "
                                  "table")
        body[last] = value
        written[key] = text
    return written


def _section(section: type, title: str, body: dict[str, Any], source: str,
             written: Mapping[str, str]) -> Any:
    """Check the values of one section against the dataclass `section` and make an instance of it.

    written: key → what the user wrote on the command line, which errors then name instead of
    source.
    """
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
    """The recipe as TOML, which `load_recipe` reads back as an equal recipe (except for its name)."""
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
