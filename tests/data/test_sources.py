"""Which files are images, how paths are stored, and which images are in parts of a training set."""

import io
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from pages import read_page
from PIL import Image, PngImagePlugin
from refused import refused
from torchvision.datasets.folder import make_dataset

from vitinit.base.keys import Purpose, keyed_generator
from vitinit.data import sources
from vitinit.data.classes import class_indices
from vitinit.data.datasets import open_split
from vitinit.data.folders import EXTENSIONS, OF_SYSTEMS, images_below, in_words
from vitinit.data.images import HEIF_REMEDY, DataError
from vitinit.data.sources import (
    HeldOut,
    ImageFiles,
    ImageFolder,
    ImagesInMemory,
    LooseImages,
    file_sizes,
    fingerprint,
    held_out_part,
    stratified_part,
)
from vitinit.recipe.files import load_recipe, overrides
from vitinit.runs import data


def tree(root: Path, *names: str) -> Path:
    """Create empty files under `root`; a name that ends in / is a folder."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).mkdir() if name.endswith("/") else (root / name).touch()
    return root


refusal = partial(refused, DataError)


def test_the_listing_is_torchvisions_but_for_hidden_files_and_folders_that_are_linked_to_twice(
    tmp_path,
):
    tree(
        tmp_path,
        "set/b/2.PNG",
        "set/b/10.jpg",
        "set/b/x y/1.Tiff",
        "set/b/x/1.pgm",
        "set/b/x.jpg/1.gif",
        "set/b/X/Y/z.JPEG",
        "set/a/1.bmp",
        "set/a/notes.txt",
        "set/a/jpg",
        "set/a/deep/er/3.ppm",
        "set/a/1.jpg.bak",
        "set/c-d/0.tif",
        "set/c/0.jpeg",
        "far/in/9.webp",
    )
    (tmp_path / "set" / "a" / os.fsdecode(b"caf\xe9.jpg")).touch()
    for link, target in (("set/e", "far"), ("set/a/far", "far/in"), ("set/b/l.png", "set/b/2.PNG")):
        (tmp_path / link).symlink_to(tmp_path / target)
    root = tmp_path / "set"
    classes = {name: label for label, name in enumerate(["a", "b", "c", "c-d", "e"])}
    expected = make_dataset(str(root), classes, extensions=EXTENSIONS)
    expected.remove((str(root / "a/far/9.webp"), 0))  # which is also e/in/9.webp
    tree(root, "a/.hidden.jpg", "a/.cache/1.jpg", "b/x/.y/1.png", ".d/1.jpg")
    (root / "b" / "x" / "back").symlink_to(root)  # torchvision's would have each image 41 times
    source = ImageFolder(root)
    assert list(zip(source.paths, source.labels)) == expected
    assert len(source) == 13 and source.classes == list(classes)


@pytest.mark.parametrize(
    "links, far, deep",
    [  # the classes of far/1.png, far/deep/2.png
        ({"a/x": "set/b", "a/y": "set/b", "b/x": "set/a", "b/y": "set/a"}, None, None),
        (
            {"b/x": "far", "a/deep/x": "far", "../far/y": "set/a", "../far/z": "set/b/deep"},
            "b",
            "b",
        ),
        ({"b/x": "far", "a/x": "far/deep"}, "b", "a"),
        ({"b/x": "far", "c": "far"}, "c", "c"),
    ],
)
def test_each_real_folder_is_read_once_as_of_its_own_class(tmp_path, monkeypatch, links, far, deep):
    """Or that the first link of the highest gives it, in whatever order the disk lists."""
    tree(
        tmp_path,
        "far/1.png",
        "far/deep/2.png",
        "set/a/3.png",
        "set/a/deep/4.png",
        "set/b/5.png",
        "set/b/deep/6.png",
    )
    for link, target in links.items():
        (tmp_path / "set" / link).symlink_to(tmp_path / target)
    expected = {"1": far, "2": deep, "3": "a", "4": "a", "5": "b", "6": "b"}
    walk = os.walk
    for step in (1, -1):
        monkeypatch.setattr(
            os,
            "walk",
            lambda *arguments, **how: (
                (parent, folders[::step], files[::step])
                for parent, folders, files in walk(*arguments, **how)
            ),
        )
        source = ImageFolder(tmp_path / "set")
        names = [source.classes[label] for label in source.labels]
        assert sorted(zip((Path(path).stem for path in source.paths), names)) == [
            item for item in expected.items() if item[1]
        ]


@pytest.mark.usefixtures("without_heif")
def test_a_folder_without_images_or_that_cannot_be_listed_is_one_line(tmp_path):
    tree(tmp_path, "a/1.png", "b/2.png")
    (tmp_path / "c").symlink_to("a")
    line = refusal(ImageFolder, tmp_path)
    assert line.startswith(f"{tmp_path / 'c'}: no image in this class; ")
    assert line.endswith(f"left out: 1 read elsewhere in {tmp_path}")
    tree(root := tmp_path / "root", "a/1.HEIF", "a/2.heif", "b/1.jpg")
    for line in (refusal(ImageFolder, root), refusal(LooseImages, root / "a", 3)):
        assert f"left out: 2 .heif in {root}" in line and line.endswith(HEIF_REMEDY)
    for folder in ("missing", "a/1.png", "x" * 300):
        for function in (ImageFolder, lambda path: LooseImages(path, 3)):
            assert refusal(function, tmp_path / folder).startswith(f"{tmp_path / folder}: ")


@pytest.mark.usefixtures("without_heif")
def test_the_lines_that_the_page_quotes_are_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree(
        tmp_path / "photos",
        "train/a/1.png",
        "val/a/1.png",
        "test/a/1.png",
        "masks/a/1.png",
        *(f"train/a/{number}.heic" for number in range(12)),
        *(f"train/a/{number}.mov" for number in range(3)),
    )
    said = open_split("image_folder", "photos", "train", 1).left_out
    page = read_page(Path(sources.__file__).with_name("README.md"))
    quoted = [code for code in page.code_spans() if code.startswith("left out: ")]
    assert len(quoted) == 2 and all(f"\n{line}" in f"\n{said}" for line in quoted)


@pytest.mark.usefixtures("without_heif")
def test_what_is_left_out_is_counted_by_suffix(tmp_path):
    tree(
        tmp_path,
        "a/1.jpg",
        "a/2.HEIC",
        "a/deep/3.heic",
        "a/4.mov",
        "b/1.png",
        "b/README",
        "b/.DS_Store",
        "b/.x/5.mov",
        "7.jpg",
        ".hidden.txt",
    )
    source = ImageFolder(tmp_path)
    assert source.left_out == (
        "left out: 2 .heic, 1 .jpg of no class, 1 .mov, 1 .x/, 1 without suffix in "
        f"{tmp_path}; {HEIF_REMEDY}"
    )
    assert source.part([1]).left_out == source.left_out  # held-out images are validated on
    images_below(tmp_path, found := Counter())
    assert found == Counter({".heic": 2, ".mov": 1, ".x/": 1, "without suffix": 1})
    assert in_words(Counter({".b\n": 5}), "x") == "left out: 5 .b in x"
    assert in_words(Counter(), "x") == ""


@pytest.mark.parametrize("name", [*sorted(OF_SYSTEMS), ".@__thumb", ".ipynb_checkpoints"])
def test_folders_that_systems_make_are_no_class_and_hold_no_images_and_are_counted(tmp_path, name):
    root = tree(
        tmp_path / "set",
        "a/1.png",
        "b/2.png",
        f"a/{name}/1.png/THUMB.jpg",
        f"b/deep/{name}/2.jpg",
        f"{name}/3.jpg",
        "b/Thumbs.db",
    )
    source = ImageFolder(root)
    assert source.classes == ["a", "b"] and [*map(os.path.basename, source.paths)] == [
        "1.png",
        "2.png",
    ]
    assert source.left_out == f"left out: 3 {name}/, 1 .db in {root}"
    loose = LooseImages(root)
    assert loose.paths == source.paths and loose.left_out == source.left_out
    tree(
        tmp_path / "split", "train/a/1.png", "val/a/1.png", f"{name}/1.png", f"train/{name}/a/1.png"
    )
    assert open_split("image_folder", str(tmp_path / "split"), "val", 1).left_out == ""


CAFE = "caf\u00e9", "cafe\u0301"  # the same to a reader


def test_folders_whose_composed_names_are_equal_are_one_class(tmp_path):
    """Images stay in the order of folders, by which runs began; macOS cannot hold both."""
    tree(tmp_path, f"{CAFE[0]}/1.png", f"{CAFE[1]}/2.png", "cafz/3.png")
    source = ImageFolder(tmp_path)
    assert source.classes == sorted(["cafz", CAFE[0]])
    named = {
        Path(path).name: source.classes[label] for path, label in zip(source.paths, source.labels)
    }
    assert named == {"1.png": CAFE[0], "2.png": CAFE[0], "3.png": "cafz"}
    assert [*map(os.path.basename, source.paths)] == ["2.png", "3.png", "1.png"]
    for split, (cafe, other) in {"train": CAFE, "val": CAFE[::-1]}.items():
        tree(tmp_path / "splits", f"{split}/{cafe}/1.png", f"{split}/{other}x/1.png")
        opened = open_split("image_folder", str(tmp_path / "splits"), "train", 2)
        assert opened.classes == [CAFE[0], f"{CAFE[0]}x"]
    assert open_split("image_folder", str(tmp_path / "splits"), "val", 2).classes == opened.classes
    for known, wanted in (CAFE, CAFE[::-1]):
        assert class_indices(["tea", known], [wanted, "tea"]) == [1, 0]


@pytest.mark.parametrize("split", ["valid", "TEST"])
def test_images_that_are_there_to_validate_on_are_named_if_others_are_held_out(tmp_path, split):
    names = [
        f"{part}/{kind}/{n}.png" for part in ("train", split) for kind in "ab" for n in range(3)
    ]
    tree(tmp_path, *names)
    rows = "".join(f"{name},{name[-7]},{name.partition('/')[0]}\n" for name in names)
    (tmp_path / "images.csv").write_text(f"path,label,split\n{rows}")
    for kind, there in (("image_folder", f"{split}/"), ("image_list", "6 images of images.csv")):
        sets = [f"data.name={kind}", f"data.root={tmp_path}"]
        for change, line, count in (
            ("data.held_out_per_class=1", "data.held_out_per_class", 2),
            ("data.held_out=0.5", "data.held_out", 4),
            ("data.held_out=0.0", "", 6),
            ("eval.every_epochs=0", "", 0),
        ):
            if line:
                line = f"left out: {there} in {tmp_path}, as {line} validates on images to train on"
            recipe = load_recipe("photos", overrides(sets=[*sets, change]))
            whole, _, held = data.open_sets(recipe)
            assert (whole.left_out, len(held)) == (line, count)


@pytest.mark.parametrize("name", ["labels.csv", "photos.tar", "1.png"])
def test_a_flat_folder_is_refused_with_what_is_in_it_and_the_ways(tmp_path, name):
    line = refusal(ImageFolder, tree(tmp_path, name))
    for words in (
        f"{tmp_path}: no class folders in it; expected {tmp_path}/<class>/<image>, with archives",
        "--set data.name=image_list reads images.csv, with the columns path and label",
        f"; left out: 1 {Path(name).suffix}",
    ):
        assert words in line


def test_heic_is_an_image_where_pillow_heif_reads_it(tmp_path, monkeypatch, without_heif):
    """Here a stub, whose images are PNGs after the first bytes of a HEIC."""

    def opened(file, name):
        return PngImagePlugin.PngImageFile(io.BytesIO(file.read()[12:]))

    def register():
        monkeypatch.setitem(Image.OPEN, "HEIF", (opened, lambda start: start[4:12] == b"ftypheic"))

    monkeypatch.setitem(sys.modules, "pillow_heif", Mock(register_heif_opener=register))
    tree(tmp_path, "a/1.jfif", "a/2.HEIC", "b/3.hif", "b/4.mov")
    for name in ("a/2.HEIC", "b/3.hif"):
        Image.new("RGB", (5, 3), "red").save(content := io.BytesIO(), "PNG")
        (tmp_path / name).write_bytes(b"\0\0\0\x18ftypheic" + content.getvalue())
    source = ImageFolder(tmp_path)
    assert [Path(path).name for path in source.paths] == ["1.jfif", "2.HEIC", "3.hif"]
    assert source.image(1)[0].eq(255).all() and source.image(2).shape == (3, 3, 5)
    assert source.left_out == f"left out: 1 .mov in {tmp_path}"
    (tmp_path / "a/2.HEIC").write_bytes(b"\0\0\0\x18ftypmif1")
    assert refusal(source.image, 1).endswith("HEIF)")  # not how to install


def test_loose_images_are_the_first_of_any_folders_and_have_one_class(tmp_path):
    tree(tmp_path, "b/2.png", "a/x/1.png", "3.png", ".hidden/4.png", "notes.txt", "empty/")
    source = LooseImages(tmp_path, 100)
    assert [Path(path).name for path in source.paths] == ["3.png", "1.png", "2.png"]
    assert source.labels.tolist() == [0, 0, 0] and len(LooseImages(tmp_path, 2)) == 2


def test_paths_come_back_as_they_were_from_one_tensor_of_their_bytes():
    names = [
        "/data/a/1.jpg",
        "b c/é.png",
        os.fsdecode(b"caf\xe9.jpg"),
        "b/" + 211 * "x",
        "日本.gif",
    ]
    source = ImageFiles(names, range(5), ["a"] * 5)
    assert source.paths == names and source.part(np.array([3, 0])).paths == [names[3], names[0]]
    assert source.text.nbytes == len("".join(names).encode("utf-8", "surrogateescape"))
    assert source.stored.nbytes == 5 * 16  # whatever the longest takes
    assert "caf\\udce9.jpg: cannot be read" in refusal(source.image, 2)


def test_a_fingerprint_is_of_paths_below_the_root_labels_and_classes(tmp_path):
    paths = [str(tmp_path / name) for name in ("a/1.png", "b/2.png")]
    one = fingerprint(ImageFiles(paths, [0, 1], ["a", "b"]), str(tmp_path))
    moved = [path.replace(str(tmp_path), "/elsewhere") for path in paths]
    assert fingerprint(ImageFiles(moved, [0, 1], ["a", "b"]), "/elsewhere") == one
    here = os.path.relpath(tmp_path)  # as typed; a list may state whole paths
    assert fingerprint(ImageFiles(paths, [0, 1], ["a", "b"]), here) == one
    others = [
        ImageFiles(paths[::-1], [0, 1], ["a", "b"]),
        ImageFiles(paths, [1, 0], ["a", "b"]),
        ImageFiles(paths, [0, 1], ["a", "c"]),
        ImageFiles(paths, [0, 1], ["a", os.fsdecode(b"caf\xe9")]),
    ]
    assert len({one, *(fingerprint(other, str(tmp_path)) for other in others)}) == 5


def test_a_digest_of_sizes_is_of_a_drawn_part_of_each_split(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SIZED", 7)
    both = [
        LooseImages(tree(tmp_path, *(f"{split}/{number}.png" for number in range(13))) / split, 13)
        for split in ("train", "val")
    ]
    began, changing = file_sizes(both, 3), [0, 0]
    for split, part in enumerate(both):
        for path in part.paths:
            Path(path).write_bytes(b"12345")
            changing[split] += file_sizes(both, 3) != began
            Path(path).write_bytes(b"")
    assert changing == [7, 7] and file_sizes(both, 3) == began
    assert file_sizes([numbered([2, 3])], 3) == {}


def test_each_class_is_found_at_its_index_in_the_model_and_one_with_too_few_images_named():
    known = ["ant", "bee", "cat", "dog", "eel"]
    assert class_indices(known, ["dog", "ant", "eel"]) == [3, 0, 4]
    assert refusal(class_indices, known, ["bee", "cow"]) == (
        "class 'cow' is none of the model's 5 classes (ant, bee, cat, dog, eel)"
    )
    assert class_indices(["crane", "crow", "crane"], ["crow"]) == [1]
    assert refusal(class_indices, ["crane", "crow", "crane"], ["crow", "crane"]).startswith(
        "class 'crane' is 2 of the model's 3 classes"
    )  # as two of ImageNet's are called
    for choose, least, held_out in (
        (partial(held_out_part, held_out=HeldOut(per_class=3)), 1, 3),
        (partial(stratified_part, images_per_class=2, held_out=HeldOut(per_class=2)), 2, 2),
    ):
        assert refusal(choose, numbered([7, 3])) == (
            f"class 'class 1' has 3 images, too few to train on {least} and hold out {held_out} of "
            "them; expected less of data.images_per_class or data.held_out_per_class"
        )
    without_classes = numbered([3])
    without_classes.classes = [""]
    assert refusal(held_out_part, without_classes, HeldOut(per_class=3)).startswith(
        "the folder has 3 images, too few to train on 1 and hold out 3"
    )


def numbered(sizes: Sequence[int]) -> ImagesInMemory:
    """Images in random order of class, with classes of these sizes; all pixels of image i are i."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    images = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 5)
    return ImagesInMemory(images, labels, [f"class {label}" for label in range(len(sizes))])


WITHOUT_TENSORS_OF_UINT8 = (torch.ones(7, 3, 5, 5), np.ones((7, 3, 5, 5), dtype=np.uint8))


@pytest.mark.parametrize("images", WITHOUT_TENSORS_OF_UINT8, ids=["float", "numpy"])
def test_images_in_memory_of_other_values_than_uint8_are_refused(images):
    message = "image 2: has torch.float32 values; expected a tensor of torch.uint8"
    wanted = message.replace("torch.float32", str(images.dtype))
    assert refusal(ImagesInMemory(images, [0] * 7, ["a"]).image, 2) == wanted


def test_parts_are_the_front_and_the_end_of_an_order_keyed_by_seed_and_class():
    """So a smaller part lies in every larger one, and no image is trained on and held out."""
    rng = np.random.default_rng(2)
    for seed in range(53):
        sizes, count = rng.integers(7, 30, 5), int(rng.integers(-3, 4))
        part_held = float(rng.choice([0.0, 1e-9, 0.125, 0.5, 0.75]))
        if part_held:
            sizes = np.append(sizes, [1, 2]) if count < 1 else sizes + 17
        held_out = HeldOut(part_held, 0 if part_held else int(rng.integers(5)), seed)
        share, source = float(rng.choice([1e-9, 0.25, 0.5, 0.99, 1.0])), numbered(sizes)
        limits = dict(share=share) if count < 1 else dict(images_per_class=count)
        front, end, own = [], [], []  # own: of another seed than the held-out images
        for label, size in enumerate(sizes):
            order, other = (
                np.flatnonzero(source.labels == label)[
                    keyed_generator(one, Purpose.SUBSET, label).permutation(size)
                ].tolist()
                for one in (seed, seed + 1)
            )
            held = held_out.per_class
            if part_held and size > 1:
                held = math.floor(Fraction(part_held) * int(size) + Fraction(1, 2))
                held = min(max(1, held), size - 1)
            rounded = math.floor(Fraction(share) * (len(order) - held) + Fraction(1, 2))
            kept = count if count > 0 else max(1, rounded)
            front += order[:kept]
            end += order[len(order) - held :]
            own += [index for index in other if index not in order[len(order) - held :]][:kept]
        for part, expected in (
            (
                stratified_part(source, held_out=held_out, seed=seed, **limits),
                sorted(front),
            ),
            (held_out_part(source, held_out), sorted(end)),
            (
                stratified_part(source, held_out=held_out, seed=seed + 1, **limits),
                sorted(own),
            ),
        ):
            assert [int(part.image(index)[0, 0, 0]) for index in range(len(part))] == expected
            assert part.labels.tolist() == source.labels[expected].tolist()
            assert part.classes == source.classes
    assert stratified_part(source) is source


def test_a_run_may_train_on_a_part_by_its_own_seed_of_which_an_init_reads_some_images_by_it():
    recipe = load_recipe(
        "quickstart",
        overrides(
            seed=7,
            sets=["data.subset_seed=run", "data.images_per_class=3", "data.held_out_per_class=2"],
        ),
    )
    whole, part = data.open_training_set(recipe.data, 7)
    assert part.stored.equal(
        stratified_part(whole, images_per_class=3, held_out=HeldOut(per_class=2), seed=7).stored
    )
    held_out = held_out_part(whole, HeldOut(per_class=2))
    assert data.open_held_out(recipe.data, whole).stored.equal(held_out.stored)
    read = keyed_generator(7, Purpose.INIT_IMAGES).permutation(30)[:5]
    views = torch.stack([part.image(index) for index in read])
    assert torch.equal(data.training_views(recipe, part, 5), data.as_input(views, recipe))
