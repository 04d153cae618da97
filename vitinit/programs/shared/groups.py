"""Runs that differ in nothing but the seed, as groups, for comparisons and figures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...base.files import CheckpointError
from ...base.values import to_toml
from ...recipe.absent import MEANT
from ...recipe.sections import MACHINE_KEYS
from .records import Json, RunRecord

# The keys in which runs of one experiment may differ: seed, folder, evaluations and machine.
FREE_KEYS = ("run.seed", "data.root", "eval.every_epochs", *MACHINE_KEYS)


@dataclass(frozen=True)
class Group:
    """The runs of one experiment, and what distinguishes it from the other groups."""

    names: Sequence[str]  # of its recipe, if there are several, and of its init
    keys: Mapping[str, Any]  # others that distinguish it, with their values; None: it has none
    commit: str  # that its runs began with, if they are alike but for the code; ""
    runs: Mapping[int, RunRecord]  # by seed, in ascending order

    @property
    def label(self) -> str:
        """What distinguishes it, by keys: "impulse, optim.name = "muon", schedule.epochs = 30"."""
        parts = [*self.names]
        for key, value in self.keys.items():
            parts.append(f"without {key}" if value is None else f"{key} = {to_toml(value)}")
        return ", ".join(filter(None, [*parts, self.commit]))

    @property
    def first(self) -> RunRecord:
        """The run with the lowest seed."""
        return next(iter(self.runs.values()))

    def in_words(self, hidden: Sequence[str] = ()) -> str:
        """The same without keys, and without those that are hidden: "impulse, muon, 30 epochs"."""
        parts = [*self.names]
        for key, value in self.keys.items():
            name = key.rpartition(".")[2].replace("_", " ")
            if key in hidden:
                continue
            if value is None:
                parts.append(f"without {name}")
            elif type(value) is int and name.endswith("s"):
                many = name.removeprefix("num ")
                if value == 1 and not name.endswith("ss"):
                    many = many.removesuffix("s")
                parts.append(f"{value} {many}")
            else:
                text = value if isinstance(value, str) else to_toml(value)
                parts.append(text if name == "name" else f"{name} {text}")
        return ", ".join(filter(None, [*parts, self.commit]))

    @property
    def scores(self) -> dict[str, str]:
        """Its key in metrics.jsonl, of the model and of its moving average."""
        score = self.first.score
        return {"model": f"val_{score}", "EMA": f"ema_{score}"}

    def last(self, metric: str) -> dict[int, float]:
        """Seed → the metric's last value, for the runs that have any."""
        measured = {seed: run.measured(metric) for seed, run in self.runs.items()}
        return {seed: by_epoch[-1] for seed, by_epoch in measured.items() if by_epoch}


Groups = Sequence[Group]


def experiment(run: RunRecord) -> Json:
    """The keys, with their values, that distinguish one experiment from another."""
    free = {*FREE_KEYS}
    if run.keys["model.name"].startswith("convmixer_"):
        free.remove("optim.max_batch_per_process")  # BatchNorm sees the images of a micro-batch
    if not run.keys["init.checkpoint"]:
        free |= {"init.checkpoint_head", "init.checkpoint_positions"}  # nothing to fit
    if (MEANT | run.keys)["optim.name"] != "muon":
        free.add("optim.muon_dtype")  # which computes nothing
    return {key: value for key, value in (MEANT | run.keys).items() if key not in free}


def commit(run: RunRecord) -> str:
    """The first digits of the commit that the run began with; "unknown" without run.json."""
    return run.began.get("git_commit", "unknown")[:7]


def finished_runs(runs: Sequence[RunRecord]) -> tuple[list[RunRecord], list[str]]:
    """The finished runs, and a line for each of the others; CheckpointError if none is finished."""
    unfinished = [
        f"left out, not finished: {run.path}, {run.done} of {run.epochs} epochs"
        for run in runs
        if not run.finished
    ]
    if len(unfinished) == len(runs):
        raise CheckpointError(f"none of the runs is finished; {'; '.join(unfinished)}")
    return [run for run in runs if run.finished], unfinished


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Group the runs by experiment, in the order of their first runs.

    Runs of one experiment of which two have the same seed are grouped by the commit that they began
    with, too, since other code may do something else by the same recipe. Raises CheckpointError if
    two runs have all of these in common.
    """
    keys = [text_of(experiment(run)) for run in runs]
    seeds = Counter((key, run.seed) for key, run in zip(keys, runs))
    repeated = {key for (key, _), count in seeds.items() if count > 1}
    groups: dict[tuple[str, str], dict[int, RunRecord]] = {}
    for key, run in zip(keys, runs):
        members = groups.setdefault((key, commit(run) if key in repeated else ""), {})
        if run.seed in members:
            other = members[run.seed]
            on = ""
            if len({run.trained_on, other.trained_on} - {""}) > 1:
                on = ", though trained on other images"
            raise CheckpointError(
                f"{run.path}: the same experiment and seed {run.seed} as {other.path}{on}; expected "
                "one run per seed and commit"
            )
        members[run.seed] = run
    firsts = [next(iter(members.values())) for members in groups.values()]
    return [
        group_of(first, firsts, dict(sorted(members.items())))
        for first, members in zip(firsts, groups.values())
    ]


def text_of(settings: Json) -> str:
    """An experiment as a text that equal ones share; makes its integers floats."""
    for key, value in settings.items():
        if type(value) is int:
            settings[key] = float(value)  # 1 is 1.0
    return repr(sorted(settings.items()))


def group_of(run: RunRecord, firsts: Sequence[RunRecord], runs: Mapping[int, RunRecord]) -> Group:
    """The group of these runs, of which `run` is the first, with the keys in which it differs from
    others of the recipe. firsts: a run of each group.
    """
    rivals = [experiment(other) for other in firsts if other.recipe == run.recipe]
    settings, distinct = experiment(run), Json()
    for key in dict.fromkeys(key for rival in rivals for key in rival):
        value = settings.get(key)
        others = (rival for rival in rivals if rival.get(key) != value)
        if key != "init.name" and any(comparable(key, other, settings) for other in others):
            distinct[key] = value
    names = [settings["init.name"]]
    if len(rivals) < len(firsts):  # there are several recipes
        names.insert(0, run.recipe)
    began = f"commit {commit(run)}" if rivals.count(settings) > 1 else ""
    return Group(names, distinct, began, runs)


def comparable(key: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two experiments could have the same value of a key: options belong to a model, or an
    init, of one name, and an init has other ones for rotary attention.
    """
    section, _, option = key.partition(".options.")
    if option and one[f"{section}.name"] != other[f"{section}.name"]:
        return False
    if section != "init" or (key in one and key in other):
        return True
    return _rotary(one) == _rotary(other)


def _rotary(settings: Mapping[str, Any]) -> bool:
    return "rope" in settings.get("model.options.pos_embed", "")
