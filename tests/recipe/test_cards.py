"""The header comments ("cards") of the shipped recipes: their commands and counts are right."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest
import torch

from vitinit import sweep
from vitinit.init import INITS
from vitinit.models import MODELS, build_model
from vitinit.recipe.files import load_recipe, parse_override
from vitinit.recipe.resolve import fresh_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SHIPPED = sorted(RECIPES.glob("*.toml"))


def commands(path: Path) -> list[list[str]]:
    """Every command of a card as a list of words; continued lines are joined, elisions left out."""
    head = path.read_text(encoding="utf-8").partition("\n[run]")[0]
    text = re.sub(r"\\\n# *", " ", head)
    found = re.findall(r"^# +(?:Command +)?((?:torchrun|python) [^\n]*)", text, flags=re.MULTILINE)
    return [shlex.split(re.sub(r"--\S+ …| …", "", line)) for line in found]


def overrides_of(path: Path) -> list[str]:
    """All arguments of --set anywhere in a card, with numbers in place of "…" and K²."""
    head = path.read_text(encoding="utf-8").partition("\n[run]")[0]
    found = [text.rstrip(",;.:)") for text in re.findall(r"--set ([^\s=]+=\S+)", head)]
    return [text.replace("…", "1").replace("K²", "9") for text in found]


def started(words: list[str], program: str) -> list[str]:
    return words[words.index(program) + 1:]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_command_of_a_card_could_start(path, train_program, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = commands(path)
    assert found and path.stem in found[0]           # its own, before any other
    for words in found:
        if "train.py" in words:
            args = train_program.parse_arguments(started(words, "train.py"))
            recipe = fresh_recipe(args.recipe, recipes=RECIPES, say=print, init=args.init,
                                  seed=args.seed, data_dir=args.data_dir or "data", sets=args.set)
            assert (RECIPES / f"{recipe.name}.toml").is_file()
        else:
            arguments = started(words, "vitinit.sweep")
            elsewhere = [] if "--data-dir" in arguments else ["--data-dir", "data"]
            assert sweep.main([*arguments, *elsewhere, "--dry-run"]) == 0


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_override_in_a_card_names_a_key(path):
    recipe = load_recipe(path)
    family, _ = MODELS[recipe.model.name]
    known = {"model": set(inspect.signature(family).parameters),
             "init": {name for families in INITS.values() if family in families
                      for name in inspect.signature(families[family]).parameters}}
    for text in overrides_of(path):
        change = parse_override(text)
        section, _, option = change.key.partition(".options.")
        if option:
            assert option in known[section], text
        else:
            section, key = change.key.split(".")
            assert hasattr(getattr(recipe, section), key), text


def parameters_of(path: Path) -> int | None:
    """The number of parameters in the first line of a card, if it is stated exactly."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    stated = re.search(r"([\d,]{5,}) parameters", first)
    return stated and int(stated[1].replace(",", ""))


COUNTED = [path for path in SHIPPED if parameters_of(path)]


@pytest.mark.parametrize("path", COUNTED, ids=lambda path: path.stem)
def test_a_model_has_the_parameters_that_its_card_says(path):
    recipe = load_recipe(path)
    with torch.device("meta"):
        model = build_model(recipe.model.name, num_classes=recipe.data.num_classes,
                            image_size=recipe.data.image_size, **recipe.model.options)
    assert sum(p.numel() for p in model.parameters()) == parameters_of(path)


def test_the_cards_of_recipes_for_one_gpu_state_a_count():
    assert {"photos", "cifar10_vit_384_7", "cifar100_vit_384_7", "imagenet_vit_small_90"} <= {
        path.stem for path in COUNTED}
