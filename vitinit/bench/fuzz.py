"""Fuzz recipes and command lines: each has to be accepted, or refused in one line, without hanging.

Half of the cases are recipes: those in recipes/, with a model and data of the smallest size and one
to three mutations. A mutation makes a value extreme, changes its type, adds or removes a key, or
makes the text invalid TOML. train.py reads the recipe in a dry run. The other half of the cases are
random arguments for all programs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import signal
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from .. import compare, sweep
from ..command_line import run_program
from ..figures import __main__ as figures
from ..init import INITS
from ..models import (MODELS, ConvMixer, MlpMixer, SimpleViT, SwinTransformer, VisionTransformer)
from ..recipe.files import RECIPES
from ..recipe.values import to_toml

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 60                   # seconds after which a case counts as hanging
WORDY = 200                     # limit of a message's characters, beside the arguments it quotes
KINDS = ("accepted", "refused", "traceback", "several lines", "wordy", "hung")
GOOD = KINDS[:2]

SMALL = {                       # family → model.options of a small model for 32×32 pixels
    VisionTransformer: dict(patch_size=8, embed_dim=24, depth=1, num_heads=3),
    SwinTransformer: dict(patch_size=4, embed_dim=24, depths=[1, 1], num_heads=[3, 3], window_size=4),
    MlpMixer: dict(patch_size=8, embed_dim=16, depth=1),
    ConvMixer: dict(patch_size=4, embed_dim=16, depth=1, kernel_size=3),
    SimpleViT: dict(patch_size=8, embed_dim=24, depth=1, num_heads=3)}
SMALL_DATA = dict(name="image_folder", root="images", num_classes=2, image_size=32, workers=0,
                  subset=1.0, images_per_class=0)
SMALL_BATCHES = dict(global_batch=8, max_batch_per_process=4)

# Numbers are small or far out of range. Those between are valid, and models of such sizes take long.
NUMBERS = (-1, 0, 1, 2, 3, 5, 7, 16, -2**63, 2**31, 2**40, 2**62, 2**63, 2**64, 10**30, 10**400, -0.0,
           0.5, 1.5, -1.5, 1e-30, 1e-320, 1e30, 1e300, -1e300, float("nan"), float("inf"),
           -float("inf"))
WORDS = ("", " ", "none", "true", "impulse", "a\nb", "\x1b[2J", "\x00", "ü", "\u202e", "日本" * 40,
         "a" * 300, "x" * 5000, "'", '"', "%s", "{}", "../..", "~", "/", "/dev/null", "--", "-1",
         "\udcff", "1e5", "[", "=", ".", "vit_tiny", "default", "cifar10")
LISTS = ([], [1], [1, 2], [1, 2, 3], [0.5, 0.5], [2.0, 1.0], [-1, -1], [True], ["a"], [[]], [1e308] * 3,
         [0] * 500, ["Rotate", "Rotate"], [float("nan")] * 2, {}, {"a": 1}, {"a": {"b": [1]}})


class Case(NamedTuple):
    """A program and its arguments, in which RECIPE stands for the path of a file of these bytes."""

    program: str
    arguments: list[str]
    recipe: bytes = b""


class CaseOutcome(NamedTuple):
    """The outcome of a case."""

    kind: str                   # one of KINDS
    words: str = ""             # what was raised or printed


RECIPE = "RECIPE"


# ---------------------------------------------------------------------------------------------
# Recipes
# ---------------------------------------------------------------------------------------------


def small_recipe(path: Path, random: Random) -> dict[str, Any]:
    """Read a recipe and make its model and data small; sometimes with another init or model."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    if random.random() < 0.3:
        table["model"]["name"] = random.choice(list(MODELS))
        table["model"]["options"] = {}
    family, sizes = MODELS[table["model"]["name"]]
    table["model"]["options"] = table["model"].get("options", {}) | SMALL[family]
    if family is ConvMixer or random.random() < 0.5:
        names = [name for name, families in INITS.items() if family in families
                 and name != "impulse_gd"]           # takes long for any model
        table["init"] |= {"name": random.choice(names), "options": {}}
    if table["init"]["name"] == "impulse_gd" or family not in INITS[table["init"]["name"]]:
        table["init"] |= {"name": "default", "options": {}}
    table["init"].setdefault("options", {})
    table["data"] |= SMALL_DATA
    table["optim"] |= SMALL_BATCHES
    table["schedule"] |= {"warmup_lr": 0.0, "min_lr": 0.0}       # below the peak of a small batch
    table["eval"]["batch_size"] = 2
    table["mix"]["group"] = 4
    return table


def odd_value(random: Random, value: Any) -> Any:
    """A replacement for `value`: extreme, of another type, or slightly different."""
    if type(value) is bool and random.random() < 0.6:
        return not value
    if isinstance(value, list) and value and random.random() < 0.4:
        return [odd_value(random, item) for item in value]
    if type(value) in (int, float) and random.random() < 0.8:
        extreme = random.choice(NUMBERS)             # the same type, to get past checks of the type
        return extreme if type(extreme) is type(value) else random.choice([value * 2, value // 2])
    match random.randrange(6):
        case 0:
            return random.choice(WORDS)
        case 1:
            return random.choice(LISTS)
        case 2:
            return random.random() < 0.5
        case 3 if isinstance(value, list) and value:
            value = list(value)
            value[random.randrange(len(value))] = random.choice(NUMBERS)
            return value
        case 4 if isinstance(value, (int, float)) and not isinstance(value, bool):
            return random.choice([-value, value + 1, value - 1, value * 0.5, str(value), [value]])
    return random.choice(NUMBERS)


def written(value: Any) -> str:
    """A value in TOML, including NaN and infinity."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return to_toml(value)


def mutated(table: dict[str, Any], random: Random) -> None:
    """Change one value or key of a recipe in place."""
    title = random.choice(list(table))
    section = table[title]
    if title in ("model", "init") and isinstance(section, dict) and random.random() < 0.7:
        section = section.get("options")
    if not isinstance(section, dict):
        return                                       # an earlier mutation replaced the section
    key = random.choice([*section] or ["new"])
    match random.randrange(20):
        case 0:
            section.pop(key, None)
        case 1:
            section[random.choice(WORDS)] = odd_value(random, 0)
        case 2:
            table[title] = odd_value(random, 0)
        case 3 if title in ("model", "init"):
            table[title]["options"] = odd_value(random, 0)
        case _:
            section[key] = odd_value(random, section.get(key))


def recipe_text(table: Mapping[str, Any], random: Random) -> bytes:
    """The recipe as the bytes of a file, which in one of eight cases are damaged."""
    lines = []
    for title, section in table.items():
        if not isinstance(section, dict):
            lines.insert(0, f"{to_toml(title)} = {written(section)}")
            continue
        lines.append(f"[{title}]")
        lines += [f"{to_toml(key)} = {inline(value)}" for key, value in section.items()]
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    position = random.randrange(len(text))
    match random.randrange(40):
        case 0:
            return text[:position]
        case 1:
            return text[:position] + bytes(random.choices(range(256), k=5)) + text[position:]
        case 2:
            return text + b"\n[run]\nseed = 1\n"
        case 3:
            return text + b"\nnew = " + b"[" * 3000 + b"]" * 3000
        case 4:
            return b"\xef\xbb\xbf" + text
    return text


def inline(value: Any) -> str:
    """A value in TOML, with tables on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{to_toml(key)} = {inline(item)}" for key, item in value.items()) + "}"
    return written(value)


def override(table: Mapping[str, Any], random: Random) -> str:
    """An argument for --set: mostly a mutation of one value, sometimes with invalid syntax."""
    title = random.choice(list(table))
    section, prefix = table[title], title
    if title in ("model", "init") and random.random() < 0.7:
        section, prefix = section["options"], f"{title}.options"
    key = random.choice([*section] * 3 + [random.choice(WORDS)])
    text = f"{prefix}.{key}={inline(odd_value(random, section.get(key)))}"
    match random.randrange(20):
        case 0:
            return text.replace("=", random.choice(["", ".", "==", "=["]), 1)
        case 1:
            return f"{prefix}.{key}=" + "[" * 3000
        case 2:
            return random.choice(WORDS)
    return text


# ---------------------------------------------------------------------------------------------
# Command lines
# ---------------------------------------------------------------------------------------------

FLAGS = {
    "train.py": ("--recipe", "--init", "--data-dir", "--out-dir", "--seed", "--resume", "--set"),
    "eval.py": ("--data", "--data-dir", "--image-size", "--recipe", "--set", "--json", "--per-class",
                "--throughput"),
    "vitinit.sweep": ("--recipe", "--init", "--seeds", "--variant", "--out-dir", "--nproc", "--set"),
    "vitinit.compare": ("--out",),
    "vitinit.figures": ("--out", "--recipe", "--run", "--init", "--seed", "--epochs", "--weights",
                        "--count", "--kinds", "--blocks", "--heads", "--queries", "--magnitude",
                        "--step", "--columns", "--embed-dim", "--kernel-size", "--data-dir"),
    "vitinit.bench": ("--batch", "--image-size", "--workers", "--count", "--rounds", "--seed", "--amp",
                      "--model", "--card-gib", "--recipe", "--data-dir", "--compile")}
LEADING = {
    "vitinit.figures": ("kernels", "maps", "attention", "mass", "equivariance", "spectrum", "filters",
                        "curves", "operations", "batch"),
    "vitinit.bench": ("init", "loader", "augment", "pixels", "corrupt", "step", "memory", "fuzz")}
PLAIN = ("quickstart", "deit_base", "0", "1", "-1", "0-3", "3-0", "1,2", "1,x", "288", "nan", "inf",
         "9" * 30, "absent.toml", "shapes", "cifar10=/", "imagenet=", "runs", "name", "ema", "off")


def odd_arguments(program: str, random: Random) -> list[str]:
    """Random options and words, without zero bytes, since a shell cannot pass those."""
    words = [word for word in (*WORDS, *PLAIN) if "\x00" not in word]
    found = [random.choice(LEADING[program])] if program in LEADING else []
    for _ in range(random.randrange(5)):
        found += random.choice([[random.choice(FLAGS[program]), random.choice(words)],
                                [random.choice(FLAGS[program])], [random.choice(words)]])
    return found


def cases(count: int, seed: int) -> Iterator[Case]:
    """`count` cases, alternately a recipe and a command line; case i depends only on (seed, i)."""
    recipes = sorted(RECIPES.glob("*.toml"))
    for number in range(count):
        random = Random(f"{seed} {number}")
        program = random.choice(list(FLAGS))
        if number % 2:
            yield Case(program, odd_arguments(program, random))
            continue
        table = small_recipe(random.choice(recipes), random)
        sets = []
        in_file = random.choice([0, 1, 1, 2])
        for _ in range(max(1 - in_file, random.choice([0, 0, 1]))):
            text = override(table, random)
            sets += ["--set", text] if "\x00" not in text else []
        for _ in range(in_file):
            mutated(table, random)
        yield Case("train.py", ["--recipe", RECIPE, *sets], recipe_text(table, random))


# ---------------------------------------------------------------------------------------------
# Outcomes
# ---------------------------------------------------------------------------------------------


class Hung(BaseException):
    """A case has run for PATIENCE seconds. It is a BaseException, so that no program handles it."""


def program_file(name: str) -> ModuleType:
    """Load train.py or eval.py, which belong to no package, as a module."""
    spec = importlib.util.spec_from_file_location(f"fuzzed_{name}", REPOSITORY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def programs() -> dict[str, Callable[[list[str]], int]]:
    """Name of a program → a function that runs it with given arguments and returns its status.

    train.py and vitinit.sweep make a dry run, vitinit.figures and vitinit.bench only parse their
    arguments, so that nothing is trained, drawn or measured.
    """
    from .__main__ import parse_arguments as parse_bench

    def parsed(name: str, parse: Callable) -> Callable[[list[str]], int]:
        def run(arguments: list[str]) -> int:
            return run_program(name, lambda: parse(arguments) and None)
        return run
    train, evaluate = program_file("train").main, program_file("eval").main
    return {"train.py": lambda arguments: train(["--dry-run", *arguments]), "eval.py": evaluate,
            "vitinit.sweep": lambda arguments: sweep.main(["--dry-run", *arguments]),
            "vitinit.compare": compare.main,
            "vitinit.figures": parsed("vitinit.figures", figures.parse_arguments),
            "vitinit.bench": parsed("vitinit.bench", parse_bench)}


def small_images(folder: Path) -> None:
    """Write the image folder that SMALL_DATA names: train/ and val/ with two small classes."""
    random = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 2)):
        for label in ("one", "two"):
            class_folder = folder / "images" / split / label
            class_folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (37, 41, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(class_folder / f"{number}.png")


def outcome(case: Case, run: Callable[[list[str]], int], folder: Path) -> CaseOutcome:
    """Run one case in this process, with `folder` as the working directory.

    "accepted": exit status 0 and nothing on stderr. "refused": status 2 and one printable line on
    stderr that starts with the program's name. "wordy": such a line, but too long. "several lines":
    anything else that was printed. "traceback": an exception. "hung": more than PATIENCE seconds.
    """
    recipe = folder / "odd.toml"
    recipe.write_bytes(case.recipe)
    arguments = [str(recipe) if word == RECIPE else word for word in case.arguments]

    def ring(number: int, frame: object) -> None:
        raise Hung
    before, errors = os.getcwd(), io.StringIO()
    handler = signal.signal(signal.SIGALRM, ring)
    os.chdir(folder)
    signal.alarm(PATIENCE)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            status = run(arguments)
    except Hung:
        return CaseOutcome("hung")
    except (Exception, SystemExit) as error:
        return CaseOutcome("traceback", f"{type(error).__name__}: {error}"[:500])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        os.chdir(before)
    message = errors.getvalue()
    if status == 0:
        return CaseOutcome("several lines", message[:500]) if message else CaseOutcome("accepted", "")
    one_line = (message.endswith("\n") and message[:-1].isprintable()
                and message.startswith(f"{case.program}: "))
    if status != 2 or not one_line:
        return CaseOutcome("several lines", f"status {status}: {message}"[:500])
    message = message.partition("; valid: ")[0]      # the list of valid values may be long
    quoted = (len(str(recipe)) + sum(map(len, arguments))
              + max(map(len, case.recipe.splitlines()), default=0))
    return CaseOutcome("wordy" if len(message) > WORDY + quoted else "refused", message)


def bench_fuzz(count: int, seed: int) -> int:
    """Run `count` cases and print their outcomes by program.

    Returns how many were neither accepted nor refused in one line.
    """
    runs, found, wrong = programs(), {name: Counter() for name in FLAGS}, []
    with tempfile.TemporaryDirectory() as folder:
        small_images(Path(folder))
        for number, case in enumerate(cases(count, seed)):
            result = outcome(case, runs[case.program], Path(folder))
            found[case.program][result.kind] += 1
            if result.kind not in GOOD:
                wrong.append((number, case, result))
    print(f"{count} cases, seed {seed}\n{'':16}" + "".join(f"{kind:>15}" for kind in KINDS))
    for name, counts in (*found.items(), ("all", sum(found.values(), Counter()))):
        print(f"{name:16}" + "".join(f"{counts[kind]:15}" for kind in KINDS))
    for number, case, result in wrong:
        arguments = " ".join(map(ascii, case.arguments))
        print(f"case {number}: {result.kind}: {case.program} {arguments[:300]}: {result.words}")
    return len(wrong)
