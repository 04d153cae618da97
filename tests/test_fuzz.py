"""Random recipes and command lines are accepted, or refused in one line, without hanging.

Every second case is a recipe: one of recipes/, with a model and data of the smallest size and one
to three mutations, which train.py reads in a dry run. The others are random arguments for all
programs. VITINIT_CASES: a longer run, of so many cases.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from small_models import SMALL

from vitinit import compare, sweep
from vitinit.bench import __main__ as bench
from vitinit.command_line import run_program
from vitinit.figures import __main__ as figures
from vitinit.init import INITS
from vitinit.models import MODELS
from vitinit.recipe.values import to_toml

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))
PATIENCE = 60                   # seconds after which a case counts as hanging
SETTINGS = {
    "data": dict(name="image_folder", root="images", num_classes=3, image_size=32, workers=0,
                 subset=1.0, images_per_class=0),
    "optim": dict(global_batch=8, max_batch_per_process=4), "mix": dict(group=4),
    "schedule": dict(warmup_lr=0.0, min_lr=0.0), "eval": dict(batch_size=2)}

# Numbers are small or far out of range. Those between are valid; models of such sizes take long.
VALUES = (-1, 0, 1, 2, 3, 5, 7, 16, -2**63, 2**31, 2**63, 10**30, -0.0, 0.5, 1.5, -1.5, 1e-30,
          1e30, float("nan"), float("inf"), True, False, "", "none", "impulse", "a\nb", "ü",
          "a" * 300, "'", "%s", "../..", "-1", "[", "vit_tiny", "cifar10", [], [1], [1, 2],
          [0.5, 0.5], [2.0, 1.0], [True], ["a"], [[]], {}, {"a": 1}, {"a": {"b": [1]}})
WORDS = (*filter(lambda value: isinstance(value, str), VALUES), "quickstart", "deit_base", "0",
         "0-3", "3-0", "1,2", "1,x", "288", "nan", "9" * 30, "absent.toml", "shapes", "cifar10=/",
         "imagenet=", "runs", "name", "ema", "off", "--", "/dev/null", "x=1", "section.key=1")


def small_recipe(random: Random) -> dict[str, Any]:
    """A recipe of recipes/, its model and data made small; sometimes with another model or init."""
    table = tomllib.loads(random.choice(RECIPES).read_text(encoding="utf-8"))
    if random.random() < 0.3:
        table["model"] = {"name": random.choice(list(MODELS))}
    options = next(own for name, own in SMALL.items() if table["model"]["name"][:4] == name[:4])
    table["model"]["options"] = table["model"].get("options", {}) | options
    if random.random() < 0.5 or table["init"]["name"] == "impulse_gd":   # which takes long
        name = random.choice([name for name in INITS if name != "impulse_gd"])
        table["init"] |= {"name": name, "options": {}}
    table["init"].setdefault("options", {})
    for title, settings in SETTINGS.items():
        table[title] |= settings
    return table


def mutate(table: dict[str, Any], random: Random) -> str:
    """Change one value or key of a recipe in place; return the same as an argument of --set."""
    title = random.choice(list(table))
    section, prefix = table[title], title
    if title in ("model", "init") and random.random() < 0.7:
        section, prefix = section.get("options"), f"{title}.options"
    if not isinstance(section, dict):                # an earlier mutation may have replaced it
        return random.choice(WORDS)
    key = random.choice([*section, random.choice(("a b", "", "epoch"))])
    old, new = section.get(key), random.choice(VALUES)
    if isinstance(old, list) and old and random.random() < 0.5:
        new = [random.choice(VALUES) for _ in old]
    elif type(old) in (int, float) and random.random() < 0.5:            # to get past the type
        new = random.choice([old * 2, old // 2, -old, old + 1, old * 0.5])
    section[key] = new
    if random.random() < 0.05:
        del section[key]
    return f"{prefix}.{key}={to_toml(new)}"


def bytes_of(table: dict[str, Any], random: Random) -> bytes:
    """The recipe as the bytes of a file, which in one of eight cases are damaged."""
    text = "\n".join(f"[{title}]\n" + "\n".join(f"{to_toml(key)} = {to_toml(value)}"
                                                for key, value in section.items())
                     if isinstance(section, dict) else ""
                     for title, section in table.items()).encode()
    place = random.randrange(len(text))
    damaged = (text[:place], text[:place] + bytes(random.choices(range(256), k=5)) + text[place:],
               text + b"\n[run]\nseed = 1\n")
    return random.choice(damaged) if random.random() < 0.125 else text


def programs(train: Callable, evaluate: Callable) -> dict[str, tuple[Callable, list[str]]]:
    """Name of a program → what runs it, and its options, which are those of its help.

    train.py and vitinit.sweep make a dry run, vitinit.figures and vitinit.bench only parse their
    arguments, so that nothing is trained, drawn or measured.
    """
    runs = {"train.py": lambda arguments: train(["--dry-run", *arguments]), "eval.py": evaluate,
            "vitinit.sweep": lambda arguments: sweep.main(["--dry-run", *arguments]),
            "vitinit.compare": compare.main}
    for program in (figures, bench):
        name = program.__name__.removesuffix(".__main__")
        runs[name] = lambda arguments, name=name, parse=program.parse_arguments: run_program(
            name, lambda: parse(arguments) and None)
    found = {}
    for name, run in runs.items():
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            run(["--help"])
        flags = set(re.findall(r"--[a-z-]+", text.getvalue())) - {"--help"}
        found[name] = run, sorted(flags or {"--out", "--recipe"})
    return found


def outcome(name: str, run: Callable[[list[str]], int], arguments: list[str]) -> str:
    """Run a case in this process; how it ended, in words.

    "accepted": status 0 and nothing on stderr. "refused": status 2 and one printable line on stderr
    that starts with the program's name.
    """
    def ring(number: int, frame: object) -> None:
        raise RuntimeError("hung")                   # which no program takes for an error
    errors, handler = io.StringIO(), signal.signal(signal.SIGALRM, ring)
    signal.alarm(PATIENCE)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            status = run(arguments)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"[:500]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    message = errors.getvalue()
    if (status, message) == (0, ""):
        return "accepted"
    one_line = message.startswith(f"{name}: ") and message[:-1].isprintable()
    return "refused" if status == 2 and one_line else f"status {status}: {message}"[:500]


def test_random_recipes_and_command_lines_end_in_one_line(
        image_tree, train_program, eval_program, monkeypatch):
    monkeypatch.chdir(image_tree.parent)
    found, counts = programs(train_program.main, eval_program.main), {"accepted": 0, "refused": 0}
    for number in range(int(os.environ.get("VITINIT_CASES", 200))):
        random = Random(f"2 {number}")
        name = random.choice(list(found))
        run, flags = found[name]
        if number % 2:
            arguments = random.choice([["attention"], ["step"], []])     # a subcommand, or not
            for _ in range(random.randrange(5)):
                arguments += random.choice([[random.choice(flags), random.choice(WORDS)],
                                            [random.choice(flags)], [random.choice(WORDS)]])
        else:
            table, name, run = small_recipe(random), "train.py", found["train.py"][0]
            sets = [mutate(table, random) for _ in range(random.choice([1, 1, 2, 3]))]
            if random.random() < 0.3:
                table = small_recipe(random)         # the same mutations by --set alone
            else:
                sets = []
            Path("odd.toml").write_bytes(bytes_of(table, random))
            arguments = ["--recipe", "odd.toml"]
            arguments += [word for text in sets for word in ("--set", text)]
        end = outcome(name, run, arguments)
        assert end in counts, (number, name, arguments, end)
        counts[end] += 1
    assert min(counts.values()) > 5, counts
