"""Image folders and the embedded set, and the one line that says what is wrong with a data set."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image

from vitinit.data import shapes
from vitinit.data.datasets import DATA_SETS, IN_MEMORY, download, open_split
from vitinit.data.sources import ImageFiles, ImageFolder, LooseImages, fingerprint, oriented
from vitinit.data.images import DataError


def pixels(seed: int, height: int = 5, width: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write_tree(root: Path, *names: str) -> Path:
    """PNG images under `root`, each of its own colours: image i is pixels(i)."""
    for seed, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(seed)).save(root / name, "PNG")
    return root


def refusal(function, *arguments) -> str:
    with pytest.raises(DataError) as error:
        function(*arguments)
    assert str(error.value).isprintable()
    return str(error.value)


def test_an_image_folder_holds_every_image_with_its_class(tmp_path):
    names = ["cat/b.png", "ant/z.png", "cat/deep/er/a.PNG", "ant/a.jpg", "bee/ü 1.jpeg", ".x/c.png"]
    source = ImageFolder(write_tree(tmp_path, *names))
    assert source.classes == ["ant", "bee", "cat"]
    assert source.labels.dtype == np.int64 and len(source) == 5
    found = {}
    for index, label in enumerate(source.labels):
        found[source.image(index).numpy().tobytes()] = source.classes[label]
    assert found == {pixels(seed).transpose(2, 0, 1).tobytes(): name.split("/")[0]
                     for seed, name in enumerate(names[:5])}


def test_loose_images_are_the_first_of_any_folders_and_have_one_class(tmp_path):
    write_tree(tmp_path, "b/2.png", "a/x/1.png", "3.png", ".hidden/4.png")
    (tmp_path / "notes.txt").write_text("no image")
    source = LooseImages(tmp_path, 100)
    assert [Path(path).name for path in source.paths] == ["3.png", "1.png", "2.png"]
    assert source.labels.tolist() == [0, 0, 0] and source.image(0).shape[0] == 3
    assert len(LooseImages(tmp_path, 2)) == 2
    (tmp_path / "empty").mkdir()
    assert "no images in it" in refusal(LooseImages, tmp_path / "empty", 3)


@pytest.mark.parametrize("folder", ["val", "test"])
def test_the_second_split_is_val_or_test(tmp_path, folder):
    write_tree(tmp_path, "train/ant/a.png", "train/bee/b.png", f"{folder}/ant/c.png",
               f"{folder}/bee/d.png", f"{folder}/bee/e.png")
    train, val = (open_split("image_folder", str(tmp_path), split, 2) for split in ("train", "val"))
    assert len(train) == 2 and len(val) == 3
    assert np.array_equal(val.image(0).numpy(), pixels(2).transpose(2, 0, 1))


def test_val_goes_before_test_and_needs_no_train(tmp_path, monkeypatch):
    write_tree(tmp_path / "set", "test/ant/a.png", "val/ant/b.png", "val/ant/c.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(open_split("image_folder", "~/set", "val", 1)) == 2
    assert "train: no such folder" in refusal(open_split, "image_folder", "~/set", "train", 0)


@pytest.mark.parametrize("above", ["train/", ""])
def test_without_a_second_split_there_are_training_images_alone(tmp_path, above):
    """Also in one folder, as a phone leaves it."""
    write_tree(tmp_path, f"{above}ant/a.png", f"{above}bee/b.png", f"{above}bee/c.png")
    source = open_split("image_folder", str(tmp_path), "train", 0)
    assert len(source) == 3 and source.classes == ["ant", "bee"]
    assert refusal(open_split, "image_folder", str(tmp_path), "val", 0) == (
        f"{tmp_path}: no val/ or test/ in it; training needs none with --set "
        "data.held_out_per_class=N, which validates on N images of each class")


# What is missing or wrong of train/ant, train/bee, val/ant and val/bee, each with an image a.png.
@pytest.mark.parametrize("split, names, line", [
    ("train", [], "train: no such folder; an image folder holds train/<class>/… and val/<class>/… or"),
    ("train", ["train/a.png", "train/.hidden/b.png"], "train: no class folders in it; expected"),
    ("train", ["train/ant/a.png", "train/bee/b.txt"], "train/bee: no image in this class; expected"),
    ("val", ["train/ant/a.png", "val/ant/a.png", "val/bee/a.png"],
     ": class 'bee' is in only one of train/ and val/; both must hold the same classes"),
    ("val", ["train/ant/a.png", "train/bee/a.png", "test/bee/a.png"],
     ": class 'ant' is in only one of train/ and test/; both must hold the same classes"),
    ("train", ["train/ant/a.png"], ": 1 classes found, but the recipe's data.num_classes is 2; --set")])
def test_what_is_wrong_with_an_image_folder_is_one_line(tmp_path, split, names, line):
    root = write_tree(tmp_path, *names) if names else tmp_path / "nowhere"
    assert refusal(open_split, "image_folder", str(root), split, 2).startswith(
        f"{root}{'' if line[0] == ':' else '/'}{line}")


def test_the_embedded_set_opens_without_a_root(monkeypatch, tmp_path):
    monkeypatch.setattr(shapes, "SPLITS", {"train": 61, "val": 53})
    train, val = (open_split("shapes", "", split, 10) for split in ("train", "val"))
    assert (len(train), len(val)) == (61, 53) and train.classes == shapes.CLASSES
    assert torch.equal(val.image(3), shapes.make_split("val")[0][3])
    assert refusal(open_split, "shapes", "", "train", 11).startswith("shapes: 10 classes found")


def test_the_sets_in_memory_are_those_that_are_opened_as_such():
    assert IN_MEMORY == ("shapes", *(
        name for name, data_set in DATA_SETS.items()
        if getattr(getattr(data_set.open, "func", None), "__name__", "") == "read_arrays"))


def test_a_fingerprint_is_of_paths_below_the_root_labels_and_classes(tmp_path):
    paths = [str(tmp_path / name) for name in ("a/1.png", "b/2.png")]
    one = fingerprint(ImageFiles(paths, [0, 1], ["a", "b"]), str(tmp_path))
    moved = [path.replace(str(tmp_path), "/elsewhere") for path in paths]
    assert fingerprint(ImageFiles(moved, [0, 1], ["a", "b"]), "/elsewhere") == one
    others = [ImageFiles(paths[::-1], [0, 1], ["a", "b"]), ImageFiles(paths, [1, 0], ["a", "b"]),
              ImageFiles(paths, [0, 1], ["a", "c"])]
    assert len({one, *(fingerprint(other, str(tmp_path)) for other in others)}) == 4


def test_oriented_leaves_the_source_itself_as_it_was(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels(0)).save(tmp_path / "a.png", exif=exif)
    source = ImageFiles([str(tmp_path / "a.png")], [0], ["a"])
    stored = oriented(source, False)
    assert source.image(0).shape == (3, 7, 5) and stored.image(0).shape == (3, 5, 7)
    assert stored.part(np.array([0])).image(0).shape == (3, 5, 7)


ESSAY = "Dataset not found or corrupted.\n\x1b[1mYou can use download=True. " + 99 * "etc. "


@pytest.mark.parametrize("error", [RuntimeError(ESSAY), ValueError(ESSAY), OSError(28, ESSAY),
                                   URLError(OSError(101, ESSAY)), OSError(13, ESSAY, "x/y")],
                         ids=["runtime", "value", "system", "network", "file"])
def test_what_is_wrong_with_a_set_is_one_short_line(error, monkeypatch, tmp_path):
    def fails(*_, **__):
        raise error
    root = tmp_path / "a\nb"
    root.mkdir()
    shown = f"{tmp_path}/a\\nb"
    monkeypatch.setitem(DATA_SETS, "pets", dataclasses.replace(DATA_SETS["pets"], open=fails,
                                                               downloads=[fails]))
    for line in (refusal(open_split, "pets", str(root), "val", 10), refusal(download, "pets", str(root))):
        assert shown in line and len(line.replace(shown, "")) <= 200, line


@pytest.mark.parametrize("root", ["a\0b", 300 * "x", "/dev/null"])
def test_a_root_that_is_no_folder_is_one_line(root):
    pytest.importorskip("scipy.io")
    for name in DATA_SETS.keys() - {"shapes"}:       # which lies in none
        line = refusal(open_split, name, root, "val", 0)
        assert len(line) <= 200 + 2 * len(root)
