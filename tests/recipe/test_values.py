"""The values of each recipe must not change unnoticed, such as by a change of its base. A digest is
of all values but what the absence of a newer key means, so that a new key changes none.
`python tests/recipe/test_values.py` rewrites values.json, which is right only if the values of the
recipes that it changes were meant to."""

import json
from hashlib import sha256
from pathlib import Path

from vitinit.recipe.absent import MEANT
from vitinit.recipe.files import RECIPES, load_recipe

VALUES = Path(__file__).with_name("values.json")


def digest(name: str) -> str:
    keys = load_recipe(name).keys
    stated = {key: value for key, value in keys.items() if key not in MEANT or MEANT[key] != value}
    return sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()[:16]


def found() -> dict[str, str]:
    return {path.stem: digest(path.stem) for path in sorted(RECIPES.glob("*.toml"))}


def test_the_values_of_each_recipe_are_those_that_were_written_down():
    written = json.loads(VALUES.read_text(encoding="utf-8"))
    assert found() == written, "if it is meant: python tests/recipe/test_values.py writes it"


if __name__ == "__main__":
    VALUES.write_text(json.dumps(found(), indent=4) + "\n", encoding="utf-8")
