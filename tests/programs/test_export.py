"""vitinit export: exported files are the model."""

import inspect
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from pages import read_page
from safetensors import safe_open
from same_run import assert_identical
from small_models import redraw
from torch import nn

import vitinit
from vitinit.base.messages import OneLineError
from vitinit.base.values import plain
from vitinit.data.augment import normalise
from vitinit.interop.weights import libraries
from vitinit.interop.weights.libraries import LIBRARIES, counterpart
from vitinit.interop.weights.names import TIMM_EVA, foreign_names
from vitinit.interop.weights.readers import read_description
from vitinit.models import MODELS, model_class
from vitinit.programs import export
from vitinit.recipe.files import from_dict, load_recipe, overrides
from vitinit.runs import calibration
from vitinit.runs.folder import RunFolder
from vitinit.runs.load import open_saved
from vitinit.runs.model import build, task_of, trained_model

REPOSITORY = Path(__file__).resolve().parents[2]
RUN = Path(__file__).parents[1] / "runs" / "data" / "version_12"
PAGE = read_page(REPOSITORY / "vitinit" / "runs" / "README.md")
# fmt: off
FAMILIES = {        # recipe, changes
    "vit": ("quickstart", ["data.name=image_folder", "model.options.embed_dim=24",
                           "model.options.depth=1", "model.options.pool=class"]),
    "rotary": ("quickstart", [f"model.options.{option}" for option in (
        "embed_dim=24", "depth=1", "pos_embed=rope", "rope_frequencies=mixed", "layer_scale=0.1",
        "qk_norm=true", "mlp=swiglu")]),
    "swin": ("cifar10_swin_tiny", ["model.options.embed_dim=6", "model.options.depths=[1,2]",
                                   "model.options.num_heads=[2,3]"]),
    "mixer": ("cifar10_mixer", ["model.options.embed_dim=14", "model.options.depth=1"]),
    "conv_mixer": ("cifar10_convmixer", ["model.options.embed_dim=11", "model.options.depth=1"]),
    "simple_vit": ("cifar10_simple_vit", ["model.options.embed_dim=28", "model.options.depth=1",
                                          "model.options.num_heads=2"]),
}
# fmt: on


def recipe_of(name: str, *sets: str):
    return load_recipe(name, overrides(data_dir="nowhere", sets=sets))


# fmt: off
FURTHER = {"DINOv3": ("quickstart", [f"model.options.{option}" for option in (
    "embed_dim=24", "depth=1", "pos_embed=rope", "rope_coordinates=centred", "layer_scale=0.1",
    "norm_eps=1e-5", "qkv_bias=false")])}
# fmt: on


@pytest.fixture(params=FAMILIES)
def checkpoint(request, tmp_path) -> Path:
    name, sets = (FAMILIES | FURTHER)[request.param]
    recipe = recipe_of(name, *sets)
    model = vitinit.build_model(
        recipe.model.name,
        num_classes=recipe.data.num_classes,
        image_size=recipe.data.image_size,
        **recipe.model.options,
    )
    vitinit.init_weights(model, "torch", generator=torch.Generator().manual_seed(0))
    path = tmp_path / "checkpoint.pt"
    torch.save(
        {
            "model": model.state_dict(),
            "recipe": recipe.as_dict(),
            "classes": [f"class {number}" for number in range(10)],
        },
        path,
    )
    return path


def exported(*arguments: object) -> int:
    return export.main(list(map(str, arguments)))


def opened(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The metadata and the tensors of a file of safetensors."""
    with safe_open(path, "pt") as file:
        notes = {
            key: text
            if key in ("recipe", "made_by", "model", "interpolation", "fit", "format")
            else json.loads(text)
            for key, text in file.metadata().items()
        }
        return notes, {name: file.get_tensor(name) for name in file.keys()}


def test_safetensors_hold_the_weights_and_what_goes_with_them(checkpoint, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    assert exported(checkpoint, "--to", "safetensors", "--out", out) == 0
    trained, (notes, weights) = vitinit.load(checkpoint), opened(out)
    own, data = trained.model.state_dict(), trained.recipe.data
    rotary = TIMM_EVA if trained.model.rotary else {}
    assert len(own) > 5
    assert_identical(weights, foreign_names(own, rotary))
    assert ("rope.freqs" in weights) == bool(rotary)
    assert plain(
        [notes[key] for key in ("classes", "image_size", "mean", "std", "crop_pct")]
    ) == plain(
        [trained.classes, trained.image_size, data.mean, data.std, trained.recipe.eval.crop_pct]
    )
    assert (notes["timm"] is None) == (trained.recipe.model.name == "simple_vit")
    (tmp_path / "recipe.toml").write_text(notes["recipe"])
    assert load_recipe(tmp_path / "recipe.toml").model == trained.recipe.model
    assert f"checked {len(weights)} tensors read back, equal to the bit" in capsys.readouterr().out


@pytest.mark.parametrize("checkpoint", ["DINOv3"], indirect=True)
def test_a_rotary_model_without_biases_gets_zeros_so_that_its_channels_are_not_taken_for_others(
    checkpoint, tmp_path
):
    """And what timm's config.json says of the rotation is read."""
    out, trained = tmp_path / "folder", vitinit.load(checkpoint)
    assert exported(checkpoint, "--to", "safetensors", "--out", out) == 0
    config, (_, weights) = (
        json.loads((out / "config.json").read_text()),
        opened(out / "model.safetensors"),
    )
    assert config["architecture"] == "vit_small_patch16_dinov3" and config["model_args"]["qkv_bias"]
    assert not weights["blocks.0.attn.qkv.bias"].any()
    images = views_and_logits(trained)[0] / 99
    torch.testing.assert_close(
        vitinit.load(out, recipe="quickstart").model(images),
        trained.model(images),
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize("checkpoint", ["vit", "swin"], indirect=True)
@torch.no_grad()
def test_torchvision_loads_its_names_strictly_and_gives_the_same_logits(checkpoint, tmp_path):
    """With its real models, at another size. The Swin's second block shifts its windows."""
    out, trained = tmp_path / "out.safetensors", vitinit.load(checkpoint, image_size=64)
    assert (
        exported(
            checkpoint,
            "--to",
            "safetensors",
            "--names",
            "torchvision",
            "--out",
            out,
            "--image-size",
            64,
        )
        == 0
    )
    notes, weights = opened(out)
    module, name = notes["torchvision"]["class"].rsplit(".", 1)
    assert module == "torchvision.models"
    theirs = getattr(torchvision.models, name)(**notes["torchvision"]["arguments"]).eval()
    theirs.load_state_dict(weights, strict=True)
    images = torch.randn(3, 3, *trained.image_size, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(theirs(images), trained.model(images), rtol=0, atol=1e-5)
    assert trained.model(images).std() > 1e-3
    (tmp_path / "recipe.toml").write_text(notes["recipe"])
    again = vitinit.load(out, recipe=str(tmp_path / "recipe.toml"))
    assert_identical(again.model.state_dict(), trained.model.state_dict())


def test_a_folder_is_what_timm_opens_or_says_which_sizes_it_has(checkpoint, tmp_path, capsys):
    """Its config.json states the model, how images are prepared, and what another number of classes
    replaces. With timm 1.0.31 those of 14 small models gave the same logits, to 2.4e-7."""
    out, trained = tmp_path / "folder", vitinit.load(checkpoint)
    refused = {
        "mlp_mixer": "MlpMixer; expected patch_size = 32 and embed_dim = 512 and depth = 8",
        "conv_mixer": "ConvMixer; expected patch_size = 7 and embed_dim = 1536 and ",
        "simple_vit": "SimpleViT; expected another family",
    }.get(trained.model.family)
    assert exported(checkpoint, "--to", "safetensors", "--out", out) == (2 if refused else 0)
    if refused:
        said = capsys.readouterr().err
        assert f"no model of timm.create_model takes the weights of this {refused}" in said
        assert said.count("\n") == 1 and not out.exists()
        return
    config, layers = (
        json.loads((out / "config.json").read_text()),
        dict(trained.model.named_modules()),
    )
    name, arguments, _ = counterpart(
        "timm.create_model",
        trained.model.family,
        image_size=trained.image_size,
        **trained.recipe.model.options,
    )
    assert (f"timm.{config['architecture']}", config["model_args"]) == (name, arguments)
    assert (config["label_names"], config["num_classes"]) == (list(trained.classes), 10)
    stated = config["pretrained_cfg"]
    assert [layers[layer].out_features for layer in stated["classifier"]] == [10]
    assert (stated["input_size"], stated["fixed_input_size"]) == ([3, *trained.image_size], True)
    described = read_description(out / "model.safetensors").values  # as it is read here
    assert plain({key: trained.recipe.keys[key] for key in described}) == plain(described)
    assert {"data.mean", "data.std", "eval.crop_pct", "eval.interpolation"} < described.keys()
    assert (
        opened(out / "model.safetensors")[1].keys()
        == foreign_names(
            trained.model.state_dict(), TIMM_EVA if trained.model.rotary else {}
        ).keys()
    )


TIMM_VIT = dict(
    img_size=[224, 224],
    patch_size=16,
    embed_dim=192,
    depth=12,
    num_heads=3,
    mlp_ratio=4.0,
    qkv_bias=True,
)
ROPE, MIXED, CENTRED = (
    f"model.options.{option}"
    for option in ("pos_embed=rope", "rope_frequencies=mixed", "rope_coordinates=centred")
)


def test_the_model_that_takes_the_weights_is_named_and_what_a_library_cannot_express_refused():
    """With timm 1.0.31 each of these took the weights and gave the same logits, to 5.5e-7. Its
    functions fix the sizes of a mixer."""
    assert counterpart(
        "timm.create_model", "conv_mixer", image_size=(224, 224), **MODELS["convmixer_1024_20"][1]
    )[:2] == ("timm.convmixer_1024_20_ks9_p14", {})
    for recipe, sets, name, arguments in (
        (
            "deit_tiny",
            [],
            "vision_transformer.VisionTransformer",
            TIMM_VIT | dict(class_token=True, reg_tokens=0, global_pool="token", fc_norm=False),
        ),
        *(
            (
                "deit_tiny",
                [ROPE, *changes],
                f"eva.{name}",
                TIMM_VIT
                | arguments
                | dict(
                    class_token=True,
                    global_pool="token",
                    use_fc_norm=False,
                    num_reg_tokens=0,
                    attn_type="rope",
                    use_rot_pos_emb=True,
                    rope_grid_indexing="xy",
                    rope_temperature=100.0,
                    use_abs_pos_emb=False,
                ),
            )
            for changes, name, arguments in (
                (
                    ["model.options.rope_coordinates=scaled", "model.options.mlp=swiglu"],
                    "Eva",
                    dict(rope_type="cat", ref_feat_shape=[16, 16], swiglu_mlp=True),
                ),
                (
                    [MIXED, "model.options.qk_norm=true"],
                    "Eva",
                    dict(rope_type="mixed", qk_norm=True),
                ),
                (
                    [CENTRED, "model.options.norm_eps=1e-5", "model.options.layer_scale=0.5"],
                    "vit_small_patch16_dinov3",
                    dict(
                        rope_type="dinov3",
                        rope_rotate_half=False,
                        init_values=0.5,
                        dynamic_img_size=False,
                    ),
                ),
            )
        ),
        (
            "deit_tiny",
            ["model.name=vit_tiny_distilled"],
            "deit.VisionTransformerDistilled",
            TIMM_VIT,
        ),
        ("convmixer_768_32", [], "convmixer.convmixer_768_32", {}),
        (
            "mixer_b16",
            ["model.options.channels_ratio=3.0"],
            "mlp_mixer.MlpMixer",
            dict(
                img_size=[224, 224],
                patch_size=16,
                embed_dim=768,
                num_blocks=12,
                mlp_ratio=[0.5, 3.0],
            ),
        ),
    ):
        assert counterpart_of(recipe, *sets, library="timm")[:2] == (
            f"timm.models.{name}",
            arguments,
        )
    for library, recipe, change, expected in (
        ("timm", "deit_tiny", "norm_eps=1e-5", "norm_eps = 1e-06"),
        ("timm", "deit_tiny", "mlp=swiglu", "pos_embed = rope"),
        ("timm", "deit_tiny", f"rope_frequencies=linear {ROPE}", "rope_frequencies = axial"),
        ("timm", "deit_tiny", f"norm_eps=1e-5 {ROPE} {CENTRED}", "norm_eps = 1e-06"),
        ("timm", "deit_tiny", f"qk_norm=true {ROPE} {MIXED} {CENTRED}", "rope_freq.* = axial"),
        ("torchvision", "deit_tiny", "pos_embed=rope", "no rotary pos_embed"),
        ("timm", "convmixer_768_32", "depth=3", "depth = 32|activation = gelu"),
        ("timm", "cifar10_simple_vit", "depth=3", "another family"),
        ("torchvision", "deit_tiny", "pool=mean", "pool = class"),
        ("torchvision", "deit_tiny", "patch_size=[16,8]", "a square patch_size"),
        ("torchvision", "swin_tiny", "window_size=14", "a window_size within every grid"),
        ("transformers", "convmixer_768_32", "depth=3", "another family"),
    ):
        with pytest.raises(ValueError, match=f"no model of {library} .*expected ({expected})"):
            counterpart_of(recipe, *f"model.options.{change}".split(), library=library)


def counterpart_of(
    recipe: str, *sets: str, library: str, **options: object
) -> tuple[str, dict, dict]:
    found = recipe_of(recipe, *sets)
    return counterpart(
        library,
        MODELS[found.model.name][0],
        image_size=found.data.image_size,
        **found.model.options,
        **options,
    )


@pytest.mark.parametrize("default, other", [("gelu", "silu"), ((3, 5), [3, 7])])
def test_an_option_that_no_table_lists_has_to_be_at_its_default(monkeypatch, default, other):
    known = [
        (recipe, library, counterpart_of(recipe, library=library))
        for recipe in ("deit_tiny", "swin_tiny", "mixer_b16", "convmixer_768_32")
        for library, (_, families) in LIBRARIES.items()
        if MODELS[recipe_of(recipe).model.name][0] in families
    ]
    assert len(known) == 12

    def wider(family: str) -> type:
        own = inspect.signature(model_class(family))
        new = inspect.Parameter("new", inspect.Parameter.KEYWORD_ONLY, default=default)
        return type(
            "Wider", (), {"__signature__": own.replace(parameters=[*own.parameters.values(), new])}
        )

    monkeypatch.setattr(libraries, "model_class", wider)
    for recipe, library, expected in known:
        assert counterpart_of(recipe, library=library) == expected
        assert counterpart_of(recipe, library=library, new=plain(default)) == expected
        with pytest.raises(ValueError, match=f"no model of {library} .*expected .*new = ") as error:
            counterpart_of(recipe, library=library, new=other)
        assert "\n" not in str(error.value)


def views_and_logits(trained: vitinit.Trained) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images, (11, 3, H, W) uint8, and what the model makes of them."""
    views = torch.randint(
        256,
        (11, 3, *trained.image_size),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(1),
    )
    return views, trained.model(normalise(views, trained.recipe.data.mean, trained.recipe.data.std))


@pytest.mark.parametrize("checkpoint", ["vit", "rotary"], indirect=True)
def test_a_program_is_the_model_at_any_batch_size(checkpoint, tmp_path, capsys):
    """That normalises inside. tests/models exports every family, tests/runs/test_teacher.py one
    that does not."""
    out, trained = tmp_path / "out.pt2", vitinit.load(checkpoint)
    assert exported(checkpoint, "--to", "torch", "--out", out, "--normalise") == 0
    notes = {"vitinit.json": ""}
    stored = torch.export.load(out, extra_files=notes)
    (example,), _ = stored.example_inputs  # as AOTInductor needs it; of no photograph
    assert torch.equal(example, export.noise(trained)[:2])
    program, (views, logits) = stored.module(), views_and_logits(trained)
    for batch in (1, 2, 5, 11):
        torch.testing.assert_close(program(views[:batch]), logits[:batch], rtol=0, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):  # as a student's step in bf16 asks a teacher
        assert program(views).dtype == torch.bfloat16
    assert json.loads(notes["vitinit.json"])["classes"] == list(trained.classes)
    said = capsys.readouterr().out
    assert "run on 7 images: largest difference " in said and "uint8" in said


@pytest.mark.parametrize("checkpoint", ["rotary"], indirect=True)
def test_an_onnx_file_takes_images_as_they_are_and_says_what_it_is(checkpoint, tmp_path, capsys):
    """By another evaluator than the one that the export is checked with."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    out = tmp_path / "model.onnx"
    assert exported(checkpoint, "--to", "onnx", "--out", out) == 0
    assert "checked by onnxruntime" in capsys.readouterr().out
    graph, trained = onnx.load(out), vitinit.load(checkpoint)
    views, expected = views_and_logits(trained)
    evaluator = ReferenceEvaluator(graph)
    for batch in (1, 3, 7):
        (logits,) = evaluator.run(["logits"], {"images": views[:batch].numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), expected[:batch], rtol=0, atol=1e-5)
    notes = {one.key: one.value for one in graph.metadata_props}
    assert json.loads(notes["classes"]) == list(trained.classes)
    assert json.loads(notes["mean"]) == list(trained.recipe.data.mean)


def test_onnx_without_its_packages_names_the_extra(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert exported(checkpoint, "--to", "onnx", "--out", tmp_path / "model.onnx") == 2
    assert "pip install 'vitinit[onnx]'" in capsys.readouterr().err


@pytest.mark.parametrize("names", ["timm", "transformers"])
def test_a_model_to_hand_on_is_read_back_with_its_temperature_and_has_a_card(
    image_tree, small_run, train_program, tmp_path, monkeypatch, names
):
    pytest.importorskip("safetensors")
    run, out = tmp_path / "run", tmp_path / "model"
    sets = dict(schedule__epochs="1", model__options__num_heads="1", model__options__drop_path="0")
    assert train_program.main(small_run(run, **sets)) == 0
    trained = vitinit.load(run)
    calibration.add_row({"temperature": 1.7}, trained.model.state_dict(), run)
    trained = vitinit.load(run)
    assert exported(run / "last.pt", "--to", "folder", "--names", names, "--out", out) == 0
    again = vitinit.load(out)
    for name, value in trained.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    assert (again.classes, again.temperature) == (trained.classes, 1.7)
    image = image_tree / "val" / "red" / "00.png"
    assert again.predict(image) == trained.predict(image)
    card = (out / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    front = dict(line.split(": ", 1) for line in front.splitlines())
    assert front["library_name"] == names
    (found,) = json.loads(front["model-index"])
    right = found["results"][0]["metrics"][0]["value"]
    row = list(RunFolder(run).metrics.rows())[-1]
    assert right == pytest.approx(row["val_top1"] / 100, abs=1e-4)
    assert "On 51 images, judged by 21 others; 1 epoch in" in text
    assert text.count("\n| red | 7 |") == text.count("\n| blue | 7 |") == 1
    assert "`schedule.epochs` = 1, not 9" in text and "temperature of 1.700" in text
    assert str(tmp_path) not in card and str(image_tree) not in card


def test_a_temperature_goes_with_weights_in_half_precision_and_not_to_another_size(
    tmp_path, capsys
):
    """It is on file for the weights as they are stored."""
    half = tmp_path / "half"
    assert exported(RUN, "--to", "run", "--out", half) == 0
    saved = open_saved(half)
    rows = {"new": {"temperature": 1.7, "view": saved.view}, "old": {"temperature": 1.7}}
    for age, row in rows.items():
        calibration.add_row(row, saved.tensors("model"), half)
        for kind in ("folder", "run"):
            out = tmp_path / f"{age} {kind}"
            assert exported(half, "--to", kind, "--out", out) == 0
            capsys.readouterr()
            assert vitinit.load(out).temperature == 1.7 and capsys.readouterr().err == ""
        assert "by a temperature of 1.700" in (tmp_path / f"{age} folder/README.md").read_text()
        out = tmp_path / f"{age} enlarged"
        assert exported(half, "--to", "folder", "--image-size", 12, "--out", out) == 0
        assert not (out / calibration.FILE).exists()
        assert "not calibrated" in (out / "README.md").read_text()
    assert exported(half, "--to", "safetensors", "--out", tmp_path / "a.safetensors") == 0
    assert opened(tmp_path / "a.safetensors")[0]["temperature"] == 1.7


def test_a_card_is_of_the_model_as_it_is_exported_which_stays_on_its_device(
    small_run, train_program, tmp_path, monkeypatch
):
    pytest.importorskip("safetensors")
    run = tmp_path / "run"
    assert train_program.main(small_run(run, schedule__epochs="1", init__name="default")) == 0
    starts = json.loads((run / "run.json").read_text())
    starts[0]["arguments"]["recipe"] = "gone.toml"
    (run / "run.json").write_text(json.dumps(starts))

    def card_in(name: str, file: str = "last.pt") -> str:
        out = tmp_path / name
        assert exported(run / file, "--to", "folder", "--image-size", 16, "--out", out) == 0
        return (out / "README.md").read_text()

    text = card_in("enlarged ü")
    assert re.search(r"\n\d+\.\d ± \d+\.\d % of 21 validation images", text)
    assert '"name": "enlarged ü"' in text
    assert "too high" not in text and "too high" in card_in("best", "best.pt")
    assert "the recipe is not at hand" in text and "- none" not in text

    def no_images(model: nn.Module, *_: object) -> None:
        assert next(model.parameters()).is_meta
        raise OneLineError("none")

    monkeypatch.setattr("vitinit.programs.shared.card.this_device", lambda: torch.device("meta"))
    monkeypatch.setattr("vitinit.programs.shared.card.guessed", no_images)
    assert "the weights in last.pt of a run" in card_in("unseen")


@pytest.mark.parametrize("kind", ["torch", "safetensors", "run"])
@pytest.mark.parametrize("checkpoint", ["vit"], indirect=True)
def test_no_export_contains_an_image_or_a_path_of_this_machine(checkpoint, tmp_path, kind):
    """They are often given to others. Of the images none is opened: the folder does not exist."""
    home = tmp_path / "home-of-ada"
    run = home / "run"
    run.mkdir(parents=True)
    state = torch.load(checkpoint)
    recipe = from_dict(
        state["recipe"],
        "",
        overrides(
            data_dir=f"{home}/photographs",
            sets=[
                f"init.checkpoint={home}/pretrained.pt",
                f"distill.teacher={home}/teacher",
                f"distill.weights={home}/weights.pth",
            ],
        ),
    )
    torch.save(state | {"recipe": recipe.as_dict()}, run / "last.pt")
    (run / "recipe.toml").write_text(recipe.as_toml())
    (run / "start.txt").write_text(f"start   {home}/pretrained.pt: 7 tensors\n")
    (run / "run.json").write_text(
        json.dumps(
            [
                {
                    "command": [
                        f"{home}/train.py",
                        f'--set=data.root="{home}/photographs"',
                        "--data-dir",
                        f"{home}/a=b/photographs",
                        r"data.root=C:\home-of-ada\photographs",
                    ],
                    "data": {"root": f"{home}/photographs as they were"},
                }
            ]
        )
    )
    out = tmp_path / ("out.pt2" if kind == "torch" else "out")
    assert exported(run, "--to", kind, "--out", out) == 0
    found = contents(out)
    for place in (str(tmp_path), str(REPOSITORY), "home-of-ada"):
        assert not [name for name, content in found.items() if place.encode() in content]
    text = b"".join(found.values())
    assert b"pretrained.pt" in text and b"photographs" in text  # the last parts stay
    if kind == "run":  # both say what the recipe said
        assert torch.load(out / "last.pt")["recipe"]["data"]["root"] == "photographs"
        assert load_recipe(out / "recipe.toml").data.root == "photographs"


def contents(path: Path) -> dict[str, bytes]:
    """Everything that a file or folder holds, by name; an archive's entries for themselves, too."""
    found = {}
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        found[file.name] = file.read_bytes()
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                found |= {f"{file.name}/{name}": archive.read(name) for name in archive.namelist()}
    return found


def test_a_run_is_exported_as_a_run_with_weights_in_half_precision(
    tmp_path, capsys, train_program, eval_program, image_tree
):
    out = tmp_path / "small"
    assert exported(RUN, "--to", "run", "--out", out, "--weights", "ema") == 0
    printed = capsys.readouterr().out
    assert "read back and run on 7 images: largest difference " in printed
    assert f"{sum(path.stat().st_size for path in out.iterdir()) / 1e6:.1f} MB" in printed
    assert {path.name for path in out.iterdir()} == {
        "recipe.toml",
        "run.json",
        "metrics.jsonl",
        "last.pt",
    }
    for name in ("run.json", "metrics.jsonl"):
        assert (out / name).read_bytes() == (RUN / name).read_bytes()
    assert load_recipe(out / "recipe.toml") == load_recipe(RUN / "recipe.toml")
    ours, theirs = vitinit.load(out), vitinit.load(RUN, weights="ema")
    assert (ours.classes, ours.recipe, ours.image_size) == (
        theirs.classes,
        theirs.recipe,
        theirs.image_size,
    )
    kept = torch.load(out / "last.pt")["model"]
    assert {value.dtype for value in kept.values()} == {torch.float16}
    assert_identical(kept, dict(theirs.model.half().state_dict()))
    assert_identical(ours.model.state_dict(), theirs.model.float().state_dict())
    changed = tmp_path / "changed"
    words = ("--set", "eval.crop_pct=0.6", "--weights", "model")
    assert exported(RUN, "--to", "run", *words, "--out", changed) == 0
    assert vitinit.load(changed).recipe.eval.crop_pct == 0.6 != ours.recipe.eval.crop_pct
    assert load_recipe(changed / "recipe.toml").eval.crop_pct == 0.6
    # It can be evaluated like any run, but not resumed.
    assert eval_program.main([str(out), "--data-dir", str(image_tree)]) == 0
    assert train_program.main(["--resume", str(out)]) == 2
    assert "last.pt: not a training checkpoint, it cannot be resumed" in capsys.readouterr().err


@pytest.mark.parametrize("checkpoint", ["conv_mixer"], indirect=True)
def test_integers_such_as_batch_norms_count_are_not_rounded(checkpoint, tmp_path):
    state = torch.load(checkpoint)
    for name, value in state["model"].items():
        if name.endswith("num_batches_tracked"):
            value.fill_(4099)  # halves are even from 2048 on
    torch.save(state | {"grid": (16, 16)}, checkpoint)
    assert exported(checkpoint, "--to", "run", "--out", tmp_path / "small") == 0
    ours, theirs = (
        vitinit.load(path).model.state_dict() for path in (tmp_path / "small", checkpoint)
    )
    assert torch.load(tmp_path / "small" / "last.pt")["grid"] == (16, 16)
    bare = {key: value for key, value in state.items() if key != "classes"}
    torch.save(bare, checkpoint)  # a name that we invent is no name to keep
    assert exported(checkpoint, "--to", "run", "--out", tmp_path / "bare") == 0
    assert torch.load(tmp_path / "bare" / "last.pt")["classes"] is None
    assert_identical(
        dict(ours),
        {
            name: value.half().float() if value.is_floating_point() else value
            for name, value in theirs.items()
        },
    )


def test_a_run_that_half_precision_spoils_and_a_program_that_is_not_the_model_leave_nothing(
    tmp_path, capsys, monkeypatch
):
    """Weights that overflow; and weights whose differences are small compared with their size."""
    for factor, shift, problem in (
        (1e7, 0.0, "half precision, which ends at 65,504; expected --to safetensors, which"),
        (10.0, 30_000.0, "with weights in half precision, outputs are up to"),
    ):
        state = torch.load(RUN / "last.pt")
        # Normalised features sum to 0: a constant added to all weights does not change the logits.
        state["model"]["norm.weight"].fill_(1.0)
        state["model"]["norm.bias"].zero_()
        state["model"]["head.weight"].mul_(factor).add_(shift)
        torch.save(state, tmp_path / "spoilt.pt")
        assert exported(tmp_path / "spoilt.pt", "--to", "run", "--out", tmp_path / "small") == 2
        assert problem in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["spoilt.pt"]
    real = torch.export.load

    def changed(file):
        program = real(file)
        program.state_dict["head.bias"].data[1] += 0.01
        return program

    monkeypatch.setattr(torch.export, "load", changed)
    assert exported(RUN, "--to", "torch", "--out", tmp_path / "out.pt2") == 2
    assert "the exported program's outputs are up to 1.0e-02 from" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_what_cannot_be_exported_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    damaged = Path(shutil.copytree(RUN, tmp_path / "run"))
    (damaged / "run.json").write_text("{")
    for arguments, problem in (
        (["nowhere", "--to", "torch", "--out", "x.pt2"], "nowhere: no such checkpoint"),
        ([RUN, "--to", "run", "--out", "x", "--names", "timm"], "--names does not go with"),
        ([RUN, "--to", "safetensors", "--out", "x", "--normalise"], "--normalise does not go"),
        ([RUN, "--to", "run", "--out", "x", "--image-size", 16], "--image-size does not go"),
        ([damaged, "--to", "run", "--out", "x"], "run.json: not what a run writes"),
        (
            [RUN, "--to", "safetensors", "--names", "transformers", "--out", "x.safetensors"],
            "--out x.safetensors: transformers opens a folder; expected no .safetensors at the end",
        ),
        ([RUN, "--to", "run", "--out", "x.pt2"], "--out x.pt2: a run is a folder; expected no"),
        ([RUN, "--to", "folder", "--out", "x.pt"], "--out x.pt: timm opens a folder; expected no"),
        (
            [RUN, "--to", "folder", "--names", "timm", "--out", "x.pt2"],
            "--out x.pt2: timm opens a folder; expected no",
        ),
        (
            [RUN, "--to", "safetensors", "--out", "x.pt"],
            "x.pt: expected a name that ends in .safetensors",
        ),
        (
            [RUN, "--to", "safetensors", "--names", "torchvision", "--out", "x"],
            "x: expected a name that ends in .safetensors",
        ),
        ([RUN, "--to", "torch", "--out", "x.pt2", "--image-size", 9], "patches of 4×4"),
    ):
        assert exported(*arguments) == 2
        said = capsys.readouterr().err
        assert problem in said and said.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("checkpoint", ["vit"], indirect=True)
@pytest.mark.parametrize("names", ["timm", "transformers"])
def test_numbers_that_stand_in_for_names_are_not_written_as_names(names, checkpoint, tmp_path):
    """Read again, they would be matched by name."""
    state = torch.load(checkpoint)
    torch.save({**state, "classes": None}, checkpoint)
    assert not vitinit.load(checkpoint).named
    out = tmp_path / "out"
    assert exported(checkpoint, "--to", "safetensors", "--names", names, "--out", out) == 0
    assert read_description(out / "model.safetensors").classes is None


def test_two_exports_are_the_same_bytes(tmp_path):
    """Python's sets of names and the library's metadata have another order at each start or call."""
    for number in "12":
        assert (
            exported(RUN, "--to", "safetensors", "--out", tmp_path / f"{number}.safetensors") == 0
        )
        assert exported(RUN, "--to", "run", "--out", tmp_path / number) == 0
    for name in (".safetensors", "/last.pt"):
        one, two = ((tmp_path / f"{number}{name}").read_bytes() for number in "12")
        assert one == two
    kept = torch.load(tmp_path / "1" / "last.pt")
    assert [*kept] == ["model", "ema", "classes", "recipe", "grid", "step", "progress"]


@pytest.mark.parametrize("checkpoint", ["vit"], indirect=True)
def test_a_folder_for_timm_says_where_timm_rounds_otherwise(checkpoint, tmp_path, capsys):
    for size, notes in (("16,24", 1), ("24", 0)):
        out = tmp_path / size
        words = ("--to", "safetensors", "--out", out, "--image-size", size)
        assert exported(checkpoint, *words) == 0
        assert capsys.readouterr().out.count("is not square timm rounds the side to which") == notes


@pytest.mark.parametrize("pool, theirs", [("class", "ViTModel"), ("mean", "IJepaModel")])
def test_the_encoder_of_a_masked_autoencoder_is_exported_without_a_head(
    pool, theirs, tmp_path, capsys
):
    """timm 1.0.31 with num_classes=0 and transformers 5.24.0 gave the same features, to the bit."""
    options = ("embed_dim=24", "depth=1", "num_heads=2", f"pool={pool}")
    decoder = ("decoder_dim=8", "decoder_depth=1", "decoder_heads=2")
    recipe = recipe_of(
        "quickstart",
        "task.name=reconstruct",
        "data.num_classes=0",
        "mix.mixup_alpha=0.0",
        "mix.cutmix_alpha=0.0",
        "checkpoint.best_by=val_loss",
        *(f"model.options.{option}" for option in options),
        *(f"task.options.{option}" for option in decoder),
    )
    model = trained_model(task_of(recipe), build(recipe), recipe)
    path = tmp_path / "mae.pt"
    torch.save({"model": redraw(model).state_dict(), "recipe": recipe.as_dict()}, path)
    trained = vitinit.load(path)
    views, features = views_and_logits(trained)
    assert features.shape == (11, 24) and features.std() > 0.1

    def export_to(name: str, *words: str) -> Path:
        assert exported(path, *words, "--out", tmp_path / name) == 0
        assert "→ pooled features\nchecked" in capsys.readouterr().out
        return tmp_path / name

    program = export_to("a.pt2", "--to", "torch", "--normalise")
    found = torch.export.load(program).module()(views)
    torch.testing.assert_close(found, features, rtol=0, atol=1e-5)
    notes, weights = opened(export_to("a.safetensors", "--to", "safetensors"))
    assert notes["timm"]["arguments"]["num_classes"] == 0 and notes["classes"] is None
    assert_identical(weights, trained.model.state_dict())
    folder = export_to("timm", "--to", "safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert config["num_classes"] == 0 and config["pretrained_cfg"]["classifier"] == []
    card = (folder / "README.md").read_text()
    assert 'features = model(prepare(Image.open("photo.jpg"))[None])' in card
    assert 'trained.features(trained.preprocess("photo.jpg"))' in card
    assert trained.features(trained.preprocess(torch.zeros(3, 9, 9).byte())).shape == (1, 24)
    folder = export_to("transformers", "--to", "safetensors", "--names", "transformers")
    pooled = "[:, 0]" if pool == "class" else ".mean(1)"
    of_transformers = (folder / "README.md").read_text()
    assert f'return_tensors="pt")).last_hidden_state{pooled}\n' in of_transformers
    assert "transformers.AutoModel.from_pretrained" in of_transformers
    for text in (card, of_transformers):
        assert 'tags: ["image-feature-extraction", "vitinit", ' in text
        for words in ("predict(", "logits", "classes", "robabilities", "lassification"):
            assert words not in text
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [theirs] and "id2label" not in config
    again = vitinit.load(folder)
    assert again.classes == ()
    assert_identical(again.model.state_dict(), trained.model.state_dict())
    for name, words in (
        ("run", ["--to", "run"]),
        ("b.safetensors", ["--to", "safetensors", "--names", "torchvision"]),
    ):
        assert exported(path, *words, "--out", tmp_path / name) == 2
        assert "holds no classifier" in capsys.readouterr().err
