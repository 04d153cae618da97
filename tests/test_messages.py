"""Messages are one line of limited length, without control characters, whatever they quote."""

from __future__ import annotations

import os
import pickle

import pytest
from torch._utils import ExceptionWrapper

from vitinit.messages import IN_BRIEF, LONGEST, OneLineError, in_brief, one_line


@pytest.mark.parametrize("text, shown", [
    ("train/ant 1/ü–日本.jpg: gone", "train/ant 1/ü–日本.jpg: gone"),
    ("two  blanks \\ and a backslash", "two  blanks \\ and a backslash"),
    ("a\nb\r\tc", r"a\nb\r\tc"), ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
    ("\x00\x7f\x85", r"\x00\x7f\x85"), ("\u2028\u202ecod.exe", r"\u2028\u202ecod.exe"),
    (os.fsdecode(b"caf\xe9.jpg"), r"caf\udce9.jpg")])
def test_a_line_shows_what_it_quotes(text, shown):
    assert one_line(text) == shown == one_line(one_line(text))
    assert shown.splitlines() == [shown]
    shown.encode("utf-8")                            # prints on any terminal


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
    error = OneLineError("a\nb.jpg: gone")
    assert str(error) == r"a\nb.jpg: gone" == str(pickle.loads(pickle.dumps(error)))


@pytest.mark.parametrize("text", ["a\nb.jpg: cannot be read: gone", "Caught in a file's name\n: x"])
def test_an_error_out_of_a_loaders_worker_keeps_its_own_words(text):
    try:
        raise OneLineError(text)
    except OneLineError as error:
        raised = error
        wrapped = ExceptionWrapper((type(error), error, error.__traceback__), "in worker 0")
    with pytest.raises(OneLineError) as again:
        wrapped.reraise()
    assert str(again.value) == str(raised)
