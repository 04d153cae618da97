"""Compare finished runs: groups over seeds, paired differences, curves.

    python -m vitinit.compare runs/quickstart-*
    python -m vitinit.compare runs/quickstart-default-* runs/quickstart-impulse-* --out comparison
    python -m vitinit.compare runs/quickstart-* --pack quickstart.tar.xz
    python -m vitinit.compare quickstart.tar.xz/*-default-* quickstart.tar.xz/*-impulse-*

Runs that differ in nothing but the seed form a group. Every other group is compared with that of
the run named first, seed by seed. --out writes comparison.md and curves.png into a folder (needs
the extra `figures`).

--pack keeps the runs in one compressed file instead: recipe.toml, run.json and metrics.jsonl of
each finished one. Such a file stands for all its runs wherever a run's folder is expected here; a
pattern after its name chooses some of them (zsh needs it in quotes).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .command_line import Parser, run_program
from .figures.curves import draw_curves
from .runs.groups import Group, finished_runs, group_runs
from .runs.records import read_runs, write_archive
from .runs.report import table
from .train.checkpoint import write_text_atomically

CONFIDENCE = 0.95
BISECTIONS = 100                # each halves an interval of doubles, whose mantissa has 53 bits
METRICS = {"model": "val_top1", "EMA": "ema_top1"}
RECORDED = {"git_commit": "commit", "torch": "torch", "python": "Python", "device": "device",
            "processes": "processes"}       # key of run.json → word in the report


def share_within(angle: float, degrees: int) -> float:
    """P(|T| ≤ √n · tan(angle)) for Student's t with n `degrees` of freedom, an integer ≥ 1.

    Computed by the finite sums in Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3
    (odd n) and 26.7.4 (even n).
    """
    odd = degrees % 2
    share, factor = (2 * angle / math.pi, 2 / math.pi) if odd else (math.sin(angle), 1 / 2)
    for power in range(1 if odd else 2, degrees - 1, 2):
        share += factor * math.sin(angle) * math.cos(angle)**power
        factor *= (power + 1) / (power + 2)
    return share


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| ≤ t) = `confidence` for Student's t: 12.71 at 95 % and 1 degree."""
    low, high = 0.0, math.pi / 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if share_within(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def t_interval(differences: Sequence[float]) -> tuple[float, float]:
    """The mean of at least two paired differences, and half the width of its 95 % t interval."""
    half = t_quantile(len(differences) - 1) * statistics.stdev(differences)
    return statistics.fmean(differences), half / math.sqrt(len(differences))


def mean_and_std(values: Sequence[float], places: int = 2) -> str:
    """Mean and sample standard deviation, such as "84.03 ± 1.56"; of one value the mean alone."""
    mean = f"{statistics.fmean(values):.{places}f}"
    return f"{mean} ± {statistics.stdev(values):.{places}f}" if len(values) > 1 else mean


def summary(groups: Sequence[Group]) -> str:
    """One row per group: mean ± std over seeds of the last and best epoch, and of the seconds."""
    rows = []
    for group in groups:
        cells = [group.label, str(len(group.runs))]
        for metric in METRICS.values():
            by_epoch = [run.measured(metric) for run in group.runs.values()]
            cells += [mean_and_std([values[-1] for values in by_epoch]),
                      mean_and_std([max(values) for values in by_epoch])
                      ] if all(by_epoch) else ["–", "–"]
        seconds = [sum(row["seconds"] for row in run.rows) for run in group.runs.values()]
        rows.append([*cells, mean_and_std(seconds, places=0)])
    heads = ["group", "seeds", "last", "best", "EMA last", "EMA best", "seconds per run"]
    return table(heads, rows)


def by_seed(groups: Sequence[Group]) -> str:
    """A table of the last epoch's top-1 of every run."""
    seeds = sorted({seed for group in groups for seed in group.runs})
    rows = []
    for group in groups:
        for name, metric in METRICS.items():
            if values := group.last(metric):
                rows.append([group.label, name, *(f"{values[seed]:.2f}" if seed in values else "–"
                                                  for seed in seeds)])
    return table(["last epoch", "of", *(f"seed {seed}" for seed in seeds)], rows)


class Difference(NamedTuple):
    """A group's last top-1 minus that of the first group, over the seeds that both have."""

    label: str                  # of the group
    weights: str                # "model" or "EMA"
    by_seed: dict[int, float]


def paired(groups: Sequence[Group]) -> list[Difference]:
    """The differences of the other groups from the first one."""
    first, *others = groups
    return [Difference(other.label, name, {seed: value - first.last(metric)[seed]
                                           for seed, value in other.last(metric).items()
                                           if seed in first.last(metric)})
            for other in others for name, metric in METRICS.items()]


def differences(groups: Sequence[Group]) -> str:
    """A table of the other groups minus the first one, with intervals over the seeds of both.

    Groups with fewer than two such seeds are named in a sentence instead.
    """
    rows, unpaired, first = [], [], groups[0]
    for label, name, by_seed in paired(groups):
        if len(by_seed) > 1:
            mean, half = t_interval(list(by_seed.values()))
            rows.append([label, name, str(len(by_seed)), f"{mean:+.2f} ± {half:.2f}",
                         ", ".join(f"{seed}: {value:+.2f}" for seed, value in by_seed.items())])
        elif name == "model":
            unpaired.append(f"`{label}`")
    title = [f"minus {first.label}", "of", "seeds", "mean, 95 % t interval", "seed by seed"]
    parts = [table(title, rows)] if rows else []
    if unpaired:
        parts.append(f"Fewer than two seeds are shared with `{first.label}` by "
                     f"{', '.join(unpaired)}: no interval.")
    return "\n\n".join(parts)


def origin(groups: Sequence[Group]) -> str:
    """With which code and on which device the runs were made; the counts, where runs differ.

    Also counted are sets of validation images, by a digest, if there are several.
    """
    runs = [run for group in groups for run in group.runs.values()]
    alike, unlike = [], []
    for key, words in RECORDED.items():
        # A run that was resumed on another machine has several values; each counts once.
        counts = Counter(value for run in runs for value in
                         dict.fromkeys(str(start.get(key, "unknown")) for start in run.starts))
        if len(counts) == 1:
            alike.append(f"{words} {next(iter(counts))}")
        elif counts:
            unlike.append(f"{words} " + ", ".join(f"{value} ({count})"
                                                  for value, count in counts.items()))
    images = Counter(run.validated_on for run in runs if run.validated_on)
    if len(images) > 1:
        unlike.append("validation images " + ", ".join(
            f"{digest} ({count})" for digest, count in images.items()))
    lines = [f"All runs: {'; '.join(alike)}."] if alike else []
    lines += [f"Runs differ (number of runs): {'; '.join(unlike)}."] if unlike else []
    return "\n\n".join(lines)


def report(groups: Sequence[Group], unfinished: Sequence[str] = ()) -> str:
    """The whole comparison as Markdown. unfinished: lines about runs that are left out."""
    names = dict.fromkeys(run.recipe for group in groups for run in group.runs.values())
    parts = [f"# {', '.join(names)}",
             "Top-1 on the validation set in %, mean ± standard deviation over seeds. The best "
             "epoch is chosen on the images it is reported on. Seconds are those of training, "
             "without evaluation.",
             summary(groups), by_seed(groups), differences(groups), origin(groups),
             *unfinished]
    return "\n\n".join(part for part in parts if part) + "\n"


def compare(paths: Sequence[Path], *, out: Path | None = None, archive: Path | None = None) -> None:
    """Print the comparison of the runs at these paths: run folders and archives of runs.

    out: a folder into which the comparison and a figure of the curves are written, too. archive: a
    file into which the finished runs are packed instead.
    """
    runs, unfinished = finished_runs(read_runs(paths))
    if archive is not None:
        write_archive(runs, archive)
        print(*unfinished, f"wrote {archive}: {len(runs)} run(s), {archive.stat().st_size:,} bytes",
              sep="\n")
        return
    groups = group_runs(runs)
    text = report(groups, unfinished)
    print(text, end="", flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_text_atomically(text, out / "comparison.md")
        draw_curves(out / "curves.png", groups)
        print(f"\nwrote {out / 'comparison.md'} and {out / 'curves.png'}")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; an error ends the program with exit status 2."""
    parser = Parser(prog="python -m vitinit.compare", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN",
                        help="folder of a run, archive of runs, or archive/pattern")
    to = parser.add_mutually_exclusive_group()
    to.add_argument("--out", type=Path, metavar="FOLDER",
                    help="write the comparison and its curves into this folder, too")
    to.add_argument("--pack", type=Path, metavar="FILE.tar.xz",
                    help="write the finished runs into this archive, without comparing them")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the program with these arguments (default: the command line); return the exit status."""
    def program() -> None:
        args = parse_arguments(arguments)
        compare(args.runs, out=args.out, archive=args.pack)
    return run_program("vitinit.compare", program)


if __name__ == "__main__":
    sys.exit(main())
