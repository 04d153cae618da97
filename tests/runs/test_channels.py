"""A run of five channels, from files to predictions, evaluation, exports and figures."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refused import refused

import vitinit
from vitinit.programs import evaluate, export, predict
from vitinit.programs.figures import program as figures
from vitinit.programs.shared.plot import pixels
from vitinit.recipe.files import RecipeError, load_recipe, overrides
from vitinit.runs.data import augmentation_of
from vitinit.runs.teacher import learn_from_teacher

CPU = torch.device("cpu")
BANDS = ("data.mean=[0.1,0.2,0.3,0.4,0.5]", "data.std=[0.9,0.8,0.7,0.6,0.5]")
NO_THREE = dict(three_augment__probability="0.0", three_augment__color_jitter="0.0")
RUN = Path(__file__).parent / "data" / "version_12"


def changed(*sets: str):
    return load_recipe("quickstart", overrides(sets=sets))


def test_channels_and_operations_that_contradict_each_other_are_one_line():
    for sets in (BANDS[:1], BANDS[1:], ("data.mean=[]", "data.std=[]")):
        assert "as many values of both as images have channels" in refused(
            RecipeError, changed, *sets
        )
    for sets, words in (
        (
            ("rand_augment.fill=[7]",),
            "operations has Color or Contrast, which are defined for RGB and",
        ),
        (
            ('rand_augment.operations=["Invert"]',),
            "fill has 3 values, and data.mean 5; expected as ma",
        ),
    ):
        recipe = changed(*BANDS, "rand_augment.layers=1", *sets)
        assert words in refused(RecipeError, augmentation_of, recipe, 7, CPU)
    for sets in (("layers=0",), ("layers=1", 'operations=["Invert", "Rotate"]', "fill=[7]")):
        assert augmentation_of(changed(*BANDS, *(f"rand_augment.{one}" for one in sets)), 7, CPU)
    for key in ("probability", "color_jitter"):
        assert "expected 0 and 0, as they are defined for RGB and grey" in refused(
            RecipeError, changed, *BANDS, f"three_augment.{key}=0.3"
        )
    grey = (
        "data.mean=[0.5]",
        "data.std=[0.5]",
        "three_augment.probability=1.0",
        "rand_augment.layers=1",
        "rand_augment.fill=[7]",
    )
    assert augmentation_of(changed(*grey), 7, CPU)


def test_a_teacher_of_other_channels_is_refused():
    recipe = changed(*BANDS, f"distill.teacher={RUN}")
    assert (
        f"{RUN}: takes images of 3 channels, and data.mean has 5 values; expected as many"
        in refused(RecipeError, learn_from_teacher, recipe, ["blue", "green", "red"], CPU)
    )


def test_a_run_of_five_bands_is_trained_used_exported_and_drawn(
    tmp_path, train_program, small_run, image_tree, capsys
):
    rng = np.random.default_rng(0)
    for path in image_tree.rglob("*.png"):
        np.save(path.with_suffix(".npy"), rng.integers(0, 256, (10, 14, 5), np.uint8))
        path.unlink()
    some = [str(path) for path in sorted(image_tree.glob("val/*/00.npy"))]
    operations = '["Invert", "Rotate", "Sharpness"]'
    words = ("--set", BANDS[0], "--set", BANDS[1], "--set", "rand_augment.fill=[1,2,3,4,5]")
    run = tmp_path / "run"
    arguments = small_run(run, *words, rand_augment__operations=operations, **NO_THREE)
    assert train_program.main([*arguments, "--dry-run", "--read-images"]) == 0
    assert train_program.main(arguments) == 0
    trained = vitinit.load(run)
    array = np.load(some[0])
    expected = trained.predict(some[0])
    for image in (array, torch.from_numpy(array).permute(2, 0, 1), array.astype(np.uint16) * 257):
        assert trained.predict(image) == expected
    line = refused(ValueError, trained.predict, array[..., :3])
    assert (
        line.startswith("an image is an array (10, 14, 3) uint8, expected")
        and "W, 5) uint8" in line
    )
    refused(ValueError, trained.predict, Image.new("RGB", (5, 7)))
    assert predict.main([str(run), *some, "--sheet", str(tmp_path / "a.png"), "--attention"]) == 0
    assert evaluate.main([str(run)]) == 0

    run = run / "last.pt"  # not the best epoch's
    for name, to in (("a.safetensors", "safetensors"), ("timm", "safetensors"), ("small", "run")):
        assert export.main([str(run), "--to", to, "--out", str(tmp_path / name)]) == 0
    assert (
        export.main([str(run), "--to", "torch", "--normalise", "--out", str(tmp_path / "a.pt2")])
        == 0
    )
    config = json.loads((tmp_path / "timm" / "config.json").read_text())
    assert config["model_args"]["in_chans"] == config["pretrained_cfg"]["input_size"][0] == 5
    folder = ["--to", "safetensors", "--names", "transformers", "--out", str(tmp_path / "hf")]
    assert export.main([str(run), *folder]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_channels"] == 5
    assert not json.loads((tmp_path / "hf" / "preprocessor_config.json").read_text())[
        "do_convert_rgb"
    ]
    assert dict(vitinit.load(tmp_path / "hf").predict(array)) == pytest.approx(dict(expected))
    assert vitinit.load(tmp_path / "timm", recipe="quickstart").predict(array)[0] == expected[0]
    assert (
        figures.main(["explore", *some, "--run", str(run), "--out", str(tmp_path / "a.html")]) == 0
    )
    assert figures.main(["report", str(run.parent), "--out", str(tmp_path / "b.html")]) == 0
    assert "data:image/png" in (tmp_path / "a.html").read_text()


def test_a_picture_shows_the_first_three_channels_or_the_first_in_grey():
    image = torch.arange(5 * 2 * 3, dtype=torch.uint8).view(5, 2, 3)
    assert np.array_equal(pixels(image), image[:3].permute(1, 2, 0))
    assert np.array_equal(pixels(image[:2]), image[[0, 0, 0]].permute(1, 2, 0))


def test_a_masked_autoencoder_reconstructs_all_channels(tmp_path, image_tree, capsys):
    recipe = ("own_images", "data.image_size=8", "model.options.patch_size=2", "schedule.epochs=1")
    sets = [
        *recipe[1:],
        "data.mean=[0.4]",
        "data.std=[0.2]",
        "schedule.warmup_epochs=0",
        "data.workers=0",
        "optim.global_batch=12",
        "optim.max_batch_per_process=12",
    ]
    run = vitinit.Run("own_images", data_dir=image_tree, out_dir=tmp_path / "run", overrides=sets)
    run.train()
    [photograph] = image_tree.glob("val/red/00.png")
    out = tmp_path / "a.png"
    assert (
        figures.main(
            ["reconstruct", str(photograph), "--run", str(tmp_path / "run"), "--out", str(out)]
        )
        == 0
    )
    with Image.open(out) as drawn:
        assert drawn.width > 100
