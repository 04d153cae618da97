"""Every number of a page or card that a record has is held to that record.

held_numbers.toml has a table per page. Its `records` are pieces of the page, one a line, in which each
number of a record is replaced by where that comes from, in braces:

    {-rotary}                the top-1 of that experiment's last epoch, as the mean over its seeds;
                             if the page gives "± …", too, that is the standard deviation
    {-rotary s0}             of one seed
    {-rotary s0 @8}          after epoch 8; also `ema`, `loss` (of training), and of all epochs
                             `minutes` of training and minutes of the `cpu`
    {-rotary interval}       ± is the 95 % t interval of the mean
    {-rotary each}           of each seed, as a list with commas
    {-rotary n}              the number of seeds
    {-rotary - -default}     the difference over the seeds of both, ± its 95 % t interval

A number is right if it is that value, rounded to as many digits as the page shows. `others` are
pieces with numbers that no record has, by why there is none. A table on a page that has a column
"runs" makes its own pieces. An experiment is called as in those tables, or ARCHIVE/NAME.
"""

import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from pages import PAGES, RECIPES, REPOSITORY, Page, card

from vitinit.programs.shared.records import RunRecord, columns_of, read_archive, read_run
from vitinit.programs.shared.results import t_interval

SPREAD = r"(?: ± (\d*\.?\d+))?"
NUMBER = rf"([+−]?\d*\.?\d+){SPREAD}"
# What looks like an accuracy, or a difference of two: 74.7, 74.69 ± 0.10, .2 points, −3.08.
UNITS = r"(?:[KMGT]i?B|ms|s|h|M|dB|×)\b"
ACCURACY = re.compile(
    rf"(?<![\w.,×/^-])(?:\d\d\.\d\d?{SPREAD}|\d*\.?\d+ ± \d*\.\d+|\d*\.\d+(?= points)"
    rf"|[+−]\d+\.\d+{SPREAD}|± \d*\.\d+)(?!\w|\.\d|\)?/| {UNITS})"
)
STUDIES = ("remaining_gap", "muon", "rotary", "own_images", "photographs")
TABLE = re.compile(r"^\| what \| runs .*\n.*\n((?:\|.*\n)+)", re.MULTILINE)
METRICS: dict[str, Callable[[RunRecord, int], float]] = {
    "top1": lambda run, epoch: run.rows[epoch]["val_top1"],
    "ema": lambda run, epoch: run.rows[epoch]["ema_top1"],
    "loss": lambda run, epoch: run.rows[epoch]["train_loss"],
    "minutes": lambda run, epoch: sum(row["seconds"] for row in run.rows) / 60,
    "cpu": lambda run, epoch: sum(row["cpu_seconds"] for row in run.rows) / 60,
}


class Piece(NamedTuple):
    """A piece of a page: what is between its numbers, and where each number comes from."""

    words: list[str]
    sources: list[str]

    @classmethod
    def of(cls, line: str) -> "Piece":
        every = re.sub(r"{(\S+) each}", lambda found: each_seed(found[1]), line)
        parts = re.split(r"{(.*?)}", every)
        return cls(parts[::2], parts[1::2])

    def found(self, text: str) -> Iterator[re.Match[str]]:
        """Each place of a text where the piece stands; a number has two groups, it and its ±."""
        return re.finditer(NUMBER.join(map(re.escape, self.words)), text)


class Held(NamedTuple):
    """What held_numbers.toml says of one page, and what that page's tables say."""

    name: str
    text: str  # without blocks of code, in one line
    records: list[Piece]
    others: list[str]

    def covered(self) -> list[tuple[int, int]]:
        """The stretches of the text whose numbers are held."""
        of_records = [
            found.span(group)
            for piece in self.records
            for found in piece.found(self.text)
            for group in range(1, 2 * len(piece.sources) + 1)
        ]
        of_others = [
            found.span()
            for piece in self.others
            for found in re.finditer(re.escape(piece), self.text)
        ]
        return of_records + of_others


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def card_of(path: Path) -> Page:
    """A recipe's card; what is published stands under a heading of its own, and is left out."""
    text = re.sub(r"^#", "", card(path), flags=re.MULTILINE)
    return Page(path, re.sub(r"^ Published .*?^ Measured ", "", text, flags=re.M | re.S))


def rows_of_tables(page: Page) -> Iterator[str]:
    """Lines as those of held_numbers.toml, of the tables on a page that name their runs."""
    for table in TABLE.findall(page.text):
        rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
        for number, (what, runs, _, _, difference) in enumerate(rows):
            name = runs.strip("`")
            line = f"| {what} | {runs} | {{{name} n}} | {{{name}}} |"
            if difference:
                to = difference.removeprefix("to ").partition(": ")[0]
                before = [row[1].strip("`") for row in rows[:number] if row[0].startswith(to)]
                line += f" to {to}: {{{name} - {before[-1]}}} |"
            yield line


@cache
def experiments() -> Mapping[str, Mapping[int, RunRecord]]:
    """Name → seed → run, of all archives and of the trained model."""
    found: dict[str, dict[int, RunRecord]] = defaultdict(dict)
    for path in (*RECIPES.glob("*.tar.xz"), *RECIPES.glob("board/*.tar.xz")):
        archive = path.name.removesuffix(".tar.xz")
        for run in read_archive(path):
            name = re.sub(r"-s\d+$", "", run.path.name)
            assert run.path.name in (name, f"{name}-s{run.seed}")
            names = [f"{path.parent.name}/{name}" if "board" in path.parts else f"{archive}/{name}"]
            if archive in STUDIES:
                names.append(name.removeprefix("cifar10_10k"))
            for each in names:
                assert found[each].setdefault(run.seed, run) is run, f"{each}, {run.seed}: twice"
    boxed = RECIPES / "trained" / "cifar10_small"
    found["trained/cifar10_small"][0] = read_run(boxed)
    lines = (RECIPES / "resnet18_on_photographs.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):  # the last one of a run is at its end
        name = f"r18-{row['data']}-e{row['epochs']}-lr{row['lr']:g}"
        columns = columns_of([row], "epoch", ["val_top1", "cpu_seconds"])
        found[name][row["seed"]] = RunRecord(Path(name), "", {}, columns, [], {})
    return found


def each_seed(name: str) -> str:
    """A source for each seed of an experiment, as a list in words."""
    return ", ".join(f"{{{name} s{seed}}}" for seed in sorted(experiments()[name]))


def values(source: str) -> list[float]:
    """The values that a source names, seed by seed."""
    if " - " in source:
        ours, theirs = (by_seed(part) for part in source.split(" - "))
        return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    return list(by_seed(source).values())


def by_seed(source: str) -> dict[int, float]:
    name, *words = source.split()
    metric, epoch, only = "top1", -1, None
    for word in words:
        if word in METRICS:
            metric = word
        elif word[0] == "@":
            epoch = int(word[1:]) - 1
        elif word[0] == "s":
            only = int(word[1:])
    runs = experiments()[name]
    return {
        seed: METRICS[metric](run, epoch)
        for seed, run in sorted(runs.items())
        if only in (None, seed)
    }


def expected(source: str) -> tuple[float, float | None]:
    """The value of a source, and its ±; None for a single seed, which has none."""
    name, _, word = source.rpartition(" ")
    if word == "n":
        return len(experiments()[name]), None
    found = values(name if word == "interval" else source)
    if len(found) < 2:
        return found[0], None
    if word == "interval" or " - " in source:
        return t_interval(found)
    return fmean(found), stdev(found)


def rounded_as(value: float, shown: str) -> bool:
    """Whether that is the value, rounded to so many digits; either way, if it lies in the middle."""
    digits = len(shown.partition(".")[2])
    return abs(float(shown.replace("−", "-")) - value) <= 0.5 * 10**-digits + 1e-9


def wrong_numbers(held: Held) -> Iterator[str]:
    """Pieces that are not on the page, and numbers that are not those of the records."""
    for piece in held.records:
        places = list(piece.found(held.text))
        if not places:
            yield f"not on the page: {piece}"
        for place in places:
            for number, source in enumerate(piece.sources):
                mean, spread = place[2 * number + 1], place[2 * number + 2]
                value, half = expected(source)
                if not rounded_as(value, mean):
                    yield f"{mean}: {source} has {value:.4f}"
                if spread and (half is None or not rounded_as(half, spread)):
                    yield f"{mean} ± {spread}: {source} has ± {half}"
    yield from (f"not on the page: {piece}" for piece in held.others if piece not in held.text)


def free_numbers(held: Held) -> Iterator[str]:
    """Numbers that look like accuracies and that nothing holds, with the words around them."""
    covered = held.covered()
    for found in ACCURACY.finditer(held.text):
        if not any(start <= found.start() < end for start, end in covered):
            around = held.text[max(0, found.start() - 50) : found.end() + 20]
            yield f"{found[0]}: in “{around}”"


PAGES_AND_CARDS = [*PAGES, *map(card_of, sorted(RECIPES.glob("*.toml")))]
TABLES = tomllib.loads((REPOSITORY / "tests" / "held_numbers.toml").read_text(encoding="utf-8"))


def held_on(page: Page) -> Held:
    table = TABLES.get(page.name, {})
    lines = [*table.get("records", "").splitlines(), *rows_of_tables(page)]
    others = "\n".join(table.get("others", {}).values()).splitlines()
    pieces = [Piece.of(line) for line in lines if line]
    return Held(page.name, in_one_line(page.prose), pieces, [*filter(None, others)])
