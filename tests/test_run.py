"""A run in Python: what it does, what it records, and the page that names its parts."""

import copy
import json
import os
import pickle
import re
import runpy
import signal
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from pages import read_page
from refused import refused
from same_run import IN_SECONDS, assert_same_run, rows_of

import vitinit
from vitinit.programs.shared.records import read_run
from vitinit.recipe.files import RecipeError
from vitinit.run import FinishedBefore, NoResult
from vitinit.runs.folder import RunFolder
from vitinit.tasks.labels import cross_entropy
from vitinit.train.distributed import Processes
from vitinit.train.interruption import Interrupted
from vitinit.train.metrics import Diverged

PAGE = read_page(Path(vitinit.__file__).with_name("train") / "README.md")
SMALL = IN_SECONDS | {"schedule.epochs": 2, "data.workers": 1, "data.on_device_gib": 0.0}


def test_a_run_in_python_is_that_of_the_command_line_also_in_a_thread(
    train_program, eval_program, tmp_path, monkeypatch
):
    """To the bit; only its record differs. Outside of the main thread it takes no signals, also
    where workers load the images."""
    typed, called, made = tmp_path / "typed", tmp_path / "called", []
    assert (
        train_program.main(
            [
                "--recipe",
                "quickstart",
                "--seed",
                "7",
                "--out-dir",
                str(typed),
                *(word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")),
            ]
        )
        == 0
    )
    monkeypatch.setattr(sys, "argv", ["notebook", "--recipe", "deit_base"])

    def train_and_evaluate() -> None:
        made.append(vitinit.Run("quickstart", seed=7, out_dir=called, overrides=SMALL).train())
        made.append(eval_program.main([str(called)]))

    thread = threading.Thread(target=train_and_evaluate)
    thread.start()
    thread.join()
    run, status = made
    assert status == 0
    assert_same_run(typed, called)
    assert run.rows == rows_of(called) and run.folder.path == called and run.recipe.run.seed == 7
    last = torch.load(called / "last.pt")["model"]
    assert torch.equal(run.state.model.head.bias, last["head.bias"])
    first, second = (json.loads((folder / "run.json").read_text())[0] for folder in (typed, called))
    assert first["command"][:3] == ["train.py", "--recipe", "quickstart"]
    assert (
        "command" not in second
        and second["arguments"] == first["arguments"] | {"out_dir": str(called)}
        and second["arguments"]["changes"] == {"run.seed": 7} | SMALL
    )
    assert read_run(called).recipe == first["recipe"] == "quickstart"
    run = vitinit.Run("quickstart", seed=np.int64(7), overrides={"run.seed": np.uint8(3)})
    assert [type(change.value) for change in run.request.changes] == [int, int]


def test_an_objective_of_ones_own_stays_and_none_asks_no_teacher(monkeypatch):
    """What differs between machines, the folder of the images and the workers, is not compared."""
    compared = []
    monkeypatch.setattr(Processes, "require_equal", lambda self, facts: compared.append(facts))
    small = {"data.name": "shapes", "data.root": "", "data.num_classes": 0}
    small |= {"data.held_out_per_class": 3}
    run = vitinit.Run("own_images", overrides=small, objective=len)
    run.rehearse()
    assert run.objective is len
    assert {"data.root", "data.workers", "data.image_size"} & compared[0].keys() == {
        "data.image_size"
    }
    run = vitinit.Run("quickstart", overrides={"distill.teacher": "cifar10_small"}, objective=len)
    assert "leave one of them out" in refused(RecipeError, run.rehearse)


def test_what_a_run_gives_before_it_began_while_it_trains_and_once_it_is_done(tmp_path):
    """Also after an interruption; what it has not is one line, and no AttributeError of our own."""
    run = vitinit.Run("quickstart", out_dir=tmp_path / "run", overrides=SMALL)
    assert run.rows == [] and not hasattr(run, "state")
    assert repr(run) == "Run of quickstart: not begun"
    for name in ("state", "data", "folder", "recipe"):
        assert f"{name}: this run has not begun" in refused(NoResult, getattr, run, name)

    def stopped(*arguments, **options):
        raise Interrupted(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitinit.run.train_epochs", stopped)
        with pytest.raises(Interrupted):
            run.train()
    assert run.rows == [] and run.state.progress.step == 0 and len(run.data.train_set) > 0
    run = vitinit.Run(resume=tmp_path / "run", first_epochs=1)
    result = run.train()
    assert result is run.result and len(run.rows) == result.state.progress.epochs == 1
    rest = vitinit.Run(resume=tmp_path / "run").train()
    assert len(rest.rows) == 2 and rest.rows[0] == run.rows[0]
    for name in ("last.pt", "previous.pt"):
        (tmp_path / "run" / name).unlink()
    done = vitinit.Run(
        resume="auto", recipe="quickstart", out_dir=tmp_path / "run", overrides=SMALL
    )
    assert done.train().rows == rest.rows and done.folder.path == tmp_path / "run"
    about, how_good, *_ = repr(rest).splitlines()  # and not its tensors
    assert about == f"init default, seed 0, in {tmp_path / 'run'}"
    assert how_good.startswith("2 epochs: ") and how_good.endswith(
        " validation images (guessing 15.2 %)"
    )
    assert repr(done) == f"Run of quickstart: {repr(rest).removeprefix('init default, seed 0, ')}"
    (tmp_path / "run" / "recipe.toml").unlink()
    assert repr(done) == f"Run of quickstart: in {tmp_path / 'run'}"  # and no error
    assert "was done before" in refused(NoResult, getattr, done, "state")


def test_what_a_run_gives_can_be_copied_and_pickled(tmp_path):
    result = FinishedBefore(RunFolder(tmp_path))
    for again in (copy.copy(result), pickle.loads(pickle.dumps(result))):
        assert again.folder.path == tmp_path and repr(again) == f"in {tmp_path}"
        assert "was done before" in refused(NoResult, getattr, again, "state")


def test_a_run_that_dies_before_its_first_checkpoint_starts_again_as_if_for_the_first_time(
    tmp_path, monkeypatch
):
    """Also on other images: all that a later resumption asks for is on record before there is a
    checkpoint, and only of the start that made one."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    vitinit.Run("quickstart", out_dir=whole, overrides=SMALL).train()
    run = vitinit.Run("quickstart", out_dir=again, resume="auto", overrides=SMALL, first_epochs=1)
    with monkeypatch.context() as patch:
        patch.setattr("vitinit.runs.folder.RunFolder.save", Mock(side_effect=MemoryError))
        patch.setattr("vitinit.runs.data.fingerprint", lambda *_: "other images")
        with pytest.raises(MemoryError):
            run.train()
    assert (again / "run.json").exists() and not (again / "last.pt").exists()
    run.train()
    vitinit.Run(resume=again).train()
    assert_same_run(whole, again)
    assert ["data" in start for start in run.folder.starts()] == [False, True, True]


def test_a_run_that_is_stopped_after_a_step_that_diverged_says_so_with_advice(
    tmp_path, monkeypatch
):
    """Its last checkpoint stays that of before."""

    def stopped(training, *_):
        training.state.progress.add(torch.tensor(torch.nan), None)
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr("vitinit.run.train_epochs", stopped)
    run = vitinit.Run("quickstart", out_dir=tmp_path / "run", overrides=SMALL)
    message = refused(Diverged, run.train)
    assert "the loss of step 1 is nan" in message and "start anew with a lower" in message
    assert torch.load(tmp_path / "run" / "last.pt")["step"] == 0


def test_a_loss_of_ones_own_is_on_record_and_a_run_goes_on_with_no_other(tmp_path):
    folder = tmp_path / "run"

    def twice(forward, images, scales, targets):
        return 2.0 * cross_entropy(forward, images, scales, targets)

    vitinit.Run(
        "quickstart", out_dir=folder, overrides=SMALL, objective=twice, first_epochs=1
    ).train()
    refusal = refused(RecipeError, vitinit.Run(resume=folder).train)
    assert "twice" in refusal and "the task's" in refusal
    assert len(vitinit.Run(resume=folder, objective=twice).train().rows) == 2
    for wrong in (0, -1):
        assert "at least 1" in refused(RecipeError, vitinit.Run, "quickstart", first_epochs=wrong)
    assert "exclude each other" in refused(RecipeError, vitinit.Run(resume=folder).rehearse)


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    (code,) = PAGE.section("In Python").blocks("python")
    for key, value in SMALL.items():
        code = code.replace('{"', f'{{"{key}": {value}, "', 1)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    *_, last = capsys.readouterr().out.splitlines()
    (top1,) = [row["val_top1"] for row in rows_of(Path("runs/mine")) if row["epoch"] == 3]
    assert last == f"{top1} 0.002 runs/mine"


@pytest.mark.parametrize("program", ["train", "eval"])
def test_the_page_of_a_program_names_its_parts_in_order(program, repository, tmp_path, monkeypatch):
    page = (repository / f"{program}.py").read_text()
    assert page.count("\n") <= 40
    parts = re.findall(r"^    \w[\w ']*  +(vitinit/\S+\.py) +(\w+)  ", page, flags=re.MULTILINE)
    entered, run = [], vitinit.Run("quickstart", out_dir=tmp_path / "run", overrides=SMALL)
    names = {name for _, name in parts}
    if program == "eval":
        run.train()

    def note(frame, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name in names:
            part = (os.path.relpath(frame.f_code.co_filename, repository), frame.f_code.co_name)
            if part in parts and part not in entered:
                entered.append(part)

    monkeypatch.setattr(
        sys,
        "argv",
        [f"{program}.py", str(tmp_path / "run")]
        if program == "eval"
        else [
            f"{program}.py",
            "--recipe",
            "quickstart",
            "--out-dir",
            str(tmp_path / "run"),
            *(word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")),
        ],
    )
    handler = signal.getsignal(signal.SIGINT)  # which the program sets for its imports
    sys.setprofile(note)
    try:
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(repository / f"{program}.py"), run_name="__main__")
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, handler)
    assert len(parts) >= 8 and entered == parts
