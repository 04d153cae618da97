"""What a program does first: by a Python that imports vitinit.base.begin and nothing else."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forks import Fork

from vitinit.programs.shared.command_line import run_program

BEGIN = "from vitinit.base.begin import begin; begin()"
TEXT = "1×3, a–b → ≥2 … ±0 é 猫 \udce9\n"


def begun(
    code: str, repository: Path, shell: str = "", **environment: str
) -> subprocess.CompletedProcess:
    """Run code after `begin`; shell: what bash does with its streams, such as "2>&-"."""
    words = [sys.executable, "-S", "-c", f"{BEGIN}; import os, signal, sys\n{code}"]
    return subprocess.run(
        ["sh", "-c", f'"$0" "$@" {shell}', *words],
        capture_output=True,
        env={"PYTHONPATH": str(repository), **environment},
    )


def test_ctrl_c_says_nothing_before_the_program_runs_and_one_line_then(repository, tmp_path):
    pressed = "os.kill(os.getpid(), signal.SIGINT)"
    done = begun(pressed, repository)
    assert (done.stdout, done.stderr) == (b"", b"") and done.returncode in (130, -signal.SIGINT)
    done = begun(pressed, repository, shell="& wait $!")  # where it is ignored it stays so
    assert (done.returncode, done.stderr) == (0, b"")

    def program(cleans: bool) -> tuple[int, bool]:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as begin does
        status = run_program("p", lambda: signal.raise_signal(signal.SIGINT), cleans=cleans)
        return status, signal.getsignal(signal.SIGINT) is signal.SIG_DFL

    done = Fork(lambda: program(True), tmp_path / "cleans").ended()
    assert done == ((130, True), "", "p: stopped by SIGINT\n")
    fork = Fork(lambda: program(False), tmp_path / "at once").process
    fork.join()
    assert fork.exitcode == -signal.SIGINT


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of it")
def test_a_process_of_torchrun_ends_with_it(repository):
    """Even if that is killed; without the mend it goes on."""
    worker = f"{BEGIN}; import time; print('begun', flush=True); time.sleep(20); print('went on')"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {worker!r}])"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", launcher],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(repository), "TORCHELASTIC_RUN_ID": "tests"},
    ) as process:
        assert process.stdout.readline() == b"begun\n"
        process.kill()
        assert process.stdout.read() == b""


@pytest.mark.parametrize("shell", ["<&- >&- 2>&-", "2>&-", ">&-"])
def test_a_stream_that_is_closed_is_none_of_a_runs_files(shell, repository, tmp_path):
    code = (
        "file = open(os.environ['FILE'], 'wb')\n"
        "print('printed'); print('said', file=sys.stderr)\n"
        "for number in 1, 2: os.write(number, b'by C, ')\n"
        "os.system('echo again; echo again >&2'); assert sys.stdin.read() == ''\n"
        "file.write(b'kept')"
    )
    done = begun(
        code,
        repository,
        shell if "<" in shell else f"{shell} </dev/null",
        FILE=str(tmp_path / "file"),
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_bytes() == b"kept"
    assert done.stdout == (b"by C, again\nprinted\n" if shell == "2>&-" else b"")


@pytest.mark.parametrize(
    "encoding, printed",
    [
        ("utf-8", "1×3, a–b → ≥2 … ±0 é 猫 \\udce9\n"),
        ("latin-1", "1×3, a-b -> >=2 ... ±0 é \\u732b \\udce9\n"),
        ("ascii:strict", "1x3, a-b -> >=2 ... +/-0 \\xe9 \\u732b \\udce9\n"),
    ],
)
def test_a_terminal_of_any_encoding_shows_what_is_printed(encoding, printed, repository):
    done = begun(
        f"for stream in sys.stdout, sys.stderr: stream.write({TEXT!r})",
        repository,
        PYTHONIOENCODING=encoding,
    )
    assert done.stdout == done.stderr == printed.encode(encoding.partition(":")[0])


# In every process: notes that `begin` was called there, and whether torch had been imported. For
# `train` stands PROGRAM, as torch an empty file, for both take seconds.
NOTES = """
import os, sys
import vitinit.programs
from vitinit.base import begin as module
vitinit.programs.__path__.insert(0, os.path.dirname(__file__))
real = module.begin
def begin():
    with open(os.environ["NOTES"], "a") as file:
        print("after torch" if "torch" in sys.modules else "before torch", file=file)
    real()
module.begin = begin
"""
PROGRAM = """
import multiprocessing, torch
def main(*words):
    worker = multiprocessing.get_context("spawn").Process(target=print, args=["a worker"])
    worker.start()
    worker.join()
    return worker.exitcode
"""


@pytest.mark.parametrize("way", [["train.py"], ["-m", "vitinit", "train"]])
def test_both_ways_in_begin_before_torch_and_no_worker_begins(way, repository, tmp_path):
    """Workers that import the main module anew, as on macOS, and as Python does from 3.14 on."""
    for name, code in (("sitecustomize", NOTES), ("train", PROGRAM), ("torch", "")):
        (tmp_path / f"{name}.py").write_text(code)
    environment = os.environ | {
        "NOTES": str(tmp_path / "notes"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(repository)]),
    }
    done = subprocess.run(
        [sys.executable, *way],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "a worker\n"), done.stderr
    assert (tmp_path / "notes").read_text() == "before torch\n"
