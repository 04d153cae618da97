"""The one line with which something is refused."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(kind: type[Exception], function: Callable, *arguments: Any, **options: Any) -> str:
    """The message, of one line, of the error of this kind that the call raises."""
    with pytest.raises(kind) as caught:
        function(*arguments, **options)
    message = str(caught.value)
    del caught  # else its frames live on, and what they hold
    assert message.isprintable()
    return message
