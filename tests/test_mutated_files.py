"""Files of every kind that is read, mutated at random, are read as a valid value or refused in one
line: no traceback, no value of another type, shape or length, and no memory beyond a limit. Random
command lines and values of recipes end in one line, too.

VITINIT_MUTATIONS: a longer run, of so many of each kind.
"""

import contextlib
import json
import lzma
import math
import os
import re
import resource
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from small_models import SMALL

import vitinit
from vitinit.base.files import parse_json, parse_toml
from vitinit.base.messages import OneLineError
from vitinit.base.values import to_toml
from vitinit.init import INITS
from vitinit.interop.weights.readers import read_description
from vitinit.programs import compare, evaluate, export, predict, sweep, train
from vitinit.programs.bench import program as bench
from vitinit.programs.figures import program as figures
from vitinit.programs.shared.command_line import run_program
from vitinit.programs.shared.records import RunRecord, read_run, read_runs, write_archive
from vitinit.recipe.files import RECIPES, from_dict, load_recipe
from vitinit.recipe.sections import Recipe
from vitinit.runs.checkpoint import read_checkpoint_file
from vitinit.runs.folder import RunFolder
from vitinit.runs.model import build
from vitinit.runs.teacher import program
from vitinit.train.metrics import Progress
from vitinit.train.optim import optimizer_for
from vitinit.train.state import Ema, TrainState

RUN = Path(__file__).parent / "runs" / "data" / "stopped_at_88e7f50"
COUNT = int(os.environ.get("VITINIT_MUTATIONS", 50))
MEMORY = 600  # MiB that reading a mutated file may add to the largest so far
DEEP: Any = []
for _ in range(70):
    DEEP = [DEEP]
# fmt: off
VALUES = (None, True, -1, 0, 1, 1.5, -0.5, 2**31, 2**63, 10**400, 1e308, math.nan, math.inf, "",
          "x", "7", "x" * 300, [], [1], ["a", "b", "c"], {}, {"a": 1}, DEEP, [[1, 2], [3]])
# fmt: on
TENSORS = (
    torch.ones(1).expand(2**18, 2**18),
    torch.ones(3),
    torch.ones(3).long(),
    torch.ones(()),
    torch.ones(2, 2).to_sparse(),
    torch.ones(3).to(torch.float8_e4m3fn),
    torch.ones(3, device="meta"),
    torch.full((3,), math.nan),
    torch.ones(0),
    torch.ones(3).cfloat(),
)
SHARED: Any = [1]
for _ in range(40):  # 2^40 numbers, if it is written out
    SHARED = [SHARED, SHARED]


def altered(value: Any, random: Random, odd: tuple) -> Any:
    """The value with one of its parts, at any depth, removed, doubled, renamed or replaced."""
    if not isinstance(value, (dict, list, tuple)) or not value or random.random() < 0.08:
        if isinstance(value, torch.Tensor) and random.random() < 0.5:
            wrong = random.choice([math.nan, -math.inf, -1.0])
            return random.choice(
                [
                    value.double(),
                    value[None],
                    value.long(),
                    value.flatten()[:1],
                    torch.full_like(value, wrong) if value.is_floating_point() else value,
                ]
            )
        return random.choice(odd)
    if isinstance(value, dict):
        key = random.choice([*value])
        if random.random() < 0.15:
            return {name: part for name, part in value.items() if name != key}
        if random.random() < 0.1:
            return {f"{name}x" if name == key else name: part for name, part in value.items()}
        return {**value, key: altered(value[key], random, odd)}
    place = random.randrange(len(value))
    parts = [*value]
    other = altered(parts[place], random, odd)
    parts[place : place + 1] = random.choice([[], [parts[place]] * 2, [other], [other]])
    return type(value)(parts)


def damaged(content: bytes, random: Random) -> bytes:
    """The bytes cut short, or with some of them changed, repeated, added or replaced."""
    place, end = sorted(random.randrange(len(content) + 1) for _ in range(2))
    more = random.choice(
        [
            bytes(random.choices(range(256), k=3)),
            b"[" * 2000,
            b'{"a":' * 999,
            b"9" * 400,
            b"a." * 2000,
            b"\0",
            b"\n",
            b"1e99",
            content[place:end][:99],
        ]
    )
    return content[:place] + random.choice(
        [b"", more, more + content[place:], more + content[place + 1 :], more + content[end:]]
    )


def written(table: Any, random: Random) -> bytes:
    """Text of JSON of a table that is altered, damaged or both."""
    if random.random() < 0.7:
        table = altered(table, random, VALUES)
    text = json.dumps(table).encode()
    return damaged(text, random) if random.random() < 0.4 else text


def require_run(run: RunRecord) -> None:
    epochs = [row["epoch"] for row in run.rows]
    assert epochs == sorted({*epochs}) and all(type(epoch) is int for epoch in epochs)
    assert all(
        value is None
        or type(value) in (int, float)
        and not abs(value) > 2**63
        or type(value) is float
        for row in run.rows
        for value in row.values()
    )
    assert all(type(word) is str for start in run.starts for word in start.get("command", []))
    assert {type(run.seed), type(run.epochs)} == {int} and type(run.validated_on) is str


def require_recipe(recipe: Recipe) -> None:
    again = from_dict(recipe.as_dict(), "again")
    assert again == recipe and all(
        type(value) is not float or math.isfinite(value) for value in recipe.keys.values()
    )


def require_model(trained: vitinit.Trained) -> None:
    assert all(value.isfinite().all() for value in trained.model.state_dict().values())
    assert len(trained.classes) == trained.model.num_classes
    assert all(type(name) is str for name in trained.classes)
    trained.model(torch.zeros(1, 3, *trained.image_size))


class Kinds:
    """For each kind of file: makes a mutated one in a folder, and reads and checks it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.state = read_checkpoint_file(RUN / "last.pt")
        assert (
            export.main(
                [
                    str(RUN),
                    "--to",
                    "safetensors",
                    "--names",
                    "transformers",
                    "--out",
                    str(folder / "transformers"),
                ]
            )
            == 0
        )
        assert export.main([str(RUN), "--to", "safetensors", "--out", str(folder / "timm")]) == 0
        write_archive([read_run(RUN)], folder / "whole.tar.xz")
        self.recipe = from_dict(self.state["recipe"], "")

    def fresh(self) -> Path:
        shutil.rmtree(self.run, ignore_errors=True)
        return Path(shutil.copytree(RUN, self.run))

    def text(self, name: str, random: Random) -> bytes:
        """The mutated contents of a text of a run."""
        content = (
            (RUN / name).read_bytes()
            if name != "steps.jsonl"
            else b"".join(
                b'{"step": %d0, "loss": 1.5, "lr": 0.1, "grad_norm": null}\n' % n
                for n in range(1, 6)
            )
        )
        if name.endswith(".jsonl") and random.random() < 0.7:
            lines = content.splitlines(keepends=True)
            place = random.randrange(len(lines))
            lines[place] = written(json.loads(lines[place]), random) + b"\n"
            return b"".join(lines)
        if name == "run.json" and random.random() < 0.7:
            return written(json.loads(content), random)
        if name == "recipe.toml" and random.random() < 0.7:
            lines = content.splitlines()
            place = random.randrange(len(lines))
            value = json.dumps(random.choice(VALUES)).encode()
            lines[place] = lines[place].partition(b"=")[0] + b"= " + value
            return b"\n".join(lines)
        return damaged(content, random)

    def of_a_run(self, name: str, random: Random) -> None:
        (self.fresh() / name).write_bytes(self.text(name, random))
        require_run(read_run(self.run))
        rows = RunFolder(self.run).steps.rows()
        steps = [row["step"] for row in rows]
        assert steps == sorted({*steps})

    def a_recipe(self, random: Random) -> None:
        path = self.folder / "odd.toml"
        text = self.text("recipe.toml", random)
        if random.random() < 0.5:
            base = json.dumps(random.choice(["quickstart", *VALUES])).encode()
            text = b"base = " + base + b"\n" + text.replace(b"version = 12", b"version = 13")
        path.write_bytes(text)
        require_recipe(load_recipe(path))

    def foreign(self, library: str, random: Random) -> None:
        folder = Path(shutil.copytree(self.folder / library, self.run))
        name = random.choice([path.name for path in folder.glob("*.json")])
        (folder / name).write_bytes(written(json.loads((folder / name).read_bytes()), random))
        described = read_description(folder / "model.safetensors")
        assert (
            described is None
            or described.classes is None
            or (all(type(word) is str for word in described.classes))
        )
        require_model(
            vitinit.load(
                folder,
                recipe=None
                if library == "transformers" and described and described.recipe
                else str(RUN / "recipe.toml"),
            )
        )

    def index(self, random: Random) -> None:
        self.run.mkdir()
        shutil.copy(self.folder / "timm" / "model.safetensors", self.run / "1.safetensors")
        names = {name: "1.safetensors" for name in self.state["model"]}
        index = self.run / "model.safetensors.index.json"
        index.write_bytes(written({"metadata": {}, "weight_map": names}, random))
        assert {type(value) for value in read_checkpoint_file(index).values()} <= {torch.Tensor}

    def archive(self, random: Random) -> None:
        content = lzma.decompress((self.folder / "whole.tar.xz").read_bytes())
        packed = (
            damaged((self.folder / "whole.tar.xz").read_bytes(), random)
            if random.random() < 0.3
            else lzma.compress(damaged(content, random), preset=0)
        )
        (self.folder / "odd.tar.xz").write_bytes(packed)
        for record in read_runs([self.folder / "odd.tar.xz"]):
            require_run(record)

    def safetensors(self, random: Random) -> None:
        path = self.folder / "odd.safetensors"
        content = (self.folder / "timm" / "model.safetensors").read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        head = written(json.loads(content[8:end]), random)
        path.write_bytes(
            damaged(content, random)
            if random.random() < 0.3
            else len(head).to_bytes(8, "little") + head + content[end:]
        )
        require_model(vitinit.load(path, recipe=str(RUN / "recipe.toml")))

    def notes_of_a_program(self, random: Random) -> None:
        whole, path = self.folder / "whole.pt2", self.folder / "odd.pt2"
        if not whole.exists():
            assert export.main([str(RUN), "--to", "torch", "--out", str(whole)]) == 0
        with zipfile.ZipFile(whole) as archive, zipfile.ZipFile(path, "w") as other:
            for part in archive.infolist():
                content = archive.read(part)
                other.writestr(
                    part,
                    written(json.loads(content), random)
                    if part.filename.endswith("vitinit.json")
                    else content,
                )
        opened = program(path, self.recipe, torch.device("cpu"))
        assert (
            all(
                type(value) is float and math.isfinite(value)
                for value in (*opened.teacher.mean, *opened.teacher.std)
            )
            and opened.outputs == 3
        )
        assert opened.classes is None or [*map(type, opened.classes)] == [str] * 3

    def bytes_of_a_checkpoint(self, random: Random) -> None:
        (self.fresh() / "last.pt").write_bytes(damaged((RUN / "last.pt").read_bytes(), random))
        self.both_readers()

    def values_of_a_checkpoint(self, random: Random) -> None:
        state = altered(self.state, random, VALUES[:20] + TENSORS + (SHARED, {1, 2}, 1j))
        key = random.choice(["progress", "classes", "grid", "optimizer", "ema", "scaler", "recipe"])
        if random.random() < 0.7:
            state = {
                **self.state,
                key: altered(self.state[key], random, VALUES[:20] + TENSORS + (SHARED,)),
            }
        torch.save(state, self.fresh() / "last.pt")
        self.both_readers()

    def both_readers(self) -> None:
        """Of weights alone, and of the whole state, from which training goes on."""
        model = build(self.recipe)
        state = TrainState(
            model,
            optimizer_for(model, self.recipe.optim),
            torch.amp.GradScaler("cpu", enabled=False),
            Ema(model, decay=0.9, warmup=False),
            Progress(),
        )
        refused = []
        for read in (
            lambda: require_model(vitinit.load(self.run)),
            lambda: state.load_state_dict(RunFolder(self.run).load_last(), self.run),
        ):
            try:
                read()
            except OneLineError as error:
                refused.append(error)
        if len(refused) < 2:
            assert {type(value) for value in vars(state.progress).values()} >= {int, float}
            for values in state.optimizer.state.values():
                assert all(
                    value.isfinite().all() and value.dtype == torch.float32
                    for value in values.values()
                )
            assert all(value.isfinite().all() for value in state.ema.model.state_dict().values())
        for error in refused:
            raise error


READERS: dict[str, Callable[[Kinds, Random], None]] = {
    **{
        name: lambda kinds, random, name=name: kinds.of_a_run(name, random)
        for name in ("run.json", "metrics.jsonl", "steps.jsonl", "recipe.toml")
    },
    "a recipe": Kinds.a_recipe,
    "index.json": Kinds.index,
    "archive": Kinds.archive,
    **{
        name: lambda kinds, random, name=name: kinds.foreign(name, random)
        for name in ("transformers", "timm")
    },
    "safetensors": Kinds.safetensors,
    "vitinit.json": Kinds.notes_of_a_program,
    "checkpoint, bytes": Kinds.bytes_of_a_checkpoint,
    "checkpoint, values": Kinds.values_of_a_checkpoint,
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> Kinds:
    return Kinds(tmp_path_factory.mktemp("kinds"))


@pytest.mark.parametrize("kind", READERS)
def test_a_mutated_file_is_refused_in_one_line_or_read_as_what_it_may_be(kinds, kind, capsys):
    counts, count = {"refused": 0, "read": 0}, COUNT // (10 if kind == "vitinit.json" else 1)
    for number in range(count):  # a program takes a fifth of a second to load
        shutil.rmtree(kinds.run, ignore_errors=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            READERS[kind](kinds, Random(f"{kind} {number}"))
            counts["read"] += 1
        except OneLineError as error:
            assert str(error).isprintable()
            counts["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"{kind}, mutation {number}") from error
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        assert more < MEMORY, (kind, number, more)
    with capsys.disabled():
        if COUNT > 50:
            print(f"\n{kind}: {count} mutated, {counts}")
    assert counts["refused"] > 0


# Each program with a kind of file that it reads.
PROGRAMS = [
    (compare.main, ["{run}"], "run.json"),
    (compare.main, ["{run}"], "recipe.toml"),
    (evaluate.main, ["{run}"], "checkpoint, values"),
    (predict.main, ["{run}", "{run}"], "checkpoint, values"),
    (export.main, ["{run}", "--to", "run", "--out", "{run}/out"], "run.json"),
    (figures.main, ["curves", "--steps", "{run}", "--out", "{run}/a.png"], "steps.jsonl"),
    (figures.main, ["report", "{run}", "--out", "{run}/a.html"], "checkpoint, values"),
    (train.main, ["--resume", "{run}"], "checkpoint, values"),
    (train.main, ["--resume", "{run}"], "metrics.jsonl"),
    (train.main, ["--recipe", "{run}/../odd.toml", "--dry-run"], "a recipe"),
    (sweep.main, ["--recipe", "{run}/../odd.toml", "--seeds", "0", "--dry-run"], "a recipe"),
]


@pytest.mark.parametrize("main, words, kind", PROGRAMS)
def test_no_program_ends_in_a_traceback_for_a_mutated_file(kinds, main, words, kind, capsys):
    for number in range(max(2, COUNT // 25)):
        shutil.rmtree(kinds.run, ignore_errors=True)
        with contextlib.suppress(OneLineError):
            READERS[kind](kinds, Random(f"program {kind} {number}"))
        capsys.readouterr()
        status = main([word.format(run=kinds.run) for word in words])
        error = capsys.readouterr().err
        assert status == 0 or error.splitlines()[-1].isprintable() and "Traceback" not in error


# Of which nothing is trained, drawn or measured: of some, only the arguments are parsed.
COMMAND_LINES = {
    "train.py": lambda words: train.main(["--dry-run", *words]),
    "eval.py": evaluate.main,
    "vitinit compare": compare.main,
    "vitinit sweep": lambda words: sweep.main(["--dry-run", *words]),
    **{
        name: lambda words, name=name, parse=program.parse_arguments: run_program(
            name, lambda: parse(words) and None
        )
        for name, program in (("vitinit figures", figures), ("vitinit bench", bench))
    },
}
# fmt: off
WORDS = ("", "none", "a\nb", "ü", "'", "%s", "../..", "-1", "[", "cifar10", "quickstart", "0",
         "0-3", "1,x", "288", "9" * 30, "nan", "absent.toml", "imagenet=", "cifar10=/", "runs",
         "/dev/null", "--", "x=1", "section.key=1", "attention", "step")
# fmt: on
SMALLEST = {
    "data.name": "image_folder",
    "data.root": "images",
    "data.num_classes": 3,
    "data.image_size": 32,
    "data.workers": 0,
    "data.subset": 1.0,
    "data.images_per_class": 0,
    "optim.global_batch": 8,
    "optim.max_batch_per_process": 4,
    "mix.group": 4,
    "schedule.warmup_lr": 0.0,
    "schedule.min_lr": 0.0,
    "eval.batch_size": 2,
    "distill.teacher": "",
}


def changed_recipe(random: Random) -> list[str]:
    """Arguments of train.py: a recipe, made small, and one to three changes of its keys."""
    recipe = load_recipe(random.choice(sorted(RECIPES.glob("*.toml"))), [])
    options = next(sizes for name, sizes in SMALL.items() if recipe.model.name[:4] == name[:4])
    values = SMALLEST | {f"model.options.{key}": value for key, value in options.items()}
    name = random.choice([name for name in INITS if name != "impulse_gd"])  # which takes long
    for _ in range(random.choice([1, 1, 2, 3])):
        key = random.choice([*recipe.keys])
        value = (recipe.keys | values)[key]
        if isinstance(value, (list, tuple)) and random.random() < 0.5:
            values[key] = [random.choice(VALUES[1:]) for _ in value]
        elif type(value) in (int, float) and random.random() < 0.8:  # to get past the type
            values[key] = random.choice([2 * value, -value, value + 1, value * 0.5])
        else:
            values[key] = random.choice(VALUES[1:])
    return [
        "--recipe",
        recipe.name,
        "--init",
        name,
        "--set",
        "init.options={}",
        *(word for key, value in values.items() for word in ("--set", f"{key}={to_toml(value)}")),
    ]


def test_random_arguments_and_values_of_recipes_end_in_one_line(image_tree, monkeypatch, capsys):
    monkeypatch.chdir(image_tree.parent)
    flags, statuses = {}, []
    for name, main in COMMAND_LINES.items():
        with contextlib.suppress(SystemExit):
            main(["--help"])
        flags[name] = sorted({*re.findall(r"--[a-z-]+", capsys.readouterr().out)} - {"--help"})
    for number in range(4 * COUNT):
        random = Random(f"arguments {number}")
        name, words = "train.py", []
        if number % 2:
            name = random.choice([*flags])
            for _ in range(random.randrange(6)):
                words += [random.choice([*flags[name], "--x"])] * random.randrange(2)
                words.append(random.choice(WORDS))
        else:
            words = changed_recipe(random)
        try:
            statuses.append(COMMAND_LINES[name](words))
        except BaseException as error:
            raise AssertionError(number, name, words) from error
        said = capsys.readouterr().err
        assert (
            (statuses[-1], said) == (0, "")
            or statuses[-1] == 2
            and (said.startswith(f"{name}: ") and said[:-1].isprintable())
        ), (number, name, words, said)
    assert min(statuses.count(0), statuses.count(2)) > 5


@pytest.mark.parametrize(
    "parse, text",
    [
        (parse_json, b"9" * 400),
        (parse_toml, b"a=" + b"9" * 400),
        (parse_toml, b"a=0x" + b"f" * 400),
        (parse_json, b"[" * 10**5),
        (parse_json, b"[" * 66 + b"]" * 66),
        (parse_toml, b"a=" + b"[" * 10**4),
        (parse_toml, b"a." * 2000 + b"b=1"),
        (parse_toml, b"a.b." * 99 + b"c=1"),
        (parse_json, b" " * 2**24 + b"1"),
        (parse_toml, b" " * 2**16 + b"\na=1"),
    ],
)
def test_a_text_beyond_the_limits_is_refused(parse, text):
    with pytest.raises(ValueError, match="^it has over |^it is nested over 64 deep$"):
        parse(text)
