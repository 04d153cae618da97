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
prints to logs/<folder>.log in --out-dir. The number of runs side by side does not change the results
of a run. On a CPU the number of threads changes their last digits: use the same --threads for runs
that are to be compared.

--only K/N does the K-th of N parts of the plan, for separate jobs on a cluster.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from .command_line import Parser, integer, run_program
from .compare import compare
from .launcher import Launcher, SideBySide, shares
from .recipe.files import RECIPES, RecipeError, parse_override
from .recipe.resolve import fresh_recipe
from .recipe.sections import Recipe
from .runs.folder import RunFolder
from .runs.groups import read_run
from .runs.resume import left_without_checkpoint
from .train.checkpoint import CheckpointError
from .train.state import restored_progress

REPOSITORY = Path(__file__).resolve().parent.parent
TRAIN = REPOSITORY / "train.py"
MOST_RUNS = 1_000               # in a sweep; all are planned before the first one starts


@dataclass(frozen=True)
class PlannedRun:
    """One run of the sweep: its recipe, and how much of it is done already."""

    folder: Path
    recipe: Recipe
    arguments: list[str]        # of train.py
    done: int | None            # epochs finished by the last checkpoint; None: no run yet

    @property
    def epochs(self) -> int:
        """The number of epochs that the recipe asks for, cool-down included."""
        return recipe_epochs(self.recipe)

    @property
    def finished(self) -> bool:
        """Whether all epochs were done before the sweep began."""
        return self.done == self.epochs

    @property
    def state(self) -> str:
        """The same in words, for the printed plan."""
        if self.finished:
            return "done"
        return "new" if self.done is None else f"to go on after {self.done} of {self.epochs} epochs"


# ---------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; --seeds becomes a list of integers."""
    parser = Parser(prog="python -m vitinit.sweep", description=__doc__)
    parser.add_argument("--recipe", required=True, help="name in recipes/, or path of a .toml file")
    parser.add_argument("--init", help="names separated by commas; default: the recipe's own")
    parser.add_argument("--seeds", required=True, help="such as 0-4 or 0,2,5")
    parser.add_argument("--variant", action="append", nargs="+", default=[],
                        metavar=("NAME", "SECTION.KEY=VALUE"),
                        help="a name and overrides as for --set: one run of each init and seed with "
                             "these overrides; may be repeated")
    parser.add_argument("--data-dir", help="data.root: folder of the data set")
    parser.add_argument("--out-dir", type=Path, default=Path("runs"),
                        help="folder of the runs' folders; default runs")
    parser.add_argument("--nproc", type=integer(1, 2**15), default=1,
                        help="processes per run, started by torchrun if more than 1")
    parser.add_argument("--jobs", type=integer(1, MOST_RUNS), default=1, help="runs side by side")
    parser.add_argument("--threads", type=integer(1, 2**15),
                        help="CPU threads per process; by default the machine's threads are divided "
                             "among the jobs")
    parser.add_argument("--only", type=part_of_plan, metavar="K/N",
                        help="the K-th of N parts of the plan")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and end")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="override any key of the recipe in every run; may be repeated")
    args = parser.parse_args(arguments)
    args.seeds = parse_seeds(args.seeds)
    return args


def parse_seeds(text: str) -> list[int]:
    """Parse seeds and ranges of seeds: "0-2,7" → [0, 1, 2, 7]. RecipeError for anything else."""
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


def part_of_plan(text: str) -> tuple[int, int]:
    """Parse the argument of --only: "2/5", the second of five parts → (2, 5)."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, flags=re.ASCII)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text}: expected K/N with 1 ≤ K ≤ N, such as 1/4")
    return int(found[1]), int(found[2])


# ---------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------


def plan_runs(args: argparse.Namespace) -> list[PlannedRun]:
    """Plan all runs. The first seed comes first for all inits and variants, then the next seed.

    Raises RecipeError or CheckpointError for everything that can be found wrong before the first
    run starts.
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
    """Plan one run: resolve its recipe, and compare that with the run its folder may hold already.

    init: None for the recipe's own. variant: its name, or "". sets: the variant's overrides.
    """
    sets = args.set + sets
    try:
        recipe = fresh_recipe(args.recipe, init=init, seed=seed, data_dir=args.data_dir, sets=sets,
                              recipes=RECIPES, say=lambda line: None)
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
    """The number of epochs of a run, cool-down included."""
    return recipe.schedule.epochs + recipe.schedule.cooldown_epochs


def epochs_done(path: Path, recipe: Recipe) -> int | None:
    """The number of finished epochs of the run in this folder; None if there is no run yet.

    The checkpoints of a finished run may have been deleted. Raises RecipeError for a run of another
    recipe, and CheckpointError for an unfinished run without a checkpoint to resume from.
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


def command(run: PlannedRun, nproc: int) -> list[str]:
    """The command that starts or resumes this run with `nproc` processes."""
    program = [str(TRAIN), *run.arguments]
    if nproc > 1:
        program = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}",
                   *program]
    return [sys.executable, *program]


class Status:
    """The display of several runs side by side: epoch, top-1 and remaining time of each.

    On a terminal each current run has a progress bar; otherwise a line is printed whenever a run
    has finished an epoch.
    """

    def __init__(self, work: SideBySide[PlannedRun]) -> None:
        self.work, self.terminal = work, sys.stderr.isatty()
        self.bars: dict[Path, tqdm] = {}
        self.shown: dict[Path, int] = {}             # per run: finished epochs already shown
        self.began: dict[Path, tuple[float, int]] = {}       # per run: start time, epochs then done

    def __call__(self) -> None:
        """Update the display of all runs, from their metrics.jsonl."""
        running = dict(self.work.slots)
        for slot, run in running.items():
            self.show(slot, run)
        for run, _ in list(self.work.ended):
            self.show(None, run)

    def show(self, slot: int | None, run: PlannedRun) -> None:
        """Update the display of one run. slot: the one it runs in; None: it has ended."""
        if run.folder not in self.began:
            self.began[run.folder] = (time.monotonic(), run.done or 0)
            if self.terminal and slot is not None:
                self.bars[run.folder] = tqdm(desc=run.folder.name, total=run.epochs, unit="epoch",
                                             initial=run.done or 0, position=slot, leave=False,
                                             dynamic_ncols=True)
        try:
            rows = RunFolder(run.folder).metrics.rows()
        except CheckpointError:                      # the run itself reports it
            return
        epochs = rows[-1]["epoch"] if rows else 0
        if epochs > self.shown.get(run.folder, run.done or 0):
            self.shown[run.folder] = epochs
            top1 = rows[-1].get("val_top1")
            found = "" if top1 is None else f"top-1 {top1:.2f} %"
            if run.folder in self.bars:
                bar = self.bars[run.folder]
                bar.set_postfix_str(found, refresh=False)
                bar.update(epochs - bar.n)
            else:
                start, before = self.began[run.folder]
                left = (time.monotonic() - start) / (epochs - before) * (run.epochs - epochs)
                print(f"{run.folder.name}  epoch {epochs}/{run.epochs}  {found}  "
                      f"{left / 60:.0f} min left", flush=True)
        if slot is None and run.folder in self.bars:
            self.bars.pop(run.folder).close()


def sweep(args: argparse.Namespace) -> int:
    """Print the plan, do its runs, compare them; return the exit status."""
    if not TRAIN.is_file():
        raise RecipeError(f"{TRAIN}: no such file; a sweep needs the repository, which has it")
    environments = shares(args.jobs, args.nproc, args.threads)
    runs = plan_runs(args)
    planned = len(runs)
    if args.only is not None:
        part, parts = args.only
        runs = runs[part - 1::parts]
    finished = {run.folder for run in runs if run.finished}
    print(f"plan    {len(runs)} runs, {len(finished)} of them done"
          + (f"; part {part} of {parts} of a plan of {planned}" if args.only else "")
          + (f"; {args.jobs} at a time, each with {in_words(environments[0])}" if args.jobs > 1
             else ""))
    for run in runs:
        print(f"        {run.folder}: {run.state}")
    if args.dry_run:
        return 0

    waiting = [run for run in runs if not run.finished]
    with Launcher() as launcher:
        ended = (one_after_another if args.jobs == 1 else side_by_side)(
            launcher, waiting, args.nproc, environments, len(runs))
        if launcher.stopped_by:
            print(f"stopped by signal {launcher.stopped_by}; the same command goes on")
            return 128 + launcher.stopped_by
    finished |= {folder for folder, error in ended.items() if error is None}

    print(flush=True)
    if finished:
        compare([run.folder for run in runs if run.folder in finished])
    failures = {folder: error for folder, error in ended.items() if error is not None}
    for folder, error in failures.items():
        print(f"vitinit.sweep: {folder} failed: {error}", file=sys.stderr)
    return 1 if failures else 0


def in_words(environment: Mapping[str, str]) -> str:
    """The part of the machine that a run uses: "GPU 0, for example" or "2 thread(s)"."""
    gpus = environment.get("CUDA_VISIBLE_DEVICES")
    return f"GPU {gpus}, for example" if gpus else f"{environment['OMP_NUM_THREADS']} thread(s)"


def one_after_another(launcher: Launcher, runs: Sequence[PlannedRun], nproc: int,
                      environments: Sequence[Mapping[str, str]], count: int
                      ) -> dict[Path, str | None]:
    """Do the runs one at a time; their output is passed through.

    environments: of which the first is used. count: number of runs in the plan, including those
    that were finished before. Returns folder → error message, or None for a run that finished.
    """
    ended: dict[Path, str | None] = {}
    for run in runs:
        print(f"\nrun     {count - len(runs) + len(ended) + 1} of {count}, {run.folder}", flush=True)
        ended[run.folder] = launcher.run(command(run, nproc), environment=environments[0])
        if launcher.stopped_by:
            break
    return ended


def side_by_side(launcher: Launcher, runs: Sequence[PlannedRun], nproc: int,
                 environments: Sequence[Mapping[str, str]], count: int) -> dict[Path, str | None]:
    """Do as many runs at a time as there are `environments`; each prints to its own log file.

    The logs are in a folder of their own, so that a pattern for the runs' folders matches no log.
    Returns the same as `one_after_another`.
    """
    def work(run: PlannedRun, slot: int) -> str | None:
        log = run.folder.parent / "logs" / f"{run.folder.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        return launcher.run(command(run, nproc), environment=environments[slot], log=log)
    jobs = SideBySide(launcher, work)
    jobs.run(runs, len(environments), Status(jobs))
    return {run.folder: error for run, error in jobs.ended}


def main(arguments: list[str] | None = None) -> int:
    """Run the program with these arguments (default: the command line); return the exit status."""
    return run_program("vitinit.sweep", lambda: sweep(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
