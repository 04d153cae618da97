"""Random recipes and command lines are accepted, or refused in one line, without hanging.

Every second case is a recipe: one of recipes/, with a model and data of the smallest size and one to
three mutations, which train.py reads in a dry run. The others are random arguments for all programs.
VITINIT_CASES: a longer run, of so many cases.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from vitinit import compare, sweep
from vitinit.bench import __main__ as bench
from vitinit.command_line import run_program
from vitinit.figures import __main__ as figures
from vitinit.init import INITS
from vitinit.models import MODELS

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))
PATIENCE = 60                   # seconds after which a case counts as hanging
WORDY = 200                     # limit of a message's characters, beside the arguments it quotes
SMALL = {                       # how a model's name starts → options of a small one for 32×32 pixels
    "vit": dict(patch_size=8, embed_dim=24, depth=1, num_heads=3),
    "swin": dict(patch_size=4, embed_dim=24, depths=[1, 1], num_heads=[3, 3], window_size=4),
    "mixer": dict(patch_size=8, embed_dim=16, depth=1),
    "convmixer": dict(patch_size=4, embed_dim=16, depth=1, kernel_size=3),
    "simple": dict(patch_size=8, embed_dim=24, depth=1, num_heads=3)}
SETTINGS = {
    "data": dict(name="image_folder", root="images", num_classes=3, image_size=32, workers=0,
                 subset=1.0, images_per_class=0),
    "optim": dict(global_batch=8, max_batch_per_process=4), "mix": dict(group=4),
    "schedule": dict(warmup_lr=0.0, min_lr=0.0), "eval": dict(batch_size=2)}

# Numbers are small or far out of range. Those between are valid, and models of such sizes take long.
NUMBERS = (-1, 0, 1, 2, 3, 5, 7, 16, -2**63, 2**31, 2**40, 2**62, 2**63, 2**64, 10**30, 10**400, -0.0,
           0.5, 1.5, -1.5, 1e-30, 1e-320, 1e30, 1e300, -1e300, float("nan"), float("inf"),
           -float("inf"))
WORDS = ("", " ", "none", "true", "impulse", "a\nb", "\x1b[2J", "\x00", "ü", "\u202e", "日本" * 40,
         "a" * 300, "x" * 5000, "'", '"', "%s", "{}", "../..", "~", "/", "/dev/null", "--", "-1",
         "\udcff", "1e5", "[", "=", ".", "vit_tiny", "default", "cifar10")
LISTS = ([], [1], [1, 2], [1, 2, 3], [0.5, 0.5], [2.0, 1.0], [-1, -1], [True], ["a"], [[]], [1e308] * 3,
         [0] * 500, ["Rotate", "Rotate"], [float("nan")] * 2, {}, {"a": 1}, {"a": {"b": [1]}})
PLAIN = ("quickstart", "deit_base", "0", "1", "-1", "0-3", "3-0", "1,2", "1,x", "288", "nan", "inf",
         "9" * 30, "absent.toml", "shapes", "cifar10=/", "imagenet=", "runs", "name", "ema", "off")


def small_recipe(random: Random) -> dict[str, Any]:
    """A recipe of recipes/, its model and data made small; sometimes with another model or init."""
    table = tomllib.loads(random.choice(RECIPES).read_text(encoding="utf-8"))
    if random.random() < 0.3:
        table["model"] = {"name": random.choice(list(MODELS))}
    options = SMALL[next(start for start in SMALL if table["model"]["name"].startswith(start))]
    table["model"]["options"] = table["model"].get("options", {}) | options
    if random.random() < 0.5 or table["init"]["name"] == "impulse_gd":   # which takes long
        name = random.choice([name for name in INITS if name != "impulse_gd"])
        table["init"] |= {"name": name, "options": {}}
    table["init"].setdefault("options", {})
    for title, settings in SETTINGS.items():
        table[title] |= settings
    return table


def odd_value(random: Random, value: Any) -> Any:
    """A replacement for `value`: extreme, of another type, or slightly different."""
    number = random.choice(NUMBERS)
    if isinstance(value, list) and value and random.random() < 0.5:
        return [odd_value(random, item) for item in value]
    if type(value) in (int, float) and random.random() < 0.8:            # to get past the type
        return number if type(number) is type(value) else random.choice(
            [value * 2, value // 2, -value, value + 1, value * 0.5, str(value), [value]])
    return random.choice([not value, number, number, random.choice(WORDS), random.choice(LISTS)])


def written(value: Any) -> str:
    """A value in TOML, with tables on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {written(item)}"
                               for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return repr(value) if type(value) is float else json.dumps(value, ensure_ascii=False)


def mutate(table: dict[str, Any], random: Random) -> str:
    """Change one value or key of a recipe in place; return the same as an argument of --set."""
    title = random.choice(list(table))
    section, prefix = table[title], title
    if title in ("model", "init") and isinstance(section, dict) and random.random() < 0.7:
        section, prefix = section.get("options"), f"{title}.options"
    if not isinstance(section, dict) or random.random() < 0.05:
        table[title] = odd_value(random, 0)          # an earlier mutation may have replaced it
        return random.choice([*WORDS, f"{title}=1", f"{title}.a=" + "[" * 3000])
    key = random.choice([*section] * 3 + [random.choice(WORDS)])
    section[key] = odd_value(random, section.get(key))
    text = f"{prefix}.{key}={written(section[key])}"
    if random.random() < 0.05:
        del section[key]
    return text


def bytes_of(table: dict[str, Any], random: Random) -> bytes:
    """The recipe as the bytes of a file, which in one of eight cases are damaged."""
    text = "\n".join(f"[{title}]\n" + "\n".join(f"{json.dumps(key)} = {written(value)}"
                                               for key, value in section.items())
                     if isinstance(section, dict) else "" for title, section in table.items()
                     ).encode("utf-8", "surrogatepass")
    place = random.randrange(len(text))
    damaged = (text[:place], text[:place] + bytes(random.choices(range(256), k=5)) + text[place:],
               text + b"\n[run]\nseed = 1\n", text + b"\nnew = " + b"[" * 3000 + b"]" * 3000,
               b"\xef\xbb\xbf" + text)
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


def outcome(name: str, run: Callable[[list[str]], int], arguments: list[str], folder: Path,
            quoted: int = 0) -> str:
    """Run a case in this process, with `folder` as the working directory; how it ended, in words.

    "accepted": status 0 and nothing on stderr. "refused": status 2 and one printable line on stderr
    that starts with the program's name. quoted: length of what the line may quote of a recipe.
    """
    def ring(number: int, frame: object) -> None:
        raise KeyboardInterrupt("hung")              # which no program takes for an error
    before, errors = os.getcwd(), io.StringIO()
    handler = signal.signal(signal.SIGALRM, ring)
    os.chdir(folder)
    signal.alarm(PATIENCE)
    began = time.monotonic()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            status = run(arguments)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"[:500]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        os.chdir(before)
    message = errors.getvalue()
    if time.monotonic() - began >= PATIENCE:
        return "hung"
    if status == 0:
        return f"accepted, but printed {message[:500]}" if message else "accepted"
    one_line = message[:-1].isprintable() and message.startswith(f"{name}: ") and message[-1] == "\n"
    if status != 2 or not one_line:
        return f"status {status}: {message}"[:500]
    own = re.split("; valid: | .choose from ", message)[0]
    short = len(own) <= WORDY + quoted + sum(map(len, arguments))
    return "refused" if short else f"wordy: {message}"


def test_random_recipes_and_command_lines_end_in_one_line(
        image_tree, tmp_path, train_program, eval_program):
    found, counts = programs(train_program.main, eval_program.main), {"accepted": 0, "refused": 0}
    words = [word for word in (*WORDS, *PLAIN) if "\x00" not in word]    # which no shell can pass
    for number in range(int(os.environ.get("VITINIT_CASES", 300))):
        random = Random(f"1 {number}")
        name, quoted = random.choice(list(found)), 0
        run, flags = found[name]
        if number % 2:
            arguments = random.choice([["attention"], ["step"], []])     # a subcommand, or not
            for _ in range(random.randrange(5)):
                arguments += random.choice([[random.choice(flags), random.choice(words)],
                                            [random.choice(flags)], [random.choice(words)]])
        else:
            table, name, run = small_recipe(random), "train.py", found["train.py"][0]
            sets = [mutate(table, random) for _ in range(random.choice([1, 1, 2, 3]))]
            if random.random() < 0.3:
                table = small_recipe(random)         # the same mutations by --set alone
            else:
                sets = []
            content = bytes_of(table, random)
            (tmp_path / "odd.toml").write_bytes(content)
            quoted = max(map(len, content.splitlines()), default=0)
            arguments = ["--recipe", str(tmp_path / "odd.toml")] + [
                word for text in sets if "\x00" not in text for word in ("--set", text)]
        end = outcome(name, run, arguments, tmp_path, quoted)
        assert end in counts, (number, name, [ascii(word)[:300] for word in arguments], end)
        counts[end] += 1
    assert min(counts.values()) > 5, counts
