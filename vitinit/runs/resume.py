"""Decide whether a run is begun, goes on or is finished, and lock its folder.

    --out-dir F                 a new run; F may hold nothing that a run writes
    --out-dir F --resume auto   goes on with F's run; a new one if F holds none
    --resume F                  goes on with F's run

A finished run is not trained again. A run goes on as it began: by its own recipe, of which only what describes
the machine may change, and with the same images. Results are never overwritten.
"""

import errno
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..base.files import CheckpointError, in_one_line, require_no_links
from ..base.messages import warn
from ..base.values import ReadOnly, Table, plain, to_toml
from ..data.folders import composed, since_left_out
from ..data.sources import SIZES
from ..recipe.absent import MEANT
from ..recipe.files import Override, RecipeError, from_dict, load_recipe
from ..recipe.sections import MACHINE_KEYS, Recipe
from ..train.device import automatic_values
from ..train.distributed import Processes
from ..train.loop import AMP_DTYPES
from ..train.optim import MUON_DTYPES
from .folder import RunFolder
from .imports import module_of

# Keys that may change on resume. The teacher's file may have moved: its digest among the data's facts
# shows that it is the same one.
MAY_CHANGE = ("data.root", "distill.teacher", "distill.weights", "distill.classes", *MACHINE_KEYS)
MAY_DIFFER_BETWEEN_PROCESSES = ("data.root", "data.workers")
# Values by which a recipe leaves a key open: a run goes on with its own.
LEFT_OPEN = {"data.num_classes": 0, "engine.amp": "auto", "optim.muon_dtype": "auto"}
# The locks that this process holds, by its number and the folder: a record lock keeps out other
# processes alone, and not another run of the same one.
TAKEN = dict[tuple[int, Path], "RunLock"]()


class Request(NamedTuple):
    """Which run is asked for, by a command line or in Python."""

    recipe: str | os.PathLike | None  # name or path; not needed with the folder of a run
    changes: Sequence[Override]  # of the recipe's keys, in the order in which they apply
    out_dir: Path | None  # None: runs/<recipe>-<init>-s<seed>
    resume: str | os.PathLike | None  # None: a new run; "auto": that in out_dir; or a folder
    command: list[str] | None = None  # the words of the command line, if one asks for it
    first_epochs: int | None = None  # so many are trained; None: all
    imports: Mapping[str, str] = ReadOnly()  # what `import_parts` returned

    def as_dict(self) -> dict[str, Any]:
        """The request as run.json states it; what was not given is left out."""
        words: dict[str, Any] = {
            key: str(value)
            for key, value in self._asdict().items()
            if key not in ("changes", "command", "imports") and value is not None
        }
        return words | {"changes": {change.key: plain(change.value) for change in self.changes}}


class ToDo(Enum):
    """What is to be done in the folder of a run."""

    BEGIN = "begin a new run"
    GO_ON = "go on from its checkpoint"
    NOTHING = "nothing: the run is finished, and no checkpoint is left"


class Decision(NamedTuple):
    """What the main process decides for all, by what it sees on disk."""

    to_do: ToDo
    # Of a new run: what the keys are that its recipe leaves to the device.
    automatic: Mapping[str, str]


class Choice(NamedTuple):
    """The run to train."""

    recipe: Recipe
    saved: dict[str, Any] | None  # the checkpoint to go on from; None for a new run
    written_root: str  # data.root as it was written, which checkpoints keep
    classes: Sequence[str] | None = ()  # as of `open_training_set`
    strided: bool = False  # how images that are mixed share a micro-batch, see `BatchPlan` in data/


class RunLock(ExitStack):
    """Locks a run's folder for this process, from `take` until the `with` block ends.

    It is a record lock (fcntl.lockf) on the file run.lock, which names the process that took it
    last. The kernel releases it however the process ends, also on a network file system, and a
    forked loader worker does not have it. A process loses a record lock as soon as it closes the
    file, even through another handle; therefore the file is opened only here, and only once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.handles: dict[Path, int] = {}  # folder → handle of its run.lock; one, once it is taken

    def keep(self) -> None:
        """Take the lock again if run.lock was deleted; CheckpointError if another run has since
        begun here, perhaps ended, too: this one would overwrite its results.
        """
        for folder, handle in list(self.handles.items()):
            try:
                there = os.stat(folder / "run.lock")
            except OSError:  # it was deleted
                self.handles.clear()
                self.take(folder)
                return
            if not os.path.samestat(os.fstat(handle), there):
                raise CheckpointError(
                    f"{folder}: run.lock was deleted, and another run has begun here; this one "
                    "writes nothing more"
                )

    def take(self, folder: Path) -> None:
        """Lock the folder; raise CheckpointError, which names the holder, if another process has.
        If the file system has no locks, a warning says so and the folder stays unlocked; on a
        system that has none, Windows, it is CheckpointError.
        """
        try:
            import fcntl
        except ImportError:  # Windows
            raise CheckpointError(
                f"{folder}: this system has no file locks, by which a run keeps others out; expected "
                "Linux, macOS, or Linux within Windows (WSL)"
            ) from None
        if self.handles:
            return
        here = os.getpid(), folder.resolve()
        if TAKEN.setdefault(here, self) is not self:
            raise CheckpointError(
                f"{folder}: another run of this process is writing here; wait until it ends, or "
                "choose another out_dir"
            )
        self.callback(TAKEN.pop, here, None)
        with in_one_line(folder):
            require_no_links(folder)
            handle = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT, 0o666)
        self.callback(os.close, handle)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = os.pread(handle, 200, 0).decode(errors="replace").strip()
                raise CheckpointError(
                    f"{folder}: another run is writing here ({holder}); wait "
                    "until it ends, or end it, or choose another --out-dir"
                ) from None
            warn(f"{folder}: this file system has no locks, so nothing keeps a second run out")
        self.handles[folder] = handle
        since = datetime.now(UTC).isoformat(timespec="seconds")
        holder = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n"
        with suppress(OSError):  # the disk is full; the lock holds nevertheless
            os.ftruncate(handle, 0)
            os.write(handle, holder.encode())


def choose_run(
    request: Request, processes: Processes, lock: RunLock, *, dry_run: bool = False
) -> tuple[RunFolder, Choice | None]:
    """The folder of the run to train, and the run; None if it is finished already. A dry run is a
    new one, and looks at no folder. Raises the same OneLineError on all processes, also if their
    recipes or versions of torch differ.
    """
    with processes.together():
        recipe, folder = asked_for(request)
    decision = processes.from_main(
        partial(decide, request, folder, recipe, lock, processes.device, dry_run=dry_run)
    )
    if decision.to_do is ToDo.NOTHING:
        return folder, None
    if recipe is not None and decision.to_do is ToDo.BEGIN:
        choice = Choice(recipe.with_automatic(decision.automatic), None, recipe.data.root)
    else:
        with processes.together():
            choice = resumed_run(request, folder, recipe)
    keys = {
        key: value
        for key, value in choice.recipe.keys.items()
        if key not in MAY_DIFFER_BETWEEN_PROCESSES
    }
    facts: Table = {
        "the version of torch": torch.__version__,
        "the kind of device": processes.device.type,
        "the step to go on from": folder.step,
        "the SHA-256 of --import": [*request.imports.values()],
    }
    processes.require_equal(keys | facts)
    return folder, choice


def asked_for(request: Request) -> tuple[Recipe | None, RunFolder]:
    """The recipe and the folder of the run that is asked for. The recipe is None where --resume
    names the folder of a run, whose own recipe counts.
    """
    if request.resume not in (None, "auto"):
        path = os.fspath(request.resume)
        if path == "":
            raise RecipeError("--resume is empty; expected the folder of a run, or auto")
        return None, RunFolder(Path(path))
    recipe = load_recipe(request.recipe, request.changes)
    name = f"{recipe.name}-{recipe.init.name}-s{recipe.run.seed}"
    return recipe, RunFolder(request.out_dir or Path("runs", name))


def decide(
    request: Request,
    folder: RunFolder,
    recipe: Recipe | None,
    lock: RunLock,
    device: torch.device,
    *,
    dry_run: bool,
) -> Decision:
    """What to do in the folder of a run; it is locked from here on if it may hold one.

    recipe: as of `asked_for`. Raises CheckpointError as `to_do_in` does, or RunFolder's
    `require_unused`.
    """
    to_do = ToDo.BEGIN
    if request.resume is not None and not dry_run:
        found_in_it = folder.results() or folder.holds_checkpoint()
        if found_in_it or (request.resume == "auto" and folder.path.is_dir()):
            lock.take(folder.path)
        to_do = to_do_in(folder, recipe)
    elif not dry_run:
        folder.require_unused()
    begun = {} if dry_run else begun_with([folder.path])
    return Decision(to_do, automatic_values(device) | begun)


def begun_with(folders: Iterable[Path]) -> dict[str, str]:
    """What the first run that has begun in one of these folders states for keys that may be "auto"."""
    known = {"engine.amp": [*AMP_DTYPES], "optim.muon_dtype": [*MUON_DTYPES]}
    for folder in folders:
        if (folder / "recipe.toml").exists():
            keys = MEANT | RunFolder(folder).keys()
            return {key: keys[key] for key, words in known.items() if keys.get(key) in words}
    return {}


def to_do_in(folder: RunFolder, recipe: Recipe | None) -> ToDo:
    """What to do in a folder by --resume.

    recipe: the one that the command line asks for; None if --resume names the folder. Raises
    CheckpointError where nothing can go on and a new run would overwrite results, or another run.
    """
    results = folder.results()
    if folder.holds_checkpoint():
        return ToDo.GO_ON
    if recipe is None and not folder.path.is_dir():
        return ToDo.GO_ON  # reading the checkpoint says that there is no such folder
    if not results:
        if recipe is None:
            raise CheckpointError(
                f"{folder.path}: holds no checkpoint to go on from yet; the command that started "
                "it, with --resume auto, starts it again"
            )
        if folder.recipe.exists():
            require_same(folder.path, folder.keys(), recipe.keys)
        return ToDo.BEGIN
    began = folder.keys()
    done = folder.metrics.count()
    if recipe is not None:
        require_same(folder.path, began, recipe.keys)
    epochs = began["schedule.epochs"] + began["schedule.cooldown_epochs"]
    if done != epochs:
        raise CheckpointError(
            f"{folder.path}: holds {', '.join(results)} of {done} of "
            f"{epochs} epochs but no last.pt to go on from; start anew in "
            "another --out-dir, or move this folder away"
        )
    return ToDo.NOTHING


def resumed_run(request: Request, folder: RunFolder, recipe: Recipe | None) -> Choice:
    """Read the run's last checkpoint and its recipe, of which hardly anything may change.

    recipe: the one that is asked for; None: the run's own, with the changes that are. Raises
    RecipeError if that is another one, and CheckpointError if a file of the run cannot be read.
    """
    if request.out_dir is not None and request.out_dir.resolve() != folder.path.resolve():
        raise RecipeError(
            f"--out-dir {request.out_dir} differs from --resume {folder.path}; a run "
            "goes on in its own folder"
        )
    for lines in (folder.metrics, folder.steps):
        lines.count()  # a damaged file is an error now, not later
    require_same_imports(folder, request.imports)
    state = folder.load_last()
    source = str(folder.read_from)
    stored = from_dict(state["recipe"], source)
    if recipe is None:
        if request.recipe is not None and Path(request.recipe).stem != stored.name:
            raise RecipeError(
                f"--recipe {request.recipe} differs from the run's recipe {stored.name}"
            )
        recipe = from_dict(stored.as_dict(), source, request.changes)
    require_same(folder.path, stored.keys, recipe.keys)
    recipe = recipe.with_automatic(stored.keys)
    written = recipe.data.root
    typed = any(change.key == "data.root" for change in request.changes)
    # A relative path of the run's was relative to elsewhere; one that is typed now is meant here.
    if written == stored.data.root and not (typed and request.resume != "auto"):
        recipe = recipe.with_data(root=folder.data_of(-1).get("root", written))
    classes = state.get("classes") or None
    if classes is None and "init.checkpoint_classes" in folder.keys():
        classes = ()  # the key is younger than the order that lists have now
    starts = folder.starts()
    if not starts:
        warn(
            f"{folder.info}: is missing, so whether the run began with the same images, teacher and "
            "--import is not compared, and mixed pairs are dealt out as in new runs"
        )
    # Before runs recorded it, pairs were strided.
    return Choice(
        recipe, state, written, classes, folder.data_of(-1).get("strided pairs", bool(starts))
    )


def require_same(run: Path, began: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise RecipeError, naming the first fact that differs, unless a run goes on as it began.
    run: its folder. began, now: the keys of its recipe, or facts of its data, name → value. A
    model's or init's name comes before its options. A key younger than the run means what it did
    before it was there.
    """
    for key in dict.fromkeys([*now, *began]):
        before, after = began.get(key, MEANT.get(key)), now.get(key)
        counts = key not in MAY_CHANGE and (key, after) not in LEFT_OPEN.items()
        if counts and before != after:
            raise RecipeError(
                f"{run}: holds another run, with {key} = {stated(before)} and not {stated(after)}; "
                "a run goes on as it began, and a new one, in another --out-dir, starts from its "
                f"weights with --set init.checkpoint={run}"
            )


def require_same_imports(folder: RunFolder, now: Mapping[str, str]) -> None:
    """Raise RecipeError if a run would go on without a part of one's own that it has; warn if the
    file of one has changed, perhaps as it was mended. now: what `import_parts` returned.
    """
    digests = {module_of(name): digest for name, digest in now.items()}
    began = folder.imports
    for name, before in began.items():
        after = digests.get(module_of(name))
        if after is None:
            words = " --import ".join(began)
            raise RecipeError(f"{folder.path}: was trained with --import {words}; give it again")
        if after != before:
            warn(
                f"--import {name}: has changed since {folder.path} was started last, from SHA-256 "
                f"{before} to {after}; the run goes on with what it says now"
            )


def stated(value: Any) -> str:
    """A fact as a recipe states it."""
    return "nothing" if value is None else to_toml(value)


def require_same_data(
    folder: RunFolder,
    saved: Mapping[str, Any],
    classes: Sequence[str],
    now: Mapping[str, Any],
    processes: Processes,
) -> None:
    """Raise RecipeError, on all processes, if a run would go on with other images, or another
    teacher. What it has not recorded is not compared.

    saved: the checkpoint to resume from. classes: of the images now. now: the next start's `data`.
    """
    with processes.together():
        began = folder.data_of(0)
        if folder.starts():
            began.setdefault("teacher", "none")  # once there were no teachers
        began |= numbered(saved.get("classes") or classes)
        # Images that had to be mended have other sizes since the last start.
        began[SIZES] = folder.data_of(-1).get(SIZES, now.get(SIZES))
        root = Path(now["root"] or os.devnull)
        fewer = sum(
            began.get(key, 0) - now[key] for key in ("training images", "validation images")
        )
        now = numbered(classes) | {key: value for key, value in now.items() if key != "root"}
        began = {key: began.get(key, value) for key, value in now.items()}
        try:
            require_same(folder.path, began, now)
        except RecipeError as error:
            raise RecipeError(f"{error}{since_left_out(root, fewer)}") from None


def numbered(classes: Sequence[str]) -> dict[str, str]:
    """The classes as facts that are compared one by one."""
    return {f"class {number}": composed(name) for number, name in enumerate(classes)}
