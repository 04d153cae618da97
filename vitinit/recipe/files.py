"""Recipes: read a file or a checkpoint's table, apply the command line, check, and write out.

    file, over its base → --init, --seed, --data-dir, --set → sections and options → contradictions
    → Recipe

A file states every key, but for options that have a default and what absent.py lists; or it names
a `base`, a file that does, and states what it changes.
"""

import os
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..base.files import parse_toml, read_bytes
from ..base.messages import OneLineError, in_brief, nearest, ran_out_of_memory, unknown
from ..base.table import find
from ..base.values import ReadOnly, Table, accepted_values, convert, flat, plain, show, to_toml
from ..data.datasets import DATA_SETS
from ..init import GIVEN, init_function, stated_family
from ..models import MODELS, model_class
from ..tasks import TASKS
from .absent import KEYS_LEFT_OUT, SECTIONS_LEFT_OUT
from .sections import SECTIONS, VERSION, VERSION_WITH_BASE, Recipe, contradictions

# In the repository the recipes lie beside the package; an installed package contains them.
PACKAGE = Path(__file__).resolve().parents[1]
RECIPES = (PACKAGE if (PACKAGE / "recipes").is_dir() else PACKAGE.parent) / "recipes"

# What a section chooses by its key `name`, which section, and from which table.
TABLES = (("data set", "data", DATA_SETS), ("model", "model", MODELS), ("task", "task", TASKS))
NO_OPTIONS = (
    "num_classes",
    "image_size",
    "in_channels",
    *GIVEN,
)  # keyword arguments of models and inits


class RecipeError(OneLineError):
    """Something is wrong with a recipe or a change; the message is one line."""


class Override(NamedTuple):
    """One change to a recipe from the command line."""

    key: str  # section.key
    value: Any
    text: str  # what the user wrote, quoted by error messages


def parse_override(text: str) -> Override:
    """Parse `section.key=value`, of --set: TOML, or else a string, as whatever is written for a key
    that takes strings. Raises RecipeError.
    """
    key, equals, written = map(str.strip, text.partition("="))
    if not equals or "." not in key:
        raise RecipeError(
            f"--set {text}: expected section.key=value, for example --set schedule.epochs=10"
        )
    value = _parse_value(written)
    title, _, name = key.partition(".")
    if not isinstance(value, str) and title in SECTIONS:
        if typing.get_type_hints(SECTIONS[title]).get(name) is str:
            value = written  # such as 2024 for data.root
    return Override(key, value, f"--set {text}")


def _parse_value(written: str) -> Any:
    """The value of a text in TOML, where .5 and 1. may stand for 0.5 and 1.0, or the text itself."""
    for text in (written, re.sub(r"(?<!\w)(?=\.\d)|(?<=\d\.)(?!\w)", "0", written)):
        with suppress(ValueError):
            table = parse_toml(f"value = {text}".encode())
            if len(table) == 1:  # and no other key in further lines
                return table["value"]
    return written


def overrides(
    *,
    init: str | None = None,
    seed: int | None = None,
    data_dir: str | None = None,
    sets: Sequence[str] | Mapping[str, Any] = (),
) -> list[Override]:
    """The changes by these flags, in order; sets: of --set, or a table of "section.key" → value."""
    changes = []
    for key, flag, value in (
        ("data.root", "--data-dir", data_dir),
        ("init.name", "--init", init),
        ("run.seed", "--seed", seed),
    ):
        if value is not None:
            changes.append(Override(key, plain(value), f"{flag} {value}"))
    if isinstance(sets, Mapping):
        for key, value in sets.items():
            changes.append(Override(key, plain(value), f"{key}={value!r}"))
    else:
        texts = [sets] if isinstance(sets, str) else sets
        changes += map(parse_override, texts)
    return changes


class Origin(NamedTuple):
    """Where the values of a recipe are from, and what error messages blame."""

    # The keys of each file, the first one's own before those that it takes over from its base.
    files: Mapping[str, Table]
    changes: Sequence[Override]  # by the command line

    def of(self, *keys: str) -> str | None:
        """Where one of these keys, or a table that contains it, was written last; None: nowhere."""
        for key in keys:
            for change in reversed(self.changes):
                if f"{key}.".startswith(f"{change.key}."):
                    return change.text
        for file, stated in self.files.items():
            if any(key in stated for key in keys):
                return file
        return None

    def refuse(self, problem: object, *keys: str) -> NoReturn:
        """Raise RecipeError; keys: whose values are the problem, that of most weight first. What is
        nowhere is missing in the file that is to state all.
        """
        source = self.of(*keys) or list(self.files)[-1]
        raise RecipeError(f"{source}: {problem}") from None


def load_recipe(name: str | os.PathLike | None, changes: Sequence[Override] = ()) -> Recipe:
    """Read a recipe, the name of one in recipes/ or a .toml file, with `changes`; RecipeError.

    An init that a change names keeps those of the file's options that it has, such as `base`.
    """
    tables, files = read_tables(name)
    return _recipe(tables, Path(next(iter(files))).stem, Origin(files, changes))


def read_tables(
    name: str | os.PathLike | None, above: Path | None = None
) -> tuple[Table, dict[str, Table]]:
    """All sections of a recipe, those of a file over those of its base, not checked yet, and the
    `files` of their `Origin`. above: the file of which this is the base. Raises RecipeError.
    """
    if name is None:
        raise RecipeError("--recipe is missing; for example --recipe quickstart")
    is_path = str(name).endswith(".toml")
    folder = above.parent if above else Path()
    path = folder / name if is_path else RECIPES / f"{name}.toml"
    if not os.path.exists(path):  # also of a name that no file can have
        what = f"{above}: base" if above else "recipe"
        hint = "" if is_path else nearest(str(name), [file.stem for file in RECIPES.glob("*.toml")])
        raise RecipeError(f"{what} {name}: no such file{hint}")
    text = read_bytes(path)
    try:
        table = parse_toml(text)
    except ValueError as error:  # neither TOML nor UTF-8
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    base = table.pop("base", None)
    version = VERSION if base is None else VERSION_WITH_BASE
    # A person need not write the version.
    own = _sections({"version": version} | table, str(path), version)
    files = {str(path): flat(own)}
    if base is None:
        return own, files
    if above:
        raise RecipeError(
            f"{above}: base {name} has a base itself, {base}; expected a complete recipe"
        )
    complete, bases = read_tables(str(base), above=path)
    tables = _over(complete, own)
    return tables, files | dict.fromkeys(bases, flat(tables))


def _over(base: Table, own: Table) -> Table:
    """The tables of a base with what a file states instead, key by key. Options are those of a
    model, an init or a task: if the file names another one, none of the base's are left.
    """
    tables = dict(base)
    if "options" in base and own.get("name", base.get("name")) != base.get("name"):
        tables["options"] = {}
    for key, value in own.items():
        if isinstance(value, dict) and isinstance(tables.get(key), dict):
            value = _over(tables[key], value)
        tables[key] = value
    return tables


def from_dict(table: Table, source: str, changes: Sequence[Override] = ()) -> Recipe:
    """The recipe of which `Recipe.as_dict` made `table`, for instance in a checkpoint.

    Its init has been applied, and its data set read: what it says of them is a record, perhaps of
    some that are not here, and is not checked. source: how error messages call the table. Raises
    RecipeError.
    """
    sections = plain(table)
    name = str(sections.pop("name", ""))
    origin = Origin({source: {}}, changes)
    return _recipe(_sections(sections, source), name, origin, of_record=True)


def _recipe(tables: Table, name: str, origin: Origin, *, of_record: bool = False) -> Recipe:
    """The recipe of the tables of all sections, with the origin's changes; see `load_recipe`, and
    `from_dict` of a record.
    """
    init_of_file = tables["init"].get("name")
    for change in origin.changes:
        _apply(change, tables, origin)
    sections = {}
    for title, section in SECTIONS.items():
        kinds = typing.get_type_hints(section, include_extras=True)
        sections[title] = _checked(tables[title], title, origin, kinds)

    for kind, title, rows in TABLES:
        part = sections[title]["name"]
        if part not in rows and not (of_record and title == "data"):
            origin.refuse(unknown(kind, part, rows), f"{title}.name")
    model, task, init = sections["model"], sections["task"], sections["init"]
    family, sizes = MODELS[model["name"]]
    model["options"] = sizes | model["options"]
    _resolve_options("model", model, model_class(family).__init__, origin)
    _resolve_options("task", task, find(TASKS[task["name"]]).takes, origin)
    if not of_record:
        try:
            function = init_function(init["name"], stated_family(model["name"], model["options"]))
        except ValueError as error:
            origin.refuse(error, "init.name")
        if init["name"] != init_of_file:  # of the file's options it keeps what it has
            init["options"] = {
                key: value
                for key, value in init["options"].items()
                if key in signature(function).parameters
                or origin.of(f"init.options.{key}") not in origin.files
            }
        _resolve_options("init", init, function, origin)

    built = {title: section(**sections[title]) for title, section in SECTIONS.items()}
    recipe = Recipe(name=name, **built)
    for keys, expected in contradictions(recipe):
        stated, *others = (f"{key} = {to_toml(recipe.keys[key])}" for key in keys)
        if others:
            stated += f" with {', '.join(others)}"
        origin.refuse(f"{stated}; expected {expected}", *keys)
    return recipe


def _apply(change: Override, tables: Table, origin: Origin) -> None:
    """Set the value of a change, in the table that its key names."""
    *parents, last = change.key.split(".")
    if not parents:
        origin.refuse(f"'{last}' is no section.key, such as eval.crop_pct", last)
    table = tables
    for parent in parents:
        if not isinstance(table.get(parent), dict):
            inner = [key for key, part in table.items() if isinstance(part, dict)]
            origin.refuse(f"there is no table '{parent}'{nearest(parent, inner)}", change.key)
        table = table[parent]
    table[last] = change.value


def _sections(tables: Table, source: str, version: int = VERSION) -> Table:
    """The sections of a table with its version, also those that a complete one may leave out."""
    found = tables.pop("version", None)
    if found != version:
        kind = " with a base" if version == VERSION_WITH_BASE else ""
        raise RecipeError(
            f"{source}: a recipe of version {show(found)}{kind}, and this code reads {VERSION}, or "
            f"{VERSION_WITH_BASE} with a base; commit bb39c50 reads those of versions 1 to 11"
        )
    for title, body in tables.items():
        if title not in SECTIONS:
            hint = nearest(title, SECTIONS)
            raise RecipeError(f"{source}: '{title}' is no section of a recipe{hint}")
        if not isinstance(body, dict):
            raise RecipeError(f"{source}: {title} is {show(body)}, expected a table, [{title}]")
    if version == VERSION_WITH_BASE:
        return tables
    tables = plain(SECTIONS_LEFT_OUT) | tables
    if missing := SECTIONS.keys() - tables:
        raise RecipeError(
            f"{source}: there is no section [{min(missing)}]; expected all sections, or "
            'base = "NAME" above the first'
        )
    for title in ("model", "init", "task"):
        tables[title].setdefault("options", {})
    for place, value in KEYS_LEFT_OUT.items():
        title, _, key = place.partition(".")
        tables[title].setdefault(key, value)
    # The recipes of runs state a key that chose weight selection, which is no more.
    if tables["init"].get("checkpoint_fit") == "exact":
        del tables["init"]["checkpoint_fit"]
    return tables


def _resolve_options(
    title: str, section: Table, function: Callable[..., Any], origin: Origin
) -> None:
    """Check the options of a model, init or task: keyword-only parameters of `function`."""
    hints = typing.get_type_hints(function, include_extras=True)
    kinds, defaults = {}, {}
    for name, parameter in signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and name not in NO_OPTIONS:
            kinds[name] = hints[name]
            if parameter.default is not parameter.empty:
                defaults[name] = parameter.default
    of = f" of {section['name']}"
    options = defaults | section["options"]
    section["options"] = ReadOnly(plain(_checked(options, f"{title}.options", origin, kinds, of)))


def _checked(body: Table, title: str, origin: Origin, kinds: Table, of: str = "") -> Table:
    """The values of a table as they are used; title, of: for errors, such as " of impulse"."""
    values = {}
    for key, value in body.items():
        place = f"{title}.{key}"
        if key not in kinds:
            origin.refuse(f"[{title}]{of} has no key '{key}'{nearest(key, kinds)}", place)
        try:
            values[key] = convert(value, kinds[key])
        except TypeError as error:
            origin.refuse(f"{place} is {error}", place)
    for key, kind in kinds.items():
        if key not in values:
            origin.refuse(
                f"[{title}]{of} lacks the key '{key}' ({accepted_values(kind)})", f"{title}.{key}"
            )
    return values


@contextmanager
def building(source: str, section: str) -> Iterator[None]:
    """A context (also a decorator) around code that builds something from one section's values. It
    turns ValueError and too little memory into RecipeError; anything else is a defect and passes.

    source: where the values are from, such as "recipe quickstart". section: such as "model".
    """
    try:
        yield
    except OneLineError:
        raise
    except (ValueError, RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError: Runtime
        if ran_out_of_memory(error):
            problem = (
                f"[{section}] takes more memory than there is "
                f"({in_brief(error)}); expected smaller values"
            )
        elif isinstance(error, ValueError):
            problem = str(error)
        else:
            raise
        raise RecipeError(f"{source}: {problem}") from error
