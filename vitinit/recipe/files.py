"""Recipes: read a file or a checkpoint's table, apply the command line, check, and write out.

    file  →  --init, --seed, --data-dir, --set  →  sections and options  →  contradictions  →  Recipe

A recipe must state every key, and may not have unknown keys or a key twice. So `diff` between two
recipes shows every difference between two experiments. Only the tables `[model.options]` and
`[init.options]` may leave out what has its documented default: the keyword arguments of the
function that builds the model or does the init, which are added. And a recipe without `[distill]`
trains without a teacher. Every error is a `RecipeError` of
one line that names the file or option, the key, what was expected, and the nearest valid key.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..init import GIVEN, INITS, init_function
from ..messages import OneLineError
from ..models import MODELS
from ..train.distill import NO_TEACHER
from .sections import SECTIONS, VERSION, InitSection, Recipe, contradictions
from .values import convert, describe, nearest, plain, shown, to_toml

# In the repository the recipes lie beside the package; an installed package contains them.
PACKAGE = Path(__file__).resolve().parents[1]
RECIPES = (PACKAGE if (PACKAGE / "recipes").is_dir() else PACKAGE.parent) / "recipes"

SIZES = ("num_classes", "image_size")       # keyword arguments of a model that are no options


class RecipeError(OneLineError):
    """Something is wrong with a recipe or an override; the message is one line."""


class Override(NamedTuple):
    """One change to a recipe from the command line."""

    key: str                    # section.key
    value: Any
    text: str                   # what the user wrote, quoted by error messages


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
    return Override(key, table["value"], f"--set {text}")


def overrides(*, init: str | None = None, seed: int | None = None, data_dir: str | None = None,
              sets: Sequence[str]) -> list[Override]:
    """All changes that the command line makes to a recipe, in the order in which they apply."""
    flags = {"data.root": ("--data-dir", data_dir), "init.name": ("--init", init),
             "run.seed": ("--seed", seed)}
    return [Override(key, value, f"{flag} {value}") for key, (flag, value) in flags.items()
            if value is not None] + [parse_override(text) for text in sets]


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


def fresh_recipe(name: str | None, *, recipes: Path, say: Callable[[str], None],
                 init: str | None = None, seed: int | None = None, data_dir: str | None = None,
                 sets: Sequence[str] = ()) -> Recipe:
    """The recipe of a new run: the file with the changes of the command line.

    name: that of a recipe in the folder `recipes`, or the path of a .toml file.
    init, seed, data_dir, sets: the values of --init, --seed, --data-dir and of each --set. If
    `init` is given, only those of the recipe's init options are used that it has, such as `base`;
    `say` is called with one line about the others. Raises RecipeError.
    """
    if name is None:
        raise RecipeError("--recipe is missing; for example --recipe quickstart")
    changes = overrides(init=init, seed=seed, data_dir=data_dir, sets=sets)
    return load_recipe(find_recipe(name, recipes), changes,
                       set_aside=None if init is None else say)


def load_recipe(path: Path, changes: Sequence[Override] = (), *,
                set_aside: Callable[[str], None] | None = None) -> Recipe:
    """Read the recipe at `path`, apply `changes` in order, and check everything.

    set_aside: called with a line about the file's init options that its init lacks, which are then
    not used; None: they are an error. Raises RecipeError.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:    # no TOML or UTF-8, too long a number, too deep
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    version = table.pop("version", VERSION)          # a person need not write it
    return _recipe(table, path.stem, version, str(path), changes, set_aside)


def from_dict(table: Mapping[str, Any], source: str, changes: Sequence[Override] = ()) -> Recipe:
    """The recipe of which `Recipe.as_dict` made `table`, for instance in a checkpoint.

    source: how error messages call it. changes: applied in order. Raises RecipeError.
    """
    if not isinstance(table, Mapping):
        raise RecipeError(f"{source}: its recipe is {shown(table)}, expected a table of sections")
    sections = {key: body for key, body in table.items() if key not in ("name", "version")}
    return _recipe(sections, str(table.get("name")), table.get("version"), source, changes, fresh=False)


def _recipe(table: Mapping[str, Any], name: str, version: Any, source: str,
            changes: Sequence[Override], set_aside: Callable[[str], None] | None = None, *,
            fresh: bool = True) -> Recipe:
    """The recipe of a table of sections; see `load_recipe`. source: how errors call the table.

    fresh: False for a run that exists. Its init has been applied, so its name and options, unless a
    change is of them, are a record, which may be of an init that is no longer here.
    """
    def where(key: str) -> str:
        """Where the value of `key`, or of a table that contains it, was written last."""
        return next((change.text for change in reversed(changes)
                     if f"{key}.".startswith(f"{change.key}.")), source)

    if version != VERSION:
        raise RecipeError(f"{source}: a recipe of version {shown(version)}, and this code reads "
                          f"{VERSION}; commit bb39c50 reads those of versions 1 to 11")
    try:
        tables = plain(table)
    except RecursionError:
        raise RecipeError(f"{source}: its tables are nested too deeply") from None
    tables.setdefault("distill", dict(NO_TEACHER))
    for title, body in tables.items():
        if title not in SECTIONS:
            what = "section" if isinstance(body, dict) else "key outside of a section:"
            raise RecipeError(f"{source}: unknown {what} '{title}'{nearest(title, SECTIONS)}")
        if not isinstance(body, dict):
            raise RecipeError(f"{source}: '{title}' is {shown(body)}, expected a section [{title}]")
    for title in SECTIONS:
        if title not in tables:
            raise RecipeError(f"{source}: section [{title}] is missing")
    for title in ("model", "init"):                  # an empty table may be left out
        tables[title].setdefault("options", {})
    for change in changes:
        _apply(change, tables)

    sections = {title: _section(section, title, tables[title], where)
                for title, section in SECTIONS.items()}
    model, init = sections["model"], sections["init"]
    applies_init = fresh or any(change.key.startswith("init.") for change in changes)
    for title, known in (("model", MODELS), *([("init", INITS)] if applies_init else [])):
        chosen = sections[title].name
        if chosen not in known:
            raise RecipeError(f"{where(f'{title}.name')}: {title}.name is '{chosen}'"
                              f"{nearest(chosen, known)}")
    family, sizes = MODELS[model.name]
    sections["model"] = dataclasses.replace(model, options=_options(
        family, sizes | dict(model.options), f"model.options of {model.name}", where, given=SIZES))
    if applies_init:
        sections["init"] = dataclasses.replace(init, options=_init_options(
            init, family, source, where, set_aside))
    recipe = Recipe(name=name, **sections)
    for keys, problem in contradictions(recipe):
        place = next((where(key) for key in keys if where(key) != source), source)
        raise RecipeError(f"{place}: {keys[0]} {problem}")
    return recipe


def _init_options(init: InitSection, family: type, source: str, where: Callable[[str], str],
                  set_aside: Callable[[str], None] | None) -> Mapping[str, Any]:
    """All options of the init for models of this family, checked; see `_recipe`."""
    try:
        function = init_function(init.name, family)
    except ValueError as error:
        raise RecipeError(f"{where('init.name')}: {error}") from None
    known, options = inspect.signature(function).parameters, dict(init.options)
    lacking = {key: options.pop(key) for key in init.options if set_aside is not None
               and key not in known and where(f"init.options.{key}") == source}
    if lacking:
        set_aside(f"--init {init.name} has none of these options of the recipe, which are set "
                  f"aside: {to_toml(lacking)}")
    return _options(function, options, f"init.options of {init.name}", where, given=GIVEN)


def _apply(change: Override, tables: dict[str, dict[str, Any]]) -> None:
    """Write one change of the command line into the tables of a recipe."""
    title, *parents, last = change.key.split(".")
    if title not in SECTIONS:
        raise RecipeError(f"{change.text}: there is no section '{title}'{nearest(title, SECTIONS)}")
    body = tables[title]
    if parents and (title not in ("model", "init") or parents != ["options"]):
        if title in ("model", "init") and len(parents) == 1 and parents[0] not in body:
            raise RecipeError(f"{change.text}: [{title}] has no table '{parents[0]}'"
                              f"{nearest(parents[0], ['options'])}")
        raise RecipeError(f"{change.text}: '{change.key}' is nested too deeply; expected "
                          "section.key=value")
    if parents:
        body = body["options"]
        if not isinstance(body, dict):
            raise RecipeError(f"{change.text}: {title}.options is {shown(body)}, expected a table")
    body[last] = change.value


def _section(section: type, title: str, body: Mapping[str, Any], where: Callable[[str], str]) -> Any:
    """Check the values of one section against the dataclass `section` and make an instance of it."""
    kinds = typing.get_type_hints(section)
    bounds = {field.name: field.metadata for field in dataclasses.fields(section)}
    values = _values(body, kinds, title, where, bounds=bounds)
    for name in kinds:
        if name not in values:
            raise RecipeError(f"{where(f'{title}.{name}')}: [{title}] lacks the key '{name}' "
                              f"({describe(kinds[name], bounds[name])})")
    return section(**values)


def _options(function: Callable, options: Mapping[str, Any], table: str,
             where: Callable[[str], str], *, given: Sequence[str]) -> Mapping[str, Any]:
    """All options of a model or an init: those that are stated, checked, and the defaults.

    function: its keyword-only parameters are the options, except those that it is `given`. table:
    see `_values`. Tuples become lists, as in TOML, so that the recipe equals what is read back.
    """
    hints = typing.get_type_hints(function.__init__ if isinstance(function, type) else function)
    defaults = {name: parameter.default
                for name, parameter in inspect.signature(function).parameters.items()
                if parameter.kind is parameter.KEYWORD_ONLY and name not in given}
    values = _values(options, {name: hints[name] for name in defaults}, table, where)
    return types.MappingProxyType(plain(defaults | values))


def _values(body: Mapping[str, Any], kinds: Mapping[str, Any], table: str,
            where: Callable[[str], str], *, bounds: Mapping[str, Mapping] | None = None
            ) -> dict[str, Any]:
    """The values of a table, converted to their kinds.

    table: "schedule" or "init.options of impulse", for error messages.
    """
    values, (title, *of_which) = {}, table.split(" ", 1)
    for key in body:
        if key not in kinds:
            raise RecipeError(f"{where(f'{title}.{key}')}: {' '.join([f'[{title}]', *of_which])} "
                              f"has no key '{key}'{nearest(key, kinds)}")
    for key, value in body.items():
        try:
            values[key] = convert(value, kinds[key], bounds[key] if bounds else {})
        except TypeError as error:
            raise RecipeError(f"{where(f'{title}.{key}')}: {title}.{key} is {error}") from None
    return values


# ---------------------------------------------------------------------------------------------
# A recipe with other values, and writing
# ---------------------------------------------------------------------------------------------


def with_data(recipe: Recipe, **values: Any) -> Recipe:
    """The recipe with other values of [data], such as the number of classes of the data set."""
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **values))


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
