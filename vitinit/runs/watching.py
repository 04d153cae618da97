"""What sees a run and never changes it: watchers, by name, in the main process alone.

A watcher is told what happens, and may answer with lines, which are said. If it fails, a warning
says so, and the run goes on without it. To add one: a class here or elsewhere, and a row.

    WATCHERS["mine"] = Mine; vitinit.Run("quickstart", log=["mine"])
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ..base.messages import in_brief, warn
from ..base.table import find
from ..data.pipeline import Data
from ..data.sources import Source
from ..recipe.files import RecipeError
from ..recipe.sections import Recipe
from ..train.distributed import Processes
from ..train.metrics import Pace
from .folder import Lines, RunFolder

WATCHERS: dict[str, Any] = {
    "images": ".watch.survey:ImageWatcher", "mass": ".watch.mass:MassWatcher",
    "waiting": ".watch.slowness:WaitingWatcher",
    "tensorboard": ".watch.live:tensorboard_watcher", "wandb": ".watch.live:wandb_watcher"}
LOGGERS_NEED = ("tensorboard and wandb need pip install 'vitinit[tensorboard]' or "
                "'vitinit[wandb]'")
BY_DEFAULT = ("images", "mass", "waiting")           # of every run


class Watcher:
    """What a watcher may be told of; each method may return lines to be said."""

    def opened(self, data: Data, recipe: Recipe) -> Iterable[str] | None:
        """A new run's images are opened."""

    def initialised(self, model: nn.Module, recipe: Recipe, train_set: Source
                    ) -> Iterable[str] | None:
        """A new run's model has its init, still on the CPU."""

    def started(self, folder: RunFolder, step: int, steps_per_epoch: int) -> Iterable[str] | None:
        """The run begins, or goes on, at this step, in this folder."""

    def row(self, lines: Lines, row: Mapping[str, Any]) -> Iterable[str] | None:
        """A row was appended to the folder's steps or metrics."""

    def paced(self, paces: Sequence[Pace], recipe: Recipe, processes: Processes
              ) -> Iterable[str] | None:
        """How fast the first steps of each process were."""

    def ended(self) -> Iterable[str] | None:
        """The run has ended, however it did."""


class Watchers:
    """The watchers of these names. Raises RecipeError for one that there is not."""

    def __init__(self, names: Iterable[str]) -> None:
        self.by_name: dict[str, Watcher] = {}
        for name in names:
            if name not in WATCHERS:
                raise RecipeError(f"--log {name}: expected {' or '.join(WATCHERS)}; {LOGGERS_NEED}")
            self.by_name[name] = find(WATCHERS[name])()

    def tell(self, event: str, *facts: Any) -> list[str]:
        """Tell each watcher, by its method of this name; return the lines with which they answer.
        """
        lines: list[str] = []
        for name, watcher in list(self.by_name.items()):
            try:
                lines += getattr(watcher, event)(*facts) or ()
            except Exception as error:
                del self.by_name[name]
                warn(f"{name}: {in_brief(error)}; the run goes on without it")
        return lines
