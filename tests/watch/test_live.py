"""Loggers get the rows of a run, whatever happens to it, and nothing that they do happens to it."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pages import read_page
from same_run import TIMES, assert_same_run, rows_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vitinit.train import loop as engine
from vitinit.watch import live

PAGE = read_page(Path(live.__file__).parents[1] / "runs" / "README.md")


class WeightsAndBiases:
    """A stand-in for wandb, whose runs outlive the process: an id's steps only increase."""

    Settings, __spec__ = dict, object()  # as an installed module has one

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, dict]] = {}

    def init(self, *, id: str, name: str, **options) -> SimpleNamespace:
        assert options["resume"] == "allow"
        rows = self.rows.setdefault(f"{id} of {name}", {})

        def log(values: dict, *, step: int, commit: bool) -> None:
            assert commit and step > max(rows, default=-1)
            rows[step] = values

        return SimpleNamespace(
            step=max(rows, default=-1) + 1,
            log=log,
            finish=lambda: None,
            define_metric=lambda name, step_metric: None,
        )


def expected(folder, per_epoch: int) -> dict[tuple[str, int], float]:
    """Tag and step → value, of all numbers in the rows of a folder but the number of steps."""
    return {
        (f"{name}/{key}", row["step"] if name == "steps" else per_epoch * row["epoch"]): value
        for name in ("steps", "metrics")
        for row in rows_of(folder, name)
        for key, value in row.items()
        if key != "step" and value is not None
    }


def drawn(folder) -> dict[tuple[str, int], float]:
    """What TensorBoard shows of a run; no point twice."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    points = [
        ((tag, event.step), event.value)
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    ]
    assert len(dict(points)) == len(points)
    return dict(points)


def assert_shown(folder, per_epoch: int) -> None:
    rows, shown = expected(folder, per_epoch), drawn(folder)
    assert shown == {place: np.float32(value) for place, value in rows.items()}


def test_the_curves_of_a_run_that_was_stopped_and_killed_are_its_rows(
    train_program, small_run, stop_before, tmp_path, monkeypatch
):
    """4 steps are an epoch; steps 10 and 20 have a row, and are saved, beside a stop's."""
    monkeypatch.setitem(sys.modules, "wandb", library := WeightsAndBiases())
    folder, log = tmp_path / "run", ["--log", "tensorboard", "wandb", "attention"]
    command = small_run(
        folder,
        *log,
        schedule__epochs="6",
        checkpoint__every_epochs="6",
        checkpoint__every_steps="10",
        eval__every_epochs="6",
    )
    update, steps = engine.update_weights, []

    def killed(*arguments, **keywords):
        steps.append(None)
        if len(steps) == 11:
            raise MemoryError("out of memory")  # ends the run as it is
        return update(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr("vitinit.run.StopRequest", stop_before(2))
        assert train_program.main(command) == 128 + 15
    with monkeypatch.context() as patch:
        patch.setattr(engine, "update_weights", killed)
        assert train_program.main(["--resume", str(folder), *log]) == 2
    assert rows_of(folder)[-1]["epoch"] == 3  # of step 12, after the last checkpoint
    with monkeypatch.context() as patch:
        patch.setattr("vitinit.run.StopRequest", stop_before(15))
        assert train_program.main(["--resume", str(folder), *log]) == 128 + 15
    assert_shown(folder, 4)
    assert train_program.main(["--resume", str(folder), *log]) == 0
    assert [row["step"] for row in rows_of(folder, "steps")] == [10, 20]
    assert [row["epoch"] for row in rows_of(folder)] == [1, 2, 3, 4, 5, 6]
    assert_shown(folder, 4)
    assert ("steps/logits/1", 20) in expected(folder, 4)
    (sent,) = library.rows.values()
    same = {
        (tag, values["step"]): value
        for values in sent.values()
        for tag, value in values.items()
        if tag.rpartition("/")[2] not in ("step", *TIMES)
    }
    assert same == {
        place: value
        for place, value in expected(folder, 4).items()
        if place[0].rpartition("/")[2] not in TIMES
    }


def test_a_logger_that_fails_or_hangs_is_one_line_and_changes_nothing(
    train_program, small_run, straight, tmp_path, monkeypatch, capsys
):
    going_on = threading.Event()

    def fails_at_the_second_row(folder, step, rows):
        next(rows), next(rows)
        raise StopIteration

    def hangs(folder, step, rows):
        going_on.wait()
        raise ConnectionError  # long after the run

    monkeypatch.setattr(live, "LOGGERS", {"tensorboard": fails_at_the_second_row, "wandb": hangs})
    monkeypatch.setattr(live, "find_spec", lambda name: True)
    monkeypatch.setattr(live.LiveCurves.close, "__defaults__", (0.01,))
    threads, uncut = threading.active_count(), straight()
    capsys.readouterr()
    command = small_run(tmp_path / "run", "--log", "wandb", "tensorboard", "--log", "wandb")
    assert train_program.main(command) == 0
    assert capsys.readouterr().err.splitlines() == [
        "warning log: tensorboard gets no more rows (StopIteration); the run goes on",
        "warning log: wandb has not taken all rows within 0.01 s",
    ]
    assert_same_run(uncut, tmp_path / "run")
    curves = next(thread for thread in threading.enumerate() if thread.name == "wandb")
    going_on.set()
    curves.join()
    assert not capsys.readouterr().err
    assert threading.active_count() == threads


@pytest.mark.parametrize("name", ["wandb", "tensorbord"])
def test_a_logger_that_there_is_not_is_one_line_before_anything(
    train_program, small_run, tmp_path, monkeypatch, capsys, name
):
    from vitinit.programs import sweep

    monkeypatch.setitem(sys.modules, "wandb", None)
    for program, command in (
        (train_program, small_run(tmp_path / "run")),
        (sweep, ["--recipe", "quickstart", "--seeds", "0"]),
    ):
        assert program.main([*command, "--log", name]) == 2
        (message,) = capsys.readouterr().err.splitlines()
        assert f"--log {name}: expected" in message and "pip install 'vitinit[" in message
    assert not (tmp_path / "run").exists()


def test_the_loop_of_the_page_sends_runs_that_are_over(straight, tmp_path, monkeypatch):
    (loop,) = PAGE.section("TensorBoard and Weights & Biases").blocks("python")
    folder = shutil.copytree(straight(), tmp_path / "runs" / "quickstart-impulse-s0")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        exec(loop, {})
        assert_shown(folder, 4)
