"""Which files are images, which links are followed, and how paths are stored."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets.folder import make_dataset

from vitinit.data.sources import ImageFiles, ImageFolder, LooseImages
from vitinit.data.folders import EXTENSIONS, class_folders, images_below, in_words
from vitinit.data.images import HEIF_REMEDY, DataError


def tree(root: Path, *names: str) -> Path:
    """Create empty files under `root`; a name that ends in / is a folder."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).mkdir() if name.endswith("/") else (root / name).touch()
    return root


def refusal(function: Callable, *arguments: object) -> str:
    """The one line with which a DataError refuses."""
    with pytest.raises(DataError) as error:
        function(*arguments)
    assert str(error.value).isprintable()
    return str(error.value)


def listed(folder: Path) -> dict[str, list[str]]:
    """The paths of an ImageFolder's images, relative to the folder, by class."""
    source = ImageFolder(folder)
    found = {name: [] for name in source.classes}
    for path, label in zip(source.paths, source.labels):
        found[source.classes[label]].append(os.path.relpath(path, folder))
    return found


def test_the_listing_is_torchvisions_but_for_hidden_files(tmp_path):
    tree(tmp_path, "b/2.PNG", "b/10.jpg", "b/é.webp", "b/x y/1.Tiff", "b/x/1.pgm", "b/x.jpg/1.gif",
         "b/X/Y/z.JPEG", "a/1.bmp", "a/notes.txt", "a/jpg", "a/deep/er/3.ppm", "a/1.jpg.bak",
         "c-d/0.tif", "c/0.jpeg")
    (tmp_path / "a" / os.fsdecode(b"caf\xe9.jpg")).touch()
    expected = make_dataset(str(tmp_path), {"a": 0, "b": 1, "c": 2, "c-d": 3}, extensions=EXTENSIONS)
    tree(tmp_path, "a/.hidden.jpg", "a/.cache/1.jpg", "b/x/.y/1.png", ".d/1.jpg")
    source = ImageFolder(tmp_path)
    assert list(zip(source.paths, source.labels)) == expected
    assert len(source) == 12 and source.classes == ["a", "b", "c", "c-d"]


def test_what_is_left_out_is_counted_by_suffix(tmp_path):
    tree(tmp_path, "a/1.jpg", "a/2.HEIC", "a/deep/3.heic", "a/4.mov", "b/1.png", "b/README",
         "b/.DS_Store", "b/.x/5.mov", "7.jpg", "Thumbs.db", ".hidden.txt")
    (tmp_path / "b" / "link.mov").symlink_to(tmp_path / "a" / "4.mov")
    source = ImageFolder(tmp_path)
    assert source.left_out == (
        "left out: 2 .heic, 2 .mov, 1 .db, 1 .jpg of no class, 1 without suffix in "
        f"{tmp_path}; {HEIF_REMEDY}")
    assert source.part([1]).left_out == source.left_out      # held-out images are validated on
    found = Counter()
    assert len(images_below(str(tmp_path), found)) == 3 and found[".jpg"] == 0
    many = Counter({f".{kind}": 3 for kind in range(9)} | {".b\n": 5})
    assert in_words(many, "x") == "left out: 5 .b, 3 .0, 3 .1, 3 .2, 3 .3, 3 .4, 12 others in x"
    assert in_words(Counter(), "x") == ""


def test_a_folder_of_nothing_else_says_how_to_convert_it(tmp_path):
    tree(tmp_path, "a/1.HEIF", "a/2.heif", "b/1.jpg")
    for line in (refusal(ImageFolder, tmp_path), refusal(LooseImages, tmp_path / "a", 3)):
        assert f"left out: 2 .heif in {tmp_path}" in line and line.endswith(HEIF_REMEDY)


# Each case is a link in class b, and the images that the link adds to the class. The folder `out` is
# beside the data set.
@pytest.mark.parametrize("link, target, brought_in", [
    ("others.jpg", "../a/0.jpg", ["others.jpg"]),    # a link to a file counts as a file
    ("folder", "../../out", ["folder/5.jpg", "folder/in/6.jpg"]),
    ("loop", "..", []), ("root", "/", []), ("inside", "../a/deep", []), ("own", "deep", []),
    ("through", "../../back", []), ("nowhere", "missing", []), ("in_a_ring", "in_a_ring", [])])
def test_links_are_followed_where_they_lead_out_of_the_data_set(tmp_path, link, target, brought_in):
    root = tree(tmp_path, "set/a/0.jpg", "set/a/deep/2.jpg", "set/b/1.jpg", "set/b/deep/3.jpg",
                "out/5.jpg", "out/in/6.jpg") / "set"
    (tmp_path / "back").symlink_to(root / "a")
    (root / "b" / link).symlink_to(target)
    found = listed(root)
    assert found["a"] == ["a/0.jpg", "a/deep/2.jpg"]
    assert sorted(found["b"]) == sorted(["b/1.jpg", "b/deep/3.jpg"]
                                        + [f"b/{name}" for name in brought_in])


def test_a_ring_of_links_outside_of_the_data_set_ends(tmp_path):
    tree(tmp_path, "set/a/0.jpg", "out/1.jpg", "far/2.jpg")
    for link, target in (("set/a/x", "out"), ("set/a/y", "out"), ("out/to_far", "far"),
                         ("far/to_out", "out"), ("far/to_all", ""), ("far/to_class", "set/a")):
        (tmp_path / link).symlink_to(tmp_path / target)
    found = [path.rpartition("/")[2] for path in listed(tmp_path / "set")["a"]]
    assert sorted(found) == ["0.jpg", "1.jpg", "2.jpg"]


def test_a_data_set_of_links_is_listed_as_the_folders_that_they_lead_to(tmp_path):
    tree(tmp_path, "all/cat/1.jpg", "all/dog/2.jpg", "more/cat/3.jpg", "set/")
    for link, target in (("set/cat", "all/cat"), ("set/dog", "all/dog"), ("linked", "set"),
                         ("all/cat/more", "more/cat"), ("all/cat/others", "all/dog"),
                         ("all/cat/up", "all")):
        (tmp_path / link).symlink_to(tmp_path / target)
    for root in (tmp_path / "set", tmp_path / "linked"):
        assert listed(root) == {"cat": ["cat/1.jpg", "cat/more/3.jpg"], "dog": ["dog/2.jpg"]}


def test_a_class_that_is_a_link_back_is_refused(tmp_path):
    for number, target in enumerate(("..", "a", "a/deep")):
        root = tree(tmp_path / str(number), "set/a/0.jpg", "set/a/deep/1.jpg") / "set"
        (root / "b").symlink_to(target)
        assert refusal(ImageFolder, root) == f"{root / 'b'}: a link that leads back into {root}"


def test_a_folder_that_cannot_be_listed_is_one_line(tmp_path):
    tree(tmp_path, "a/1.jpg")
    for folder in ("missing", "a/1.jpg", "x" * 300):
        for function in (ImageFolder, class_folders, lambda path: LooseImages(path, 3)):
            assert refusal(function, tmp_path / folder).startswith(f"{tmp_path / folder}: ")


def test_paths_come_back_as_they_were_from_one_tensor_of_their_bytes():
    names = ["/data/a/1.jpg", "b c/é.png", os.fsdecode(b"caf\xe9.jpg"), "b/" + 211 * "x", "日本.gif"]
    source = ImageFiles(names, range(5), ["a"] * 5)
    assert source.paths == names and source.part(np.array([3, 0])).paths == [names[3], names[0]]
    assert source.encoded.shape == (5, 213) and source.encoded.dtype == torch.uint8
    assert "caf\\udce9.jpg: cannot be read" in refusal(source.image, 2)
    assert ImageFiles([], [], []).paths == []
