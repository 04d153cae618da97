"""Recipes: read a file or a checkpoint's table, apply the command line, check, and write out.

    file → --init, --seed, --data-dir, --set → sections and options → contradictions → Recipe

A recipe must state every key, so `diff` between two recipes shows every difference between two
experiments. Only the tables `[model.options]` and `[init.options]` may leave out what has its
documented default: the keyword arguments of the function that builds the model or does the init,
which are added. Keys that came later have the value that was meant before (`SINCE_12`), and a
recipe without `[distill]` trains without a teacher. A mistake is a
`RecipeError` of one line that names the file or option, the key, what was expected, and the nearest
valid key.
"""

from __future__ import annotations

import inspect
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..init import GIVEN, INITS, init_function
from ..messages import OneLineError
from ..models import MODELS, model_class
from ..train.optim import NO_TEACHER
from .sections import SECTIONS, VERSION, Recipe, contradictions
from .values import ReadOnly, convert, describe, nearest, plain, show, to_toml

# In the repository the recipes lie beside the package; an installed package contains them.
PACKAGE = Path(__file__).resolve().parents[1]
RECIPES = (PACKAGE if (PACKAGE / "recipes").is_dir() else PACKAGE.parent) / "recipes"

# Keyword arguments of models and inits that are no options.
NO_OPTIONS = ("num_classes", "image_size", *GIVEN)

# Keys that version 12 did not have at first, with the values that it meant. A recipe may leave them
# out, so that all recipes and runs of version 12 are read.
SINCE_12 = {"init": {"checkpoint_head": "keep"}, "schedule": {"cosine_after_warmup": False}}


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
    key, equals, written = map(str.strip, text.partition("="))
    if not equals or "." not in key:
        raise RecipeError(f"--set {text}: expected section.key=value, for example "
                          "--set schedule.epochs=10")
    try:
        return Override(key, tomllib.loads(f"value = {written}")["value"], f"--set {text}")
    except ValueError:                               # not TOML
        return Override(key, written, f"--set {text}")


def overrides(*, init: str | None = None, seed: int | None = None, data_dir: str | None = None,
              sets: Sequence[str] | Mapping[str, Any] = ()) -> list[Override]:
    """All changes that a command line, or a caller in Python, makes to a recipe, in order.

    init, seed, data_dir, sets: the values of --init, --seed, --data-dir and of each --set, in
    place of which there may be a table of "section.key" → value.
    """
    flags = (("data.root", "--data-dir", data_dir), ("init.name", "--init", init),
             ("run.seed", "--seed", seed))
    named = ((Override(key, plain(value), f"{key}={value!r}") for key, value in sets.items())
             if isinstance(sets, Mapping) else map(parse_override, sets))
    return [*(Override(key, value, f"{flag} {value}") for key, flag, value in flags
              if value is not None), *named]


def fresh_recipe(name: str | None, **flags: Any) -> Recipe:
    """The recipe of a new run: the file with the changes of the command line.

    name: as `load_recipe` takes it. flags: as `overrides` takes them. Raises RecipeError.
    """
    return load_recipe(name, overrides(**flags))


def load_recipe(name: str | Path | None, changes: Sequence[Override] = ()) -> Recipe:
    """Read a recipe, apply `changes` in order, and check everything.

    name: that of a recipe in recipes/, or the path of a .toml file. If a change names another init,
    it keeps only those of the file's init options that it has, such as `base`. Raises RecipeError.
    """
    if name is None:
        raise RecipeError("--recipe is missing; for example --recipe quickstart")
    path = Path(name) if str(name).endswith(".toml") else RECIPES / f"{name}.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "" if path == Path(name) else nearest(
            str(name), [file.stem for file in RECIPES.glob("*.toml")])
        raise RecipeError(f"recipe {name}: no such file{hint}") from None
    except ValueError as error:                      # neither TOML nor UTF-8
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    # A person need not write the version.
    return _recipe({"version": VERSION} | table, path.stem, str(path), changes)


def from_dict(table: Mapping[str, Any], source: str, changes: Sequence[Override] = ()) -> Recipe:
    """The recipe of which `Recipe.as_dict` made `table`, for instance in a checkpoint.

    The init of a run that exists has been applied. So its name and options are a record, which may
    be of an init that is no longer here, and are not checked.

    source: how error messages call it. changes: applied in order. Raises RecipeError.
    """
    sections = plain(table)
    return _recipe(sections, str(sections.pop("name", "")), source, changes, checks_init=False)


def _recipe(tables: dict[str, Any], name: str, source: str, changes: Sequence[Override], *,
            checks_init: bool = True) -> Recipe:
    """The recipe of a table of sections; see `load_recipe`. source: how errors call the table."""
    def where(*keys: str) -> str:
        """Where one of these keys, or a table that contains it, was written last."""
        return next((change.text for key in keys for change in reversed(changes)
                     if f"{key}.".startswith(f"{change.key}.")), source)

    def refuse(problem: str, *keys: str) -> NoReturn:
        """Raise RecipeError; keys: whose values are the problem, that of most weight first."""
        raise RecipeError(f"{where(*keys)}: {problem}") from None

    tables = _completed(tables, refuse)
    own_init = tables["init"].get("name")
    for change in changes:
        *parents, last = change.key.split(".")
        if not parents:
            refuse(f"'{last}' is no section.key, such as eval.crop_pct", change.key)
        place = tables
        for parent in parents:
            if not isinstance(place.get(parent), dict):
                inner = [key for key, table in place.items() if isinstance(table, dict)]
                refuse(f"there is no table '{parent}'{nearest(parent, inner)}", change.key)
            place = place[parent]
        place[last] = change.value

    sections = {title: _checked(tables[title], title, kind, refuse)
                for title, kind in SECTIONS.items()}
    model, init = sections["model"], sections["init"]
    family, sizes = MODELS[model["name"]]
    takers = {"model": (model_class(family).__init__, sizes | dict(model["options"]))}
    if checks_init:
        if init["name"] not in INITS:
            refuse(f"init.name is '{init['name']}'{nearest(init['name'], INITS)}", "init.name")
        try:
            function = init_function(init["name"], family)
        except ValueError as error:
            refuse(str(error), "init.name")
        has, renamed = inspect.signature(function).parameters, init["name"] != own_init
        takers["init"] = function, {
            key: value for key, value in init["options"].items()
            if key in has or not renamed or where(f"init.options.{key}") != source}
    for title, (function, options) in takers.items():
        values = _checked(options, f"{title}.options", function, refuse,
                          f" of {sections[title]['name']}")
        sections[title]["options"] = ReadOnly(plain(values))
    recipe = Recipe(name=name, **{title: kind(**sections[title])
                                  for title, kind in SECTIONS.items()})
    for keys, expected in contradictions(recipe):
        first, *others = (f"{key} = {to_toml(recipe.keys[key])}" for key in keys)
        refuse(f"{first}{' with ' * bool(others)}{', '.join(others)}; expected {expected}", *keys)
    return recipe


def _completed(tables: dict[str, Any], refuse: Callable[..., NoReturn]) -> dict[str, Any]:
    """The tables of all sections, with those that a file may leave out."""
    if (version := tables.pop("version", None)) != VERSION:
        refuse(f"a recipe of version {show(version)}, and this code reads {VERSION}; "
               "commit bb39c50 reads those of versions 1 to 11")
    for title, body in tables.items():
        if title not in SECTIONS or not isinstance(body, dict):
            refuse(f"'{title}' is no section of a recipe{nearest(title, SECTIONS)}")
    tables = {title: {} for title in SECTIONS} | {"distill": dict(NO_TEACHER)} | tables
    for title in ("model", "init"):
        tables[title].setdefault("options", {})
    for title, values in SINCE_12.items():
        tables[title] = values | tables[title]
    # The recipes of runs state a key that chose weight selection, which is no more.
    if tables["init"].get("checkpoint_fit") == "exact":
        del tables["init"]["checkpoint_fit"]
    return tables


def _checked(body: Mapping[str, Any], title: str, takes: Callable, refuse: Callable[..., NoReturn],
             of: str = "") -> dict[str, Any]:
    """The values of a table, converted to their kinds, after the defaults of those that it lacks.

    takes: the dataclass of a section, or a function whose keyword-only parameters are the keys but
        for NO_OPTIONS. title, of: "init.options" and " of impulse", for error messages.
    """
    fields, hints = getattr(takes, "__dataclass_fields__", {}), typing.get_type_hints(takes)
    kinds, values = {}, {}                           # key → what `convert` takes; key → value
    for name, parameter in inspect.signature(takes).parameters.items():
        if fields or parameter.kind is parameter.KEYWORD_ONLY and name not in NO_OPTIONS:
            kinds[name] = hints[name], fields[name].metadata if fields else {}
            if parameter.default is not parameter.empty:
                values[name] = parameter.default
    for key, value in body.items():
        if key not in kinds:
            refuse(f"[{title}]{of} has no key '{key}'{nearest(key, kinds)}", f"{title}.{key}")
        try:
            values[key] = convert(value, *kinds[key])
        except TypeError as error:
            refuse(f"{title}.{key} is {error}", f"{title}.{key}")
    for key, kind in kinds.items():
        if key not in values:
            refuse(f"[{title}]{of} lacks the key '{key}' ({describe(*kind)})", f"{title}.{key}")
    return values
