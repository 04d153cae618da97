"""Messages are one line of limited length, without control characters, whatever they quote."""

from __future__ import annotations

import os
import pickle

import pytest
from torch._utils import ExceptionWrapper

from vitinit.messages import IN_BRIEF, LONGEST, OneLineError, in_brief, one_line


def test_a_line_shows_what_it_quotes():
    for text, shown in (("train/ant 1/ü–日本.jpg: gone", "train/ant 1/ü–日本.jpg: gone"),
                        ("a\nb\r\tc \\", r"a\nb\r\tc \ "[:-1]), ("\x1b[2J\u202e", r"\x1b[2J\u202e"),
                        (os.fsdecode(b"caf\xe9.jpg"), r"caf\udce9.jpg")):
        assert one_line(text) == shown == one_line(one_line(text))


def test_a_long_line_loses_its_middle():
    text = "start" + "x" * 5000 + "end"
    shown = one_line(text)
    assert len(shown) == LONGEST and shown.startswith("startx") and shown.endswith("xend")
    assert one_line("abcdefgh", longest=5) == "ab…gh"
    assert one_line("abcde", longest=5) == "abcde"


def test_what_another_library_says_is_brief():
    essay = "Weights only load failed.\n\n\tIt can \x1b[1mstill\x1b[0m be loaded " + "so " * 99
    shown = in_brief(essay)
    assert shown.startswith(r"Weights only load failed. It can \x1b[1mstill\x1b[0m be loaded so so")
    assert len(shown) <= IN_BRIEF and shown.endswith("…")
    assert in_brief(MemoryError()) == "MemoryError" and in_brief(OSError("full")) == "full"


def test_an_error_is_one_line_wherever_it_is_raised():
    """Out of a loader's worker it keeps its own words."""
    error = OneLineError("a\nb.jpg: gone")
    assert str(error) == r"a\nb.jpg: gone" == str(pickle.loads(pickle.dumps(error)))
    try:
        raise error
    except OneLineError as raised:
        wrapped = ExceptionWrapper((type(raised), raised, raised.__traceback__), "in worker 0")
    with pytest.raises(OneLineError) as again:
        wrapped.reraise()
    assert str(again.value) == str(error)
