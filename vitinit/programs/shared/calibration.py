"""How sure a classifier is: its expected calibration error, and the temperature of its logits.

Both are of Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...tasks import Loss

BINS = 15  # of equal width, each with its upper end, as in the paper
COLDEST, HOTTEST = 1e-3, 1e3  # temperatures between which one is sought
HALVINGS = 80  # of that interval, on a logarithmic scale: more than a double resolves


def reliability(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Images by the probability of their likeliest class, (3, BINS) float64 on the CPU: how many
    are in each bin, the sum of these probabilities, and how many are right. The bins of all images
    are the sum of those of parts.

    probabilities: (n, K); labels: (n,).
    """
    shares, guesses = probabilities.max(1)
    right = (guesses == labels).cpu().double()
    shares = shares.cpu().double()
    places = (shares * BINS).ceil().long() - 1
    places.clamp_(0, BINS - 1)  # a sigmoid may be 0
    rows = torch.stack([torch.ones_like(shares), shares, right])  # (3, n)
    return rows.new_zeros(3, BINS).index_add_(1, places, rows)


def calibration_error(bins: Tensor) -> float:
    """The mean over images of |accuracy − mean probability| of an image's bin, in percent.

    bins: (3, BINS), as of `reliability`.
    """
    images, sure, right = bins
    return 100.0 * float((right - sure).abs().sum() / images.sum())


def fit_temperature(logits: Tensor, labels: Tensor, loss: Loss) -> float:
    """The T for which the mean loss of logits / T is least: cross-entropy, or the binary one.

    Both losses are convex in 1 / T, with the derivative Σ (probabilities − targets) · logits, whose
    zero is bracketed, in float64. Raises ValueError if there is none between the bounds, as where
    all images are right.

    logits: (N, K); labels: (N,).
    """
    logits = logits.double()
    targets = F.one_hot(labels, logits.shape[1])

    def slope(temperature: float) -> float:
        errors = loss.probabilities(logits / temperature) - targets
        return float((errors * logits).sum())

    low, high = COLDEST, HOTTEST
    if not slope(high) < 0.0 < slope(low):
        raise ValueError(
            f"no temperature between {COLDEST:g} and {HOTTEST:g} makes the loss of these "
            f"{len(labels):,} images least, as where all or none are classified correctly"
        )
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        if slope(middle) > 0.0:
            low = middle
        else:
            high = middle
    return high
