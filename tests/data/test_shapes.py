"""The embedded data set: each image is a pure function of (split, index)."""

import numpy as np
import pytest
import torch

from vitinit.base.keys import Purpose, keyed_generator
from vitinit.data import shapes

SMALL = {"train": 211, "val": 107}
FAR = 1.5  # in radii; no shape reaches this far from its centre


def lens(radius: float, other: float, distance: float) -> float:
    """The area of the intersection of two discs whose centres are `distance` apart."""

    def segment(one: float, two: float) -> float:
        angle = np.arccos((distance**2 + one**2 - two**2) / (2 * distance * one))
        return one**2 * (angle - np.sin(angle) * np.cos(angle))

    return segment(radius, other) + segment(other, radius)


@pytest.fixture(scope="module")
def splits():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "SIZES_OF_SPLITS", SMALL)
        return {split: shapes.Shapes(split) for split in SMALL}


def alone(split_number: int, index: int) -> tuple[np.ndarray, int]:
    return shapes.draw_image(keyed_generator(shapes.SEED, Purpose.SHAPES, split_number, index))


def test_an_image_alone_equals_the_image_in_its_split_and_occurs_in_no_other_place(splits):
    images_of = {
        split: torch.stack([source.image(index) for index in range(len(source))])
        for split, source in splits.items()
    }
    for number, (split, images) in enumerate(images_of.items()):
        labels = splits[split].labels
        assert images.shape == (SMALL[split], 3, 32, 32) and images.dtype == torch.uint8
        assert labels.shape == (SMALL[split],) and labels.dtype == np.int64
        for index in (0, 1, 59, 101):
            image, label = alone(number, index)
            assert np.array_equal(images[index].numpy(), image) and labels[index] == label
            part = splits[split].part(np.array([index]))
            assert part.image(0) is splits[split].image(index)  # painted once
        counts, expected = np.bincount(labels, minlength=10), len(labels) / 10
        assert len(counts) == len(shapes.CLASSES) == 10
        assert abs(counts - expected).max() < 4 * (0.9 * expected) ** 0.5
    pixels = [image.tobytes() for images in images_of.values() for image in images.numpy()]
    assert len(set(pixels)) == sum(SMALL.values())
    assert int(images_of["train"][:5].flatten().long() @ torch.arange(15_360)) == 10_824_969_044


def test_clutter_drawn_in_its_window_equals_clutter_drawn_on_the_whole_canvas(monkeypatch):
    fast = [alone(0, index)[0] for index in range(29)]
    monkeypatch.setattr(shapes, "_window", lambda centre, radius: (slice(None), slice(None)))
    slow = [alone(0, index)[0] for index in range(29)]
    assert np.array_equal(fast, slow)


def test_a_shapes_area_is_that_of_its_name():
    areas = {
        "disc": np.pi * 0.85**2,
        "ring": np.pi * (0.9**2 - 0.5**2),
        "square": 1.5**2,
        "frame": 1.6**2 - 0.84**2,
        "triangle": 3 * 3**0.5 * 0.5**2,
        "cross": 2 * 1.9 * 0.56 - 0.56**2,
        "bars": 2 * 0.52 * 1.8,
        "half_disc": np.pi / 2,
        "crescent": np.pi - lens(1.0, 0.75, 0.45),
        # A pentagon of apothem a = 0.38 and five points on its sides, 72° at their feet.
        "star": 5 * 0.38**2 * np.tan(np.pi / 5) * (1 + np.tan(np.pi / 5) * np.tan(2 * np.pi / 5)),
    }
    assert areas.keys() == shapes.SHAPES.keys()
    axis = (np.arange(1201) + 0.5) / 1201 * 2 * FAR - FAR
    for name, area in areas.items():
        inside = shapes.SHAPES[name](*np.meshgrid(axis, axis))
        assert not inside[[0, -1]].any() and not inside[:, [0, -1]].any()  # all is on the grid
        assert inside.mean() * (2 * FAR) ** 2 == pytest.approx(area, rel=0.005), name
