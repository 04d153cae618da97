"""command_line.py, and the command line of train.py: its flags, and one line per error."""

import os
import re
import signal
import time

import pytest
from forks import Fork
from refused import refused
from torch.distributed import run as distributed_run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from vitinit.__main__ import PROGRAMS
from vitinit.base.messages import warn
from vitinit.base.table import find
from vitinit.programs.shared.command_line import HABITS, complain, run_program
from vitinit.recipe.files import RecipeError, load_recipe, overrides
from vitinit.train.distributed import LostProcess, Processes

MISSPELT = ["--recipe", "quickstart", "--set", "schedule.epoch=3"]
COMPLAINT = (
    "train.py: --set schedule.epoch=3: [schedule] has no key 'epoch'; did you mean 'epochs'?"
)


def test_train_py_takes_these_flags_and_no_others(train_program, capsys):
    with pytest.raises(SystemExit, match="0"):
        train_program.main(["--help"])
    flags = re.findall(r"^  (?:-h, )?(--[a-z-]+)", capsys.readouterr().out, flags=re.MULTILINE)
    assert " ".join(flags) == (
        "--help --import --recipe --init --data-dir --out-dir --seed --resume "
        "--dry-run --read-images --set --verbose --log --trust-teacher"
    )


def test_a_wrong_flag_is_one_line_that_names_it_and_ends_with_2(train_program, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    for arguments, words in (
        (["--epochs", "5"], "--epochs 5; expected --set schedule.epochs=5"),
        (
            ["--lr=-1e-3", "--batch_size", "7", "--see"],
            "; expected --set optim.base_lr=-1e-3 --set optim.global_batch=7\n",
        ),
        (["--device", "cuda"], "; expected no --device: a GPU is taken where torch sees one"),
        (["--set", "run.seed=1", "schedule.epochs=3"], "; expected --set schedule.epochs=3"),
        (["--amp"], "; expected --set engine.amp=…"),
        (["quickstart"], "quickstart"),
        (["--see", "5"], "unrecognized arguments: --see"),
        (["--set"], "--set"),
        (["--seed", "1.5"], "--seed: 1.5: expected an integer ≥ 0"),
        ([], "--recipe is missing; for example --recipe quickstart"),
        (["--recipe", "quikstart"], "did you mean 'quickstart'?"),
        (
            ["--recipe", "quickstart", "--init", "mimetc"],
            "--init mimetc: there is no init 'mimetc'; did you mean 'mimetic'?",
        ),
        (
            ["--recipe", "cifar10_mixer", "--init", "mimetic", "--data-dir", "a"],
            "--init mimetic: init 'mimetic' is for vit, swin, simple_vit, the keys of its row in INITS, ",
        ),
        (
            ["--recipe", "quickstart", "--set", "run.seed=x", "--set", "run.seed=-1"],
            "--set run.seed=-1: run.seed is -1, expected an integer ≥ 0",
        ),
    ):
        assert train_program.main(arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        assert printed.err.startswith("train.py: ") and words in printed.err


def test_what_is_missing_is_refused_with_an_example(capsys):
    for program, example in (("fit", "vitinit fit photos/ --minutes 20"), ("predict", "photo.jpg")):
        assert find(PROGRAMS[program].main)(["photos"], f"vitinit {program}") == 2
        error = capsys.readouterr().err
        assert "arguments are required: " in error and error.endswith(f"{example}\n")


def test_habits_mean_keys_that_there_are_and_no_flag_of_ours(train_program):
    keys = {habit for habit in HABITS.values() if re.fullmatch(r"[\w.]+", habit)}
    assert len(keys) > 9 and keys - {"model.options.drop_path"} <= load_recipe("photos").keys.keys()
    for option in HABITS:
        refused(RecipeError, train_program.parse_arguments, ["--recipe", "photos", option, "1"])


def test_flags_apply_before_set_and_an_empty_one_is_given():
    assert overrides(init="impulse", seed=0, data_dir="", sets=["run.seed=7"]) == [
        ("data.root", "", "--data-dir "),
        ("init.name", "impulse", "--init impulse"),
        ("run.seed", 0, "--seed 0"),
        ("run.seed", 7, "--set run.seed=7"),
    ]
    recipe = load_recipe(
        "quickstart",
        overrides(seed=5, data_dir="a", init="mimetic", sets=["run.seed=7", "data.name=cifar10"]),
    )
    assert (recipe.name, recipe.run.seed, recipe.init.name) == ("quickstart", 7, "mimetic")
    assert (recipe.data.root, recipe.data.name) == ("a", "cifar10")


def test_the_main_process_complains_in_one_line_and_others_of_their_disk_alone(
    monkeypatch, capsys, tmp_path
):
    for rank, speaks in ((None, True), ("0", True), ("1", False)):
        monkeypatch.delenv("RANK", raising=False)
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        complain("eval.py", RecipeError("x.toml: run.seed is 'a'"))
        warn("of it")
        assert capsys.readouterr() == (
            "",
            "eval.py: x.toml: run.seed is 'a'\nwarning of it\n" * speaks,
        )

    def reads_what_is_not_there() -> None:
        os.stat(absent)

    absent = tmp_path / "absent"  # of this process: the others may have another disk
    assert run_program("eval.py", reads_what_is_not_there) == 2
    assert capsys.readouterr().err == f"eval.py: {absent}: No such file or directory\n"


def test_torchrun_is_left_the_cause_and_not_its_consequence(monkeypatch, tmp_path):
    """ProcessFailure is what torchrun reads the file by, and what its report quotes."""
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    monkeypatch.setenv("RANK", "1")
    complain("train.py", LostProcess("another one has ended"))
    assert not report.exists()
    handler = signal.getsignal(signal.SIGTERM)
    complain("train.py", RecipeError("no such recipe"))
    assert signal.signal(signal.SIGTERM, handler) is signal.SIG_IGN  # to end with its own status
    failure = ProcessFailure(local_rank=1, pid=3, exitcode=2, error_file=str(report))
    assert failure.message["message"] == "train.py: no such recipe"
    assert failure.timestamp <= time.time() - 1  # before those that it ends


def test_under_torchrun_the_line_is_the_last_that_is_said_and_the_status_is_2(repository, tmp_path):
    (empty := tmp_path / "empty").mkdir()

    def torchrun() -> str:
        """Its report, which it ends with."""
        os.chdir(empty)
        with open("../said", "w") as said:
            os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
        with pytest.raises(ChildFailedError) as failed:
            distributed_run.main(
                ["--standalone", "--nproc_per_node=2", str(repository / "train.py"), *MISSPELT]
            )
        return str(failed.value)

    report, *_ = Fork(torchrun, tmp_path / "fork").ended()
    *_, last = [line for line in report.splitlines() if line.strip("=")]
    assert last.strip() == f"traceback : {COMPLAINT}"
    assert re.search(r"Root Cause.*exitcode\s*: 2 \(pid", report, re.DOTALL)
    printed = (tmp_path / "said").read_text()
    assert printed.splitlines().count(COMPLAINT) <= 1  # none if the main one was ended before
    assert "Traceback" not in printed and list(empty.iterdir()) == []


def test_each_process_tells_the_others_its_recipe_and_its_images(
    train_program, small_run, tmp_path, monkeypatch
):
    """On two machines, say, one of which has another copy of the data."""
    told = []
    monkeypatch.setattr(Processes, "require_equal", lambda self, facts: told.append(dict(facts)))
    assert train_program.main(small_run(tmp_path / "run", "--seed", "5", "--dry-run")) == 0
    assert told[0]["run.seed"] == 5 and told[0]["the step to go on from"] is None
    assert told[1].keys() >= {"training images", "validation images", "files and labels", "teacher"}
