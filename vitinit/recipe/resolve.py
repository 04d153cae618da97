"""Make the recipe of a run: read the file, apply the command line, and write every option out.

    file  →  --init, --seed, --data-dir, --set  →  typed sections  →  cross-checks  →  Recipe

The two free tables, `[model.options]` and `[init.options]`, hold only options that differ from
their documented defaults. `resolve_options` adds the defaults, and checks the options against the
signature of the function that takes them.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..init import GIVEN, INITS, init_function
from ..models import MODELS
from .files import Override, RecipeError, find_recipe, load_recipe, parse_override, with_options
from .sections import Recipe
from .values import convert, describe, nearest, nearest_choice, plain, shown, to_toml


def overrides(*, init: str | None = None, seed: int | None = None, data_dir: str | None = None,
              sets: Sequence[str]) -> list[Override]:
    """All changes that the command line makes to a recipe, in the order in which they apply."""
    flags = {"data.root": ("--data-dir", data_dir), "init.name": ("--init", init),
             "run.seed": ("--seed", seed)}
    return [Override(key, value, f"{flag} {value}") for key, (flag, value) in flags.items()
            if value is not None] + [parse_override(text) for text in sets]


def resolve_options(function: Callable, options: Mapping[str, Any], *, title: str,
                    source: Callable[[str], str], fixed: Mapping[str, Any],
                    given: Iterable[str]) -> dict[str, Any]:
    """All options of `function` with their values, type-checked.

    A value is taken from `options`, else from `fixed`, else from the defaults of the function.

    function: a function or class whose keyword-only parameters are the options.
    title: how error messages call the table of options.
    source: called with an option, returns where its value was written, for error messages.
    given: keyword parameters that the caller passes itself, so that they are not options.
    Raises RecipeError for an unknown option and for a value of the wrong type.
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


def resolve_recipe(path: Path, changes: list[Override]) -> Recipe:
    """The recipe at `path` with `changes` applied and every option of model and init written out.

    Raises RecipeError for every kind of error, including unknown models, inits and options.
    """
    recipe = load_recipe(path, changes)

    def source(key: str) -> str:
        """Where the value of `key`, or of a table that contains it, was written last."""
        return next((change.text for change in reversed(changes)
                     if f"{key}.".startswith(f"{change.key}.")), str(path))

    def resolved(section: str, function: Callable, fixed: Mapping[str, Any],
                 given: tuple[str, ...]) -> dict[str, Any]:
        chosen = getattr(recipe, section)
        return resolve_options(function, chosen.options, fixed=fixed, given=given,
                               title=f"[{section}.options] of {chosen.name}",
                               source=lambda name: source(f"{section}.options.{name}"))

    for section, table in (("model", MODELS), ("init", INITS)):
        name = getattr(recipe, section).name
        if name not in table:
            raise RecipeError(f"{source(f'{section}.name')}: {section}.name is '{name}'"
                              f"{nearest(name, table)}")
    family, sizes = MODELS[recipe.model.name]
    try:
        init = init_function(recipe.init.name, family)
    except ValueError as error:
        raise RecipeError(f"{source('init.name')}: {error}") from None
    return with_options(recipe, model=resolved("model", family, sizes, ("num_classes", "image_size")),
                        init=resolved("init", init, {}, GIVEN))


def with_defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    """Add to a run's recipe the options of model and init that it lacks, at their defaults.

    So an option that was introduced after the run counts as left at its default. Unknown options,
    models and inits stay as they are, and so do tables that are not those of a recipe.
    """
    table = {title: dict(body) if isinstance(body, Mapping) else body
             for title, body in table.items()}
    model, init = table.get("model"), table.get("init")
    name = model.get("name") if isinstance(model, dict) else None
    family, sizes = MODELS[name] if isinstance(name, str) and name in MODELS else (None, {})
    if family is None or not isinstance(init, dict):
        return table
    try:
        functions = [(model, family, sizes), (init, init_function(init.get("name"), family), {})]
    except ValueError:
        functions = [(model, family, sizes)]
    for section, function, fixed in functions:
        defaults = {name: parameter.default
                    for name, parameter in inspect.signature(function).parameters.items()
                    if parameter.kind is parameter.KEYWORD_ONLY and name not in GIVEN
                    and parameter.default is not parameter.empty}
        section["options"] = plain(defaults | fixed | dict(section.get("options", {})))
    return table


def fresh_recipe(name: str | None, *, recipes: Path, say: Callable[[str], None],
                 init: str | None = None, seed: int | None = None, data_dir: str | None = None,
                 sets: Sequence[str] = ()) -> Recipe:
    """The recipe of a new run: the file, the changes of the command line, and all options resolved.

    name: that of a recipe in the folder `recipes`, or the path of a .toml file.
    init, seed, data_dir, sets: the values of --init, --seed, --data-dir and of each --set. If
    `init` is given, only those of the recipe's init options are used that it has, such as `base`;
    `say` is called with one line about the others. Raises RecipeError.
    """
    if name is None:
        raise RecipeError("--recipe is missing; for example --recipe quickstart")
    path = find_recipe(name, recipes)
    changes = overrides(init=init, seed=seed, data_dir=data_dir, sets=sets)
    if init in INITS:
        from_file = [change for change in changes if not change.key.startswith("init.options")]
        recipe = load_recipe(path, from_file)
        options, (family, _) = recipe.init.options, MODELS.get(recipe.model.name, (None, {}))
        function = INITS[init].get(family)      # None is an error, which resolve_recipe raises
        known = inspect.signature(function).parameters if function else options
        set_aside = {key: value for key, value in options.items() if key not in known}
        if set_aside:
            usable = {key: value for key, value in options.items() if key in known}
            changes.insert(0, Override("init.options", usable, str(path)))   # errors name the file
            say(f"--init {init} has none of these options of the recipe, which are set aside: "
                f"{to_toml(set_aside)}")
    return resolve_recipe(path, changes)


def with_num_classes(recipe: Recipe, count: int) -> Recipe:
    """The recipe with `count` classes, where it may say 0, for as many as the data set has."""
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, num_classes=count))


def moved(recipe: Recipe, data_dir: str | None) -> Recipe:
    """The recipe with `data_dir` as the folder of its data set; None leaves it unchanged."""
    if data_dir is None:
        return recipe
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, root=data_dir))
