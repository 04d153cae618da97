"""What all programs share: the parser, types of arguments, one-line errors and exit statuses."""

import importlib
import json
import os
import re
import signal
import sys
import time
from argparse import (
    ArgumentError,
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
    RawDescriptionHelpFormatter,
)
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any, NoReturn

import vitinit

from ...base.files import FileError
from ...base.messages import OneLineError, environment_rank, in_brief, nearest, one_line, say
from ...base.values import Bounds, accepted_values, convert
from ...recipe.files import RecipeError
from ...runs.imports import import_parts
from ...train.distributed import LostProcess
from ...train.interruption import Interrupted, raising_signals
from .outputs import STDOUT, require_no_input, require_replaceable

# What other programs call the keys of a recipe, and what else does here what is asked for.
HABITS = {
    "--amp": "engine.amp",
    "--batch": "optim.global_batch",
    "--batch-size": "optim.global_batch",
    "--clip-grad": "optim.clip_norm",
    "--cutmix": "mix.cutmix_alpha",
    "--data": "--data-dir FOLDER",
    "--data-path": "--data-dir FOLDER",
    "--dataset": "data.name",
    "--device": "no --device: a GPU is taken where torch sees one; CUDA_VISIBLE_DEVICES= hides it",
    "--drop-path": "model.options.drop_path",
    "--epochs": "schedule.epochs",
    "--finetune": "init.checkpoint",
    "--gpus": "torchrun --nproc_per_node=N train.py …",
    "--image-size": "data.image_size",
    "--img-size": "data.image_size",
    "--imgsz": "data.image_size",
    "--input-size": "data.image_size",
    "--learning-rate": "optim.base_lr",
    "--lr": "optim.base_lr",
    "--min-lr": "schedule.min_lr",
    "--mixup": "mix.mixup_alpha",
    "--model": "model.name",
    "--num-classes": "no --num-classes: the folders say it",
    "--num-workers": "data.workers",
    "--opt": "optim.name",
    "--optimizer": "optim.name",
    "--output-dir": "--out-dir FOLDER",
    "--precision": "engine.amp",
    "--pretrained": "init.checkpoint",
    "--smoothing": "mix.label_smoothing",
    "--warmup-epochs": "schedule.warmup_epochs",
    "--wd": "optim.weight_decay",
    "--weight-decay": "optim.weight_decay",
    "--workers": "data.workers",
    "-j": "data.workers",
}
# How the files begin that import a part: those of this package, and Python's own.
IMPORTING = (
    *(os.path.join(os.path.dirname(str(module.__file__)), "") for module in (vitinit, importlib)),
    "<frozen importlib",
)


class Parser(ArgumentParser):
    """An ArgumentParser whose errors, and those of its subparsers, are raised as RecipeError."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter, **options)
        add_import(
            self,
            help="file or module of your own that is imported first, as it registers an init, a "
            "model, a data set or a task; may be repeated",
        )

    def error(self, message: str) -> NoReturn:
        _, unknown, words = message.partition("unrecognized arguments: ")
        usage = self.format_usage()
        if unknown and "--set" in usage:
            trains = "--seed" in usage  # by any key of a recipe
            expected = trains and meant(words) or "--set section.key=value for keys of a recipe"
            message += f"; expected {expected}"
        examples = [line.strip() for line in str(self.description).splitlines() if line[:1] == " "]
        if "required" in message and examples:
            message += f", as in: {examples[0]}"
        raise RecipeError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """ArgumentParser's, once what --import names is imported, as other words may be checked by
        it; an error, too, if an `Output` would replace what it may not.
        """
        try:
            import_parts(named_imports(args))
        except (Exception, SystemExit) as error:
            raise where_it_failed(error) or error
        parsed, rest = super().parse_known_args(args, namespace)
        outputs = []
        inputs: list[str] = []
        for action in self._actions:
            value = getattr(parsed, action.dest, None)
            if isinstance(action.type, Output):
                if value and not (action.type.prints and value == STDOUT):
                    outputs.append((action.dest, value, action.type))
            elif not action.choices:
                inputs += paths_in(value)
        for name, path, output in outputs:
            others = [place for place in inputs if not (output.grows and Path(place) == path)]
            try:
                if output.suffixes:
                    require_replaceable(path, *output.suffixes)
                require_no_input(path, others)
            except FileError as error:
                self.error(f"argument --{name}: {error}")
        return parsed, rest


def add_import(parser: ArgumentParser, **options: Any) -> None:
    """Add --import, which every `Parser` has."""
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="FILE.py", **options
    )


def named_imports(words: Sequence[str] | None) -> list[str]:
    """What --import names among the words of a command line, of which no other is looked at."""
    alone = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_import(alone)
    try:
        return alone.parse_known_args(words)[0].imports
    except ArgumentError:  # it names nothing, which `Parser` refuses
        return []


def where_it_failed(error: BaseException) -> OneLineError | None:
    """What an error of an imported part of the user's says, in a line that begins with its place:
    the last one in the folder of that part. None if no code but our own was run.
    """
    places = [(frame.filename, frame.lineno) for frame in extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    places = [place for place in places if not place[0].startswith(IMPORTING)]
    if not places:
        return None
    folder = os.path.join(os.path.dirname(places[0][0]), "")
    file, line = [place for place in places if place[0].startswith(folder)][-1]
    words = in_brief(getattr(error, "msg", error))
    return OneLineError(f"--import: {file}, line {line}: {type(error).__name__}: {words}")


def meant(words: str) -> str:
    """What stands here for arguments that another program takes, as in HABITS, such as "--lr 1e-3";
    "" if that is not known.
    """
    found = []
    options = re.findall(r"(?<!\S)(--?[a-z][\w-]*)(?:[= ]([^-\s]\S*|-[\d.]\S*))?", words)
    for option, value in options:
        habit = HABITS.get(option.replace("_", "-"), "")
        if re.fullmatch(r"[\w.]+", habit):
            habit = f"--set {habit}={value or '…'}"
        found.append(habit)
    keys = re.findall(r"(?<!\S)\w+\.[\w.]+=\S*", words)
    return " ".join(filter(None, [*found, *(f"--set {key}" for key in keys)]))


def paths_in(value: object) -> Iterator[str]:
    """What may be paths in an argument's value: all of it, its part after "=", items of a list."""
    if isinstance(value, (str, Path)):
        yield from filter(None, (str(value), str(value).partition("=")[2]))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from paths_in(part)


def number_within(kind: type, **bounds: float) -> Callable[[str], Any]:
    """A `type` for add_argument: a finite number within bounds: minimum, above, maximum, below."""
    within = Bounds(**bounds)

    def parse(text: str) -> Any:
        with suppress(ValueError, TypeError):  # not a number, or NaN or infinity
            if (number := convert(kind(text), kind)) in within:
                return number
        raise ArgumentTypeError(f"{text}: expected {accepted_values(kind)} {within}")

    return parse


real = partial(number_within, float)


def integer(minimum: int, below: int = 2**31) -> Callable[[str], int]:
    """A `type` for add_argument: an integer with minimum ≤ value < below."""
    return number_within(int, minimum=minimum, below=below)


def one_of(words: Collection[str]) -> Callable[[str], str]:
    """A `type` for add_argument: one of some words. The error for another suggests a near one."""

    def parse(text: str) -> str:
        if text not in words:
            raise ArgumentTypeError(f"there is no '{text}'{nearest(text, words)}")
        return text

    return parse


class Output:
    """A `type` for add_argument: a path to write to, where `Parser` keeps every other file safe.
    suffixes: how the file's name may end; without them the program says what may be there. grows:
    whether the file may replace an input, all of which it then contains. prints: whether it may be
    STDOUT.
    """

    def __init__(self, *suffixes: str, grows: bool = False, prints: bool = False) -> None:
        self.suffixes, self.grows, self.prints = suffixes, grows, prints

    def __call__(self, text: str) -> Path:
        return Path(text)


def parse_sides(text: str) -> int | list[int]:
    """The argument of --image-size: "288" → 288, "192,256" → [192, 256]."""
    try:
        sides = [int(side) for side in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(
            f"{text}: expected a number of pixels, such as 288, or "
            "height and width, such as 192,256"
        ) from None
    return sides if len(sides) > 1 else sides[0]


def add_run(parser: Parser, changeable: Sequence[str]) -> None:
    """Add the arguments for one run, and for how to open it. changeable: see `open_saved`."""
    parser.add_argument("run", metavar="RUN", help="run folder or checkpoint")
    parser.add_argument(
        "--weights",
        choices=("best", "model", "ema"),
        default="best",
        help="best: of a run's folder, those of its best epoch by its own record; model, or ema: "
        "those of its last one, or of a file, as trained or averaged",
    )
    add_options(parser, changeable)


def run_arguments(args: Namespace) -> dict[str, Any]:
    """What `vitinit.load` takes, of the arguments that `add_run` has added. A line on standard error
    says which weights are the best.
    """
    from ...watch.verdict import chosen_weights  # here, as a run needs no watchers yet

    path, weights, best = chosen_weights(Path(args.run), args.weights)
    if best:
        say(f"weights {path}, {best}; --weights model or ema: of the last epoch", sys.stderr)
    return {
        "path": path,
        "weights": weights,
        "image_size": args.image_size,
        "recipe": args.recipe,
        "overrides": args.set,
        "classes": args.classes,
    }


def add_options(parser: Parser, changeable: Sequence[str]) -> None:
    """Add --image-size, --recipe, --classes and --set. changeable: see `open_saved`."""
    parser.add_argument(
        "--image-size",
        type=parse_sides,
        metavar="N or H,W",
        help="in pixels, if it is to differ from the recipe's",
    )
    parser.add_argument("--recipe", help="describes checkpoints that contain no recipe")
    parser.add_argument(
        "--classes",
        default="",
        metavar="FILE",
        help="names the classes of checkpoints that do not, one per line in the order of outputs",
    )
    add_set(
        parser,
        "override any key of the recipe given by --recipe, and of any recipe "
        f"{', '.join(changeable)}",
    )


def add_set(parser: ArgumentParser, words: str, metavar: str = "SECTION.KEY=VALUE") -> None:
    """Add --set, which may be repeated. words: what it does, for --help."""
    parser.add_argument("--set", action="append", default=[], metavar=metavar, help=words)


def add_log(parser: Parser) -> None:
    """Add --log, with which new runs are started."""
    parser.add_argument(
        "--log",
        nargs="+",
        action="extend",
        default=[],
        help="show live curves: tensorboard, wandb; record by block what attention does: attention",
    )


def add_trust(parser: Parser) -> None:
    """Add --trust-teacher: no recipe, folder or archive of runs can set it."""
    parser.add_argument(
        "--trust-teacher",
        action="store_true",
        help="read a teacher that is a program (.pt2), which can execute any code",
    )


def complain(program: str, error: object, *, of_one_process: bool = False) -> None:
    """Print an error as one line on standard error, by the main process or each that may be the only
    one with it. of_one_process: whether it may be; a OneLineError knows that itself.

    Every process also leaves it for torchrun, which ends all processes once one has failed, perhaps
    before the main one has printed, and whose report then ends with the line.
    """
    line = f"{program}: {one_line(error)}"
    alone = getattr(error, "of_one_process", of_one_process)
    if environment_rank() == 0 or alone:
        say(line, sys.stderr)
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")  # set by torchrun
    if report and not isinstance(error, LostProcess):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to end with our status, not by it
        # torchrun takes the earliest failure, by whole seconds, for the cause: earlier by one than
        # those of the processes that it ends because of this one.
        failure = {"message": line, "extraInfo": {"timestamp": int(time.time()) - 1}}
        with suppress(OSError), open(report, "w", encoding="utf-8") as file:
            json.dump({"message": failure}, file)


def run_program(name: str, program: Callable[[], int | None], *, cleans: bool = True) -> int:
    """Run a program, as whose `name` errors begin, and return its exit status.

    Errors that the user can correct (OneLineError, OSError) and signals end it with one line on
    standard error. Any other exception is a defect of the program and is passed on.
    cleans: a signal that would end it at once lets this one clean up first.
    """
    try:
        with raising_signals() if cleans else nullcontext():
            return program() or 0
    except (KeyboardInterrupt, Interrupted) as request:
        number = getattr(request, "number", signal.SIGINT)
        complain(name, f"stopped by {signal.Signals(number).name}")
        return 128 + number
    except OneLineError as error:
        complain(name, error)
        return error.status
    except BrokenPipeError:  # the reader of our output has closed the pipe
        return 128 + 13  # SIGPIPE, which Windows has not
    except OSError as error:
        place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        what = f"{place}{error.strerror or in_brief(error)}"
        complain(name, what, of_one_process=True)  # perhaps of its own disk
        return 2
    finally:
        drop_unwritten()


def main_of(
    name: str,
    parse: Callable[[list[str]], Namespace],
    do: Callable[[Namespace], int | None],
) -> Callable[..., int]:
    """The function `main` of a program: the words of its command line → its exit status."""

    def main(arguments: list[str], name: str = name) -> int:
        return run_program(name, lambda: do(parse(arguments)))

    main.__module__ = do.__module__  # whose function it is, beside `parse_arguments`
    return main


def drop_unwritten() -> None:
    """Send to nowhere what standard streams have not taken, or Python would end with an error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (AttributeError, ValueError):  # None, or closed
            pass
