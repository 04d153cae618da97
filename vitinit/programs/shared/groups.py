"""Runs that differ in nothing but the seed, as groups, for comparisons and figures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...base.files import CheckpointError
from ...base.values import to_toml
from ...recipe.absent import MEANT
from ...recipe.sections import MACHINE_KEYS
from .records import RunRecord

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
        return ", ".join(
            [
                *self.names,
                *(
                    f"without {key}" if value is None else f"{key} = {to_toml(value)}"
                    for key, value in self.keys.items()
                ),
                *filter(None, [self.commit]),
            ]
        )

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
                one = value == 1 and not name.endswith("ss")
                parts.append(f"{value} {name.removeprefix('num ').removesuffix('s' * one)}")
            else:
                text = value if isinstance(value, str) else to_toml(value)
                parts.append(text if name == "name" else f"{name} {text}")
        return ", ".join([*parts, *filter(None, [self.commit])])

    def last(self, metric: str) -> dict[int, float]:
        """Seed → the metric's last value, for the runs that have any."""
        return {
            seed: by_epoch[-1]
            for seed, run in self.runs.items()
            if (by_epoch := run.measured(metric))
        }


def experiment(run: RunRecord) -> dict[str, Any]:
    """The keys, with their values, that distinguish one experiment from another."""
    # The BatchNorm of a ConvMixer sees the images of a micro-batch.
    matter = ("optim.max_batch_per_process",) * run.keys["model.name"].startswith("convmixer_")
    mute = ("init.checkpoint_head",) * (not run.keys["init.checkpoint"])  # nothing to fit
    return {
        key: value
        for key, value in (MEANT | run.keys).items()
        if (key not in FREE_KEYS or key in matter) and key not in mute
    }


def commit(run: RunRecord) -> str:
    """The first digits of the commit that the run began with; "unknown" without run.json."""
    return run.began.get("git_commit", "unknown")[:7]


def finished_runs(runs: Sequence[RunRecord]) -> tuple[list[RunRecord], list[str]]:
    """The finished runs, and a line for each of the others; CheckpointError if none is finished."""
    unfinished = [
        f"left out, not finished: {run.path}, {len(run.rows)} of {run.epochs} epochs"
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
    keys = [
        repr(
            sorted(
                (key, float(value) if type(value) is int else value)  # 1 is 1.0
                for key, value in experiment(run).items()
            )
        )
        for run in runs
    ]
    seeds = Counter((key, run.seed) for key, run in zip(keys, runs))
    repeated = {key for (key, _), count in seeds.items() if count > 1}
    groups: dict[tuple[str, str], dict[int, RunRecord]] = {}
    for key, run in zip(keys, runs):
        members = groups.setdefault((key, commit(run) if key in repeated else ""), {})
        if run.seed in members:
            raise CheckpointError(
                f"{run.path}: the same experiment and seed {run.seed} as "
                f"{members[run.seed].path}; expected one run per seed and commit"
            )
        members[run.seed] = run
    firsts = [next(iter(members.values())) for members in groups.values()]
    return [
        _group(first, firsts, dict(sorted(members.items())))
        for first, members in zip(firsts, groups.values())
    ]


def _group(run: RunRecord, firsts: Sequence[RunRecord], runs: Mapping[int, RunRecord]) -> Group:
    """The group of these runs, of which `run` is the first, with the keys in which it differs from
    others of the recipe. Options are compared among models, or inits, of the same name; an init has
    other ones for rotary attention. firsts: a run of each group.
    """
    rivals = [experiment(other) for other in firsts if other.recipe == run.recipe]
    keys, distinct = experiment(run), dict[str, Any]()
    for key in dict.fromkeys(key for rival in rivals for key in rival):
        section, _, option = key.partition(".options.")
        compared = [
            rival
            for rival in rivals
            if not option or rival[f"{section}.name"] == keys[f"{section}.name"]
        ]
        if section == "init":
            compared = [
                rival
                for rival in compared
                if key in rival.keys() & keys.keys() or _rotary(rival) == _rotary(keys)
            ]
        if key != "init.name" and any(rival.get(key) != keys.get(key) for rival in compared):
            distinct[key] = keys.get(key)
    recipes = [run.recipe] if len(rivals) < len(firsts) else []  # named if there are several
    began = f"commit {commit(run)}" if rivals.count(keys) > 1 else ""
    return Group([*recipes, keys["init.name"]], distinct, began, runs)


def _rotary(keys: Mapping[str, Any]) -> bool:
    return "rope" in keys.get("model.options.pos_embed", "")
