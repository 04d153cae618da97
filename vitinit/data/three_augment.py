"""3-Augment (DeiT III, arXiv 2204.07118, §3.3): what is drawn for an image.

Its operations are among those of rand_augment.py, which applies them: grey is Color with factor 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from ..base.values import Proportion
from .rand_augment import Operation

RADII = (0.1, 2.0)  # of blurs: least and largest standard deviation, in pixels
JITTERED = (Operation.Brightness, Operation.Contrast, Operation.Color)


@dataclass(frozen=True)
class ThreeAugment:
    """With `probability` one of three, by equal chance: grey, solarised, blurred. Then brightness,
    contrast and saturation, in an order that is drawn, by factors uniform on 1 ± color_jitter.
    """

    probability: Proportion  # DeiT III's: 1
    color_jitter: Proportion  # DeiT III's: .3

    def draw(self, generators: Iterable[Generator], count: int) -> ndarray:
        """Draw the operations of `count` samples, one generator each, like `draw_operations`.

        Returns (count, 4, 3), or (count, 0, 3) if all is off.
        """
        if self == NO_THREE_AUGMENT:
            return np.zeros((count, 0, 3))
        operations = np.zeros((count, 4, 3))
        least, most = 1 - self.color_jitter, 1 + self.color_jitter
        for of_sample, rng in zip(operations, generators):
            applies, which, radius = rng.random(), rng.integers(3), rng.uniform(*RADII)
            three = (
                (Operation.Color, 0),
                (Operation.Solarize, 128),
                (Operation.GaussianBlur, radius),
            )
            if applies < self.probability:
                of_sample[0, :2] = three[which]
            of_sample[1:, 0] = rng.permutation(JITTERED)
            of_sample[1:, 1] = rng.uniform(least, most, 3)
        return operations


NO_THREE_AUGMENT = ThreeAugment(probability=0.0, color_jitter=0.0)
