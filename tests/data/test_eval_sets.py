"""ImageNet's other test sets, laid out as in their archives with one image per class; and errors."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitinit.data.datasets import is_wnid
from vitinit.data.eval_sets import (EVAL_SETS, NamedSet, class_indices, imagenet_wnids,
                                    open_to_evaluate)
from vitinit.data.images import DataError

WNIDS = imagenet_wnids()
LAYOUTS = {                 # name: (folder of the archive, its class folders, file in one of them)
    "imagenet_v2": ("imagenetv2-matched-frequency-format-val", list(map(str, range(1000))),
                    "0c5e8ed4b6b1f9d1e2ba0ab5b1d3a1f9b7fd3cf1.jpeg"),
    "imagenet_r": ("imagenet-r", WNIDS[3::5], "art_0.jpg"),
    "imagenet_a": ("imagenet-a", WNIDS[4::5], "0.000116_digital clock _ digital clock_0.865.jpg"),
    "imagenet_sketch": ("sketch", WNIDS, "sketch_0.JPEG"),
}


def jpeg(folder: str) -> bytes:
    """A grey image of 2×3 pixels whose grey level is the index of the folder's class, modulo 251."""
    index = int(folder) if folder.isdecimal() else WNIDS.index(folder)
    content = io.BytesIO()
    Image.fromarray(np.full((2, 3), index % 251, dtype=np.uint8)).save(content, "JPEG", quality=100)
    return content.getvalue()


@pytest.fixture(scope="module")
def layouts(tmp_path_factory) -> dict[str, Path]:
    """The folder of each set, by its name in EVAL_SETS."""
    parent, roots = tmp_path_factory.mktemp("sets"), {}
    for name, (unpacked, folders, file) in LAYOUTS.items():
        roots[name] = parent / name / unpacked
        for folder in folders:
            (roots[name] / folder).mkdir(parents=True)
            (roots[name] / folder / file).write_bytes(jpeg(folder))
        (roots[name] / "README.txt").write_text("no class")
    return roots


def refusal(name: str, root: Path) -> str:
    with pytest.raises(DataError) as error:
        open_to_evaluate(name, str(root))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", EVAL_SETS)
def test_each_image_has_its_synset(layouts, name):
    """Also where numbered folders lie in alphabetical order, in which 10 comes after 1."""
    source, (_, folders, _) = open_to_evaluate(name, str(layouts[name])), LAYOUTS[name]
    assert len(source) == len(folders) and len(source.classes) == EVAL_SETS[name].num_classes
    for index in range(0, len(source), 37):
        number = WNIDS.index(source.classes[source.labels[index]])
        assert source.image(index).unique().tolist() == [number % 251]
    assert sorted(source.labels) == list(range(len(folders)))


def test_the_folder_above_is_refused_and_the_right_one_named(layouts):
    root = layouts["imagenet_r"]
    assert refusal("imagenet_r", root.parent).endswith(f"did you mean {root}?")


def test_another_sets_folders_are_refused(layouts):
    for name, other in (("imagenet_v2", "imagenet_sketch"), ("imagenet_sketch", "imagenet_v2")):
        root = layouts[other]
        first = min(path.name for path in root.iterdir() if path.is_dir())
        assert refusal(name, root).startswith(f"{root / first}: not a class of {name}, which is")


def test_a_set_that_is_not_complete_is_refused(layouts, tmp_path):
    root = shutil.copytree(layouts["imagenet_a"], tmp_path / "imagenet-a")
    shutil.rmtree(root / LAYOUTS["imagenet_a"][1][-1])
    assert refusal("imagenet_a", root) == (f"{root}: 199 classes found, and imagenet_a has 200; it "
                                           "is not complete")
    empty = root / LAYOUTS["imagenet_a"][1][-1]
    empty.mkdir()
    assert refusal("imagenet_a", root).startswith(f"{empty}: no image in this class")


def test_a_missing_folder_is_refused(tmp_path):
    assert refusal("imagenet_v2", tmp_path / "x").startswith(f"{tmp_path / 'x'}: no such folder; "
                                                             "imagenet_v2 is the folder imagenetv2")


def test_other_sets_are_their_validation_split(image_tree):
    source = open_to_evaluate("image_folder", str(image_tree))
    assert len(source) == 21 and source.classes == ["blue", "green", "red"]


def test_a_part_of_imagenet_goes_by_image_folder(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / WNIDS[7]).mkdir(parents=True)
        (tmp_path / split / WNIDS[7] / "a.jpeg").write_bytes(jpeg(WNIDS[7]))
    assert refusal("imagenet", tmp_path) == (f"{tmp_path}: 1 classes found, and imagenet has 1000; "
                                             f"a part of it goes by image_folder={tmp_path}")
    assert open_to_evaluate("image_folder", str(tmp_path)).classes == [WNIDS[7]]


def test_a_named_set_prints_as_it_is_written():
    assert str(NamedSet("imagenet_r", "/data/r")) == "imagenet_r=/data/r"
    assert str(NamedSet("shapes", "")) == "shapes"


def test_imagenets_classes_have_the_numbers_that_everyone_gives_them():
    assert len(set(WNIDS)) == 1000 and WNIDS == sorted(WNIDS) and all(map(is_wnid, WNIDS))
    assert [WNIDS[index] for index in (0, 207, 281, 999)] == [
        "n01440764", "n02099601", "n02123045", "n15075141"]  # tench, golden retriever, tabby, tissue


def test_each_class_of_a_set_is_found_at_its_index_in_the_model():
    known = ["ant", "bee", "cat", "dog", "eel"]
    assert class_indices(known, ["dog", "ant", "eel"]) == [3, 0, 4]
    with pytest.raises(DataError) as error:
        class_indices(known, ["bee", "cow"])
    assert str(error.value) == "class 'cow' is none of the model's 5 classes (ant, bee, … eel)"
