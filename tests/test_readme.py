"""The README's commands: the first run is made in full, of the others arguments are checked."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitinit import export, predict, sweep
from vitinit.figures.__main__ import parse_arguments as parse_figure
from vitinit.recipe.files import find_recipe

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """The words of every command in a bash block; continued lines are joined."""
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if shlex.split(line, comments=True)]


def started(program: str) -> list[list[str]]:
    """The arguments of every README line that starts `program`."""
    return [words[words.index(program) + 1:] for words in commands() if program in words]


def run(words: list[str], cwd: Path) -> subprocess.CompletedProcess:
    """A README command from another folder than the repository's, with this Python's torchrun."""
    repository = Path(__file__).resolve().parent.parent
    scripts = Path(sys.executable).parent
    words = [str(repository / word) if word in ("train.py", "eval.py") else word for word in words]
    # --standalone: torchrun's usual port may be taken by another run on this machine.
    words[:1] = {"torchrun": [str(scripts / "torchrun"), "--standalone"],
                 "python": [sys.executable]}[words[0]]
    # As many threads as for a user. On a busy machine threads that spin while they wait would cost minutes.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def test_the_quickstart_trains_and_its_run_evaluates(tmp_path):
    train = next(words for words in commands() if "quickstart" in words)
    result = run([*train, "--set", "schedule.epochs=1"], tmp_path)
    assert result.returncode == 0, result.stderr
    last = json.loads((tmp_path / "runs/quickstart-impulse-s0/metrics.jsonl").read_text())
    evaluate = next(words for words in commands() if "eval.py" in words and
                    "runs/quickstart-impulse-s0" in words)
    result = run(evaluate, tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["model"]["top1"] == last["val_top1"] and found["model"]["images"] == 1000
    assert found["ema"]["top1"] == last["ema_top1"]


@pytest.mark.parametrize("program", ["train", "eval"])
def test_every_command_names_arguments_and_recipes_that_exist(program, repository, request):
    parse = request.getfixturevalue(f"{program}_program").parse_arguments
    found = started(f"{program}.py")
    assert found
    for arguments in found:
        args = parse(arguments)
        if args.recipe:
            find_recipe(args.recipe, repository / "recipes")


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_what_was_trained_is_used_and_exported_as_shown(tmp_path, monkeypatch):
    """Run the code blocks of "Use what was trained" on another run, with a stand-in for timm."""
    section = README.partition("## Use what was trained\n")[2].partition("\n## ")[0]
    blocks = [block for block in python_blocks() if block in section]
    load, program, timms = blocks
    run = Path(__file__).parent / "runs" / "data" / "55cb85f"
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart-impulse-s0").symlink_to(run)
    (tmp_path / "photographs").mkdir()
    (tmp_path / "tests").symlink_to(Path(__file__).parent)
    monkeypatch.chdir(tmp_path)
    image = Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 10, 3))
    for path in ("photo.png", "photographs/a.png"):
        image.save(path)
    exec(load, {})
    for words in commands():
        if "vitinit.predict" in words or "vitinit.export" in words:
            main = {"vitinit.predict": predict, "vitinit.export": export}[words[2]].main
            assert main(words[3:]) == 0
    names: dict = {}
    exec(program.replace("32, 32", "8, 8"), names)
    assert names["logits"].shape == (5, 3)
    built = types.SimpleNamespace(load_state_dict=lambda weights: names.update(weights=weights))
    monkeypatch.setitem(sys.modules, "timm.models.vision_transformer",
                        types.SimpleNamespace(VisionTransformer=lambda **sizes: built))
    exec(timms, {})
    assert "blocks.0.attn.qkv.weight" in names["weights"]


def test_every_figure_names_arguments_and_recipes_that_exist(repository):
    found = started("vitinit.figures")
    assert {words[0] for words in found} >= {"maps", "mass", "attention", "spectrum"}
    for arguments in found:
        for name in parse_figure(arguments).recipe or []:
            find_recipe(name, repository / "recipes")


def test_every_sweep_is_one_that_could_start(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")   # the number of a job in a SLURM array
    found = started("vitinit.sweep")
    assert found
    for arguments in found:
        assert sweep.main([*map(os.path.expandvars, arguments), "--dry-run"]) == 0


def test_the_file_tree_names_every_file(repository):
    tree = README[README.index("## Where things are"):]
    files = [path for pattern in ("*.py", "vitinit/**/*.py") for path in repository.glob(pattern)]
    for path in files:
        if path.name != "__init__.py":
            assert path.name in tree, path
