"""Small sets in each set's layout are read as they were written; what is wrong is one line."""

import fcntl
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import sys
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

import numpy as np
import pytest
import scipy.io
import torch
import torchvision
from PIL import Image
from refused import refused

from vitinit.base.messages import counted
from vitinit.data import datasets
from vitinit.data.datasets import (
    DATA_SETS,
    EVAL_SETS,
    download,
    imagenet_wnids,
    is_wnid,
    open_split,
)
from vitinit.data.folders import WITHOUT_VALIDATION
from vitinit.data.images import DataError
from vitinit.data.sources import ImagesInMemory
from vitinit.programs.shared.evaluated import EvaluatedSet


class Written(NamedTuple):
    """What was written: for each split, images (H, W, 3) uint8 and their labels, in order."""

    classes: list[str]
    splits: dict[str, list[tuple[np.ndarray, int]]]


def noise(rng: np.random.Generator, height: int = 5, width: int = 7) -> np.ndarray:
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path: Path, pixels: np.ndarray) -> np.ndarray:
    """Save as PNG, whatever the name of the file, so that exactly these pixels are read back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "PNG")
    return pixels


def some_labels(rng: np.random.Generator, count: int, num_classes: int) -> np.ndarray:
    """Random labels in which every class occurs."""
    return rng.permutation(np.arange(count) % num_classes)


def write_cifar(name: str, root: Path, rng: np.random.Generator, monkeypatch) -> Written:
    """Pickled batches, in which a row holds the red plane, the green and the blue."""
    fine = "fine_" if name == "cifar100" else ""
    folder = root / ("cifar-100-python" if fine else "cifar-10-batches-py")
    folder.mkdir()
    num_classes, splits, entries = int(name.removeprefix("cifar")), {}, {}

    def write(file: str, content: dict) -> list[str]:
        (folder / file).write_bytes(pickle.dumps(content, protocol=2))
        return [file, hashlib.md5((folder / file).read_bytes()).hexdigest()]

    for split, counts in (
        ("train", (107,) if fine else (2, 3, 5, 7, 11)),
        ("val", (num_classes + 3,)),
    ):
        splits[split], entries[split] = [], []
        for number, count in enumerate(counts):
            images = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
            labels = some_labels(rng, count, num_classes).tolist()
            entries[split].append(
                write(
                    f"{split}_{number}",
                    {
                        "data": images.transpose(0, 3, 1, 2).reshape(count, -1),
                        f"{fine}labels": labels,
                        "coarse_labels": [0] * count,
                    },
                )
            )
            splits[split] += zip(images, labels)
    classes = [f"class {number}" for number in range(num_classes)]
    meta = write("meta", {f"{fine}label_names": classes, "coarse_label_names": ["coarse"]})
    for attribute, value in (
        ("train_list", entries["train"]),
        ("test_list", entries["val"]),
        ("meta", dict(filename="meta", key=f"{fine}label_names", md5=meta[1])),
    ):
        monkeypatch.setattr(getattr(torchvision.datasets, name.upper()), attribute, value)
    return Written(classes, splits)


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
    kind = torchvision.datasets.STL10
    for parts in ("train_list", "test_list"):
        monkeypatch.setattr(kind, parts, [[name, None] for name, _ in getattr(kind, parts)])
    return Written(classes, splits)


def write_svhn(root: Path, rng: np.random.Generator, monkeypatch) -> Written:
    """Images (32, 32, 3, N) in a .mat file; the digit 0 has the label 10."""
    splits = {}
    for split, part, count in (("train", "train", 13), ("val", "test", 11)):
        images = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        labels = some_labels(rng, count, 10)
        scipy.io.savemat(
            root / f"{part}_32x32.mat",
            {
                "X": images.transpose(1, 2, 3, 0),
                "y": np.where(labels == 0, 10, labels)[:, None].astype(np.uint8),
            },
        )
        splits[split] = list(zip(images, labels.tolist()))
    monkeypatch.setattr(
        torchvision.datasets.SVHN,
        "split_list",
        {
            part: [f"http://127.0.0.1/{part}_32x32.mat", f"{part}_32x32.mat", None]
            for part in ("train", "test")
        },
    )
    return Written([str(digit) for digit in range(10)], splits)


def write_food101(root: Path, rng: np.random.Generator, monkeypatch) -> Written:
    """Lists with classes in no particular order, and an image that is in no list."""
    folder = root / "food-101"
    (folder / "meta").mkdir(parents=True)
    classes, splits = ["apple_pie", "beet_salad", "waffles"], {}
    for split, part, counts in (
        ("train", "train", {"waffles": 3, "apple_pie": 2, "beet_salad": 1}),
        ("val", "test", {"beet_salad": 2, "waffles": 1, "apple_pie": 1}),
    ):
        listed, splits[split] = {}, []
        for name, count in counts.items():
            listed[name] = [f"{name}/{rng.integers(10**6)}" for _ in range(count)]
        for label, name in enumerate(classes):
            splits[split] += [
                (save(folder / "images" / f"{image}.jpg", noise(rng)), label)
                for image in listed[name]
            ]
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
    scipy.io.savemat(
        folder / "setid.mat",
        {
            "trnid": numbers[None, :103].astype(np.uint16),
            "valid": numbers[None, 103:210].astype(np.uint16),
            "tstid": numbers[None, 210:].astype(np.uint16),
        },
    )
    monkeypatch.setattr(
        torchvision.datasets.Flowers102,
        "_file_dict",
        {
            "image": ("102flowers.tgz", None),
            "label": ("imagelabels.mat", None),
            "setid": ("setid.mat", None),
        },
    )
    written = list(zip(images, labels.tolist()))
    return Written(
        list(torchvision.datasets.Flowers102.classes),
        {"train": written[:210], "val": written[210:]},
    )


def write_pets(root: Path, rng: np.random.Generator, monkeypatch) -> Written:
    folder = root / "oxford-iiit-pet"
    (folder / "annotations").mkdir(parents=True)
    breeds, splits = ["Abyssinian", "american_bulldog", "Sphynx"], {}
    for split, part, labels in (("train", "trainval", [2, 0, 1, 1, 2]), ("val", "test", [1, 0, 2])):
        lines, splits[split] = [], []
        for number, label in enumerate(labels):
            name = f"{breeds[label]}_{number + (100 if split == 'train' else 200)}"
            lines.append(f"{name} {label + 1} {1 + label % 2} {label + 1}")
            splits[split].append((save(folder / "images" / f"{name}.jpg", noise(rng)), label))
        (folder / "annotations" / f"{part}.txt").write_text("\n".join(lines) + "\n")
    return Written(breeds, splits)


def write_tiny_imagenet(root: Path, rng: np.random.Generator, monkeypatch) -> Written:
    """Files with boxes beside the training images, a list for validation, one grey image."""
    classes = ["n01", "n02", "n03"]
    splits = {"train": [], "val": []}
    for label, wnid in enumerate(classes):
        images = root / "train" / wnid / "images"
        splits["train"] += [
            (save(images / f"{wnid}_{number}.JPEG", noise(rng)), label)
            for number in range(2 + label)
        ]
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t4\t6\n")
        (images / "._hidden.JPEG").write_text("")
    lines = []
    for number, label in enumerate((1, 0, 2, 1, 0)):
        pixels = noise(rng)[..., :1].repeat(3, axis=2) if number == 3 else noise(rng)
        save(
            root / "val" / "images" / f"val_{number}.JPEG",
            pixels[..., 0] if number == 3 else pixels,
        )
        lines.append(f"val_{number}.JPEG\t{classes[label]}\t0\t32\t44\t62")
        splits["val"].append((pixels, label))
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return Written(classes, splits)


WRITERS: dict[str, Callable[..., Written]] = {
    "cifar10": partial(write_cifar, "cifar10"),
    "cifar100": partial(write_cifar, "cifar100"),
    "stl10": write_stl10,
    "svhn": write_svhn,
    "food101": write_food101,
    "flowers102": write_flowers102,
    "pets": write_pets,
    "tiny_imagenet": write_tiny_imagenet,
}


@pytest.fixture
def write(tmp_path, monkeypatch) -> Callable[[str], Written]:
    return lambda name: WRITERS[name](tmp_path, np.random.default_rng(3), monkeypatch)


@pytest.fixture
def offline(monkeypatch):
    """Whatever torchvision would download fails as it does without a network."""

    def unreachable(*_, **__):
        raise URLError(OSError(101, "Network is unreachable"))

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)


refusal = partial(refused, DataError)


@pytest.mark.parametrize("name", WRITERS)
def test_a_set_is_read_as_it_was_written(tmp_path, write, name, offline):
    classes, splits = write(name)
    for split, written in splits.items():
        source = open_split(name, str(tmp_path), split, len(classes))
        assert source.classes == classes and source.left_out == ""
        assert source.labels.dtype == np.int64 and len(source) == len(written)
        assert source.labels.tolist() == [label for _, label in written]
        for index, (pixels, _) in enumerate(written):
            image = source.image(index)
            assert image.dtype == torch.uint8
            assert np.array_equal(image.permute(1, 2, 0).numpy(), pixels)
        if isinstance(source, ImagesInMemory):
            assert source.stored.is_contiguous(memory_format=torch.channels_last)
    before = sorted(tmp_path.rglob("*"))
    download(name, str(tmp_path))  # it is complete, so nothing is downloaded
    assert sorted(tmp_path.rglob("*")) == before


# Image folders, ImageNet and its other test sets ----------------------------------------------
def write_folders(root: Path, *names: str) -> Path:
    """An image in each of these files, of its own colours."""
    for number, name in enumerate(names):
        save(root / name, noise(np.random.default_rng(number)))
    return root


def test_an_image_folder_is_train_and_val_or_test_or_one_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for one, second in (("one", "val"), ("two", "test"), ("three", None)):
        names = [f"{one}/train/{name}" for name in ("ant/a.png", "bee/b.png", "bee/c/d.png")]
        names += [f"{one}/{second}/{name}" for name in ("bee/e.png", "ant/f.png")] if second else []
        write_folders(tmp_path, *names)
        train = open_split("image_folder", f"~/{one}", "train", 2)
        assert train.classes == ["ant", "bee"] and train.labels.tolist() == [0, 1, 1]
        assert np.array_equal(train.image(1).permute(1, 2, 0), noise(np.random.default_rng(1)))
        if second:
            val = open_split("image_folder", f"~/{one}", "val", 2)
            assert val.labels.tolist() == [0, 1]
            assert np.array_equal(val.image(0).permute(1, 2, 0), noise(np.random.default_rng(4)))
    write_folders(tmp_path, "two/val/ant/z.png", "two/val/bee/z.png", "alone/ant/a.png")
    assert "two/val" in open_split("image_folder", "~/two", "val", 0).paths[0]  # before test/
    assert len(open_split("image_folder", "~/alone", "train", 0)) == 1
    for root, whole in (("three", "three/train"), ("alone", "alone")):
        assert refusal(open_split, "image_folder", f"~/{root}", "val", 0) == (
            f"{tmp_path}/{root}: no val/ or test/ in it; {WITHOUT_VALIDATION} a folder of classes "
            f"by --data image_folder={tmp_path}/{whole}"
        )


@pytest.mark.parametrize(
    "train, val, unused",
    [
        ("Train", "Valid", ["masks", "old", "test"]),
        ("training", "validation", ["TESTING"]),
        ("TRAINING", "VAL", ["x"]),
        ("Train", "dev", ["Testing"]),
        ("Training", "test", []),
    ],
)
def test_splits_go_by_any_of_their_names_and_others_are_said(tmp_path, train, val, unused):
    write_folders(
        tmp_path,
        *(f"{split}/{name}/a.png" for split in [train, val, *unused] for name in ("ant", "bee")),
    )
    names = ", ".join(f"{name}/" for name in unused)
    for split, name in (("train", train), ("val", val)):
        source = open_split("image_folder", str(tmp_path), split, 2)
        assert {Path(path).parents[1] for path in source.paths} == {tmp_path / name}
        assert source.left_out == (
            f"left out: {counted(len(unused), 'folder')} in {tmp_path}: {names}" if unused else ""
        )
    (tmp_path / "train").symlink_to(train)  # for a program that reads it alone
    assert open_split("image_folder", str(tmp_path), "train", 2).left_out == source.left_out


# Folders in the root, each with images in ant/ and bee/, or, where it ends in a dot, of its own.
@pytest.mark.parametrize(
    "split, folders, line",
    [
        (
            "val",
            "train val validation",
            "val/ and validation/ are the same split, and in it are train/"
            ", val/, validation/; expected one",
        ),
        (
            "train",
            "a b",
            "a/, b/ look like splits, not classes: 2 hold ant/, bee/; expected the "
            "names train/, and val/ or test/; if they are classes, they belong into {}/train/",
        ),
        (
            "train",
            "a b c.",
            "a/, b/, c/ look like splits, not classes: 2 hold ant/, bee/; expected",
        ),
        (
            "train",
            "train2017. val2017.",
            "train2017/, val2017/ look like splits, not classes; expecte",
        ),
        ("train", "test val", "no train/ in it, but test/, val/; expected train/<class>/<image>"),
        (
            "train",
            "car. train. van.",
            "no class folders in train/, but car/, train/, van/; expected "
            "train/<class>/<image>; if all are classes, they belong into {}/train/ or {}/val/",
        ),
        (
            "val",
            "car. train. van.",
            "no val/ or test/ in it, but car/, train/, van/; expected train/",
        ),
        ("val", "test. train", "no class folders in test/; train.py needs none with --set "),
    ],
)
def test_a_folder_not_laid_out_as_splits_or_classes_is_one_line(tmp_path, split, folders, line):
    write_folders(
        tmp_path,
        *(
            f"{name.replace('.', '/')}{inner}a.png"
            for name in folders.split()
            for inner in ([""] if name[-1] == "." else ["/ant/", "/bee/"])
        ),
    )
    assert refusal(open_split, "image_folder", str(tmp_path), split, 0).startswith(
        f"{tmp_path}: {line.replace('{}', str(tmp_path))}"
    )


def test_folders_of_classes_may_have_what_does_not_make_them_splits(tmp_path):
    """An image beside them, folders of their own, or one folder of the same name."""
    for number, names in enumerate(
        (
            ["a/x/1.png", "a/y/1.png", "a/z.png", "b/x/1.png", "b/y/1.png"],
            ["a/x/1.png", "a/y/1.png", "b/y/1.png", "b/z/1.png"],
            ["a/x/1.png", "a/y/1.png", "b/x/1.png", "b/y/1.png", "c/1.png", "d/1.png"],
            ["train_station/1.png", "trainer/1.png"],
        )
    ):
        write_folders(tmp_path / str(number), *names)
        source = open_split("image_folder", str(tmp_path / str(number)), "train", 0)
        assert len(source) == len(names) and source.left_out == ""


# What is missing or wrong of train/ant, train/bee, val/ant and val/bee, each with an image a.png.
@pytest.mark.parametrize(
    "name, split, names, line",
    [
        (
            "image_folder",
            "train",
            ["train/a.png", "train/.hidden/b.png"],
            "/train: no class folders in it; expected",
        ),
        (
            "image_folder",
            "train",
            ["train/ant/a.png", "train/bee/b.txt"],
            "/train/bee: no image in this class; expected",
        ),
        (
            "image_folder",
            "val",
            ["train/ant/a.png", "val/ant/a.png", "val/bee/a.png"],
            ": class 'bee' is in val/ and not in train/; expected images to train on, or none",
        ),
        ("image_folder", "train", ["train/ant/a.png"], ": 1 classes found, and 2 expected; --set"),
        (
            "imagenet",
            "val",
            ["train/n00000001/a.png", "test/n00000001/a.png"],
            ": neither val/ nor ILSVRC2012_img_val.tar in it",
        ),
        (
            "imagenet",
            "val",
            ["train/n00000001/a.png", "val/n00000002/a.png"],
            ": class 'n00000002' is",
        ),
        (
            "imagenet",
            "val",
            [
                f"{folder}/a.png"
                for folder in ("train/n00000001", "train/n00000002", "val/n00000002")
            ],
            ": class 'n00000001' is in train/ and not in val/; ImageNet has",
        ),
        ("imagenet", "train", ["train/tench/a.png"], "/train/tench: not a class of ImageNet"),
    ],
)
def test_what_is_wrong_with_an_image_folder_is_one_line(tmp_path, name, split, names, line):
    write_folders(tmp_path, *names)
    assert refusal(open_split, name, str(tmp_path), split, 2).startswith(f"{tmp_path}{line}")


@pytest.mark.parametrize("held", ["val", "test"])
def test_images_to_validate_on_have_the_numbers_of_the_classes_to_train_on(tmp_path, held):
    """Also if some classes have none; they are measured as images in a list are."""
    write_folders(
        tmp_path, *(f"train/{name}/a.png" for name in ("ant", "bee", "cat", "dog", "eel"))
    )
    write_folders(tmp_path, *(f"{held}/{name}/{name}.png" for name in ("bee", "eel")))
    source = open_split("image_folder", str(tmp_path), "val", 5)
    assert source.classes == ["ant", "bee", "cat", "dog", "eel"]
    assert [Path(path).stem for path in source.paths] == ["bee", "eel"]
    assert source.labels.tolist() == [1, 4] and source.class_images.tolist() == [0, 1, 0, 0, 1]


def test_imagenet_is_train_and_val_of_wordnet_numbers(tmp_path):
    write_folders(
        tmp_path,
        "train/n00000002/a.JPEG",
        "train/n00000001/b.JPEG",
        "val/n00000001/c.JPEG",
        "val/n00000002/d.JPEG",
        "test/ILSVRC/e.JPEG",
    )
    train, val = (open_split("imagenet", str(tmp_path), split, 2) for split in ("train", "val"))
    assert train.classes == val.classes == ["n00000001", "n00000002"]
    assert train.labels.tolist() == val.labels.tolist() == [0, 1]
    assert np.array_equal(train.image(0).permute(1, 2, 0), noise(np.random.default_rng(1)))
    assert refusal(EvaluatedSet("imagenet", str(tmp_path)).open) == (
        f"{tmp_path}: 2 classes found, and 1000 expected; --set data.num_classes=0, or eval.py "
        f"--data image_folder={tmp_path}, takes those that are there"
    )
    assert EvaluatedSet("image_folder", str(tmp_path)).open().classes == train.classes


def test_imagenets_classes_have_the_numbers_that_everyone_gives_them():
    wnids = imagenet_wnids()
    assert len(set(wnids)) == 1000 and wnids == sorted(wnids) and all(map(is_wnid, wnids))
    assert [wnids[index] for index in (0, 207, 281, 999)] == [
        "n01440764",
        "n02099601",
        "n02123045",
        "n15075141",
    ]  # tench, retriever, tabby, tissue


@pytest.mark.parametrize(
    "name, folders",
    [("imagenet_v2", list(map(str, range(1000)))), ("imagenet_a", imagenet_wnids()[4::5])],
)
def test_each_image_of_a_test_set_has_its_synset(tmp_path, name, folders):
    """Also where numbered folders lie in alphabetical order, in which 10 comes after 1."""
    for folder in folders:
        index = int(folder) if folder.isdecimal() else imagenet_wnids().index(folder)
        content = io.BytesIO()
        Image.new("L", (3, 2), index % 251).save(content, "PNG")
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.jpeg").write_bytes(content.getvalue())
    (tmp_path / "README.txt").write_text("no class")
    source = EvaluatedSet(name, str(tmp_path)).open()
    assert len(source) == len(folders) == EVAL_SETS[name].num_classes == len(source.classes)
    for index in range(0, len(source), 37):
        number = imagenet_wnids().index(source.classes[source.labels[index]])
        assert source.image(index).unique().tolist() == [number % 251]
    other = {"imagenet_v2": "imagenet_sketch", "imagenet_a": "imagenet_v2"}[name]
    assert refusal(EvaluatedSet(other, str(tmp_path)).open).startswith(
        f"{tmp_path}/0: not a class of ImageNet, such as n01440764"
        if name == "imagenet_v2"
        else f"{tmp_path}: no complete imagenet_v2 in it ("
    )
    (tmp_path / folders[-1] / "0.jpeg").unlink()
    (tmp_path / folders[-1]).rmdir()
    assert refusal(EvaluatedSet(name, str(tmp_path)).open).startswith(
        f"{tmp_path}: {len(folders) - 1} classes found, and {len(folders)} expected"
    )


# What is missing or damaged -------------------------------------------------------------------
@pytest.mark.parametrize(
    "name, split, file",
    [
        ("cifar10", "val", "cifar-10-batches-py/val_0"),
        ("cifar100", "train", "cifar-100-python/meta"),
        ("stl10", "train", "stl10_binary/test_y.bin"),
        ("svhn", "val", "test_32x32.mat"),
        ("food101", "val", "food-101/meta/test.json"),
        ("flowers102", "train", "flowers-102/setid.mat"),
        ("pets", "train", "oxford-iiit-pet/annotations/trainval.txt"),
        ("tiny_imagenet", "val", "val/val_annotations.txt"),
    ],
)
def test_what_is_missing_or_damaged_is_answered_with_what_was_expected(
    tmp_path, write, monkeypatch, offline, name, split, file
):
    holds = DATA_SETS[name].holds
    assert refusal(open_split, name, str(tmp_path / "x"), split, 0) == (
        f"{tmp_path}/x: no such folder; {name} is {holds}"
    )
    (empty := tmp_path / "empty").mkdir()
    if DATA_SETS[name].torchvision:
        line = refusal(download, name, str(empty))
        assert line.startswith(f"{name}: not complete in {empty} and cannot be downloaded (")
        assert "Network is unreachable" in line and line.endswith(f"; put there {holds}")

    def is_incomplete(root: Path, *reasons: str) -> None:
        line = refusal(open_split, name, str(root), split, 0)
        assert line.startswith(f"{root}: no complete {name} in it (")
        assert line.endswith(f"; expected {holds}") and any(reason in line for reason in reasons)

    is_incomplete(empty, "")
    write(name)  # without checksums of .bin and .mat files
    if name in ("svhn", "flowers102"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "scipy.io", None)
            download(name, str(tmp_path))
            assert refusal(open_split, name, str(tmp_path), split, 0) == (
                f"{name}: reading it needs scipy: pip install 'vitinit[datasets]'"
            )
    if not file.endswith((".mat", ".bin")):
        (tmp_path / file).write_bytes(b"damaged")
        is_incomplete(tmp_path, "(a file is missing or damaged)")
    (tmp_path / file).unlink()
    is_incomplete(tmp_path, f"{tmp_path / file}: No such file", "(a file is missing or damaged)")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Dataset not found or corrupted.\n\x1b[1mYou can use " + 99 * "etc. "),
        OSError(28, "No space left on device"),
        URLError(OSError(101, "Network is unreachable")),
    ],
)
def test_what_is_wrong_with_a_set_is_one_short_line(error, monkeypatch, tmp_path):
    def fails(*_, **__):
        raise error

    root = tmp_path / "a\nb"
    root.mkdir()
    monkeypatch.setitem(DATA_SETS, "pets", DATA_SETS["pets"]._replace(open=fails))
    monkeypatch.setattr(datasets, "fetch", fails)
    for line in (
        refusal(open_split, "pets", str(root), "val", 10),
        refusal(download, "pets", str(root)),
    ):
        shown = f"{tmp_path}/a\\nb"
        assert shown in line and len(line.replace(shown, "")) <= 270, line


@pytest.mark.parametrize("root", ["a\0b", 300 * "x", "/dev/null"])
def test_a_root_that_is_no_folder_is_one_line(root):
    for name in DATA_SETS.keys() - {"shapes"}:  # which lies in none
        assert "no such folder" in refusal(open_split, name, root, "val", 0)


# Downloads ------------------------------------------------------------------------------------
def fetch(root: Path, asked, begun, go_on) -> None:
    """A process whose download appends its number to a file, unless the data is there already."""

    def lockf(*arguments: object, real=fcntl.lockf) -> None:
        asked.set()
        real(*arguments)

    def stub(name: str, folder: Path) -> None:
        begun.set()
        if not (folder / "data").exists():
            with open(folder / "downloads", "a") as log:
                log.write(f"{os.getpid()}\n")
            assert go_on.wait(60)
            (folder / "data").write_text("whole")

    fcntl.lockf = lockf
    datasets.fetch = stub
    download("cifar10", str(root))


def test_of_several_processes_one_downloads_and_the_next_goes_on_if_it_is_killed(tmp_path):
    root, fork = tmp_path / "not yet" / "there", multiprocessing.get_context("fork")

    def started():
        asked, begun, go_on = (fork.Event() for _ in range(3))
        process = fork.Process(target=fetch, args=(root, asked, begun, go_on), daemon=True)
        process.start()
        assert asked.wait(60)
        return process, begun, go_on

    first, begun, _ = started()
    assert begun.wait(60)
    second, begun, go_on = started()
    assert not begun.is_set()
    first.kill()
    assert begun.wait(60)
    third, begun, _ = started()
    assert not begun.is_set()
    go_on.set()
    assert begun.wait(60)
    for process in (second, third):
        process.join(60)
        assert process.exitcode == 0
    assert (root / "downloads").read_text() == f"{first.pid}\n{second.pid}\n"
    assert sorted(os.listdir(root)) == ["data", "downloads"]  # no lock is left


def test_a_folder_that_cannot_be_written_needs_no_lock(tmp_path, monkeypatch):
    (tmp_path / "file").touch()  # in the place of a folder
    seen = []
    monkeypatch.setattr(datasets, "fetch", lambda name, folder: seen.append(folder))
    download("cifar10", str(tmp_path / "file"))
    assert seen == [tmp_path / "file"]
