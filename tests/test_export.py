"""vitinit.export: exported files are the model."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open

import vitinit
from vitinit import export
from vitinit.data.augment import normalise
from vitinit.recipe.files import dump_recipe, from_dict, load_recipe, overrides

REPOSITORY = Path(__file__).resolve().parents[1]
RUN = Path(__file__).parent / "runs" / "data" / "version_12"
FAMILIES = {        # recipe, changes
    "vit": ("quickstart", ["data.name=image_folder", "model.options.embed_dim=24",
                           "model.options.depth=1"]),
    "swin": ("cifar10_swin_tiny", ["model.options.embed_dim=6", "model.options.depths=[1,2]",
                                   "model.options.num_heads=[2,3]"]),
    "mixer": ("cifar10_mixer", ["model.options.embed_dim=14", "model.options.depth=1"]),
    "conv_mixer": ("cifar10_convmixer", ["model.options.embed_dim=11", "model.options.depth=1"]),
    "simple_vit": ("cifar10_simple_vit", ["model.options.embed_dim=28", "model.options.depth=1",
                                          "model.options.num_heads=2"]),
}


def recipe_of(name: str, *sets: str):
    return load_recipe(REPOSITORY / "recipes" / f"{name}.toml",
                          overrides(data_dir="nowhere", sets=sets))


@pytest.fixture(params=FAMILIES)
def checkpoint(request, tmp_path) -> Path:
    name, sets = FAMILIES[request.param]
    recipe = recipe_of(name, *sets)
    model = vitinit.build_model(recipe.model.name, num_classes=recipe.data.num_classes,
                                image_size=recipe.data.image_size, **recipe.model.options)
    vitinit.init_weights(model, "torch", generator=torch.Generator().manual_seed(0))
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "recipe": recipe.as_dict(),
                "classes": [f"class {number}" for number in range(10)]}, path)
    return path


def exported(*arguments: object) -> int:
    return export.main(list(map(str, arguments)))


def test_safetensors_hold_the_weights_and_what_goes_with_them(checkpoint, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    assert exported(checkpoint, "--to", "safetensors", "--out", out) == 0
    trained = vitinit.load(checkpoint)
    with safe_open(out, "pt") as file:
        notes = file.metadata()
        weights = {name: file.get_tensor(name) for name in file.keys()}
    own = trained.model.state_dict()
    assert weights.keys() == own.keys() and len(own) > 5
    assert all(torch.equal(weights[name], value) for name, value in own.items())
    assert json.loads(notes["classes"]) == list(trained.classes)
    assert json.loads(notes["mean"]) == list(trained.recipe.data.mean)
    assert json.loads(notes["std"]) == list(trained.recipe.data.std)
    assert json.loads(notes["image_size"]) == list(trained.image_size)
    assert json.loads(notes["crop_pct"]) == trained.recipe.eval.crop_pct
    (tmp_path / "recipe.toml").write_text(notes["recipe"])
    assert load_recipe(tmp_path / "recipe.toml").model == trained.recipe.model
    assert f"checked {len(own)} tensors read back, equal to the bit" in capsys.readouterr().out


def test_a_program_is_the_model_at_any_batch_size(checkpoint, tmp_path, capsys):
    """Every second family's normalises inside."""
    out, trained = tmp_path / "out.pt2", vitinit.load(checkpoint)
    inside = trained.recipe.model.name.startswith(("vit", "convmixer", "simple"))
    assert exported(checkpoint, "--to", "torch", "--out", out, *["--normalise"] * inside) == 0
    notes = {"vitinit.json": ""}
    program = torch.export.load(out, extra_files=notes).module()
    views = torch.randint(0, 256, (11, 3, *trained.image_size), dtype=torch.uint8,
                          generator=torch.Generator().manual_seed(1))
    images = normalise(views, trained.recipe.data.mean, trained.recipe.data.std)
    for batch in (1, 2, 5, 11):
        torch.testing.assert_close(program((views if inside else images)[:batch]),
                                   trained.model(images[:batch]), rtol=0, atol=1e-5)
    assert json.loads(notes["vitinit.json"])["classes"] == list(trained.classes)
    said = capsys.readouterr().out
    assert "in batches of 1, 3, 7: largest difference " in said
    assert "images of the embedded set 'shapes'" in said
    assert ("uint8" if inside else "normalised") in said


def test_a_program_is_compared_on_images_of_the_validation_set_or_a_folder(image_tree, monkeypatch):
    (image_tree.parent / "pictures").symlink_to(image_tree)      # the run's data.root
    monkeypatch.chdir(image_tree.parent)
    trained = vitinit.load(RUN)
    views, name = export.views_to_check(trained, None)
    assert name == "the validation set of image_folder"
    paths = sorted((image_tree / "val").glob("*/*.png"))
    assert all(torch.equal(view, trained.view(path)) for view, path in zip(views, paths[::3], strict=True))
    views, name = export.views_to_check(trained, image_tree / "train" / "red")
    assert name == str(image_tree / "train" / "red")
    assert views.shape == (7, 3, 8, 8) and len(views.flatten(1).unique(dim=0)) == 7


def contents(path: Path) -> dict[str, bytes]:
    """Everything that a file or folder holds, by name; an archive's entries for themselves, too."""
    found = {}
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        found[file.name] = file.read_bytes()
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                found |= {f"{file.name}/{name}": archive.read(name) for name in archive.namelist()}
    return found


@pytest.mark.parametrize("content, status", [("{", 2), ('[{"device": "/a/b"}]', 0)])
def test_a_run_with_a_strange_run_json_is_exported_or_one_line(content, status, tmp_path, capsys):
    run = Path(shutil.copytree(RUN, tmp_path / "run"))
    (run / "run.json").write_text(content)
    assert exported(run, "--to", "run", "--out", tmp_path / "out") == status
    assert capsys.readouterr().err.count("run.json: not what a run writes") == (status == 2)
    assert (tmp_path / "out").exists() == (status == 0)


@pytest.mark.parametrize("kind", ["torch normalise", "safetensors", "run"])
@pytest.mark.parametrize("checkpoint", ["vit"], indirect=True)
def test_no_export_contains_an_image_or_a_path_of_this_machine(checkpoint, tmp_path, kind):
    """They are often given to others. The images that a program is compared on are the user's."""
    home = tmp_path / "home-of-ada"
    folder = home / "photographs"
    folder.mkdir(parents=True)
    noise = torch.Generator().manual_seed(5)
    for number in range(7):
        pixels = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8, generator=noise)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    run = home / "run"
    run.mkdir()
    state = torch.load(checkpoint)
    recipe = from_dict(state["recipe"], "", overrides(data_dir=str(folder), sets=[
        f"init.checkpoint={home}/pretrained.pt"]))
    torch.save(state | {"recipe": recipe.as_dict()}, run / "last.pt")
    (run / "recipe.toml").write_text(dump_recipe(recipe))
    (run / "run.json").write_text(json.dumps([{
        "command": [f"{home}/train.py", "--data-dir", f"{folder}", "--set",
                    f"init.checkpoint={home}/pretrained.pt"], "data": {"root": str(folder)}}]))
    out, (to, *inside) = tmp_path / "out", kind.split()
    images = [] if to == "safetensors" else ["--images", folder]
    assert exported(run, "--to", to, "--out", out, *images, *[f"--{word}" for word in inside]) == 0
    trained, found = vitinit.load(run), contents(out)
    for view in export.views_to_check(trained, folder)[0]:
        for pixels in (view, normalise(view[None], trained.recipe.data.mean, trained.recipe.data.std)):
            start = pixels.contiguous().numpy().tobytes()[:48]
            assert not [name for name, content in found.items() if start in content]
    for place in (str(tmp_path), str(REPOSITORY)):
        assert not [name for name, content in found.items() if place.encode() in content]
    samples = {name: len(content) for name, content in found.items() if "sample_inputs" in name}
    assert not any(samples.values())
    text = b"".join(found.values())
    assert b"pretrained.pt" in text and b"photographs" in text           # the last parts stay


def test_moving_average_and_another_size_are_exported_too(tmp_path):
    out = tmp_path / "out.safetensors"
    assert exported(RUN, "--to", "safetensors", "--out", out, "--weights", "ema", "--image-size",
                    16) == 0
    expected = vitinit.load(RUN, weights="ema", image_size=16)
    with safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["image_size"]) == [16, 16]
        for name, value in expected.model.state_dict().items():
            assert torch.equal(file.get_tensor(name), value)


def test_a_run_is_exported_as_a_run_with_weights_in_half_precision(tmp_path, capsys, train_program,
                                                                   eval_program, image_tree):
    out = tmp_path / "small"
    assert exported(RUN, "--to", "run", "--out", out, "--weights", "ema") == 0
    printed = capsys.readouterr().out
    assert "read back and run on 7 images: largest difference " in printed
    assert f"{sum(path.stat().st_size for path in out.iterdir()) / 1e6:.1f} MB" in printed
    assert {path.name for path in out.iterdir()} == {"recipe.toml", "run.json", "metrics.jsonl",
                                                     "last.pt"}
    for name in ("run.json", "metrics.jsonl"):
        assert (out / name).read_bytes() == (RUN / name).read_bytes()
    assert load_recipe(out / "recipe.toml") == load_recipe(RUN / "recipe.toml")
    ours, theirs = vitinit.load(out), vitinit.load(RUN, weights="ema")
    assert (ours.classes, ours.recipe, ours.image_size) == (theirs.classes, theirs.recipe,
                                                            theirs.image_size)
    kept = torch.load(out / "last.pt")["model"]
    for name, value in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], value.half().float()), name
        assert kept[name].dtype == torch.float16
    # It can be evaluated like any run, but not resumed.
    assert eval_program.main([str(out), "--data-dir", str(image_tree)]) == 0
    assert train_program.main(["--resume", str(out)]) == 2
    assert "last.pt: not a training checkpoint, it cannot be resumed" in capsys.readouterr().err


@pytest.mark.parametrize("checkpoint", ["conv_mixer"], indirect=True)
def test_integers_such_as_batch_norms_count_are_not_rounded(checkpoint, tmp_path):
    assert exported(checkpoint, "--to", "run", "--out", tmp_path / "small") == 0
    ours, theirs = (vitinit.load(path).model.state_dict() for path in (tmp_path / "small", checkpoint))
    for name, value in theirs.items():
        assert torch.equal(ours[name], value.half().float() if value.is_floating_point() else value), name


@pytest.mark.parametrize("change, problem", [
    (lambda weight: weight * 1e7, "'head.weight' is beyond half precision, which ends at 65504"),
    (lambda weight: weight * 10 + 30_000, "with weights in half precision, logits are up to")])
def test_a_run_that_half_precision_spoils_leaves_no_folder(tmp_path, capsys, change, problem):
    """Weights that overflow; and weights whose differences are small compared with their size."""
    state = torch.load(RUN / "last.pt")
    # Normalised features sum to 0: a constant added to all weights does not change the logits.
    state["model"]["norm.weight"].fill_(1.0)
    state["model"]["norm.bias"].zero_()
    state["model"]["head.weight"] = change(state["model"]["head.weight"])
    torch.save(state, tmp_path / "spoilt.pt")
    assert exported(tmp_path / "spoilt.pt", "--to", "run", "--out", tmp_path / "small") == 2
    assert problem in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["spoilt.pt"]


def test_a_program_that_is_not_the_model_leaves_no_file(tmp_path, capsys, monkeypatch):
    real = torch.export.load

    def changed(file):
        program = real(file)
        program.state_dict["head.bias"].data[1] += 0.01
        return program
    monkeypatch.setattr(torch.export, "load", changed)
    assert exported(RUN, "--to", "torch", "--out", tmp_path / "out.pt2") == 2
    assert "the exported program's logits are up to 1.0e-02 from" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("recipe, sets, expected", [
    ("deit_tiny", [], ("vision_transformer.VisionTransformer", dict(
        img_size=[224, 224], patch_size=16, embed_dim=192, depth=12, num_heads=3, mlp_ratio=4.0,
        qkv_bias=True, class_token=True, reg_tokens=0, global_pool="token", fc_norm=False,
        num_classes=1000))),
    ("deit_tiny", ["model.name=vit_tiny_distilled"], ("deit.VisionTransformerDistilled", dict(
        img_size=[224, 224], patch_size=16, embed_dim=192, depth=12, num_heads=3, mlp_ratio=4.0,
        qkv_bias=True, num_classes=1000))),
    ("convmixer_768_32", [], ("convmixer.convmixer_768_32", dict(num_classes=1000))),
    ("mixer_b16", [], ("mlp_mixer.MlpMixer", dict(
        img_size=[224, 224], patch_size=16, embed_dim=768, num_blocks=12, mlp_ratio=[0.5, 4.0],
        num_classes=1000))),
    ("convmixer_768_32", ["model.options.num_filters=7"], None),
    ("convmixer_768_32", ["model.options.depth=3"], None), ("cifar10_simple_vit", [], None),
])
def test_the_timm_model_that_takes_the_weights_is_named(recipe, sets, expected):
    """With timm 1.0.31 each of these took the weights and gave the same logits, to 5.5e-7."""
    recipe = recipe_of(recipe, *sets)
    found = export.timm_model(recipe, recipe.data.image_size)
    if expected is None:
        assert found is None
    else:
        assert found == {"class": f"timm.models.{expected[0]}", "arguments": expected[1]}
    json.dumps(found)


WRONG = [
    (["nowhere", "--to", "torch", "--out", "x"], "nowhere: no such checkpoint"),
    ([RUN, "--to", "onnx", "--out", "x"], "argument --to: invalid choice: 'onnx'"),
    ([RUN, "--to", "torch", "--out", "no/such/x"], "--out no/such/x: expected a file in a folder"),
    ([RUN, "--to", "safetensors", "--out", "x", "--normalise"], "--normalise and --images are for"),
    ([RUN, "--to", "run", "--out", "x", "--image-size", 16], "--normalise and --image-size are for"),
    ([RUN, "--to", "run", "--out", "."], "--out .: expected a folder that does not exist yet"),
    ([RUN, "--to", "torch", "--out", "x", "--images", "nowhere"], "vitinit.export: nowhere: "),
    ([RUN, "--to", "torch", "--out", "x", "--image-size", 9], "patches of 4×4 pixels do not tile"),
]


def test_what_cannot_be_exported_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, problem in WRONG:
        assert exported(*arguments) == 2
        said = capsys.readouterr().err
        assert problem in said and said.count("\n") == 1
        assert not list(tmp_path.iterdir())
