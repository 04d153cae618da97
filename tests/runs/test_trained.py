"""vitinit.load: its predictions are those that eval.py counts, for every kind of image."""

import copy
import io
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refused import refused

import vitinit
from vitinit.base.values import ReadOnly
from vitinit.programs.predict import attended, classify
from vitinit.runs import trained as trained_module
from vitinit.runs.checkpoint import read_checkpoint_file as load_checkpoint

RUN = Path(__file__).parent / "data" / "version_12"  # three classes of 8-pixel images
ABSENT = [] if torch.cuda.is_available() else [0]  # the number of a GPU that is not there
SIZES = dict(embed_dim=12, depth=1, num_heads=3, patch_size=4)


def drawn_image(height: int = 11, width: int = 13, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def as_tensor(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image).permute(2, 0, 1)


def test_predictions_are_those_that_eval_counts(eval_program, image_tree, monkeypatch, capsys):
    monkeypatch.setattr(trained_module, "BATCH", 3)
    assert vitinit.load(RUN).predict_batch([]) == []
    assert eval_program.main([str(RUN), "--data-dir", str(image_tree), "--json", "-"]) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    paths = sorted((image_tree / "val").glob("*/*.png"))
    names = [path.parent.name for path in paths]
    for weights in ("model", "ema"):
        guesses = vitinit.load(RUN, weights=weights).predict_batch(iter(paths), top=3)
        assert sum(guess[0][0] == name for guess, name in zip(guesses, names)) == round(
            measured[weights]["top1"] / 100 * len(paths)
        )
        loss = -np.mean([np.log(dict(guess)[name]) for guess, name in zip(guesses, names)])
        assert loss == pytest.approx(measured[weights]["loss"], rel=1e-5)


def test_every_kind_of_image_is_the_same_image(tmp_path):
    trained, pixels = vitinit.load(RUN), drawn_image()
    image, path, packed = Image.fromarray(pixels), tmp_path / "image.png", io.BytesIO()
    image.save(path)
    image.save(packed, "PNG")
    frame = np.ascontiguousarray(pixels[..., ::-1])  # BGR, as OpenCV reads a video
    frame.flags.writeable = False
    kinds = [
        path,
        str(path),
        packed.getvalue(),
        image,
        as_tensor(pixels),
        image.convert("RGBA"),
        pixels,
        frame[..., ::-1],
    ]
    batch = trained.preprocess(kinds)
    assert batch.shape == (8, 3, 8, 8) and batch.dtype == torch.float32
    for kind, one in zip(kinds, batch):
        assert torch.equal(one, batch[0])
        assert torch.equal(trained.preprocess(kind), batch[:1])
        assert trained.predict(kind) == trained.predict(path)
    assert torch.equal(trained.preprocess(torch.stack([as_tensor(pixels)] * 2)), batch[:2])
    assert torch.equal(trained.preprocess(np.stack([pixels] * 2)), batch[:2])
    other = trained.preprocess(as_tensor(drawn_image(seed=1)))
    assert not torch.equal(other, batch[:1])


def test_equally_likely_classes_stand_in_order_and_another_size_is_that_of_views_too():
    trained = vitinit.load(RUN)
    assert trained.ranked(torch.tensor([[0.3, 0.4, 0.3], [0.2, 0.4, 0.4]]), top=3) == [
        [
            (trained.classes[1], pytest.approx(0.4)),
            (trained.classes[0], pytest.approx(0.3)),
            (trained.classes[2], pytest.approx(0.3)),
        ],
        [
            (trained.classes[1], pytest.approx(0.4)),
            (trained.classes[2], pytest.approx(0.4)),
            (trained.classes[0], pytest.approx(0.2)),
        ],
    ]
    trained = vitinit.load(RUN, image_size=(12, 16))
    assert trained.image_size == (12, 16) and trained.model.grid == (3, 4)
    assert trained.preprocess(as_tensor(drawn_image(50, 40))).shape == (1, 3, 12, 16)
    assert vitinit.load(RUN, image_size=16).image_size == (16, 16)


def test_a_wrapped_backbone_is_named_and_its_projection_is_no_classifier(tmp_path, capsys):
    """As DINO's code writes them, with a projection that only its loss reads."""
    options = {f"model.options.{key}": value for key, value in SIZES.items()}
    model = vitinit.build_model("vit_tiny", num_classes=0, image_size=8, **SIZES)
    vitinit.init_weights(model, "torch", generator=torch.Generator().manual_seed(0))
    torch.save(
        {
            "teacher": {f"backbone.{name}": value for name, value in model.state_dict().items()}
            | {"head.mlp.0.weight": torch.ones(2, 12)}
        },
        tmp_path / "dino.pth",
    )
    trained = vitinit.load(
        tmp_path / "dino.pth", recipe="deit_tiny", overrides=options | {"data.image_size": 8}
    )
    image = torch.randn(2, 3, 8, 8)
    assert torch.equal(trained.model(image), model.eval()(image)) and trained.classes == ()
    assert "dino.pth: 'backbone.' taken off the names; assumed, as" in capsys.readouterr().err


@pytest.mark.parametrize("weights", ["model", "ema"])
def test_a_loaded_model_evaluates_and_is_frozen_until_its_gradients_are_asked_for(weights):
    model = vitinit.load(RUN, weights=weights).model
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model(torch.randn(1, 3, 8, 8)).requires_grad
    model.requires_grad_(True)(torch.randn(1, 3, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_predicts_the_same(copied):
    trained, image = vitinit.load(RUN), as_tensor(drawn_image())
    other = copied(trained)
    assert other.predict(image) == trained.predict(image) and other.recipe == trained.recipe
    assert (
        repr(other)
        == repr(trained)
        == (
            f"Trained vit_tiny, model of {RUN / 'last.pt'}\n"
            "3 classes: blue, green, red\nimages of 8×8"
        )
    )
    assert other.model is not trained.model and type(other.recipe.model.options) is ReadOnly


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_images_have_the_precision_of_the_model(dtype, tmp_path):
    trained, pixels = vitinit.load(RUN), drawn_image()
    expected = dict(trained.predict(as_tensor(pixels)))
    Image.fromarray(pixels).save(path := str(tmp_path / "image.png"))
    trained.model.to(dtype)
    assert trained.preprocess(path).dtype == dtype
    ((guess, view),) = classify(trained, [path], [None], top=3)  # of the program
    for ranked in (trained.predict(path), guess.ranked):
        assert dict(ranked) == pytest.approx(expected, abs=0.02)
    assert attended(trained, view).isfinite().all()


def test_what_a_checkpoint_lacks_and_weights_sizes_and_devices_that_are_none_are_one_line(tmp_path):
    """tests/programs/test_eval.py has what it refuses as well."""
    state = load_checkpoint(RUN / "last.pt")
    torch.save({"model": state["model"]}, tmp_path / "bare.pt")
    torch.save(state | {"ema": None, "classes": None}, tmp_path / "alone.pt")
    assert vitinit.load(tmp_path / "alone.pt").classes == ("0", "1", "2")
    assert "bare.pt: recipe photos has data.num_classes = 0, which only" in refused(
        ValueError, vitinit.load, tmp_path / "bare.pt", recipe="photos"
    )
    with pytest.raises(ValueError, match="bare.pt: holds no recipe; .*recipe=… in Python"):
        vitinit.load(tmp_path / "bare.pt")
    with pytest.raises(ValueError, match="alone.pt: no model in it; .* under the key 'ema'"):
        vitinit.load(tmp_path / "alone.pt", weights="ema")
    for arguments, problem in (
        (dict(weights="best"), 'weights is \'best\', expected "model" or "ema"'),
        *(
            (dict(image_size=size), f"the image size is {size!r}, expected an integer")
            for size in (0, 1.5, "x", (8, -8), (8, 8, 8))
        ),
        *(
            (dict(device=name), f"device is '{name}', expected one that this machine has (")
            for name in ("gpu", "cpu:x", "cuda:99", "meta", *ABSENT)
        ),
    ):
        assert problem in refused(ValueError, vitinit.load, RUN, **arguments)


def test_one_image_in_place_of_several_is_one(tmp_path):
    trained, path = vitinit.load(RUN), tmp_path / "a.png"
    Image.fromarray(as_tensor(drawn_image()).permute(1, 2, 0).numpy()).save(path)
    expected = [trained.predict(path)]
    for image in (path, str(path), path.read_bytes(), Image.open(path), as_tensor(drawn_image())):
        assert trained.predict_batch(image) == expected
    several = torch.stack([as_tensor(drawn_image())] * 3)
    assert trained.predict_batch(several) == expected * 3
    assert trained.predict_batch(iter([path, path])) == expected * 2


def test_what_is_no_image_is_one_line():
    trained, good = vitinit.load(RUN), as_tensor(drawn_image())
    for image, problem in (
        ("nowhere.jpg", "nowhere.jpg: cannot be read: No such file or directory"),
        (b"text", "an image given as bytes: not a readable image, 4 bytes"),
        (17, "an image is a int, expected a path, bytes, a PIL image or a tensor"),
        (torch.zeros(3, 5, 7), r"an image is a tensor \(3, 5, 7\) torch.float32, expected "),
        (torch.zeros(3, 0, 7, dtype=torch.uint8), r"an image is a tensor \(3, 0, 7\) torch.uint8"),
        *(
            (np.zeros(size, kind), rf"an image is an array \({size[0]}, .*\) {kind.__name__}, ex")
            for size, kind in [
                ((5, 7), np.uint8),
                ((3, 5, 7), np.uint8),
                ((5, 7, 4), np.uint8),
                ((0, 7, 3), np.uint8),
                ((5, 7, 3), np.float32),
            ]
        ),
    ):
        for call in (
            trained.predict,
            lambda one: trained.preprocess([good, one]),
            *[trained.preprocess] * isinstance(image, np.ndarray),
        ):
            assert re.search(problem, refused(ValueError, call, image))
    Image.fromarray(drawn_image()).save(packed := io.BytesIO(), "JPEG")
    with pytest.raises(ValueError, match="an image of Pillow that cannot be read: image file is t"):
        vitinit.load(RUN).predict(Image.open(io.BytesIO(packed.getvalue()[:-100])))
    with pytest.raises(ValueError, match="no image was given; expected at least one"):
        trained.preprocess([])
    assert trained.predict(good, top=None) == trained.predict(good, top=3)
    for top in (0, -1, 2.0, "3"):
        with pytest.raises(ValueError, match=f"top is {top!r}, expected an integer of at leas"):
            trained.predict(good, top=top)
