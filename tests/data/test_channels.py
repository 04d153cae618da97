"""Images of other than three channels: files, views and augmentation equal those of each channel."""

import io
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from broken_files import WAYS, broken, encoded, noise, valid_files
from deit import AUGMENT, CPU, MIX, RAND_AUGMENT, augmented, samples
from PIL import Image
from refused import refused
from test_operations import GEOMETRIC, PLAIN, arguments_of, with_pillow
from torch import Tensor

from vitinit.data.augment import ToDevice, TrainToDevice, normalise
from vitinit.data.datasets import open_split
from vitinit.data.draw import Augmentation, SampleKey
from vitinit.data.images import (
    Box,
    DataError,
    crop_and_flip,
    decode_bytes,
    decode_image,
    resize_and_centre_crop,
)
from vitinit.data.loader import Batch, EvalViews
from vitinit.data.pipeline import GIB, EvaluationBatches, cut, decode_to_device
from vitinit.data.rand_augment import OF_COLOURS, Operation
from vitinit.data.sources import ImageFolder, ImagesInMemory, read_as
from vitinit.watch.survey import dark_in_16_bits, survey

COUNTS = (1, 2, 4, 5, 13)
OTHERS = tuple(name for name in PLAIN if name not in OF_COLOURS)


def levels(*shape: int, kind: type = np.uint8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, np.iinfo(kind).max, shape, kind, endpoint=True)


def npy(array: np.ndarray) -> bytes:
    np.save(buffer := io.BytesIO(), array)
    return buffer.getvalue()


def tiff(array: np.ndarray, **options) -> bytes:
    pytest.importorskip("tifffile").imwrite(buffer := io.BytesIO(), array, **options)
    return buffer.getvalue()


# Files ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
@pytest.mark.parametrize("count", COUNTS)
def test_an_array_and_a_tiff_hold_the_channels_that_were_written(kind, count):
    array = levels(11, 13, count, kind=kind)
    expected = (array if kind == np.uint8 else array // 256).transpose(2, 0, 1)
    contents = [
        npy(array),
        npy(np.asfortranarray(array)),
        npy(array.astype(array.dtype.newbyteorder())),
    ]
    if count == 1:
        contents += [npy(array[..., 0]), encoded(Image.fromarray(array[..., 0]), "PNG")]
        contents.append(encoded(Image.fromarray(array[..., 0]), "TIFF"))
    else:
        contents.append(tiff(array, photometric="minisblack", planarconfig="contig"))
        planes = array.transpose(2, 0, 1)
        contents.append(tiff(planes, photometric="minisblack", planarconfig="separate"))
        contents.append(tiff(array, photometric="minisblack", planarconfig="contig", bigtiff=True))
    for content in contents:
        image = decode_bytes(content, "x", channels=count)
        assert image.dtype == torch.uint8 and np.array_equal(image.numpy(), expected)


def test_grey_is_pillows_of_every_file_and_three_channels_are_what_they_were():
    for name, content in valid_files(13, 17).items():
        rgb = decode_bytes(content, name)
        grey = decode_bytes(content, name, channels=1)
        pillows = Image.fromarray(rgb.permute(1, 2, 0).numpy()).convert("L")
        assert len(grey) == 1 and np.array_equal(grey[0].numpy(), pillows), name
    flat = levels(11, 13)
    assert torch.equal(decode_bytes(npy(flat), "x"), torch.from_numpy(flat).repeat(3, 1, 1))
    colours = levels(11, 13, 3)
    assert np.array_equal(decode_bytes(npy(colours), "x").numpy(), colours.transpose(2, 0, 1))


def test_alpha_is_the_last_channel_where_it_is_asked_for(tmp_path):
    for mode in ("LA", "RGBA"):
        array = levels(11, 13, len(mode))
        content = encoded(Image.fromarray(array, mode), "PNG")
        image = decode_bytes(content, "x", channels=len(mode))
        assert np.array_equal(image.numpy(), array.transpose(2, 0, 1))


def test_what_has_other_channels_or_values_is_refused_by_its_name(tmp_path, monkeypatch):
    def line(content: bytes, channels: int) -> str:
        (tmp_path / "x.npy").write_bytes(content)
        return refused(DataError, decode_image, str(tmp_path / "x.npy"), channels=channels)

    bands = npy(levels(11, 13, 5))
    for channels, values in ((1, "1 value"), (3, "3 values"), (4, "4 values")):
        assert line(bands, channels) == (
            f"{tmp_path}/x.npy: has 5 channels, and data.mean {values}; expected as many"
        )
    photograph = encoded(noise(11, 13), "JPEG")
    assert "has 3 channels, and data.mean 4 values" in line(photograph, 4)
    wrong = [np.zeros((11, 13, 5)), levels(3, 11, 13, 5), levels(7), levels(0, 13, 5)]
    for array in (*wrong, levels(11, 13, kind=np.uint16).astype(np.int16), np.zeros((2, 3), bool)):
        assert f"(an array {array.shape} {array.dtype}; expected (H, W) or (H, W, ch" in line(
            npy(array), 5
        )
    assert "x.npy: not a readable image" in line(
        npy(np.array([None] * 6).reshape(2, 3)), 5
    )  # a pickle
    file = tiff(levels(11, 13, 5), photometric="minisblack", planarconfig="contig")
    for most in (72, None):  # Pillow refuses more than twice as many, and where it is lifted none
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        assert decode_bytes(file, "x", channels=5).shape == (5, 11, 13)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 71)
    assert line(file, 5).endswith("(11 × 13 pixels of 5 channels, more than Pillow reads)")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 72)
    seven = tiff(levels(11, 13, 7), photometric="minisblack", planarconfig="contig")
    assert line(seven, 5).endswith("(11 × 13 pixels of 7 channels, more than Pillow reads)")
    monkeypatch.setitem(sys.modules, "tifffile", None)
    assert line(file, 5).endswith(
        "(a TIFF of other channels than 1 or 3: pip install 'vitinit[bands]')"
    )


def test_a_broken_array_or_tiff_is_decoded_or_refused_in_one_line(tmp_path):
    array = levels(13, 17, 5, kind=np.uint16)
    files = [npy(array)]
    for options in ({}, {"compression": "deflate"}):
        files.append(tiff(array, photometric="minisblack", planarconfig="contig", **options))
    outcomes = set()
    for number in range(600):
        content = broken(
            files[number % 3], np.random.default_rng(number), WAYS[number // 3 % len(WAYS)]
        )
        try:
            assert decode_bytes(content, "x", channels=5).shape[0] == 5
            outcomes.add("decoded")
        except DataError as error:
            assert str(error).startswith("x: ") and str(error).isprintable()
            outcomes.add("refused")
    assert len(outcomes) == 2


def test_arrays_are_the_images_of_a_folder_that_has_no_others(tmp_path):
    for number in range(2):
        for name in ("oak", "elm"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{number}.npy").write_bytes(npy(levels(7, 5, 4, seed=number)))
    (tmp_path / "list.csv").write_text("")
    source = ImageFolder(tmp_path)
    assert len(source) == 4 and source.left_out == f"left out: 1 .csv in {tmp_path}"
    image = read_as(source, 4, True).image(1)
    assert np.array_equal(image.numpy(), levels(7, 5, 4, seed=1).transpose(2, 0, 1))
    (tmp_path / "images.csv").write_text(
        "path,label,split\nelm/0.npy,elm,train\noak/0.npy,oak,train\n"
    )
    assert len(open_split("image_list", str(tmp_path), "train", 0)) == 2
    for name in ("oak", "elm"):
        noise(7, 5).save(tmp_path / name / "a.png")
    source = ImageFolder(tmp_path)
    assert [Path(path).name for path in source.paths] == ["a.png"] * 2
    assert "4 .npy" in source.left_out


def test_images_in_memory_become_grey_or_are_refused():
    source = open_split("shapes", "", "val", 10)
    grey = Image.fromarray(source.image(5).permute(1, 2, 0).numpy()).convert("L")
    assert np.array_equal(read_as(source, 1, True).image(5)[0].numpy(), grey)
    assert source.image(5).shape[0] == 3
    line = refused(DataError, read_as(source, 4, True).image, 5)
    assert line == "an image: has 3 channels, and data.mean 4 values; expected as many"


def test_arrays_of_16_bits_are_cautioned_of_if_none_reaches_a_quarter_of_white(tmp_path):
    (tmp_path / "a.npy").write_bytes(npy(levels(5, 7, kind=np.uint16) // 8))
    assert dark_in_16_bits([str(tmp_path / "a.npy")]).startswith(
        "1 images of 16 bits were looked at"
    )
    (tmp_path / "b.npy").write_bytes(npy(levels(5, 7, kind=np.uint16)))
    assert dark_in_16_bits(map(str, [tmp_path / "a.npy", tmp_path / "b.npy"])) == ""


@pytest.mark.parametrize("count", [1, 4])
def test_of_arrays_and_bands_nothing_is_said_that_is_true_of_photographs_alone(tmp_path, count):
    for name in ("oak", "elm"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.npy").write_bytes(npy(levels(7, 5, count)))
    source = read_as(ImageFolder(tmp_path), count, True)
    lines, cautions, copies, named = survey(source, source, 7)
    assert lines == ["classes elm 1, oak 1"] and len(copies) == 1 and not named
    assert len(cautions) == 1 and "of several classes" in cautions[0]


# Views and augmentation -----------------------------------------------------------------------
def by_channel(image: Tensor, change) -> Tensor:
    """Each channel changed as the three equal channels of an image, of which the first is taken."""
    return torch.cat([change(channel.expand(3, -1, -1).contiguous())[:1] for channel in image])


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("count", COUNTS)
def test_views_are_those_of_each_channel_and_of_pillow(count, interpolation):
    """Also of a long image, of which only the centre is enlarged; black beside a crop that is beyond."""
    kernel = Image.Resampling[interpolation.upper()]
    for height, width in ((61, 47), (19, 23), (1601, 3)):
        image = torch.from_numpy(levels(height, width, count)).permute(2, 0, 1)
        evaluate = partial(
            resize_and_centre_crop, size=(31, 29), crop_pct=0.875, interpolation=interpolation
        )
        assert torch.equal(evaluate(image), by_channel(image, evaluate))
        for flip in (False, True):
            train = partial(
                crop_and_flip,
                box=Box(-2, 1, 17, 3),
                flip=flip,
                size=(13, 11),
                interpolation=interpolation,
            )
            view = train(image)
            assert torch.equal(view, by_channel(image, train)) and view[:, :1].max() < 255
    image = torch.from_numpy(levels(61, 47, count)).permute(2, 0, 1)
    part = crop_and_flip(image, Box(0, 0, 61, 47), False, (13, 11), interpolation)
    for channel, ours in zip(image.numpy(), part.numpy()):
        pillows = Image.fromarray(channel).resize((11, 13), kernel)
        assert np.abs(ours.astype(int) - np.asarray(pillows)).max() <= 1


@pytest.mark.parametrize("name", [*OTHERS, *GEOMETRIC])
@pytest.mark.parametrize("count", COUNTS)
def test_an_operation_changes_each_channel_as_if_it_were_one_of_three(count, name):
    drawn = [
        [(Operation[name], argument, 1)]
        for argument in arguments_of(name, np.random.default_rng(0), 3)
    ]
    images = torch.from_numpy(levels(len(drawn), count, 19, 23))
    fill = levels(count).tolist()
    for few_launches in (False, True):
        apply = partial(augmented, operations=np.array(drawn), few_launches=few_launches)
        expected = [
            apply(images[:, [channel] * 3], fill=[fill[channel]] * 3)[:, :1]
            for channel in range(count)
        ]
        assert torch.equal(apply(images, fill=fill), torch.cat(expected, 1))
        one = apply(images, fill=[83])
        assert torch.equal(one, apply(images, fill=[83] * count))


@pytest.mark.parametrize("name", OF_COLOURS)
def test_operations_on_colours_are_pillows_of_grey(name):
    arguments = arguments_of(name, np.random.default_rng(0))
    image = noise(19, 23).convert("L")
    drawn = np.array([[(Operation[name], argument, 1)] for argument in arguments])
    batch = torch.from_numpy(np.asarray(image).copy()).expand(len(arguments), 1, -1, -1)
    for few_launches in (False, True):
        ours = augmented(batch, drawn, [0], few_launches=few_launches)
        for one, argument in zip(ours, arguments):
            assert np.array_equal(one[0].numpy(), with_pillow(image, Operation[name], argument))


@pytest.mark.parametrize("after", [False, True])
def test_the_first_three_of_five_channels_become_what_three_become(after):
    """By the same draws: RandAugment, normalising, erasing with noise, mixing, in chunks or not."""
    size, classes = (11, 13), 7
    settings = Augmentation(
        3,
        size,
        replace(AUGMENT, erase_probability=0.8, erase_after_mix=after),
        replace(RAND_AUGMENT, operations=(*OTHERS, *GEOMETRIC), fill=(1, 2, 3, 4, 5)),
        MIX,
    )
    draws = settings.draws(samples([SampleKey(0, index) for index in range(8)], step=5))
    images, labels = torch.from_numpy(levels(8, 5, *size)), torch.arange(8) % classes
    mean, std = (0.1, 0.2, 0.3, 0.4, 0.5), (0.9, 0.8, 0.7, 0.6, 0.5)

    def prepared(channels: list[int], chunk: int) -> Tensor:
        fill = tuple(settings.rand_augment.fill[channel] for channel in channels)
        own = replace(settings, rand_augment=replace(settings.rand_augment, fill=fill))
        prepare = TrainToDevice(
            CPU,
            own,
            num_classes=classes,
            mean=[mean[channel] for channel in channels],
            std=[std[channel] for channel in channels],
            channels_last=False,
        )
        prepare.chunk = chunk
        return prepare(Batch(images[:, channels], labels, draws))[0]

    every = prepared([0, 1, 2, 3, 4], 2**30)
    assert torch.equal(every[:, :3], prepared([0, 1, 2], 2**30))
    assert torch.equal(every, prepared([0, 1, 2, 3, 4], 2 * size[0] * size[1]))
    assert not torch.equal(every[:, 3:], every[:, :2])


def test_images_of_five_channels_are_stored_if_all_of_them_fit():
    images = torch.from_numpy(levels(7, 5, 11, 11))
    source = read_as(ImagesInMemory(images, np.arange(7), [""] * 7), 5, True)
    shift = replace(AUGMENT, crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0))
    drawn = Augmentation(0, (11, 11), shift, RAND_AUGMENT, MIX)
    fits = images.nbytes / GIB
    assert torch.equal(decode_to_device(source, CPU, drawn, fits, lambda: None), images)
    assert decode_to_device(source, CPU, drawn, 0.99 * fits, lambda: None) is None
    how = dict(size=(11, 11), view=lambda image: image, rank=0, world_size=1)
    prepare = ToDevice(CPU, mean=[0.5] * 5, std=[0.5] * 5, channels_last=True)
    batches = EvaluationBatches(EvalViews(source, **how), prepare, batch_size=3, workers=0)
    assert batches.nbytes == images.nbytes
    assert torch.equal(
        torch.cat([batch for batch, _ in batches]), normalise(images, [0.5] * 5, [0.5] * 5)
    )


def test_stored_images_of_any_channels_are_cut_as_images_are_cropped():
    images = torch.from_numpy(levels(3, 5, 7, 11))
    windows = torch.tensor([[2, -1, 3, 0], [0, 2, -4, 1]])
    for view, (index, top, left, flip) in zip(cut(images, windows), windows.tolist()):
        expected = crop_and_flip(
            images[index], Box(top, left, 7, 11), bool(flip), (7, 11), "bicubic"
        )
        assert torch.equal(view, expected)
