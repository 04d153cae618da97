"""Fresh models are those that train.py starts from; models of runs are those of its checkpoints."""

import shutil
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from vitinit.base.files import CheckpointError
from vitinit.data import shapes
from vitinit.data.images import decode_image, resize_and_centre_crop
from vitinit.programs.figures.subjects import fresh, of_runs, photographs
from vitinit.runs.folder import RunFolder


@pytest.fixture
def run(straight, small_run, tmp_path, capsys):
    """A run folder that kept epochs 0 and 2 of 3, and the overrides it was trained with."""
    how = dict(init="deep_impulse", checkpoint__keep_epochs="[0, 2]")
    folder, words = shutil.copytree(straight(**how), tmp_path / "trial"), small_run(tmp_path, **how)
    capsys.readouterr()
    return folder, [value for option, value in zip(words, words[1:]) if option == "--set"]


def assert_equal(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(dict(model.state_dict()), dict(weights), rtol=0, atol=0)


def test_models_of_runs_are_those_kept_and_fresh_models_equal_epoch_0(run, image_tree, capsys):
    """`deep_impulse` reads training images; where they lie is in the recipe's data.root."""
    folder, sets = run
    kept = list(of_runs([folder], [2, 0], "model"))
    assert [subject.state for subject in kept] == ["deep_impulse, epoch 2", "deep_impulse, epoch 0"]
    for subject, epoch in zip(kept, (2, 0)):
        stored = torch.load(folder / f"epoch_{epoch:04}.pt", weights_only=True)["model"]
        assert_equal(subject.model, stored)
        assert not subject.model.training
    (start,) = fresh(
        ["quickstart"], ["deep_impulse"], seed=None, sets=[*sets, f"data.root={image_tree}"]
    )
    assert start.state == "deep_impulse" and not start.model.training
    assert_equal(start.model, kept[1].model.state_dict())
    assert "noise" not in capsys.readouterr().out
    (other,) = fresh(["quickstart"], ["deep_impulse"], seed=None, sets=sets + ["data.root=unused"])
    assert "no folder unused: noise stands in for them" in capsys.readouterr().out
    assert not torch.equal(other.model.norm.weight, start.model.norm.weight)


def test_epochs_stand_in_the_order_of_their_numbers(tmp_path):
    for epoch in (10_000, 9_999, 10):
        RunFolder(tmp_path).kept(epoch).touch()
    with pytest.raises(CheckpointError, match="keeps no epoch 3; it has 10, 9999, 10000$"):
        list(of_runs([tmp_path], [3], "model"))


def test_without_epochs_the_last_checkpoint_is_read_from_a_folder_or_a_file(run):
    folder, _ = run
    state = torch.load(folder / "last.pt", weights_only=True)
    for target, weights, stored in (
        (folder, "model", state["model"]),
        (folder / "last.pt", "ema", state["ema"]),
    ):
        (subject,) = of_runs([target], [], weights)
        assert subject.state == "deep_impulse, last.pt"
        assert_equal(subject.model, stored.get("model", stored))
    every = [subject.state for subject in of_runs([folder], "all", "model")]
    assert every == [f"deep_impulse, {state}" for state in ("epoch 0", "epoch 2", "last.pt")]
    (folder / "epoch_0002.pt").rename(folder / "last.pt")  # as where the last epoch is kept
    (folder / "epoch_0002.pt").hardlink_to(folder / "last.pt")
    assert len(list(of_runs([folder], "all", "model"))) == 2
    names = [subject.state for subject in of_runs([folder, folder], [0], "model")]
    assert names == ["trial, epoch 0"] * 2  # several runs are named by their folders


def test_photographs_are_normalised_evaluation_views_and_shapes_are_drawn(image_tree):
    (subject,) = fresh(
        ["deit_tiny"], [None], seed=0, sets=["data.image_size=32", "model.options.depth=1"]
    )
    images = photographs(image_tree / "val", 5, subject.recipe)
    paths = sorted((image_tree / "val").rglob("*.png"))[:5]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    for image, path in zip(images, paths, strict=True):
        view = resize_and_centre_crop(decode_image(str(path)), (32, 32), 0.875, "bicubic")
        expected = (view / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        torch.testing.assert_close(image, expected)
    (subject,) = fresh(["quickstart"], [None], seed=0, sets=["model.options.depth=1"])
    drawn = shapes.image_of(1, 2)
    torch.testing.assert_close(
        photographs(None, 3, subject.recipe)[2], drawn / 127.5 * 2 - 2
    )  # (p / 255 - .5) / .25


def test_without_data_a_number_of_classes_is_chosen_where_it_is_left_open(run, image_tree):
    _, sets = run
    for root, name, classes in (
        ("unused", "image_folder", 2),
        ("unused", "imagenet", 1000),
        (str(image_tree), "image_folder", 3),
    ):
        (subject,) = fresh(
            ["quickstart"],
            ["deep_impulse"],
            seed=None,
            sets=[*sets, "data.num_classes=0", f"data.name={name}", f"data.root={root}"],
        )
        assert subject.model.head.out_features == subject.recipe.data.num_classes == classes
