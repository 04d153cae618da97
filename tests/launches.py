"""How often a GPU would be given work, counted on any device or without one (FakeTensorMode)."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """Counts PyTorch's operations inside `with Launches() as launches:`.
    by_name: number of calls of each operation except views, which give a device nothing to do. Most
        of these operations launch one kernel, some none, and some two or three.
    uploads, downloads: number of copies from the host to another device, and back.
    waits: number of the uploads for which the host would wait, even from pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()
        self.uploads = self.downloads = self.waits = 0

    @property
    def count(self) -> int:
        return self.by_name.total()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple = (), keywords: dict | None = None
    ) -> Any:
        result = function(*arguments, **keywords or {})
        if function.namespace != "prim" and not function.is_view:  # "prim": queries of the device
            self.by_name[function.name()] += 1
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            in_place = function is torch.ops.aten.copy_.default
            source = arguments[1] if in_place else arguments[0]
            on_host = source.device.type == "cpu", result.device.type == "cpu"
            self.uploads += on_host == (True, False)
            waits = not (keywords or {}).get("non_blocking", in_place and True in arguments[2:])
            self.waits += on_host == (True, False) and waits
            self.downloads += on_host == (False, True)
        return result


def launches_of(action: Callable[[], object]) -> Launches:
    """Call `action` and count its operations."""
    with Launches() as launches:
        action()
    return launches
