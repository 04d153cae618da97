"""Power that fails at any moment: the run goes on from a checkpoint whose lines are all there.

A run's calls to the operating system are recorded in order. The model of the file system is that of
POSIX, which promises nothing but what was synchronised, with one addition of all file systems with
a journal, that names change in order:

    content     what a file had at its last fsync is on disk. Of what was written since then,
                nothing may be there, or half of it, or all of it.
    names       creating, linking, renaming and deleting change the folder. The changes up to the
                folder's last fsync are on disk; of the later ones, any number of the first.

A folder is rebuilt for every moment, every number of changes of names and each of three contents.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from vitinit.runs.folder import RunFolder

Names = dict[str, int]  # name → number of a file
LOCK = "run.lock"  # of no use after a power failure


class Disk:
    """Records what this process does in a folder, without its subfolders."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.names = folder, Names()
        self.kept = False  # whether the folder itself is on disk
        self.numbers = 0  # of files so far
        self.contents: dict[int, bytes] = {}  # of each file now, since the first write
        # Every event is (kind, names after it or None, number of the file, its content).
        self.events: list[tuple[str, Names | None, int, bytes]] = []
        for name in ("fsync", "link", "replace", "rename", "unlink", "remove"):
            monkeypatch.setattr(os, name, self._recorded(name, getattr(os, name)))

    def _name(self, path: object) -> str | None:
        """The name of a file of the folder; None for a path elsewhere."""
        if not isinstance(path, (str, os.PathLike)):
            return None
        path = Path(path)
        return path.name if path.parent == self.folder and path.name != LOCK else None

    def _note(self, kind: str) -> None:
        self.events.append((kind, dict(self.names), -1, b""))

    def look(self) -> None:
        """Note the files that were created, and what was written, since the last time."""
        for path in sorted(self.folder.glob("*")):
            if path.name == LOCK:
                continue
            if path.name not in self.names:
                self.names[path.name], self.numbers = self.numbers, self.numbers + 1
                self._note("create")
            number, content = self.names[path.name], path.read_bytes()
            if self.contents.get(number) != content:
                self.contents[number] = content
                self.events.append(("write", None, number, content))

    def _recorded(self, call: str, real):
        def fsync(handle: int) -> None:
            self.look()
            real(handle)
            path = Path(os.readlink(f"/proc/self/fd/{handle}"))
            if path == self.folder.parent:
                self.kept = True
            elif path == self.folder:
                self._note("sync folder")
            elif self._name(path) is not None:
                self.events.append(("sync", None, self.names[path.name], b""))

        def two(old, new, **options) -> None:
            self.look()
            real(old, new, **options)
            old, new = self._name(old), self._name(new)
            if new is not None and self.names.get(old) != self.names.get(new):
                self.names[new] = self.names[old] if call == "link" else self.names.pop(old)
                self._note(call)

        def one(path, **options) -> None:
            self.look()
            real(path, **options)
            if self._name(path) is not None:
                del self.names[self._name(path)]
                self._note(call)

        return {"fsync": fsync, "unlink": one, "remove": one}.get(call, two)

    def states(self) -> Iterator[tuple[int, dict[str, bytes]]]:
        """Every folder that a power failure may leave, once: (events before it, files)."""
        seen: set[frozenset] = set()
        for moment in range(len(self.events) + 1):
            past = self.events[:moment]
            synced, now = _contents(past)
            folders = [Names()]
            for kind, names, _, _ in past:
                if kind == "sync folder":
                    folders = [names]
                elif names is not None:
                    folders.append(names)
            for names in folders:
                for share in (0, 0.5, 1):
                    files = {
                        name: _left(synced.get(number, b""), now.get(number, b""), share)
                        for name, number in names.items()
                    }
                    if frozenset(files.items()) not in seen:
                        seen.add(frozenset(files.items()))
                        yield moment, files


def _contents(past: list[tuple]) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """What the disk has of each file for certain, and what was written last, after some events."""
    synced, now = {}, {}
    for kind, _, number, content in past:
        if kind == "write":
            now[number] = content
        elif kind == "sync":
            synced[number] = now.get(number, b"")
    return synced, now


def _left(synced: bytes, now: bytes, share: float) -> bytes:
    """What a file has of its unsynchronised content, of which a `share` has reached the disk."""
    if share in (0, 1):
        return now if share else synced
    if not now.startswith(synced):  # it was emptied first
        return b""
    return now[: len(synced) + (len(now) - len(synced)) // 2] if len(now) > len(synced) else now


@pytest.fixture
def disk(train_program, small_run, tmp_path, monkeypatch, stop_before) -> tuple[Disk, list]:
    """The record of a run of 12 steps that is stopped after the ninth and resumed. Also, for each
    last.pt that was saved, the number of events by then and its step."""
    folder, saved = tmp_path / "run", []
    with monkeypatch.context() as patch:
        disk, real = Disk(folder, patch), RunFolder.save

        def save(self, state: dict, path: Path) -> None:
            real(self, state, path)
            if path == self.last:
                saved.append((len(disk.events), state["step"]))

        patch.setattr(RunFolder, "save", save)
        with monkeypatch.context() as stopping:  # an epoch looks 5 times, an evaluation 7
            stopping.setattr("vitinit.run.StopRequest", stop_before(2 * (5 + 7) + 1))
            arguments = small_run(
                folder, checkpoint__every_steps="5", checkpoint__keep_epochs="[1]"
            )
            assert train_program.main(arguments) == 128 + signal.SIGTERM
        assert train_program.main(["--resume", str(folder)]) == 0
    disk.look()
    return disk, saved


def test_power_that_fails_at_any_moment_costs_no_line_or_checkpoint(disk, tmp_path, monkeypatch):
    disk, saved = disk
    assert disk.kept
    assert [step for _, step in saved] == [0, 4, 4, 5, 8, 8, 9, 10, 12, 12]
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    states = list(disk.states())
    assert {
        path.name: path.read_bytes() for path in disk.folder.iterdir() if path.name != LOCK
    } == states[-1][1]  # nothing was written past the record
    steps: dict[bytes, int] = {}  # content of a last.pt → its step
    for number, (moment, files) in enumerate(states):
        folder = RunFolder(tmp_path / str(number))
        folder.make()
        for name, content in files.items():
            (folder.path / name).write_bytes(content)
        safe = max((step for before, step in saved if before <= moment), default=None)
        if safe is None and "last.pt" not in files:  # the command that began it begins it again
            folder.require_unused(starts_again=True)
            continue
        state = folder.load_last()
        assert folder.read_from == folder.last, (moment, sorted(files))
        epochs, step = state["progress"]["epochs"], state["step"]
        folder.tidy(epochs=epochs, steps=step)
        for lines, numbers in (
            (folder.metrics, range(1, epochs + 1)),
            (folder.steps, range(10, step + 1, 10)),
        ):
            assert [row[lines.key] for row in lines.rows()] == list(numbers), (moment, files.keys())
        assert state["step"] >= (safe or 0) and folder.recipe.exists()
        steps[files["last.pt"]] = state["step"]
        assert "previous.pt" not in files or steps[files["previous.pt"]] <= state["step"]
        folder.save({"step": 13}, folder.last)  # the next one is written as ever
        assert folder.previous.read_bytes() == files["last.pt"]
        assert not list(folder.path.glob("*.partial"))
