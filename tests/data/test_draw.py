"""The draws of a sample: keyed by (seed, epoch, index), with the distributions they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torchvision.transforms import RandomResizedCrop

from vitinit.data.draw import SampleKey, draw_crop, draw_view, epoch_order
from vitinit.data.images import Box

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
KS_LIMIT = 1.95          # of the Kolmogorov-Smirnov distance, times √n: one in a thousand


def views(*, seed=3, epoch=5, first=0, count=53, height=101, width=103, scale=SCALE, ratio=RATIO,
          padding=0, flip=0.5):
    return [draw_view(SampleKey(epoch, index), height, width, seed=seed, scale=scale, ratio=ratio,
                      padding=padding, flip=flip) for index in range(first, first + count)]


def crops(count: int, height: int, width: int, *, scale=SCALE, ratio=RATIO,
          padding=0) -> np.ndarray:
    """(count, 4): top, left, height and width of boxes."""
    rng = np.random.default_rng(7)
    return np.array([draw_crop(rng, height, width, scale=scale, ratio=ratio, padding=padding)
                     for _ in range(count)])


def distance_from_uniform(values: np.ndarray, low: float, high: float) -> float:
    """Kolmogorov-Smirnov, times √n."""
    steps = (np.arange(len(values)) + 0.5) / len(values)
    return abs((np.sort(values) - low) / (high - low) - steps).max() * len(values)**0.5


def distance_between(one: np.ndarray, two: np.ndarray) -> float:
    """Two-sample Kolmogorov-Smirnov for samples of one size n, times √(n / 2)."""
    at = np.concatenate([one, two])
    shares = [np.searchsorted(np.sort(sample), at, side="right") / len(sample)
              for sample in (one, two)]
    return abs(shares[0] - shares[1]).max() * (len(one) / 2)**0.5


def test_the_same_key_gives_the_same_view_in_any_order():
    forwards = views()
    backwards = [views(first=index, count=1)[0] for index in reversed(range(53))]
    assert forwards == backwards[::-1]


@pytest.mark.parametrize("other", [{"seed": 4}, {"epoch": 6}, {"first": 53}])
def test_another_seed_epoch_or_image_gives_other_views(other):
    same = sum(one == two for one, two in zip(views(), views(**other)))
    assert same <= 1                                         # of 53


def test_the_epoch_and_the_index_are_not_interchangeable():
    assert views(epoch=5, first=7, count=1) != views(epoch=7, first=5, count=1)


def test_area_share_and_log_ratio_are_uniform_where_every_box_fits():
    # At most half the area at 4:3 fits a nearly square picture, so that nothing is rejected.
    boxes = crops(3001, 1009, 1013, scale=(0.1, 0.5))
    top, left, height, width = boxes.T
    assert distance_from_uniform(height * width / (1009 * 1013), 0.1, 0.5) < KS_LIMIT
    assert distance_from_uniform(np.log(width / height), *np.log(RATIO)) < KS_LIMIT
    assert distance_from_uniform((top + 0.5) / (1009 - height + 1), 0, 1) < KS_LIMIT
    assert distance_from_uniform((left + 0.5) / (1013 - width + 1), 0, 1) < KS_LIMIT


def test_with_rejections_the_boxes_are_distributed_like_torchvisions():
    torch.manual_seed(11)
    picture = torch.empty(3, 101, 307)
    theirs = np.array([RandomResizedCrop.get_params(picture, list(SCALE), list(RATIO))
                       for _ in range(5003)])
    ours = crops(5003, 101, 307)
    for one, two in zip(ours.T, theirs.T):                   # top, left, height, width
        assert distance_between(one, two) < KS_LIMIT
    assert distance_between(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3]) < KS_LIMIT


@pytest.mark.parametrize("height, width", [(31, 37), (47, 11), (5, 101), (1, 1), (2, 3)])
def test_without_padding_a_box_lies_in_the_picture(height, width):
    top, left, box_height, box_width = crops(503, height, width).T
    assert min(top.min(), left.min()) >= 0 and min(box_height.min(), box_width.min()) >= 1
    assert (top + box_height).max() <= height and (left + box_width).max() <= width


def test_a_box_reaches_every_place_equally_often_and_no_other():
    # 7 × 11 pixels, 30 % of the area, square: 5 × 5 boxes at 3 × 7 places.
    boxes = crops(2100, 7, 11, scale=(0.3, 0.3), ratio=(1.0, 1.0))
    assert set(map(tuple, boxes[:, 2:].tolist())) == {(5, 5)}
    places, counts = np.unique(boxes[:, :2], axis=0, return_counts=True)
    assert places.tolist() == [[top, left] for top in range(3) for left in range(7)]
    assert abs(counts - 100).max() < 4 * 100**0.5


@pytest.mark.parametrize("scale", [SCALE, (2.0, 2.0)])       # (2, 2): no box fits any picture
def test_an_extreme_picture_falls_back_to_torchvisions_centre(scale):
    for height, width in ((5, 101), (103, 5), (3, 211), (109, 7)):
        expected = RandomResizedCrop.get_params(torch.empty(3, height, width), list(scale),
                                                list(RATIO))
        assert (crops(13, height, width, scale=scale) == expected).all()


@pytest.mark.parametrize("height, width", [(31, 37), (53, 43), (43, 59), (41, 30), (17, 17)])
def test_when_nothing_fits_the_centre_equals_torchvisions(height, width):
    expected = RandomResizedCrop.get_params(torch.empty(3, height, width), [2.0, 2.0], list(RATIO))
    assert (crops(1, height, width, scale=(2.0, 2.0)) == expected).all()


@pytest.mark.parametrize("size, padding", [(31, 4), (29, 1), (37, 0)])
def test_pad_and_shift_is_uniform_on_all_shifts(size, padding):
    shifts = range(-padding, padding + 1)
    expected = 100
    boxes = crops(expected * len(shifts)**2, size, size, scale=(1.0, 1.0), ratio=(1.0, 1.0),
                  padding=padding)
    assert (boxes[:, 2:] == size).all()
    places, counts = np.unique(boxes[:, :2], axis=0, return_counts=True)
    assert places.tolist() == [[down, right] for down in shifts for right in shifts]
    assert abs(counts - expected).max() < 4 * expected**0.5


def test_with_padding_a_box_stays_on_the_padded_picture():
    top, left, height, width = crops(2003, 31, 37, padding=5).T
    assert top.min() == -5 and left.min() == -5              # and both borders are reached
    assert (top + height).max() == 31 + 5 and (left + width).max() == 37 + 5


@pytest.mark.parametrize("flip", [0.0, 0.3, 0.5, 1.0])
def test_flips_come_at_their_rate_and_leave_the_crop_alone(flip):
    drawn = views(count=3001, flip=flip)
    rate = sum(view.flip for view in drawn) / len(drawn)
    assert abs(rate - flip) <= 4 * math.sqrt(flip * (1 - flip) / len(drawn))
    assert [view.box for view in drawn[:53]] == [view.box for view in views(flip=0.9)]
    assert isinstance(drawn[0].flip, bool) and isinstance(drawn[0].box, Box)


@pytest.mark.parametrize("count", [1, 2, 1009])
def test_an_epochs_order_holds_every_image_once(count):
    assert sorted(epoch_order(3, 5, count).tolist()) == list(range(count))


def test_orders_repeat_by_key_and_differ_between_epochs_and_seeds():
    order = epoch_order(3, 5, 1009)
    assert np.array_equal(order, epoch_order(3, 5, 1009))
    for other in (epoch_order(3, 6, 1009), epoch_order(4, 5, 1009), np.arange(1009)):
        assert (order == other).sum() < 10                   # about one agrees by chance


def test_every_image_is_first_equally_often():
    counts = np.bincount([epoch_order(3, epoch, 7)[0] for epoch in range(1400)], minlength=7)
    assert abs(counts - 200).max() < 4 * 200**0.5
