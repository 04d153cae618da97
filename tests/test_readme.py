"""The README's first run is made in full; what pages show of code and output is so."""

import json
import re
import shlex
import subprocess
import sys
import types
from ast import literal_eval
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from called import start_in
from forks import Fork
from pages import PAGES, README, REPOSITORY
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from vitinit.data.datasets import DATA_SETS, open_split
from vitinit.models import MODELS, build_model
from vitinit.programs import export, features, predict, recipe
from vitinit.recipe.files import load_recipe, overrides
from vitinit.runs.model import build
from vitinit.tasks import TASKS


def form(line: str) -> str:
    """A line without its numbers, and without what a machine computes in."""
    line = re.sub(r"\d[\d,.]*( of [\d,]+)?", "#", line.partition(", in ")[0])
    return line.replace("epochs", "epoch")


def test_the_quickstart_trains_and_its_run_evaluates(
    tmp_path, monkeypatch, train_program, eval_program, capsys
):
    monkeypatch.chdir(tmp_path)
    section = README.section("Three minutes")
    commands = section.commands()
    train = next(words for words in commands if "train.py" in words)
    assert (
        train_program.main(
            [*train[2:], "--set", "schedule.epochs=1", "--set", "data.images_per_class=11"]
        )
        == 0
    )
    shown = [line for line in section.blocks("")[0].splitlines() if not re.search("…|%\\|", line)]
    assert len(shown) == 7
    assert {*map(form, shown)} <= {*map(form, capsys.readouterr().out.splitlines())}
    last = json.loads((tmp_path / "runs/quickstart-impulse-s0/metrics.jsonl").read_text())
    evaluate = next(words for words in commands if "eval.py" in words)
    assert eval_program.main([*evaluate[2:], "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["model"]["top1"] == last["val_top1"] and found["model"]["images"] == 211
    assert found["ema"]["top1"] == last["ema_top1"]


def test_the_model_in_the_box_predicts_what_the_readme_shows(monkeypatch, capsys):
    """Every line that is shown is printed; percentages may differ by rounding on other machines."""
    monkeypatch.chdir(REPOSITORY)
    section = README.section("Use it")
    command = next(words for words in section.commands() if words[:2] == ["vitinit", "predict"])
    assert predict.main([*command[2 : command.index("--sheet")]]) == 0
    printed = capsys.readouterr().out.splitlines()
    number = re.compile(r"\d+\.\d+")
    shown = [line for line in section.blocks("")[0].splitlines() if line != "…"]
    assert shown.pop() == f"wrote {command[command.index('--sheet') + 1]}"
    assert len(shown) == 3
    for line in shown:
        (found,) = [other for other in printed if number.sub("#", other) == number.sub("#", line)]
        assert [float(value) for value in number.findall(found)] == pytest.approx(
            [float(value) for value in number.findall(line)], abs=0.2
        )
    (code,) = section.blocks("python")
    *before, last = code.strip().splitlines()
    call, _, expected = last.partition("#")
    names: dict = {}
    exec("\n".join(before), names)
    for (found, share), (name, rounded) in zip(
        eval(call, names), literal_eval(expected.strip()), strict=True
    ):
        assert found == name and share == pytest.approx(rounded, abs=0.02)


def test_what_was_trained_is_used_and_exported_as_shown(tmp_path, monkeypatch):
    """Run the code blocks of "Use what was trained" on another run, with a stand-in for timm."""
    page = next(page for page in PAGES if page.name == "vitinit/runs/README.md")
    section = page.section("Use what was trained")
    load, folder, timms, program, *_ = section.blocks("python")
    (tmp_path / "runs").mkdir()
    run = REPOSITORY / "tests" / "runs" / "data" / "version_12"
    (tmp_path / "runs" / "quickstart-impulse-s0").symlink_to(run)
    with_class_token = load_recipe(
        run / "recipe.toml", overrides(sets=["model.options.pool=class"])
    )
    other = tmp_path / "runs" / "deit_small-impulse-s0"
    other.mkdir()
    torch.save(
        {
            "model": build(with_class_token).state_dict(),
            "classes": ["a", "b", "c"],
            "recipe": with_class_token.as_dict(),
        },
        other / "last.pt",
    )
    monkeypatch.chdir(tmp_path)
    image = Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 10, 3))
    classes = [f"photographs/{split}/{name}/a.png" for split in ("train", "val") for name in "ab"]
    for path in ("photo.png", "photographs/a.png", *classes):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    exec(load, {})
    started = []
    for words in section.commands():
        started.append(words[1])
        if "onnx" in words and find_spec("onnxruntime") is None:
            continue  # an extra that tests do not need
        main = {"predict": predict, "export": export, "features": features}[words[1]].main
        assert main(words[2:]) == 0
    assert set(started) == {"predict", "export", "features"}
    names: dict = {}
    exec(program.replace("32, 32", "8, 8"), names)
    assert names["logits"].shape == (5, 3) and names["classes"] == ["blue", "green", "red"]
    opened = []
    monkeypatch.setitem(
        sys.modules,
        "timm",
        types.SimpleNamespace(
            create_model=lambda name, pretrained: opened.append(name.removeprefix("local-dir:"))
        ),
    )
    monkeypatch.setitem(
        sys.modules,
        "transformers",
        types.SimpleNamespace(
            AutoModelForImageClassification=types.SimpleNamespace(from_pretrained=opened.append)
        ),
    )
    exec(folder, {})
    assert all((tmp_path / name / "config.json").exists() for name in opened) and len(opened) == 2
    built = types.SimpleNamespace(load_state_dict=lambda weights: names.update(weights=weights))
    monkeypatch.setitem(
        sys.modules,
        "timm.models.vision_transformer",
        types.SimpleNamespace(VisionTransformer=lambda **sizes: built),
    )
    exec(timms, {})
    assert "blocks.0.attn.qkv.weight" in names["weights"]


def test_the_models_of_the_readme_have_the_sizes_that_it_states():
    """Multiplications are counted by PyTorch, on tensors without values."""
    row = re.compile(r"^\| [^|]+ \| `(\w+)`[^|]*\| ([\d.]+ M) \| ([\d.]+ G) \|", re.MULTILINE)
    sizes = {name: shown for name, *shown in row.findall(README.section("The models").prose)}
    assert len(sizes) == 7
    for name, shown in sizes.items():
        recipe = load_recipe(name).model
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            model = build_model(recipe.name, num_classes=1000, image_size=224, **recipe.options)
            model(torch.empty(1, 3, 224, 224))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        flops = counter.get_total_flops() / 2  # which counts additions, too
        assert [f"{parameters / 1e6:.1f} M", f"{flops / 1e9:.1f} G"] == shown, name


@pytest.mark.parametrize(
    "name, result, shape",
    [
        ("vitinit/models/README.md", "logits", (2, 10)),
        ("vitinit/init/README.md", "attention", (2, 3, 65, 65)),
    ],
)
def test_the_code_of_a_page_gives_the_shape_that_it_states(name, result, shape):
    code, *_ = next(page for page in PAGES if page.name == name).blocks("python")
    assert str(shape) in code
    names: dict = {}
    exec(code, names)
    assert names[result].shape == shape


def test_the_logits_of_the_note_are_what_its_code_finds(capsys):
    note = next(page for page in PAGES if page.name == "recipes/exact_convolution.md")
    exec(note.blocks("python")[0], {})
    found, shown = capsys.readouterr().out, note.blocks("text")[0]
    for line, expected in zip(found.splitlines(), shown.splitlines(), strict=True):
        numbers = [re.findall(r"\d+\.\d", text) for text in (line, expected)]
        assert [*map(float, numbers[0])] == pytest.approx([*map(float, numbers[1])], abs=0.2)


def test_a_recipe_is_added_as_the_page_shows(tmp_path, monkeypatch, train_program, capsys):
    monkeypatch.chdir(tmp_path)
    page = next(page for page in PAGES if page.name == "recipes/README.md")
    write, differ, start = page.section("How to add a recipe").blocks("sh")[0].splitlines()
    subprocess.run(write, shell=True, check=True)
    assert differ.startswith("vitinit recipe ") and recipe.main(differ.split()[2:]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows == ["| model.options.depth | 4 | 8 |"]
    assert start.startswith("python train.py ") and train_program.main(start.split()[2:]) == 0
    printed = capsys.readouterr().out
    assert "nothing was written" in printed
    assert "recipe  quickstart_deep" in printed and "8 blocks" in printed


HOW_TO_ADD = {
    page: next(each for each in PAGES if each.name == f"vitinit/{page}/README.md").section(title)
    for page, title in (
        ("init", "How to add an init"),
        ("models", "How to add a model"),
        ("data", "How to add a data set"),
        ("tasks", "How to add a task"),
        ("train", "How to add a loss"),
    )
}


def put_photographs(folder: Path) -> None:
    """The photographs, of five by seven pixels, of the page on data."""
    for split in ("train", "val"):
        (folder / split).mkdir(parents=True)
        for name in ("cat_1", "cat_02", "dog_001"):
            Image.new("RGB", (5, 7)).save(folder / split / f"{name}.jpg")


@pytest.mark.parametrize(
    "page, printed",
    [
        ("init", "init    zero_branches"),
        ("models", "model   vit_tiny_rotary: "),
        ("data", "data    prefixed: 3 images, 2 classes"),
        ("tasks", "recipe  quickstart, seed 0"),
    ],
)
def test_a_part_is_added_by_import_as_its_page_shows(page, printed, tmp_path):
    """In a process of its own, in which nothing of the page is imported yet."""
    section = HOW_TO_ADD[page]
    (tmp_path / "mine.py").write_text(section.blocks("python")[0])
    put_photographs(tmp_path / "photos")
    (command,) = section.blocks("sh")
    python, script, *words = shlex.split(command.replace("\\\n", ""))
    assert (python, script) == ("python", "train.py")
    few = "--dry-run --set optim.global_batch=2 --set mix.group=2".split()
    call = partial(start_in, tmp_path, "train", [*words, *few])
    ended = Fork(call, tmp_path / "fork", "forkserver").ended()
    assert ended.result == 0 and printed in ended.out


def test_a_model_a_data_set_a_loss_and_a_task_are_added_as_the_pages_show(tmp_path, monkeypatch):
    """Each page's code is run; what it adds is then used by its name, or trains."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitinit.models.MODELS", dict(MODELS))
    monkeypatch.setattr("vitinit.data.datasets.DATA_SETS", dict(DATA_SETS))
    monkeypatch.setitem(TASKS, "binary", None)  # until the page's row, which then goes away
    put_photographs(tmp_path / "photos")
    names: dict = {}
    small = {'{"schedule.epochs": 3': '{"data.images_per_class": 6, "schedule.epochs": 1'}
    # The rows are made here, and not in a module of the reader's.
    rows = {"import mine, ": "import ", 'imports=["mine.py"], ': ""}
    losses = []
    for page, changes in (("models", {}), ("data", {}), ("train", small), ("tasks", small)):
        code = "\n".join(HOW_TO_ADD[page].blocks("python"))
        for old, new in changes.items():
            assert old in code
            code = code.replace(old, new)
        for old, new in rows.items():
            code = code.replace(old, new)
        exec(code, names)
        if changes:
            losses.append(names["run"].rows[0]["train_loss"])
    assert names["model"].rotary and names["model"].blocks[0].mlp.fc1.out_features == 2 * 512
    source = open_split("prefixed", "photos", "train", 0)
    assert source.classes == ["cat", "dog"] and source.labels.tolist() == [0, 0, 1]
    assert source.image(2).shape == (3, 7, 5)
    assert 0.2 < losses[0] < 1.0  # ten decisions at a probability of about 1/2
    assert losses[0] == losses[1]
