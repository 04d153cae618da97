"""Live curves: the rows of a run, sent to TensorBoard or Weights & Biases as they are written.

These get the rows of steps.jsonl and metrics.jsonl, as steps/loss, metrics/val_top1 and so on, over
the number of steps done. Each has a thread of its own, and can neither end nor hold the run.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from queue import SimpleQueue
from threading import Thread
from typing import Any

from ..messages import in_brief, warn
from ..recipe.files import RecipeError
from .folder import Lines, RunFolder

MOST_ROWS = 100_000             # that wait for a logger which hangs
LAST_SECONDS = 10.0             # that a logger has, once the run has ended, for those that wait
# Of a logger: the last moment whose values it has, and functions that send more and end it. Moments
# increase from row to row: twice the steps done, plus 1 for an epoch, which follows its last step.
Logger = tuple[int, Callable[[int, dict[str, float]], object], Callable[[], object]]


def tensorboard(folder: RunFolder, step: int) -> Logger:
    """Write a file in <run>/tensorboard, which from `step` on replaces what is in earlier ones."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter
    place = folder.path / "tensorboard"
    begun = place.exists()
    place.mkdir(exist_ok=True)
    # Not torch's SummaryWriter: an error in its thread is printed with a traceback.
    file = RecordWriter(open(place / f"events.out.tfevents.{time.time_ns()}", "xb"))

    def write(step: int, **content: Any) -> None:
        file.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
        file.flush()
    write(0, file_version="brain.Event:2")
    write(step, session_log={"status": "START"})
    return 2 * step - 1 if begun else 0, lambda moment, values: write(
        moment // 2, summary={"value": [{"tag": tag, "simple_value": value}
                                        for tag, value in values.items()]}), file.close


def wandb(folder: RunFolder, step: int) -> Logger:
    """Send to the run of this folder, which goes on after all that was sent to it before."""
    import wandb as library
    name, begun = folder.path.name, folder.starts()[0]["time"]
    run = library.init(name=name, id=f"{name}-{begun[:19]}".replace(":", ""), resume="allow",
                       dir=folder.path, reinit="create_new", settings=library.Settings(
                           console="off", finish_timeout=LAST_SECONDS))
    run.define_metric("*", step_metric="step")
    return run.step - 1, lambda moment, values: run.log(
        values | {"step": moment // 2}, step=moment, commit=True), run.finish


LOGGERS = {"tensorboard": tensorboard, "wandb": wandb}


def require_loggers(names: Iterable[str]) -> None:
    """Raise RecipeError unless all of these are names of `LOGGERS` and can be imported."""
    for name in names:
        try:
            import_module(LOGGERS[name].__name__)
        except Exception as error:                   # whatever an import raises
            raise RecipeError(
                f"--log {name}: cannot be imported ({in_brief(error)}); expected tensorboard or "
                "wandb, which pip install 'vitinit[tensorboard,wandb]' installs") from None


class LiveCurves(Thread):
    """Sends the rows that a run's folder holds, and then those given to `send`, to a logger.

    name: of the logger. step: at which the run begins or goes on. A logger that raises an error, or
    does not take the rows, is one warning, and is then left alone.
    """

    def __init__(self, name: str, folder: RunFolder, *, step: int, steps_per_epoch: int) -> None:
        super().__init__(name=name, daemon=True)
        self.folder, self.step, self.steps_per_epoch = folder, step, steps_per_epoch
        self.waiting: SimpleQueue = SimpleQueue()
        self.left = False                            # after the end of the run
        for item in sorted(self._item(lines, row) for lines in (folder.steps, folder.metrics)
                           for row in lines.rows()):
            self.waiting.put(item)
        self.start()

    def send(self, lines: Lines, row: Mapping[str, Any]) -> None:
        """Send a row of these lines of the folder; this does not wait."""
        if self.is_alive() and self.waiting.qsize() < MOST_ROWS:
            self.waiting.put(self._item(lines, row))

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """Wait until all is sent, but no longer than that."""
        self.waiting.put(None)
        self.join(seconds)
        self.left = self.is_alive()
        if self.left:
            warn(f"log: {self.name} has not taken all rows within {seconds:g} s")

    def _item(self, lines: Lines, row: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
        moment = (2 * row["step"] if lines is self.folder.steps else
                  2 * self.steps_per_epoch * row["epoch"] + 1)
        return moment, {f"{lines.path.stem}/{key}": value for key, value in row.items()
                        if key != "step" and value is not None and math.isfinite(value)}

    def run(self) -> None:
        try:
            last, send, end = LOGGERS[self.name](self.folder, self.step)
            for moment, values in iter(self.waiting.get, None):
                if moment > last:
                    send(moment, values)
            end()
        except BaseException as error:               # also what only ends a thread
            if not self.left:
                warn(f"log: {self.name} gets no more rows ({in_brief(error)}); the run goes on")
