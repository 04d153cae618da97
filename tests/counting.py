"""The numbers of an evaluation, counted one image at a time in float64."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor, nn


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
