"""What a message may quote: names, paths and other libraries' words, made safe for one line.

Imports nothing of the package, so that every room may use it.
"""

from __future__ import annotations

LONGEST = 1000                  # characters of a message, whatever it quotes
IN_BRIEF = 120                  # characters of what another library says


class OneLineError(ValueError):
    """Something for the user to mend, said in one line, whatever the line quotes."""

    status = 2                  # with which a program ends for it

    def __init__(self, text: object = "") -> None:
        super().__init__(one_line(own_words(str(text))))


def one_line(text: object, longest: int = LONGEST) -> str:
    r"""`text` in one line that a terminal shows as it is: "a\nb" for what holds a line break.

    Control characters, escape sequences, bytes that are no UTF-8 (as os.fsdecode keeps them) and
    invisible characters stand as Python would write them in a string. What is longer than `longest`
    characters loses its middle. A line that is fine already stays as it is.
    """
    text = str(text)
    if not text.isprintable():
        text = "".join(character if character.isprintable() else
                       character.encode("unicode_escape").decode("ascii") for character in text)
    if len(text) <= longest:
        return text
    head = (longest - 1) // 2
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head):]}"


def in_brief(essay: object, longest: int = IN_BRIEF) -> str:
    """What another library says, such as an exception, as part of a line: its first words.

    Line breaks and runs of blanks become one blank; without words, an exception's kind.
    """
    text = one_line(" ".join(str(essay).split()), longest=2**20)
    if not text:
        return type(essay).__name__
    return text if len(text) <= longest else text[:longest - 1].rstrip() + "…"


def own_words(text: str) -> str:
    """The error itself where a loader's worker wrapped it in its traceback: the last line of that.

    torch raises an error of a worker anew in the training process, of the same class, with the
    worker's whole traceback as its text.
    """
    if not (text.startswith("Caught ") and "\nOriginal Traceback " in text):
        return text
    name, _, message = text.rstrip().splitlines()[-1].partition(": ")
    return message or name
