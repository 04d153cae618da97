"""What is chosen by name: a table has the thing itself, or says where it is.

    INITS["mine"] = {"vit": my_init}                     the thing
    INITS["mine"] = {"vit": "my_package.inits:my_init"}  imported when it is first used

A place that begins with a dot is in this package. No other module imports by a call, so whatever
the package can reach stands in an import statement or in a table, or is named by the user.
"""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def module_named(name: str) -> ModuleType:
    """The module of this name, which is imported if it was not yet."""
    return importlib.import_module(name, "vitinit")


def find(row: Any) -> Any:
    """What a row of a table stands for: the thing that "module:name" is, or the row itself."""
    if not isinstance(row, str):
        return row
    module, _, name = row.partition(":")
    return getattr(module_named(module), name)


def attribute(module: str, name: str, table: Mapping[str, Any]) -> Any:
    """What a module has by this name, if its table says where that is; else AttributeError."""
    if name not in table:
        raise AttributeError(f"module '{module}' has no attribute '{name}'")
    return find(table[name])
