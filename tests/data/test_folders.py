"""Which files are images, which links are followed, and what is not a regular file."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from torchvision.datasets.folder import make_dataset

from vitinit.data.datasets import ImageFolder, LooseImages
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
    expected = make_dataset(str(tmp_path), {name: 0 for name in ("a", "b", "c", "c-d")},
                            extensions=EXTENSIONS)
    tree(tmp_path, "a/.hidden.jpg", "a/.cache/1.jpg", "b/x/.y/1.png", ".d/1.jpg")
    source = ImageFolder(tmp_path)
    assert list(source.paths) == [path for path, _ in expected]
    assert len(source) == 12 and source.classes == ["a", "b", "c", "c-d"]


def test_pipes_sockets_and_devices_are_no_images(tmp_path, monkeypatch):
    tree(tmp_path, "a/1.jpg")
    os.mkfifo(tmp_path / "a" / "pipe.jpg")
    (tmp_path / "a" / "null.png").symlink_to("/dev/null")
    monkeypatch.chdir(tmp_path / "a")                # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.jpg")
        assert listed(tmp_path) == {"a": ["a/1.jpg"]}
        assert LooseImages(tmp_path, 9).paths == [str(tmp_path / "a" / "1.jpg")]


def test_what_is_left_out_is_counted_by_suffix(tmp_path):
    tree(tmp_path, "a/1.jpg", "a/2.HEIC", "a/deep/3.heic", "a/4.mov", "b/1.png", "b/README",
         "b/.DS_Store", "b/.x/5.mov", "7.jpg", "Thumbs.db", ".hidden.txt")
    (tmp_path / "b" / "link.mov").symlink_to(tmp_path / "a" / "4.mov")
    source = ImageFolder(tmp_path)
    assert len(source) == 2
    assert source.left_out == (
        "left out: 2 .heic, 2 .mov, 1 .db, 1 .jpg of no class, 1 without suffix in "
        f"{tmp_path}; {HEIF_REMEDY}")
    assert source.part([1]).left_out == source.left_out      # held-out images are validated on
    found = Counter()
    assert len(images_below(str(tmp_path), found)) == 3 and found[".jpg"] == 0
    assert ImageFolder(tree(tmp_path / "c", "a/1.jpg")).left_out == in_words(Counter(), "x") == ""
    many = Counter({f".{kind}": 3 for kind in range(9)} | {".b\n": 5})
    assert in_words(many, "x") == "left out: 5 .b, 3 .0, 3 .1, 3 .2, 3 .3, 3 .4, 12 others in x"


@pytest.mark.parametrize("suffix", [".heic", ".HEIF", ".avif"])
def test_a_folder_of_nothing_else_says_how_to_convert_it(tmp_path, suffix):
    tree(tmp_path, f"a/1{suffix}", f"a/2{suffix}", "b/1.jpg")
    for line in (refusal(ImageFolder, tmp_path), refusal(LooseImages, tmp_path / "a", 3)):
        assert f"left out: 2 {suffix.lower()} in {tmp_path}" in line and line.endswith(HEIF_REMEDY)


# Each case is a link in class b, and the images that the link adds to the class. The folder `out` is
# beside the data set.
@pytest.mark.parametrize("link, target, brought_in", [
    ("file.jpg", "../../out/5.jpg", ["file.jpg"]),
    ("others.jpg", "../a/0.jpg", ["others.jpg"]),    # a link to a file counts as a file
    ("folder", "../../out", ["folder/5.jpg", "folder/in/6.jpg"]),
    ("absolute", "OUT/in", ["absolute/6.jpg"]),
    ("folder.jpg", "../../out/in", ["folder.jpg/6.jpg"]),
    ("self", ".", []), ("loop", "..", []), ("higher", "../..", []), ("root", "/", []),
    ("sibling", "../a", []), ("inside", "../a/deep", []), ("own", "deep", []),
    ("through", "../../back", []), ("nowhere", "missing", []), ("in_a_ring", "in_a_ring", [])])
def test_links_are_followed_where_they_lead_out_of_the_data_set(tmp_path, link, target, brought_in):
    root = tree(tmp_path, "set/a/0.jpg", "set/a/deep/2.jpg", "set/b/1.jpg", "set/b/deep/3.jpg",
                "out/5.jpg", "out/in/6.jpg") / "set"
    (tmp_path / "back").symlink_to(root / "a")
    (root / "b" / link).symlink_to(target.replace("OUT", str(tmp_path / "out")))
    found = listed(root)
    assert found["a"] == ["a/0.jpg", "a/deep/2.jpg"]
    assert sorted(found["b"]) == sorted(["b/1.jpg", "b/deep/3.jpg"]
                                        + [f"b/{name}" for name in brought_in])


def test_a_ring_of_links_outside_of_the_data_set_ends(tmp_path):
    tree(tmp_path, "set/a/0.jpg", "out/1.jpg", "far/2.jpg")
    (tmp_path / "set/a/x").symlink_to(tmp_path / "out")
    (tmp_path / "set/a/y").symlink_to(tmp_path / "out")      # the same images a second time
    (tmp_path / "out/to_far").symlink_to(tmp_path / "far")
    (tmp_path / "far/to_out").symlink_to(tmp_path / "out")
    (tmp_path / "far/to_all").symlink_to(tmp_path)
    (tmp_path / "far/to_class").symlink_to(tmp_path / "set/a")
    found = [path.rpartition("/")[2] for path in listed(tmp_path / "set")["a"]]
    assert sorted(found) == ["0.jpg", "1.jpg", "2.jpg"]


def test_a_data_set_of_links_is_listed_as_the_folders_behind_them(tmp_path):
    tree(tmp_path, "all/cat/1.jpg", "all/dog/2.jpg", "more/cat/3.jpg", "set/")
    for name in ("cat", "dog"):
        (tmp_path / "set" / name).symlink_to(tmp_path / "all" / name)
    (tmp_path / "all/cat/more").symlink_to(tmp_path / "more/cat")
    (tmp_path / "all/cat/others").symlink_to(tmp_path / "all/dog")   # another class by its real path
    (tmp_path / "all/cat/up").symlink_to(tmp_path / "all")
    (tmp_path / "linked").symlink_to(tmp_path / "set")
    for root in (tmp_path / "set", tmp_path / "linked"):
        assert listed(root) == {"cat": ["cat/1.jpg", "cat/more/3.jpg"], "dog": ["dog/2.jpg"]}


@pytest.mark.parametrize("target", ["..", ".", "a", "a/deep", "../.."])
def test_a_class_that_is_a_link_back_is_refused(tmp_path, target):
    root = tree(tmp_path, "set/a/0.jpg", "set/a/deep/1.jpg") / "set"
    (root / "b").symlink_to(target)
    with pytest.raises(DataError, match="a link that leads back into") as error:
        ImageFolder(root)
    assert str(error.value).startswith(f"{root / 'b'}: ")


def test_a_link_to_an_image_that_is_gone_is_refused(tmp_path):
    tree(tmp_path, "a/1.jpg")
    (tmp_path / "a" / "2.jpg").symlink_to("/gone/2.jpg")
    (tmp_path / "a" / "notes").symlink_to("/gone/notes")     # no image by its name
    (tmp_path / "a" / ".#3.jpg").symlink_to("editor@host")   # hidden
    with pytest.raises(DataError) as error:
        ImageFolder(tmp_path)
    assert str(error.value) == f"{tmp_path}/a/2.jpg: a link to /gone/2.jpg, which is not there"


@pytest.mark.parametrize("folder", ["missing", "a/1.jpg", "x" * 300, "a\0b"])
def test_a_folder_that_cannot_be_listed_is_one_line(tmp_path, folder):
    tree(tmp_path, "a/1.jpg")
    for function in (ImageFolder, lambda path: LooseImages(path, 3)):
        with pytest.raises(DataError) as error:
            function(tmp_path / folder)
        assert str(error.value).isprintable() and str(error.value).startswith(f"{tmp_path}/")


@pytest.mark.parametrize("function", [class_folders,
                                      lambda path: images_below(str(path), Counter())])
def test_a_file_in_the_place_of_a_folder_is_one_line(tmp_path, function):
    tree(tmp_path, "a.jpg")
    with pytest.raises(DataError, match="a.jpg: Not a directory"):
        function(tmp_path / "a.jpg")
