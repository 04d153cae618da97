"""Learning one class of an image: the losses of [loss] in float64, their weights, what they refuse."""

import numpy as np
import pytest
import torch
from refused import refused
from same_run import assert_same_run, rows_of
from sklearn.utils.class_weight import compute_class_weight

from vitinit.recipe.files import RecipeError, load_recipe, overrides
from vitinit.tasks import Loss
from vitinit.tasks.labels import Labels, weights_of

CPU = torch.device("cpu")
CLASSES, IMAGES = 7, 11
RECONSTRUCT = {"task.name": "reconstruct", "checkpoint.best_by": "val_loss"}
BINARY = {"loss.name": "binary_cross_entropy"}


def drawn(seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and targets as mixing leaves them: zeros, and shares of one class or two."""
    rng = np.random.default_rng(seed)
    logits = 3 * rng.normal(size=(IMAGES, CLASSES))
    share = rng.uniform(size=(IMAGES, 1)).astype(np.float32)
    one, other = (np.eye(CLASSES)[rng.integers(CLASSES, size=IMAGES)] for _ in range(2))
    return logits.astype(np.float32), (share * one + (1 - share) * other).astype(np.float32)


def of_formula(loss: Loss, weights: np.ndarray) -> float:
    """The losses as they are defined, in float64."""
    logits, targets = (part.astype(np.float64) for part in drawn())
    if loss.name == "cross_entropy":
        logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return -(weights * targets * logs).sum(1).mean()
    if loss.targets == "any":
        targets = (targets > 0).astype(np.float64)
    yes, no = (-np.log1p(np.exp(sign * logits)) for sign in (-1, 1))
    return -(weights * targets * yes + (1 - targets) * no).mean()


@pytest.mark.parametrize(
    "name, targets, class_weights",
    [
        ("cross_entropy", "share", (0.5, 2.0, 1.0, 3.0, 0.25, 1.5, 1.0)),
        ("cross_entropy", "share", "balanced"),
        ("binary_cross_entropy", "share", "none"),
        ("binary_cross_entropy", "any", "none"),
        ("binary_cross_entropy", "any", "balanced"),
    ],
)
def test_a_loss_is_its_formula_with_the_weight_of_each_class(
    name, targets, class_weights, held_against
):
    """Balanced weights are scikit-learn's."""
    loss, counts = Loss(name, targets, class_weights), [2, 3, 5, 7, 11, 13, 17]
    expected = {
        "none": np.ones(CLASSES),
        "balanced": compute_class_weight(
            "balanced", classes=np.arange(CLASSES), y=np.repeat(np.arange(CLASSES), counts)
        ),
    }.get(class_weights, np.array(class_weights) if isinstance(class_weights, tuple) else None)
    objective = Labels([*"abcdefg"]).objective(loss, counts, CPU)
    logits, labels = map(torch.from_numpy, drawn())
    found = objective(lambda images: logits, None, (), labels)
    assert found.item() == pytest.approx(of_formula(loss, expected), rel=1e-6)
    held_against(found, of_formula(loss, expected), cases=IMAGES)
    if class_weights == "balanced":
        np.testing.assert_allclose(weights_of(loss, counts, CPU), expected, rtol=1e-7)
        without = weights_of(loss, [0, *counts[1:]], CPU)  # as a part of a set may be
        assert without.isfinite().all() and without[0] > without[1:].max()


def test_another_number_of_weights_than_classes_is_refused():
    loss = Loss("cross_entropy", "share", (1.0, 2.0))
    assert refused(ValueError, Labels([*"abc"]).objective, loss, [5, 3, 2], CPU) == (
        "loss.class_weights has 2 values; expected one for each of the 3 classes, in their order"
    )


@pytest.mark.parametrize(
    "sets, words",
    [
        ({"loss.targets": "any"}, "expected share, as its targets are probabilities"),
        (
            BINARY | {"loss.targets": "any", "mix.label_smoothing": 0.1},
            "it gives every class a share",
        ),
        (
            {"loss.class_weights": "balanced", "data.sampling": "balanced"},
            "none, as all classes come equally often already",
        ),
        (BINARY | {"distill.teacher": "a", "distill.kind": "hard"}, "with plain cross-entropy"),
        (
            {"loss.class_weights": "balanced", "distill.teacher": "a"},
            'loss.class_weights = "balanced" with distill.teacher = "a"; expected none: a teacher',
        ),
        (
            RECONSTRUCT | {"data.name": "images", "data.root": "a", "data.sampling": "balanced"},
            "shuffled, as these have no classes",
        ),
        (RECONSTRUCT | BINARY, "cross_entropy, as the task has a loss of its own"),
        ({"loss.class_weights": [1.0, 0.0]}, "loss.class_weights is "),
        ({"checkpoint.best_by": "val_map"}, "expected val_loss or val_top1 or ema_top1"),
    ],
)
def test_keys_that_go_with_no_other_are_refused(sets, words):
    base = {"mix.label_smoothing": 0.0}
    line = refused(RecipeError, load_recipe, "quickstart", overrides(sets=base | sets))
    assert words in line


@pytest.mark.parametrize(
    "changes",
    [
        dict(loss__name="binary_cross_entropy", loss__class_weights="balanced"),
        dict(data__sampling="balanced"),
    ],
    ids=["loss", "sampling"],
)
def test_a_run_with_it_is_resumed_to_the_bit_and_is_another_than_without(
    changes, train_program, small_run, straight, image_tree, tmp_path, monkeypatch, stop_before
):
    for path in sorted((image_tree / "train").glob("*/1*.png"))[:9]:  # classes of unequal size
        path.unlink()
    whole, cut, without = (tmp_path / name for name in ("whole", "cut", "without"))
    assert train_program.main(small_run(whole, **changes)) == 0
    monkeypatch.setattr("vitinit.run.StopRequest", stop_before(6))
    assert train_program.main(small_run(cut, **changes)) == 143
    monkeypatch.setattr("vitinit.run.StopRequest", stop_before(10**6))
    assert train_program.main(["--resume", str(cut)]) == 0
    assert_same_run(whole, cut)
    assert train_program.main(small_run(without, schedule__epochs="1")) == 0
    assert rows_of(whole)[0]["train_loss"] != rows_of(without)[0]["train_loss"]
