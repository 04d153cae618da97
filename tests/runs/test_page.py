"""The page of vitinit/runs names every file and column, and its programs and its script run."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from forks import Fork
from pages import read_page

from vitinit.programs.shared.records import METRICS
from vitinit.runs import folder as folder_module
from vitinit.train.metrics import StepRow

PAGE = read_page(Path(folder_module.__file__).with_name("README.md"))


def test_every_file_and_column_is_named():
    files = re.findall(r"^    (\S+\.\S+) ", folder_module.__doc__, flags=re.MULTILINE)
    assert len(files) >= 9
    for name in set(files) - {"run.lock"} | set(METRICS) | set(StepRow._fields):
        assert f"`{name}`" in PAGE.text, name


# Stand-ins for SLURM's commands, which write what they do to `log`. A signalled job gets SIGUSR1 as
# before its time limit, and its program ends only after SIGTERM.
STAND_INS = {
    "srun": """echo "srun $1" >> log
               [ "$SIGNALLED" ] && { kill -USR1 $PPID; read < signals; }
               echo ended >> log; exit $STATUS""",
    "scancel": 'echo "scancel $*" >> log; echo > signals',
    "scontrol": 'echo "scontrol $*" >> log',
}
ARRAY = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_script_requeues_a_job_that_the_time_limit_stopped_and_no_other(tmp_path, nodes):
    """Also with its last command for several nodes."""
    script, several = PAGE.section("Signals, SLURM and time limits").blocks("bash")
    if nodes > 1:
        script = script.rpartition("to_the_end torchrun")[0] + several
        assert "--rdzv_endpoint" in script and script.count("to_the_end torchrun") == 1
    (tmp_path / "script").write_text(script)
    os.mkfifo(tmp_path / "signals")
    for name, code in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / name).chmod(0o755)
    for environment, job, requeued in [
        ({"SIGNALLED": "1", "STATUS": "1"}, "9", True),
        ({"SIGNALLED": "1", "STATUS": "143", "SLURM_RESTART_COUNT": "19", **ARRAY}, "7_3", True),
        ({"SIGNALLED": "1", "STATUS": "1", "SLURM_RESTART_COUNT": "20"}, "9", False),
        ({"SIGNALLED": "1", "STATUS": "0"}, "9", False),  # it came to its end after all
        ({"STATUS": "2"}, "9", False),
    ]:
        (tmp_path / "log").unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", "script"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "9", **environment},
        )
        assert (done.returncode, done.stdout + done.stderr) == (int(environment["STATUS"]), "")
        stop = [f"scancel --signal=TERM {job}"] if "SIGNALLED" in environment else []
        again = [f"scontrol requeue {job}"] if requeued else []
        asked = ["scontrol show hostnames "] * (nodes > 1)
        assert (tmp_path / "log").read_text().splitlines() == [
            *asked,
            "srun torchrun",
            *stop,
            "ended",
            *again,
        ]


def test_a_plain_run_imports_only_what_the_pages_say(repository, tmp_path):
    def imported() -> set[str]:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vitinit"]:
            del sys.modules[name]
        runpy.run_path(str(repository / "train.py"))
        return {*sys.modules}

    loaded = Fork(imported, tmp_path / "fork").ended().result
    assert "vitinit.train.loop" in loaded
    ours = {name for name in loaded if name.startswith("vitinit.")}
    assert not {name for name in ours if name.startswith(("vitinit.interop", "vitinit.watch"))}
    assert {name for name in ours if name.startswith("vitinit.programs.")} == {
        "vitinit.programs.shared",
        "vitinit.programs.shared.command_line",
        "vitinit.programs.shared.outputs",
        "vitinit.programs.train",
    }
    unneeded = {
        "vitinit.train.muon",
        "vitinit.tasks.distillation",
        "vitinit.tasks.reconstruction",
        "vitinit.runs.teacher",
        "vitinit.runs.trained",
    }
    assert not unneeded & ours
    assert all(importlib.util.find_spec(name) for name in unneeded)  # that they are still there
