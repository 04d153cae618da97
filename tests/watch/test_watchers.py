"""Watchers are told what happens in a run, in order, and nothing that they do changes it."""

import pytest
from same_run import assert_same_run

import vitinit
from vitinit.recipe.files import RecipeError
from vitinit.runs.watching import WATCHERS, Watchers


class Told:
    """Remembers what it was told, and fails at one of these events."""

    events: list[str] = []
    fails_at = ""

    def __getattr__(self, event: str):
        if event.startswith("__"):
            raise AttributeError(event)

        def told(*facts: object) -> list[str]:
            self.events.append(event)
            if event == self.fails_at:
                raise KeyError("broken")
            return [f"told of {event}"]

        return told


@pytest.mark.parametrize(
    "fails_at", ["", "opened", "initialised", "started", "row", "finished", "ended"]
)
def test_a_watcher_is_told_in_order_and_if_it_fails_the_run_goes_on_without_it(
    fails_at, train_program, small_run, straight, tmp_path, monkeypatch, capsys
):
    uncut, events = straight(schedule__epochs="2"), []
    monkeypatch.setitem(
        WATCHERS, "mine", type("Mine", (Told,), {"events": events, "fails_at": fails_at})
    )
    capsys.readouterr()
    command = small_run(tmp_path / "run", "--log", "mine", "--verbose", schedule__epochs="2")
    assert train_program.main(command) == 0
    printed = capsys.readouterr()
    assert_same_run(uncut, tmp_path / "run")
    order = ["initialised", "opened", "started", "row", "row", "finished", "ended"]
    assert events == (order[: order.index(fails_at) + 1] if fails_at else order)
    for event in ("initialised", "opened", "started", "row", "finished", "ended"):
        assert (f"told of {event}" in printed.out) == (
            not fails_at or order.index(event) < order.index(fails_at)
        )
    assert printed.err == (
        "warning mine: 'broken'; the run goes on without it\n" if fails_at else ""
    )


def test_what_no_watcher_can_be_is_a_warning(monkeypatch, capsys):
    """One that cannot be made, and one whose answer is no list of lines."""
    monkeypatch.setitem(WATCHERS, "unmade", lambda: {}["key"])
    monkeypatch.setitem(WATCHERS, "odd", type("Odd", (), {"ended": lambda self: 7}))
    watchers = Watchers(["unmade", "odd"])
    assert watchers.tell("started") == watchers.tell("ended") == []
    assert capsys.readouterr().err.splitlines() == [
        "warning unmade: 'key'; the run goes on without it",
        "warning odd: 'int' object is not iterable; the run goes on without it",
    ]


def test_a_run_has_some_watchers_unasked_and_none_that_there_is_not():
    assert {"images", "mass", "waiting"} <= vitinit.Run("quickstart").watchers.kinds.keys()
    with pytest.raises(RecipeError, match="--log mime: expected tensorboard or "):
        vitinit.Run("quickstart", log="mime")
