"""What sees a run and never changes it: watchers, by name, in the main process alone.

A watcher is an object with some of these methods. Each may answer with lines, which are said. If
one fails, a warning says so, and the run goes on without the watcher.

    opened(data, recipe)                        a new run's images are opened
    initialised(model, recipe, train_set)       a new run's model has its init, still on the CPU
    started(folder, step, steps_per_epoch)      the run begins, or goes on, at this step
    row(lines, row)                             a row was appended to the folder's steps or metrics
    paced(paces, recipe, processes)             how fast the first steps of each process were
    ended()                                     the run has ended, however it did

To add one: a class without arguments, here or elsewhere, and a row.

    WATCHERS["mine"] = Mine; vitinit.Run("quickstart", log=["mine"])
"""

from collections.abc import Iterable
from typing import Any

from ..base.messages import in_brief, warn
from ..base.table import find
from ..recipe.files import RecipeError

WATCHERS: dict[str, Any] = {
    "images": ".watch.survey:ImageWatcher", "mass": ".watch.mass:MassWatcher",
    "waiting": ".watch.slowness:WaitingWatcher",
    "tensorboard": ".watch.live:tensorboard_watcher", "wandb": ".watch.live:wandb_watcher"}
LOGGERS_NEED = ("tensorboard and wandb need pip install 'vitinit[tensorboard]' or "
                "'vitinit[wandb]'")
BY_DEFAULT = ("images", "mass", "waiting")           # of every run


class Watchers:
    """The watchers of these names. Raises RecipeError for one that there is not."""

    def __init__(self, names: Iterable[str]) -> None:
        self.by_name: dict[str, Any] = {}
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
                if hasattr(watcher, event):
                    lines += getattr(watcher, event)(*facts) or ()
            except Exception as error:
                del self.by_name[name]
                warn(f"{name}: {in_brief(error)}; the run goes on without it")
        return lines
