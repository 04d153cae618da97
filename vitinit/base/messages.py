"""What is printed: lines that no quoted name, path or error can break, and progress bars.

Output never ends a run: `say`, `warn` and the bars lose what a closed terminal, a full disk or a
closed pipe does not take, and nothing else.
"""

import difflib
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from tqdm.std import TqdmWarning, tqdm as console_tqdm
from tqdm.utils import ObjectWrapper

with warnings.catch_warnings():  # of a notebook without widgets, where lines do
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

LONGEST = 1000  # most characters of a message, with everything that it quotes
IN_BRIEF = 120  # most characters quoted from the error of another library
LOG_SECONDS = 30.0  # between two lines about progress where there is no terminal
BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}{whole}, {pace}"


class OneLineError(ValueError):
    """An error that the user can fix. Its message is always one line, whatever it quotes."""

    status = 2  # the exit status of a program that ends with this error
    of_one_process = False  # whether the other processes of a run do not know of it

    def __init__(self, text: object = "") -> None:
        super().__init__(one_line(own_words(str(text))))


def one_line(text: object, longest: int = LONGEST) -> str:
    r"""`text` as a line of printable characters: others, and bytes that are not UTF-8, are written
    as in a Python string, such as "\n". Of more than `longest` characters it loses its middle.
    """
    text = str(text)
    if not text.isprintable():
        text = "".join(map(_printable, text))
    if len(text) <= longest:
        return text
    head = (longest - 1) // 2
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


def in_brief(essay: object, longest: int = IN_BRIEF) -> str:
    """The first words of a long text, or of another library's exception, or else its class."""
    text = one_line(" ".join(str(essay).split()), longest=2**20)
    if not text and isinstance(essay, Exception):
        return type(essay).__name__
    if len(text) <= longest:
        return text
    return text[: longest - 1].rstrip() + "…"


def nearest(word: str, valid: Iterable[str]) -> str:
    """A hint for a mistyped word: '; did you mean X?', or all valid words if none is similar."""
    valid = list(valid)
    close = difflib.get_close_matches(word, valid, n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    if valid:
        return f"; valid: {', '.join(sorted(valid))}"
    return "; it takes none"


def unknown(kind: str, name: str, rows: Iterable[str]) -> str:
    """What is wrong with a name that is in no row of a table of parts, such as the models."""
    return (
        f"there is no {kind} '{name}'{nearest(name, rows)} (or --import FILE.py, if that adds it)"
    )


def environment_rank() -> int:
    """The rank of this process by its environment, known before the processes are connected; 0 if
    that is no number, which `distributed.start` refuses.
    """
    with suppress(ValueError):
        return int(os.environ.get("RANK", 0))
    return 0


def times(sides: Iterable[int]) -> str:
    """(12, 20) in words: "12×20"."""
    return "×".join(map(str, sides))


def counted(number: int, noun: str) -> str:
    """The number and its noun: "1 epoch", "2 epochs", "3 batches"."""
    if number != 1:
        noun += "es" if noun.endswith(("s", "tch")) else "s"
    return f"{number:,} {noun}"


class LossyStream(ObjectWrapper):
    """A stream to which writing never fails."""

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # ValueError: closed, or not in its encoding
            self._wrapped.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._wrapped.flush()

    def __eq__(self, other: object) -> bool:
        return self._wrapped == getattr(other, "_wrapped", other)


class LogStream:
    """What tqdm writes to where there is no terminal: plain lines."""

    def write(self, text: str) -> None:
        line = text.strip()
        if line:
            say(line)

    def flush(self) -> None:
        """Every line is flushed when it is printed."""


class ProgressBar(tqdm):
    """tqdm's bar for a loop: on a terminal one line, cut to its width, which goes away with the
    bar; in a notebook a widget; elsewhere a plain line every LOG_SECONDS.
    """

    monitor_interval = 0  # no thread, which a fork would tear apart

    def __init__(
        self,
        what: str,
        total: int,
        *,
        items: Iterable | None = None,
        initial: int = 0,
        shown: bool = True,
        unit: str = "img",
        scale: int = 1,
        run: tuple[float, int, int] | None = None,
    ) -> None:
        """Show a bar after the words `what` for `total` items, of which `initial` are done already.
        items: to iterate over. unit, scale: the rate is in `unit`s, and an item is `scale` units.
        run: of a longer run that this loop is a part of, when it began (by time.perf_counter), how
            many items were done from then on before this loop, and how many are left after it.
        """
        notebook = tqdm.status_printer is not console_tqdm.status_printer
        closed = not sys.stderr or sys.stderr.closed
        terminal = notebook or not closed and sys.stderr.isatty()
        self.terminal, self.scale, self.run = terminal, scale, run
        seconds = 0.1 if terminal else LOG_SECONDS
        super().__init__(
            items,
            desc=what,
            total=total,
            initial=initial,
            disable=not shown,
            unit=unit,
            leave=False,
            dynamic_ncols=terminal,
            miniters=1,
            mininterval=seconds,
            delay=seconds,
            file=LossyStream(sys.stderr) if terminal else LogStream(),
            bar_format=BAR if terminal else BAR.replace("|{bar}|", ","),
        )

    @property
    def format_dict(self) -> dict[str, Any]:
        """What is shown: tqdm's values, the run's times, and the rate, which no widget scales."""
        values = super().format_dict
        whole = ""
        done = self.n - self.initial
        if self.run is not None:
            start, before, after = self.run
            elapsed = time.perf_counter() - start
            left = elapsed / max(before + done, 1) * (self.total - self.n + after)
            whole = f", run {self.format_interval(elapsed)}<{self.format_interval(left)}"
        rate = self.scale * (values["rate"] or done / max(values["elapsed"], 1e-3))
        digits = 0 if rate >= 100 else 2
        return values | {"whole": whole, "pace": f"{rate:,.{digits}f} {self.unit}/s"}


ProgressBar.set_lock(threading.RLock())  # tqdm's own is one of processes, in /dev/shm


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line at once, on standard output if nothing else is given, above any bar."""
    stream = stream or sys.stdout
    with suppress(OSError, ValueError), ProgressBar.external_write_mode(stream):
        print(line, file=stream, flush=True)


def warn(line: str) -> None:
    """Print a warning on standard error, by the main process alone."""
    if environment_rank() == 0:
        say(one_line(f"warning {line}"), sys.stderr)


def shortened(names: Sequence[str], count: int = 0) -> str:
    """The names in one line, separated by commas; of more than five only the first ones. count: of
    all names, where `names` are only the first ones.
    """
    count = count or len(names)
    line = ", ".join(names[:5])
    return f"{line} and {count - 5} more" if count > 5 else line


def ran_out_of_memory(error: Exception) -> bool:
    """Whether this is an error of CUDA's, torch's or Python's for running out of memory."""
    signs = "can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED"
    return isinstance(error, MemoryError) or any(words in str(error) for words in signs)


@contextmanager
def without_warnings() -> Iterator[None]:
    """A context without Python's warnings that is safe in threads, unlike `catch_warnings`."""
    filters: Any = warnings.filters
    ignore = ("ignore", None, Warning, None, 0)
    filters.insert(0, ignore)
    try:
        yield
    finally:
        filters.remove(ignore)


def own_words(text: str) -> str:
    """The message itself of an error that torch raises again with a loader worker's traceback."""
    if not (text.startswith("Caught ") and "\nOriginal Traceback " in text):
        return text
    name, _, message = text.rstrip().splitlines()[-1].partition(": ")
    return message or name
