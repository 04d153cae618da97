"""Train many times: for every init, every variant and every seed.

    vitinit sweep --recipe quickstart --init default,mimetic,impulse --seeds 0-4
    vitinit sweep --recipe quickstart --init impulse --seeds 0,1,2 \\
        --variant paper --variant base-values init.options.value_init=base
    vitinit sweep --recipe cifar10_10k --seeds 0-9 --jobs 2 --threads 1

Each run has a folder <recipe>-<init>[-<variant>]-s<seed> in --out-dir, and prints to
logs/<folder>.log there; the terminal shows a line for each. The same command again skips finished
runs and resumes interrupted ones. On Ctrl-C or SIGTERM the current runs save their checkpoints, and
the sweep ends. If a run fails, the others go on, and the end says so.

--jobs N does N runs side by side, on the GPUs in turn, or in T CPU threads each with --threads T.
On a CPU the number of threads changes the last digits of results, that of runs side by
side does not: use the same --threads for runs that are to be compared.

--only K/N does the K-th of N parts of the plan, for separate jobs on a cluster.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Sequence
from itertools import cycle, islice, product
from pathlib import Path
from typing import NamedTuple

import torch

from ..base.files import FileError, read_bytes
from ..base.messages import ProgressBar, counted, say
from ..recipe.files import PACKAGE, RecipeError, load_recipe, overrides
from ..runs.folder import LONGEST_LINES, RunFolder
from ..runs.resume import RunLock, ToDo, begun_with, require_same, to_do_in
from ..runs.watching import Watchers
from ..train.device import automatic_values, cores, this_device
from ..train.interruption import StopRequest
from .shared.command_line import Parser, add_log, add_set, add_trust, integer, main_of
from .shared.records import read_run, read_runs
from .shared.results import compare_runs

TRAIN_WORDS = ["-m", "vitinit", "train"]  # the words that start a run
LOOK_EVERY = 0.2  # seconds between two looks at the runs and at signals
# By default torchrun kills processes 30 s after a signal, perhaps too soon for a checkpoint.
PATIENCE = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}
# Modules are those of this package and of Python's own path, and none of the current folder.
SAFE_PATH = {
    "PYTHONSAFEPATH": "1",
    "PYTHONPATH": os.pathsep.join(
        [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
}


class PlannedRun(NamedTuple):
    folder: Path
    arguments: list[str]  # of the training program
    state: str  # how much of it is done already, in words
    epochs: int  # in all
    automatic_keys: list[str]  # which its recipe leaves to the device


def parse_seeds(text: str) -> list[int]:
    """Parse seeds and ranges of seeds: "0-2,7" → [0, 1, 2, 7]."""
    seeds: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part.strip(), flags=re.ASCII)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if first > last:
            raise ArgumentTypeError(f"'{part}' is no seed; expected such as 0-4 or 0,2,5")
        seeds += range(first, last + 1)
    return seeds


def parse_part(text: str) -> slice:
    """Parse the argument of --only: "K/N" → the slice of every N-th run from the K-th on."""
    part = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, flags=re.ASCII)
    if not part or not 1 <= int(part[1]) <= int(part[2]):
        raise ArgumentTypeError(f"{text}: expected K/N with 1 ≤ K ≤ N, such as 1/4")
    return slice(int(part[1]) - 1, None, int(part[2]))


def parse_arguments(arguments: list[str]) -> Namespace:
    """Parse the command line; --seeds becomes a list of integers, and --only a slice."""
    parser = Parser(prog="vitinit sweep", description=__doc__)
    parser.add_argument("--recipe", required=True, help="name in recipes/, or path of a .toml file")
    parser.add_argument("--init", help="names separated by commas; default: the recipe's own")
    parser.add_argument("--seeds", required=True, type=parse_seeds, help="such as 0-4 or 0,2,5")
    parser.add_argument(
        "--variant",
        action="append",
        nargs="+",
        default=[],
        metavar=("NAME", "KEY=VALUE"),
        help="a name and overrides as for --set; may be repeated",
    )
    parser.add_argument("--data-dir", help="data.root: folder of the data set")
    parser.add_argument("--out-dir", type=Path, default="runs", help="folder of the runs' folders")
    parser.add_argument("--nproc", type=integer(1, 2**15), default=1, help="processes per run")
    parser.add_argument("--jobs", type=integer(1), default=1, help="runs side by side")
    parser.add_argument(
        "--threads",
        type=integer(1, 2**15),
        help="CPU threads per process; by default divided among the jobs",
    )
    parser.add_argument(
        "--only",
        default="1/1",
        type=parse_part,
        metavar="K/N",
        help="the K-th of N parts of the plan",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and end")
    add_set(parser, "override any key of the recipe in every run; may be repeated")
    add_log(parser)
    add_trust(parser)
    args = parser.parse_args(arguments)
    for name, *sets in args.variant:
        if not re.fullmatch(r"[\w.-]+", name):
            parser.error(
                f"--variant {' '.join([name, *sets])}: expected a name of letters, "
                "digits, '_', '-' and '.' first, then section.key=value"
            )
    Watchers(args.log)  # or an error, before any run
    return args


def plan_runs(args: Namespace) -> list[PlannedRun]:
    """Plan all runs: the first seed for all inits and variants, then the next seed."""
    inits = args.init.split(",") if args.init else [None]
    runs = []
    for seed, init, (name, *sets) in product(args.seeds, inits, args.variant or [[""]]):
        runs.append(plan_run(args, init, seed, name, args.set + sets))
    folder, count = Counter(run.folder for run in runs).most_common(1)[0]
    if count > 1:
        raise RecipeError(
            f"{count} runs would share the folder {folder}; expected another seed, "
            "init or name of a variant for each"
        )
    # Runs that are compared have one precision: that of those that have begun, which keep theirs.
    automatic = [run for run in runs if run.automatic_keys]
    stated = automatic_values(this_device()) | begun_with(run.folder for run in automatic)
    for run in automatic:
        if not (run.folder / "recipe.toml").exists():
            for key in run.automatic_keys:
                run.arguments.extend(["--set", f"{key}={stated[key]}"])
    return runs


def plan_run(
    args: Namespace, init: str | None, seed: int, variant: str, sets: Sequence[str]
) -> PlannedRun:
    """Plan one run: resolve its recipe, and compare that with the run its folder may hold already.
    init: None for the recipe's own. variant: a name, or "".
    """
    changes = overrides(init=init, seed=seed, data_dir=args.data_dir, sets=sets)
    recipe = load_recipe(args.recipe, changes)
    parts = (recipe.name, recipe.init.name, variant, f"s{recipe.run.seed}")
    folder = args.out_dir / "-".join(filter(None, parts))
    arguments = ["--recipe", args.recipe, "--seed", str(seed), "--out-dir", str(folder)]
    arguments += ["--resume", "auto"]
    further = {
        "--init": [init],
        "--data-dir": [args.data_dir],
        "--set": sets,
        "--log": args.log,
        "--import": args.imports,
    }
    for option, values in further.items():
        for value in filter(None, values):
            arguments += [option, value]
    if args.trust_teacher:
        arguments.append("--trust-teacher")
    epochs = recipe.schedule.total_epochs
    run = RunFolder(folder)
    state = "new"
    if run.holds_checkpoint():
        require_same(folder, read_run(folder).keys, recipe.keys)
        done = run.load_last(glance=True)["progress"]["epochs"]
        state = "done" if done == epochs else f"to go on after {done} of {epochs} epochs"
    elif to_do_in(run, recipe) is ToDo.NOTHING:  # its checkpoints may be deleted
        state = "done"
    return PlannedRun(folder, arguments, state, epochs, recipe.automatic_keys)


def share_machine(jobs: int, nproc: int, threads: int | None) -> list[dict[str, str]]:
    """Divide the machine among the jobs; return the environment variables of each. Every process
    has one GPU; only jobs of a single process may share one.
    """
    if not threads and jobs > 1:
        threads = max(1, cores() // (jobs * nproc))
    share = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    if jobs == 1 or not torch.cuda.is_available():
        return [share] * jobs
    every = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or every).split(",")
    if nproc > 1 and jobs * nproc > len(gpus):
        raise RecipeError(
            f"--jobs {jobs} runs of --nproc {nproc} processes need {jobs * nproc} "
            f"GPUs, and {len(gpus)} are visible"
        )
    turns = cycle(gpus)
    return [share | {"CUDA_VISIBLE_DEVICES": ",".join(islice(turns, nproc))} for _ in range(jobs)]


def start(run: PlannedRun, nproc: int, share: dict[str, str], log: Path) -> subprocess.Popen:
    """Start a run, which prints to the file `log`; FileError if another run is writing in its folder,
    perhaps to that file.
    """
    command = [sys.executable]
    if nproc > 1:
        command += f"-m torch.distributed.run --standalone --nproc_per_node={nproc}".split()
    log.parent.mkdir(parents=True, exist_ok=True)
    if (run.folder / "run.lock").exists():
        with RunLock() as lock:
            lock.take(run.folder)
    log.unlink(missing_ok=True)  # perhaps a link
    with open(log, "wb") as output:
        # In a session of its own, or a terminal's Ctrl-C would reach it beside the one passed on.
        return subprocess.Popen(
            command + TRAIN_WORDS + run.arguments,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=PATIENCE | os.environ | SAFE_PATH | share,
        )


def last_line(log: Path, beginning: str) -> str:
    """The last line of the log that begins so; "" if there is none."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith(beginning)), "")


class Job(NamedTuple):
    """A run that is being done."""

    run: PlannedRun
    process: subprocess.Popen
    share: dict[str, str]  # its part of the machine, as environment variables
    log: Path  # what it prints to
    bar: ProgressBar  # of its epochs, below that of all runs
    began: float  # by time.monotonic

    def advance(self) -> None:
        """Show how many epochs are done."""
        if not self.bar.disable:
            path = RunFolder(self.run.folder).metrics.path
            # Parsing all lines at each look would take time from the runs.
            self.bar.n = read_bytes(path, default=b"", limit=LONGEST_LINES).count(b"\n")
            self.bar.refresh()


def do_runs(
    runs: Sequence[PlannedRun], nproc: int, shares: Sequence[dict[str, str]]
) -> tuple[dict[Path, str], int]:
    """Do the runs, as many at a time as there are `shares`; a signal is passed on to all. Returns
    folder → error of each run that failed by itself, and the signal that stopped all, or 0.
    """
    waiting, free = list(runs), list(shares)
    passed_on = False
    jobs: list[Job] = []
    failures: dict[Path, str] = {}

    def pass_on(number: int) -> None:  # every version of torchrun handles these two
        for job in jobs:
            job.process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    with (
        StopRequest(second=lambda: pass_on(signal.SIGINT)) as stop,
        ProgressBar("sweep", len(runs), unit="runs") as bar,
    ):
        try:
            while jobs or waiting and not stop.number:
                while waiting and free and not stop.number:
                    run, share = waiting.pop(0), free.pop(0)
                    name = run.folder.name
                    log = run.folder.parent / "logs" / f"{name}.log"
                    try:
                        process = start(run, nproc, share, log)
                    except FileError as error:
                        failures[run.folder] = str(error)
                        free.append(share)
                        bar.update()
                        continue
                    epochs = ProgressBar(name, run.epochs, unit="epochs", shown=bar.terminal)
                    jobs.append(Job(run, process, share, log, epochs, time.monotonic()))
                if stop.number and not passed_on:
                    pass_on(stop.number)
                    passed_on = True
                time.sleep(LOOK_EVERY)
                for job in list(jobs):
                    job.advance()
                    if job.process.poll() is not None:
                        finish(job, failures, stopped=bool(stop.number))
                        jobs.remove(job)
                        free.append(job.share)
                        bar.update()
        finally:
            for job in jobs:  # after an error of this program's own
                job.process.terminate()
    return failures, stop.number


def finish(job: Job, failures: dict[Path, str], *, stopped: bool) -> None:
    """Say how a run that has ended went; add to `failures` why, unless it was stopped."""
    job.bar.close()
    folder, status = job.run.folder, job.process.returncode
    words = last_line(job.log, "done ").removeprefix("done").strip() or last_line(job.log, "epoch ")
    if words:
        say(f"run     {folder.name}: {words}, {time.monotonic() - job.began:.0f} s")
    if status and not stopped:
        ended = f"ended with status {status}, see {job.log}"
        failures[folder] = last_line(job.log, "vitinit train: ") or ended


def sweep(args: Namespace) -> int:
    """Print the plan, do its runs, compare them; return the exit status."""
    shares = share_machine(args.jobs, args.nproc, args.threads)
    runs = plan_runs(args)[args.only]
    left = [run for run in runs if run.state != "done"]
    line = f"plan    {counted(len(runs), 'run')}, {len(runs) - len(left)} of them done"
    if args.jobs > 1:
        line += f"; {args.jobs} at a time, the first with {shares[0]}"
    say(line)
    for run in runs:
        say(f"        {run.folder}: {run.state}")
    if args.dry_run:
        return 0
    failures, stopped_by = do_runs(left, args.nproc, shares)
    for folder, error in failures.items():
        say(f"vitinit sweep: {folder} failed: {error}", sys.stderr)
    if stopped_by:
        say(f"stopped by {signal.Signals(stopped_by).name}; the same command goes on")
        return 128 + stopped_by
    if len(failures) < len(runs):
        done = read_runs([run.folder for run in runs if run.folder not in failures])
        print(f"\n{compare_runs(done)[1]}", flush=True)
        paths = shlex.join(str(run.path) for run in done)
        say(f"next    vitinit figures report {paths} --out report.html")
    return int(bool(failures))


main = main_of("vitinit sweep", parse_arguments, sweep)
