"""`bench all`: the machine, the checks of tests/gpu and every speed, in one report."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import torchvision

from ..messages import OneLineError
from ..runs.folder import git_commit
from ..train.device import CPU_INFO, cores, describe_device
from .training import Row, row_table

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKS = REPOSITORY / "tests" / "gpu"
TRAINING = ["-m", "vitinit.train", "--recipe", "quickstart", "--init", "impulse"]
RECIPES = ("deit_base", "deit_small", "deit_tiny", "swin_tiny", "mixer_b16", "convmixer_768_32")


def machine(device: torch.device) -> Row:
    """The machine and the versions of the software, for the head of a report."""
    row: Row = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
                "commit": git_commit(REPOSITORY), "device": describe_device(device)}
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        row |= {"memory": f"{memory / 2**30:.1f} GiB",
                "GPUs": torch.cuda.device_count(), "CUDA": torch.version.cuda}
    name = re.search(r"model name\s*: (.+)", CPU_INFO.read_text()) if CPU_INFO.is_file() else None
    return row | {"processor": f"{name[1] if name else platform.machine()}, {cores()} cores",
                  "torch": torch.__version__, "torchvision": torchvision.__version__,
                  "python": platform.python_version()}


def speeds(device: str, data: Sequence[str]) -> list[list[str]]:
    """The commands of `bench all` after the checks, the most important ones first.

    data: ["--data-dir", FOLDER], or nothing. On a CPU their sizes are tiny.
    """
    bench, eager = ["-m", "vitinit.bench"], ["--set", "engine.compile=false"]
    memory = [*bench, "memory", "--recipe", *RECIPES]
    if device == "cpu":
        small = ["--batch", "2", "--device", "cpu", "--set", "engine.amp=off", *eager]
        return [[*bench, "step", "--recipe", "deit_tiny", *small],
                [*bench, "loader", "--recipe", "deit_tiny", "--workers", "0", "1", *small, *data],
                memory]
    return [[*bench, "step", "--recipe", RECIPES[0], *eager],
            [*bench, "step", "--recipe", RECIPES[0]],
            [*bench, "loader", "--recipe", "deit_small", *data],
            TRAINING, memory, *([*bench, "step", "--recipe", name] for name in RECIPES[1:])]


def bench_all(out: Path, *, device: torch.device, photographs: Path | None, minutes: float) -> int:
    """Run the checks of tests/gpu, then measure speeds, and write a report as results come in.

    After `minutes` the command that runs is ended, and further ones are not begun, which is no
    failure. Returns 1 if a check or a command failed, else 0. Raises OneLineError if `out` exists.
    """
    if out.exists() or out.suffix != ".md":
        raise OneLineError(f"{out} exists already or is no .md; choose another --out")
    deadline, failed = time.monotonic() + 60 * minutes, False
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device.type == "cpu" else {})
    data = ["--data-dir", str(photographs.resolve())] if photographs else []
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "x", encoding="utf-8") as file, tempfile.TemporaryDirectory() as folder:
        def tell(text: str) -> None:
            for stream in (file, sys.stdout):
                print(text, end="\n\n", file=stream, flush=True)

        tell("# What vitinit does on this machine")
        tell("\n".join(f"- {name}: {value}" for name, value in machine(device).items()))
        xml = Path(folder) / "checks.xml"
        checks = ["-m", "pytest", "-q", "-o", "junit_family=xunit1", f"--junitxml={xml}",
                  str(CHECKS)]
        for words in [checks, *speeds(device.type, data)]:
            tell("## Is it right?" if words is checks else f"## `python {' '.join(words)}`")
            if time.monotonic() > deadline:
                tell("Not begun: the time is over.")
                continue
            place = ["--out-dir", str(Path(folder) / "run")] if words is TRAINING else []
            status, printed = run_within([*words, *place], deadline - time.monotonic(), environment)
            end = "```\n" + "\n".join(printed.strip().splitlines()[-5:]) + "\n```"
            if status == -signal.SIGKILL and time.monotonic() >= deadline:
                tell(f"{end}\n\nEnded: the time is over.")
                continue
            text = end if status or words is TRAINING else printed.strip()
            if words is checks and xml.exists():
                text = checks_table(xml)
            tell(text + (f"\n\n**Failed**: exit status {status}." if status else ""))
            failed |= status != 0
    return int(failed)


def run_within(words: Sequence[str], seconds: float, environment: dict[str, str]
               ) -> tuple[int, str]:
    """Run Python for `seconds` at most, then kill all it started; return status and its output."""
    process = subprocess.Popen([sys.executable, *words], cwd=REPOSITORY, env=environment, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    try:
        printed, _ = process.communicate(timeout=max(seconds, 0.0))
    except BaseException as error:                   # also Ctrl-C, which does not reach its session
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    return process.returncode, printed


def checks_table(xml: Path) -> str:
    """The outcome of each check, with the figures that it recorded, from pytest's XML file."""
    rows = []
    for case in ElementTree.parse(xml).getroot().iter("testcase"):
        bad = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        figures = ", ".join(f"{p.get('name')} {p.get('value')}" for p in case.iter("property"))
        why = "" if bad is None else " ".join(bad.get("message", "").split())[:300]
        rows.append({"check": case.get("name", "").removeprefix("test_").replace("_", " "),
                     "result": "passed" if bad is None else bad.tag,
                     "s": float(case.get("time", 0)), "found": why or figures or None})
    return row_table(rows)
