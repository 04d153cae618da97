"""What sees a run and never changes it: watchers, by name, in the main process alone.

A watcher is an object with some of these methods. Each may return lines, which the run prints. If
one fails, a warning says so, and the run goes on without the watcher.

    opened(data, recipe)                        a new run's images are opened
    initialised(model, recipe, train_set)       a new run's model has its init, still on the CPU
    started(folder, step, steps_per_epoch)      the run begins, or goes on, at this step
    measured(row, model, recipe, train_set)     a row of steps is to be written; it may get further
                                                entries, numbers or None
    row(lines, row)                             a row was appended to the folder's steps or metrics
    paced(paces, recipe, processes)             how fast the first steps of each process were
    finished(folder)                            all epochs are done
    ended()                                     the run has ended, however it did

To add one: a class without arguments, here or elsewhere, and a row.

    WATCHERS["mine"] = Mine; vitinit.Run("quickstart", log=["mine"])
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..base.messages import in_brief, warn
from ..base.table import find
from ..base.values import plain, show
from ..recipe.files import RecipeError
from .folder import is_number

WATCHERS: dict[str, Any] = {
    "images": ".watch.survey:ImageWatcher",
    "mass": ".watch.mass:MassWatcher",
    "waiting": ".watch.slowness:WaitingWatcher",
    "verdict": ".watch.verdict:VerdictWatcher",
    "tensorboard": ".watch.live:TensorBoard",
    "wandb": ".watch.live:WeightsAndBiases",
    "attention": ".watch.attention:AttentionWatcher",
}
LOGGERS_NEED = "tensorboard and wandb need pip install 'vitinit[tensorboard]' or 'vitinit[wandb]'"
BY_DEFAULT = ("images", "mass", "waiting", "verdict")  # of every run


class Watchers:
    """The watchers of these names, which are made once there is something to tell them. Raises
    RecipeError for one that there is not, or that cannot work here, as its `require` says.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.kinds: dict[str, Any] = {}
        self.by_name: dict[str, Any] = {}  # those that were made, and have not failed
        for name in names:
            if name not in WATCHERS:
                others = " or ".join(other for other in WATCHERS if other not in BY_DEFAULT)
                raise RecipeError(f"--log {name}: expected {others}; {LOGGERS_NEED}")
            self.kinds[name] = find(WATCHERS[name])
            getattr(self.kinds[name], "require", no_answer)()

    def require_model(self, model: nn.Module) -> None:
        """Raise RecipeError if one of them can see nothing of such a model, as it says itself."""
        for kind in self.kinds.values():
            getattr(kind, "require_model", no_answer)(model)

    def tell(self, event: str, *facts: Any) -> list[str]:
        """Tell each watcher, by its method of this name; return the lines with which they answer."""
        lines: list[str] = []
        for name in list(self.kinds):
            try:
                if name not in self.by_name:
                    self.by_name[name] = self.kinds[name]()
                method = getattr(self.by_name[name], event, no_answer)
                answer = measured(method, *facts) if event == "measured" else method(*facts)
                lines += map(str, answer or ())
            except Exception as error:
                del self.kinds[name]
                warn(f"{name}: {in_brief(error)}; the run goes on without it")
        return lines


def measured(method: Callable, row: dict[str, Any], *facts: Any) -> Any:
    """Call a watcher's `measured`, and add to the row what it adds. Raises TypeError for an entry
    with which the row could not be read again.
    """
    entries = dict(row)
    answer = method(entries, *facts)
    for key, value in plain(entries).items():  # plain: numpy's numbers become Python's
        if not is_number(value):
            raise TypeError(f"{key} is {show(value)}, expected a number or None")
        row.setdefault(str(key), value)
    return answer


def no_answer(*facts: Any) -> None:
    """What a watcher answers to an event for which it has no method."""
