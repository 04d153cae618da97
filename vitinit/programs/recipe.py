"""Print a recipe with where each value is from, or what several recipes differ in.

    vitinit recipe cifar10_10k_ahead --set optim.global_batch=32
    vitinit recipe cifar10_10k_rotary cifar10_10k_ahead
    vitinit recipe quickstart runs/quickstart-impulse-s0

One recipe is printed as a whole, in TOML, and can be loaded. Behind each value stands the --set or
the file that says so, also by leaving it out; or "default", for options of models, inits and tasks.
"""

from argparse import Namespace
from pathlib import Path

from ..base.messages import one_line
from ..base.values import Table, to_toml
from ..recipe.files import RECIPES, Origin, load_recipe, overrides, read_tables
from .shared.command_line import Parser, add_set, main_of
from .shared.results import table


def show(args: Namespace) -> None:
    """Print one recipe, or a table of the keys in which several differ, with their values."""
    changes = overrides(sets=args.set)
    paths = [path_of(name) for name in args.recipe]
    every = [load_recipe(path, changes).keys for path in paths]
    if len(every) == 1:
        _, files = read_tables(paths[0])
        print_whole(every[0], Origin(files, changes))
        return
    rows = []
    for key in dict.fromkeys(key for keys in every for key in keys):
        values = [to_toml(keys[key]) if key in keys else "–" for keys in every]
        if len({*values}) > 1:
            rows.append([key, *values])
    print(table(["key", *args.recipe], rows))


def path_of(name: str) -> str | Path:
    """What `load_recipe` takes: of a run's folder the recipe in it, else the name itself."""
    inside = Path(name) / "recipe.toml"
    return inside if inside.exists() else name


def print_whole(keys: Table, origin: Origin) -> None:
    """Print a recipe's keys as TOML, with where each is from in a comment."""
    before = ""
    for place, value in keys.items():
        title, _, key = place.rpartition(".")
        if title != before:
            print(f"\n[{title}]")
            before = title
        source = one_line(origin.of(place) or "default").removeprefix(f"{RECIPES}/")
        print(f"{f'{key} = {to_toml(value)}':39} # {source}")


def parse_arguments(arguments: list[str]) -> Namespace:
    parser = Parser(prog="vitinit recipe", description=__doc__)
    parser.add_argument("recipe", nargs="+", help="name in recipes/, .toml file, or run's folder")
    add_set(parser, "override any key of each recipe; may be repeated")
    return parser.parse_args(arguments)


main = main_of("vitinit recipe", parse_arguments, show)
