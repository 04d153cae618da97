"""What is said of a set of images: counts, copies of files, kinds; and only then."""

import struct

import numpy as np
import pytest
from PIL import Image

from vitinit.data.datasets import open_split
from vitinit.data.sources import LooseImages, read_as
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
        read_as(open_split("image_folder", str(tree), split, 0), 3, upright)
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
        "1 image to validate on and to train on is there more than once, byte by byte: "
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
        "class cow has 27 images and ant 5: read val_balanced, the mean over classes, beside top-1; "
        'data.sampling or loss.class_weights = "balanced" lets all count alike'
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
        "3 of 51 files looked at cannot be opened; train.py --dry-run --read-images lists all "
        "such files: bee/empty.png, bee/broken.png, bee/empty.png",
        "1 of 51 files looked at have a colour profile that is not sRGB, which is "
        "ignored: ant/p3.jpg",
        "2 of 51 files looked at have an alpha channel, and where they are transparent, "
        "unseen colours are trained on: bee/clear.png",
    ):
        assert words in cautions
    for path in (
        "train/bee/empty.png",
        "val/bee/broken.png",
        "val/ant/p3.jpg",
        "val/bee/clear.png",
    ):
        assert f"{tree}/{path}" in str(found).splitlines()  # images.txt
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


def test_a_caution_names_three_files_and_takes_two_lines_and_images_txt_has_all(tree):
    """Of ten equal files, and of many with names so long that fewer fit, or one in part."""
    copies = [tree / "train" / "ant" / f"copy {number}.png" for number in range(9)]
    for path in copies:
        path.write_bytes((tree / "train" / "ant" / "0.png").read_bytes())
    (ten,) = said(tree).cautions
    assert ten == (
        "1 image of one class is there more than once, byte by byte: ant/0.png = ant/copy 0.png = "
        "ant/copy 1.png and 7 more"
    )
    for length, shown in ((20, 1), (200, 1)):
        for number in range(5):
            (tree / "val" / "bee" / f"{number}{length * 'x'}.png").write_bytes(b"%d" % number)
        *_, unread = said(tree).cautions
        assert len(f"warning {unread}") <= 160 and unread.count(".png") == shown
    lines = str(said(tree)).splitlines()
    for path in [*copies, *(tree / "val" / "bee").glob("*x.png")]:
        assert str(path) in lines


def test_classes_whose_names_differ_in_case_alone_are_named(tmp_path):
    for name in ("Oak", "oak", "oak ", "elm"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (13, 13)).save(tmp_path / name / "a.png")
    source = open_split("image_folder", str(tmp_path), "train", 4)
    assert survey(source, source.part([]), SIDE).cautions[0] == (
        "2 classes differ from another in case or spaces alone, perhaps by mistake: "
        "Oak beside oak, Oak beside oak "
    )


def test_a_tiff_with_bands_of_unknown_meaning_is_named_and_has_no_alpha_channel(tree):
    file = tree / "train" / "ant" / "infrared.tif"
    Image.new("RGBA", (13, 17), (1, 2, 3, 4)).save(file)
    content, (called, not_called) = (
        file.read_bytes(),
        (struct.pack("<HHIHH", 338, 3, 1, meaning, 0) for meaning in (2, 0)),
    )
    file.write_bytes(content.replace(called, not_called))
    found = said(tree)
    assert "unknown bands 1; " in found.lines[1] and "0 with an alpha channel" in found.lines[1]
    assert found.cautions == [
        "1 of 22 files looked at are TIFFs with bands beside colours, none of them alpha, and are "
        "refused: ant/infrared.tif"
    ]


def test_dark_images_of_16_bits_are_named(tree):
    for number in range(5):
        dark = Image.fromarray(np.full((13, 17), 4095, np.uint16))
        dark.save(tree / "train" / "ant" / f"{number}.png")
    caution = said(tree).cautions[-1]
    assert caution.startswith("5 images of 16 bits were looked at") and len(caution) <= 152
