"""ImageNet's tars as they are downloaded: to a run they are the same images as in folders."""

import io
import multiprocessing
import os
import shutil
import signal
import sys
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image
from refused import refused
from same_run import assert_same_run

from vitinit.base.keys import Purpose, keyed_generator
from vitinit.data import tars
from vitinit.data.datasets import open_split
from vitinit.data.encoded import read_jpeg
from vitinit.data.images import DataError, fit_whole
from vitinit.data.loader import EvalViews, Loader
from vitinit.data.sources import Source, file_sizes, fingerprint
from vitinit.data.tars import BLOCK, DEVKIT, SOLUTION, TARS
from vitinit.programs.figures.program import main
from vitinit.watch.survey import survey

WNIDS = ["n00000013", "n00000002", "n00000007"]  # as they come in the tar
COUNTS = {"train": (17, 23, 19), "val": (5, 11, 7)}  # images of each


def jpeg(rng: np.random.Generator) -> bytes:
    content = io.BytesIO()
    pixels = rng.integers(0, 256, (11, 13, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((20, 17)).save(content, "JPEG")
    return content.getvalue()


def tar_of(files: dict[str, bytes], mode: str = "w") -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as tar:
        for name, part in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(part)
            tar.addfile(info, io.BytesIO(part))
    return content.getvalue()


def write_devkit(path: Path, numbers: list[int]) -> None:
    """Its synsets are those of the classes, in another order than theirs, and inner ones; the line
    of each image has the number of its synset.
    """
    kind = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object)]
    rows = [(3, WNIDS[2], "c, d"), (1, WNIDS[0], "a"), (2, WNIDS[1], "b"), (4, "n00000001", "all")]
    meta = io.BytesIO()
    scipy.io.savemat(meta, {"synsets": np.array(rows, kind)[:, None]})
    folder = "ILSVRC2012_devkit_t12"
    parts = {
        f"{folder}/readme.txt": b"",
        f"{folder}/data/meta.mat": meta.getvalue(),
        f"{folder}/data/ILSVRC2012_validation_ground_truth.txt": b"".join(
            b"%d\n" % number for number in numbers
        ),
    }
    path.write_bytes(tar_of(parts, "w:gz"))


def write_both(root: Path) -> tuple[Path, Path]:
    """The same images in the folders train/ and val/, and in tars with both files of labels."""
    rng = np.random.default_rng(0)
    folders, packed = root / "folders", root / "packed"
    packed.mkdir(parents=True)
    by_class = {}
    for wnid, count in zip(WNIDS, COUNTS["train"]):
        numbers = rng.permutation(200)[:count]
        by_class[wnid] = {f"{wnid}_{number}.JPEG": jpeg(rng) for number in numbers}
    labels = rng.permutation(np.repeat([1, 2, 3], COUNTS["val"])).tolist()
    held = {f"ILSVRC2012_val_{number:08d}.JPEG": jpeg(rng) for number in range(1, len(labels) + 1)}
    placed = {
        f"train/{wnid}/{name}": part for wnid in WNIDS for name, part in by_class[wnid].items()
    }
    for label, (name, part) in zip(labels, held.items()):
        placed[f"val/{WNIDS[label - 1]}/{name}"] = part
    for name, part in placed.items():
        (folders / name).parent.mkdir(parents=True, exist_ok=True)
        (folders / name).write_bytes(part)
    inner = {f"{wnid}.tar": tar_of(files) for wnid, files in by_class.items()}
    (packed / TARS["train"]).write_bytes(tar_of(inner))
    (packed / TARS["val"]).write_bytes(tar_of(held))
    rows = [f"{Path(name).stem},{WNIDS[label - 1]} 1 2 3 4 " for label, name in zip(labels, held)]
    rows = ["ImageId,PredictionString", *(rows[place] for place in rng.permutation(len(rows)))]
    (packed / SOLUTION).write_text("\n".join(rows) + "\n")
    write_devkit(packed / DEVKIT, labels)
    return folders, packed


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    return write_both(tmp_path)


def opened(root: Path, split: str, classes: int = 3) -> Source:
    return open_split("imagenet", str(root), split, classes)


def refusal(root: Path, split: str) -> str:
    return refused(DataError, opened, root, split)


def assert_same_images(first: Source, second: Source) -> None:
    assert len(first) == len(second) and first.classes == second.classes
    assert np.array_equal(first.labels, second.labels)
    for index in range(len(first)):
        assert torch.equal(first.image(index), second.image(index))


@pytest.mark.parametrize("unused", [DEVKIT, SOLUTION])
@pytest.mark.parametrize("split", ["train", "val"])
def test_images_in_a_tar_are_those_in_folders(both, split, unused):
    """And so are parts of them, their bytes, and what a run records of them."""
    folders, packed = both
    (packed / unused).unlink()
    expected, source = opened(folders, split), opened(packed, split)
    assert_same_images(source, expected)
    assert fingerprint(source, str(packed)) == fingerprint(expected, str(folders))
    indices = keyed_generator(0, Purpose.SUBSET, 0).permutation(len(source))[:7]
    parts = source.part(indices), expected.part(indices)
    assert_same_images(*parts)
    assert file_sizes(parts, 3) == file_sizes(parts[::-1], 3) != {}
    for index in range(7):
        (content, size), (other, its) = (read_jpeg(part, index) for part in parts)
        assert size == its == (17, 20) and torch.equal(content, other)
    seen = survey(source, source, 8), survey(expected, expected, 8)
    assert seen[0].lines == seen[1].lines[:1] and seen[0].cautions == []  # of classes alone


def test_a_split_that_has_a_folder_is_read_from_it(both):
    """And the other one from its tar; each with the classes of the images to train on."""
    folders, packed = both
    shutil.copytree(folders / "train", packed / "train")
    (packed / TARS["train"]).write_bytes(b"no tar")
    assert_same_images(opened(packed, "train"), opened(folders, "train"))
    assert_same_images(opened(packed, "val"), opened(folders, "val"))
    shutil.rmtree(packed / "train" / WNIDS[1])
    assert refusal(packed, "val").startswith(f"{packed}: class '{WNIDS[1]}' is in val/ and not in")
    shutil.rmtree(packed / "train")
    (packed / TARS["train"]).write_bytes(tar_of({f"{wnid}.tar": b"" for wnid in WNIDS[1:]}))
    assert refusal(packed, "val").startswith(f"{packed}: class '{WNIDS[0]}' is in val/ and not in")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_each_process_reads_by_a_descriptor_of_its_own_or_its_parents(both, method, monkeypatch):
    """Also at the same time, and where the number of the parent's is another file in a worker."""
    folders, packed = both
    source, expected = opened(packed, "train"), opened(folders, "train")
    assert torch.equal(source.image(3), expected.image(3))  # by this process
    size = tuple(expected.image(3).shape[1:])
    view = partial(fit_whole, size=size, interpolation="bicubic")  # the image itself
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    try:
        views = EvalViews(source, rank=0, world_size=1, size=size, view=view)
        images = torch.cat([batch for batch, _ in Loader(views, workers=2, batch_size=5)])
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert torch.equal(images, torch.stack([expected.image(n) for n in range(len(expected))]))


def test_an_index_is_made_once_for_a_file_by_one_process(both, monkeypatch, capsys):
    folders, packed = both
    made, real = [], tars.make_index

    def counting(*files: Path) -> np.ndarray:
        assert files[0].with_suffix(".indexing").exists()  # others wait for it
        made.append([file.name for file in files])
        return real(*files)

    def again(split: str) -> int:
        before = len(made)
        assert_same_images(opened(packed, split), opened(folders, split))
        return len(made) - before

    monkeypatch.setattr(tars, "make_index", counting)
    assert again("train") == again("val") == 1 and again("train") == again("val") == 0
    assert made == [[TARS["train"]], [TARS["val"], SOLUTION]]
    assert capsys.readouterr().err.count("its index is made") == 2
    (packed / SOLUTION).unlink()  # the other file of labels, and so another index
    assert again("train") == 0 and again("val") == 1 and again("val") == 0
    index = packed / "ILSVRC2012_img_train.index.npz"
    for content in (b"", b"damaged", index.read_bytes()[:-70]):
        index.write_bytes(content)
        assert again("train") == 1 and again("train") == 0
    os.utime(packed / TARS["train"], ns=(5, 7))  # as another file of the same size
    assert again("train") == 1 and again("train") == 0
    index.unlink()
    index.mkdir()  # so that none can be written
    capsys.readouterr()
    assert again("train") == 1
    assert f"warning {index}: cannot be written: Is a directory; every" in capsys.readouterr().err
    assert {path.suffix for path in packed.iterdir()} == {".tar", ".gz", ".npz"}  # no lock is left


def test_a_tar_that_changes_while_it_is_used_is_one_line(both):
    _, packed = both
    source = opened(packed, "train")
    shutil.copy(packed / TARS["train"], packed / "new")
    os.utime(packed / "new", ns=(5, 7))
    os.replace(packed / "new", packed / TARS["train"])
    assert refused(DataError, source.image, 0).startswith(
        f"{packed / TARS['train']}: is another file than when this run began"
    )
    (packed / TARS["train"]).unlink()
    assert refused(DataError, source.image, 0) == (
        f"{packed / TARS['train']}: cannot be read: No such file or directory"
    )


def damaged(content: bytes, place: int) -> bytes:
    """Another byte at a place."""
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def header_of(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


INNER = tar_of({"n00000013_1.JPEG": b"one", "n00000013_2.JPEG": b"two"})
OUTER = tar_of({"n00000013.tar": INNER})
WRONG = {
    "cut in an image": OUTER[: 2 * BLOCK + 1],
    "cut behind an image": OUTER[: 3 * BLOCK],
    "cut before its end": OUTER[: BLOCK + len(INNER)],
    "a header": damaged(OUTER, 3),
    "an inner header": damaged(OUTER, 3 * BLOCK + 3),
    "an inner tar without an end": tar_of({f"{wnid}.tar": INNER[: 4 * BLOCK] for wnid in WNIDS}),
    "an inner tar cut in its last image": tar_of({"n00000013.tar": INNER[: 3 * BLOCK]}),
    "of images": INNER,
    "another kind": tar_of({"n00000013.tar": tar_of({"n00000013_1.png": b""})}),
    "a class of no wnid": tar_of({"cat.tar": INNER}),
    "another folder": tar_of({"n00000013.tar": tar_of({"../n00000013_1.JPEG": b""})}),
    "a size below 0": header_of("n00000013.tar", -BLOCK) + OUTER,
    "no tar": b"<html>" + bytes(9 * BLOCK),
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_a_tar_that_is_not_what_is_downloaded_is_one_line(tmp_path, content):
    tar = tmp_path / TARS["train"]
    tar.write_bytes(OUTER)
    assert len(opened(tmp_path, "train", 1)) == 2
    tar.write_bytes(content)
    line = refusal(tmp_path, "train")
    assert line.startswith(f"{tar}: ") and line.endswith("; expected the file as it was downloaded")
    assert not tar.with_suffix(".indexing").exists()


@pytest.mark.parametrize("split", TARS)
def test_a_split_that_lies_there_in_neither_form_is_one_line_that_names_both(tmp_path, split):
    (tmp_path / "trian").mkdir()
    assert refusal(tmp_path, split) == (
        f"{tmp_path}: neither {split}/ nor {TARS[split]} in it; expected train/<wnid>/… and "
        "val/<wnid>/…, or the tars of both as downloaded"
    )


def test_an_image_that_cannot_be_decoded_is_called_by_its_place_in_folders(tmp_path):
    (tmp_path / TARS["train"]).write_bytes(OUTER)
    assert refused(DataError, opened(tmp_path, "train", 1).image, 1).startswith(
        f"{tmp_path}/train/n00000013/n00000013_2.JPEG: not a readable image, 3 bytes"
    )


def test_labels_that_are_missing_or_of_other_images_are_one_line(both, monkeypatch):
    _, packed = both
    tar, solution, devkit = packed / TARS["val"], packed / SOLUTION, packed / DEVKIT
    text = solution.read_text()
    lines = text.splitlines()
    name = lines[5].partition(",")[0]
    others = ["\n".join(lines[:5] + lines[6:]), f"{text}{name.replace('_val_', '_new_')},n0 1"]
    for content, image in zip(others, (name, name.replace("_val_", "_new_"))):
        solution.write_text(content)
        assert refusal(packed, "val").startswith(
            f"{tar}: {image}.JPEG is not both in it and in {SOLUTION};"
        )
    for content in (b"ImageId,Prediction\na,b\n", text.encode() + b"\xff"):
        solution.write_bytes(content)
        assert refusal(packed, "val").startswith(f"{solution}: no labels in it (")
    solution.unlink()
    whole = devkit.read_bytes()
    for content in (whole[:99], b"no tar", tar_of({"a": b""}, "w:gz")):
        devkit.write_bytes(content)
        assert refusal(packed, "val").startswith(f"{devkit}: no labels in it (")
    devkit.write_bytes(whole)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "scipy.io", None)
        assert refusal(packed, "val") == (
            "imagenet: reading it needs scipy: pip install 'vitinit[datasets]'"
        )
    devkit.unlink()
    assert refusal(packed, "val") == (
        f"{tar}: has no labels in it; expected {SOLUTION} or {DEVKIT} beside it"
    )


def test_a_run_on_folders_goes_on_with_tars_as_the_same_run(
    both, train_program, small_run, stop_before, tmp_path, monkeypatch, capsys
):
    folders, packed = both

    def begin(name: str) -> int:
        changes = {"data__name": "imagenet", "data__workers": "1", "schedule__epochs": "2"}
        return train_program.main(small_run(tmp_path / name, "--data-dir", str(folders), **changes))

    assert begin("uncut") == 0
    with monkeypatch.context() as patch:
        patch.setattr("vitinit.run.StopRequest", stop_before(3))
        assert begin("stopped") == 128 + signal.SIGTERM
    for split in ("train", "val"):
        shutil.rmtree(folders / split)
    shutil.copytree(packed, folders, dirs_exist_ok=True)
    with tarfile.open(packed / TARS["val"]) as tar:  # one image of which is longer
        parts = {member.name: tar.extractfile(member).read() for member in tar}
    parts["ILSVRC2012_val_00000003.JPEG"] += b"."
    (folders / TARS["val"]).write_bytes(tar_of(parts))
    resume = ["--resume", str(tmp_path / "stopped")]
    assert train_program.main(resume) == 2
    assert "sizes of files" in capsys.readouterr().err
    shutil.copy(packed / TARS["val"], folders)
    assert train_program.main(resume) == 0
    assert_same_run(tmp_path / "uncut", tmp_path / "stopped")
    page = tmp_path / "report.html"  # in which no mistake leads to a file that is not there
    assert main(["report", str(tmp_path / "stopped"), "--out", str(page)]) == 0
    assert '"link":null' in page.read_text() and '"link":"' not in page.read_text()
