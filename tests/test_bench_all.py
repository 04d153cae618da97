"""`bench all`: its runner survives what items do, its report is continued, its checks can fail."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from functools import partial, partialmethod
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from vitinit.bench import __main__ as bench
from vitinit.bench import record as record_module
from vitinit.bench import speeds
from vitinit.bench import step as step_module
from vitinit.bench.checks import runs, steps
from vitinit.bench.everything import Workers, bench_all, run_within
from vitinit.bench.item import Conditions, Goal, Item
from vitinit.bench.items import CHECKS, ITEMS
from vitinit.bench.record import Record, cell, in_short, row_table
from vitinit.bench.timing import best_seconds_each
from vitinit.bench.worker import CUT_SHORT, FAILED, PASSED, SKIPPED, Outcome
from vitinit.data.kept import KeptViews
from vitinit.data.resident import Resident
from vitinit.data.to_device import TrainToDevice
from vitinit.messages import OneLineError
from vitinit.train import engine
from vitinit.train.checkpoint import save_atomically
from vitinit.train.ema import Ema

# Functions of items. They are in a module of their own, which the worker processes can import.
ITEMS_MODULE = '''
import multiprocessing, os, signal, subprocess, sys, time
from vitinit.bench.item import Skipped

def passes(conditions):
    """Counts its calls. And more."""
    assert conditions.scratch.is_dir() and not list(conditions.scratch.iterdir())
    calls = conditions.scratch.parent / "calls"
    with open(calls, "a") as file:
        file.write("x")
    (conditions.scratch / "left").write_text("behind")
    return [{"calls": len(open(calls).read()), "process": os.getpid(),
             "starts by": multiprocessing.get_start_method()}]

def skips(conditions):
    raise Skipped("there is no such thing here")

def disagrees(conditions):
    assert 3 == 5, "3 is not 5"

def raises(conditions):
    print("what it said before")
    return [][7]

def crashes(conditions):
    os.kill(os.getpid(), signal.SIGSEGV)

def leaves(conditions):
    sys.exit(3)

def hangs(conditions):
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (conditions.scratch.parent / "left.pid").write_text(str(left.pid))
    time.sleep(600)
'''


@pytest.fixture
def items(tmp_path, monkeypatch):
    """Make items of functions in ITEMS_MODULE. Its folder is on the path, which workers inherit."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "bench_items.py").write_text(ITEMS_MODULE)
    monkeypatch.syspath_prepend(folder)
    import bench_items

    def make(*names: str, **options) -> list[Item]:
        return [Item(name, "check", getattr(bench_items, name), seconds=(1, 1), **options)
                for name in names]
    yield make
    del sys.modules["bench_items"]


def report(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_no_item_ends_the_rest_and_a_second_call_continues(items, tmp_path, monkeypatch):
    monkeypatch.setattr(Item, "limit", lambda item, device: 2 if item.name == "hangs" else 60)
    chosen = items("disagrees", "passes", "raises", "crashes", "leaves", "hangs", "skips")
    out = tmp_path / "out"
    failed = bench_all(chosen, out, photographs=None, minutes=5)
    found = {name: (item["status"], item["words"]) for name, item in report(out)["items"].items()}
    assert failed == 5
    assert found.pop("hangs") == (FAILED, "not done after 2 s")
    assert found == {
        "passes": (PASSED, ""), "skips": (SKIPPED, "there is no such thing here"),
        "disagrees": (FAILED, "3 is not 5"),
        "raises": (FAILED, "IndexError: list index out of range (bench_items.py:23)"),
        "crashes": (FAILED, "its process ended by SIGSEGV"), "leaves": (FAILED, "SystemExit: 3 "
                                                                       "(bench_items.py:29)")}
    passed, = report(out)["items"]["passes"]["rows"]
    assert passed["calls"] == 1 and passed["starts by"] == multiprocessing.get_start_method()
    assert "what it said before" in (out / "log.txt").read_text()
    # The process that the hanging item started was ended with it, and no files are left behind.
    assert gone(int((out / "left.pid").read_text()))
    assert not (out / "scratch").exists()

    page = (out / "report.md").read_text()
    assert "passes: Counts its calls. And more | passed" in page
    assert "1 passed, 5 failed, 1 skipped; 0 not run yet." in page

    # A second call with `again` repeats what failed and nothing else.
    bench_all(items("passes", "raises", "skips"), out, photographs=None, minutes=5, again=True)
    calls = {name: item["call"] for name, item in report(out)["items"].items()}
    assert calls.pop("raises") == 1 and set(calls.values()) == {0} and len(report(out)["calls"]) == 2


def test_what_is_over_is_not_repeated(tmp_path):
    record = Record(tmp_path)
    record.outcomes = {status: Outcome(status, 1.0) for status in (PASSED, SKIPPED, FAILED, CUT_SHORT)}
    for again, over in ((False, [PASSED, SKIPPED, FAILED]), (True, [PASSED, SKIPPED])):
        assert [name for name in [*record.outcomes, "never run"]
                if record.is_over(name, again=again)] == over


def test_nothing_outlives_a_call_that_is_killed(items, tmp_path):
    """A process that did would hold the GPU that the next call needs."""
    program = ("import sys; from pathlib import Path; from vitinit.bench.item import Item\n"
               "from vitinit.bench.everything import bench_all\n"
               "if __name__ == '__main__':\n"
               f"    sys.path.insert(0, {str(tmp_path / 'modules')!r}); import bench_items\n"
               "    item = Item('hangs', 'check', bench_items.hangs)\n"
               f"    bench_all([item], Path({str(tmp_path / 'out')!r}), photographs=None, minutes=5)")
    (tmp_path / "call.py").write_text(program)
    call = subprocess.Popen([sys.executable, tmp_path / "call.py"], cwd=runs.REPOSITORY,
                            env=os.environ | {"PYTHONPATH": str(runs.REPOSITORY)})
    left = tmp_path / "out" / "left.pid"
    while not (left.exists() and left.read_text()):
        assert call.poll() is None
        time.sleep(0.05)
    call.kill()
    call.wait()
    for _ in range(200):
        if gone(int(left.read_text())):
            return
        time.sleep(0.05)
    pytest.fail("what the item had started is still there")


def test_an_item_that_wants_to_be_alone_is(items, tmp_path):
    first, = items("passes")
    others = [Item(name, "speed", first.function, seconds=(1, 1), alone=alone)
              for name, alone in (("second", False), ("third", True), ("fourth", False))]
    bench_all([first, *others], tmp_path / "out", photographs=None, minutes=5)
    pids = [item["rows"][0]["process"] for item in report(tmp_path / "out")["items"].values()]
    assert pids[0] == pids[1] and len(set(pids[1:])) == 3


def test_items_that_do_not_fit_into_the_time_are_left_for_the_next_call(items, tmp_path, capsys):
    short, long = items("passes", "skips")
    long = Item("skips", "check", long.function, seconds=(1000, 1000))
    out = tmp_path / "out"
    bench_all([long, short], out, photographs=None, minutes=2)
    assert list(report(out)["items"]) == ["passes"]
    assert "1 items are left" in capsys.readouterr().out
    assert "1 not run yet: skips" in (out / "report.md").read_text()


def test_an_item_that_is_cut_short_has_not_failed(items, tmp_path):
    item, = items("hangs")
    record, workers = Record(tmp_path), Workers(tmp_path / "log.txt")
    record.begin({"device": "a"})
    run_within(item, Conditions("cpu", tmp_path / "scratch"), workers, record, [item],
               time.monotonic() + 3)
    assert record.outcomes["hangs"].status == CUT_SHORT and not record.is_over("hangs", again=False)
    assert not workers.worker.alive
    run_within(item, Conditions("cpu", tmp_path / "scratch"), workers, record, [item],
               time.monotonic() + 0.5)               # less than it is expected to take
    assert record.outcomes["hangs"].seconds > 1


def test_a_report_is_whole_at_any_time(tmp_path, monkeypatch):
    """If a report cannot be written, the previous one stays."""
    item = CHECKS[0]
    record = Record(tmp_path)
    record.begin({"device": "CPU, 1 threads"})
    record.add(item, Outcome(PASSED, 1.0, [{"x": 1}]), CHECKS)
    before = (tmp_path / "report.json").read_bytes()
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OneLineError, match="full"):
        record.add(item, Outcome(FAILED, 1.0, [], "x"), CHECKS)
    assert (tmp_path / "report.json").read_bytes() == before
    assert Record(tmp_path).outcomes[item.name] == Outcome(PASSED, 1.0, [{"x": 1}])


@pytest.mark.parametrize("text", ["{", "[]", '{"calls": [], "items": {"a": {"call": 0}}}',
                                  '{"calls": [], "items": {"a": 7}}', "\udcff"])
def test_a_file_that_is_no_report_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "report.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(OneLineError, match="report.json: not what bench all writes"):
        Record(tmp_path)


def test_one_report_is_of_one_device(tmp_path):
    record = Record(tmp_path)
    record.begin({"device": "a"})
    with pytest.raises(OneLineError, match="is of a, and this is b; choose another --out"):
        record.begin({"device": "b"})


def test_wrong_arguments_are_refused_in_one_line(capsys, tmp_path):
    for words, message in ((["--only", "no_such"], "--only no_such: there is no such item"),
                           (["--data-dir", str(tmp_path / "none")], "none: no such folder"),
                           (["--minutes", "0"], "--minutes: 0: expected")):
        assert bench.main(["all", "--out", str(tmp_path / "out"), *words]) == 2
        line, = capsys.readouterr().err.splitlines()
        assert message in line
    assert bench.main(["all"]) == 2 and "needs --out DIR" in capsys.readouterr().err


def test_the_list_names_every_item_and_says_what_it_does(capsys):
    assert bench.main(["all", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [item.name for item in ITEMS]
    assert all(len(line.split()) > 5 for line in lines)
    assert len({item.name for item in ITEMS}) == len(ITEMS)


def test_goals_are_judged_by_the_best_number_to_which_they_apply():
    rows = [{"way": "eager", "share": 40.0}, {"way": "compiled", "share": 52.0}, {"other": 99.0}]
    goal = Goal("share", at_least=50)
    assert goal.values(rows) == [40.0, 52.0] and goal.met_by(52.0) and not goal.met_by(40.0)
    assert Goal("share", at_most=5, where=(("way", "eager"),)).values(rows) == [40.0]
    assert str(Goal("share", at_most=5, where=(("way", "eager"),))) == "share ≤ 5 (way eager)"
    item = Item("step", "speed", steps.train_step, goals=(goal, Goal("none", at_most=1.0)))
    record = type("Found", (), {"outcomes": {"step": Outcome(PASSED, 1.0, rows)}})()
    assert list(record_module._goals(record, [item])) == [
        ["share ≥ 50", "step", "52", "met"], ["none ≤ 1", "step", "–", "unmeasured"]]


def test_rows_become_a_table_and_a_line():
    rows = [{"a": 1234567, "b": 0.001234}, {"a": 2, "c": "x|y"}]
    assert row_table(rows).splitlines()[2:] == ["| 1,234,567 | 0.00123 | – |", "| 2 | – | x\\|y |"]
    assert in_short(rows) == "2 rows, a ≤ 1,234,567, b ≤ 0.00123" and in_short([]) == ""
    assert in_short(rows[1:]) == "a 2, c x|y"
    assert [cell(value) for value in (None, True, 3, 0.5, 1234.5, float("inf"))] == [
        "–", "True", "3", "0.5", "1,234", "inf"]


# ---------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------


QUICK = [item for item in CHECKS if item.name not in (
    "resume", "two_processes", "compiled", "no_waiting", "peak_memory")]


@pytest.mark.parametrize("item", QUICK, ids=lambda item: item.name)
def test_a_check_passes_on_the_cpu(item, tmp_path):
    assert item.function(Conditions("cpu", tmp_path))


def prepared(prepare, batch, *arguments, original=TrainToDevice.__call__, part=0):
    """Break augmentation: one number of a large batch differs from that of a pair."""
    found = original(prepare, batch, *arguments)
    if len(batch.images) > 2:
        found[part].view(-1)[-1] += 1e-3
    return found


def gelu(x, approximate="none", original=F.gelu):
    return original(x, approximate="tanh" if x.dtype == torch.float32 else approximate)


def conv2d(x, *arguments, original=F.conv2d, **options):
    factor = 1.001 if x.is_contiguous(memory_format=torch.channels_last) else 1.0
    return factor * original(x, *arguments, **options)


def cut(*arguments, original=Resident.cut):
    return original(*arguments).roll(1, -1)


def in_other_batches(kept, *arguments, original=KeptViews.in_batches):
    """Break kept evaluation views: they differ from what was decoded."""
    again = kept.device is not None and kept.filled
    for batch in original(kept, *arguments):
        yield batch._replace(images=batch.images ^ 1) if again else batch


class TooLarge(torch.nn.Module):
    """Break compiling: the compiled model computes something else."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return 1.01 * self.model(*inputs)


def without_the_last_batch(models, batches, **options):
    return engine.evaluate(models, batches[:-1], **options)


# check, and part of it → object, attribute, and what replaces it to break what is checked
BREAKS = {
    "augmentation": (TrainToDevice, "__call__", prepared),
    "erasing_and_mixing": (TrainToDevice, "__call__", prepared),
    "erasing_and_mixing of targets": (TrainToDevice, "__call__", partialmethod(prepared, part=1)),
    "resident_cutting": (Resident, "cut", cut),
    "streams": (Resident, "cut", cut),
    "evaluation_views": (KeptViews, "in_batches", in_other_batches),
    "train_step": (F, "gelu", gelu),
    "evaluation": (steps, "evaluate", without_the_last_batch),
    "fp16_overflow": (torch.amp.GradScaler, "step", lambda scaler, optimizer: optimizer.step()),
    "bf16": (engine, "autocast", lambda device, amp: torch.autocast(device.type, enabled=False)),
    "moving_average": (Ema, "decay_at", lambda ema, update: 0.8),
    "micro_batches": (steps.GivenStep, "__len__", lambda step: 1),
    "channels_last": (F, "conv2d", conv2d),
    "compiled": (torch, "compile", TooLarge),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_check_fails_where_what_it_checks_is_broken(name, tmp_path, monkeypatch):
    target, attribute, broken = BREAKS[name]
    monkeypatch.setattr(target, attribute, broken)
    check = next(item for item in CHECKS if item.name == name.split()[0])
    with pytest.raises((AssertionError, OneLineError)):
        check.function(Conditions("cpu", tmp_path))


def test_every_quick_check_is_broken_once():
    assert {name.split()[0] for name in BREAKS} == {item.name for item in QUICK} | {"compiled"}


def test_a_batch_that_does_not_fit_is_halved():
    tried = []

    def measure(batch: int) -> int:
        tried.append(batch)
        if batch > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch
    assert speeds.as_large_as_fits(measure, 13) == 3 and tried == [13, 6, 3]
    with pytest.raises(torch.OutOfMemoryError):
        speeds.as_large_as_fits(lambda batch: measure(7), 2)


class Clocked(torch.nn.Module):
    """A model with a clock, by which forward pass n takes `seconds[n]`."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__()
        self.seconds, self.now = iter(seconds), 0.0
        self.head = torch.nn.Linear(3 * 2 * 2, 5)

    def forward(self, images):
        self.now += next(self.seconds)
        return self.head(images.flatten(1))


def test_a_step_is_timed_without_what_comes_before_and_after(monkeypatch):
    """So in the engine, whose epoch ends with a check of all weights, and in a bare loop."""
    part = torch.zeros(2, 3, 2, 2), torch.eye(5)[:2]
    for bare in (False, True):
        model = Clocked([1000.0, 1000.0, 2.0, 3.0, 7.0, 500.0])
        monkeypatch.setattr(step_module.time, "perf_counter", lambda model=model: model.now)
        monkeypatch.setattr(step_module, "passes_on", lambda device: (2, 3))
        if bare:
            seconds = step_module.bare_seconds(model, part, amp="off", compiled=False,
                                               wait=lambda: None)
        else:
            steps_given = (step_module.GivenStep(number, [part]) for number in range(10))
            seconds = step_module.engine_seconds(
                step_module.state_of(model, torch.optim.SGD(model.parameters(), lr=1.0)), model,
                steps_given, amp="off", passes=(2, 3), wait=lambda: None)
        assert seconds == 4.0


def test_actions_are_timed_in_turn_so_that_noise_affects_all_alike():
    order = []
    found = best_seconds_each({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert "".join(order) == "ababab" and list(found) == ["a", "b"] and min(found.values()) >= 0


@pytest.fixture
def threads_as_before():
    """Restore torch's number of threads, which measurements on one core set."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_speeds_are_measured(monkeypatch, tmp_path, image_tree, threads_as_before):
    """The images are small, and nothing is compiled."""
    monkeypatch.setattr(speeds, "SIZE", 32)
    monkeypatch.setattr(speeds, "BATCHES", {"vit_tiny": (2, 2), "vit_base": (2, 2)})
    monkeypatch.setattr(torch, "compile", lambda model: model)
    here = Conditions("cpu", tmp_path, image_tree)
    eager, compiled = speeds.step("vit_tiny", here)
    assert eager["way"] == "eager, amp off" and compiled["way"] == "compiled, amp off"
    assert eager["images/s"] == pytest.approx(2e3 / eager["ms per step"])
    share, = speeds.augmentation_share(here)
    assert share["% of the step"] == pytest.approx(100 * share["all, ms"] / share["step, ms"])
    fed = speeds.loader_fed(here)
    assert [row["workers"] for row in fed][:2] == [0, 1]
    assert all(row["fed/synthetic"] == pytest.approx(
        row["fed, images/s"] / row["synthetic, images/s"]) for row in fed)
    assert fed[0]["images"] == "72 of the given photographs"
    assert speeds.photographs(Conditions("cpu", tmp_path), 7)[1] == "100 drawn JPEGs of 500×375"
    parts = {row["part"]: row["operations beside views"] for row in speeds.launches(here)}
    assert 0 < parts["augmentation"] < 400 < parts["forward, backward, optimiser, EMA"]
    *_, pillow = speeds.loader(here)
    assert pillow["× torchvision's"] == 1 and next(iter(pillow)) == "of 72 of the given photographs"
    assert len(speeds.host_time(here)) == 2
    monkeypatch.setattr(torch.optim, "Muon", partial(torch.optim.Muon, ns_steps=1))   # faster
    found = {row["optimiser"]: row for row in speeds.updates(here)}
    assert (found["AdamW"]["operations beside views"] < 150 < 3 * found["Muon with AdamW"][
        "operations beside views"] < found["torch.optim.Muon"]["operations beside views"])
    assert {row["draws in batches of 256"] for row in speeds.draws(here)} == {
        "crop and flip", "RandAugment and erasing"}


def test_a_run_is_stopped_resumed_and_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "EPOCHS", 5)
    monkeypatch.setattr(runs, "STOPPED_AFTER", 2)
    monkeypatch.setitem(runs.SMALL, "schedule.epochs", "5")
    row, = runs.resume(Conditions("cpu", tmp_path))
    assert row["apart"] == 0 and 2 * 15 <= row["stopped after step"] < 5 * 15


def test_checkpoints_are_compared_tensor_by_tensor(tmp_path):
    states = [{"model": {"a": torch.ones(3)}, "optimizer": {"state": {0: {"m": torch.full((2,), m)}}}}
              for m in (1.0, 1.0, 1.5)]
    folders = [tmp_path / str(number) for number in range(3)]
    for folder, state in zip(folders, states):
        folder.mkdir()
        save_atomically(state, folder / "last.pt")
    assert runs.apart(folders[0], folders[1]) == 0
    assert runs.apart(folders[2], folders[1]) == pytest.approx(0.5)


def test_a_program_that_ends_with_another_status_fails_the_check(tmp_path):
    with pytest.raises(AssertionError, match="train.py ended with 2, not 0"):
        runs.finished("train.py", "--recipe", "no-such")

