"""The header comments ("cards") of the shipped recipes: their commands and counts are right."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from pages import card, known_keys

from vitinit.models import build_model
from vitinit.programs import sweep
from vitinit.recipe.files import load_recipe, overrides

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SHIPPED = sorted(RECIPES.glob("*.toml"))
# These say so exactly.
COUNTED = {"photos", "cifar10_vit_384_7", "cifar100_vit_384_7", "imagenet_vit_small_90"}

# What a card says of the values of another recipe that is not its base: recipe → (the other, keys
# that differ: all that begin so).
AS_IN = {
    "cifar10_10k_rotary": (
        "cifar10_10k_deep_impulse",
        ("init.", "engine.amp", "model.options.pos_embed", "model.options.rope_frequencies"),
    ),
    **{
        f"deit_{size}_distilled": (
            f"deit_{size}",
            ("distill.", "model.name", "model.options.distilled"),
        )
        for size in ("tiny", "small")
    },
    "mixer_b16": ("deit_small", ("model.", "ema.decay", "optim.max_batch_per_process")),
}


def commands(path: Path) -> list[list[str]]:
    """Every command of a card as a list of words; continued lines are joined, elisions left out."""
    text = re.sub(r"\\\n# *", " ", card(path))
    found = re.findall(
        r"^# +(?:Command +)?((?:torchrun|python|vitinit) [^\n]*)", text, flags=re.MULTILINE
    )
    return [shlex.split(re.sub(r"--\S+ …| …", "", line)) for line in found]


def overrides_of(path: Path) -> list[str]:
    """All arguments of --set anywhere in a card, with numbers in place of "…" and K²."""
    found = [text.rstrip(",;.:)") for text in re.findall(r"--set '?([^\s=']+=[^\s']+)", card(path))]
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
    first = card(path).partition("\n")[0]
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


@pytest.mark.parametrize("name", AS_IN)
def test_values_that_a_card_calls_those_of_another_recipe_are(name):
    other, differing = AS_IN[name]
    ours, theirs = load_recipe(name).keys, load_recipe(other).keys
    unlike = {key for key in ours | theirs if ours.get(key) != theirs.get(key)}
    assert {key for key in unlike if not key.startswith(differing)} == set()
    dropped = [keys.get("model.options.drop_path", 0.0) for keys in (ours, theirs)]
    assert dropped[0] == dropped[1] or "drop_path" in card(
        RECIPES / f"{name}.toml"
    )  # it augments, too
