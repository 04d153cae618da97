"""Fixtures that several test files share: the programs as modules, small image folders and runs."""

import builtins
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

# One thread per process, also in those that tests start, unless the caller has set it: tensors here
# are tiny, and threads that spin while they wait slow down everything that runs beside them. torch
# reads the variable when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from equality import HeldAgainst, require_recorded
from PIL import Image

from vitinit.data import shapes
from vitinit.data.images import heif_formats
from vitinit.programs import evaluate, train
from vitinit.programs.shared.records import METRICS
from vitinit.recipe.files import load_recipe, overrides
from vitinit.train.device import keep_freed_memory
from vitinit.train.interruption import STOP_SIGNALS, StopRequest

REPOSITORY = Path(__file__).resolve().parent.parent
keep_freed_memory()  # as programs do: it saves time


@pytest.fixture(autouse=True, scope="session")
def signals_are_heard() -> None:
    """Restore the handlers of signals, of which a background shell may have set some to ignore."""
    for number in STOP_SIGNALS:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )


@pytest.fixture(autouse=True, scope="session")
def shapes_are_few_and_drawn_once() -> None:
    """The first of the embedded images, as drawing all 6,000 takes seconds, for all tests."""
    shapes.SIZES_OF_SPLITS = {"train": 503, "val": 211}
    shapes.label_of = cache(shapes.label_of)


@pytest.fixture
def held_against() -> HeldAgainst:
    """Is called with what our code gave, and what its reference gave: see equality.py."""
    return HeldAgainst()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """After a test that held something against a reference, and passed, its numbers are recorded
    as a property, and compared with those that were written down."""
    result = yield
    if held := pyfuncitem.funcargs.get("held_against"):
        pyfuncitem.user_properties.append(("held_against", (held.cases, held.bound)))
        require_recorded(pyfuncitem.nodeid.removeprefix("tests/"), held)
    return result


@pytest.fixture
def repository() -> Path:
    return REPOSITORY


@pytest.fixture
def train_program() -> ModuleType:
    return train


class StopBefore(StopRequest):
    """A stand-in for StopRequest: SIGTERM has come when the run looks for time `at`, from 0. A run
    looks once before each step and at the end of the steps of an epoch, and likewise for the
    batches of an evaluation."""

    def __init__(self, at: int) -> None:
        self.at, self.looks = at, 0

    def __call__(self) -> "StopBefore":
        return self

    def __enter__(self) -> "StopBefore":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def number(self) -> int:
        self.looks += 1
        return signal.SIGTERM if self.looks > self.at else 0


@pytest.fixture
def stop_before() -> type[StopBefore]:
    return StopBefore


@pytest.fixture
def eval_program() -> ModuleType:
    return evaluate


@pytest.fixture
def without_matplotlib(monkeypatch) -> None:
    """Makes importing matplotlib fail, as if the extra `figures` were not installed."""
    real = builtins.__import__

    def without(name, *arguments, **keywords):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)


@pytest.fixture
def without_heif(monkeypatch) -> Iterator[None]:
    """As where pillow-heif is not installed."""
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    heif_formats.cache_clear()
    yield
    heif_formats.cache_clear()


@pytest.fixture(scope="session")
def drawn_tree(tmp_path_factory) -> Callable[[tuple[int, int]], Path]:
    """Height and width → the folder that `image_tree` is a copy of."""

    @cache
    def draw(size: tuple[int, int]) -> Path:
        rng, root = np.random.default_rng(0), tmp_path_factory.mktemp("drawn")
        for split, count in (("train", 17), ("val", 7)):
            for channel, name in enumerate(("red", "green", "blue")):
                folder = root / split / name
                folder.mkdir(parents=True)
                for index in range(count):
                    pixels = rng.integers(0, 160, (*size, 3))
                    pixels[..., channel] += 40
                    Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index:02}.png")
        return root

    return draw


@pytest.fixture
def image_tree(drawn_tree, tmp_path_factory, request) -> Path:
    """train/ and val/: three classes of 17 and 7 noisy PNGs that differ in hue. They have 10×14
    pixels, or as an indirect parameter says. The folder is new in every test, and always in the
    same place, so that runs on it are the same."""
    place = tmp_path_factory.getbasetemp() / "place_of_images"
    shutil.rmtree(place, ignore_errors=True)
    return shutil.copytree(drawn_tree(getattr(request, "param", (10, 14))), place / "images")


@pytest.fixture
def small_run(image_tree: Path) -> Callable[..., list[str]]:
    """Arguments of train.py for a run of a few seconds on `image_tree`: 3 epochs of 4 steps.
    Everything that could go wrong on resume is on: every augmentation, two views per image,
    accumulation over three micro-batches, EMA with warm-up, clipping, stochastic depth, weights
    that Muon trains beside those of AdamW. Mixing has three groups of four images per step. eps is
    large for the reason given in train/test_loop.py."""
    sets = {
        "data.name": "image_folder",
        "data.num_classes": "3",
        "data.image_size": "8",
        "eval.batch_size": "4",
        "optim.global_batch": "12",
        "optim.max_batch_per_process": "4",
        "optim.base_lr": "1e-3",
        "optim.eps": "1e-4",
        "optim.clip_norm": "1.0",
        "optim.name": "muon",
        "optim.layer_decay": "0.7",
        "ema.decay": "0.99",
        "ema.warmup": "true",
        "schedule.epochs": "3",
        "model.options.embed_dim": "12",
        "model.options.depth": "2",
        "model.options.num_heads": "3",
        "model.options.drop_path": "0.3",
        "augment.repeats": "2",
        "augment.crop_scale": "[0.3, 1.0]",
        "augment.crop_ratio": "[0.75, 1.25]",
        "augment.crop_padding": "0",
        "augment.interpolation": "random",
        "augment.erase_probability": "0.5",
        "rand_augment.layers": "2",
        "rand_augment.interpolation": "random",
        "three_augment.probability": "0.7",
        "three_augment.color_jitter": "0.3",
        "mix.group": "4",
        "mix.mixup_alpha": "0.8",
        "mix.cutmix_alpha": "1.0",
        "mix.label_smoothing": "0.1",
        "engine.amp": "off",
        "optim.muon_dtype": "float32",
    }

    def arguments(out_dir: Path, *more: str, init: str = "mimetic", **changes: str) -> list[str]:
        values = sets | {key.replace("__", "."): value for key, value in changes.items()}
        return [
            "--recipe",
            "quickstart",
            "--init",
            init,
            "--data-dir",
            str(image_tree),
            "--out-dir",
            str(out_dir),
            *(word for key, value in values.items() for word in ("--set", f"{key}={value}")),
            *more,
        ]

    return arguments


@pytest.fixture(scope="session")
def runs_made(tmp_path_factory) -> Callable[[tuple], Path]:
    """The folder of the run of this key."""

    @cache
    def folder(key: tuple) -> Path:
        return tmp_path_factory.mktemp("straight") / "run"

    return folder


@pytest.fixture
def straight(train_program, small_run, runs_made) -> Callable[..., Path]:
    """The folder of a finished `small_run` that was never stopped. Each is made once a session: a
    test that writes to it copies it."""

    def run(**changes: str) -> Path:
        folder = runs_made(tuple(sorted(changes.items())))
        if not folder.exists():
            assert train_program.main(small_run(folder, **changes)) == 0
        return folder

    return run


@pytest.fixture
def written_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes the small files of a run that did not take place, with a line of metrics per top-1.
    epochs: the number of epochs in the recipe, by default the number of lines.
    start: further entries of run.json."""

    def write(
        name: str,
        tops: list[float | None],
        *,
        emas: list[float | None] | None = None,
        epochs: int | None = None,
        seed: int = 0,
        init: str = "default",
        recipe: str = "quickstart",
        seconds: float | None = 3.0,
        start: dict | None = None,
        sets: tuple[str, ...] = (),
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        resolved = load_recipe(
            REPOSITORY / "recipes" / "quickstart.toml",
            overrides(
                init=init,
                seed=seed,
                sets=[f"schedule.epochs={epochs or len(tops)}", "engine.amp=off", *sets],
            ),
        )
        (folder / "recipe.toml").write_text(resolved.as_toml(), encoding="utf-8")
        (folder / "run.json").write_text(
            json.dumps(
                [
                    {
                        "command": ["train.py", "--recipe", recipe],
                        "git_commit": "c0ffee",
                        "torch": "2.7",
                        "python": "3.11",
                        "device": "CPU",
                        "processes": 1,
                    }
                    | (start or {})
                ]
            )
        )
        rows = [
            dict.fromkeys(METRICS)
            | {"epoch": epoch, "val_top1": top, "ema_top1": ema, "seconds": seconds}
            for epoch, (top, ema) in enumerate(zip(tops, emas or [None] * len(tops)), 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return write
