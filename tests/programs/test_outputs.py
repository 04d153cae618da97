"""Every option of every program that names a file to write: it replaces only what it may."""

import argparse
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forks import Fork

from vitinit.base.files import FileError, write_text_atomically, written_atomically
from vitinit.programs import compare, evaluate, export, features, predict, recipe, sweep, train
from vitinit.programs.bench import program as bench
from vitinit.programs.figures import program as figures
from vitinit.programs.lessons import program as lessons
from vitinit.programs.shared.command_line import Output, Parser, run_program
from vitinit.programs.shared.outputs import require_replaceable
from vitinit.programs.shared.records import read_run, write_archive

RUN = Path(__file__).parents[1] / "runs" / "data" / "version_12"
PROGRAMS = {
    "predict": predict,
    "features": features,
    "eval": evaluate,
    "compare": compare,
    "export": export,
    "figures": figures,
    "lessons": lessons,
    "bench": bench,
    "recipe": recipe,
    "sweep": sweep,
    "train": train,
}
# Options with words or paths that are only read, or that name the folder of a run, whose own files
# `RunFolder` keeps.
NO_OUTPUTS = (
    "--across",
    "--checkpoint",
    "--classes",
    "--data-dir",
    "--import",
    "--init",
    "--log",
    "--out-dir",
    "--recipe",
    "--replay",
    "--resume",
    "--run",
    "--set",
    "--variant",
)
# Each output → a command with it, how its name ends, and an input of the command that ends so.
COMMANDS = {
    "predict --json": ("run photos", ".json", "photos/notes.json"),
    "predict --csv": ("run photos", ".csv", "photos/images.csv"),
    "predict --features": ("run photos", ".npz", None),
    "features --sheet": ("a.npz b.npz", ".png", None),
    "predict --sheet": ("run photos", ".png", "photos/a.png"),
    "eval --json": ("run theirs", ".json", "theirs/config.json"),
    "compare --out": ("run", "", None),
    "compare --pack": ("runs.tar.xz/r*", ".tar.xz", "runs.tar.xz"),
    "export --out": ("run --to torch", ".pt2", None),
    "lessons --notebook": ("1", ".ipynb", None),
    "bench all --out": ("", ".md", None),
    **{
        f"figures {name} --out": (f"{words} --data-dir photos", ".png", "photos/a.png")
        for name, words in (("kernels", ""), ("mass", "--run run"), ("batch", ""), ("data", ""))
    },
    **{
        f"figures {name} --out": (words, suffix, "photos/a.png" if "photos" in words else None)
        for name, words, suffix in (
            ("maps", "--run run", ".png"),
            ("attention", "photos/a.png --run run", ".png"),
            ("explore", "b.png --run run", ".html"),
            ("curves", "run", ".png"),
            ("report", "run", ".html"),
            ("operations", "photos/a.png", ".png"),
            ("reconstruct", "photos/a.png --run run", ".png"),
        )
    },
}
BEGINS = {
    ".json": b"{}",
    ".jsonl": b"{}",
    ".png": b"\x89PNG\r\n\x1a\n",
    ".html": b"<html>",
    ".ipynb": b"{",
    ".tar.xz": b"\xfd7zXZ\0",
    ".pt2": b"PK\x03\x04",
    ".npz": b"PK\x03\x04",
    ".csv": b"path,label,probability\n",
}


def parsers(parse: Callable, name: str, monkeypatch) -> Iterator[tuple[str, Parser]]:
    """The parser of a program and those of its subcommands, by name."""
    found: list[Parser] = []

    def keep(self: Parser, arguments: object = None) -> None:
        found.append(self)
        raise StopIteration

    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(Parser, "parse_args", keep)
        parse([])
    yield name, found[0]
    for action in found[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from ((f"{name} {word}", parser) for word, parser in action.choices.items())


@pytest.fixture
def place(tmp_path, monkeypatch, capsys) -> Path:
    """The current folder: a run, an archive of it, photographs, and another project's model."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RUN, "run")
    recipe = Path("run/recipe.toml")  # the run has done two epochs
    recipe.write_text(recipe.read_text().replace("\nepochs = 3\n", "\nepochs = 2\n"))
    write_archive([read_run(Path("run"))], Path("runs.tar.xz"))
    assert (
        export.main(["run", "--to", "safetensors", "--names", "transformers", "--out", "theirs"])
        == 0
    )
    Path("photos").mkdir()
    for name in ("photos/a.png", "b.png"):
        Path(name).write_bytes(BEGINS[".png"])
    Path("photos/notes.json").write_bytes(b"{}")
    Path("photos/images.csv").write_bytes(BEGINS[".csv"])
    Path("photo.jpg").write_bytes(b"\xff\xd8\xff")
    capsys.readouterr()
    return tmp_path


def test_every_option_that_writes_is_known(monkeypatch):
    """A new option with a word or a path has to be in one of the lists above."""
    outputs = set()
    for name, program in PROGRAMS.items():
        for title, parser in parsers(program.parse_arguments, name, monkeypatch):
            for action in parser._actions:
                if action.option_strings and isinstance(action.type, Output):
                    outputs.add(f"{title} {action.option_strings[-1]}")
                elif (
                    action.nargs != 0
                    and action.choices is None
                    and action.type in (None, str, Path)
                    and action.option_strings
                ):
                    assert action.option_strings[-1] in NO_OUTPUTS
    assert outputs == COMMANDS.keys()


@pytest.mark.parametrize("option", COMMANDS)
def test_an_output_replaces_no_input_no_other_kind_of_file_and_no_file_of_a_run(
    option, place, monkeypatch, capsys
):
    name, *words, flag = option.split()
    command, suffix, input = COMMANDS[option]
    program, arguments = PROGRAMS[name], [*words, *command.split(), flag]
    (place / f"odd{suffix or '.md'}").write_bytes(b"\xff\xd8\xff")
    (place / "link").symlink_to(place / "photo.jpg")
    (place / "folder").mkdir()
    for name in ("comparison.md", "curves.png"):
        (place / "folder" / name).write_bytes(b"\xff\xd8\xff")
    files = [
        "photo.jpg",
        "link",
        f"odd{suffix or '.md'}",
        "run/last.pt",
        "run/best.pt",
        "run/recipe.toml",
        "run/metrics.jsonl",
        "run/run.json",
        "run/run.lock",
    ]
    files += [f"/dev/..{place}/photo.jpg"]  # which is none of the devices
    if not suffix:  # a folder, new or with such files in it
        files = ["folder", *(file for file in files if Path(file).is_file())]
    files += [input] * (input is not None)
    if option == "predict --sheet":
        (place / "photos" / "b.PNG").write_bytes(BEGINS[".png"])
        files += ["photos/b.PNG"]
    before = {path: path.is_file() and path.read_bytes() for path in place.rglob("*")}
    monkeypatch.setattr(torch.nn.Module, "__call__", None)  # nothing is computed before
    for file in files:
        assert program.main([*arguments, file]) == 2, file
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1 and file in printed.err
    assert {path: path.is_file() and path.read_bytes() for path in place.rglob("*")} == before
    (place / f"old{suffix}").write_bytes(BEGINS.get(suffix, b""))
    os.mkfifo(place / "pipe")
    for file in (f"new{suffix}", f"old{suffix}", "pipe", "/dev/stdout", "/dev/null") * bool(suffix):
        program.parse_arguments([*arguments, file])


def test_an_open_handle_is_written_to_and_what_its_file_holds_stays(tmp_path):
    """As in --json /dev/stdout >> log.jsonl, also by a link or by another name of the handle."""
    log, link = tmp_path / "log.jsonl", tmp_path / "link"
    log.write_text("first\n")
    with open(log, "a") as stream:
        number = stream.fileno()
        link.symlink_to(f"/dev/fd/{number}")
        for path in (
            f"/dev/fd/{number}",
            f"/proc/self/fd/{number}",
            f"/proc/{os.getpid()}/fd/{number}",
            f"/dev/../dev/fd/{number}",
            f"/proc/thread-self/fd/{number}",
            link,
        ):
            require_replaceable(Path(path), ".png")
            write_text_atomically("more\n", Path(path))
    assert log.read_text() == "first\n" + 6 * "more\n"
    with pytest.raises(FileError, match="cannot be written: Bad file descriptor"):
        require_replaceable(Path("/dev/fd/777"), ".png")  # before a program works
    with open(log, "rb") as stream, pytest.raises(FileError, match="cannot be written: Bad file d"):
        write_text_atomically("more\n", Path(f"/dev/fd/{stream.fileno()}"))


def test_of_two_that_write_one_file_each_writes_its_own_and_the_last_stays(tmp_path):
    path = tmp_path / "out.json"
    with written_atomically(path) as first:
        first.write(b"first, ")
        with written_atomically(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
        path.chmod(0o600)  # which the next file has, too
        first.write(b"to its end")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == b"first, to its end" and os.listdir(tmp_path) == ["out.json"]


def test_what_a_killed_writer_leaves_is_removed_by_the_next_and_nothing_else(tmp_path):
    path, others = (
        tmp_path / "[a]*.json",
        ["[a]*.json.partial", "[a]*.json.0123456789.partial", "a.json.0123456789ab.partial"],
    )

    def killed() -> None:
        with written_atomically(path) as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    for name in others:
        (tmp_path / name).write_text("mine")
    process = multiprocessing.get_context("fork").Process(target=killed)
    with written_atomically(path):  # this one lives
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL and len(os.listdir(tmp_path)) == 5
        write_text_atomically("{}", path)
        assert len(os.listdir(tmp_path)) == 5
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, *others])


def test_a_signal_that_ends_a_program_leaves_no_part_of_a_file(tmp_path):
    path = tmp_path / "out" / "a.json"
    path.parent.mkdir()

    def program(number: int) -> None:
        with written_atomically(path) as file:
            file.write(b"half")
            signal.raise_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):

        def ended_by() -> tuple[int, list[str]]:
            signal.signal(number, signal.SIG_DFL)
            return run_program("p", lambda: program(number)), os.listdir(path.parent)

        ended = Fork(ended_by, tmp_path / str(number)).ended()
        assert ended == ((128 + number, []), "", f"p: stopped by {number.name}\n")
