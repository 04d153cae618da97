"""Parts of one's own: files that register inits, models, data sets, tasks or watchers.

    vitinit train --import mine.py …              vitinit.Run("quickstart", imports=["mine.py"])

To import a file is to run its code. So only the words of a command line and a caller's arguments
name one: no recipe, folder of a run or archive makes anything be imported.
"""

import importlib
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from ..base.files import read_bytes
from ..base.messages import OneLineError
from ..base.table import module_named


def import_parts(names: Iterable[str | os.PathLike]) -> dict[str, str]:
    """Import parts of one's own, each the path of a .py file or the name of a module; return by
    name the SHA-256 of each file as it was first imported, which does not cover what it imports.

    A file is imported under its own name, from its folder, which comes last on Python's path: so
    worker processes, which are given that path, find it as well. Raises OneLineError for a file or
    a module that is not there, or has the name of another; an error in it is passed on.
    """
    return {str(name): import_part(str(name)) for name in names}


def import_part(name: str) -> str:
    """Import one of `import_parts`; return its file's SHA-256."""
    module = module_of(name)
    is_path = name != module
    folder = os.path.dirname(os.path.abspath(name))
    if is_path and folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()  # the file may have been written a moment ago
    spec = None
    with suppress(ImportError, ValueError):  # of a package that is not there; of an empty name
        spec = find_spec(module)
    file = spec.origin if spec else None
    has = file or "nothing"
    if module.partition(".")[0] in sys.stdlib_module_names:
        file, has = None, "one of its own, which registers nothing"
    if file is None or is_path and os.path.realpath(file) != os.path.realpath(name):
        raise OneLineError(
            f"--import {name}: expected a file (.py, and no other dot in its name) or a module that "
            f"is there, whose name is that of no other; as {module}, Python has {has}"
        )
    digest = sha256(read_bytes(file)).hexdigest()
    return vars(module_named(module)).setdefault("__sha256__", digest)


def module_of(name: str) -> str:
    """The name of the module, of a file's path or of a module: "parts/mine.py" → "mine"."""
    return Path(name).stem if name.endswith(".py") else name
