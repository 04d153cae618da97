"""In which order outputs without names are taken for classes, where there is more than one.

Here, and in torchvision, classes are sorted as texts. timm sorts numbers in names by their value,
and does not regard case: class2 before class10.
"""

import re
from collections.abc import Sequence

from ...base.messages import one_line


def natural_order(names: Sequence[str]) -> list[str]:
    """The names in timm's order."""

    def parts(name: str) -> list[tuple[str, int, str]]:
        found = re.findall(r"(\D*)0*(\d*)", name.lower())
        return [(text, len(digits), digits) for text, digits in found]  # 9 before 10

    return sorted(names, key=parts)


def order_taken(names: Sequence[str]) -> str:
    """In words, in which order outputs without names are taken for these classes; "" if all orders
    are the same.
    """
    if list(names) != sorted(names):  # a published set has its own
        return ""
    for name, other in zip(names, natural_order(names)):
        if name != other:
            number = names.index(name)
            return one_line(
                f"output {number} has no name and is taken for '{name}', in the order of texts, as "
                f"in torchvision; in timm's natural order it is '{other}'; --classes FILE states all "
                "names, one per line"
            )
    return ""
