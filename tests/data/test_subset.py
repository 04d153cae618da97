"""Subsets have the right sizes, are nested, and depend on their seed and the class alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from vitinit.data.datasets import ImageFolder, ImagesInMemory
from vitinit.data.images import DataError
from vitinit.data.subset import held_out_part, stratified_part
from vitinit.keys import Stream, keyed_generator

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


@pytest.mark.parametrize("share, expected", [
    (0.25, [2, 3, 1, 8]), (0.5, [4, 6, 1, 15]), (0.05, [1, 1, 1, 2]), (1e-9, [1, 1, 1, 1]),
    (0.99, [7, 11, 1, 30])])
def test_every_class_keeps_its_share_rounded_and_at_least_one(share, expected):
    assert sizes(stratified_part(numbered(), share=share)) == expected


@pytest.mark.parametrize("count", [1, 5])
def test_every_class_keeps_the_given_number_of_images(count):
    source = numbered([7, 11, 5, 30])
    assert sizes(stratified_part(source, images_per_class=count)) == [count] * 4


def test_a_part_keeps_the_order_the_labels_and_all_classes():
    source = numbered()
    part = stratified_part(source, share=0.5, seed=3)
    assert part.classes == source.classes
    indices = members(part)
    assert indices == sorted(indices) and part.labels.tolist() == source.labels[indices].tolist()


def test_a_part_of_an_image_folder_holds_the_same_files(tmp_path):
    for number in range(13):
        folder = tmp_path / ("ant" if number % 3 else "bee")
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (7, 5), (number, 0, 0)).save(folder / f"{number}.png")
    source = ImageFolder(tmp_path)
    part = stratified_part(source, images_per_class=3)
    assert set(part.paths) < set(source.paths) and len(part) == 6
    by_path = dict(zip(source.paths, source.labels.tolist()))
    for index, path in enumerate(part.paths):
        assert by_path[path] == part.labels[index]
        assert part.image(index)[0, 0, 0] == int(path.rpartition("/")[2].removesuffix(".png"))


def test_without_a_limit_it_is_the_source_itself():
    source = numbered()
    assert stratified_part(source) is source


@pytest.mark.parametrize("seed", [0, 5])
def test_a_smaller_part_lies_in_every_larger_one(seed):
    source = numbered([7, 11, 9, 30])
    shares = [members(stratified_part(source, share=share, seed=seed))
              for share in (0.01, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)]
    counts = [members(stratified_part(source, images_per_class=count, seed=seed))
              for count in (1, 2, 5, 7)]
    for nested in (shares, counts):
        for small, large in zip(nested, nested[1:]):
            assert set(small) < set(large)
    assert shares[0] == counts[0]


def test_a_part_has_the_first_images_of_an_order_keyed_by_seed_and_class():
    source = numbered()
    expected = []
    for label, size in enumerate(SIZES):
        order = keyed_generator(13, Stream.SUBSET, label).permutation(size)
        expected += np.flatnonzero(source.labels == label)[order[:math.ceil(size / 2)]].tolist()
    assert members(stratified_part(source, share=0.5, seed=13)) == sorted(expected)


def test_another_seed_takes_other_images():
    source = numbered()
    assert len({tuple(members(stratified_part(source, share=0.3, seed=seed)))
                for seed in range(7)}) == 7


def test_every_image_is_taken_equally_often():
    source, seeds = numbered([7, 11]), 1009
    counts = np.bincount([
        index for seed in range(seeds)
        for index in members(stratified_part(source, images_per_class=3, seed=seed))], minlength=18)
    for label, size in enumerate((7, 11)):
        chance = 3 / size
        spread = math.sqrt(seeds * chance * (1 - chance))
        assert abs(counts[source.labels == label] - seeds * chance).max() < 4 * spread


def test_a_class_with_too_few_images_is_named():
    with pytest.raises(DataError) as error:
        stratified_part(numbered(), images_per_class=8)
    assert str(error.value) == ("data.images_per_class is 8, but class 'class 0' has 7 images to "
                                "train on")


# ---------------------------------------------------------------------------------------------
# Images that are held out
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held_out", [1, 4])
@pytest.mark.parametrize("limit", [dict(), dict(share=0.5), dict(images_per_class=3)])
def test_what_is_held_out_is_in_no_part_that_is_trained_on(held_out, limit):
    source = numbered([7, 11, 8, 30])
    held = held_out_part(source, images_per_class=held_out, seed=3)
    part = stratified_part(source, held_out=held_out, seed=3, **limit)
    assert sizes(held) == [held_out] * 4 and held.classes == source.classes
    assert not set(members(held)) & set(members(part))
    assert members(held) == sorted(members(held))
    assert held.labels.tolist() == source.labels[members(held)].tolist()
    expected = {(): [7, 11, 8, 30], ("share",): [7, 11, 8, 30],
                ("images_per_class",): [3 + held_out] * 4}[tuple(limit)]
    share = limit.get("share", 1.0)
    assert sizes(part) == [math.floor(share * (count - held_out) + 0.5) for count in expected]


def test_holding_images_out_does_not_change_which_are_trained_on():
    """So runs of a study that validate on the test set or not train on the same images."""
    source = numbered([13, 17])
    with_all = stratified_part(source, images_per_class=5, seed=3)
    beside = stratified_part(source, images_per_class=5, held_out=8, seed=3)
    assert members(with_all) == members(beside)


def test_a_smaller_held_out_part_lies_in_every_larger_one():
    source = numbered([13, 17])
    small, large = (set(members(held_out_part(source, images_per_class=count, seed=3)))
                    for count in (3, 8))
    assert small < large
    assert small != set(members(held_out_part(source, images_per_class=3, seed=4)))


def test_a_class_of_which_nothing_is_left_is_named():
    source = numbered([7, 3])
    with pytest.raises(DataError, match="held_out_per_class is 3, but class 'class 1' has 3 images in "
                                        "all; expected fewer"):
        held_out_part(source, images_per_class=3)
    with pytest.raises(DataError, match="'class 1' has 3 images to train on, of which "
                                        "data.held_out_per_class takes 2; expected at most 1$"):
        stratified_part(source, images_per_class=2, held_out=2)
    with pytest.raises(DataError, match="^class 'class 1' has 3 images to train on, of which "
                                        "data.held_out_per_class takes 3; expected at most 2$"):
        stratified_part(source, held_out=3)
