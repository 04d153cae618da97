"""The measurements run and count what they claim to; how fast anything is, is not tested."""

import gc
import multiprocessing
import platform
import re
import shutil
import subprocess
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torchvision
from launches import launches_of
from torch._subclasses.fake_tensor import FakeTensorMode

from vitinit.data.images import decode_image
from vitinit.programs.bench import (
    all as everything,
    loader,
    plan as plan_module,
    program as bench,
    step,
    training,
    variants,
)
from vitinit.programs.bench.step import saved_bytes
from vitinit.programs.bench.training import interleave, times_as_fast
from vitinit.programs.bench.variants import MASKED, Variant
from vitinit.programs.shared import steps as shared_steps
from vitinit.programs.shared.plan import Plan, Rates, plan_run
from vitinit.programs.shared.steps import measured_recipe
from vitinit.runs.model import build
from vitinit.train.metrics import training_flops

TINY = [
    word
    for change in (
        "data.image_size=32",
        "engine.amp=off",
        "engine.compile=false",
        "data.num_classes=3",
        "model.options.patch_size=8",
        "model.options.embed_dim=24",
        "model.options.depth=2",
        "model.options.num_heads=3",
    )
    for word in ("--set", change)
]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Restore torch's number of threads, which measurements on a CPU set to 1; few rounds."""
    monkeypatch.setattr(training, "ROUNDS", 2)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tables(capsys, *arguments: object) -> list[list[dict[str, str]]]:
    """Run bench; the rows of each table that it prints, without lines that are none."""
    assert bench.main(list(map(str, arguments))) == 0
    found = []
    for text in filter(re.compile(r"\s*\|").match, capsys.readouterr().out.split("\n\n")[1:]):
        head, _, *rows = [
            [part.strip() for part in line.strip("|").split(" | ")]
            for line in text.strip().splitlines()
        ]
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def test_actions_are_timed_in_turn_and_the_first_round_does_not_count(monkeypatch):
    monkeypatch.setattr(training, "ROUNDS", 3)
    now, order = [0.0], []

    def action(name: str, seconds: float):
        def act() -> None:
            order.append(name)
            now[0] += seconds * len(order)

        return act

    found = interleave({"a": action("a", 1.0), "b": action("b", 10.0)}, lambda: now[0])
    assert "".join(order) == "baabbaab"  # in every second round the other way round
    assert found == {"a": [3.0, 6.0, 7.0], "b": [40.0, 50.0, 80.0]}
    assert times_as_fast(found["a"], found["b"]) == "11.4 (8.33 to 13.3)"


@pytest.mark.parametrize("amp, wide", [("off", 4), ("bf16", 2)])
def test_saved_bytes_are_those_that_each_layer_needs_for_the_backward_pass(amp, wide):
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(3 * 5 * 7, 11), torch.nn.GELU(), torch.nn.Linear(11, 13)
    )
    model.drop_path_rates = ()
    # The inputs of both products and of GELU; log-softmax and targets, which stay in float32.
    expected = wide * (105 + 11 + 11) + 4 * (13 + 13)
    copy = 2 * 11 * 13 if amp == "bf16" else 0  # bf16 copy of the second weight only
    for count in (2, 3):
        assert saved_bytes(model, torch.zeros(count, 3, 5, 7), amp) == count * expected + copy


def test_memory_says_how_many_images_of_a_recipe_fit(capsys, monkeypatch):
    """Of 1 GiB all 50; .16 GiB leaves 73 MiB, less than 50 images need, and 10 divides 50 next."""
    monkeypatch.setattr(shared_steps, "automatic_values", None)  # that of another machine
    off = "--set", "engine.amp=off"
    for gib, fit in ((1, "50"), (0.16, "10")):
        ((row,),) = tables(capsys, "memory", "--recipe", "quickstart", "--card-gib", gib, *off)
        assert row["MiB per image"] == "1.54" and row["global batch"] == "50"
        assert row[f"images that fit in half of {gib} GiB"] == fit
    muon = tables(capsys, "memory", "--recipe", "quickstart", *off, "--set", "optim.name=muon")[0][
        0
    ]
    state = "GiB of weights and optimiser"  # of a matrix Muon has one moment, AdamW two
    assert 0.75 < float(muon[state]) / float(row[state]) < 1
    for amp in ("auto", "bf16", "fp16"):  # neither saves the matrices of attention
        ((row,),) = tables(capsys, "memory", "--recipe", "quickstart", "--set", f"engine.amp={amp}")
        assert row["MiB per image"] == "0.881"
    assert bench.main(["memory", "--recipe", "no-such-recipe"]) == 2


def test_what_reconstructs_images_is_measured_as_that(capsys):
    """A decoder of four values saves less than half of what the encoder does with all tokens."""
    sets = (
        "--set",
        "task.options.decoder_dim=4",
        "--set",
        "task.options.decoder_heads=1",
        "--set",
        "engine.amp=off",
    )
    both = tables(capsys, "memory", "--recipe", "own_images", "cifar10_10k", *sets[-2:])[0]
    (small,) = tables(capsys, "memory", "--recipe", "own_images", *sets)[0]
    masked, encoder = (float(row["MiB per image"]) for row in both)
    assert encoder / 4 < float(small["MiB per image"]) < masked < encoder / 2
    ((row,),) = tables(capsys, "step", "--recipe", "own_images", "--batch", 2, *sets)
    assert row["beside a bare loop over"] == "its encoder, learning classes"


def test_operations_except_views_are_counted_and_copies_by_their_direction():
    with FakeTensorMode():
        host = torch.zeros(3, 5)

        def action() -> None:
            there = host.to("cuda:0").view(5, 3)[1:].t()  # one copy, three views
            there += 1
            there.copy_(torch.ones(3, 4))  # a constant and a copy
            (there * 2).cpu()

        launches = launches_of(action)
    assert launches.by_name == {
        "aten::_to_copy": 2,
        "aten::add_.Tensor": 1,
        "aten::copy_": 1,
        "aten::ones": 1,
        "aten::mul.Tensor": 1,
    }
    assert (launches.count, launches.uploads, launches.downloads) == (6, 2, 1)
    with FakeTensorMode():
        host, there = torch.zeros(3, 5), torch.zeros(3, 5, device="cuda:0")

        def uploads() -> None:
            for waits in (False, True):
                host.to("cuda:0", non_blocking=not waits)
                there.copy_(host, non_blocking=not waits)

        launches = launches_of(uploads)
    assert (launches.uploads, launches.waits) == (4, 2)


def test_a_step_is_measured(capsys, monkeypatch):
    """Beside a bare loop over torchvision's model of the same sizes."""
    sizes, theirs = [], torchvision.models.VisionTransformer
    monkeypatch.setattr(
        torchvision.models,
        "VisionTransformer",
        lambda **given: (sizes.append(given), theirs(**given))[1],
    )
    monkeypatch.setattr(
        step,
        "interleave",
        lambda loops, clock: {
            name: (loop(), [dict(engine=0.5, bare=0.75, few=0.3, product=3.0)[name]])[1]
            for name, loop in loops.items()
        },
    )
    ((row,),) = tables(capsys, "step", "--recipe", "deit_tiny", "--batch", 16, *TINY)
    assert [row[key] for key in ("images/s", "ms", "× as fast", "% not for images")] == [
        "32",
        "500",
        "1.5 (1.5 to 1.5)",
        "54.3",
    ]  # .3 = a + 2 b and .5 = a + 16 b: a is .271
    assert row["way"] == "amp off, eager"
    assert row["beside a bare loop over"] == "torchvision's VisionTransformer"
    assert sizes[0]["num_layers"] == 2
    flops = 16 * training_flops(build(measured_recipe("deit_tiny", TINY[1::2])), 16, (32, 32)) / 0.5
    for rate, share in ((0.25, 100 * flops / 0.25e12), (None, None)):  # TFLOP/s of the card
        monkeypatch.setattr(step, "matrix_rate", lambda device: rate)
        row = step.step_row(measured_recipe("deit_tiny", TINY[1::2]), torch.device("cpu"), 16)
        assert row["% of the card's rate"] == (share and pytest.approx(share))
        assert row["TFLOP/s"] == pytest.approx(flops / 1e12)
        # Ten products of matrices of 1024 × 1024 in three seconds.
        assert row["% of large products"] == pytest.approx(100 * flops / (20 * 1024**3 / 3))


def test_a_batch_that_does_not_fit_is_halved_once_what_it_took_is_free(monkeypatch):
    tried, recipe, left = [], measured_recipe("quickstart"), []

    def measure(recipe: object, device: torch.device, batch: int) -> dict:
        assert not any(reference() for reference in left)
        tried.append(batch)
        if batch > 3:
            model = torch.nn.Linear(3, 5)
            model.own = model.weight.register_hook(model.forward)  # a cycle, as of a training
            left.append(weakref.ref(model))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"batch": batch}

    monkeypatch.setattr(step, "measure", measure)
    gc.disable()
    try:
        row = step.step_row(recipe, torch.device("cpu"), 13)
    finally:
        gc.enable()
    assert row == {"batch": 3} and tried == [13, 6, 3] and len(left) == 2


def test_the_loader_is_measured_beside_torchvisions_pipeline_and_feeding_a_step(
    capsys, image_tree, monkeypatch
):
    monkeypatch.setattr(
        loader,
        "interleave",
        lambda parts, clock: {
            name: (part(), [seconds])[1]
            for seconds, (name, part) in zip((1, 2, 4, 5), parts.items())
        },
    )
    parts, fed = tables(
        capsys,
        "loader",
        "--recipe",
        "deit_tiny",
        "--batch",
        2,
        "--workers",
        0,
        1,
        "--data-dir",
        image_tree,
        *TINY,
    )
    assert [row["views/s"] for row in parts] == ["50", "25", "12.5", "10"]
    assert [row["% of the whole"] for row in parts] == ["25", "50", "100", "125"]
    assert parts[2]["× as fast as torchvision's"] == "1.25 (1.25 to 1.25)"
    assert [row["workers"] for row in fed] == ["0", "1"]


def test_photographs_are_drawn_unless_a_folder_is_given_an_empty_one_is_one_line(capsys, tmp_path):
    sets = loader.image_folder(tmp_path / "data", None, 60)
    links = sorted((tmp_path / "data" / "train").rglob("*.jpg"))
    assert len(links) == 60 and len({link.resolve() for link in links}) == 50
    assert decode_image(str(links[0])).shape == (3, 375, 500)
    data = measured_recipe("cifar10_10k", sets).data  # which takes 1,000 images of each class
    assert data.name == "image_folder" and data.images_per_class == 0
    (tmp_path / "empty").mkdir()
    assert bench.main(["loader", "--data-dir", str(tmp_path / "empty")]) == 2
    assert capsys.readouterr().err == f"vitinit bench: {tmp_path}/empty: no images in it\n"


CHECKS = """import pytest, time
def test_right(record_property): record_property('apart', 0.5)
def test_wrong(): assert 3 == 5, 'three is not\\nfive'
def test_other(): pytest.skip('no such thing here')
@pytest.fixture
def gpu(): raise RuntimeError('CUDA error: lost')
def test_lost(gpu): pass
def test_hangs(): time.sleep(600)
@pytest.mark.parametrize('number', ['a b', 'c'])
def test_after(number): pass
"""


def test_what_hangs_crashes_or_fails_leaves_a_report(monkeypatch, tmp_path, capsys, repository):
    """On the terminal and in a file, of every check and every command. Each comes to its end. A
    process that outlived its command would hold the GPU that the next one needs."""
    checks, left = tmp_path / "checks", tmp_path / "left"
    checks.mkdir()
    (checks / "test_it.py").write_text(CHECKS)
    shutil.copy(repository / "tests" / "outcomes.py", checks / "conftest.py")
    sleeps = (
        f"import subprocess; print('soon'); subprocess.run('sleep 0.7; touch {left}', shell=True)"
    )
    now, within, given = [0.0], everything.run_within, []

    def run(words: list[str], seconds: float, *more: object) -> tuple[int | None, str]:
        given.append(seconds)
        now[0] += seconds if sleeps in words else 309.0 if "1/0" in words else 1.0
        return within(words, 0.5 if sleeps in words else 60.0, *more)

    class Started(subprocess.Popen):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    started: list[Started] = []
    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(everything, "run_within", run)
    monkeypatch.setattr(everything, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(everything, "BENCH", ["-m", "platform"])
    monkeypatch.setattr(
        everything, "CHECKS", [*everything.CHECKS[:-1], "-o", "faulthandler_timeout=1", str(checks)]
    )
    monkeypatch.setattr(
        everything,
        "speeds",
        lambda device, data: [
            (["-c", "import os; os.kill(os.getpid(), 11)"], "100 %"),
            (["-c", sleeps], ""),
            (["-c", "1/0"], ""),
            *[(["-c", sleeps], "")] * 2,
        ],
    )
    out = tmp_path / "new" / "report.md"
    assert bench.main(["all", "--minutes", "8", "--out", str(out), "--device", "cpu"]) == 1
    text = out.read_text()
    assert capsys.readouterr().out == text and not left.exists()
    assert len(started) == len(given) and all(one.returncode is not None for one in started)
    title, first = "# What vitinit does on this machine\n\n", "## `python -m platform machine --dev"
    assert text.startswith(title + first)
    for words in (
        platform.platform(),
        "test_right",
        "test_it.py PASSED in 0.0 s, apart 0.5 ",
        "FAILED, AssertionError: three is not five assert 3 == 5 ",
        "SKIPPED",
        "FAILED, RuntimeError: CUDA error: lost ",
        "Timeout (0:00:01)!\nThread",
        'test_it.py", line 8 in test_hangs\n',
        "test_after[a b]",
        "2 passed, 5 deselected",
        "exit status -11",
        "Looked for on an H100: 100 %",
        "ZeroDivisionError",
        "exit status 1",
        "soon\n```\n\n**Ended** after 160 s, all that it has.",
    ):
        assert words in text, words
    # The machine, three times pytest, which the clock takes for a second each, and the commands.
    assert given == [160, 240, 239, 238, 160, 160, 160, 6]
    assert text.count("## ") == 9 and text.endswith("Not begun: the time is over.\n")
    assert bench.main(["all", "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_commands_of_the_report_are_commands(capsys):
    assert bench.main(["machine", "--device", "cpu"]) == 0
    assert f"torch {torch.__version__}" in capsys.readouterr().out
    for device in ("cpu", "cuda"):
        for words, _ in everything.speeds(device, ["--data-dir", "photographs"]):
            if words[:3] == ["-m", "vitinit", "bench"]:
                args = bench.parse_arguments(words[3:])
                names = getattr(args, "recipe", [])
                for name in [names] if isinstance(names, str) else names:
                    measured_recipe(name, getattr(args, "set", []))


def test_the_machine_says_on_which_file_system_images_are(tmp_path, monkeypatch, capsys):
    """The innermost that is mounted, and the last at one place; not one whose name begins alike."""
    photos = tmp_path / "photos"
    photos.mkdir()
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(everything, "MOUNTS", mounts)
    for lines, kind in (
        ([("/", "ext4"), (photos, "autofs"), (photos, "nfs4"), (tmp_path, "xfs")], "nfs4"),
        ([("/", "ext4"), (tmp_path / "pho", "nfs4")], "ext4"),
        ([], "unknown"),
    ):
        mounts.write_text("".join(f"source {place} {kind} rw 0 0\n" for place, kind in lines))
        assert bench.main(["machine", "--device", "cpu", "--data-dir", str(photos)]) == 0
        assert f", data {photos} on {kind}, " in capsys.readouterr().out


def test_variants_are_measured_in_turn_and_one_that_fails_says_why():
    """What a process does, in threads: it answers that it is ready, then each turn, then ends."""
    tiny = tuple(TINY[1::2])
    given = [
        Variant("deit_tiny", 2, 1.0, tiny),
        Variant("deit_tiny", 2, 1.0, (*tiny, *MASKED)),
        Variant("?", 2, 1.0),
    ]
    for variant in given:
        ours, theirs = multiprocessing.Pipe()
        arguments = theirs, variant, torch.device("cpu"), []
        threading.Thread(target=variants.serve, args=arguments, daemon=True).start()
        fact = variants.answer(ours, 60.0)
        row = variants.row_of(variant, fact, [])
        if variant.recipe == "?":
            assert row["failed"].startswith("RecipeError: recipe ?: no such file")
            continue
        assert row["failed"] is None and variants.answer(ours, 0.0) == {
            "failed": "not ready in time"
        }
        ours.send("turn")
        (second,) = variants.answer(ours, 60.0)["seconds"]
        row = variants.row_of(variant, fact | {"card": 2.0}, [second, 9.0, second])
        assert row["images/s"] == 2 / second
        assert row["% of the card's rate"] == 100 * row["images/s"] * fact["flops"] / 2e12
        ours.close()
    left, right = multiprocessing.Pipe()
    right.close()
    assert variants.answer(left, 1.0) == {"failed": "its process ended"}
    recipes = [measured_recipe(one.recipe, one.sets) for one in variants.VARIANTS]
    assert len(recipes) == len(set(variants.VARIANTS))


def test_as_many_variants_are_compiled_at_once_as_fit(monkeypatch):
    card = SimpleNamespace(total_memory=50 * 2**30)  # of which 45 GiB are taken
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    given = [Variant("?", 2, gib) for gib in (11.0, 23.0, 11.0, 7.0, 47.0, 2.0)]
    found = variants.waves(given, torch.device("cuda"))
    assert [[one.gib for one in wave] for wave in found] == [[11, 23, 11], [7], [47], [2]]
    assert variants.waves(given, torch.device("cpu")) == [given]


def test_rows_become_a_table():
    rows = [{"a": 1234567, "b": 0.001234, "d": None}, {"a": 2, "c": "x|y"}]
    assert training.row_table(rows).splitlines() == [
        "| a | b | c |",
        "| --- | ---: | ---: |",
        "| 1,234,567 | 0.00123 | – |",
        "| 2 | – | x\\|y |",
    ]
    assert [training.cell(value) for value in (None, 3, 0.5, 1234.5, float("inf"))] == [
        "–",
        "3",
        "0.5",
        "1,234",
        "inf",
    ]


def test_a_plan_is_the_slower_of_gpus_and_cores_and_a_validation_is_a_forward_pass():
    recipe = measured_recipe("imagenet_vit_small_90")
    rates = Rates(step=700.0, core=100.0, prepare=300.0)  # together 210 images/s

    def planned(**changes: int) -> Plan:
        sizes = dict(images=63_000, validation=2_100, gpus=1, cores=3) | changes
        return plan_run(recipe, rates, **sizes)

    plan = planned()
    assert plan.of_gpus == plan.rate == pytest.approx(210) and plan.cores_needed == 3
    assert plan.epoch_seconds == pytest.approx(63_000 / 210 + 2_100 / 3 / 700)
    assert plan.hours == pytest.approx(90 * 301 / 3600) and plan.bound == "the GPU"
    assert plan.jobs(2.0, 0.0) == 4 and plan.jobs(1.0, 1800.0) == 16
    assert planned(cores=2).rate == 200 and planned(cores=2).bound == "loading"
    assert planned(gpus=2, cores=6).hours == pytest.approx(plan.hours / 2)
    changes = plan_module.changes_of(planned(cores=1))
    assert [round(change.rate) for change in changes.values()] == [100, 210, 700, 200]
    rarely = replace(recipe, eval=replace(recipe.eval, every_epochs=40))  # after 40, 80 and 90
    assert plan_run(rarely, rates, images=7, validation=60, gpus=1, cores=1).validation == 2
    average = replace(recipe, ema=replace(recipe.ema, decay=0.9))
    assert plan_run(average, rates, images=7, validation=7, gpus=1, cores=1).weights == 2


def test_loading_and_preparing_are_timed_each_by_itself(capsys, monkeypatch):
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    def steps(recipe: object, device: object) -> Iterator:
        while True:
            wait(0.25)
            yield 0, [SimpleNamespace(prepare=lambda: wait(0.125))]

    monkeypatch.setattr(plan_module, "steps_of", steps)
    monkeypatch.setattr(plan_module, "clock_of", lambda device: lambda: now[0])
    command = ["plan", "--recipe", "deit_tiny", *TINY, "--device", "cpu", "--step-rate", "7"]
    command += ["--batch", "8"]
    assert bench.main(command) == 0
    assert "prepares 64/s, a core loads 32/s" in capsys.readouterr().out
    for wrong, expected in {
        ("--set", "data.decode=cuda"): "; expected --core-rate and --prepare-rate",
        ("--start-seconds", "86400"): ": expected less than --limit-hours 24",
    }.items():
        assert bench.main([*command, *wrong]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert expected in line


def test_memory_with_recomputed_blocks_is_their_inputs_and_one_of_them():
    """Beside what is saved outside of the blocks; they are alike, so that one is half of two."""

    def of_image(depth: int, recompute: str) -> float:
        sets = [*TINY[1::2], f"model.options.depth={depth}", f"engine.recompute={recompute}"]
        return step.memory_row(measured_recipe("deit_tiny", sets), 24.0)["MiB per image"] * 2**20

    one, two = (of_image(depth, "false") for depth in (1, 2))
    tokens = 17 * 24 * 4  # the input of a block, in float32: 16 patches and a class token
    beside = one - (two - one)  # what is saved without blocks
    expected = beside + 2 * tokens + (two - beside - 2 * tokens) / 2
    assert of_image(2, "true") == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("optimiser", ["adamw", "muon", "lamb"])
def test_the_disk_of_a_plan_is_what_checkpoints_hold(optimiser):
    sets = [*TINY[1::2], f"optim.name={optimiser}", "ema.decay=0.9", "model.options.depth=11"]
    recipe = measured_recipe("deit_tiny", sets)
    state, _ = shared_steps.set_up(recipe, torch.device("cpu"))
    part = step.synthetic_batch(recipe, 2, torch.device("cpu"))
    shared_steps.train_on(state, [shared_steps.given_step(0, [part])])

    def held(value: object) -> int:
        if isinstance(value, torch.Tensor):
            return value.nbytes
        return sum(map(held, value.values())) if isinstance(value, dict) else 0

    # last.pt and previous.pt; best.pt has no moments.
    expected = 2 * held(state.state_dict()) + held(state.weights())
    assert plan_module.disk_gib(recipe) == pytest.approx(expected / 2**30, rel=0.03)
