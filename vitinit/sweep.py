"""Many runs of train.py, one after another: every init, every variant, every seed.

    python -m vitinit.sweep --recipe quickstart --init default,mimetic,impulse --seeds 0-4
    python -m vitinit.sweep --recipe quickstart --init impulse --seeds 0,1,2 \\
        --variant paper --variant base-values init.options.value_init=base

Each run has a folder <recipe>-<init>[-<variant>]-s<seed> in --out-dir. The same command again skips
what is finished and resumes what was cut off. Ctrl-C and SIGTERM end the sweep once the running run
has saved its checkpoint. A run that fails is reported at the end; the others go on.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .command_line import Parser, integer, run_program
from .compare import compare
from .recipe.files import RecipeError, parse_override
from .recipe.resolve import fresh_recipe
from .recipe.sections import Recipe
from .runs.folder import RunFolder
from .runs.groups import read_run
from .runs.resume import left_without_checkpoint
from .train.interruption import STOP_SIGNALS
from .train.state import restored_progress

REPOSITORY = Path(__file__).resolve().parent.parent
TRAIN = REPOSITORY / "train.py"
MOST_RUNS = 1_000               # of a sweep; each is planned before the first starts


@dataclass(frozen=True)
class PlannedRun:
    """One run of the sweep: its recipe, train.py's arguments, and how far it is."""

    folder: Path
    recipe: Recipe
    arguments: list[str]
    done: int | None            # epochs safe in last.pt; None where there is no run yet

    @property
    def epochs(self) -> int:
        return recipe_epochs(self.recipe)

    @property
    def finished(self) -> bool:
        return self.done == self.epochs

    @property
    def state(self) -> str:
        if self.finished:
            return "done"
        return "new" if self.done is None else f"to go on after {self.done} of {self.epochs} epochs"


# ---------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m vitinit.sweep", description=__doc__)
    parser.add_argument("--recipe", required=True, help="name in recipes/, or path of a .toml file")
    parser.add_argument("--init", help="names with commas between them; default: the recipe's own")
    parser.add_argument("--seeds", required=True, help="such as 0-4 or 0,2,5")
    parser.add_argument("--variant", action="append", nargs="+", default=[],
                        metavar=("NAME", "SECTION.KEY=VALUE"),
                        help="a name, and what --set takes, for a further run of each init and "
                             "seed; may be repeated")
    parser.add_argument("--data-dir", help="data.root: folder of the data set")
    parser.add_argument("--out-dir", type=Path, default=Path("runs"),
                        help="folder of the runs' folders; default runs")
    parser.add_argument("--nproc", type=integer(1, 2**15), default=1,
                        help="processes of a run, started by torchrun if more than 1")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and end")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="override any key of the recipe in every run; may be repeated")
    args = parser.parse_args(arguments)
    args.seeds = parse_seeds(args.seeds)
    return args


def parse_seeds(text: str) -> list[int]:
    """'0-2,7' → [0, 1, 2, 7]; raises RecipeError for anything else."""
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,19})(?:-(\d{1,19}))?", part.strip(), flags=re.ASCII)
        span = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
        if not span:
            raise RecipeError(f"--seeds {text}: '{part}' is no seed; expected such as 0-4 or 0,2,5")
        if len(seeds) + span.stop - span.start > MOST_RUNS:
            raise RecipeError(f"--seeds {text}: expected at most {MOST_RUNS} runs in a sweep")
        seeds += span
    if len(set(seeds)) < len(seeds):
        raise RecipeError(f"--seeds {text}: names a seed twice")
    return seeds


# ---------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------


def plan_runs(args: argparse.Namespace) -> list[PlannedRun]:
    """Every run, seeds outermost, so that each init has a run before any has a second one.

    Raises RecipeError or CheckpointError for whatever is known to be wrong before the first run.
    """
    variants = args.variant or [[""]]
    for name, *sets in args.variant:
        if not re.fullmatch(r"[\w.-]+", name):
            raise RecipeError(f"--variant {' '.join([name, *sets])}: expected a name of letters, "
                              "digits, '_', '-' and '.' first, then section.key=value")
    for change in map(parse_override, [*args.set, *(text for _, *sets in variants for text in sets)]):
        if change.key == "run.seed":
            raise RecipeError(f"{change.text}: seeds go by --seeds, which names the runs' folders")
    inits = args.init.split(",") if args.init is not None else [None]
    count = len(args.seeds) * len(inits) * len(variants)
    if count > MOST_RUNS:
        raise RecipeError(f"{len(args.seeds)} seeds, {len(inits)} inits and {len(variants)} variants "
                          f"are {count} runs; expected at most {MOST_RUNS} in a sweep")
    runs = [plan_run(args, init, seed, name, sets)
            for seed in args.seeds for init in inits for name, *sets in variants]
    for number, run in enumerate(runs):
        for other in runs[:number]:
            if run.folder == other.folder:
                raise RecipeError(f"two runs would share the folder {run.folder}; expected another "
                                  "init, variant name or seed for each")
            if run.recipe == other.recipe:
                raise RecipeError(f"{other.folder} and {run.folder} would be the same run; seeds "
                                  "go by --seeds alone, and each variant sets something else")
    return runs


def plan_run(args: argparse.Namespace, init: str | None, seed: int, variant: str,
             sets: list[str]) -> PlannedRun:
    """One run, its recipe resolved and held against what its folder has already."""
    sets = args.set + sets
    try:
        recipe = fresh_recipe(args.recipe, init=init, seed=seed, data_dir=args.data_dir, sets=sets,
                              recipes=REPOSITORY / "recipes", say=lambda line: None)
    except RecipeError as error:
        raise RecipeError(f"--variant {variant}: {error}" if variant else str(error)) from None
    name = "-".join(filter(None, [recipe.name, recipe.init.name, variant, f"s{seed}"]))
    folder = args.out_dir / name
    arguments = ["--recipe", args.recipe, "--seed", str(seed), "--out-dir", str(folder),
                 "--resume", "auto"]
    for flag, value in (("--init", init), ("--data-dir", args.data_dir)):
        arguments += [flag, value] if value is not None else []
    arguments += [word for text in sets for word in ("--set", text)]
    return PlannedRun(folder, recipe, arguments, epochs_done(folder, recipe))


def recipe_epochs(recipe: Recipe) -> int:
    return recipe.schedule.epochs + recipe.schedule.cooldown_epochs


def epochs_done(path: Path, recipe: Recipe) -> int | None:
    """The finished epochs of the run in this folder, None where there is none yet.

    A finished run may have lost its checkpoints. Raises RecipeError if that is a run of another
    recipe, and CheckpointError if it is an unfinished one without a checkpoint to go on from.
    """
    folder = RunFolder(path)
    if not folder.holds_checkpoint():
        return recipe_epochs(recipe) if left_without_checkpoint(folder, recipe) else None
    other = read_run(path).departure(recipe)
    if other:
        raise RecipeError(f"{other}; choose another --out-dir")
    return restored_progress(folder.load_last(glance=True)["progress"], folder.read_from).epochs


# ---------------------------------------------------------------------------------------------
# The runs
# ---------------------------------------------------------------------------------------------


class Launcher:
    """Runs programs one at a time and hands each signal to stop on to the running one, once.

    A program gets a session of its own, because a terminal sends Ctrl-C to all programs of a
    session, and the one that is handed on would come on top.
    """

    def __init__(self) -> None:
        self.stopped_by = 0                          # the signal's number
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> Launcher:
        self.handlers = {number: signal.signal(number, self._stop) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self.stopped_by = number
        if self.process is not None:
            # Of a closed terminal and a time limit it hears as of SIGTERM, which every torchrun knows.
            self.process.send_signal(number if number == signal.SIGINT else signal.SIGTERM)

    def run(self, command: list[str]) -> str | None:
        """None if the program ended well, else its error in a line; what it prints is passed on."""
        error = ""
        # Else torchrun would kill what has not saved its checkpoint after 30 s.
        environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600", **os.environ}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace",
                              env=environment, start_new_session=True) as self.process:
            for line in self.process.stderr:
                sys.stderr.write(line)
                # Of all that torchrun prints after a failure, train.py's own line says why.
                if line.strip() and not error.startswith("train.py: "):
                    error = line
        status, self.process = self.process.returncode, None
        return None if status == 0 else error.strip() or f"ended with status {status}"


def command(run: PlannedRun, nproc: int) -> list[str]:
    program = [str(TRAIN), *run.arguments]
    if nproc > 1:
        program = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}",
                   *program]
    return [sys.executable, *program]


def sweep(args: argparse.Namespace) -> int:
    """The plan, its runs, the comparison; returns the exit status."""
    if not TRAIN.is_file():
        raise RecipeError(f"{TRAIN}: no such file; a sweep needs the repository around vitinit/")
    runs = plan_runs(args)
    finished = [run.folder for run in runs if run.finished]
    print(f"plan    {len(runs)} runs, {len(finished)} of them done")
    for run in runs:
        print(f"        {run.folder}: {run.state}")
    if args.dry_run:
        return 0

    failures: dict[Path, str] = {}
    with Launcher() as launcher:
        for number, run in enumerate(runs, 1):
            if run.finished:
                continue
            print(f"\nrun     {number} of {len(runs)}, {run.folder}", flush=True)
            error = launcher.run(command(run, args.nproc))
            if launcher.stopped_by:
                print(f"stopped by signal {launcher.stopped_by}; the same command goes on")
                return 128 + launcher.stopped_by
            if error is None:
                finished.append(run.folder)
            else:
                failures[run.folder] = error

    print(flush=True)
    if finished:
        compare([run.folder for run in runs if run.folder in finished])
    for folder, error in failures.items():
        print(f"vitinit.sweep: {folder} failed: {error}", file=sys.stderr)
    return 1 if failures else 0


def main(arguments: list[str] | None = None) -> int:
    return run_program("vitinit.sweep", lambda: sweep(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
