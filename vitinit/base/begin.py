"""What every program does first, before it imports torch.

Where torchrun is killed, Linux sends its processes SIGTERM; otherwise they would go on alone.

Ctrl-C ends the program without a word until `run_program` or a StopRequest hears it. A standard
stream that is closed becomes the null device; a file of a run would have its number otherwise, and
get what libraries print. Characters that an encoding lacks are printed in others, never an error.
"""

import codecs
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
PLAIN = str.maketrans(
    {"×": "x", "…": "...", "–": "-", "−": "-", "→": "->", "±": "+/-", "≤": "<=", "≥": ">="}
)


def in_ascii(error: UnicodeError) -> tuple[str, int]:
    """The codecs' error handler for what is printed: "×" → "x", and any other as "\\u4e2d"."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(PLAIN)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


def begin() -> None:
    """Do it, in the main process alone: no worker of a loader calls this."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as by nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    codecs.register_error("in_ascii", in_ascii)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # closed, and the lowest number that is free
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        mode = "w" if number else "r"
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))
        if mode == "w":
            getattr(sys, name).reconfigure(errors="in_ascii")
