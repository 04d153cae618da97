"""The header comments ("cards") of the shipped recipes: their commands and counts are right."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from pages import known_keys

from vitinit.models import build_model
from vitinit.programs import sweep
from vitinit.recipe.files import load_recipe, overrides

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SHIPPED = sorted(RECIPES.glob("*.toml"))
# These say so exactly.
COUNTED = {"photos", "cifar10_vit_384_7", "cifar100_vit_384_7", "imagenet_vit_small_90"}


def commands(path: Path) -> list[list[str]]:
    """Every command of a card as a list of words; continued lines are joined, elisions left out."""
    head = path.read_text(encoding="utf-8").partition("\n[run]")[0]
    text = re.sub(r"\\\n# *", " ", head)
    found = re.findall(
        r"^# +(?:Command +)?((?:torchrun|python|vitinit) [^\n]*)", text, flags=re.MULTILINE
    )
    return [shlex.split(re.sub(r"--\S+ …| …", "", line)) for line in found]


def overrides_of(path: Path) -> list[str]:
    """All arguments of --set anywhere in a card, with numbers in place of "…" and K²."""
    head = path.read_text(encoding="utf-8").partition("\n[run]")[0]
    found = [text.rstrip(",;.:)") for text in re.findall(r"--set ([^\s=]+=\S+)", head)]
    return [text.replace("…", "1").replace("K²", "9") for text in found]


def started(words: list[str], program: str) -> list[str]:
    return words[words.index(program) + 1 :]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_card_says_what_is_so(path, train_program, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = commands(path)
    assert found and path.stem in found[0]  # its own, before any other
    for words in found:
        if "train.py" in words:
            args = train_program.parse_arguments(started(words, "train.py"))
            recipe = load_recipe(
                args.recipe,
                overrides(
                    init=args.init, seed=args.seed, data_dir=args.data_dir or "data", sets=args.set
                ),
            )
            assert (RECIPES / f"{recipe.name}.toml").is_file()
        else:
            arguments = started(words, "sweep")
            elsewhere = [] if "--data-dir" in arguments else ["--data-dir", "data"]
            assert sweep.main([*arguments, *elsewhere, "--dry-run"]) == 0
    for text in overrides_of(path):
        assert text.partition("=")[0] in known_keys(), text
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    stated = re.search(r"([\d,]{5,}) parameters", first)
    assert stated or path.stem not in COUNTED
    if stated:
        recipe = load_recipe(path)
        with torch.device("meta"):
            model = build_model(
                recipe.model.name,
                num_classes=recipe.data.num_classes,
                image_size=recipe.data.image_size,
                **recipe.model.options,
            )
        assert sum(p.numel() for p in model.parameters()) == int(stated[1].replace(",", ""))
