"""Subsets have the right sizes, are nested, and depend on their seed and the class alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from vitinit.data.sources import ImageFolder, ImagesInMemory, held_out_part, stratified_part
from vitinit.data.images import DataError
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


def test_every_class_keeps_its_share_rounded_and_at_least_one_or_a_number():
    for share, expected in ((0.25, [2, 3, 1, 8]), (0.5, [4, 6, 1, 15]), (0.05, [1, 1, 1, 2]),
                            (1e-9, [1, 1, 1, 1]), (0.99, [7, 11, 1, 30])):
        assert sizes(stratified_part(numbered(), share=share)) == expected
    assert sizes(stratified_part(numbered([7, 11, 5, 30]), images_per_class=5)) == [5] * 4
    source = numbered()
    assert stratified_part(source) is source


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


def test_a_smaller_part_lies_in_every_larger_one():
    source = numbered([7, 11, 9, 30])
    shares = [members(stratified_part(source, share=share, seed=5))
              for share in (0.01, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)]
    counts = [members(stratified_part(source, images_per_class=count, seed=5))
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
    part = stratified_part(source, share=0.5, seed=13)
    assert members(part) == sorted(expected) and part.classes == source.classes
    assert part.labels.tolist() == source.labels[members(part)].tolist()


# ---------------------------------------------------------------------------------------------
# Images that are held out
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit, expected", [
    (dict(), [3, 7, 4, 26]), (dict(share=0.5), [2, 4, 2, 13]), (dict(images_per_class=3), [3] * 4)])
def test_what_is_held_out_is_in_no_part_that_is_trained_on(limit, expected):
    source = numbered([7, 11, 8, 30])
    held = held_out_part(source, images_per_class=4, seed=3)
    part = stratified_part(source, held_out=4, seed=3, **limit)
    assert sizes(held) == [4] * 4 and sizes(part) == expected and held.classes == source.classes
    assert not set(members(held)) & set(members(part))
    assert members(held) == sorted(members(held))
    assert held.labels.tolist() == source.labels[members(held)].tolist()


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


@pytest.mark.parametrize("choose, least, held_out", [
    (lambda source: held_out_part(source, images_per_class=3), 1, 3),
    (lambda source: stratified_part(source, images_per_class=2, held_out=2), 2, 2),
    (lambda source: stratified_part(source, share=0.5, held_out=3), 1, 3)])
def test_a_class_with_too_few_images_is_named(choose, least, held_out):
    with pytest.raises(DataError) as error:
        choose(numbered([7, 3]))
    assert str(error.value) == (
        f"class 'class 1' has 3 images, too few to train on {least} and hold out {held_out} of them; "
        "expected less of data.images_per_class or data.held_out_per_class")
