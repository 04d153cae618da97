"""Sweeps: the plan and its order, what is skipped and resumed, and what happens if a run fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vitinit import sweep
from vitinit.recipe.files import RecipeError

SHORT = dict(schedule__epochs="2", mix__probability="0", augment__repeats="1")


def planned(*arguments: object) -> list[sweep.PlannedRun]:
    return sweep.plan_runs(sweep.parse_arguments([str(argument) for argument in arguments]))


def flags(run: sweep.PlannedRun) -> dict[str, list[str]]:
    """Flag of train.py → its values."""
    found: dict[str, list[str]] = {}
    for flag, value in zip(run.arguments[::2], run.arguments[1::2], strict=True):
        found.setdefault(flag, []).append(value)
    return found


@pytest.fixture
def started(monkeypatch, train_program) -> list[Path]:
    """Makes runs go through train.py in this process; the folders of the runs that were started."""
    folders = []

    def run(self: sweep.Launcher, command: list[str], **options: object) -> str | None:
        arguments = command[command.index(str(sweep.TRAIN)) + 1:]
        folders.append(Path(arguments[arguments.index("--out-dir") + 1]))
        monkeypatch.setattr("sys.argv", ["train.py", *arguments])
        status = train_program.main(arguments)
        return None if status == 0 else f"ended with status {status}"
    monkeypatch.setattr(sweep.Launcher, "run", run)
    return folders


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["train_loss"]
            for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, seeds", [
    ("0", [0]), ("0-4", [0, 1, 2, 3, 4]), ("5,0,2", [5, 0, 2]), ("7,0-2", [7, 0, 1, 2]),
    ("3-3", [3]), ("1, 2", [1, 2])])
def test_seeds_are_numbers_and_spans(text, seeds):
    assert sweep.parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "4-0", "-1", "0-", "0,,1", "1.5", "0-2-4", "²"])
def test_anything_else_is_no_seed(text):
    with pytest.raises(RecipeError, match="is no seed; expected such as 0-4 or 0,2,5"):
        sweep.parse_seeds(text)


def test_every_init_has_a_run_before_any_has_a_second(tmp_path):
    runs = planned("--recipe", "quickstart", "--init", "default,impulse", "--seeds", "3,1",
                   "--variant", "long", "schedule.epochs=11", "--variant", "plain",
                   "--out-dir", tmp_path)
    assert [run.folder.relative_to(tmp_path).as_posix() for run in runs] == [
        f"quickstart-{init}-{variant}-s{seed}" for seed in (3, 1) for init in ("default", "impulse")
        for variant in ("long", "plain")]
    assert [run.epochs for run in runs] == [11, 9] * 4
    assert [run.recipe.run.seed for run in runs] == [3] * 4 + [1] * 4
    assert {run.state for run in runs} == {"new"}


def test_train_py_is_told_everything(train_program, tmp_path):
    """The planned arguments, as parsed by train.py itself."""
    run, = planned("--recipe", "quickstart", "--init", "impulse", "--seeds", "5", "--out-dir",
                   tmp_path, "--data-dir", "a folder", "--set", "optim.eps=1e-6", "--set",
                   "mix.mixup_alpha=0.5", "--variant", "v", "init.options.value_init=base")
    assert vars(train_program.parse_arguments(run.arguments)) == dict(
        recipe="quickstart", init="impulse", seed=5, data_dir="a folder", resume="auto",
        dry_run=False, profile=0, out_dir=tmp_path / "quickstart-impulse-v-s5",
        set=["optim.eps=1e-6", "mix.mixup_alpha=0.5", "init.options.value_init=base"])


def test_without_inits_it_is_the_recipes_own(tmp_path):
    run, = planned("--recipe", "quickstart", "--seeds", "0", "--out-dir", tmp_path)
    assert run.folder == tmp_path / "quickstart-default-s0"
    assert flags(run).keys() == {"--recipe", "--seed", "--out-dir", "--resume"}


def test_several_processes_are_started_by_torchrun(tmp_path):
    run, = planned("--recipe", "quickstart", "--seeds", "0", "--out-dir", tmp_path)
    assert sweep.command(run, 1) == [sys.executable, str(sweep.TRAIN), *run.arguments]
    assert sweep.command(run, 3) == [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3",
        str(sweep.TRAIN), *run.arguments]


GOOD = ["--recipe", "quickstart", "--seeds", "0"]


@pytest.mark.parametrize("arguments, message", [
    (["--seeds", "0"], "the following arguments are required: --recipe"),
    (["--recipe", "quickstart"], "the following arguments are required: --seeds"),
    (["--recipe", "quickstrat", "--seeds", "0"], "no such recipe in"),
    ([*GOOD, "--seeds", "0,0"], "--seeds 0,0: names a seed twice"),
    ([*GOOD, "--nproc", "0"], "--nproc: 0: expected an integer ≥ 1"),
    ([*GOOD, "--init", "default,impuls"], "--init impuls: init.name is 'impuls'; did you mean"),
    ([*GOOD, "--init", "default,"], "--init : init.name is ''"),
    ([*GOOD, "--init", "default,filters"], "'filters' is not defined for a VisionTransformer"),
    ([*GOOD, "--init", "default,default"], "two runs would share the folder runs/quickstart-d"),
    ([*GOOD, "--set", "schedule.epoch=3"], "no key 'epoch'; did you mean 'epochs'?"),
    (["--recipe", "quickstart", "--seeds", "0,1", "--set", "run.seed=7"],
     "--set run.seed=7: seeds go by --seeds, which names the runs' folders"),
    ([*GOOD, "--variant", "a", "run.seed=7"], "--set run.seed=7: seeds go by --seeds"),
    (["--recipe", "quickstart", "--seeds", "0-99999999"], "expected at most 1000 runs in a sweep"),
    (["--recipe", "quickstart", "--seeds", "1" * 5000], "is no seed; expected such as 0-4"),
    (["--recipe", "quickstart", "--seeds", "0-501", "--init", "default,mimetic"],
     "502 seeds, 2 inits and 1 variants are 1004 runs; expected at most 1000 in a sweep"),
    ([*GOOD, "--variant", "schedule.epochs=3"], "--variant schedule.epochs=3: expected a name of"),
    ([*GOOD, "--variant", "a/b", "schedule.epochs=3"], "--variant a/b schedule.epochs=3: expected"),
    ([*GOOD, "--variant", "long", "schedule.epoch=3"], "--variant long: --set schedule.epoch=3: "),
    ([*GOOD, "--variant", "a", "--variant", "b"], "would be the same run"),
    ([*GOOD, "--variant", "a", "--variant", "a", "schedule.epochs=3"], "would share the folder"),
    ([*GOOD, "--resume", "auto"], "unrecognized arguments: --resume auto"),
])
def test_what_is_wrong_is_one_line_before_anything_starts(monkeypatch, tmp_path, capsys, started,
                                                          arguments, message):
    monkeypatch.chdir(tmp_path)
    assert sweep.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and started == [] and list(tmp_path.iterdir()) == []
    assert printed.err.startswith("vitinit.sweep: ") and message in printed.err
    assert printed.err.count("\n") == 1


def test_a_dry_run_prints_the_plan_and_starts_nothing(tmp_path, capsys, started):
    assert sweep.main([*GOOD, "--init", "default,impulse", "--out-dir", str(tmp_path),
                       "--dry-run"]) == 0
    assert capsys.readouterr().out == (f"plan    2 runs, 0 of them done\n"
                                       f"        {tmp_path}/quickstart-default-s0: new\n"
                                       f"        {tmp_path}/quickstart-impulse-s0: new\n")
    assert started == [] and list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------
# The runs
# ---------------------------------------------------------------------------------------------


def test_finished_runs_are_skipped_and_cut_off_ones_go_on(small_run, tmp_path, capsys, started,
                                                          train_program, stop_before,
                                                          monkeypatch):
    """A sweep interrupted in its second run equals one that was not; a third time it does nothing.

    The run that was cut off takes its place in the table as if nothing had happened.
    """
    arguments = small_run(tmp_path / "sweep", "--seeds", "0,1", init="default,impulse", **SHORT)
    folders = [tmp_path / "sweep" / f"quickstart-{init}-s{seed}"
               for seed in (0, 1) for init in ("default", "impulse")]

    first = [*arguments[:arguments.index("--seeds")], "--seeds", "0"]
    with monkeypatch.context() as patch:
        # A run looks twelve times per epoch: at four steps and their end, at six batches and their
        # end. SIGTERM comes in the second run, before the second step of its second epoch.
        patch.setattr(train_program, "StopRequest", stop_before(24 + 12 + 1))
        assert sweep.main(first) == 1
    printed = capsys.readouterr()
    assert printed.err == (f"vitinit.sweep: {folders[1]} failed: ended with status 143\n")
    assert "| default | 1 |" in printed.out and "impulse |" not in printed.out

    assert sweep.main([*arguments, "--dry-run"]) == 0
    assert capsys.readouterr().out == (
        "plan    4 runs, 1 of them done\n"
        f"        {folders[0]}: done\n        {folders[1]}: to go on after 1 of 2 epochs\n"
        f"        {folders[2]}: new\n        {folders[3]}: new\n")

    started.clear()
    assert sweep.main(arguments) == 0
    assert started == folders[1:]
    printed = capsys.readouterr().out
    assert "resumed at step" in printed
    assert "| default | 2 |" in printed and "| impulse | 2 |" in printed
    assert "| minus default | of | seeds |" in printed

    straight = tmp_path / "straight"
    assert sweep.main(small_run(straight, "--seeds", "0", init="impulse", **SHORT)) == 0
    assert losses(folders[1]) == losses(straight / folders[1].name) and len(losses(folders[1])) == 2

    started.clear()
    capsys.readouterr()
    assert sweep.main(arguments) == 0
    assert started == [] and "plan    4 runs, 4 of them done" in capsys.readouterr().out


def test_a_run_whose_last_checkpoint_lags_behind_its_metrics_is_not_done(small_run, tmp_path,
                                                                        started):
    """The run was killed between writing its last line of metrics and its last checkpoint."""
    arguments = small_run(tmp_path, "--seeds", "0", **SHORT)
    assert sweep.main(arguments) == 0
    run, = planned(*arguments)
    assert run.finished
    state = torch.load(run.folder / "last.pt", weights_only=True)
    state["progress"]["epochs"] = 1
    torch.save(state, run.folder / "last.pt")
    run, = planned(*arguments)
    assert not run.finished and run.state == "to go on after 1 of 2 epochs"


def test_a_run_without_its_last_checkpoint_goes_on_from_the_one_before(small_run, tmp_path, started):
    arguments = small_run(tmp_path, "--seeds", "0", **SHORT)
    folder = tmp_path / "quickstart-mimetic-s0"
    assert sweep.main(arguments) == 0
    before = losses(folder)
    (folder / "last.pt").unlink()
    assert planned(*arguments)[0].state == "to go on after 1 of 2 epochs"
    assert sweep.main(arguments) == 0
    assert started == [folder] * 2 and losses(folder) == before


def test_a_run_without_any_checkpoint_is_done_or_refused_and_never_started_over(
        small_run, tmp_path, capsys, started):
    """Its metrics.jsonl, which is complete, decides."""
    arguments = small_run(tmp_path, "--seeds", "0", **SHORT)
    folder = tmp_path / "quickstart-mimetic-s0"
    assert sweep.main(arguments) == 0
    for path in folder.glob("*.pt"):
        path.unlink()
    lines = (folder / "metrics.jsonl").read_text()
    capsys.readouterr()
    assert sweep.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "plan    1 runs, 1 of them done" in printed and "| mimetic | 1 |" in printed
    (folder / "metrics.jsonl").write_text(lines.splitlines()[0] + "\n")
    assert sweep.main(arguments) == 2
    error = capsys.readouterr().err
    assert "holds metrics.jsonl of 1 of 2 epochs but no last.pt to go on from" in error
    assert error.count("\n") == 1 and started == [folder]
    assert (folder / "metrics.jsonl").read_text() == lines.splitlines()[0] + "\n"


def test_a_sweep_that_sets_a_key_twice_goes_on(small_run, tmp_path, started, train_program,
                                               monkeypatch, stop_before):
    arguments = small_run(tmp_path, "--seeds", "0", "--variant", "high", "optim.eps=1e-2", **SHORT)
    folder = tmp_path / "quickstart-mimetic-high-s0"
    with monkeypatch.context() as patch:
        patch.setattr(train_program, "StopRequest", stop_before(3))
        assert sweep.main(arguments) == 1
    assert sweep.main(arguments) == 0
    assert started == [folder] * 2 and len(losses(folder)) == 2


def test_a_failing_run_is_reported_at_the_end_and_the_others_go_on(small_run, tmp_path, capfd,
                                                                   monkeypatch):
    """With real programs; patches of 5 pixels are rejected only when the model is built."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    short = SHORT | dict(schedule__epochs="1")
    assert sweep.main(small_run(tmp_path, "--seeds", "0", "--variant", "torn",
                                "model.options.patch_size=5", "--variant", "whole", **short)) == 1
    printed = capfd.readouterr()
    folder = tmp_path / "quickstart-mimetic-torn-s0"
    line = "train.py: recipe quickstart: patches of 5×5 pixels do not tile an image of 8×8"
    assert printed.err.splitlines()[0].startswith(line)
    assert printed.err.splitlines()[-1].startswith(f"vitinit.sweep: {folder} failed: {line}")
    assert not folder.exists()
    assert "| mimetic | 1 |" in printed.out
    assert (tmp_path / "quickstart-mimetic-whole-s0" / "last.pt").exists()


def test_a_folder_that_holds_another_run_stops_the_sweep_before_it_starts(small_run, tmp_path,
                                                                         capsys, started):
    """It is neither skipped nor resumed. Another data folder alone does not make it another run."""
    arguments = small_run(tmp_path, "--seeds", "0", **SHORT)
    assert sweep.main(arguments) == 0
    started.clear()
    capsys.readouterr()
    assert sweep.main([*arguments, "--set", "optim.eps=1e-3"]) == 2
    folder = tmp_path / "quickstart-mimetic-s0"
    assert capsys.readouterr().err == (
        f"vitinit.sweep: {folder}: holds another run, its optim.eps is 0.0001 and not 0.001; "
        "choose another --out-dir\n")
    assert sweep.main([*arguments, "--data-dir", "elsewhere", "--set", "data.workers=1"]) == 0
    assert started == []


def test_unreadable_checkpoints_stop_the_sweep_before_it_starts(small_run, tmp_path, capsys, started):
    """Both checkpoints are unreadable; with a good previous.pt the run would resume."""
    arguments = small_run(tmp_path, "--seeds", "0", **SHORT)
    folder = tmp_path / "quickstart-mimetic-s0"
    assert sweep.main(arguments) == 0
    (folder / "last.pt").write_bytes(b"torn")
    assert planned(*arguments)[0].done == 1
    (folder / "previous.pt").write_bytes(b"torn")
    capsys.readouterr()
    assert sweep.main(arguments) == 2
    error = capsys.readouterr().err
    assert "last.pt: not a readable checkpoint" in error and error.count("\n") == 1


# ---------------------------------------------------------------------------------------------
# Signals
# ---------------------------------------------------------------------------------------------


def test_ctrl_c_ends_the_sweep_once_the_running_run_has_saved(small_run, tmp_path, repository):
    arguments = small_run(tmp_path, "--seeds", "0,1", schedule__epochs="100000")
    process = subprocess.Popen([sys.executable, "-m", "vitinit.sweep", *arguments], text=True,
                               cwd=repository, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in process.stdout:                      # reading waits for the next line
        if line.startswith("epoch      2/"):
            process.send_signal(signal.SIGINT)
            break
    rest, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "go on with --resume" in rest
    assert rest.endswith("stopped by signal 2; the same command goes on\n")
    assert "Traceback" not in error
    first, second = planned(*arguments)
    assert first.done >= 2 and not first.finished
    assert second.done is None and not second.folder.exists()


# ---------------------------------------------------------------------------------------------
# Side by side
# ---------------------------------------------------------------------------------------------


def test_runs_side_by_side_are_those_of_one_after_another(small_run, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = small_run(tmp_path / "alone", "--seeds", "0,1", "--threads", "1",
                          schedule__epochs="2")
    assert sweep.main(arguments) == 0
    capfd.readouterr()
    together = small_run(tmp_path / "together", "--seeds", "0,1", "--threads", "1", "--jobs", "2",
                         schedule__epochs="2")
    assert sweep.main(together) == 0
    said = capfd.readouterr()
    for seed in (0, 1):
        name = f"quickstart-mimetic-s{seed}"
        assert losses(tmp_path / "together" / name) == losses(tmp_path / "alone" / name)
        assert f"{name}  epoch 2/2  top-1 " in said.out
        log = (tmp_path / "together" / "logs" / f"{name}.log").read_text()
        assert log.startswith("recipe  quickstart, seed") and "\nepoch 2/2  " in log
    assert "plan    2 runs, 0 of them done; 2 at a time, each with 1 thread(s)" in said.out
    assert "recipe  quickstart" not in said.out and "mean ± standard deviation" in said.out
    assert sweep.main(together) == 0                 # all are done: nothing is started
    assert "plan    2 runs, 2 of them done" in capfd.readouterr().out


def test_a_run_that_fails_beside_others_is_reported_at_the_end(small_run, tmp_path, capfd,
                                                               monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    broken = tmp_path / "out" / "logs" / "quickstart-mimetic-s0.log"
    broken.mkdir(parents=True)                       # where its log should be
    assert sweep.main(small_run(tmp_path / "out", "--seeds", "0,1", "--jobs", "2",
                                schedule__epochs="1")) == 1
    said = capfd.readouterr()
    assert f"quickstart-mimetic-s0 failed: {broken}: Is a directory" in said.err
    assert "quickstart-mimetic-s1  epoch 1/1" in said.out


def test_parts_of_a_plan_are_the_plan(tmp_path, capsys, started):
    arguments = ["--recipe", "quickstart", "--init", "default,impulse", "--seeds", "0-2",
                 "--out-dir", str(tmp_path), "--dry-run"]

    def folders(*more: str) -> list[str]:
        assert sweep.main([*arguments, *more]) == 0
        return [line.split(":")[0].strip() for line in capsys.readouterr().out.splitlines()[1:]]
    whole = folders()
    parts = [folders("--only", f"{part}/4") for part in (1, 2, 3, 4)]
    assert len(whole) == 6 and sorted(sum(parts, [])) == sorted(whole)
    assert sorted(map(len, parts)) == [1, 1, 2, 2]
    assert folders("--only", "1/1") == whole and folders("--only", "7/9") == []


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/0", "a/b", "-1/3", "1/3/5"])
def test_a_part_that_is_none_is_one_line(text, capsys):
    assert sweep.main(["--recipe", "quickstart", "--seeds", "0", f"--only={text}"]) == 2
    error = capsys.readouterr().err
    assert f"{text}: expected K/N with 1 ≤ K ≤ N, such as 1/4" in error and error.count("\n") == 1
