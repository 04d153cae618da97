"""`bench all`: the machine, the checks of tests/gpu and every speed, in one report."""

import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import torch
import torchvision

from ...base.messages import LossyStream, OneLineError
from ...runs.folder import git_commit
from ...train.device import CPU_INFO, cores, describe_device
from .training import ResultRow

REPOSITORY = Path(__file__).resolve().parents[3]
MOUNTS = Path("/proc/mounts")  # what is mounted where, on Linux
# pytest ends a check, and itself, after 40 seconds, and prints where it was: the first one that
# compiles takes 25.
CHECKS = (
    "-m pytest -vv -rN --tb=short -W default --rootdir=. -o faulthandler_timeout=40 "
    "-o faulthandler_exit_on_timeout=true tests/gpu"
).split()
BENCH = "-m vitinit bench".split()
TRAINING = "-m vitinit train --recipe quickstart --init impulse".split()
MEASURED_RECIPES = "deit_small deit_base deit_tiny swin_tiny mixer_b16 convmixer_768_32".split()


def file_system(folder: Path) -> str:
    """The kind of file system that a folder is on, such as ext4 or nfs4; "unknown" if the machine
    does not say.
    """
    kind, longest = "unknown", -1
    for line in MOUNTS.read_text().splitlines() if MOUNTS.is_file() else ():
        _, place, found, *_ = line.split()
        # Of two that are mounted at one place the later one hides the other.
        if len(place) >= longest and folder.resolve().is_relative_to(place):
            kind, longest = found, len(place)
    return kind


def machine(device: torch.device, data: Path | None = None) -> ResultRow:
    """The machine and the versions of the software, for the head of a report or of a bug's.

    data: a folder of images, whose place and file system are told, too.
    """
    row: ResultRow = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": git_commit(REPOSITORY),
        "device": describe_device(device),
    }
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        row |= {
            "memory": f"{memory / 2**30:.1f} GiB",
            "GPUs": torch.cuda.device_count(),
            "threads": torch.get_num_threads(),
            "CUDA": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),
        }
    if data:
        row["data"] = f"{data.resolve()} on {file_system(data)}"
    name = re.search(r"model name\s*: (.+)", CPU_INFO.read_text()) if CPU_INFO.is_file() else None
    return row | {
        "processor": f"{name[1] if name else platform.machine()}, {cores()} cores",
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "python": platform.python_version(),
    }


def speeds(device: str, data: Sequence[str]) -> list[tuple[list[str], str]]:
    """The commands of `bench all` after the checks, the most important ones first, each with what
    one looks for on an H100, if that is known.

    data: ["--data-dir", FOLDER], or nothing. On a CPU their sizes are tiny.
    """
    eager = ["--set", "engine.compile=false"]
    memory = ([*BENCH, "memory", "--recipe", *MEASURED_RECIPES], "")
    if device == "cpu":
        small = [*"--device cpu --batch 2 --set engine.amp=off".split(), *eager]
        step = [*BENCH, *"step --recipe deit_tiny".split(), *small]
        loader = [*BENCH, *"loader --recipe deit_tiny --workers 0 1".split(), *small, *data]
        return [(step, ""), (loader, ""), memory]
    bf16 = f"--device {device} --set engine.amp=bf16".split()
    small, base, *others = ([*BENCH, "step", "--recipe", name, *bf16] for name in MEASURED_RECIPES)
    loader = [*BENCH, "loader", "--recipe", MEASURED_RECIPES[0], *bf16, *data]
    return [
        ([*BENCH, "variants", *bf16], ""),
        (loader, "fed ÷ synthetic .95"),
        ([*loader, "--set", "data.decode=cuda", "--workers", "4", "8"], "fed ÷ synthetic .95"),
        (small, "10,000 images/s, 28 % of the card's rate (published: 8,003 images/s)"),
        (TRAINING, ""),
        memory,
        *((words, "") for words in (base, [*base, *eager], *others)),
    ]


def bench_all(out: Path | None, *, device: str, photographs: Path | None, minutes: float) -> int:
    """Run the checks of tests/gpu, then measure speeds, and tell what they print as it comes: on
    the terminal and, unless it is None, in the file `out`.

    device: "cuda" or "cpu". This process leaves it alone: what uses it is a process of its own. All
    checks together have half of the minutes, and each command a third; what is not begun when all
    are over is no failure. Returns 1 if a check or a command failed, else 0. Raises OneLineError if
    `out` exists.
    """
    if out and (out.exists() or out.suffix != ".md"):
        raise OneLineError(f"{out} exists already or is no .md; choose another --out")
    data = ["--data-dir", str(photographs.resolve())] if photographs else []
    with ExitStack() as stack:
        streams = [sys.stdout]
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            streams.append(stack.enter_context(open(out, "x", encoding="utf-8")))
        report = BenchReport(streams, device, 60 * minutes)
        report.tell("# What vitinit does on this machine\n")
        most = 60 * minutes / 3  # seconds of a command
        report.part([*BENCH, "machine", "--device", device, *data], most)
        if (REPOSITORY / CHECKS[-1]).is_dir():
            report.check(60 * minutes / 2)
        else:
            report.tell("\nNothing is checked: the checks are in the repository alone.\n")
        place = ["--out-dir", stack.enter_context(tempfile.TemporaryDirectory()) + "/run"]
        for words, looked_for in speeds(device, data):
            if words is TRAINING:
                words = words + place
            report.part(words, most, looked_for)
    return int(report.failed)


class BenchReport:
    """What Python programs on the device print, one after the other, until the time is over."""

    def __init__(self, streams: Sequence[TextIO], device: str, seconds: float) -> None:
        self.streams, self.deadline = streams, time.monotonic() + seconds
        self.failed = False
        # The checks would else take the CPU where a GPU is lost.
        self.environment = os.environ | {
            "VITINIT_DEVICE": device,
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        if device == "cpu":
            self.environment["CUDA_VISIBLE_DEVICES"] = ""

    def tell(self, text: str) -> None:
        for stream in map(LossyStream, self.streams):  # a closed terminal, a full disk
            print(text, end="", file=stream, flush=True)

    def part(self, words: Sequence[str], seconds: float, looked_for: str = "") -> str:
        """Run Python within some seconds, all that one that hangs has; return what it printed."""
        title = "Is it right?" if "pytest" in words else f"`python {' '.join(words)}`"
        self.tell(f"\n## {title}\n\n")
        if looked_for:
            self.tell(f"Looked for on an H100: {looked_for}.\n\n")
        seconds = min(seconds, self.deadline - time.monotonic())
        if seconds <= 0:
            self.tell("Not begun: the time is over.\n")
            return ""
        fence = "" if list(words[:3]) == BENCH else "```\n"  # which prints Markdown
        self.tell(fence)
        status, printed = run_within(words, seconds, self.environment, self.tell)
        self.tell(fence)
        if status is None:
            self.tell(f"\n**Ended** after {seconds:.0f} s, all that it has.\n")
            self.failed |= time.monotonic() < self.deadline
        elif status:
            self.tell(f"\n**Failed**: exit status {status}.\n")
            self.failed = True
        return printed

    def check(self, seconds: float) -> None:
        """Run all checks within some seconds. One that hangs or crashes, or meets an error of
        CUDA's, ends its process; those that it has not begun follow in another.
        """
        end = time.monotonic() + seconds
        begun: list[str] = []
        count = 1  # of checks, until pytest says it
        while len(begun) < count:
            others = [f"--deselect={name}" for name in begun]
            printed = self.part([*CHECKS, *others], end - time.monotonic())
            names = re.findall(r"^(\S+\.py::\w+(?:\[.*?\])?) ", printed, re.MULTILINE)
            collected = re.search(r"collected (\d+)", printed)
            count = int(collected[1]) if collected and names else 0
            begun += names


def run_within(
    words: Sequence[str],
    seconds: float,
    environment: Mapping[str, str],
    tell: Callable[[str], object],
) -> tuple[int | None, str]:
    """Run Python for `seconds` at most, then kill all that it started; `tell` what it prints.

    Returns its exit status, None if it was killed, and all that it printed. It prints to a file: a
    pipe would be open for as long as a process that cannot be killed hangs in the driver.
    """
    status, printed = None, ""
    with (
        tempfile.NamedTemporaryFile() as file,
        open(file.name, encoding="utf-8", errors="replace") as output,
    ):
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=REPOSITORY,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while status is None and seconds > 0:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(min(seconds, 1.0))
                seconds -= 1.0
                text = output.read()
                tell(text)
                printed += text
        finally:  # also Ctrl-C, which does not reach its session
            with suppress(OSError):  # nothing of it is left
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
    return status, printed
