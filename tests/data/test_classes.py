"""Names of classes are texts, in one order, and matched by name whatever they look like."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitinit.data.classes import read_classes
from vitinit.data.datasets import open_split
from vitinit.data.images import DataError
from vitinit.data.sources import ImageFiles
from vitinit.programs.shared.orders import natural_order, order_taken

NUMBERS = [str(number) for number in range(12)]


def listed(root: Path, labels: list[str]) -> list[str]:
    """The classes of a list with an image of each label."""
    root.mkdir(exist_ok=True)
    lines = ["path,label"]
    for number, label in enumerate(labels):
        Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(root / f"{number}.png")
        lines.append(f"{number}.png,{label}")
    (root / "images.csv").write_text("\n".join(lines), encoding="utf-8")
    return open_split("image_list", str(root), "train", 0).classes


def test_lists_have_the_order_of_folders_and_labels_are_texts(tmp_path):
    for name in NUMBERS:
        (tmp_path / "folders" / name).mkdir(parents=True)
        Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(tmp_path / "folders" / name / "a.png")
    folders = open_split("image_folder", str(tmp_path / "folders"), "train", 12).classes
    assert listed(tmp_path / "list", NUMBERS) == folders == sorted(NUMBERS)
    for labels in (["1", "01", "٣", "3"], ["3", "٣", "01", "1"]):
        assert listed(tmp_path / "texts", labels) == ["01", "1", "3", "٣"]


def test_a_label_of_more_digits_than_python_converts_is_a_label(tmp_path):
    long = "1" * 4_301
    assert listed(tmp_path / "long", ["2", long]) == [long, "2"]
    assert natural_order([long, "2"]) == ["2", long]


def test_classes_take_another_order_with_their_images_if_they_are_the_same():
    source = ImageFiles(["a", "b", "c"], [0, 1, 2], ["1", "10", "2"])
    ordered = source.in_order(["1", "2", "10"])
    assert ordered.classes == ["1", "2", "10"] and ordered.labels.tolist() == [0, 2, 1]
    assert ordered.labels.dtype == np.int64 and source.labels.tolist() == [0, 1, 2]
    for others in ((), ["1", "2"], ["1", "2", "3"]):
        assert source.in_order(others) is source
    twice = ImageFiles(["a", "b"], [0, 1], ["crane", "crane"])
    assert twice.in_order(["crane", "crane"]) is twice


@pytest.mark.parametrize(
    "names, natural, first",
    [
        (NUMBERS, NUMBERS, ("output 2 ", "'10'", "'2'")),
        (["class10", "class2"], ["class2", "class10"], ("output 0 ", "'class10'", "'class2'")),
        (["Oak", "elm"], ["elm", "Oak"], ("output 0 ", "'Oak'", "'elm'")),
        (["a-1", "a1"], ["a1", "a-1"], ("output 0 ", "'a-1'", "'a1'")),
        (["a007", "a1"], ["a1", "a007"], ("output 0 ", "'a007'", "'a1'")),
        (["ant", "bee"], ["ant", "bee"], None),
        ([], [], None),
    ],
)
def test_the_orders_of_torchvision_and_timm_are_told_apart(names, natural, first):
    assert natural_order(names) == natural
    words = order_taken(sorted(names))
    assert all(word in words for word in first) if first else words == ""
    assert order_taken(natural) == "" or natural == sorted(names)  # a published set's own


def test_a_file_of_classes_has_a_name_per_line_in_any_encoding_of_folders(tmp_path):
    file = tmp_path / "names.txt"
    file.write_bytes("\ufeffgolden eagle\r\n10 \n".encode() + b"caf\xe9\n\n")
    assert read_classes(file) == ["golden eagle", "10", "caf\udce9"]
    with pytest.raises((DataError, OSError, ValueError), match="none.txt"):
        read_classes(tmp_path / "none.txt")
