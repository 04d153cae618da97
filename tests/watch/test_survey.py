"""What is said of a set of images: counts, copies of files, kinds; and only then."""

import numpy as np
import pytest
from PIL import Image

from vitinit.data.datasets import open_split
from vitinit.data.sources import LooseImages, oriented
from vitinit.watch import survey as module
from vitinit.watch.survey import survey

SIDE = 11


@pytest.fixture
def tree(tmp_path):
    """train/ and val/ of three classes with 5 and 2 PNGs each, all of other bytes but one size."""
    random = np.random.default_rng(0)
    for split, count in (("train", 5), ("val", 2)):
        for label in ("ant", "bee", "cow"):
            (tmp_path / split / label).mkdir(parents=True)
            for number in range(count):
                image = Image.fromarray(random.integers(0, 256, (13, 17, 3), np.uint8))
                image.save(tmp_path / split / label / f"{number}.png", compress_level=0)
    return tmp_path


def said(tree, *, upright: bool = True, **options):
    sets = (
        oriented(open_split("image_folder", str(tree), split, 0), upright)
        for split in ("train", "val")
    )
    return survey(*sets, SIDE, **options)


def test_files_with_the_same_bytes_are_named_by_what_they_confuse(tree, monkeypatch):
    read, real = [], module.read_bytes
    monkeypatch.setattr(
        module, "read_bytes", lambda path, **limit: (read.append(path), real(path, **limit))[1]
    )
    assert said(tree).cautions == [] and read == []  # as large as each other, not the same
    copies = {
        "train/ant/0.png": ["train/ant/copy.png"],
        "train/bee/1.png": ["train/cow/1.png"],
        "train/cow/2.png": ["val/cow/0.png", "train/ant/2.png"],
    }
    for path, others in copies.items():
        for other in others:
            (tree / other).write_bytes((tree / path).read_bytes())
    (tree / "train" / "ant" / "long.png").write_bytes(b"of no other's size")
    for split, start in (("train", b"not"), ("val", b"the")):  # of one size, with one middle
        (tree / split / "bee" / "head.png").write_bytes(start + b" the same, but in its end")
    read.clear()
    found = said(tree)
    assert [caution for caution in found.cautions if "byte by byte" in caution] == [
        "1 image to validate on and to train on is there twice, byte by byte: "
        "ant/2.png = cow/2.png = cow/0.png",
        "1 image of several classes is there twice, byte by byte: bee/1.png = cow/1.png",
        "1 image of one class is there twice, byte by byte: ant/0.png = ant/copy.png",
    ]
    assert [[file.split for file in group] for group in found.copies] == [[0, 0], [0, 0, 1], [0, 0]]
    assert not any("long" in path for path in read)
    read.clear()
    assert said(tree, most=4).copies == [] and not read  # of a larger set no file is read


def test_classes_and_kinds_of_files_are_counted_and_mistakes_named(tree):
    for number in range(5, 27):
        Image.new("L", (19 + number, 29)).save(tree / "train" / "cow" / f"{number}.png")
    assert said(tree).lines[0] == "classes cow 27, ant 5, bee 5"
    assert said(tree).cautions[0] == (
        "class cow has 27 images and ant 5: read val_balanced, the mean over classes, beside top-1"
    )
    image, exif = Image.new("RGB", (23, 31)), Image.Exif()
    exif[0x0112] = 6
    image.save(tree / "val" / "ant" / "turned.jpg", exif=exif)
    exif[0x0112] = 0  # which turns nothing
    image.save(tree / "val" / "ant" / "p3.jpg", icc_profile=b"Display P3", exif=exif)
    image.save(tree / "val" / "ant" / "srgb.jpg", icc_profile="sRGB".encode("utf-16-be"))
    image.convert("RGBA").save(tree / "val" / "bee" / "opaque.png")
    Image.new("RGBA", (23, 31), (1, 2, 3, 4)).save(tree / "val" / "bee" / "clear.png")
    (tree / "val" / "bee" / "broken.png").write_bytes(b"nothing")
    for split in ("train", "val"):  # which are no copies
        (tree / split / "bee" / "empty.png").write_bytes(b"")
    found = said(tree)
    assert found.lines[1] == (
        "files   48 looked at: shorter side 13 to 29 px, median 23, longer side up to 45; RGB 24, "
        "L 22, RGBA 2; 1 turned by EXIF, 1 with a colour profile that is not sRGB, 2 with an alpha "
        "channel"
    )
    cautions = "\n".join(found.cautions[1:])
    assert "byte by byte" not in cautions
    for words in (
        "3 of 51 files looked at cannot be opened; --dry-run --read-images lists all "
        f"such files: {tree}/train/bee/empty.png, {tree}/val/bee/broken.png",
        "1 of 51 files looked at have a colour profile that is not sRGB, which is "
        f"ignored: {tree}/val/ant/p3.jpg",
        "2 of 51 files looked at have an alpha channel, and where they are transparent, "
        f"colours that nobody sees are trained on: {tree}/val/bee/clear.png",
    ):
        assert words in cautions
    assert "sideways" not in cautions and "enlarged" not in cautions
    (sideways,) = set(said(tree, upright=False).cautions) - set(found.cautions)
    assert (
        sideways.startswith("1 of 51 files looked at are stored sideways")
        and "--set data.apply_exif_orientation=true" in sideways
    )


def test_names_of_any_bytes_stay_on_their_lines(tree):
    odd = (tree / "train" / "ant").rename(tree / "train" / "a\nt")
    (tree / "val" / "ant").rename(tree / "val" / "a\nt")
    (odd / "0\n\udce9.png").write_bytes((odd / "0.png").read_bytes())
    found = said(tree)
    assert found.lines[0] == r"classes a\nt 6, bee 5, cow 5"
    assert found.cautions[0].endswith(r": a\nt/0.png = a\nt/0\n\udce9.png") or found.cautions[
        0
    ].endswith(r": a\nt/0\n\udce9.png = a\nt/0.png")
    assert len(str(found).splitlines()) == 6  # two, a caution, none, and two paths


def test_a_folder_without_classes_has_none_to_count(tree):
    (line,) = survey(LooseImages(tree / "train"), LooseImages(tree / "val"), SIDE).lines
    assert line.startswith("files ")


def test_images_that_are_much_smaller_than_views_are_named(tree):
    sets = [open_split("image_folder", str(tree), split, 0) for split in ("train", "val")]
    for side, named in ((26, False), (27, True)):
        assert ("--set data.image_size=13" in str(survey(*sets, side).cautions)) == named
