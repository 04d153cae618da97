"""Mixup and cutmix equal timm's formulas in plain Python, and have the stated distributions."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from deit import MIX, as_drawn
from torch import Tensor

from vitinit.data.augment import mix_images, mix_targets, smooth_one_hot
from vitinit.data.draw import UNMIXED, MixDraw
from vitinit.data.images import Box

NO_BOX = UNMIXED.box
MIXES = [
    UNMIXED,
    MixDraw(0.3137, NO_BOX),
    MixDraw(0.5, NO_BOX),
    MixDraw(0.0, NO_BOX),
    MixDraw(1.0 - 20 / 143, Box(3, 5, 4, 5)),
    MixDraw(0.0, Box(0, 0, 11, 13)),
    MixDraw(1.0, Box(7, 2, 0, 3)),
]


def timms_box(
    rng: np.random.Generator, height: int, width: int, lam: float
) -> tuple[int, int, int, int]:
    """rand_bbox of timm 0.3.2, which DeiT pins: rows from yl to below yh, columns from xl to below
    xh. In timm 1.0.31 sides of odd length are one pixel longer."""
    ratio = np.sqrt(1 - lam)
    cut_h, cut_w = int(height * ratio), int(width * ratio)
    cy = rng.integers(0, height)
    cx = rng.integers(0, width)
    yl = np.clip(cy - cut_h // 2, 0, height)
    yh = np.clip(cy + cut_h // 2, 0, height)
    xl = np.clip(cx - cut_w // 2, 0, width)
    xh = np.clip(cx + cut_w // 2, 0, width)
    return yl, yh, xl, xh


def timms_mix(
    rng: np.random.Generator,
    height: int,
    width: int,
    *,
    mixup_alpha: float = 0.8,
    cutmix_alpha: float = 1.0,
    probability: float = 1.0,
    switch_probability: float = 0.5,
) -> MixDraw:
    """timm's _params_per_batch and cutmix_bbox_and_lam; the switch is drawn in any case."""
    if not mixup_alpha and not cutmix_alpha or rng.random() >= probability:
        return UNMIXED
    switch = rng.random() < switch_probability
    if cutmix_alpha and (switch or not mixup_alpha):
        lam = rng.beta(cutmix_alpha, cutmix_alpha)
        yl, yh, xl, xh = timms_box(rng, height, width, lam)
        return MixDraw(
            1.0 - (yh - yl) * (xh - xl) / float(height * width), Box(yl, xl, yh - yl, xh - xl)
        )
    return MixDraw(rng.beta(mixup_alpha, mixup_alpha), NO_BOX)


def random_images(count: int, dtype: torch.dtype) -> Tensor:
    """Random images (count, 3, 11, 13): uniform levels as uint8, N(0, 1) as floats."""
    rng, shape = np.random.default_rng(count), (count, 3, 11, 13)
    values = rng.integers(0, 256, shape) if dtype == torch.uint8 else rng.normal(size=shape)
    return torch.from_numpy(values).to(dtype)


def mixed_one_by_one(images: np.ndarray, mixes: Sequence[MixDraw]) -> np.ndarray:
    """mix_images as a loop over images in numpy, as in timm's collate function."""
    mixed = []
    for image, partner, mix in zip(images, images[::-1], mixes, strict=True):
        image = image.copy()
        if mix.box != NO_BOX:
            for row in range(mix.box.top, mix.box.top + mix.box.height):
                for column in range(mix.box.left, mix.box.left + mix.box.width):
                    image[:, row, column] = partner[:, row, column]
        else:
            blend = image.astype(np.float32) * mix.share + partner.astype(np.float32) * (
                1.0 - mix.share
            )
            image = blend if image.dtype == np.float32 else np.rint(blend).astype(np.uint8)
        mixed.append(image)
    return np.stack(mixed)


@pytest.mark.parametrize(
    "height, width, options",
    [
        (224, 224, {}),
        (31, 37, {"probability": 0.7, "switch_probability": 0.3}),
        (1, 101, {}),
        (47, 11, {"mixup_alpha": 0.2, "cutmix_alpha": 0.5}),
        (23, 29, {"mixup_alpha": 0.0}),
        (23, 29, {"cutmix_alpha": 0.0}),
        (23, 29, {"mixup_alpha": 0.0, "cutmix_alpha": 0.0}),
        (23, 29, {"probability": 0.0}),
    ],
)
def test_a_mix_equals_timms_for_the_same_random_numbers(height, width, options, held_against):
    ours, theirs, kinds = np.random.default_rng(13), np.random.default_rng(13), set()
    mixing = replace(MIX, **options)
    for _ in range(101):
        mix = mixing.draw(ours, height, width)
        expected = timms_mix(theirs, height, width, **options)
        assert mix == expected
        held_against(list(mix), list(expected), within=0)
        kinds.add("none" if mix == UNMIXED else "mixup" if mix.box == NO_BOX else "cutmix")
    if height > 9:  # else a box may be empty
        wanted = {kind for kind in ("mixup", "cutmix") if options.get(f"{kind}_alpha") != 0.0}
        assert kinds - {"none"} == (wanted if mixing.probability else set())
        assert mixing.mixes == bool(kinds - {"none"})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    "halves",
    [MIXES, [UNMIXED, MIXES[1]], [UNMIXED, MIXES[4]]],
    ids=["of every kind", "a share or none", "a box or none"],
)
def test_every_pair_of_a_batch_is_mixed_in_its_own_way_as_if_it_were_alone(
    halves, dtype, held_against
):
    mixes = [*halves, *reversed(halves)]
    images = random_images(len(mixes), dtype)
    mixed = mix_images(images, as_drawn(mixes))
    assert mixed.dtype == dtype and torch.equal(images, random_images(len(mixes), dtype))
    expected = mixed_one_by_one(images.numpy(), mixes)
    np.testing.assert_array_equal(mixed.numpy(), expected)
    held_against(mixed, expected, cases=len(mixes), within=0)
    # The middle of an odd batch is its own partner.
    alone = mix_images(images[:1], as_drawn(halves[:1]))
    torch.testing.assert_close(alone, images[:1], rtol=1e-6, atol=0)
    targets = smooth_one_hot(torch.arange(len(mixes)), 19, 0.1)
    mixed_targets = mix_targets(targets, as_drawn(mixes))
    for place, mix in enumerate(halves):
        pair, drawn = [place, len(mixes) - 1 - place], as_drawn([mix] * 2)
        assert torch.equal(mixed[pair], mix_images(images[pair], drawn))
        assert torch.equal(mixed_targets[pair], mix_targets(targets[pair], drawn))


def test_the_loss_of_mixed_targets_is_the_mix_of_pytorchs_with_label_smoothing(held_against):
    generator = torch.Generator().manual_seed(6)
    logits = 3 * torch.randn(23, 17, generator=generator, dtype=torch.float64)
    labels = torch.randint(17, (23,), generator=generator)
    for smoothing in (0.0, 0.1, 1.0):
        own, partners = (
            F.cross_entropy(logits, wanted, label_smoothing=smoothing)
            for wanted in (labels, labels.flip(0))
        )
        targets = mix_targets(
            smooth_one_hot(labels, 17, smoothing), as_drawn([MixDraw(0.3, NO_BOX)] * 23)
        )
        ours = -(targets.double() * logits.log_softmax(1)).sum(1).mean()
        torch.testing.assert_close(ours, 0.3 * own + 0.7 * partners, rtol=1e-6, atol=0)
        held_against(ours, 0.3 * own + 0.7 * partners, cases=23)
