"""setup.cfg: the extras that pages and messages name exist, and a wheel holds all that it needs."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vitinit


@pytest.fixture
def setup(repository) -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(repository / "setup.cfg")
    return setup


def as_in_a_wheel(setup: configparser.ConfigParser, repository: Path) -> dict[str, Path]:
    """The files that a wheel contains, by their place in it, as setuptools collects them. It takes
    the modules of each package that is listed, and its data by pattern; package_dir says where a
    package lies, if not in the folder of its name. (The real wheel takes ten seconds.)"""
    folders = dict(re.findall(r"(\S+) = (\S+)", setup["options"]["package_dir"]))
    found = {}
    for name in setup["options"]["packages"].split():
        inside = name.replace(".", "/")
        outside = repository / folders.get(name, inside)
        patterns = setup["options.package_data"].get(name, "").split(",")
        for pattern in filter(None, ["*.py", *map(str.strip, patterns)]):
            found |= {
                f"{inside}/{path.relative_to(outside).as_posix()}": path
                for path in outside.glob(pattern)
                if path.is_file()
            }
    return found


def test_a_wheel_contains_all_code_recipes_models_and_lessons(setup, repository):
    found = set(as_in_a_wheel(setup, repository).values())
    for pattern in (
        "vitinit/**/*.py",
        "vitinit/**/*.txt",
        "vitinit/**/*.html",
        "vitinit/**/*.css",
        "recipes/*.toml",
        "recipes/*.tar.xz",
        "recipes/trained/*/*",
        "vitinit/programs/lessons/*.md",
        "vitinit/programs/lessons/images/*",
        "tests/data/cifar10/*/*",
    ):
        files = set(repository.glob(pattern))
        assert files and files <= found, pattern
    assert len([path for path in found if path.suffix == ".jpg"]) == 50


def test_an_installed_package_works_without_the_repository(setup, repository, tmp_path):
    """Predictions need the trained model, lesson 3 the photographs. A sweep needs train.py. An init
    for another trainer, which comes first, imports no data pipeline."""
    for name, path in as_in_a_wheel(setup, repository).items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / "site" / name)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    photograph = tmp_path / "site/vitinit/programs/lessons/cifar10/cat/0000.jpg"
    code = f"""
import sys
import torch
from vitinit.init import impulse_
import vitinit
loaded = {{name.partition(".")[0] for name in sys.modules}}
ours = {{name for name in sys.modules if name.startswith("vitinit.")}}
assert not loaded & {{"torchvision", "PIL", "matplotlib"}}, loaded
assert not ours & {{"vitinit.data", "vitinit.runs", "vitinit.train", "vitinit.recipe"}}, ours
assert callable(vitinit.load) and "vitinit.runs.trained" in sys.modules
assert {{*vitinit.__all__}} <= {{*dir(vitinit)}} and not hasattr(vitinit, "laod")
from vitinit.programs import evaluate, predict, sweep
from vitinit.programs.lessons.program import main
from vitinit.recipe.files import RECIPES, load_recipe
assert load_recipe("cifar10_10k_ahead").optim.name == "muon"  # by its base
assert all(str(path).startswith({str(tmp_path)!r}) for path in (vitinit.__file__, RECIPES))
assert predict.main(["cifar10_small", {str(photograph)!r}]) == 0
assert main(["3"]) == 0
small = "data.name=image_folder data.num_classes=0 data.held_out_per_class=1 data.workers=0 " \
    "optim.global_batch=20 model.options.depth=1 schedule.epochs=1 schedule.warmup_epochs=0"
assert sweep.main(["--recipe", "quickstart", "--seeds", "1", "--data-dir",
                   {str(photograph.parents[1])!r}, *(
    word for text in small.split() for word in ("--set", text))]) == 0
assert evaluate.main(["runs/quickstart-default-s1"]) == 0
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=elsewhere,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
    )
    assert result.returncode == 0, result.stderr
    assert "1 of 1 images are classified as their folder says" in result.stdout
    assert "blocks of code print what the page shows" in result.stdout
    assert "\n| default | 1 | " in result.stdout  # compared
    (start,) = json.loads((elsewhere / "runs/quickstart-default-s1/run.json").read_bytes())
    assert start["recipe"] == "quickstart" and start["git_commit"] == "unknown"
    assert (
        start["vitinit"] == vitinit.__version__
    )  # all that names the code of an installed package
    assert start["arguments"]["changes"]["model.options.depth"] == 1


def test_other_files_repeat_the_version_and_the_authors(setup, repository):
    """The version is stated in vitinit/__init__.py alone, the authors in the licence."""
    read = {
        name: (repository / name).read_text("utf-8")
        for name in (
            "CITATION.cff",
            "CHANGELOG.md",
            "LICENSE",
            "vitinit/programs/lessons/README.md",
        )
    }
    assert setup["metadata"]["version"] == "attr: vitinit.__version__"
    stated = {
        name: re.search(pattern, read[name], re.MULTILINE)[1]
        for name, pattern in {
            "CITATION.cff": "^version: (.+)$",
            "CHANGELOG.md": r"^## (\S+)",
            "vitinit/programs/lessons/README.md": r"vitinit-([\d.]+)-py3",
        }.items()
    }
    assert set(stated.values()) == {vitinit.__version__}, stated
    (authors,) = re.findall(r"Copyright \(c\) \d+ (.+)", read["LICENSE"])
    assert f"\nauthors:\n  - name: {authors}\n" in read["CITATION.cff"]


def test_the_workflow_runs_the_versions_that_are_promised(setup, repository):
    """Each Python, and the oldest torch and torchvision; the page has a row for each job."""
    workflow = (repository / ".github" / "workflows" / "tests.yml").read_text("utf-8")
    metadata, options = setup["metadata"], setup["options"]
    pythons = re.findall(r"Python :: (3\.\d+)", metadata["classifiers"])
    assert re.findall(r'"(3\.\d+)"', re.search(r"python: \[(.+)\]", workflow)[1]) == pythons
    assert options["python_requires"] == f">={pythons[0]}"
    for name, oldest in re.findall(r"(torch\w*)>=(\S+)", options["install_requires"]):
        assert f"'{name}=={oldest}.*'" in workflow
    page = (repository / "CONTRIBUTING.md").read_text("utf-8")
    jobs = re.findall(r"^  (\w+):\n    name:", workflow, re.MULTILINE)
    assert len(jobs) == 6
    rows = re.findall(r"^\| `(\w+)`", page, re.MULTILINE)
    assert [name for name in dict.fromkeys(rows) if name in jobs] == jobs


def test_every_extra_that_is_named_exists(setup, repository):
    extras = set(setup["options.extras_require"])
    texts = [repository / name for name in ("README.md", "train.py", "eval.py", "setup.cfg")]
    for pattern in (
        "vitinit/**/*.py",
        "vitinit/**/*.md",
        "recipes/*.toml",
        "recipes/*.md",
        "tests/**/*.py",
    ):
        texts += repository.glob(pattern)
    named = {}
    for path in texts:
        # .[test] in a checkout, vitinit[test] for an installed package; commas separate several.
        text = path.read_text("utf-8")
        for words in re.findall(r"(?:install[^\n]*?[ '\"]\.|vitinit)\[([\w, -]+)\]", text):
            for word in re.split(r",\s*", words):
                named.setdefault(word, path.name)
    assert extras >= {"figures", "safetensors", "datasets", "test"}
    assert {name: path for name, path in named.items() if name not in extras} == {}
    assert set(named) >= {"test", "datasets", "figures", "safetensors"}
