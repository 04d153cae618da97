"""Live curves: the rows of a run, sent to TensorBoard or Weights & Biases as they are written.

They are drawn as steps/loss, metrics/val_top1 and so on, over the number of steps done. The moment
of a row is twice that; plus 1 for an epoch, which follows its last step.
"""

import math
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from queue import SimpleQueue
from threading import Thread
from typing import Any, ClassVar

from ..base.messages import in_brief, warn
from ..recipe.files import RecipeError
from ..runs.folder import Lines, RunFolder
from ..runs.watching import LOGGERS_NEED

LAST_SECONDS = 10.0  # that a logger has, once the run has ended, for those that wait
Values = Mapping[str, Any]
Item = tuple[int, dict[str, float]]  # moment, tag → value


def tensorboard(folder: RunFolder, step: int, rows: Iterator[Item]) -> None:
    """Write a file in <run>/tensorboard, which from `step` on replaces what is in earlier ones."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    place = folder.path / "tensorboard"
    first = 2 * step if place.exists() else 0
    place.mkdir(exist_ok=True)
    # Not torch's SummaryWriter: an error in its thread is printed with a traceback.
    with open(place / f"events.out.tfevents.{time.time_ns()}", "xb") as file:

        def write(**event: Any) -> None:
            RecordWriter(file).write(Event(wall_time=time.time(), **event).SerializeToString())
            file.flush()

        write(file_version="brain.Event:2")
        write(step=step, session_log={"status": "START"})
        for moment, values in rows:
            if moment >= first:
                points = [{"tag": tag, "simple_value": value} for tag, value in values.items()]
                write(step=moment // 2, summary={"value": points})


def wandb(folder: RunFolder, step: int, rows: Iterator[Item]) -> None:
    """Send to the run of this folder, which goes on after all that was sent to it before."""
    import wandb as library

    name, begun = folder.path.name, folder.starts()[0]["time"]
    run = library.init(
        name=name,
        id=f"{name}-{begun[:19]}".replace(":", ""),
        resume="allow",
        dir=folder.path,
        reinit="create_new",
        settings=library.Settings(console="off", finish_timeout=LAST_SECONDS),
    )
    run.define_metric("*", step_metric="step")
    first = run.step
    for moment, values in rows:
        if moment >= first:
            run.log(values | {"step": moment // 2}, step=moment, commit=True)
    run.finish()


LOGGERS = {"tensorboard": tensorboard, "wandb": wandb}


class LiveCurves(Thread):
    """Sends the rows of a run, which is at `step`, to a logger, and can neither hold nor end it."""

    def __init__(self, name: str, folder: RunFolder, *, step: int, steps_per_epoch: int) -> None:
        super().__init__(name=name, daemon=True)
        self.folder, self.step, self.steps_per_epoch = folder, step, steps_per_epoch
        self.waiting: SimpleQueue = SimpleQueue()
        self.left = False  # by a run that ended before all was sent
        items = []
        for lines in (folder.steps, folder.metrics):
            items += [self._item(lines, row) for row in lines.rows()]
        for item in sorted(items):
            self.waiting.put(item)
        self.start()

    def _item(self, lines: Lines, row: Values) -> Item:
        if "step" in row:
            moment = 2 * row["step"]
        else:
            moment = 2 * self.steps_per_epoch * row["epoch"] + 1
        values = {}
        for key, value in row.items():
            if key != "step" and value is not None and math.isfinite(value):
                values[f"{lines.path.stem}/{key}"] = value
        return moment, values

    def send(self, lines: Lines, row: Values) -> None:
        """Send a row that was appended to these lines of the folder; this does not wait."""
        if self.is_alive():
            self.waiting.put(self._item(lines, row))

    def run(self) -> None:
        try:
            LOGGERS[self.name](self.folder, self.step, iter(self.waiting.get, None))
        except BaseException as error:  # also what only ends a thread
            if not self.left:
                warn(f"log: {self.name} gets no more rows ({in_brief(error)}); the run goes on")

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """Wait until all is sent, but no longer than that."""
        self.waiting.put(None)
        self.join(seconds)
        if self.is_alive():
            self.left = True
            warn(f"log: {self.name} has not taken all rows within {seconds:g} s")


class LiveWatcher:
    """Live curves of a run by a logger, whose name a subclass states."""

    name: ClassVar[str]
    curves: LiveCurves | None = None  # from the start of the run on

    @classmethod
    def require(cls) -> None:
        """Raise RecipeError unless the logger is installed."""
        if not find_spec(cls.name):
            raise RecipeError(f"--log {cls.name}: expected it to be installed; {LOGGERS_NEED}")

    def started(self, folder: RunFolder, step: int, steps_per_epoch: int) -> None:
        self.curves = LiveCurves(self.name, folder, step=step, steps_per_epoch=steps_per_epoch)

    def row(self, lines: Lines, row: Values) -> None:
        if self.curves is not None:
            self.curves.send(lines, row)

    def ended(self) -> None:
        if self.curves is not None:
            self.curves.close()


class TensorBoard(LiveWatcher):
    name = "tensorboard"


class WeightsAndBiases(LiveWatcher):
    name = "wandb"
