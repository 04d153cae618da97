"""The numbers of an evaluation, counted one image at a time in float64."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor, nn


def calibration_error_by_hand(probabilities: np.ndarray, labels: Iterable[int]) -> float:
    """In percent, as equations 2 and 3 of Guo et al. (arXiv 1706.04599) have it: images n of the
    n-th interval ((m − 1)/M, m/M], whose confidence is the probability of the likeliest class."""
    error, intervals = 0.0, 15
    confidence, guesses = probabilities.max(1), probabilities.argmax(1)
    right = guesses == np.asarray(list(labels))
    for m in range(1, intervals + 1):
        inside = (confidence > (m - 1) / intervals) & (confidence <= m / intervals)
        if inside.any():
            gap = abs(right[inside].mean() - confidence[inside].mean())
            error += inside.sum() / len(confidence) * gap
    return 100 * error


def counted_by_hand(
    model: nn.Module, images: Sequence[Tensor], labels: Iterable[int], chosen: Sequence[int]
) -> tuple[float, float, float, np.ndarray]:
    """Loss, top-1 and top-5 in percent, and the confusion matrix (K, K) of images (3, H, W).
    chosen: the model's classes that compete; labels count within them. A rank is the number of
    classes that are ahead."""
    loss, top1, top5, model = 0.0, 0, 0, model.double().eval()
    confusion = np.zeros((len(chosen), len(chosen)), int)
    for image, label in zip(images, labels, strict=True):
        logits = model(image[None].double())[0].tolist()
        logits = [logits[place] for place in chosen]
        ahead = sum(logit > logits[label] for logit in logits)
        loss += math.log(sum(math.exp(logit - logits[label]) for logit in logits))
        top1, top5 = top1 + (ahead < 1), top5 + (ahead < 5)
        confusion[label, np.argmax(logits)] += 1
    return loss / len(images), 100 * top1 / len(images), 100 * top5 / len(images), confusion
