"""Run train.py many times: for every init, every variant and every seed.

    python -m vitinit.sweep --recipe quickstart --init default,mimetic,impulse --seeds 0-4
    python -m vitinit.sweep --recipe quickstart --init impulse --seeds 0,1,2 \\
        --variant paper --variant base-values init.options.value_init=base

    python -m vitinit.sweep --recipe cifar10_10k --seeds 0-9 --jobs 2 --threads 1

Each run has a folder <recipe>-<init>[-<variant>]-s<seed> in --out-dir. Running the same command
again skips finished runs and resumes interrupted ones. On Ctrl-C or SIGTERM the current runs save
their checkpoints, and the sweep ends. If a run fails, the others go on; the failure is reported at
the end.

--jobs N does N runs side by side. Each has its own GPUs, or T CPU threads with --threads T, and
prints to logs/<folder>.log in --out-dir. The number of runs side by side does not change the
results of a run. On a CPU the number of threads changes their last digits: use the same --threads
for runs that are to be compared.

--only K/N does the K-th of N parts of the plan, for separate jobs on a cluster.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .command_line import Parser, integer, run_program
from .compare import compare
from .recipe.files import RecipeError, fresh_recipe, parse_override
from .recipe.sections import Recipe
from .runs.folder import RunFolder
from .runs.records import read_run
from .runs.resume import DONE, require_same_recipe, task_in
from .train.interruption import STOP_SIGNALS
from .train.state import restored_progress

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
MOST_RUNS = 1_000               # in a sweep; all are planned before the first one starts
LOOK_EVERY = 0.2                # seconds between two looks at the runs and at signals
# By default torchrun kills processes 30 s after a signal, perhaps too soon for a checkpoint.
PATIENCE = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}


class PlannedRun(NamedTuple):
    """One run of the sweep: its recipe, and how much of it is done already."""

    folder: Path
    recipe: Recipe
    arguments: list[str]        # of train.py
    epochs: int                 # that the recipe asks for, cool-down included
    done: int | None            # epochs finished by the last checkpoint; None: no run yet

    @property
    def state(self) -> str:
        """How much is done, in words, for the printed plan."""
        return ("new" if self.done is None else "done" if self.done == self.epochs else
                f"to go on after {self.done} of {self.epochs} epochs")


# ---------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------


def parse_seeds(text: str) -> list[int]:
    """Parse seeds and ranges of seeds: "0-2,7" → [0, 1, 2, 7]."""
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part.strip(), flags=re.ASCII)
        span = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
        if not span:
            raise argparse.ArgumentTypeError(f"'{part}' is no seed; expected such as 0-4 or 0,2,5")
        seeds += span[:MOST_RUNS + 1]                # of more the plan says that they are too many
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text}: names a seed twice")
    return seeds


def parse_part(text: str) -> slice:
    """Parse the argument of --only: "K/N" → the slice of every N-th run from the K-th on."""
    part = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, flags=re.ASCII)
    if not part or not 1 <= int(part[1]) <= int(part[2]):
        raise argparse.ArgumentTypeError(f"{text}: expected K/N with 1 ≤ K ≤ N, such as 1/4")
    return slice(int(part[1]) - 1, None, int(part[2]))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; --seeds becomes a list of integers, and --only a slice."""
    parser = Parser(prog="python -m vitinit.sweep", description=__doc__)
    parser.add_argument("--recipe", required=True, help="name in recipes/, or path of a .toml file")
    parser.add_argument("--init", help="names separated by commas; default: the recipe's own")
    parser.add_argument("--seeds", required=True, type=parse_seeds, help="such as 0-4 or 0,2,5")
    parser.add_argument("--variant", action="append", nargs="+", metavar=("NAME", "KEY=VALUE"),
                        help="a name and overrides as for --set: one run of each init and seed "
                             "with these overrides; may be repeated")
    parser.add_argument("--data-dir", help="data.root: folder of the data set")
    parser.add_argument("--out-dir", type=Path, default=Path("runs"),
                        help="folder of the runs' folders; default runs")
    parser.add_argument("--nproc", type=integer(1, 2**15), default=1,
                        help="processes per run, started by torchrun if more than 1")
    parser.add_argument("--jobs", type=integer(1, MOST_RUNS), default=1, help="runs side by side")
    parser.add_argument("--threads", type=integer(1, 2**15),
                        help="CPU threads per process; by default the machine's threads are "
                             "divided among the jobs")
    parser.add_argument("--only", default="1/1", type=parse_part, metavar="K/N",
                        help="the K-th of N parts of the plan")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and end")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="override any key of the recipe in every run; may be repeated")
    return parser.parse_args(arguments)


def plan_runs(args: argparse.Namespace) -> list[PlannedRun]:
    """Plan all runs. The first seed comes first for all inits and variants, then the next seed.

    Raises RecipeError or CheckpointError for everything that can be found wrong before the first
    run starts.
    """
    variants, inits = args.variant or [[""]], args.init.split(",") if args.init else [None]
    for name, *sets in args.variant or []:
        if not re.fullmatch(r"[\w.-]+", name):
            raise RecipeError(f"--variant {' '.join([name, *sets])}: expected a name of letters, "
                              "digits, '_', '-' and '.' first, then section.key=value")
    for text in [*args.set, *(text for _, *sets in variants for text in sets)]:
        if parse_override(text).key == "run.seed":
            raise RecipeError(f"--set {text}: seeds go by --seeds, which names the runs' folders")
    if len(args.seeds) * len(inits) * len(variants) > MOST_RUNS:
        raise RecipeError(f"--seeds, --init and --variant: expected at most {MOST_RUNS} runs")
    runs: dict[Path, PlannedRun] = {}
    for seed in args.seeds:
        for init in inits:
            for name, *sets in variants:
                run = plan_run(args, init, seed, name, [*args.set, *sets])
                if run.folder in runs:
                    raise RecipeError(f"two runs would share the folder {run.folder}; expected "
                                      "another init or variant name for each")
                runs[run.folder] = run
    return list(runs.values())


def plan_run(args: argparse.Namespace, init: str | None, seed: int, variant: str,
             sets: Sequence[str]) -> PlannedRun:
    """Plan one run: resolve its recipe, and compare that with the run its folder may hold already.

    init: None for the recipe's own. variant: its name, or "". sets: all overrides.
    """
    try:
        recipe = fresh_recipe(args.recipe, init=init, seed=seed, data_dir=args.data_dir, sets=sets,
                              say=lambda line: None)
    except RecipeError as error:
        raise RecipeError(f"--variant {variant}: {error}" if variant else str(error)) from None
    words = [recipe.name, recipe.init.name, variant, f"s{seed}"]
    folder = args.out_dir / "-".join(filter(None, words))
    arguments = ["--recipe", args.recipe, "--seed", str(seed), "--out-dir", str(folder),
                 "--resume", "auto"]
    for flag, value in (("--init", init), ("--data-dir", args.data_dir)):
        arguments += [flag, value] if value is not None else []
    arguments += [word for text in sets for word in ("--set", text)]
    epochs, run = recipe.schedule.total_epochs, RunFolder(folder)
    if run.holds_checkpoint():
        require_same_recipe(folder, read_run(folder).keys, recipe.keys)
        progress = run.load_last(glance=True)["progress"]
        done = restored_progress(progress, run.read_from).epochs
    else:                                            # its checkpoints may have been deleted
        done = epochs if task_in(run, recipe, lambda line: None) == DONE else None
    return PlannedRun(folder, recipe, arguments, epochs, done)


def share_machine(args: argparse.Namespace) -> list[dict[str, str]]:
    """Divide the machine among the jobs; return the environment variables of each.

    Every process has one GPU. Jobs of a single process share GPUs if there are fewer GPUs than
    jobs; jobs of several processes that would are a RecipeError. Without --threads the machine's
    threads are divided among all processes; for a single job, torch's default applies.
    """
    jobs, processes, threads = args.jobs, args.nproc, args.threads
    if threads is None and jobs > 1:
        threads = max(1, (os.cpu_count() or 1) // (jobs * processes))
    share = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    if jobs == 1 or not gpus or not torch.cuda.is_available():
        return [share] * jobs
    if processes > 1 and jobs * processes > len(gpus):
        raise RecipeError(f"--jobs {jobs} runs of --nproc {processes} processes need "
                          f"{jobs * processes} GPUs, and {len(gpus)} are visible")
    return [share | {"CUDA_VISIBLE_DEVICES": ",".join(
        gpus[(job * processes + number) % len(gpus)] for number in range(processes))}
        for job in range(jobs)]


# ---------------------------------------------------------------------------------------------
# The runs
# ---------------------------------------------------------------------------------------------


class Job:
    """A run that is going on: its process, and its log, from which it is told how far it is."""

    def __init__(self, run: PlannedRun, nproc: int, environment: dict[str, str], log: Path | None
                 ) -> None:
        """Start train.py. log: the file to which it prints; None: to the terminal.

        It has a session of its own: a terminal sends Ctrl-C to all programs of its session, which
        would otherwise receive it twice. Raises OSError if the log cannot be opened.
        """
        self.run, self.environment, self.log = run, environment, log
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        command = [sys.executable, *(torchrun if nproc > 1 else []), str(TRAIN), *run.arguments]
        how = dict(start_new_session=True, env=PATIENCE | os.environ | environment)
        if log is None:
            self.process = subprocess.Popen(command, **how)
            return
        how["env"]["PYTHONIOENCODING"] = "utf-8"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, **how)
        self.shown = self.last_line("epoch ")        # of an earlier start

    def last_line(self, start: str) -> str:
        """The last line of the log that begins with `start`; "" if there is none."""
        lines = self.log.read_text("utf-8", "replace").splitlines() if self.log else []
        return next((line for line in reversed(lines) if line.startswith(start)), "")

    def show(self) -> None:
        """Print the line of the last epoch, unless the run prints to the terminal itself."""
        if self.log is not None and (line := self.last_line("epoch ")) != self.shown:
            self.shown = line
            print(f"{self.run.folder.name}  {line}", flush=True)

    def error(self) -> str | None:
        """Why the run failed, once it has ended: train.py's line in the log; None if it did not."""
        if self.process.returncode == 0:
            return None
        return self.last_line("train.py: ") or (f"ended with status {self.process.returncode}"
                                                + (f", see {self.log}" if self.log else ""))


def do_runs(runs: Sequence[PlannedRun], nproc: int, environments: list[dict[str, str]]
            ) -> tuple[dict[Path, str | None], int]:
    """Do the runs, as many at a time as there are `environments`; a signal is passed on to all.

    Returns folder → error message, or None for a run that finished; and the signal that stopped the
    sweep, or 0.
    """
    received: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: received.append(number))
                for number in STOP_SIGNALS}
    waiting, free, passed_on = list(runs), list(environments), 0
    running: list[Job] = []
    ended: dict[Path, str | None] = {}
    try:
        while running or waiting and not received:
            while waiting and free and not received:
                run = waiting.pop(0)
                log = run.folder.parent / "logs" / f"{run.folder.name}.log"
                if len(environments) == 1:
                    log = None
                    print(f"\nrun     {run.folder}, {len(waiting)} to follow", flush=True)
                try:
                    running.append(Job(run, nproc, free[0], log))
                    free.pop(0)
                except OSError as error:             # for example, of a full disk
                    ended[run.folder] = str(error)
            for number in received[passed_on:]:
                for job in running:
                    # A closed terminal and a time limit are passed on as SIGTERM, which every
                    # version of torchrun handles.
                    job.process.send_signal(number if number == signal.SIGINT else signal.SIGTERM)
                passed_on += 1
            time.sleep(LOOK_EVERY)
            for job in list(running):
                has_ended = job.process.poll() is not None
                job.show()
                if has_ended:
                    running.remove(job)
                    free.append(job.environment)
                    ended[job.run.folder] = job.error()
    finally:
        for job in running:                          # after an error of this program's own
            job.process.terminate()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ended, received[-1] if received else 0


def sweep(args: argparse.Namespace) -> int:
    """Print the plan, do its runs, compare them; return the exit status."""
    if not TRAIN.is_file():
        raise RecipeError(f"{TRAIN}: no such file; a sweep needs the repository, which has it")
    environments = share_machine(args)
    plan = plan_runs(args)
    runs = plan[args.only]
    finished = {run.folder for run in runs if run.state == "done"}
    share = " ".join(f"{name}={value}" for name, value in environments[0].items())
    print(f"plan    {len(runs)} runs, {len(finished)} of them done"
          + (f"; a part of a plan of {len(plan)}" if len(runs) < len(plan) else "")
          + (f"; {args.jobs} at a time, the first with {share}" if args.jobs > 1 else ""))
    for run in runs:
        print(f"        {run.folder}: {run.state}")
    if args.dry_run:
        return 0
    ended, stopped_by = do_runs([run for run in runs if run.folder not in finished], args.nproc,
                                environments)
    if stopped_by:
        print(f"stopped by signal {stopped_by}; the same command goes on")
        return 128 + stopped_by
    failures = {folder: error for folder, error in ended.items() if error is not None}
    print(flush=True)
    if len(failures) < len(runs):
        compare([run.folder for run in runs if run.folder not in failures])
    for folder, error in failures.items():
        print(f"vitinit.sweep: {folder} failed: {error}", file=sys.stderr)
    return 1 if failures else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the program with these arguments (default: the command line); return the exit status."""
    return run_program("vitinit.sweep", lambda: sweep(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
