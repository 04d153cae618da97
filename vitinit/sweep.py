"""Many runs of train.py: every init, every variant, every seed.

    python -m vitinit.sweep --recipe quickstart --init default,mimetic,impulse --seeds 0-4
    python -m vitinit.sweep --recipe quickstart --init impulse --seeds 0,1,2 \\
        --variant paper --variant base-values init.options.value_init=base

    python -m vitinit.sweep --recipe cifar10_10k --seeds 0-9 --jobs 2 --threads 1

Each run has a folder <recipe>-<init>[-<variant>]-s<seed> in --out-dir. The same command again skips
what is finished and resumes what was cut off. Ctrl-C and SIGTERM end the sweep once what runs has
saved its checkpoint. A run that fails is reported at the end; the others go on.

--jobs N has N runs side by side: each has GPUs of its own, or T threads of the CPU by --threads, and
what it prints goes to <folder>.log. How many run beside it changes nothing in a run, but on a CPU the
number of threads does, in the last digits: give the same --threads to what is to be compared.
--only K/N takes the K-th of N parts of the plan, for jobs of a cluster that know nothing of each
other.
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
from .recipe.files import RecipeError, parse_override
from .recipe.resolve import fresh_recipe
from .recipe.sections import Recipe
from .runs.folder import RunFolder
from .runs.groups import read_run
from .runs.resume import left_without_checkpoint
from .train.checkpoint import CheckpointError
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
    parser.add_argument("--jobs", type=integer(1, MOST_RUNS), default=1, help="runs side by side")
    parser.add_argument("--threads", type=integer(1, 2**15),
                        help="CPU threads of each process of a run; by default those of the machine "
                             "shared out among the jobs")
    parser.add_argument("--only", type=part_of_plan, metavar="K/N",
                        help="the K-th of N parts of the plan")
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


def part_of_plan(text: str) -> tuple[int, int]:
    """'2/5' → (2, 5), the second of five parts, as --only takes it."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, flags=re.ASCII)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text}: expected K/N with 1 ≤ K ≤ N, such as 1/4")
    return int(found[1]), int(found[2])


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


def command(run: PlannedRun, nproc: int) -> list[str]:
    program = [str(TRAIN), *run.arguments]
    if nproc > 1:
        program = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}",
                   *program]
    return [sys.executable, *program]


class Status:
    """One line for each run that is running: its epoch, top-1, and the time that is left.

    On a terminal the lines stay in their places; elsewhere a run prints one after each epoch.
    """

    def __init__(self, work: SideBySide[PlannedRun]) -> None:
        self.work, self.terminal = work, sys.stderr.isatty()
        self.bars: dict[Path, tqdm] = {}
        self.said: dict[Path, int] = {}              # epochs of each run that its line told
        self.began: dict[Path, tuple[float, int]] = {}       # when, and how many epochs it had

    def __call__(self) -> None:
        here = dict(self.work.at)
        for place, run in here.items():
            self.tell(place, run)
        for run, _ in list(self.work.ended):
            self.tell(None, run)

    def tell(self, place: int | None, run: PlannedRun) -> None:
        """place: where it runs; None: it has ended."""
        if run.folder not in self.began:
            self.began[run.folder] = (time.monotonic(), run.done or 0)
            if self.terminal and place is not None:
                self.bars[run.folder] = tqdm(desc=run.folder.name, total=run.epochs, unit="epoch",
                                             initial=run.done or 0, position=place, leave=False,
                                             dynamic_ncols=True)
        try:
            rows = RunFolder(run.folder).metrics.rows()
        except CheckpointError:                      # of which the run itself complains
            return
        epochs = rows[-1]["epoch"] if rows else 0
        if epochs > self.said.get(run.folder, run.done or 0):
            self.said[run.folder] = epochs
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
        if place is None and run.folder in self.bars:
            self.bars.pop(run.folder).close()


def sweep(args: argparse.Namespace) -> int:
    """The plan, its runs, the comparison; returns the exit status."""
    if not TRAIN.is_file():
        raise RecipeError(f"{TRAIN}: no such file; a sweep needs the repository around vitinit/")
    environments = shares(args.jobs, args.nproc, args.threads)
    runs = plan_runs(args)
    whole = len(runs)
    if args.only is not None:
        part, parts = args.only
        runs = runs[part - 1::parts]
    finished = {run.folder for run in runs if run.finished}
    print(f"plan    {len(runs)} runs, {len(finished)} of them done"
          + (f"; part {part} of {parts} of a plan of {whole}" if args.only else "")
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
    """What a run has of the machine."""
    gpus = environment.get("CUDA_VISIBLE_DEVICES")
    return f"GPU {gpus}, say" if gpus else f"{environment['OMP_NUM_THREADS']} thread(s)"


def one_after_another(launcher: Launcher, runs: Sequence[PlannedRun], nproc: int,
                      environments: Sequence[Mapping[str, str]], count: int
                      ) -> dict[Path, str | None]:
    """Each run's error, None of a finished one, by folder; what runs print is passed on."""
    ended: dict[Path, str | None] = {}
    for run in runs:
        print(f"\nrun     {count - len(runs) + len(ended) + 1} of {count}, {run.folder}", flush=True)
        ended[run.folder] = launcher.run(command(run, nproc), environment=environments[0])
        if launcher.stopped_by:
            break
    return ended


def side_by_side(launcher: Launcher, runs: Sequence[PlannedRun], nproc: int,
                 environments: Sequence[Mapping[str, str]], count: int) -> dict[Path, str | None]:
    """Likewise with as many at a time as there are `environments`; what one prints goes to its log."""
    def work(run: PlannedRun, place: int) -> str | None:
        log = run.folder.with_name(f"{run.folder.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        return launcher.run(command(run, nproc), environment=environments[place], log=log)
    jobs = SideBySide(launcher, work)
    jobs.run(runs, len(environments), Status(jobs))
    return {run.folder: error for run, error in jobs.ended}


def main(arguments: list[str] | None = None) -> int:
    return run_program("vitinit.sweep", lambda: sweep(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
