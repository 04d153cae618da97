"""Lists of images equal folders of them; what is wrong with a list is one line."""

import csv
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from refused import refused

from vitinit.base.files import FileError
from vitinit.data import lists
from vitinit.data.datasets import open_split
from vitinit.data.images import DataError
from vitinit.data.sources import HeldOut, Source, fingerprint, held_out_part, stratified_part

SPLITS = {"train": "train.csv", "val": "val.csv"}
refusal = partial(refused, (DataError, FileError), open_split, "image_list")


def write_lists(root: Path) -> dict[str, Source]:
    """Lists of an image folder's splits, which are returned."""
    splits = {split: open_split("image_folder", str(root), split, 3) for split in SPLITS}
    for split, source in splits.items():
        with open(root / SPLITS[split], "w", newline="", encoding="utf-8-sig") as file:
            rows = csv.writer(file, quoting=csv.QUOTE_ALL)
            rows.writerow([" Label", "of", "PATH"])
            rows.writerows(
                (f" {source.classes[label]} ", "a\nb", Path(path).relative_to(root))
                for path, label in zip(source.paths, source.labels)
            )
            rows.writerow([])
    return splits


def test_listed_images_are_those_of_folders_and_have_their_digest_wherever_they_lie(image_tree):
    folders = write_lists(image_tree)
    moved = image_tree.rename(image_tree.with_name("moved"))
    for split, folder in folders.items():
        source = open_split("image_list", str(moved), split, 3)
        assert fingerprint(source, str(moved)) == fingerprint(folder, str(image_tree))
        assert source.image(5).equal(open_split("image_folder", str(moved), split, 3).image(5))
    held_out, expected = (
        held_out_part(source, HeldOut(per_class=4, seed=7))
        for source in (open_split("image_list", str(moved), "train", 3), folders["train"])
    )
    assert [path.replace("/moved/", "/images/") for path in held_out.paths] == expected.paths


def test_one_list_has_splits_by_any_of_their_names_or_none(image_tree):
    (first, *others), file = sorted(image_tree.glob("*/*/0[0-4].png")), image_tree / "images.csv"
    lines = [
        f"{'../images/' * (number % 2)}{path.relative_to(image_tree)},{number % 12}"
        for number, path in enumerate(others)
    ]
    file.write_text("\n".join(["path,label", f"{first},0", *lines]))
    source = open_split("image_list", str(image_tree), "whole", 12)
    assert source.classes == sorted(map(str, range(12)))
    order = [source.classes.index(str(number)) for number in range(12)]
    assert source.labels[:13].tolist() == [0, *order]
    assert source.paths[0] == str(first) and len(source) == 30
    assert source.left_out == f"{image_tree}: no splits in it, so that all 30 images are evaluated"
    assert refusal(str(image_tree), "val", 0).startswith(
        f"{image_tree}: no images to validate on in images.csv; train.py needs none with --set "
    )
    words = [*12 * ["Training"], *12 * ["TEST"], *5 * ["dev"]]
    rows = ["path,label,split", *(f"{line},{word}" for line, word in zip(lines, words))]
    file.write_text("\n".join(rows[:25]))
    assert len(open_split("image_list", str(image_tree), "val", 12)) == 12  # those of the test
    file.write_text("\n".join(rows))
    for split, indices in (("train", range(12)), ("val", range(24, 29)), ("whole", range(24, 29))):
        source = open_split("image_list", str(image_tree), split, 12)
        assert [Path(path).resolve() for path in source.paths] == [
            others[index] for index in indices
        ]
        assert source.labels.tolist() == [order[index % 12] for index in indices]
        assert source.left_out == f"left out: 12 of the split test in {image_tree}"


# What is in train.csv, and in val.csv; the files a.png, b.png, c.mov and c.png are there.
@pytest.mark.parametrize(
    "train, val, line",
    [
        (
            "",
            None,
            "/train.csv: expected the columns path and label, each once, with commas between, in its "
            "first line; or path and labels; or path and two classes or more, with no | or ; in a name "
            "(em",
        ),
        (
            "path;label\na.png;a",
            None,
            "/train.csv: has semicolons between columns; expected commas: replace each ; by one (path;",
        ),
        ("path\tlabel\na.png\ta", None, "/train.csv: has tabs between columns; expected commas"),
        (
            "path,label\0",
            None,
            "/train.csv: is in UTF-16; expected UTF-8: iconv -f UTF-16 -t UTF-8",
        ),
        (
            "label,label\na.png,a",
            None,
            "/train.csv: expected the columns path and label, each once",
        ),
        (
            "path,label,Label\na.png,a,b",
            None,
            "/train.csv: expected the columns path and label, each",
        ),
        (
            'path,label\na.png ,a\n"b.png\n",b\n c.png,c',
            None,
            ": 3 lines cannot be used: train.csv:2 has no file a.png with a space beside its name: take "
            "it away, train.csv:4 has no file b.png with a space beside its name: take it away, "
            "train.csv:5 has no file c.png with a space",
        ),
        ('path,label\n"a.png,a\n', None, "/train.csv:2: unexpected end of data"),
        (
            "path,label\na.png\n,a\nb.png, \nb.png,b",
            "path,label\n../a,b.png,a",
            ": 4 lines cannot be used: train.csv:2 has 1 value, not 2, train.csv:3 has no path, train.csv:"
            "4 has no label, val.csv:2 has 3 values, not 2",
        ),
        (
            "path,label\na.png,a\nd.png,b\nx/d.png,b",
            None,
            ": 2 lines cannot be used: train.csv:3 has no file d.png, train.csv:4 has no file x/d.png",
        ),
        (
            "path,label\na.png,a\nb.png,b\n./a.png,a",
            "path,label\n{}/b.png,b",
            ": 2 lines cannot be used: train.csv:4 repeats train.csv:2, val.csv:2 repeats train.csv:3",
        ),
        (
            "path,label\na.png,a\nb.png,b",
            "path,label\nc.png,c",
            ": 1 line cannot be used: val.csv:2 has the label 'c', which none to train on has",
        ),
        (
            "path,label\na.png,a\nc.mov,b",
            None,
            ": no image of class 'b' can be read; left out: 1 .mov in {}",
        ),
        ("path,label", None, ": no images to train on in train.csv"),
        (None, None, ": no list in it; expected train.csv and val.csv, or images.csv alone"),
        (None, "path,label\na.png,a", ": no images to train on in val.csv"),
    ],
)
def test_what_is_wrong_with_a_list_is_one_line(tmp_path, train, val, line):
    for name in ("a.png", "b.png", "c.mov", "c.png"):
        (tmp_path / name).touch()
    for name, text in (("train.csv", train), ("val.csv", val)):
        if text is not None:
            (tmp_path / name).write_text(text.replace("{}", str(tmp_path)))
    split = "val" if val and train else "train"
    assert refusal(str(tmp_path), split, 0).startswith(
        f"{tmp_path}{line.replace('{}', str(tmp_path))}"
    )


def test_an_unknown_split_and_two_kinds_of_lists_are_one_line(tmp_path):
    (tmp_path / "images.csv").write_text("path,label,split\na.png,a,fold 3\nb.png,a,")
    assert refusal(str(tmp_path), "train", 0) == (
        f"{tmp_path}: 2 lines cannot be used: images.csv:2 has the split 'fold 3', not train, val "
        "or test, images.csv:3 has the split '', not train, val or test"
    )
    (tmp_path / "val.csv").touch()
    assert ": val.csv beside images.csv in it; expected " in refusal(str(tmp_path), "val", 0)


@contextmanager
def peak_of_memory() -> Iterator[list[int]]:
    """To the list that it yields is added the most memory that Python and NumPy took in it."""
    peak: list[int] = []
    tracemalloc.start()
    try:
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("folders, dots", [(1, 0), (50, 1_800)])
def test_an_image_takes_at_most_150_bytes_beyond_its_path_also_beside_a_long_one(
    tmp_path, folders, dots
):
    count = 5_000
    names = [f"{number % folders}/{number}.png" for number in range(count)]
    for folder in range(folders):
        (tmp_path / str(folder)).mkdir()
    for name in names:
        (tmp_path / name).touch()
    names[7] = f"{dots * './'}{names[7]}"
    np.random.default_rng(0).shuffle(names)
    length = sum(len(os.path.join(tmp_path, name)) for name in names)
    file = tmp_path / "images.csv"
    file.write_text(f"path,label\n{names[0]},0\n")
    open_split("image_list", str(tmp_path), "train", 0)  # imports what it needs
    file.write_text("\n".join(["path,label", *(f"{name},{len(name)}" for name in names)]))
    with peak_of_memory() as peak:
        source = open_split("image_list", str(tmp_path), "train", 0)
        fingerprint(source, str(tmp_path))
    assert len(source) == count and peak[0] - length <= 150 * count


def test_lines_that_cannot_be_used_are_counted_and_the_first_are_named(tmp_path):
    count = 30_000
    (tmp_path / "train.csv").write_text("path,label\n" + count * ",\n")
    with peak_of_memory() as peak:
        line = refusal(str(tmp_path), "train", 0)
    places = ", ".join(f"train.csv:{number} has no path" for number in range(2, 7))
    assert line == f"{tmp_path}: 30,000 lines cannot be used: {places} and 29995 more"
    assert peak[0] < 2**20


def test_a_row_has_a_limit_over_all_its_lines_and_empty_lines_are_no_row(tmp_path):
    file, most = tmp_path / "train.csv", lists.LONGEST_ROW
    (tmp_path / "a.png").touch()
    for content, line in (
        (most * "a,", "2: row larger than row limit (1048576)"),
        (most * '"\n",', "262146: row larger than row limit (1048576)"),
        (f'"{most * "a"}"', "2: row larger than row limit (1048576)"),
        (most // 2 * "a", "2: field larger than field limit (131072)"),
    ):
        file.write_text(f"path,label\n{content}\n")
        with peak_of_memory() as peak:
            assert refusal(str(tmp_path), "train", 0) == f"{file}:{line}"
        assert peak[0] < 40 * most
    file.write_text("path,label" + most * "\n" + "a.png,a\n")
    assert len(open_split("image_list", str(tmp_path), "train", 0)) == 1


def test_a_list_has_at_most_as_many_bytes_as_a_file_of_an_image(tmp_path, monkeypatch):
    monkeypatch.setattr(lists, "LARGEST_FILE", 20)
    (tmp_path / "train.csv").write_text("path,label\na.png,abcd\n")
    assert refusal(str(tmp_path), "train", 0) == (
        f"{tmp_path}/train.csv: has 22 bytes, expected a file of at most 20"
    )


def test_a_list_in_utf_16_is_named_as_such(tmp_path):
    (tmp_path / "train.csv").write_bytes("path,label\na.png,a\n".encode("utf-16"))
    assert refusal(str(tmp_path), "train", 0).startswith(
        f"{tmp_path}/train.csv: is in UTF-16; expected UTF-8: iconv -f UTF-16 -t UTF-8 makes it ("
    )


def test_labels_are_composed(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.png").touch()
    rows = "path,label\na.png,cafe\u0301\nb.png,caf\u00e9\nc.png,z\n"
    (tmp_path / "images.csv").write_text(rows)
    source = open_split("image_list", str(tmp_path), "train", 2)
    assert source.classes == ["caf\u00e9", "z"] and source.labels.tolist() == [0, 0, 1]


@pytest.mark.parametrize("sign", ["\r", "\n", "\r\n", ",", '"', ";", "\t"])
def test_what_is_written_as_a_list_is_read_again_whatever_names_hold(tmp_path, sign):
    names = [f"a{sign}b.png", "c.png"]
    for name in names:
        (tmp_path / name).touch()
    guesses = [(str(tmp_path / name), [(label, 0.5)]) for name, label in zip(names, "xy")]
    (tmp_path / "images.csv").write_bytes(lists.as_list(guesses, tmp_path, several=False))
    source = open_split("image_list", str(tmp_path), "train", 2)
    assert source.paths == [str(tmp_path / name) for name in names] and source.classes == ["x", "y"]


def test_several_labels_are_the_same_as_names_and_as_columns_and_may_be_none(image_tree):
    paths = [path.relative_to(image_tree) for path in sorted(image_tree.glob("train/*/0*.png"))[:5]]
    as_names = ["b|a", " a ; b;a", "", "c", "B|c"]
    marks = ["1,1,0,0", "1,True,False,0", "0,0,0.0,0", "0,0,1,0", "0,0,1.0,1"]
    for name, header, cells in (("names", "labels", as_names), ("columns", "a,b,c,B", marks)):
        (image_tree / name).mkdir()
        lines = [f"{image_tree / path},{cell}" for path, cell in zip(paths, cells)]
        (image_tree / name / "images.csv").write_text("\n".join([f"path,{header}", *lines]))
    first, other = (
        open_split("image_list", str(image_tree / name), "train", 4)
        for name in ("names", "columns")
    )
    assert first.classes == other.classes == ["B", "a", "b", "c"]
    expected = [[0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 1]]
    assert first.labels.tolist() == other.labels.tolist() == expected
    assert first.class_images.tolist() == [1, 2, 2, 2] and first.of_class(3).tolist() == [3, 4]
    turned = first.in_order(["c", "B", "b", "a"])
    assert turned.labels.tolist() == [[row[3], row[0], row[2], row[1]] for row in expected]
    share = HeldOut(per_class=2)
    held, rest = held_out_part(first, share), stratified_part(first, held_out=share)
    assert sorted(held.paths + rest.paths) == first.paths and len(held) == 2  # of all, not of each


def test_a_column_split_is_no_class_and_marks_may_have_spaces_beside_them(image_tree):
    paths = sorted(image_tree.glob("train/*/0*.png"))[:2]
    rows = ["path,a,split,b", *(f"{path}, 1,train,{mark} " for path, mark in zip(paths, "01"))]
    (image_tree / "train.csv").write_text("\n".join(rows))
    source = open_split("image_list", str(image_tree), "train", 2)
    assert source.classes == ["a", "b"] and source.labels.tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize(
    "train, val, words",
    [
        ("path,a,b\nx.png,1,2", "", "train.csv:2 has '2' for a class, not 0 or 1"),
        ("path,a|c,b\nx.png,1,0", "", "expected the columns path and label"),
        ("path,a;c,b\nx.png,1,0", "", "has semicolons between columns"),
        ("path,a\nx.png,1", "", "expected the columns path and label"),
        ("path,labels\nx.png,\ny.png,", "", "no image in train.csv has a label"),
        ("path,labels\nx.png,a|b", "path,label\ny.png,a", "val.csv: has one label per image"),
        ("path,labels\nx.png,a|b", "path,labels\ny.png,b|c", "val.csv:2 has the label 'b|c'"),
    ],
)
def test_what_is_wrong_with_a_list_of_several_labels_is_one_line(tmp_path, train, val, words):
    for name in ("x.png", "y.png"):
        Image.new("RGB", (3, 5)).save(tmp_path / name)
    (tmp_path / "train.csv").write_text(train)
    if val:
        (tmp_path / "val.csv").write_text(val)
    assert words in refusal(str(tmp_path), "val" if "label 'b" in words else "train", 0)
