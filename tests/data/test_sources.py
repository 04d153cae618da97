"""Which files are images, how paths are stored, and which images are in parts of a training set."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets.folder import make_dataset

from vitinit.data.images import HEIF_REMEDY, DataError
from vitinit.data.sources import (EXTENSIONS, ImageFiles, ImageFolder, ImagesInMemory, LooseImages,
                                  class_indices, fingerprint, held_out_part, images_below, in_words,
                                  oriented, stratified_part)
from vitinit.keys import Stream, keyed_generator


def tree(root: Path, *names: str) -> Path:
    """Create empty files under `root`; a name that ends in / is a folder."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).mkdir() if name.endswith("/") else (root / name).touch()
    return root


def refusal(function: Callable, *arguments: object, **options: object) -> str:
    """The one line with which a DataError refuses."""
    with pytest.raises(DataError) as error:
        function(*arguments, **options)
    assert str(error.value).isprintable()
    return str(error.value)


# ---------------------------------------------------------------------------------------------
# Folders
# ---------------------------------------------------------------------------------------------


def test_the_listing_is_torchvisions_but_for_hidden_files(tmp_path):
    """With links to files and to folders, and a name that is not UTF-8."""
    tree(tmp_path, "set/b/2.PNG", "set/b/10.jpg", "set/b/x y/1.Tiff", "set/b/x/1.pgm",
         "set/b/x.jpg/1.gif", "set/b/X/Y/z.JPEG", "set/a/1.bmp", "set/a/notes.txt", "set/a/jpg",
         "set/a/deep/er/3.ppm", "set/a/1.jpg.bak", "set/c-d/0.tif", "set/c/0.jpeg", "far/in/9.webp")
    (tmp_path / "set" / "a" / os.fsdecode(b"caf\xe9.jpg")).touch()
    for link, target in (("set/e", "far"), ("set/a/far", "far/in"), ("set/b/l.png", "set/b/2.PNG")):
        (tmp_path / link).symlink_to(tmp_path / target)
    root = tmp_path / "set"
    classes = {name: label for label, name in enumerate(["a", "b", "c", "c-d", "e"])}
    expected = make_dataset(str(root), classes, extensions=EXTENSIONS)
    tree(root, "a/.hidden.jpg", "a/.cache/1.jpg", "b/x/.y/1.png", ".d/1.jpg")
    (root / "b" / "x" / "back").symlink_to(root)     # torchvision's would have each image 41 times
    source = ImageFolder(root)
    assert list(zip(source.paths, source.labels)) == expected
    assert len(source) == 14 and source.classes == list(classes)


def test_what_is_left_out_is_counted_by_suffix(tmp_path):
    tree(tmp_path, "a/1.jpg", "a/2.HEIC", "a/deep/3.heic", "a/4.mov", "b/1.png", "b/README",
         "b/.DS_Store", "b/.x/5.mov", "7.jpg", ".hidden.txt")
    source = ImageFolder(tmp_path)
    assert source.left_out == ("left out: 2 .heic, 1 .jpg of no class, 1 .mov, 1 without suffix in "
                               f"{tmp_path}; {HEIF_REMEDY}")
    assert source.part([1]).left_out == source.left_out      # held-out images are validated on
    found = Counter()
    assert len(images_below(tmp_path, found)) == 3 and found[".jpg"] == 0
    assert in_words(Counter({".b\n": 5}), "x") == "left out: 5 .b in x"
    assert in_words(Counter(), "x") == ""


def test_a_folder_of_nothing_else_says_how_to_convert_it(tmp_path):
    tree(tmp_path, "a/1.HEIF", "a/2.heif", "b/1.jpg")
    for line in (refusal(ImageFolder, tmp_path), refusal(LooseImages, tmp_path / "a", 3)):
        assert f"left out: 2 .heif in {tmp_path}" in line and line.endswith(HEIF_REMEDY)


def test_a_folder_that_cannot_be_listed_is_one_line(tmp_path):
    tree(tmp_path, "a/1.jpg")
    for folder in ("missing", "a/1.jpg", "x" * 300):
        for function in (ImageFolder, lambda path: LooseImages(path, 3)):
            assert refusal(function, tmp_path / folder).startswith(f"{tmp_path / folder}: ")


def test_loose_images_are_the_first_of_any_folders_and_have_one_class(tmp_path):
    tree(tmp_path, "b/2.png", "a/x/1.png", "3.png", ".hidden/4.png", "notes.txt", "empty/")
    source = LooseImages(tmp_path, 100)
    assert [Path(path).name for path in source.paths] == ["3.png", "1.png", "2.png"]
    assert source.labels.tolist() == [0, 0, 0] and len(LooseImages(tmp_path, 2)) == 2


def test_paths_come_back_as_they_were_from_one_tensor_of_their_bytes():
    names = ["/data/a/1.jpg", "b c/é.png", os.fsdecode(b"caf\xe9.jpg"), "b/" + 211 * "x", "日本.gif"]
    source = ImageFiles(names, range(5), ["a"] * 5)
    assert source.paths == names and source.part(np.array([3, 0])).paths == [names[3], names[0]]
    assert source.encoded.shape == (5, 213) and source.encoded.dtype == torch.uint8
    assert "caf\\udce9.jpg: cannot be read" in refusal(source.image, 2)


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
    Image.new("RGB", (7, 5)).save(tmp_path / "a.png", exif=exif)
    source = ImageFiles([str(tmp_path / "a.png")], [0], ["a"])
    stored = oriented(source, False)
    assert source.image(0).shape == (3, 7, 5) and stored.image(0).shape == (3, 5, 7)
    assert stored.part(np.array([0])).image(0).shape == (3, 5, 7)


def test_each_class_of_a_set_is_found_at_its_index_in_the_model():
    known = ["ant", "bee", "cat", "dog", "eel"]
    assert class_indices(known, ["dog", "ant", "eel"]) == [3, 0, 4]
    assert refusal(class_indices, known, ["bee", "cow"]) == (
        "class 'cow' is none of the model's 5 classes (ant, bee, … eel)")


# ---------------------------------------------------------------------------------------------
# Parts of a training set
# ---------------------------------------------------------------------------------------------


SIZES = [7, 11, 1, 30]


def numbered(sizes: list[int] = SIZES) -> ImagesInMemory:
    """Images in random order of class, with classes of these sizes; all pixels of image i are i."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    images = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 5)
    return ImagesInMemory(images, labels, [f"class {label}" for label in range(len(sizes))])


def members(source) -> list[int]:
    """The indices of the images of `numbered` that are in a part, in order."""
    return [int(source.image(index)[0, 0, 0]) for index in range(len(source))]


def sizes(source) -> list[int]:
    return np.bincount(source.labels, minlength=len(source.classes)).tolist()


def test_every_class_keeps_its_share_rounded_and_at_least_one_or_a_number():
    for share, expected in ((0.25, [2, 3, 1, 8]), (0.5, [4, 6, 1, 15]), (0.05, [1, 1, 1, 2]),
                            (1e-9, [1, 1, 1, 1]), (0.99, [7, 11, 1, 30])):
        assert sizes(stratified_part(numbered(), share=share)) == expected
    assert sizes(stratified_part(numbered([7, 11, 5, 30]), images_per_class=5)) == [5] * 4
    source = numbered()
    assert stratified_part(source) is source


def test_a_smaller_part_lies_in_every_larger_one():
    source = numbered([17, 11, 13, 30])
    shares = [members(stratified_part(source, share=share, seed=5))
              for share in (0.01, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)]
    counts = [members(stratified_part(source, images_per_class=count, seed=5))
              for count in (1, 2, 5, 7)]
    held = [members(held_out_part(source, images_per_class=count, seed=5)) for count in (1, 3, 8)]
    for nested in (shares, counts, held):
        for small, large in zip(nested, nested[1:]):
            assert set(small) < set(large)
    assert shares[0] == counts[0]
    assert held[1] != members(held_out_part(source, images_per_class=3, seed=4))


def test_a_part_has_the_first_images_of_an_order_keyed_by_seed_and_class():
    source = numbered()
    expected = []
    for label, size in enumerate(SIZES):
        order = keyed_generator(13, Stream.SUBSET, label).permutation(size)
        expected += np.flatnonzero(source.labels == label)[order[:math.ceil(size / 2)]].tolist()
    part = stratified_part(source, share=0.5, seed=13)
    assert members(part) == sorted(expected) and part.classes == source.classes
    assert part.labels.tolist() == source.labels[members(part)].tolist()


@pytest.mark.parametrize("limit, expected", [
    (dict(), [3, 7, 4, 26]), (dict(share=0.5), [2, 4, 2, 13]), (dict(images_per_class=3), [3] * 4)])
def test_what_is_held_out_is_in_no_part_that_is_trained_on(limit, expected):
    """And holding images out does not change which a number per class trains on."""
    source = numbered([7, 11, 8, 30])
    held = held_out_part(source, images_per_class=4, seed=3)
    part = stratified_part(source, held_out=4, seed=3, **limit)
    assert sizes(held) == [4] * 4 and sizes(part) == expected and held.classes == source.classes
    assert not set(members(held)) & set(members(part))
    assert members(held) == sorted(members(held))
    assert held.labels.tolist() == source.labels[members(held)].tolist()
    if "images_per_class" in limit:
        assert members(part) == members(stratified_part(source, seed=3, **limit))


@pytest.mark.parametrize("choose, least, held_out", [
    (lambda source: held_out_part(source, images_per_class=3), 1, 3),
    (lambda source: stratified_part(source, images_per_class=2, held_out=2), 2, 2)])
def test_a_class_with_too_few_images_is_named(choose, least, held_out):
    assert refusal(choose, numbered([7, 3])) == (
        f"class 'class 1' has 3 images, too few to train on {least} and hold out {held_out} of "
        "them; expected less of data.images_per_class or data.held_out_per_class")
