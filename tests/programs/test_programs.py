"""For all programs: wrong arguments, Ctrl-C, closed pipes, their own defects, and messages."""

import importlib
import os
import pickle
import signal
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import torch
from forks import Fork
from torch._utils import ExceptionWrapper

from vitinit.base.messages import IN_BRIEF, LONGEST, OneLineError, in_brief, one_line
from vitinit.programs import compare, export, predict, recipe, sweep
from vitinit.programs.bench import program as bench
from vitinit.programs.figures import program as figures
from vitinit.programs.lessons import program as lessons
from vitinit.programs.shared.command_line import integer, one_of, real, run_program
from vitinit.recipe.files import RecipeError, building
from vitinit.train.interruption import Interrupted
from vitinit.train.metrics import Diverged

PROGRAMS = {
    "vitinit bench": bench.main,
    "vitinit compare": compare.main,
    "vitinit export": export.main,
    "vitinit figures": figures.main,
    "vitinit lessons": lessons.main,
    "vitinit predict": predict.main,
    "vitinit recipe": recipe.main,
    "vitinit sweep": sweep.main,
}


def as_on_windows(image: str, out: Path) -> None:
    """Load, predict and export without what Windows has not. torch and others, imported before,
    have their own ways there."""
    for name in ("torch.export", "torch.utils._filelock", "torchvision"):
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vitinit"]:
        del sys.modules[name]
    sys.modules |= dict.fromkeys(("resource", "fcntl", "termios", "pwd", "grp"))
    for name in {*signal.Signals.__members__} - {"SIGINT", "SIGTERM", "SIGABRT"}:
        delattr(signal, name)
    for name in ("sched_getaffinity", "fork", "killpg", "pread", "O_NOFOLLOW"):
        delattr(os, name)
    import vitinit
    from vitinit.programs import export, predict

    print(*vitinit.load("cifar10_small").predict(image, top=1)[0])
    assert predict.main(["cifar10_small", image]) == 0
    assert export.main(["cifar10_small", "--to", "safetensors", "--out", str(out)]) == 0


def line_of(capsys) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_wrong_argument_is_one_line(capsys):
    for program, arguments, words in (
        ("vitinit bench", "step --recipe a --batch 0", "--batch: 0: expected an integer ≥ 1"),
        ("vitinit bench", "step --recipe a --device cdua", "no 'cdua'; did you mean 'cuda'?"),
        ("vitinit lessons", "99", "there is no lesson 99; expected 1 to"),
        ("vitinit lessons", "--update", "expected the number of a lesson"),
        ("vitinit figures", "maps", "required: --o"),
        ("vitinit figures", "maps --recipe a --out a --init defualt", "did you mean 'default'"),
        ("vitinit figures", "maps --run a --out a --epochs 1,x", "1,x: expected numbers such"),
        ("vitinit compare", "", "required: RUN"),
        ("vitinit compare", "a --seeds 3", "unrecog"),
        ("vitinit sweep", "--recipe quickstart", "required: --seeds"),
    ):
        assert PROGRAMS[program](arguments.split()) == 2
        line = line_of(capsys)
        assert line.startswith(f"{program}: ") and words in line and len(line) <= 200


def test_a_model_loads_predicts_and_exports_as_on_windows(repository, tmp_path, monkeypatch):
    monkeypatch.chdir(repository)
    image, out = "tests/data/cifar10/cat/0000.jpg", tmp_path / "out"
    done = Fork(lambda: as_on_windows(image, out), tmp_path / "fork").ended()
    first, second, third, *_ = done.out.splitlines()
    assert first.startswith("cat 0.7") and second.startswith(f"{image}  cat 7"), done
    assert third.startswith("1 of 1 images") and (out / "config.json").exists()


def test_arguments_are_read_within_bounds_and_refused_beyond_them():
    for read, text, value in (
        (integer(1), "7", 7),
        (integer(0, 3), "2", 2),
        (real(), "1e3", 1000.0),
        (real(above=0.0, maximum=1.0), "1", 1.0),
        (one_of({"a": 1, "b": 2}), "b", "b"),
    ):
        assert read(text) == value
    for read, text in (
        (integer(1), "0"),
        (integer(0, 3), "3"),
        (integer(0), "1.0"),
        (integer(0), "9" * 5000),
        (real(), "inf"),
        (real(), "x"),
        (real(above=0.0), "0"),
        (one_of(["a", "b"]), "c"),
    ):
        with pytest.raises(ArgumentTypeError, match="expected|there is no 'c'; valid: a, b"):
            read(text)


def raising(error: BaseException) -> None:
    raise error


def test_what_ends_a_program_is_a_line_and_a_status_and_a_closed_pipe_no_error(capsys, monkeypatch):
    """As in `vitinit compare … | head -1`."""
    for error, status, line in (
        (OneLineError("a\nb: gone"), 2, r"p: a\nb: gone"),
        (Diverged("loss is nan"), 1, "p: loss is nan"),
        (KeyboardInterrupt(), 130, "p: stopped by SIGINT"),
        (Interrupted(signal.SIGTERM), 143, "p: stopped by SIGTERM"),
        (
            FileNotFoundError(2, "No such file or directory", "x\x1b/y"),
            2,
            r"p: x\x1b/y: No such file or directory",
        ),
        (OSError(24, "Too many open files"), 2, "p: Too many open files"),
    ):
        assert run_program("p", lambda: raising(error)) == status
        assert line_of(capsys) == line
    with pytest.raises(KeyError):
        run_program("p", lambda: {}["fault"])
    assert run_program("p", lambda: None) == 0 and run_program("p", lambda: 3) == 3
    read, written = os.pipe()
    os.close(read)
    with open(written, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert run_program("p", lambda: print("line", flush=True)) == 128 + signal.SIGPIPE
        print("more")  # what is left is printed nowhere


def test_errors_of_a_recipes_values_name_the_recipe_and_faults_do_not():
    def built(action) -> Exception:
        with pytest.raises((Exception, Interrupted)) as caught, building("recipe r", "model"):
            action()
        return caught.value

    assert str(built(lambda: raising(ValueError("no fit")))) == "recipe r: no fit"
    assert str(built(lambda: raising(RecipeError("--set a: wrong")))) == "--set a: wrong"
    message = str(built(lambda: torch.empty(2**60, dtype=torch.uint8)))
    assert message.startswith("recipe r: [model] takes more memory than there is (")
    assert len(message) <= 200 and "test_programs" not in message
    for fault in (
        lambda: {}["depth"],
        lambda: torch.zeros(2, 3).view(4),
        lambda: None + 1,
        lambda: raising(Interrupted(signal.SIGTERM)),
    ):
        assert not isinstance(built(fault), OneLineError)


def test_a_line_shows_what_it_quotes_and_if_long_loses_its_middle_or_end():
    for text, shown in (
        ("train/ant 1/ü–日本.jpg: gone", "train/ant 1/ü–日本.jpg: gone"),
        ("a\nb\r\tc \\", r"a\nb\r\tc \ "[:-1]),
        ("\x1b[2J\u202e", r"\x1b[2J\u202e"),
        (os.fsdecode(b"caf\xe9.jpg"), r"caf\udce9.jpg"),
    ):
        assert one_line(text) == shown == one_line(one_line(text))
    text = "start" + "x" * 5000 + "end"
    shown = one_line(text)
    assert len(shown) == LONGEST and shown.startswith("startx") and shown.endswith("xend")
    assert one_line("abcdefgh", longest=5) == "ab…gh"
    assert one_line("abcde", longest=5) == "abcde"
    essay = "Weights only load failed.\n\n\tIt can \x1b[1mstill\x1b[0m be loaded " + "so " * 99
    shown = in_brief(essay)
    assert shown.startswith(r"Weights only load failed. It can \x1b[1mstill\x1b[0m be loaded so so")
    assert len(shown) <= IN_BRIEF and shown.endswith("…")
    assert in_brief(MemoryError()) == "MemoryError" and in_brief(OSError("full")) == "full"


def test_an_error_is_one_line_wherever_it_is_raised():
    error = OneLineError("a\nb.jpg: gone")
    assert str(error) == r"a\nb.jpg: gone" == str(pickle.loads(pickle.dumps(error)))
    try:
        raise error
    except OneLineError as raised:
        wrapped = ExceptionWrapper((type(raised), raised, raised.__traceback__), "in worker 0")
    with pytest.raises(OneLineError) as again:
        wrapped.reraise()
    assert str(again.value) == str(error)
