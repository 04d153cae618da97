"""Parts of one's own, by --import and in Python: found by all, on record, never imported by a file."""

import hashlib
import json
import math
import os
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

import called
import numpy as np
import pytest
import torch
from forks import Ended, Fork
from PIL import Image
from refused import refused

import vitinit
from vitinit.__main__ import PROGRAMS
from vitinit.base.messages import OneLineError
from vitinit.init import INITS
from vitinit.models import FAMILIES, model_class
from vitinit.models.vit import VisionTransformer
from vitinit.programs import sweep
from vitinit.programs.figures.program import parse_arguments as figure_arguments
from vitinit.programs.shared.records import without_paths
from vitinit.run import Run
from vitinit.runs.folder import Lines, RunFolder
from vitinit.runs.imports import import_part, import_parts
from vitinit.runs.watching import WATCHERS, Watchers
from vitinit.train.distributed import Processes

OWN = Path(__file__).resolve().parents[1] / "own"
MODEL, INIT, IMAGES, TASK = (
    str(OWN / f"my_{part}.py") for part in ("model", "init", "images", "task")
)
CHANGES = {
    "model.name": "parallel_tiny",
    "model.options": {},
    "init.name": "zero_branches",
    "data.name": "stripes",
    "data.root": "",  # as they are drawn
    "data.num_classes": 2,
    "data.on_device_gib": 0.0,
    "data.workers": 1,
    "task.name": "focal",
    "schedule.epochs": 1,
    "optim.global_batch": 20,
    "optim.max_batch_per_process": 20,
    "mix.group": 20,
    "engine.amp": "off",
}


@pytest.fixture
def imports(monkeypatch, tmp_path):
    """What is imported of the test's folder is forgotten after it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or os.devnull).is_relative_to(tmp_path):
            del sys.modules[name]


def started(folder: Path, program: str, *words: object) -> Ended:
    """A program in a process that has imported no part of one's own yet."""
    return Fork(partial(called.start, program, words), folder, "forkserver").ended()


def digest_of(path: str | Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def contents(folder: Path) -> dict[str, bytes]:
    """What a run's files hold, but for the lock, which has the time at which it was taken."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "run.lock"}


def test_four_parts_train_with_workers_that_are_spawned_and_predict_asks_for_two(tmp_path):
    run, image = tmp_path / "own run", tmp_path / "image.png"
    parts = [MODEL, INIT, IMAGES, TASK]
    call = partial(called.train, run, "spawn", parts, CHANGES)
    trained = Fork(call, tmp_path / "1", "forkserver").ended()
    (record,) = RunFolder(run).starts()
    assert record["imports"] == {name: digest_of(name) for name in parts}
    assert "task    focal loss with gamma 2.0" in (run / "start.txt").read_text()
    # What is to be typed next imports them, too.
    *_, report, predict = trained.out.splitlines()
    named = [word for name in parts for word in ("--import", name)]
    assert shlex.split(report)[1:] == [
        "vitinit",
        "figures",
        "report",
        str(run),
        *named,
        *report.split()[-2:],
    ]
    assert shlex.split(predict) == ["vitinit", "predict", str(run), *named, "photo.jpg"]
    # Neither the init nor the data set of a run is needed to use it.
    Image.new("RGB", (40, 36)).save(image)
    two = ("--import", MODEL, "--import", TASK)
    used = started(tmp_path / "2", "predict", run, *two, image)
    assert used.result == 0 and "across" in used.out
    exported = started(tmp_path / "3", "export", run, *two, "--to=run", "--out", tmp_path / "out")
    assert exported.result == 0
    for number, (program, words, said) in enumerate(
        (
            ("predict", (run, "--import", TASK, image), "there is no model 'parallel_tiny'"),
            ("predict", (run, "--import", MODEL, image), "there is no task 'focal'"),
            ("eval", (run, *two), "there is no data set 'stripes'"),
        )
    ):
        refusal = started(tmp_path / f"refused{number}", program, *words)
        *_, line = refusal.err.splitlines()  # before it may stand whose weights are taken
        assert refusal.result == 2
        assert said in line and "--import FILE.py" in line


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_imports_before_it_looks_at_another_word(name, tmp_path, imports, capsys):
    (tmp_path / "noted.py").write_text(
        "from vitinit.base.messages import OneLineError\nraise OneLineError('so far')"
    )
    line = f"--import: {tmp_path / 'noted.py'}, line 2: OneLineError: so far"
    for words in (
        ["--nowhere", "--import", str(tmp_path / "noted.py")],
        [f"--import={tmp_path / 'noted.py'}"],
    ):
        assert called.start(name, tuple(words)) == 2
        assert capsys.readouterr().err == f"vitinit {name}: {line}\n"
    assert called.start(name, ("--import",)) == 2
    assert "--import: expected one argument" in capsys.readouterr().err
    called.start(name, ("--", "--import", str(tmp_path / "noted.py")))  # a file, perhaps
    assert line not in capsys.readouterr().err


def test_a_word_that_has_to_be_among_the_inits_may_be_one_of_ones_own(
    tmp_path, imports, monkeypatch
):
    (tmp_path / "noted.py").write_text("from vitinit.init import INITS\nINITS['noted'] = {}")
    words = ["maps", "--init", "noted", "--out", str(tmp_path / "a.png")]
    with pytest.raises(OneLineError, match="there is no 'noted'"):
        figure_arguments(words)
    try:
        parsed = figure_arguments([*words, "--import", str(tmp_path / "noted.py")])
        assert parsed.init == ["noted"]
    finally:
        INITS.pop("noted", None)


def test_a_run_goes_on_with_its_parts_alone_and_says_that_one_has_changed(
    small_run, train_program, tmp_path, imports, stop_before, monkeypatch, capsys
):
    part, run = tmp_path / "noted part.py", tmp_path / "run"
    part.write_text("")
    words = small_run(run, "--import", str(part))
    with monkeypatch.context() as patch:
        patch.setattr("vitinit.run.StopRequest", stop_before(3))
        assert train_program.main(words) == 143
    again = f"--import '{part}'"
    assert f"go on with --resume {run} {again}\n" in capsys.readouterr().out
    before = contents(run)
    assert train_program.main(["--resume", str(run)]) == 2
    assert capsys.readouterr().err == (
        f"train.py: {run}: was trained with --import {part}; give it again\n"
    )
    assert contents(run) == before
    old = digest_of(part)
    part.write_text("# mended")
    del sys.modules["noted part"]  # as in a new process
    assert train_program.main(["--resume", str(run), "--import", str(part)]) == 0
    warning = next(line for line in capsys.readouterr().err.splitlines() if "SHA-256" in line)
    assert old in warning and digest_of(part) in warning
    first, second = (start["imports"] for start in RunFolder(run).starts())
    assert (first, second) == ({str(part): old}, {str(part): digest_of(part)})


def test_each_process_of_a_run_tells_the_others_the_digest(
    tmp_path, imports, small_run, train_program, monkeypatch
):
    told = []
    monkeypatch.setattr(Processes, "require_equal", lambda self, facts: told.append(dict(facts)))
    (tmp_path / "noted.py").write_text("")
    words = small_run(tmp_path / "run", "--dry-run", "--import", str(tmp_path / "noted.py"))
    assert train_program.main(words) == 0
    assert told[0]["the SHA-256 of --import"] == [digest_of(tmp_path / "noted.py")]


def test_a_sweep_hands_its_parts_on(tmp_path, imports):
    (tmp_path / "noted.py").write_text("")
    words = "--recipe quickstart --seeds 0 --out-dir runs --import".split()
    args = sweep.parse_arguments([*words, str(tmp_path / "noted.py")])
    (planned,) = sweep.plan_runs(args)
    place = planned.arguments.index("--import")
    assert planned.arguments[place + 1] == str(tmp_path / "noted.py")


def test_no_recipe_run_or_archive_makes_anything_be_imported(
    tmp_path, imports, monkeypatch, capsys
):
    """run.json names a file that is there; nothing that reads the run imports it."""
    monkeypatch.chdir(tmp_path)
    run, marker = tmp_path / "runs" / "quickstart-impulse-s0", tmp_path / "imported"
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(marker)!r}, 'w').close()")
    shutil.copytree(Path(__file__).parent / "data" / "version_12", run)
    starts = json.loads((run / "run.json").read_text())
    for start_of_run in starts:
        start_of_run["imports"] = {str(evil): digest_of(evil), "evil": digest_of(evil)}
    (run / "run.json").write_text(json.dumps(starts))
    Image.new("RGB", (9, 9)).save("image.png")
    vitinit.load(run)
    for program, *words in (
        ("predict", run, "image.png"),
        ("eval", run),
        ("export", run, "--to", "run", "--out", "exported"),
        ("figures", "report", run, "--out", "report.html"),
        ("recipe", run),
        ("compare", run),
        ("compare", run, "--pack", "runs.tar.xz"),
        ("compare", "runs.tar.xz", "--replay", run.name, "--epochs", "1"),
        ("sweep", "--recipe", run / "recipe.toml", "--seeds", "0", "--dry-run"),
        ("train", "--resume", run),
        ("train", "--recipe", run / "recipe.toml", "--out-dir", run, "--resume", "auto"),
    ):
        called.start(program, tuple(words))
        assert not marker.exists() and "evil" not in sys.modules, program
    assert f"was trained with --import {evil} --import evil; give" in capsys.readouterr().err
    with pytest.raises(OneLineError, match="'imports' is no section of a recipe"):
        (tmp_path / "evil.toml").write_text('base = "quickstart"\n[imports]\nname = "evil.py"')
        Run("evil.toml").rehearse()
    import_part(str(evil))
    assert marker.exists()


def test_what_is_not_there_or_has_the_name_of_another_is_one_line(tmp_path, imports):
    for name in ("two.dots.py", "json.py"):
        (tmp_path / name).write_text("raise AssertionError")
    for name, words in (
        (tmp_path / "two.dots.py", "no other dot in its name) or a module that is there"),
        (tmp_path / "two.dots.py", "as two.dots, Python has nothing"),
        (tmp_path / "json.py", "as json, Python has one of its own, which registers nothing"),
        (tmp_path / "nowhere.py", "as nowhere, Python has nothing"),
        ("nowhere_at_all", "as nowhere_at_all, Python has nothing"),
        ("nowhere.at_all", "as nowhere.at_all, Python has nothing"),
        ("sys", "as sys, Python has one of its own, which registers nothing"),
        ("json.decoder", "as json.decoder, Python has one of its own"),
    ):
        line = refused(OneLineError, import_parts, [name])
        assert words in line


def test_an_error_of_the_file_is_passed_on_and_what_it_says_later_is_not_taken(tmp_path, imports):
    part = tmp_path / "noted.py"
    part.write_text("raise KeyError('a')")
    with pytest.raises(KeyError, match="a"):
        import_parts([part])
    part.write_text("value = 1")
    first = import_parts([part])
    assert first == {str(part): digest_of(part)}
    part.write_text("value = 'two'")
    assert import_parts([part]) == first and sys.modules["noted"].value == 1


def test_an_error_of_an_imported_file_is_one_line_with_its_place(
    train_program, imports, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_it.py").write_text("\n\nvalue = [][1]")
    for number, (text, place) in enumerate(
        {
            "def f():\n    1 / 0\n\nf()": "{}, line 2: ZeroDivisionError: division by zero",
            "x = 1\nx = (": "{}, line 2: SyntaxError: '(' was never closed",
            "import beside_it": "beside_it.py, line 3: IndexError: list index out of range",
            "import json\njson.loads('x')": "{}, line 2: JSONDecodeError: Expecting value",
            "from vitinit import build_model\nbuild_model('vit', 1.5)": "{}, line 2: ",
            "raise SystemExit(3)": "{}, line 1: SystemExit: 3",
        }.items()
    ):
        file = tmp_path / f"wrong_{number}.py"
        file.write_text(text)
        assert train_program.main(["--import", file.name, "--recipe", "quickstart"]) == 2
        error = capsys.readouterr().err
        where = f"train.py: --import: {tmp_path / place.format(file.name)}"
        assert error.startswith(where) and error.count("\n") == 1


def test_a_file_by_its_path_and_by_its_name_is_one_module(tmp_path, imports, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("noted.py").write_text("rows = []")
    Path("beside.py").write_text("from noted import rows\nrows.append(1)")
    found = import_parts(["noted.py", tmp_path / "noted.py", "noted", "beside.py"])
    assert [*found] == ["noted.py", str(tmp_path / "noted.py"), "noted", "beside.py"]
    assert len({*found.values()}) == 2 and sys.modules["noted"].rows == [1]


@pytest.mark.parametrize("value", [torch.tensor(0.5), True, "0.5", {"a": 1}, 2**63])
def test_an_entry_with_which_a_row_could_not_be_read_again_is_its_watchers_failure(
    value, tmp_path, monkeypatch, capsys
):
    """Numbers of numpy's can be read, and what a run itself measures stays."""

    def watcher(**entries):
        return type("Mine", (), {"measured": lambda self, row, model: row.update(entries)})

    monkeypatch.setitem(WATCHERS, "odd", watcher(odd=value))
    own = {"mine/0": np.float32(0.5), "mine/1": math.nan, "mine/2": None, "step": 3, 7: 8}
    monkeypatch.setitem(WATCHERS, "good", watcher(**{str(key): own[key] for key in own}))
    watchers, lines = Watchers(["odd", "good"]), Lines(tmp_path / "lines.jsonl", "step")
    for step in (10, 20):
        row = {"step": step, "loss": 1.5}
        watchers.tell("measured", row, None)
        lines.append(row)
        expected = [step, 1.5, 0.5, math.nan, None, 8]
        assert [*row.values()] == pytest.approx(expected, nan_ok=True)
    assert [row["step"] for row in lines.rows()] == [10, 20]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning odd: odd is ")
    assert line.endswith(", expected a number or None; the run goes on without it")


def test_an_archive_has_the_names_of_parts_without_their_folders():
    text = json.dumps([{"imports": {"/home/somebody/mine.py": "12ab", "other": "34cd"}}])
    (start,) = json.loads(without_paths(text.encode()))
    assert start == {"imports": {"mine.py": "12ab", "other": "34cd"}}


def test_a_family_is_called_as_its_row(monkeypatch):
    class Mine(VisionTransformer):
        pass

    monkeypatch.setitem(FAMILIES, "mine", Mine)
    line = refused(ValueError, model_class, "mine")
    assert "FAMILIES['mine'] is Mine, whose family is 'vit'" in line
    Mine.family = "mine"
    assert model_class("mine") is Mine
