"""The teacher of a run: three doors lead to the same logits, and what cannot teach is one line."""

import io
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import torchvision
from refused import refused
from safetensors.torch import save_file
from same_run import assert_identical, checkpoint, rows_of
from torch import nn
from torch.testing import assert_close as close

import vitinit
from vitinit.base.messages import OneLineError
from vitinit.programs import compare, export
from vitinit.recipe.files import Override, load_recipe
from vitinit.runs.teacher import Opened, columns_for, open_teacher

REPOSITORY = Path(__file__).resolve().parents[2]
RUN, CLASSES = Path(__file__).parent / "data" / "version_12", ["blue", "green", "red"]
CPU = torch.device("cpu")


def opened(teacher: str, classes: list[str] = CLASSES, names: str = "", **values):
    sets = {f"distill.{key}": value for key, value in values.items()} | {
        "distill.teacher": teacher,
        "distill.classes": names,
        "data.mean": [0.1, 0.2, 0.3],
        "data.std": [0.7, 0.6, 0.5],
    }
    recipe = load_recipe(
        REPOSITORY / "recipes" / "quickstart.toml",
        [Override(key, value, key) for key, value in sets.items()],
    )
    return open_teacher(recipe, classes, CPU, trusted=True)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_a_run_teaches_classes_in_the_students_order(images):
    expected = vitinit.load(RUN).model(images)
    teacher = opened(str(RUN))
    close(teacher.model(images), expected)  # its convolution is channels last
    assert (teacher.mean, teacher.std, teacher.size) == ((0.5,) * 3, (0.25,) * 3, (8, 8))
    assert not any(p.requires_grad for p in teacher.model.parameters())
    assert not teacher.model.training
    turned = opened(str(RUN), ["red", "blue", "green"])
    close(turned.model(images), expected[:, [2, 0, 1]])
    close(opened(str(RUN), ["red"]).model(images), expected[:, [2]])
    close(
        opened(str(RUN), weights="ema").model(images),
        vitinit.load(RUN, weights="ema").model(images),
    )
    assert teacher.digest == turned.digest != opened(str(RUN), weights="ema").digest


def test_an_exported_program_is_the_same_teacher(images, tmp_path, capsys):
    assert export.main([str(RUN), "--to", "torch", "--out", str(tmp_path / "run.pt2")]) == 0
    teacher, ours = opened(str(tmp_path / "run.pt2")), opened(str(RUN))
    with torch.autocast("cpu", torch.bfloat16):  # as a step in bf16 asks it
        assert teacher.model(images).dtype == torch.bfloat16
    torch.testing.assert_close(teacher.model(images), ours.model(images))
    assert (teacher.mean, teacher.std, teacher.size) == (ours.mean, ours.std, ours.size)
    assert "matched by name" in teacher.name
    assert (
        export.main(
            [str(RUN), "--to", "torch", "--normalise", "--out", str(tmp_path / "uint8.pt2")]
        )
        == 0
    )
    with pytest.raises(OneLineError, match="without --normalise .it takes torch.uint8.$"):
        opened(str(tmp_path / "uint8.pt2"))


def test_torchvisions_models_read_views_of_any_size(tmp_path):
    torch.manual_seed(0)
    model = torchvision.models.shufflenet_v2_x0_5(num_classes=3).eval()
    file = tmp_path / "weights.pth"
    torch.save(model.state_dict(), file)
    teacher = opened("torchvision:shufflenet_v2_x0_5", weights=str(file))
    views = torch.randn(2, 3, 40, 56, generator=torch.Generator().manual_seed(0))
    assert torch.equal(teacher.model(views), model(views)) and teacher.size is None
    assert teacher.mean == (0.485, 0.456, 0.406)
    assert "assumed to be in the student's order" in teacher.name


def test_a_file_of_torchvisions_weights_may_hold_its_tensors_in_any_order(tmp_path):
    """As one of safetensors does."""
    torch.manual_seed(0)
    model = torchvision.models.shufflenet_v2_x0_5(num_classes=3).eval()
    views = torch.randn(2, 3, 40, 56)
    for file in ("weights.safetensors", "weights.pth"):
        state = dict(reversed(model.state_dict().items()))
        save = save_file if file.endswith("s") else torch.save
        save(state, tmp_path / file)
        teacher = opened("torchvision:shufflenet_v2_x0_5", weights=str(tmp_path / file))
        assert torch.equal(teacher.model(views), model(views))


def numbered(classes: list[str], path: Path) -> str:
    """The run as a checkpoint with these names of classes, or with none."""
    state = torch.load(RUN / "last.pt", weights_only=True)
    torch.save(state | {"classes": classes}, path)
    return str(path)


def test_names_that_are_numbers_are_matched_by_name(images, tmp_path):
    expected = vitinit.load(RUN).model(images)
    teacher = opened(numbered(["1", "2", "10"], tmp_path / "a.pt"), ["1", "10", "2"])
    close(teacher.model(images), expected[:, [0, 2, 1]])
    assert "matched by name" in teacher.name
    assert columns_for("t", Opened(None, ["2", "10"], 2), ["10", "2"]) == (
        [1, 0],
        "matched by name",
    )


def test_a_file_names_the_classes_of_a_teacher_that_does_not(images, tmp_path):
    """It is part of what the teacher answers, so that a run goes on with the same names alone."""
    expected, bare = vitinit.load(RUN).model(images), numbered(None, tmp_path / "a.pt")
    file = tmp_path / "names.txt"
    digests = set()
    for names, columns in ((["1", "2", "10"], [0, 2, 1]), (["10", "2", "1"], [2, 0, 1])):
        file.write_text("\n".join(names))
        teacher = opened(bare, ["1", "10", "2"], names=str(file))
        close(teacher.model(images), expected[:, columns])
        digests.add(teacher.digest)
    teacher = opened(bare, ["1", "10", "2"])
    close(teacher.model(images), expected)
    assert "without names, assumed to be in the student's order; distill.classes" in teacher.name
    assert len(digests | {teacher.digest}) == 3
    file.write_text("1\n2")
    for known, words in (
        (bare, "has 2 names; expected 3"),
        (str(RUN), "does not name its classes"),
    ):
        assert words in refused(OneLineError, opened, known, names=str(file))


def write_program(path: Path, shape: tuple[int, ...], *, batch_is_free: bool) -> str:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 3))
    free = {"input": {0: torch.export.Dim("batch")}} if batch_is_free else None
    torch.export.save(torch.export.export(model, (torch.zeros(shape),), dynamic_shapes=free), path)
    return str(path)


class Touch:
    """What makes a file as it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_program_is_read_only_if_the_user_trusts_it_beside_the_recipe(
    train_program, small_run, tmp_path, capsys
):
    """torch unpickles its sample inputs, for one; another commit's folder may name it, too."""
    program, ran = write_program(tmp_path / "a.pt2", (2, 3, 8, 8), batch_is_free=True), []
    pickled, odd = io.BytesIO(), tmp_path / "odd.pt2"
    torch.save(Touch(tmp_path / "executed"), pickled)
    with zipfile.ZipFile(program) as whole, zipfile.ZipFile(odd, "w") as changed:
        for name in whole.namelist():
            changed.writestr(
                name, pickled.getvalue() if "sample_inputs" in name else whole.read(name)
            )
    for more in ([], ["--dry-run"], ["--trust-teacher", "--dry-run"]):
        command = small_run(tmp_path / "run", *more, distill__teacher=odd)
        assert train_program.main(command) == 2
        ran.append((tmp_path / "executed").exists())
        assert ("train with --trust-teacher" in capsys.readouterr().err) == (len(ran) < 3)
    assert ran == [False, False, True]  # the last: this file does execute something
    student = dict(distill__teacher=program, schedule__epochs="1", data__num_classes="3")
    assert train_program.main(small_run(tmp_path / "run", "--trust-teacher", **student)) == 0
    replay = [str(tmp_path / "run"), "--replay", "run", "--out", str(tmp_path / "again")]
    assert compare.main(replay) == 2  # nor does a record say that it is safe
    assert compare.main([*replay, "--trust-teacher"]) == 0


def test_what_cannot_teach_is_one_line_that_says_why(tmp_path):
    (tmp_path / "text.pt2").write_text("no program")
    (tmp_path / "weights.pth").write_bytes(b"")
    cases = {
        "none: no such checkpoint": dict(teacher=str(tmp_path / "none")),
        "class 'disc' is none of the model's 3": dict(teacher=str(RUN), classes=["disc", "red"]),
        "has no classifier 'regnet_y_16g'; did you mean 'regnet_y_16gf'": dict(
            teacher="torchvision:regnet_y_16g"
        ),
        "distill.weights is empty; expected the file": dict(teacher="torchvision:resnet18"),
        "expected model or ema for": dict(teacher=str(RUN), weights="x.pth"),
        "weights.pth": dict(teacher="torchvision:resnet18", weights=str(tmp_path / "weights.pth")),
        "such as vitinit export writes without --normalise (there is no such archive)": dict(
            teacher=str(tmp_path / "text.pt2")
        ),
        "(Guard failed: input.size()[0] == 2)": dict(
            teacher=write_program(tmp_path / "fixed.pt2", (2, 3, 8, 8), batch_is_free=False)
        ),
        "to logits (B, K), such as vitinit export writes": dict(
            teacher=write_program(tmp_path / "flat.pt2", (2, 192), batch_is_free=True)
        ),
        "has 3 classes without names, and the student 2": dict(
            classes=["a", "b"],
            teacher=write_program(tmp_path / "free.pt2", (2, 3, 8, 8), batch_is_free=True),
        ),
    }
    for expected, arguments in cases.items():
        assert expected in refused(OneLineError, opened, **arguments)


def test_a_run_goes_on_to_the_bit_with_its_teacher_and_with_no_other(
    train_program, small_run, stop_before, tmp_path, capsys, monkeypatch
):
    sets = dict(
        distill__teacher=str(RUN),
        distill__kind="soft",
        model__name="vit_tiny_distilled",
        model__options__pool="class",
        schedule__epochs="2",
    )
    assert train_program.main(small_run(tmp_path / "whole", "--verbose", **sets)) == 0
    assert "the second head learns its probabilities" in capsys.readouterr().out
    monkeypatch.setattr("vitinit.run.StopRequest", stop_before(5))
    assert train_program.main(small_run(tmp_path / "cut", **sets)) == 143
    monkeypatch.undo()
    other, half = shutil.copytree(RUN, tmp_path / "other"), tmp_path / "half"  # other weights
    assert export.main([str(RUN), "--to", "run", "--out", str(half)]) == 0
    capsys.readouterr()
    for change in (f"distill.teacher={half}", "distill.teacher="):
        assert train_program.main(["--resume", str(tmp_path / "cut"), "--set", change]) == 2
        error = capsys.readouterr().err
        assert ": holds another run, with teacher = " in error and error.count("\n") == 1
    # The same weights in another place are the same teacher.
    assert (
        train_program.main(["--resume", str(tmp_path / "cut"), "--set", f"distill.teacher={other}"])
        == 0
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert_identical(checkpoint(whole)["model"], checkpoint(cut)["model"])
    assert_identical(rows_of(whole), rows_of(cut))
