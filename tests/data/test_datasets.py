"""Image folders, CIFAR on disk, and the one line that says what is wrong with them."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import urllib.request
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from vitinit.data import shapes
from vitinit.data.datasets import (DATA_SETS, IN_MEMORY, ImageFolder, LooseImages, download,
                                   open_split)
from vitinit.data.images import DataError

CIFAR_FILES = {          # name: (folder, training files, meta file, key of names, key of labels)
    "cifar10": ("cifar-10-batches-py", [f"data_batch_{number}" for number in range(1, 6)],
                "test_batch", "batches.meta", "label_names", "labels"),
    "cifar100": ("cifar-100-python", ["train"], "test", "meta", "fine_label_names", "fine_labels"),
}


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
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_image_folder_holds_every_image_with_its_class(tmp_path):
    names = ["cat/b.png", "ant/z.png", "cat/deep/er/a.PNG", "ant/a.jpg", "bee/ü 1.jpeg"]
    source = ImageFolder(write_tree(tmp_path, *names))
    assert source.classes == ["ant", "bee", "cat"]
    assert source.labels.dtype == np.int64 and len(source) == 5
    found = {}
    for index, label in enumerate(source.labels):
        found[source.image(index).numpy().tobytes()] = source.classes[label]
    assert found == {pixels(seed).transpose(2, 0, 1).tobytes(): name.split("/")[0]
                     for seed, name in enumerate(names)}


def test_the_order_of_an_image_folder_is_torchvisions(tmp_path):
    names = ["b/10.png", "b/9.png", "a/x/1.png", "a/1.png", "a/w/2.png", "c/0.png"]
    write_tree(tmp_path, *names)
    theirs = torchvision.datasets.ImageFolder(tmp_path)
    ours = ImageFolder(tmp_path)
    assert list(ours.paths) == [path for path, _ in theirs.samples]
    assert ours.labels.tolist() == theirs.targets and ours.classes == theirs.classes


def test_hidden_folders_and_other_files_are_left_out(tmp_path):
    write_tree(tmp_path, "ant/a.png", ".cache/b.png", "bee/c.png")
    (tmp_path / "labels.csv").write_text("ant")
    (tmp_path / "bee" / "notes.txt").write_text("bee")
    source = ImageFolder(tmp_path)
    assert source.classes == ["ant", "bee"] and len(source) == 2


def test_loose_images_are_the_first_of_any_folders_and_have_one_class(tmp_path):
    write_tree(tmp_path, "b/2.png", "a/x/1.png", "3.png", ".hidden/4.png")
    (tmp_path / "notes.txt").write_text("no image")
    source = LooseImages(tmp_path, 100)
    assert [Path(path).name for path in source.paths] == ["3.png", "1.png", "2.png"]
    assert source.labels.tolist() == [0, 0, 0] and source.image(0).shape[0] == 3
    assert len(LooseImages(tmp_path, 2)) == 2
    assert "no images in it" in refusal(LooseImages, tmp_path / "none", 3)


@pytest.mark.parametrize("folder", ["val", "test"])
def test_the_second_split_is_val_or_test(tmp_path, folder):
    write_tree(tmp_path, "train/ant/a.png", "train/bee/b.png", f"{folder}/ant/c.png",
               f"{folder}/bee/d.png", f"{folder}/bee/e.png")
    train, val = (open_split("image_folder", str(tmp_path), split, 2) for split in ("train", "val"))
    assert len(train) == 2 and len(val) == 3
    assert np.array_equal(val.image(0).numpy(), pixels(2).transpose(2, 0, 1))


def test_val_goes_before_test_and_needs_no_train(tmp_path):
    write_tree(tmp_path, "test/ant/a.png", "val/ant/b.png", "val/ant/c.png")
    assert len(open_split("image_folder", str(tmp_path), "val", 1)) == 2


@pytest.mark.parametrize("above", ["train/", ""])
def test_without_a_second_split_there_are_training_images_alone(tmp_path, above):
    """Also in one folder, as a phone leaves it."""
    write_tree(tmp_path, f"{above}ant/a.png", f"{above}bee/b.png", f"{above}bee/c.png")
    source = open_split("image_folder", str(tmp_path), "train", 0)
    assert len(source) == 3 and source.classes == ["ant", "bee"]
    assert refusal(open_split, "image_folder", str(tmp_path), "val", 0) == (
        f"{tmp_path}: no val/ or test/ in it; training needs none with --set "
        "data.held_out_per_class=N, which validates on N images of each class")


def test_a_folder_of_validation_images_alone_has_none_to_train_on(tmp_path):
    write_tree(tmp_path, "val/ant/a.png", "val/bee/b.png")
    assert "train: no such folder" in refusal(open_split, "image_folder", str(tmp_path), "train", 0)


def test_the_sets_in_memory_are_those_that_are_opened_as_such():
    opened = {name: data_set.open.__qualname__ for name, data_set in DATA_SETS.items()}
    assert IN_MEMORY == ("shapes", *(name for name, function in opened.items()
                                     if function.startswith("_in_memory")))


@pytest.mark.parametrize("split, missing", [("train", "train"), ("val", "val")])
def test_a_missing_split_is_named_with_what_was_expected(tmp_path, split, missing):
    line = refusal(open_split, "image_folder", str(tmp_path / "nowhere"), split, 2)
    assert line.startswith(f"{tmp_path / 'nowhere' / missing}: no such folder")
    assert "train/<class>/" in line and "val/<class>/" in line and "test/<class>/" in line


def test_a_split_without_class_folders_is_refused(tmp_path):
    write_tree(tmp_path, "train/a.png", "train/.hidden/b.png")
    line = refusal(open_split, "image_folder", str(tmp_path), "train", 2)
    assert line.startswith(f"{tmp_path / 'train'}: no class folders")
    assert f"{tmp_path / 'train'}/<class>/<image>" in line


def test_a_class_without_images_is_named(tmp_path):
    write_tree(tmp_path, "train/ant/a.png", "train/cat/b.png")
    (tmp_path / "train" / "bee").mkdir()
    (tmp_path / "train" / "bee" / "notes.txt").write_text("no image")
    line = refusal(open_split, "image_folder", str(tmp_path), "train", 3)
    assert line.startswith(f"{tmp_path / 'train' / 'bee'}: no image") and ".png" in line


@pytest.mark.parametrize("train, val, without, held_by", [
    (("ant", "bee"), ("ant", "bee", "cow"), "train", "val"),
    (("ant", "bee", "cow"), ("ant", "bee"), "val", "train")])
def test_splits_of_different_classes_are_refused(tmp_path, train, val, without, held_by):
    write_tree(tmp_path, *(f"train/{name}/a.png" for name in train),
               *(f"val/{name}/a.png" for name in val))
    line = refusal(open_split, "image_folder", str(tmp_path), "val", len(val))
    assert line.startswith(f"{tmp_path / without}: ")
    assert f"'cow' of {tmp_path / held_by} is missing" in line


def test_a_wrong_number_of_classes_names_the_fix(tmp_path):
    write_tree(tmp_path, "train/ant/a.png", "train/bee/b.png")
    line = refusal(open_split, "image_folder", str(tmp_path), "train", 1000)
    assert line.startswith(f"{tmp_path}: 2 classes found") and "1000" in line
    assert "--set data.num_classes=2" in line


def test_a_single_class_is_not_what_a_recipe_can_be_set_to(tmp_path):
    write_tree(tmp_path, "train/ant/a.png")
    line = refusal(open_split, "image_folder", str(tmp_path), "train", 7)
    assert "1 classes found" in line and "--set" not in line
    assert "expected two classes at least" in line


def test_the_embedded_set_opens_without_a_root(monkeypatch):
    monkeypatch.setattr(shapes, "SPLITS", {"train": 61, "val": 53})
    train, val = (open_split("shapes", "", split, 10) for split in ("train", "val"))
    assert (len(train), len(val)) == (61, 53) and train.classes == shapes.CLASSES
    assert torch.equal(val.image(3), shapes.make_split("val")[0][3])
    line = refusal(open_split, "shapes", "", "train", 11)
    assert line.startswith("shapes: 10 classes found")


@pytest.fixture(params=CIFAR_FILES)
def cifar(request, tmp_path, monkeypatch):
    """A small CIFAR in the true layout: its name, and (images, labels, classes) by split."""
    name = request.param
    folder, train_files, test_file, meta_file, names_key, labels_key = CIFAR_FILES[name]
    (tmp_path / folder).mkdir()
    rng = np.random.default_rng(0)
    num_classes = int(name.removeprefix("cifar"))

    def write(file: str, content: dict) -> list[str]:
        encoded = pickle.dumps(content, protocol=2)
        (tmp_path / folder / file).write_bytes(encoded)
        return [file, hashlib.md5(encoded).hexdigest()]

    def write_batch(file: str, count: int) -> tuple[list[str], np.ndarray, list[int]]:
        images = rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
        labels = rng.permutation(np.arange(count) % num_classes).tolist()
        # A row holds the red plane, the green and the blue, each row by row.
        rows = np.hstack([images[:, channel].reshape(count, 1024) for channel in range(3)])
        return (write(file, {"data": rows, labels_key: labels, "coarse_labels": [0] * count}),
                images, labels)

    batches = [write_batch(file, count) for file, count in zip(train_files, (
        (2, 3, 5, 7, 11) if num_classes == 10 else (107,)))]
    test_batch = write_batch(test_file, num_classes + 3)
    classes = [f"class {number}" for number in range(num_classes)]
    meta = write(meta_file, {names_key: classes, "coarse_label_names": ["coarse"]})
    kind = getattr(torchvision.datasets, name.upper())
    monkeypatch.setattr(kind, "train_list", [entry for entry, _, _ in batches])
    monkeypatch.setattr(kind, "test_list", [test_batch[0]])
    monkeypatch.setattr(kind, "meta", {"filename": meta_file, "key": names_key, "md5": meta[1]})
    train = (np.concatenate([images for _, images, _ in batches]),
             [label for _, _, labels in batches for label in labels], classes)
    return name, {"train": train, "val": (*test_batch[1:], classes)}


@pytest.fixture
def offline(monkeypatch):
    """Whatever torchvision would download fails as it does without a network."""
    def unreachable(*_, **__):
        raise URLError(OSError(101, "Network is unreachable"))
    monkeypatch.setattr(urllib.request, "urlopen", unreachable)


@pytest.mark.parametrize("split", ["train", "val"])
def test_cifar_is_read_as_it_was_written(tmp_path, cifar, split):
    name, written = cifar
    images, labels, classes = written[split]
    source = open_split(name, str(tmp_path), split, len(classes))
    assert len(source) == len(labels) and source.classes == classes
    assert source.labels.dtype == np.int64 and source.labels.tolist() == labels
    for index in range(len(source)):
        image = source.image(index)
        assert image.dtype == torch.uint8
        assert np.array_equal(image.numpy(), images[index])


def test_a_complete_cifar_is_not_downloaded_again(tmp_path, cifar, offline):
    download(cifar[0], str(tmp_path))


def test_a_damaged_cifar_is_refused(tmp_path, cifar):
    name, _ = cifar
    folder, train_files = CIFAR_FILES[name][:2]
    file = tmp_path / folder / train_files[-1]
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    line = refusal(open_split, name, str(tmp_path), "val", int(name.removeprefix("cifar")))
    assert line.startswith(f"{tmp_path}: no complete {name}") and folder in line


@pytest.mark.parametrize("name", CIFAR_FILES)
def test_a_missing_cifar_that_cannot_be_downloaded_says_where_to_put_it(tmp_path, offline, name):
    line = refusal(download, name, str(tmp_path))
    assert line.startswith(f"{name}: ") and "Network is unreachable" in line
    assert str(tmp_path) in line and CIFAR_FILES[name][0] in line
    assert f"cifar-{name.removeprefix('cifar')}-python.tar.gz" in line


@pytest.mark.parametrize("name", ["shapes", "image_folder", "imagenet", "tiny_imagenet"])
def test_nothing_is_downloaded_for_other_sets(tmp_path, offline, name):
    download(name, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_hidden_files_are_no_images_at_any_depth(tmp_path):
    kept = tmp_path / "class" / "nested" / "1.png"
    for path in (kept, tmp_path / "class" / "._1.png", tmp_path / "class" / ".cache" / "2.png"):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (7, 5)).save(path)
    source = ImageFolder(tmp_path)
    assert list(source.paths) == [str(kept)]


# ---------------------------------------------------------------------------------------------
# Messages
# ---------------------------------------------------------------------------------------------


def fails(error: Exception):
    def fail(*_, **__):
        raise error
    return fail


ESSAY = "Dataset not found or corrupted.\n\x1b[1mYou can use download=True. " + 99 * "etc. "


@pytest.mark.parametrize("name", DATA_SETS)
@pytest.mark.parametrize("error", [RuntimeError(ESSAY), ValueError(ESSAY), OSError(28, ESSAY),
                                   URLError(OSError(101, ESSAY)), OSError(13, ESSAY, "x/y")],
                         ids=["runtime", "value", "system", "network", "file"])
def test_what_is_wrong_with_a_set_is_one_short_line(name, error, monkeypatch, tmp_path):
    root = tmp_path / "a\nb"
    root.mkdir()
    shown = f"{tmp_path}/a\\nb"
    known = dataclasses.replace(DATA_SETS[name], needs_scipy=False, open=fails(error),
                                download=fails(error) if DATA_SETS[name].download else None)
    monkeypatch.setitem(DATA_SETS, name, known)
    lines = [refusal(open_split, name, str(root), "val", 10)]
    if known.download:
        lines.append(refusal(download, name, str(root)))
    for line in lines:
        assert line.isprintable() and shown in line
        assert len(line.replace(shown, "")) <= 200, line


@pytest.mark.parametrize("name", DATA_SETS)
@pytest.mark.parametrize("root", ["a\0b", 300 * "x", "/dev/null"])
def test_a_root_that_is_no_folder_is_one_line(name, root, monkeypatch, tmp_path, offline):
    if name == "shapes":                             # which lies in none
        return
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("scipy.io")
    for function, arguments in ((open_split, ("train", 0)), (open_split, ("val", 0)),
                                (download, ())):
        if function is open_split or DATA_SETS[name].download:
            line = refusal(function, name, root, *arguments)
            assert line.isprintable() and len(line) <= 200 + 2 * len(root)


def test_a_tilde_is_the_home_folder(monkeypatch, tmp_path):
    write_tree(tmp_path / "photos", "train/ant/1.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(open_split("image_folder", "~/photos", "train", 1)) == 1
