"""Results as Markdown and JSON: what eval.py prints and writes, and the comparison of runs.

The latter has groups over seeds, paired differences and Student's t. `vitinit compare`
prints it, a sweep ends with it, and the page `report` shows it.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ...base.messages import one_line
from ...train.metrics import MEASURES, Evaluation, balanced_accuracy
from .evaluated import EvaluatedSet
from .groups import Group, Groups, finished_runs, group_runs
from .outputs import STDOUT, deliver
from .records import Json, RunRecord
from .sureness import Sureness

CONFIDENCE = 0.95
# Half an interval times this is the least difference that four of five such comparisons show: for
# normal noise 1.29 with two seeds, 1.31 with three, 1.36 with five, 1.39 with ten (noncentral t).
SHOWN = 1.3
BISECTIONS = 100  # each halves an interval of doubles, whose mantissa has 53 bits
RECORDED = {
    "git_commit": "commit",
    "torch": "torch",
    "python": "Python",
    "device": "device",
    "processes": "processes",
}  # key of run.json → word in the comparison


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of cells; every column but the first is aligned to the right."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    lines = []
    for row in (head, rule, *rows):
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


class ClassScores(NamedTuple):
    """How well a class is recognised, in percent; None where there is no image to divide by."""

    precision: float | None  # of the images taken for it those that are of it
    recall: float | None  # of its images those that are taken for it
    f1: float | None  # the harmonic mean of both


def class_scores(
    hits: Sequence[int], images: Sequence[int], guesses: Sequence[int]
) -> list[ClassScores]:
    """The scores of classes: images of each that are taken for it, of all its `images` and of all
    that are taken for it, its `guesses`.
    """

    def percent(part: int, whole: int) -> float | None:
        return 100.0 * part / whole if whole else None

    return [
        ClassScores(percent(right, taken), percent(right, total), percent(2 * right, total + taken))
        for right, total, taken in zip(hits, images, guesses)
    ]


class Finding(NamedTuple):
    """The results of one checkpoint on one data set."""

    checkpoint: str  # its path
    recipe: str  # name
    data_set: EvaluatedSet
    image_size: tuple[int, int]  # (height, width)
    model_classes: int  # number of logits of the model
    classes: Sequence[str]  # names of the data set's classes
    results: Mapping[str, Evaluation]  # by weights: "model", and "ema" if there are any
    views: str = ""  # how images were viewed, if several times each
    sureness: Mapping[str, Sureness] = {}  # likewise; of no model of several labels

    def as_dict(self) -> Json:
        """The JSON object: checkpoint and data set, then the results under "model" and "ema"."""
        findings = {
            "checkpoint": self.checkpoint,
            "recipe": self.recipe,
            "data": self.data_set.name,
            "data_dir": self.data_set.root,
            "image_size": self.image_size,
            "classes": len(self.classes),
            "model_classes": self.model_classes,
        }
        if self.views:
            findings["views"] = self.views
        results = {name: as_dict(result, self.classes) for name, result in self.results.items()}
        for name, sureness in self.sureness.items():
            results[name]["calibration_error"] = sureness.error
            results[name]["temperature"] = sureness.temperature
        return findings | results

    def measures(self, weights: str) -> dict[str, float | None]:
        """What was measured of the weights "model" or "ema", in percent, by its words."""
        measures = self.results[weights].measures
        found = {words: measures[key] for key, words in MEASURES.items() if key in measures}
        if weights in self.sureness:
            found["ECE"] = self.sureness[weights].error
        return found

    def by_class(self) -> str:
        """A Markdown table of all classes with images by their accuracy, lowest first: the share of
        their images that are taken for them; of images with several labels, average precision.
        """
        key = "average_precision" if self.results["model"].precisions else "recall"
        of_weights = [
            as_dict(result, self.classes)["per_class"] for result in self.results.values()
        ]
        present = [of_class for of_class in zip(*of_weights) if of_class[0]["total"]]
        present.sort(key=lambda of_class: of_class[0][key])
        rows = []
        for of_class in present:
            label, total = one_line(of_class[0]["class"]), of_class[0]["total"]
            rows.append([label, f"{total:,}", *(f"{one[key]:.2f}" for one in of_class)])
        return table(
            ["class", "images", *(f"{name} {self.measure}" for name in self.results)], rows
        )

    @property
    def measure(self) -> str:
        """What `by_class` shows of a class."""
        return "average precision" if self.results["model"].precisions else "top-1"


def as_dict(result: Evaluation, classes: Sequence[str]) -> Json:
    """The JSON object of one evaluation."""
    hits, images = result.class_hits, result.class_images
    per_class = []
    scores = class_scores(hits, images, result.class_guesses)
    for label, correct, total, score in zip(classes, hits, images, scores):
        per_class.append({"class": label, "correct": correct, "total": total} | score._asdict())
    found = {
        "loss": result.loss,
        **result.measures,
        "images": result.images,
        "per_class": per_class,
    }
    if result.precisions:
        for row, precision in zip(per_class, result.precisions):
            row["average_precision"] = None if precision is None else 100.0 * precision
        return found | {"threshold": result.threshold}
    return found | {
        "balanced_accuracy": balanced_accuracy(hits, images),
        "confusion": None if result.confusion is None else result.confusion.tolist(),
    }


def json_line(value: Json) -> str:
    """A line of JSON, which has no NaN and no Infinity: null stands for these."""
    finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
    return json.dumps(finite) + "\n"


def print_results(findings: Sequence[Finding], *, per_class: bool, json_file: Path | None) -> None:
    """Print the findings, a single one as lines and several as a table, and their JSON, a line per
    finding, by `deliver`: first to a file, which a closed terminal then does not cost. per_class:
    also print a table of all classes per finding. Raises FileError if the file cannot be written.
    """
    text = "".join(json_line(finding.as_dict()) for finding in findings)
    if json_file != STDOUT:
        deliver(text, json_file)
    for finding in findings:
        if len(finding.classes) < finding.model_classes:
            print(
                f"{finding.data_set}: {len(finding.classes)} of the {finding.model_classes} "
                f"classes of {finding.checkpoint}; the others are left out of ranking and loss"
            )
    views = "".join({f"; {finding.views}" for finding in findings if finding.views})
    measures = [finding.measures(name) for finding in findings for name in finding.results]
    words = list(dict.fromkeys(chain(*measures)))
    rows = [*cells_of(findings, words)]
    if len(findings) > 1:
        shares = [f"{measure} %" for measure in words]
        head = ["checkpoint", "weights", "data", *shares, "loss", f"images{views}"]
        print(table(head, rows))
    else:
        for _, name, _, *numbers, loss, images in rows:
            known = [f"{word} {number} %" for word, number in zip(words, numbers) if number != "–"]
            print("  ".join([f"{name:5}", *known, f"loss {loss}", f"over {images} images{views}"]))
    if per_class:
        for finding in findings:
            print(
                f"\n{finding.checkpoint} on {finding.data_set}, {finding.measure} of every class in %"
                f"{views}:\n\n"
                f"{finding.by_class()}\n"
            )
    if json_file == STDOUT:
        deliver(text, json_file)


def cells_of(findings: Iterable[Finding], words: Sequence[str]) -> Iterator[list[str]]:
    """Yield what a table shows of each finding and weights. words: of the measures it shows."""
    for finding in findings:
        for name, result in finding.results.items():
            known = finding.measures(name)
            shown = [known.get(word) for word in words]
            shares = ["–" if share is None else f"{share:.3f}" for share in shown]
            place = finding.checkpoint, name, str(finding.data_set)
            yield [*place, *shares, f"{result.loss:.4f}", f"{result.images:,}"]


def share_within(angle: float, degrees: int) -> float:
    """P(|T| ≤ √n · tan(angle)) for Student's t with n `degrees` of freedom, an integer ≥ 1, by the
    finite sums of Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    if degrees % 2:
        first, share, factor = 1, 2 * angle / math.pi, 2 / math.pi
    else:
        first, share, factor = 2, math.sin(angle), 1 / 2
    for power in range(first, degrees - 1, 2):
        share += factor * math.sin(angle) * math.cos(angle) ** power
        factor *= (power + 1) / (power + 2)
    return share


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| ≤ t) = `confidence` for Student's t: 12.71 at 95 % and 1 degree."""
    low, high = 0.0, math.pi / 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if share_within(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def t_interval(differences: Sequence[float]) -> tuple[float, float]:
    """The mean of at least two paired differences, and half the width of its 95 % t interval."""
    half = t_quantile(len(differences) - 1) * statistics.stdev(differences)
    return statistics.fmean(differences), half / math.sqrt(len(differences))


def paired(groups: Groups) -> Iterator[tuple[Group, str, dict[int, float]]]:
    """Yield for each other group and "model" or "EMA", by seed, its last score minus that of the
    first group, such as top-1.
    """
    first, *others = groups
    for other in others:
        for name, metric in first.scores.items():
            ours, theirs = first.last(metric), other.last(metric)
            yield other, name, {seed: theirs[seed] - ours[seed] for seed in theirs if seed in ours}


def compare_runs(runs: Sequence[RunRecord]) -> tuple[list[Group], str]:
    """The groups of the finished ones of these runs, and their whole comparison as Markdown. Raises
    CheckpointError as `finished_runs` and `group_runs` do.
    """
    finished, unfinished = finished_runs(runs)
    groups = group_runs(finished)
    names = dict.fromkeys(run.recipe for run in finished)
    scores = " and ".join(dict.fromkeys(MEASURES[group.first.score] for group in groups))
    parts = [
        f"# {', '.join(names)}",
        f"Validation {scores} in %, mean ± standard deviation over seeds. The best epoch is chosen on "
        "the images it is reported on. Seconds are those of training, without evaluation.",
        by_group(groups),
        by_seed(groups),
        differences(groups),
        origin(groups),
        *unfinished,
    ]
    return groups, "\n\n".join(filter(None, parts)) + "\n"


def by_group(groups: Groups) -> str:
    """One row per group: mean ± std over seeds of the last and best epoch, and of the seconds; and
    of the last loss, if a group has not learned classes.
    """
    head = ["group", "seeds", "last", "best", "EMA last", "EMA best", "seconds per run"]
    all_classify = all(group.last(group.scores["model"]) for group in groups)
    if not all_classify:
        head.insert(-1, "loss")
    rows = []
    for group in groups:
        runs = group.runs.values()
        cells = [group.label, str(len(runs))]
        for metric in group.scores.values():
            curves = [run.measured(metric) for run in runs]
            if not all(curves):  # some have none, so none are shown
                curves = []
            cells.append(mean_and_std([curve[-1] for curve in curves]))
            cells.append(mean_and_std([*map(max, curves)]))
        if not all_classify:
            cells.append(mean_and_std([*group.last("val_loss").values()], places=4))
        seconds = [run.measured("seconds") for run in runs]
        timed = all(len(spent) == run.done for spent, run in zip(seconds, runs))
        totals = [sum(spent) for spent in seconds if timed]
        rows.append([*cells, mean_and_std(totals, places=0)])
    return table(head, rows)


def mean_and_std(values: Sequence[float], places: int = 2) -> str:
    """Mean and sample standard deviation, such as "84.03 ± 1.56"; of one value the mean alone."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{places}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.{places}f}"


def by_seed(groups: Groups) -> str:
    """A table of the last epoch's score of every run, such as top-1."""
    seeds = sorted({seed for group in groups for seed in group.runs})
    rows = []
    for group in groups:
        for name, metric in group.scores.items():
            values = group.last(metric)
            cells = [f"{values[seed]:.2f}" if seed in values else "–" for seed in seeds]
            if values:
                rows.append([group.label, name, *cells])
    return table(["last epoch", "of", *(f"seed {seed}" for seed in seeds)], rows) if rows else ""


def differences(groups: Groups) -> str:
    """A table of the other groups minus the first one, with intervals over the seeds of both."""
    base = groups[0].label
    rows, unpaired = [], []
    for group, name, by_seed in paired(groups):
        if len(by_seed) > 1:
            mean, half = t_interval(list(by_seed.values()))
            single = ", ".join(f"{seed}: {value:+.2f}" for seed, value in by_seed.items())
            interval = f"{mean:+.2f} ± {half:.2f}"
            least = f"{SHOWN * half:.2f}"
            rows.append([group.label, name, str(len(by_seed)), interval, least, single])
        elif name == "model":
            shared = group.runs.keys() & groups[0].runs.keys()
            what = "scores" if len(shared) > 1 else "seeds"
            unpaired.append(f"`{group.label}` (fewer than two shared {what})")
    parts = []
    if rows:
        interval = "mean, 95 % t interval"
        head = [f"minus {base}", "of", "seeds", interval, "least that shows", "seed by seed"]
        parts.append(table(head, rows))
    if unpaired:
        parts.append(f"No interval of the difference from `{base}`: {', '.join(unpaired)}.")
    return "\n\n".join(parts)


def origin(groups: Groups) -> str:
    """With which code, on which device and, if they differ, on which images (digests) the runs were
    made; the counts, where runs differ.
    """
    runs = [run for group in groups for run in group.runs.values()]
    counts = {}
    for key, words in RECORDED.items():
        counts[words] = Counter[str]()
        for run in runs:
            # A run that was resumed on another machine has several values; each counts once.
            starts = run.starts or [{}]
            counts[words].update({str(start.get(key, "unknown")): 1 for start in starts})
    seen = {
        "training images": [run.trained_on for run in runs],
        "validation images": [run.validated_on for run in runs],
    }
    for words, digests in seen.items():
        images = Counter(filter(None, digests))
        if len(images) > 1:
            counts[words] = images
    alike, unlike = [], []
    for words, values in counts.items():
        if len(values) > 1:
            several = ", ".join(f"{value} ({count})" for value, count in values.items())
            unlike.append(f"{words} {several}")
        else:
            alike += [f"{words} {value}" for value in values]
    parts = []
    if alike:
        parts.append(f"All runs: {'; '.join(alike)}.")
    if unlike:
        parts.append(f"Runs differ (number of runs): {'; '.join(unlike)}.")
    return "\n\n".join(parts)
