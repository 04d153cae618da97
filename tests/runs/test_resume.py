"""Which run train.py resumes: from its last checkpoint, after any interruption, as it began."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from forks import in_two_processes
from same_run import TIMES, assert_same_run, checkpoint, family_run, rows_of

import vitinit.run
from vitinit.data.folders import since_left_out
from vitinit.programs import train
from vitinit.programs.figures.subjects import of_runs
from vitinit.programs.shared.records import read_run
from vitinit.recipe.files import RecipeError, load_recipe, overrides
from vitinit.runs import resume as choosing
from vitinit.runs.folder import RunFolder
from vitinit.runs.model import build
from vitinit.runs.resume import require_same_data, resumed_run
from vitinit.runs.start import shifts_of
from vitinit.train.distributed import Processes

STORED = Path(__file__).parent / "data"  # runs of earlier commits
ONE_EPOCH = dict(schedule__epochs="1")
ALONE = Processes(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


@pytest.fixture
def stopped(train_program, small_run, tmp_path, monkeypatch, capsys, stop_before):
    """A run stopped after its third step, and the command line that began it."""

    def run(*more: str, **changes: str) -> tuple[Path, list[str]]:
        folder = tmp_path / "run"
        arguments = small_run(folder, "--resume", "auto", *more, **changes)
        with monkeypatch.context() as patch:
            patch.setattr("vitinit.run.StopRequest", stop_before(3))
            assert train_program.main(arguments) == 128 + signal.SIGTERM
        capsys.readouterr()
        return folder, arguments

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "run.lock"}


@pytest.fixture
def refused(train_program, capsys):
    """Checks that train.py ends with one line with these words, and leaves a folder as it is."""

    def check(folder: Path, arguments: list[str], words: str) -> str:
        """Returns what was printed before."""
        before = contents(folder)
        assert train_program.main(arguments) == 2
        out, error = capsys.readouterr()
        assert words in error and error.count("\n") == 1 and contents(folder) == before
        return out

    return check


def assert_ends_as_recorded(folder: Path, newer: Collection[str] = ()) -> None:
    """The rows of a run that went on are those of finished.jsonl, which the commit that stopped it
    wrote as it went on itself.

    They are equal to the bit on the machine that wrote them. Another rounds otherwise, so that an
    image may be taken for another class there. newer: keys that rows had not at that commit.
    """
    for row, expected in zip(rows_of(folder), rows_of(folder, "finished"), strict=True):
        assert row.keys() - set(newer) == expected.keys()
        for key in expected.keys() - set(TIMES):
            is_share = key.endswith(("top1", "balanced"))  # in percent, of 21 images
            near = dict(abs=100 / 21) if is_share else dict(rel=1e-5)
            assert row[key] == expected[key] or row[key] == pytest.approx(expected[key], **near)


def test_a_run_that_an_earlier_commit_stopped_ends_as_it_would_have_ended(
    train_program, tmp_path, image_tree
):
    """Commit 88e7f50 stopped it after step 8, and then went on to the rows of finished.jsonl."""
    folder = tmp_path / "run"
    shutil.copytree(STORED / "stopped_at_88e7f50", folder)
    assert train_program.main(["--resume", str(folder), "--data-dir", str(image_tree)]) == 0
    assert_ends_as_recorded(folder, newer=["val_balanced", "cpu_seconds"])


def norms_of(folder: Path) -> dict[str, float]:
    """The norm of every tensor of weights in last.pt, and of their moving average."""
    saved = checkpoint(folder)
    average = saved["ema"]["model"] if saved["ema"] else {}
    tensors = saved["model"] | {f"ema.{key}": value for key, value in average.items()}
    return {key: value.double().norm().item() for key, value in tensors.items()}


def gone_on(arguments: list[str]) -> int:
    return train.main(arguments)


@pytest.mark.parametrize(
    "name", ["muon", "adamw_and_mixing", "masked_autoencoder", "distilled", "two_processes"]
)
def test_runs_of_several_kinds_that_an_earlier_commit_stopped_end_as_they_would_have_ended(
    name, train_program, tmp_path, image_tree
):
    """Commit f0be52c stopped each in its second epoch, and then went on to the rows of
    finished.jsonl, and to weights whose norms are in norms.json."""
    folder = tmp_path / "run"
    shutil.copytree(STORED / "stopped_at_f0be52c" / name, folder)
    arguments = ["--resume", str(folder), "--data-dir", str(image_tree)]
    if name == "distilled":
        arguments += ["--set", f"distill.teacher={STORED / 'version_12'}"]
    if name == "two_processes":
        for ended in in_two_processes(gone_on, tmp_path / "forks", arguments):
            assert ended.result == 0, ended.err
    else:
        assert train_program.main(arguments) == 0
    assert_ends_as_recorded(folder)
    assert norms_of(folder) == pytest.approx(
        json.loads((folder / "norms.json").read_text()), rel=1e-5, abs=1e-6
    )


def test_micro_batches_hold_the_pairs_that_they_held_as_the_run_began(
    train_program, small_run, tmp_path, image_tree, monkeypatch, stop_before
):
    """Strided ones with BatchNorm, and in runs of commits that had no others and several of them,
    which so go on to the bit; else neighbours."""
    old, new, convmixer = (tmp_path / name for name in ("old", "new", "convmixer"))
    shutil.copytree(STORED / "stopped_at_88e7f50", old)
    in_three, plans = ["--set", "optim.max_batch_per_process=4"], []

    def opened(*arguments, real=vitinit.run.open_data, **options):
        plans.append((data := real(*arguments, **options)).plan)
        return data

    monkeypatch.setattr("vitinit.run.open_data", opened)
    monkeypatch.setattr("vitinit.run.StopRequest", stop_before(1))
    go_on = ["--resume", str(old), "--data-dir", str(image_tree), *in_three]
    for arguments in (
        go_on,
        go_on,
        small_run(new),
        ["--resume", str(new)],
        [*family_run("cifar10_convmixer", image_tree, convmixer), "--dry-run"],
    ):
        train_program.main(arguments)
    assert [(plan.strided, plan.accumulation) for plan in plans] == [
        (True, 3),
        (True, 3),
        (False, 3),
        (False, 3),
        (True, 3),
    ]


def test_the_command_that_began_a_run_goes_on_with_it(train_program, stopped, refused, capsys):
    """Even if it sets a key twice, in another form, or by a table, or takes classes as they are."""
    sets = [
        "run.seed=2",
        "init.options={value_init='base'}",
        "optim.eps=2e-4",
        "init.options.qk_init=base",
        "data.image_size=12",
        "data.image_size=8",
        "optim.max_batch_per_process=2",
        "optim.max_batch_per_process=12",
    ]
    folder, arguments = stopped(
        "--seed",
        "1",
        *(word for text in sets for word in ("--set", text)),
        data__num_classes="0",
        **ONE_EPOCH,
    )
    refused(folder, [*arguments, "--set", "data.num_classes=5"], "data.num_classes = 3 and not 5")
    assert train_program.main(arguments) == 0
    assert "resumed at step 3" in capsys.readouterr().out


def test_a_run_that_begins_as_shifts_goes_on_as_such_and_then_by_attention(
    train_program, stopped, straight
):
    """Stopped in the first of two epochs of three; queries and keys have learned in the third."""
    changes = {
        "model__options__pool": "mean",
        "model__options__pos_embed": "rope",
        "model__options__rope_frequencies": "linear",
        "optim__weight_decay": "0.0",
        "checkpoint__keep_epochs": "[0, 2]",
        "schedule__shift_epochs": "2",
        "init": "impulse",
    }
    folder, arguments = stopped(**changes)
    assert train_program.main(arguments) == 0
    assert_same_run(folder, straight(**changes))
    first, second, last = (
        checkpoint(folder, name)["model"]["blocks.1.attn.qkv.weight"].split([24, 12])
        for name in ("epoch_0000.pt", "epoch_0002.pt", "last.pt")
    )
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])
    assert not torch.equal(second[0], last[0])


def test_attention_that_went_on_from_its_shifts_need_not_be_able_to_return():
    """The biases of a model that has no init choose no token, as those of a trained one may not."""
    options = {"pool": "mean", "pos_embed": "rope"}
    values = {f"model.options.{key}": value for key, value in options.items()}
    sets = overrides(sets=values | {"schedule.shift_epochs": 2})
    recipe = load_recipe("quickstart", sets)
    model = build(recipe)
    shifts_of(model, recipe, 2)(2)
    with pytest.raises(RecipeError, match="schedule.shift_epochs = 2: attention has a mass of"):
        shifts_of(model, recipe, 1)


def test_what_belongs_to_the_machine_may_change_and_stays_changed(
    train_program, stopped, capsys, image_tree
):
    folder, _ = stopped(**ONE_EPOCH)
    moved = image_tree.rename(image_tree.with_name("elsewhere"))
    sets = [
        "data.workers=1",
        "optim.max_batch_per_process=2",
        "eval.batch_size=5",
        "eval.cache_gib=0.5",
        "checkpoint.every_steps=1",
        "data.on_device_gib=0.25",
        "engine.compile=false",
    ]
    assert (
        train_program.main(
            [
                "--resume",
                str(folder),
                "--data-dir",
                str(moved),
                *(word for text in sets for word in ("--set", text)),
            ]
        )
        == 0
    )
    assert "12 = 1 process × 6 micro-batches × 2 images" in capsys.readouterr().out
    recipe = torch.load(folder / "last.pt")["recipe"]
    assert recipe["data"]["root"] == str(moved)
    for text in sets:
        key, _, value = text.partition("=")
        section, _, name = key.partition(".")
        assert str(recipe[section][name]).lower() == value


@pytest.fixture
def machine(monkeypatch):
    """Sets the precision that is fastest on this machine."""
    return lambda amp: monkeypatch.setattr("vitinit.train.device.fastest_amp", lambda device: amp)


@pytest.mark.parametrize("how", ["by the command", "by its folder"])
def test_the_precision_of_auto_is_that_of_the_first_machine(
    how, machine, train_program, stopped, straight, refused
):
    """To the bit; recipe.toml and checkpoints state it."""
    machine("bf16")
    folder, arguments = stopped(engine__amp="auto", optim__muon_dtype="auto", **ONE_EPOCH)
    keys = read_run(folder).keys
    assert keys["engine.amp"] == keys["optim.muon_dtype"] == "bf16"
    machine("off")
    if how == "by its folder":
        arguments = ["--resume", str(folder)]
        arguments += ["--set", "engine.amp=auto", "--set", "optim.muon_dtype=auto"]
    refused(folder, [*arguments, "--set", "engine.amp=off"], 'engine.amp = "bf16" and not "off"')
    assert train_program.main(arguments) == 0
    assert_same_run(folder, straight(engine__amp="bf16", optim__muon_dtype="bf16", **ONE_EPOCH))


@pytest.mark.parametrize("stated, taken", [("bf16", "bf16"), ("auto", "off"), ("[1]", "off")])
def test_a_run_that_is_started_again_takes_the_precision_that_its_recipe_states(
    stated, taken, machine, written_run, train_program
):
    """A person's copy of a recipe may state none."""
    machine("off")
    folder = written_run("run", [None])
    (folder / "metrics.jsonl").unlink()
    recipe = (folder / "recipe.toml").read_text()
    written = stated if stated == "[1]" else f'"{stated}"'
    (folder / "recipe.toml").write_text(recipe.replace('amp = "off"', f"amp = {written}"))
    request = vitinit.run.Run(
        "quickstart", out_dir=folder, resume="auto", overrides={"schedule.epochs": 1}
    ).request
    _, choice = choosing.choose_run(request, ALONE, choosing.RunLock())
    assert choice.recipe.engine.amp == taken


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_dry_run_in_a_used_folder_is_that_of_a_new_run_and_leaves_it_unlocked(
    resume, machine, written_run, train_program
):
    machine("bf16")
    folder = written_run("used", [1.0])  # whose precision is "off"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    run = vitinit.run.Run(
        "quickstart", out_dir=folder, resume=resume, overrides={"engine.amp": "auto"}
    )
    lock = choosing.RunLock()
    _, choice = choosing.choose_run(run.request, ALONE, lock, dry_run=True)
    assert choice.recipe.engine.amp == "bf16" and choice.saved is None and not lock.handles
    assert run.rehearse()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_what_belongs_to_the_experiment_may_not_change(stopped, refused, tmp_path):
    folder, arguments = stopped(init__options__value_init="base")
    for text, words in {
        "init.options.value_init=mimetic": 'init.options.value_init = "base" and not "mimetic"',
        "optim.global_batch=6": "optim.global_batch = 12 and not 6",
        "init.name=default": 'init.name = "mimetic" and not "default"',
    }.items():
        more = ["--set", "init.options={}"] if "default" in text else []  # which has none
        for resume in (["--resume", str(folder)], [*arguments, *more]):
            refused(
                folder,
                [*resume, "--set", text],
                f"{folder}: holds another run, with {words}; a run goes on as it began, and a "
                f"new one, in another --out-dir, starts from its weights with --set "
                f"init.checkpoint={folder}",
            )
    for more, words in [
        (
            ["--set", "init.options.value_int=base"],
            'with init.options.value_int = nothing and not "base"',
        ),
        (["--recipe", "deit_base"], "deit_base differs from the run's recipe quickstart"),
        (["--out-dir", str(tmp_path)], "a run goes on in its own folder"),
        (["--dry-run"], "--dry-run and --resume exclude each other"),
    ]:
        refused(folder, ["--resume", str(folder), *more], words)
    refused(
        folder,
        arguments[: arguments.index("--resume")],
        "already holds a run (last.pt, previous.pt",
    )


def test_other_images_are_not_gone_on_with(stopped, refused, image_tree):
    folder, arguments = stopped()
    one, other = image_tree / "val" / "red" / "00.png", image_tree.parent / "00.png"
    for moves, words in [
        ([(one, other)], "with validation images = 21 and not 20"),
        (
            [(image_tree / "train" / "red" / "00.png", image_tree / "train" / "green" / "99.png")],
            "with files and labels = ",
        ),
        (
            [
                (image_tree / split / "red", image_tree / split / "yellow")
                for split in ("train", "val")
            ],
            'with class 2 = "red" and not "yellow"',
        ),
    ]:
        for before, after in moves:
            before.rename(after)
        for command in (arguments, ["--resume", str(folder)]):
            refused(folder, command, words)
        for before, after in moves:
            after.rename(before)


def test_without_a_record_nothing_is_taken_for_another_run_and_a_line_says_so(tmp_path, capsys):
    """A record that lacks a fact is older than it: it has no teacher, and strided pairs."""
    folder = RunFolder(shutil.copytree(STORED / "stopped_at_88e7f50", tmp_path / "run"))
    request = vitinit.Run(resume=folder.path).request
    now = {"root": "", "teacher": "12ab", "training images": 5, "validation images": 3}
    for text in ("[{}]", None):
        folder.info.write_text(text) if text else folder.info.unlink()
        assert resumed_run(request, folder, None).strided == bool(text)
        line = f"warning {folder.info}: is missing, so whether the run began with the same images,"
        assert capsys.readouterr().err.startswith(line) != bool(text)
        differs = pytest.raises(RecipeError, match='with teacher = "none" and not "12ab"')
        with differs if text else nullcontext():
            require_same_data(folder, {}, ["a", "b"], now, ALONE)


def test_images_that_are_left_out_now_are_named_to_a_run_that_began_with_them(
    stopped, refused, image_tree, monkeypatch
):
    """Such as thumbnails, which an earlier version took for photographs; here four of them."""
    for number in range(4):
        thumbnail = image_tree / "train" / "red" / "@eaDir" / f"0{number}.png" / "THUMB.png"
        thumbnail.parent.mkdir(parents=True)
        thumbnail.write_bytes((image_tree / "train" / "red" / f"0{number}.png").read_bytes())
    with monkeypatch.context() as earlier:
        earlier.setattr("vitinit.data.folders.OF_SYSTEMS", set())
        folder, arguments = stopped()
    names = ", ".join(f"train/red/@eaDir/0{number}.png/THUMB.png" for number in range(4))
    for command in (arguments, ["--resume", str(folder)]):
        refused(
            folder,
            command,
            f"--set init.checkpoint={folder}; 4 images in it are left out, on which earlier versions "
            f"trained: {names}; the git_commit in the run's run.json goes on with them",
        )
    assert since_left_out(image_tree, 4) != "" == since_left_out(image_tree, -1)  # one is new


def test_other_images_of_the_same_names_are_not_gone_on_with_unless_they_were_mended(
    train_program, stopped, refused, image_tree, capsys
):
    """A run that stopped at a damaged image allows for others; later ones do not. A run that began
    before sizes were recorded goes on."""
    folder, arguments = stopped(**ONE_EPOCH)
    for split in ("train", "val"):
        image = image_tree / split / "red" / "00.png"
        content = image.read_bytes()
        image.write_bytes(content + b" ")
        for command in (arguments, ["--resume", str(folder)]):
            refused(folder, command, f"{folder}: holds another run, with sizes of files = ")
        image.write_bytes(content)
    (start,) = json.loads((folder / "run.json").read_text())
    del start["data"]["sizes of files"]
    (folder / "run.json").write_text(json.dumps([start]))
    image.write_bytes(content[: len(content) // 2])
    assert train_program.main(arguments) == 2  # at the damaged image, in its validation
    assert str(image) in capsys.readouterr().err
    image.write_bytes(content)
    assert train_program.main(arguments) == 0
    assert [
        "sizes of files" in start["data"] for start in json.loads((folder / "run.json").read_text())
    ] == [False, False, True]
    image.write_bytes(content + b" ")
    refused(folder, arguments, "with sizes of files = ")


def test_a_relative_folder_of_data_is_that_of_the_first_start(
    train_program, eval_program, stopped, stop_before, image_tree, tmp_path, monkeypatch, capsys
):
    """From another folder eval.py finds it, and the run goes on with it, as often as it is stopped;
    recipe.toml and checkpoints keep the path as it was written. Data that moved is said by
    --data-dir."""
    monkeypatch.chdir(image_tree.parent)
    folder, arguments = stopped("--data-dir", image_tree.name, **ONE_EPOCH)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with monkeypatch.context() as patch:
        patch.setattr("vitinit.run.StopRequest", stop_before(0))
        assert train_program.main(arguments) == 128 + signal.SIGTERM
    assert eval_program.main([str(folder)]) == train_program.main(arguments) == 0
    moved = image_tree.rename(image_tree.with_name("moved"))
    capsys.readouterr()
    assert eval_program.main([str(folder)]) == 2
    assert str(image_tree) in capsys.readouterr().err
    assert eval_program.main([str(folder), "--data-dir", str(moved)]) == 0
    typed = vitinit.run.Run(resume=folder, data_dir="images").request
    assert resumed_run(typed, RunFolder(folder), None).recipe.data.root == "images"  # here
    assert 'root = "images"' in (folder / "recipe.toml").read_text()
    assert [start["data"]["root"] for start in json.loads((folder / "run.json").read_text())] == [
        str(image_tree)
    ] * 3


def test_a_run_killed_before_its_first_step_goes_on_from_step_0(
    train_program, small_run, tmp_path, monkeypatch, capsys
):
    """The first checkpoint precedes the first step; missing files are written on resume."""
    folder = tmp_path / "run"
    arguments = small_run(folder, "--resume", "auto", checkpoint__keep_epochs="[0]", **ONE_EPOCH)
    with monkeypatch.context() as patch:
        patch.delattr(vitinit.run, "train_epochs")
        with pytest.raises(NameError):
            train_program.main(arguments)
    first = torch.load(folder / "last.pt")
    assert first["step"] == 0 and first["optimizer"]["state"] == {}
    (folder / "epoch_0000.pt").unlink()  # killed before that one
    assert train_program.main(["--resume", str(folder)]) == 0
    assert "resumed at step 0" in capsys.readouterr().out
    kept = torch.load(folder / "epoch_0000.pt")
    assert all(torch.equal(value, first["model"][name]) for name, value in kept["model"].items())


def test_a_finished_run_without_its_checkpoints_is_done(
    train_program, small_run, straight, tmp_path, refused, capsys
):
    folder = shutil.copytree(straight(**ONE_EPOCH), tmp_path / "run")
    arguments = small_run(folder, **ONE_EPOCH)
    for path in folder.glob("*.pt"):
        path.unlink()
    before = contents(folder)
    capsys.readouterr()
    for resume in ([*arguments, "--resume", "auto"], ["--resume", str(folder)]):
        assert train_program.main(resume) == 0
        assert capsys.readouterr().out == (
            f"done    {folder}: all epochs, by its metrics.jsonl; no last.pt is left\n"
        )
    assert contents(folder) == before
    refused(
        folder,
        [*arguments, "--resume", "auto", "--set", "optim.eps=1e-3"],
        "holds another run, with optim.eps = 0.0001 and not 0.001; a run goes on as it began",
    )


def test_what_an_unfinished_run_left_is_never_started_over(written_run, refused):
    for number, left in enumerate(["metrics.jsonl", "best.pt", "epoch_0001.pt"]):
        folder = written_run(f"run{number}", [10.0], epochs=2)
        if left != "metrics.jsonl":
            (folder / "metrics.jsonl").unlink()
            (folder / left).write_bytes(b"weights")
        for how in ("auto", str(folder)):
            refused(
                folder,
                [
                    "--recipe",
                    "quickstart",
                    "--init",
                    "default",
                    "--set",
                    "schedule.epochs=2",
                    "--out-dir",
                    str(folder),
                    "--resume",
                    how,
                ],
                f"holds {left} of {int('metrics' in left)} of 2 epochs but no last.pt to go on "
                "from; start anew in another --out-dir",
            )


def test_a_recipe_without_a_checkpoint_is_started_and_another_ones_kept(
    train_program, small_run, straight, tmp_path, refused
):
    """Killed before its first checkpoint: without results, the recipe identifies the run."""
    folder = shutil.copytree(straight(**ONE_EPOCH), tmp_path / "run")
    arguments = small_run(folder, **ONE_EPOCH)
    for name in set(os.listdir(folder)) - {"recipe.toml", "run.json"}:
        (folder / name).unlink()
    refused(folder, arguments, "already holds a run (recipe.toml, run.json); --resume auto goes")
    refused(
        folder, ["--resume", str(folder)], "holds no checkpoint to go on from yet; the command that"
    )
    assert not (folder / "run.lock").exists()  # it may be any folder
    refused(folder, ["--resume", ""], "--resume is empty; expected the folder of a run, or auto")
    refused(folder, ["--resume", f"{folder}s"], f"--resume {folder}s: no such run folder")
    refused(folder, [*arguments, "--resume", "auto", "--seed", "1"], "with run.seed = 0 and not 1")
    assert train_program.main([*arguments, "--resume", "auto"]) == 0
    assert read_run(folder).finished and len(read_run(folder).starts) == 2


def test_a_run_writes_through_no_link(train_program, stopped, refused, tmp_path):
    """A folder from elsewhere may have links to any file; one of a part that was written goes."""
    folder, _ = stopped(**ONE_EPOCH)
    target = tmp_path / "mine"
    for name in ("run.lock", "metrics.jsonl", "steps.jsonl", "run.json", "last.pt", "previous.pt"):
        is_there = (folder / name).exists()
        target.write_bytes((folder / name).read_bytes() if is_there else b"mine")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
        refused(
            folder,
            ["--resume", str(folder)],
            f"train.py: {folder / name}: is a symbolic link,"
            " and no run writes through one; expected the file itself\n",
        )
        (folder / name).unlink()
        if is_there:
            target.rename(folder / name)
    target.write_text("mine")
    (folder / "best.pt.partial").symlink_to(target)
    assert train_program.main(["--resume", str(folder)]) == 0 and target.read_text() == "mine"


def test_a_checkpoint_that_contradicts_itself_is_refused_and_one_without_classes_goes_on(
    train_program, stopped, refused
):
    folder, _ = stopped()
    whole = torch.load(folder / "last.pt", weights_only=True)
    for change, words in (
        ({"progress": whole["progress"] | {"step": 10**6}}, "its progress contradicts itself"),
        ({"progress": whole["progress"] | {"epochs": 2}}, "its progress contradicts itself"),
        ({"progress": whole["progress"] | {"seconds": 0.0}}, "its progress contradicts itself"),
        ({"optimizer": {"state": {}}}, "is not of this run: optimizer is of another run"),
    ):
        torch.save(whole | change, folder / "last.pt")
        refused(folder, ["--resume", str(folder)], words)
    torch.save(whole | {"classes": None}, folder / "last.pt")
    assert train_program.main(["--resume", str(folder)]) == 0


def test_rows_that_were_lost_are_said_also_of_a_finished_run(
    train_program, straight, tmp_path, capsys
):
    folder = shutil.copytree(straight(**ONE_EPOCH), tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    capsys.readouterr()
    assert train_program.main(["--resume", str(folder)]) == 0
    printed = capsys.readouterr()
    assert printed.err == (
        f"warning {folder / 'metrics.jsonl'}: has 0 of the 1 epochs that the "
        "checkpoint counts as done; the others are lost\n"
    )
    assert "done    metrics.jsonl has no validated epoch" in printed.out


def test_every_program_reads_the_previous_checkpoint_if_the_last_is_missing_or_damaged(
    train_program, eval_program, stopped, small_run, tmp_path, capsys
):
    folder, _ = stopped(**ONE_EPOCH)
    (folder / "last.pt").rename(folder / "previous.pt")
    for content in (None, b"torn"):
        if content:
            (folder / "last.pt").write_bytes(content)
        for use in (
            lambda: eval_program.main([str(folder)]),
            lambda: vitinit.load(folder),
            lambda: list(of_runs([folder], [], "model")),
            lambda: train_program.main(
                small_run(tmp_path / "new", "--dry-run", init__checkpoint=str(folder))
            ),
        ):
            assert use() not in (1, 2)
            error = capsys.readouterr().err
            assert error.startswith(f"warning {folder / 'last.pt'}: no") and error.count("\n") == 1
            assert error.endswith(f"; going on with {folder / 'previous.pt'}\n")


def test_a_disk_that_refuses_ends_the_run_in_one_line_with_its_checkpoint(
    train_program, small_run, tmp_path, monkeypatch, capsys
):
    """The disk is full when the second epoch's checkpoint is written: no partial file remains."""
    folder = tmp_path / "run"
    real, saved = os.fsync, []

    def fsync(handle):
        saved.append(handle)
        if len(saved) > 20 and "/last.pt." in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    arguments = small_run(folder, "--resume", "auto", checkpoint__every_steps="1")
    assert train_program.main(arguments) == 2
    error = capsys.readouterr().err
    assert error == f"train.py: {folder / 'last.pt'}: cannot be written: No space left on device\n"
    assert not list(folder.glob("*.partial"))
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    assert train_program.main(arguments) == 0 and read_run(folder).finished


def test_a_run_of_an_earlier_version_is_read_but_by_the_commit_that_is_named(
    train_program, eval_program, capsys, tmp_path
):
    """Its record can still be compared, since that does not check the recipe's values."""
    folder = shutil.copytree(STORED / "version_11", tmp_path / "run")
    for main, arguments in (
        (train_program.main, ["--resume", str(folder)]),
        (eval_program.main, [str(folder), "--data", "shapes"]),
    ):
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(
            "last.pt: a recipe of version 11, and this code reads 12, or 13 with a base; commit "
            "bb39c50 reads those of versions 1 to 11"
        )
    assert read_run(folder).keys["mix.group"] == 4


def write_list(root: Path) -> None:
    """A list of the training images, whose labels, of numbers, have two orders."""
    labels = {"red": "2", "green": "10", "blue": "1"}
    paths = sorted((root / "train").glob("*/*.png"))
    lines = [f"train/{path.parent.name}/{path.name},{labels[path.parent.name]}" for path in paths]
    (root / "images.csv").write_text("\n".join(["path,label", *lines]))


@pytest.mark.parametrize("task", ["classify", "reconstruct"])
def test_a_run_on_a_list_goes_on_in_the_order_of_classes_that_it_began_with(
    task, train_program, eval_program, small_run, tmp_path, image_tree, monkeypatch, stop_before
):
    """Labels that are all numbers were sorted as such. Which images are held out depends on it."""
    write_list(image_tree)
    sets = {
        "data.name": "image_list",
        "data.held_out_per_class": "3",
        "data.images_per_class": "8",
        "task.name": task,
    }
    if task == "reconstruct":
        sets |= {"checkpoint.best_by": "val_loss", "model.options.pool": "class"}
        sets |= {"mix.mixup_alpha": "0.0", "mix.cutmix_alpha": "0.0", "mix.label_smoothing": "0.0"}
        sets |= {"task.options.decoder_dim": "16", "task.options.decoder_depth": "1"}
        sets |= {"task.options.decoder_heads": "2"}
        sets |= {"augment.erase_probability": "0.0", "model.options.patch_size": "2"}
    changes = {key.replace(".", "__"): value for key, value in sets.items()}

    def as_numbers(names):
        return sorted(names, key=int)

    folders = [tmp_path / name for name in ("whole", "cut")]
    with monkeypatch.context() as before:
        before.setattr("vitinit.data.lists.sorted", as_numbers, raising=False)
        assert train_program.main(small_run(folders[0], **changes)) == 0
        before.setattr("vitinit.run.StopRequest", stop_before(3))
        assert train_program.main(small_run(folders[1], **changes)) == 143
    for folder in folders:  # an earlier commit had not this key
        text = (folder / "recipe.toml").read_text().replace('checkpoint_classes = ""\n', "")
        (folder / "recipe.toml").write_text(text)
    with monkeypatch.context() as again:
        again.setattr("vitinit.run.StopRequest", stop_before(2))
        assert train_program.main(["--resume", str(folders[1])]) == 143
    assert train_program.main(["--resume", str(folders[1])]) == 0
    assert_same_run(*folders)
    if task == "classify":
        assert checkpoint(folders[1])["classes"] == ["1", "2", "10"]
        for more in ([], ["--train-images"]):
            assert eval_program.main([str(folders[1]), *more]) == 0  # the same images


def test_a_finished_run_is_finished_though_its_recipe_lacks_keys_that_came_later(
    train_program, small_run, tmp_path, capsys
):
    folder = tmp_path / "run"
    assert train_program.main(small_run(folder, **ONE_EPOCH)) == 0
    for name in ("last.pt", "previous.pt"):
        (folder / name).unlink()
    text = (folder / "recipe.toml").read_text()
    for line in (
        'checkpoint_classes = ""\n',
        'classes = ""\n',
        "cosine_after_warmup = false\n",
        "shift_blocks = 0\n",
    ):
        assert line in text
        text = text.replace(line, "")
    (folder / "recipe.toml").write_text(text)
    assert train_program.main(small_run(folder, "--resume", "auto", **ONE_EPOCH)) == 0
    assert "all epochs, by its metrics.jsonl" in capsys.readouterr().out


def test_a_run_whose_classes_an_earlier_version_did_not_compose_goes_on_with_their_names_and_order(
    train_program, stopped, image_tree, monkeypatch
):
    """Between blue and green came "e" with an accent; behind them comes the letter "é"."""
    for split in ("train", "val"):
        (image_tree / split / "red").rename(image_tree / split / "e\u0301")
    with monkeypatch.context() as earlier:
        earlier.setattr("unicodedata.normalize", lambda form, name: name)
        folder, arguments = stopped(**ONE_EPOCH)
        straight = shutil.copytree(folder, folder.with_name("straight"))
        assert train_program.main(["--resume", str(straight)]) == 0
    assert train_program.main(arguments) == 0
    assert checkpoint(folder)["classes"] == ["blue", "e\u0301", "green"]
    assert_same_run(folder, straight)
