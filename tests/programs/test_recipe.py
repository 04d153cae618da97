"""What `vitinit recipe` prints: a whole recipe with where its values are from, and differences."""

from pathlib import Path

import pytest

from vitinit.programs import recipe
from vitinit.recipe.files import load_recipe, overrides

OVER = """
base = "sub/whole.toml"

[model]
name = "mixer_s16"  # its options are not those of the base

[model.options]
patch_size = 8

[optim]
eps = 1e-7
"""


@pytest.fixture
def over(tmp_path, monkeypatch) -> str:
    """A recipe beside its base, which is quickstart."""
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("sub/whole.toml").write_text(load_recipe("quickstart").as_toml())
    Path("over.toml").write_text(OVER)
    return "over.toml"


def printed(capsys, *words: str) -> str:
    assert recipe.main([*words]) == 0
    return capsys.readouterr().out


def test_a_whole_recipe_says_where_each_value_is_from_and_can_be_loaded(over, capsys):
    sets = ["schedule.epochs=3", 'data.root="a\nb"']
    text = printed(capsys, over, *(word for written in sets for word in ("--set", written)))
    Path("over_whole.toml").write_text(text)
    changes = overrides(sets=sets)
    assert load_recipe("over_whole.toml").keys == load_recipe(over, changes).keys
    sources = {}
    for line in filter(None, text.splitlines()):
        stated, _, source = line.partition(" # ")
        if line.startswith("["):
            title = line.strip("[]")
        else:
            sources[f"{title}.{stated.partition(' = ')[0]}"] = source
    assert sources.keys() == load_recipe(over, changes).keys.keys()
    assert sources.pop("schedule.epochs") == "--set schedule.epochs=3"
    assert sources.pop("data.root") == r'--set data.root="a\nb"'
    for key in ("model.name", "model.options.patch_size", "optim.eps"):
        assert sources.pop(key) == "over.toml"
    for key, source in sources.items():
        assert source == ("default" if key.startswith("model.options.") else "sub/whole.toml"), key


def test_a_value_of_a_shipped_recipe_is_of_a_file_without_its_folder(capsys):
    lines = printed(capsys, "cifar10_10k_ahead").splitlines()
    assert f"{'global_batch = 64':39} # cifar10_10k_ahead.toml" in lines
    assert f"{'eps = 1e-08':39} # cifar10_10k_rotary.toml" in lines


def test_recipes_and_runs_differ_in_the_keys_of_which_one_has_another_value(over, capsys):
    run = Path("runs/a")
    run.mkdir(parents=True)
    changes = overrides(sets=["optim.eps=1e-7", "data.root=images"])
    (run / "recipe.toml").write_text(load_recipe("sub/whole.toml", changes).as_toml())
    words = "sub/whole.toml", "runs/a", "quickstart"
    assert printed(capsys, *words) == (
        "| key | sub/whole.toml | runs/a | quickstart |\n| --- | ---: | ---: | ---: |\n"
        '| data.root | "" | "images" | "" |\n| optim.eps | 1e-08 | 1e-07 | 1e-08 |\n'
    )
    rows = printed(capsys, "runs/a", over, "--set", "data.root=b").splitlines()[2:]
    keys = {row.split("|")[1].strip() for row in rows}
    assert {key for key in keys if not key.startswith("model.options.")} == {"model.name"}
    assert "| model.options.num_heads | 3 | – |" in rows
