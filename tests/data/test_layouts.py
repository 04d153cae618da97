"""Small sets in the layout of each published set are read as they were written, like by torchvision.

Errors name what is missing or broken.
"""

from __future__ import annotations

import json
import shutil
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

import numpy as np
import pytest
import scipy.io
import torch
import torchvision
from PIL import Image
from torch.utils.data import ConcatDataset

from vitinit.data import layouts
from vitinit.data.datasets import DATA_SETS, download, open_split
from vitinit.data.images import DataError

WNIDS = ["n03", "n01", "n02"]       # not sorted, as in the real file


class Written(NamedTuple):
    """What was written in a layout: for each split, images (H, W, 3) uint8 and their labels, in order."""

    classes: list[str]
    splits: dict[str, list[tuple[np.ndarray, int]]]


def noise(rng: np.random.Generator, height: int = 5, width: int = 7) -> np.ndarray:
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path: Path, pixels: np.ndarray) -> None:
    """Save as PNG, whatever the name of the file, so that exactly these pixels are read back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "PNG")


def some_labels(rng: np.random.Generator, count: int, num_classes: int) -> np.ndarray:
    """Random labels in which every class occurs."""
    return rng.permutation(np.arange(count) % num_classes)


def write_stl10(root: Path, rng: np.random.Generator, monkeypatch) -> Written:
    """Images column by column, labels counted from 1, and no unlabelled part."""
    folder = root / "stl10_binary"
    folder.mkdir()
    classes = [f"animal {number}" for number in range(10)]
    (folder / "class_names.txt").write_text("\n".join(classes) + "\n")
    splits = {}
    for split, part, count in (("train", "train", 13), ("val", "test", 11)):
        images = rng.integers(0, 256, (count, 96, 96, 3), dtype=np.uint8)
        labels = some_labels(rng, count, 10)
        (folder / f"{part}_X.bin").write_bytes(images.transpose(0, 3, 2, 1).tobytes())
        (folder / f"{part}_y.bin").write_bytes((labels + 1).astype(np.uint8).tobytes())
        splits[split] = list(zip(images, labels.tolist()))
    for kind in (layouts.LabelledSTL10, torchvision.datasets.STL10):
        for parts in ("train_list", "test_list"):
            names = [name for name, _ in getattr(layouts.LabelledSTL10, parts)]
            monkeypatch.setattr(kind, parts, [[name, None] for name in names])
    return Written(classes, splits)


def write_svhn(root: Path, rng: np.random.Generator, monkeypatch) -> Written:
    """Images (32, 32, 3, N) in a .mat file; the digit 0 has the label 10."""
    splits = {}
    for split, part, count in (("train", "train", 13), ("val", "test", 11)):
        images = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        labels = some_labels(rng, count, 10)
        scipy.io.savemat(root / f"{part}_32x32.mat", {
            "X": images.transpose(1, 2, 3, 0),
            "y": np.where(labels == 0, 10, labels)[:, None].astype(np.uint8)})
        splits[split] = list(zip(images, labels.tolist()))
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", {
        part: [f"http://127.0.0.1/{part}_32x32.mat", f"{part}_32x32.mat", None]
        for part in ("train", "test")})
    return Written([str(digit) for digit in range(10)], splits)


def write_food101(root: Path, rng: np.random.Generator, monkeypatch) -> Written:
    """Lists with classes in no particular order, and an image that is in no list."""
    folder = root / "food-101"
    (folder / "meta").mkdir(parents=True)
    classes, splits = ["apple_pie", "beet_salad", "waffles"], {}
    for split, part, counts in (("train", "train", {"waffles": 3, "apple_pie": 2, "beet_salad": 1}),
                                ("val", "test", {"beet_salad": 2, "waffles": 1, "apple_pie": 1})):
        listed, splits[split] = {}, []
        for name, count in counts.items():
            listed[name] = [f"{name}/{rng.integers(10**6)}" for _ in range(count)]
        for label, name in enumerate(classes):
            for image in listed[name]:
                splits[split].append((noise(rng), label))
                save(folder / "images" / f"{image}.jpg", splits[split][-1][0])
        (folder / "meta" / f"{part}.json").write_text(json.dumps(listed))
    save(folder / "images" / "waffles" / "unlisted.jpg", noise(rng))
    return Written(classes, splits)


def write_flowers102(root: Path, rng: np.random.Generator, monkeypatch) -> Written:
    """Images numbered from 1, in three parts, two of which are "train"."""
    folder = root / "flowers-102"
    folder.mkdir()
    labels = np.concatenate([some_labels(rng, count, 102) for count in (103, 107, 109)])
    numbers = 1 + rng.permutation(len(labels))
    images = [noise(rng) for _ in labels]
    for number, pixels in zip(numbers, images):
        save(folder / "jpg" / f"image_{number:05}.jpg", pixels)
    by_number = np.empty(len(labels), np.uint8)
    by_number[numbers - 1] = labels + 1
    scipy.io.savemat(folder / "imagelabels.mat", {"labels": by_number[None]})
    scipy.io.savemat(folder / "setid.mat", {
        "trnid": numbers[None, :103].astype(np.uint16),
        "valid": numbers[None, 103:210].astype(np.uint16),
        "tstid": numbers[None, 210:].astype(np.uint16)})
    monkeypatch.setattr(torchvision.datasets.Flowers102, "_file_dict", {
        "image": ("102flowers.tgz", None), "label": ("imagelabels.mat", None),
        "setid": ("setid.mat", None)})
    written = list(zip(images, labels.tolist()))
    return Written(list(torchvision.datasets.Flowers102.classes),
                   {"train": written[:210], "val": written[210:]})


def write_pets(root: Path, rng: np.random.Generator, monkeypatch) -> Written:
    folder = root / "oxford-iiit-pet"
    (folder / "annotations").mkdir(parents=True)
    breeds, splits = ["Abyssinian", "american_bulldog", "Sphynx"], {}
    for split, part, labels in (("train", "trainval", [2, 0, 1, 1, 2]), ("val", "test", [1, 0, 2])):
        lines, splits[split] = [], []
        for number, label in enumerate(labels):
            name = f"{breeds[label]}_{number + (100 if split == 'train' else 200)}"
            lines.append(f"{name} {label + 1} {1 + label % 2} {label + 1}")
            splits[split].append((noise(rng), label))
            save(folder / "images" / f"{name}.jpg", splits[split][-1][0])
        (folder / "annotations" / f"{part}.txt").write_text("\n".join(lines) + "\n")
    return Written(breeds, splits)


def write_tiny_imagenet(root: Path, rng: np.random.Generator, monkeypatch) -> Written:
    """Files with boxes beside the training images, one list for the validation split, one grey image."""
    (root / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    classes = sorted(WNIDS)
    splits = {"train": [], "val": []}
    for label, wnid in enumerate(classes):
        for number in range(2 + label):
            splits["train"].append((noise(rng), label))
            save(root / "train" / wnid / "images" / f"{wnid}_{number}.JPEG", splits["train"][-1][0])
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t4\t6\n")
        (root / "train" / wnid / "images" / "._hidden.JPEG").write_text("")
    lines = []
    for number, label in enumerate((1, 0, 2, 1, 0)):
        pixels = noise(rng)[..., :1].repeat(3, axis=2) if number == 3 else noise(rng)
        save(root / "val" / "images" / f"val_{number}.JPEG",
             pixels[..., 0] if number == 3 else pixels)
        lines.append(f"val_{number}.JPEG\t{classes[label]}\t0\t32\t44\t62")
        splits["val"].append((pixels, label))
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return Written(classes, splits)


WRITERS: dict[str, Callable[..., Written]] = {
    "stl10": write_stl10, "svhn": write_svhn, "food101": write_food101,
    "flowers102": write_flowers102, "pets": write_pets, "tiny_imagenet": write_tiny_imagenet}
DOWNLOADED = [name for name, data_set in DATA_SETS.items() if data_set.download]
WITH_SCIPY = [name for name, data_set in DATA_SETS.items() if data_set.needs_scipy]


@pytest.fixture
def write(tmp_path, monkeypatch) -> Callable[[str], Written]:
    return lambda name: WRITERS[name](tmp_path, np.random.default_rng(3), monkeypatch)


def refusal(function, *arguments) -> str:
    with pytest.raises(DataError) as error:
        function(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def theirs(name: str, root: Path, split: str):
    """torchvision's own data set for a split."""
    kinds = torchvision.datasets
    train = split == "train"
    if name == "flowers102":
        return ConcatDataset([kinds.Flowers102(root, split=part)
                              for part in (("train", "val") if train else ("test",))])
    if name == "pets":
        return kinds.OxfordIIITPet(root, split="trainval" if train else "test")
    kind = {"stl10": kinds.STL10, "svhn": kinds.SVHN, "food101": kinds.Food101}[name]
    return kind(root, split="train" if train else "test")


# ---------------------------------------------------------------------------------------------
# What is there
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_set_is_read_as_it_was_written(tmp_path, write, name, split):
    classes, splits = write(name)
    source = open_split(name, str(tmp_path), split, len(classes))
    assert source.classes == classes and len(source) == len(splits[split])
    assert source.labels.dtype == np.int64
    assert source.labels.tolist() == [label for _, label in splits[split]]
    for index, (pixels, _) in enumerate(splits[split]):
        image = source.image(index)
        assert image.dtype == torch.uint8
        assert np.array_equal(image.numpy(), pixels.transpose(2, 0, 1))


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("name", [name for name in WRITERS if name != "tiny_imagenet"])
def test_a_set_holds_the_images_and_labels_of_torchvisions(tmp_path, write, name, split):
    ours = open_split(name, str(tmp_path), split, len(write(name).classes))

    def fingerprints(images, labels) -> list[tuple[bytes, int]]:
        return sorted((np.ascontiguousarray(image).tobytes(), int(label))
                      for image, label in zip(images, labels))
    reference = [(np.asarray(image), label) for image, label in theirs(name, tmp_path, split)]
    assert fingerprints([ours.image(index).permute(1, 2, 0).numpy()
                         for index in range(len(ours))], ours.labels) == fingerprints(*zip(*reference))


@pytest.mark.parametrize("split", ["train", "val"])
def test_tiny_imagenet_equals_an_image_folder_that_its_files_were_moved_to(tmp_path, write, split):
    write("tiny_imagenet")
    ours = open_split("tiny_imagenet", str(tmp_path), split, 3)
    found = {ours.image(index).numpy().tobytes(): ours.classes[label]
             for index, label in enumerate(ours.labels)}
    for line in (tmp_path / "val" / "val_annotations.txt").read_text().splitlines():
        image, wnid = line.split("\t")[:2]
        (tmp_path / "val" / wnid).mkdir(exist_ok=True)
        shutil.move(tmp_path / "val" / "images" / image, tmp_path / "val" / wnid / image)
    (tmp_path / "val" / "images").rmdir()
    moved = open_split("image_folder", str(tmp_path), split, 3)
    assert moved.classes == ours.classes and len(moved) == len(ours) == len(found)
    assert found == {moved.image(index).numpy().tobytes(): moved.classes[label]
                     for index, label in enumerate(moved.labels)}


@pytest.mark.parametrize("name", ["stl10", "svhn"])
def test_images_in_memory_are_channels_last(tmp_path, write, name):
    write(name)
    images = open_split(name, str(tmp_path), "train", 10).images
    assert images.is_contiguous(memory_format=torch.channels_last)


def write_imagenet(root: Path, *folders: str) -> None:
    for number, folder in enumerate(folders):
        save(root / folder / "1.JPEG", noise(np.random.default_rng(number)))


def test_imagenet_is_train_and_val_of_wordnet_numbers(tmp_path):
    write_imagenet(tmp_path, "train/n00000002", "train/n00000001", "val/n00000001", "val/n00000002",
                   "val/n00000002/deeper", "test/ILSVRC")
    train, val = (open_split("imagenet", str(tmp_path), split, 2) for split in ("train", "val"))
    assert train.classes == val.classes == ["n00000001", "n00000002"]
    assert train.labels.tolist() == [0, 1] and val.labels.tolist() == [0, 1, 1]
    assert np.array_equal(train.image(0).permute(1, 2, 0).numpy(), noise(np.random.default_rng(1)))


# ---------------------------------------------------------------------------------------------
# What is missing or broken
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOWNLOADED + ["tiny_imagenet"])
def test_a_wrong_folder_is_answered_with_what_was_expected(tmp_path, name):
    holds = DATA_SETS[name].holds
    for folder, reason in ((tmp_path / "nowhere", "(no such folder)"), (tmp_path, "")):
        line = refusal(open_split, name, str(folder), "train", DATA_SETS[name].num_classes)
        assert line.startswith(f"{folder}: no complete {name} in it {reason}")
        assert line.endswith(f"; expected {holds}")


def test_files_of_another_set_under_the_right_names_are_damaged(tmp_path, write, monkeypatch):
    with monkeypatch.context() as small:
        write_stl10(tmp_path, np.random.default_rng(3), small)
    line = refusal(open_split, "stl10", str(tmp_path), "train", 10)
    assert "(a file is missing or damaged)" in line and "stl10_binary/" in line


@pytest.mark.parametrize("name, split, file", [
    ("stl10", "val", "stl10_binary/test_y.bin"), ("stl10", "train", "stl10_binary/class_names.txt"),
    ("svhn", "val", "test_32x32.mat"), ("food101", "val", "food-101/meta/test.json"),
    ("flowers102", "train", "flowers-102/setid.mat"),
    ("flowers102", "val", "flowers-102/imagelabels.mat"),
    ("pets", "train", "oxford-iiit-pet/annotations/trainval.txt"),
    ("tiny_imagenet", "train", "wnids.txt"), ("tiny_imagenet", "val", "val/val_annotations.txt")])
def test_a_set_without_one_of_its_files_is_not_complete(tmp_path, write, name, split, file):
    classes = write(name).classes
    (tmp_path / file).unlink()
    line = refusal(open_split, name, str(tmp_path), split, len(classes))
    assert line.startswith(f"{tmp_path}: no complete {name} in it (")
    assert f"{tmp_path / file}: No such file" in line or "missing or damaged" in line


@pytest.mark.parametrize("name, split, image", [
    ("food101", "train", "food-101/images/waffles/*"), ("flowers102", "val", "flowers-102/jpg/*"),
    ("pets", "train", "oxford-iiit-pet/images/*"), ("tiny_imagenet", "val", "val/images/*")])
def test_images_that_are_listed_but_missing_are_named_and_counted(tmp_path, write, name, split,
                                                                  image):
    classes, splits = write(name)
    count = len(open_split(name, str(tmp_path), split, len(classes)))
    paths = sorted(tmp_path.glob(image))
    paths[0].parent.rename(paths[0].parent.with_name("elsewhere"))
    line = refusal(open_split, name, str(tmp_path), split, len(classes))
    missing = 3 if name == "food101" else count
    assert line.startswith(f"{paths[0].parent}/") and ": no such image; " in line
    assert f"{missing} of the {count} that {tmp_path}" in line


PETS = "oxford-iiit-pet/annotations/test.txt"
FOOD = "food-101/meta/test.json"
TINY = "val/val_annotations.txt"


@pytest.mark.parametrize("name, file, content, words", [
    ("pets", PETS, "a_1 1 1 1\na_2 1 1\n", [", line 2: found 'a_2 1 1'", "Abyssinian_100 1 1 1"]),
    ("pets", PETS, "a_1 1 1 1\n\na_2 x 1 1\n", [", line 3: found 'a_2 x 1 1'"]),
    ("pets", PETS, "a_1 0 1 1\n", [", line 1: found 'a_1 0 1 1'"]),
    ("pets", PETS, "a_1 1 1 1\nb_1 1 1 1\n", [", line 2: found 'b_1 1 1 1'", "class 1 is a above"]),
    ("pets", PETS, b"\xff\xfe", ["expected text in UTF-8"]),
    ("food101", FOOD, '{"a": [', ["as JSON"]), ("food101", FOOD, '["a/1"]', ["as JSON"]),
    ("food101", FOOD, '{"a": 3}', ["as JSON"]),
    ("tiny_imagenet", TINY, "val_0.JPEG\tn01\t0\nval_1.JPEG n02\t0\n",
     [", line 2: found 'val_1.JPEG n02\\t0'", "wnids.txt"]),
    ("tiny_imagenet", TINY, "val_0.JPEG\tn09\t0\n", [", line 1: ", "n09"]),
    ("flowers102", "flowers-102/setid.mat", "no such format",
     ["expected a MATLAB file with the variable 'tstid'"]),
    ("flowers102", "flowers-102/imagelabels.mat", {"lables": [1]}, ["variable 'labels'"]),
    ("flowers102", "flowers-102/imagelabels.mat", {"labels": [1, 2]}, ["from 1 to the 2 of"])])
def test_a_broken_list_names_its_place(tmp_path, write, name, file, content, words):
    classes = write(name).classes
    if isinstance(content, dict):
        scipy.io.savemat(tmp_path / file, content)
    else:
        (tmp_path / file).write_bytes(content.encode() if isinstance(content, str) else content)
    line = refusal(open_split, name, str(tmp_path), "val", len(classes))
    start = "flowers-102/setid.mat" if "from 1 to" in words[0] else file
    assert line.startswith(str(tmp_path / start))
    for word in words:
        assert word in line


@pytest.mark.parametrize("name, file, old, new, empty", [
    ("pets", PETS, "american_bulldog_200 2", "Sphynx_202 3", "class 2"),
    ("tiny_imagenet", TINY, "n03", "n02", "n03")])
def test_a_class_without_images_in_a_split_is_named(tmp_path, write, name, file, old, new, empty):
    classes = write(name).classes
    path = tmp_path / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    line = refusal(open_split, name, str(tmp_path), "val", len(classes))
    assert line == f"{tmp_path}: class '{empty}' of {name} has no image in its val split"


def test_a_class_that_a_list_leaves_empty_is_named(tmp_path, write):
    write("food101")
    path = tmp_path / FOOD
    path.write_text(json.dumps(json.loads(path.read_text()) | {"waffles": []}))
    line = refusal(open_split, "food101", str(tmp_path), "val", 3)
    assert line == f"{tmp_path}: class 'waffles' of food101 has no image in its val split"


def test_a_wrong_class_count_says_whether_the_set_or_the_recipe_is_odd(tmp_path, write):
    write("flowers102")
    write("pets")
    line = refusal(open_split, "flowers102", str(tmp_path), "train", 37)
    assert line.endswith("102 classes found, but the recipe's data.num_classes is 37; "
                         "--set data.num_classes=102 if the data is right")
    line = refusal(open_split, "pets", str(tmp_path), "train", 37)
    assert line.endswith("--set data.num_classes=3 if a part of pets, which has 37, is meant")


@pytest.mark.parametrize("split, folders, start, words", [
    ("val", ["train/n00000001", "val"], "val: no class folders", "val/<wnid>/"),
    ("train", ["train", "val"], "train: no class folders", "train/<wnid>/"),
    ("val", ["train/n00000001", "test/n00000001"], "val: no such folder", "val/<wnid>/"),
    ("train", ["val/n00000001"], "train: no such folder", "train/<wnid>/"),
    ("train", ["train/tench", "val/tench"], "train/tench: not a class of ImageNet",
     "data.name=image_folder")])
def test_an_imagenet_of_another_form_is_told_its_form(tmp_path, split, folders, start, words):
    write_imagenet(tmp_path, *folders)
    line = refusal(open_split, "imagenet", str(tmp_path), split, 1)
    assert line.startswith(str(tmp_path / start)) and words in line


# ---------------------------------------------------------------------------------------------
# Downloads and scipy
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch):
    """Whatever torchvision would download fails as it does without a network."""
    def unreachable(*_, **__):
        raise URLError(OSError(101, "Network is unreachable"))
    monkeypatch.setattr(urllib.request, "urlopen", unreachable)


@pytest.mark.parametrize("name", DOWNLOADED)
def test_what_cannot_be_downloaded_says_what_to_put_where(tmp_path, offline, name):
    line = refusal(download, name, str(tmp_path))
    assert line.startswith(f"{name}: not complete in {tmp_path} and cannot be downloaded (")
    assert "Network is unreachable" in line and line.endswith(f"; put there {DATA_SETS[name].holds}")


@pytest.mark.parametrize("name", [name for name in WRITERS if name in DOWNLOADED])
def test_a_complete_set_is_not_downloaded_again(tmp_path, write, offline, name):
    write(name)
    before = sorted(tmp_path.rglob("*"))
    download(name, str(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


def test_svhn_is_complete_with_both_of_its_files(tmp_path, write, offline):
    write("svhn")
    (tmp_path / "test_32x32.mat").unlink()
    assert "Network is unreachable" in refusal(download, "svhn", str(tmp_path))


@pytest.mark.parametrize("name", WITH_SCIPY)
def test_without_scipy_its_sets_say_how_to_get_it_before_any_download(tmp_path, offline, monkeypatch,
                                                                      name):
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    expected = f"{name}: reading it needs scipy: pip install 'vitinit[datasets]'"
    assert refusal(download, name, str(tmp_path)) == expected
    assert refusal(open_split, name, str(tmp_path), "train", 10) == expected


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in WITH_SCIPY])
def test_all_other_sets_are_read_without_scipy(tmp_path, write, monkeypatch, name):
    classes = write(name).classes
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    assert len(open_split(name, str(tmp_path), "train", len(classes)))
