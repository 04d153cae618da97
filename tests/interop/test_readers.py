"""Checkpoints of transformers: the same function here, described by their own files; and traps."""

import json
from pathlib import Path

import pytest
import torch
from refused import refused
from safetensors.torch import load_file, save_file
from same_run import assert_identical
from torch import Tensor
from written_vit import CLASSES, HEADS, REGISTERS, WIDTH, drawn_tensors, written_out

import vitinit
from vitinit.base.files import CheckpointError
from vitinit.base.values import plain
from vitinit.interop.weights.names import TRANSFORMERS_SWIN, foreign_names, native_names
from vitinit.interop.weights.readers import read_description, require_known
from vitinit.programs import export
from vitinit.recipe.files import load_recipe, overrides
from vitinit.runs.data import as_input
from vitinit.runs.model import build, task_of
from vitinit.runs.start import differences, fine_tune

RUN = Path(__file__).parents[1] / "runs" / "data" / "version_12"  # ours, of three classes
HIDDEN, PATCH, SIDE = 29, 5, 15
EPS = 1e-3  # large, so that another one is seen

# model_type, architecture, prefix of the names, and the layout as in written_vit.py
PLAIN = dict(positions="all", read="class")
DINOV2 = dict(scale="ls{}.gamma", positions="class and patches", read="class", head=False)
KINDS = {
    "ViT": ("vit", "ViTForImageClassification", "vit.", PLAIN),
    "ViT, backbone": ("vit", "ViTModel", "", PLAIN | dict(head=False)),
    "DeiT": ("deit", "DeiTForImageClassification", "deit.", PLAIN | dict(distilled=True)),
    "DeiT with teacher": (
        "deit",
        "DeiTForImageClassificationWithTeacher",
        "deit.",
        dict(distilled=True, positions="all", read="both"),
    ),
    "I-JEPA": (
        "ijepa",
        "IJepaForImageClassification",
        "ijepa.",
        dict(class_token=False, positions="all", read="mean of norm"),
    ),
    "DINOv2": ("dinov2", "Dinov2Model", "", DINOV2),
    "DINOv2 with registers": (
        "dinov2_with_registers",
        "Dinov2WithRegistersModel",
        "",
        DINOV2 | dict(registers="reg_token"),
    ),
}
# What transformers calls otherwise in its files than written_vit.py: in all, and not in DINOv2.
IN_FILES = {
    "blocks.": "encoder.layer.",
    "norm.": "layernorm.",
    "cls_token": "embeddings.cls_token",
    "dist_token": "embeddings.distillation_token",
    "reg_token": "embeddings.register_tokens",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "ls1.gamma": "layer_scale1.lambda1",
    "ls2.gamma": "layer_scale2.lambda1",
    "attn.proj": "attention.output.dense",
    "head_dist.": "distillation_classifier.",
}
IN_VIT = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
# What release 5 calls otherwise in memory than in its files; the last is not so of DINOv2.
IN_MEMORY = {
    ".attention.attention.": ".attention.",
    ".attention.self.": ".attention.",
    "query.": "q_proj.",
    "key.": "k_proj.",
    "value.": "v_proj.",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "relative_position_bias_table": "relative_position_bias.relative_position_bias_table",
    "encoder.layer.": "layers.",
}
CONFIG = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": HIDDEN,
    "hidden_act": "gelu",
    "layer_norm_eps": EPS,
    "image_size": SIDE,
    "patch_size": PATCH,
    "num_channels": 3,
    "qkv_bias": True,
}
PREPROCESSOR = {
    "do_resize": True,
    "size": {"shortest_edge": 20},
    "resample": 2,
    "do_normalize": True,
    "do_center_crop": True,
    "crop_size": {"height": SIDE, "width": SIDE},
    "image_mean": [0.5, 0.25, 0.125],
    "image_std": [0.3, 0.4, 0.7],
}
LABELS = {str(index): f"{index}, a label" for index in range(CLASSES)}


def drawn(name: str) -> dict[str, Tensor]:
    """Random tensors of a kind under the names of written_vit.py."""
    tensors = drawn_tensors(
        grid=(SIDE // PATCH,) * 2, patch=(PATCH, PATCH), hidden=HIDDEN, **KINDS[name][3]
    )
    return {place: value.float() for place, value in tensors.items()}


def renamed(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    for before, after in names.items():
        tensors = {name.replace(before, after): value for name, value in tensors.items()}
    return tensors


def their_tensors(name: str) -> dict[str, Tensor]:
    """The same under the names that save_pretrained of transformers writes."""
    kind, architecture, *_ = KINDS[name]
    classifier = "cls_classifier." if architecture.endswith("Teacher") else "classifier."
    tensors = {}
    for place, value in drawn(name).items():
        layer, qkv, part = place.partition("attn.qkv")
        tensors |= (
            dict(
                zip(
                    (
                        f"{layer}attention.attention.{each}{part}"
                        for each in ("query", "key", "value")
                    ),
                    value.chunk(3),
                )
            )
            if qkv
            else {place: value}
        )
    if architecture == "ViTModel":
        tensors |= {"pooler.dense.weight": torch.ones(3), "pooler.dense.bias": torch.ones(3)}
    return renamed(
        tensors, IN_FILES | {"head.": classifier} | ({} if kind.startswith("dinov2") else IN_VIT)
    )


@pytest.fixture
def their_folder(tmp_path):
    """A function name → the folder that save_pretrained would have written; it takes changes."""

    def write(name: str, **changes: object) -> Path:
        kind, architecture, prefix, _ = KINDS[name]
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        labels = {"id2label": LABELS} if "Classification" in architecture else {}
        registers = {"num_register_tokens": REGISTERS} if kind.endswith("registers") else {}
        (folder / "config.json").write_text(
            json.dumps(
                {"model_type": kind, "architectures": [architecture]}
                | CONFIG
                | labels
                | registers
                | changes
            )
        )
        (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
        save_file(
            {
                place if "classifier" in place else prefix + place: value
                for place, value in their_tensors(name).items()
            },
            folder / "model.safetensors",
        )
        return folder

    return write


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_of_transformers_is_its_function_here(name, their_folder, capsys, held_against):
    trained = vitinit.load(their_folder(name))
    images = torch.randn(
        2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(6), dtype=torch.float64
    )
    expected = written_out(
        {place: value.double() for place, value in drawn(name).items()},
        images,
        eps=EPS,
        **KINDS[name][3],
    )
    assert expected.std() > 0.1
    torch.testing.assert_close(trained.model.double()(images), expected, rtol=0, atol=2e-6)
    held_against(trained.model(images), expected, cases=2)
    has_classifier = "Classification" in KINDS[name][1]
    assert trained.classes == (tuple(LABELS.values()) if has_classifier else ())
    assert (trained.recipe.data.mean, trained.recipe.data.std) == (
        (0.5, 0.25, 0.125),
        (0.3, 0.4, 0.7),
    )
    assert (trained.recipe.eval.crop_pct, trained.recipe.eval.interpolation) == (0.75, "bilinear")
    line = capsys.readouterr().err
    pool = 'pool "mean"' if name == "I-JEPA" else 'pool "class"'
    for part in (
        f"num_heads {HEADS}",
        f"image_size [{SIDE}, {SIDE}]",
        "exact GELU",
        pool,
        f"norm_eps {EPS}",
        "crop_pct 0.75",
        "mean [0.5, 0.25, 0.125]",
    ):
        assert part in line
    assert line.count("\n") == 1
    if not has_classifier:
        with pytest.raises(ValueError, match="holds no classifier"):
            trained.predict(torch.zeros(3, 17, 19, dtype=torch.uint8))


@pytest.mark.parametrize("name", KINDS)
def test_the_names_that_transformers_5_has_in_memory_are_read_as_those_of_its_files(name):
    tensors, dinov2 = their_tensors(name), name.startswith("DINOv2")
    found = renamed(tensors, dict([*IN_MEMORY.items()][: -1 if dinov2 else None]))
    assert f"{'encoder.layer' if dinov2 else 'layers'}.1.attention.q_proj.bias" in found
    found = native_names({KINDS[name][2] + place: value for place, value in found.items()})
    assert_identical(found, native_names(tensors))


def test_swins_names_are_those_of_transformers_and_read_as_they_are_written():
    tensors = vitinit.build_model(
        "swin_tiny",
        num_classes=CLASSES,
        image_size=24,
        patch_size=2,
        embed_dim=6,
        depths=(1, 1),
        num_heads=(1, 2),
        window_size=3,
    ).state_dict()
    found = foreign_names(tensors, TRANSFORMERS_SWIN, "swin.")
    assert not found.keys() & tensors.keys()
    memory = renamed(found, IN_MEMORY)
    assert "swin.encoder.layers.1.blocks.0.attention.q_proj.bias" in memory
    for names in (found, memory):
        assert_identical(native_names(names), dict(tensors))
    block = "swin.encoder.layers.1.blocks.0"
    for name, ours in {
        "swin.embeddings.norm.bias": "patch_embed.norm.bias",
        "swin.encoder.layers.0.downsample.reduction.weight": "layers.1.downsample.reduction.weight",
        f"{block}.attention.self.relative_position_bias_table": "layers.1.blocks.0.attn.relative_position_bias_table",
        f"{block}.layernorm_after.weight": "layers.1.blocks.0.norm2.weight",
        f"{block}.intermediate.dense.weight": "layers.1.blocks.0.mlp.fc1.weight",
        f"{block}.output.dense.bias": "layers.1.blocks.0.mlp.fc2.bias",
        f"{block}.attention.output.dense.bias": "layers.1.blocks.0.attn.proj.bias",
        "swin.layernorm.weight": "norm.weight",
        "classifier.bias": "head.fc.bias",
    }.items():
        assert torch.equal(found[name], tensors[ours]), name
    stacked = tensors["layers.1.blocks.0.attn.qkv.weight"]  # (3·C, C)
    for part, rows in zip(("query", "key", "value"), stacked.chunk(3)):
        assert torch.equal(found[f"{block}.attention.self.{part}.weight"], rows)


@pytest.mark.parametrize("name", ["ViT", "DeiT with teacher", "I-JEPA"])
def test_an_export_to_transformers_is_what_was_read_from_it(name, their_folder, tmp_path, capsys):
    source, out = their_folder(name), tmp_path / "out"
    assert (
        export.main(
            [str(source), "--to", "safetensors", "--names", "transformers", "--out", str(out)]
        )
        == 0
    )
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    assert {key: ours[key] for key in theirs} == theirs
    for key in ("image_mean", "image_std", "size", "crop_size", "resample"):
        assert json.loads((out / "preprocessor_config.json").read_text())[key] == PREPROCESSOR[key]
    assert_identical(*(vitinit.load(folder).model.state_dict() for folder in (out, source)))
    capsys.readouterr()
    assert (
        export.main(
            [
                str(their_folder("DeiT")),
                "--to",
                "safetensors",
                "--names",
                "transformers",
                "--out",
                str(tmp_path / "other"),
            ]
        )
        == 2
    )
    assert "no model of transformers takes the weights of this" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_folder_of_shards_is_that_of_one_file(their_folder):
    folder = their_folder("ViT")
    whole, tensors = vitinit.load(folder), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="ViT: holds no checkpoint; expected last.pt or one of mo"):
        vitinit.load(folder)
    files = {name: f"{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in {*files.values()}:
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    again = vitinit.load(folder)
    assert again.recipe == whole.recipe and again.classes == whole.classes
    assert_identical(again.model.state_dict(), whole.model.state_dict())


def test_another_function_of_transformers_is_refused_as_what_it_is(their_folder):
    for changes, message in (
        ({"hidden_act": "quick_gelu"}, "the activation quick_gelu"),
        (
            {"model_type": "siglip", "architectures": ["SiglipVisionModel"]},
            "describes SiglipVisionModel",
        ),
        ({"layer_norm_eps": "tiny"}, "norm_eps is 'tiny'"),
        ({"model_type": "swin", "architectures": ["SwinModel"]}, "layer_norm_eps is 0.001; e"),
        ({"model_type": "swin", "architectures": ["SwinBackbone"]}, "describes SwinBackbone"),
        ({"image_size": "big"}, "is not what transformers or timm writes ('big', expected an"),
    ):
        line = refused(ValueError, vitinit.load, their_folder("ViT", **changes))
        assert "config.json" in line and message in line


LAYER_1 = "encoder.layer.1.attention."


@pytest.mark.parametrize(
    "name, changes, words",
    [
        (
            "ViT",
            {"attention.key.weight": lambda weight: weight[:, 1:]},
            f"missing: blocks.1.attn.qkv.weight; surplus: {LAYER_1}attention.key.weight",
        ),
        (
            "ViT",
            {f"attention.{part}.bias": lambda bias: bias[0] for part in ("query", "key", "value")},
            f"missing: blocks.1.attn.qkv.bias; surplus: {LAYER_1}attention.key.bias",
        ),
        (
            "DINOv2",
            {"output.dense.bias": lambda bias: bias[:3]},
            "surplus: blocks.1.ls1.gamma; other shape: blocks.1.attn.proj.bias (3,) where",
        ),
        (
            "DINOv2",
            {"output.dense.bias": lambda bias: bias[:1]},  # which γ would make as wide as itself
            "surplus: blocks.1.ls1.gamma; other shape: blocks.1.attn.proj.bias (1,) where",
        ),
        (
            "DINOv2",
            {"output.dense.weight": lambda weight: weight[0]},
            f"surplus: blocks.1.ls1.gamma; other shape: blocks.1.attn.proj.weight ({WIDTH},) where",
        ),
        (
            "DINOv2",
            {
                "output.dense.weight": lambda weight: weight[0, 0],
                "../layer_scale1.lambda1": lambda gamma: gamma[0],
            },
            "surplus: blocks.1.ls1.gamma; other shape: blocks.1.attn.proj.weight () where",
        ),
    ],
)
def test_tensors_of_other_shapes_are_put_together_with_no_other_and_named(
    name, changes, words, their_folder
):
    file = their_folder(name) / "model.safetensors"
    tensors = load_file(file)
    for part, change in changes.items():
        place = f"{KINDS[name][2]}{LAYER_1}{part}".replace("attention.../", "")
        tensors[place] = change(tensors[place]).clone()
    save_file(tensors, file)
    line = refused(CheckpointError, vitinit.load, file.parent)
    assert line.startswith(f"{file}: does not fit the model; ") and words in line


def test_pixels_that_are_scaled_or_resized_otherwise_are_read_or_refused(their_folder):
    """transformers normalises pixels times rescale_factor, which is 1 without do_rescale."""
    folder, pixels = their_folder("ViT"), torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)
    for changes, factor in (
        ({"do_rescale": False}, 1.0),
        ({"do_rescale": True}, 1 / 255),
        ({"rescale_factor": 1 / 127.5}, 1 / 127.5),
    ):
        mean, std = ([100.0 * factor, 0.25, 0.0], [50.0 * factor, 0.4, 2.0])
        (folder / "preprocessor_config.json").write_text(
            json.dumps(PREPROCESSOR | {"image_mean": mean, "image_std": std} | changes)
        )
        expected = (pixels.double() * factor - torch.tensor(mean).view(3, 1, 1)) / (
            torch.tensor(std).view(3, 1, 1)
        )
        torch.testing.assert_close(
            as_input(pixels[None], vitinit.load(folder).recipe)[0],
            expected.float(),
            rtol=1e-5,
            atol=1e-5,
        )
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR | {"resample": 1}))
    with pytest.raises(ValueError, match="config.json: eval.interpolation is 'lanczos'; valid: "):
        vitinit.load(folder)


@pytest.mark.parametrize(
    "size, crop, fit, crop_pct",
    [
        (20, SIDE, "crop", 0.75),  # as DeiT's was written
        ({"height": 20, "width": 20}, {"height": SIDE, "width": SIDE}, "crop", 0.75),
        (SIDE, SIDE, "squash", 1.0),  # which crops nothing off
        ({"height": SIDE, "width": SIDE}, None, "squash", 1.0),
    ],
)
def test_a_crop_of_images_that_are_squashed_is_told_as_no_recipe_has_it(
    size, crop, fit, crop_pct, their_folder, capsys
):
    file = their_folder("ViT") / "preprocessor_config.json"
    changes = {"size": size, "crop_size": crop, "do_center_crop": crop is not None}
    file.write_text(json.dumps(PREPROCESSOR | changes))
    recipe = vitinit.load(file.parent).recipe
    assert (recipe.augment.fit, recipe.eval.crop_pct) == (fit, crop_pct)
    told = "resized as by augment.fit squash and then cropped" in capsys.readouterr().err
    assert told == (fit == "crop")


@pytest.mark.parametrize("mode, fit", [("squash", "squash"), ("border", "pad"), ("center", "crop")])
def test_a_crop_of_whole_images_of_timm_is_told_too(mode, fit, tmp_path):
    for crop_pct in (0.9, 1.0):
        config = {"pretrained_cfg": {"crop_mode": mode, "crop_pct": crop_pct}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = read_description(tmp_path / "model.safetensors")
        told = f"resized as by augment.fit {fit} and then cropped" in found.lost
        assert told == (fit != "crop" and crop_pct < 1)
        assert found.values["eval.crop_pct"] == (crop_pct if fit == "crop" else 1.0)


@pytest.mark.parametrize("name", ["do_normalize", "do_rescale", "do_center_crop"])
def test_what_is_true_or_false_is_no_text(name, their_folder):
    file = their_folder("ViT") / "preprocessor_config.json"
    for value in ("false", 0):
        file.write_text(json.dumps(PREPROCESSOR | {name: value}))
        line = refused(ValueError, vitinit.load, file.parent)
        assert line.startswith(f"{file}: ") and f"({name} is {value!r}, expected true" in line
    recipes = []
    for change in ({}, {name: None}):  # null: as if it were not there
        stated = {key: value for key, value in PREPROCESSOR.items() if key != name}
        file.write_text(json.dumps(stated | change))
        recipes.append(vitinit.load(file.parent).recipe)
    assert recipes[0] == recipes[1]


def test_labels_without_names_are_numbers_and_positions_those_of_the_size_stated(their_folder):
    """transformers writes id2label only where it is not its default, of two labels. As many patches
    may be of another grid, which only the file shows."""
    trained = vitinit.load(their_folder("ViT", id2label={}, num_labels=CLASSES))
    assert trained.classes == tuple(map(str, range(CLASSES)))
    folder = their_folder("ViT", image_size=[PATCH, 9 * PATCH])
    assert vitinit.load(folder).model.grid == (1, 9)
    recipe = load_recipe(
        "deit_tiny", overrides(sets=[*OPTIONS, SAME_EPS, f"init.checkpoint={folder}"])
    )
    start, *_ = fine_tune(build(recipe), recipe, task_of(recipe))
    assert "pos_embed 1×9 → 3×3 resized" in start


@pytest.mark.parametrize(
    "labels, words",
    [
        (["ant", "bee"], "has 2 names of 3 classes; expected a name of each, or none"),
        ({"0": "ant", "2": "eel"}, "has 2 names of 3 classes, none of them for class 1; expected"),
        (
            {"1": "ant", "2": "bee", "3": "eel"},
            "has 3 names of 3 classes, none of them for class 0",
        ),
    ],
)
def test_a_name_too_few_does_not_shift_the_others(labels, words, tmp_path):
    config = {"num_classes": 3, "label_names": labels, "pretrained_cfg": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        read_description(tmp_path / "model.safetensors")


def test_timms_hub_states_preparation_and_sizes_and_names_of_other_functions_are_traps(tmp_path):
    config = {
        "architecture": "vit",
        "num_classes": 3,
        "label_names": {"0": "ant", "1": "bee", "2": "eel"},
        "model_args": {
            "num_heads": 3,
            "reg_tokens": 2,
            "depth": None,
            "in_chans": 3,
            "mlp_ratio": 3.5,
            "global_pool": "avg",
            "fc_norm": False,
        },
        "pretrained_cfg": {
            "input_size": [3, 15, 20],
            "mean": [0.5] * 3,
            "std": [0.25] * 3,
            "crop_pct": 0.9,
            "interpolation": "bilinear",
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_description(tmp_path / "model.safetensors")
    assert found.classes == ("ant", "bee", "eel") and found.values == {
        "data.image_size": (15, 20),
        "data.num_classes": 3,
        "model.options.num_heads": 3,
        "model.options.num_registers": 2,
        "model.options.mlp_ratio": 3.5,
        "model.options.pool": "mean",
        "model.options.fc_norm": False,
        "data.mean": [0.5] * 3,
        "data.std": [0.25] * 3,
        "eval.crop_pct": 0.9,
        "eval.interpolation": "bilinear",
    }
    assert read_description(tmp_path / "other.pth") is None  # the file is of the other one
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": {"crop_pct": 0.9}}))
    assert read_description(tmp_path / "model.safetensors").values == {"eval.crop_pct": 0.9}
    config["model_args"]["act_layer"] = "silu"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="config.json: act_layer is silu, which is not known"):
        read_description(tmp_path / "model.safetensors")
    for name in ("europe.pth", "vit_ropes.pth", "rpn/vit.pth"):
        require_known(tmp_path / name, "", rotary=False)
    for name, architecture in (
        ("vit_base_patch16_rope_224.pth", ""),
        ("vit.RPN.pth", ""),
        ("vit_rope/model.safetensors", ""),
        ("a.pth", "vit_rope_224"),
    ):
        with pytest.raises(CheckpointError, match="would fit and compute another function here"):
            require_known(tmp_path / name, architecture, rotary="RPN" in name)
    require_known(tmp_path / "vit_rope_224.pth", "eva02_tiny_patch14_224", rotary=True)


@pytest.mark.parametrize(
    "architecture, arguments, pool",
    [
        ("vit_small_patch16_224", {}, "mean"),
        ("eva02_tiny_patch14_224", {"global_pool": "token"}, "class"),
        ("swin_tiny_patch4_window7_224", {}, None),  # whose recipe has no such option
        ("mixer_b16_224", {}, None),
    ],
)
def test_timms_hub_states_the_pooling_beside_the_models_arguments(
    architecture, arguments, pool, tmp_path
):
    config = {
        "architecture": architecture,
        "global_pool": "avg",
        "model_args": arguments,
        "pretrained_cfg": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = read_description(tmp_path / "model.safetensors").values
    assert values.get("model.options.pool") == pool


# What their ViT needs of deit_tiny, but for its epsilon.
OPTIONS = [
    f"data.image_size={SIDE}",
    *(
        f"model.options.{key}"
        for key in (
            f"embed_dim={WIDTH}",
            f"patch_size={PATCH}",
            "depth=2",
            f"mlp_ratio={(HIDDEN + 0.5) / WIDTH}",
        )
    ),
]
SAME_EPS = f"model.options.norm_eps={EPS}"


def test_fine_tuning_reads_the_same_files_and_refuses_or_tells_what_is_otherwise(
    train_program, their_folder, image_tree, capsys
):
    folder = their_folder("ViT")
    sets = [
        *OPTIONS,
        "data.num_classes=3",
        "optim.global_batch=2",
        "optim.base_lr=0.5",
        "mix.group=2",
        "engine.compile=false",
        "engine.amp=off",
        "data.workers=0",
        "eval.batch_size=3",
        f"init.checkpoint={folder}",
    ]

    def start(status: int, *changes: str) -> str:
        assert (
            train_program.main(
                [
                    "--recipe",
                    "deit_tiny",
                    "--data-dir",
                    str(image_tree),
                    "--dry-run",
                    *(word for change in (*sets, *changes) for word in ("--set", change)),
                ]
            )
            == status
        )
        return "".join(capsys.readouterr())

    assert f"norm_eps is {EPS}, in the recipe 1e-06" in start(2)
    assert "expected --set model.options.num_heads=3" in start(
        2, SAME_EPS, "model.options.num_heads=7"
    )
    (note,) = [line for line in start(0, SAME_EPS).splitlines() if line.startswith("note")]
    assert "num_heads 3" in note and f"norm_eps {EPS}" in note and "recipe deit_tiny" in note
    said = start(0, SAME_EPS, "data.mean=[0.5,0.25,0.125]")
    warning, *_ = [line for line in said.splitlines() if line.startswith("warn")]
    assert warning.endswith(
        "config.json: images were prepared otherwise than by the recipe; as they were: --set data."
        'std=[0.3,0.4,0.7] --set eval.crop_pct=0.75 --set eval.interpolation="bilinear"'
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR | {"resample": 1}))
    assert "=0.75 (eval.interpolation has no lanczos)\n" in start(0, SAME_EPS)


def test_a_runs_own_recipe_is_compared_too_and_what_it_says_of_itself_is_checked(tmp_path):
    state = torch.load(RUN / "last.pt")
    recipe = load_recipe(
        RUN / "recipe.toml",
        overrides(
            sets=[
                f"init.checkpoint={tmp_path}/a.pt",
                "data.mean=[0.1,0.2,0.3]",
                "data.num_classes=3",
            ]
        ),
    )
    torch.save(state, tmp_path / "a.pt")
    start, head, warning = fine_tune(build(recipe), recipe, task_of(recipe, state["classes"]))
    assert start.endswith(" tensors loaded") and "/a.pt: images were prepared otherwise" in warning
    torch.save(state | {"classes": ["a", "b"]}, tmp_path / "a.pt")
    colours = task_of(recipe, ["red", "green", "blue"])
    for call in (
        lambda: vitinit.load(tmp_path / "a.pt"),
        lambda: fine_tune(build(recipe), recipe, colours),
    ):
        assert "names 2 classes, and its classifier has 3" in refused(ValueError, call)
    for key, value in (("num_heads", 1), ("pos_embed", "learned+rope"), ("rope_base", 10.0)):
        options = state["recipe"]["model"]["options"] | {key: value}
        torch.save(
            state
            | {
                "recipe": state["recipe"]
                | {"model": state["recipe"]["model"] | {"options": options}}
            },
            tmp_path / "a.pt",
        )
        assert f"a.pt: {key} is {value}" in refused(
            ValueError, fine_tune, build(recipe), recipe, task_of(recipe)
        )


def test_overrides_change_how_images_are_prepared_and_nothing_else_of_a_run(capsys):
    trained = vitinit.load(RUN, overrides={"eval.crop_pct": 0.5})
    assert trained.recipe.eval.crop_pct == 0.5
    image = torch.randint(256, (3, 23, 29), dtype=torch.uint8)
    assert not torch.equal(trained.view(image), vitinit.load(RUN).view(image))
    for key, value in (("model.options.num_heads", 1), ("data.mean", (0.5, 0.5, 0.5))):
        with pytest.raises(ValueError, match=f"{key}=.*brings its own recipe"):
            vitinit.load(RUN, overrides={key: value})
    assert capsys.readouterr().err == ""  # nothing is assumed of a run's own model


def test_dinov3s_config_states_its_positions_layer_scale_and_gate(tmp_path):
    config = {
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 36,
        "patch_size": 4,
        "image_size": 20,
        "layer_norm_eps": 1e-5,
        "num_register_tokens": 3,
        "rope_theta": 50.0,
        "layerscale_value": 0.5,
        "query_bias": False,
        "use_gated_mlp": True,
        "hidden_act": "silu",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = read_description(tmp_path / "model.safetensors").values["model.options"]
    assert (
        options.items()
        >= dict(
            pos_embed="rope",
            rope_coordinates="centred",
            rope_base=50.0,
            layer_scale=0.5,
            mlp="swiglu",
            qkv_bias=False,
            mlp_ratio=1.5,
            num_registers=3,
            norm_eps=1e-5,
            pool="class",
        ).items()
    )
    (tmp_path / "config.json").write_text(json.dumps(config | {"use_gated_mlp": False}))
    with pytest.raises(CheckpointError, match="with the activation silu"):
        read_description(tmp_path / "model.safetensors")


@pytest.mark.parametrize("key, value", [("reads", "position"), ("input_pos_embed", "other")])
def test_what_attention_reads_is_compared_as_no_tensor_shows_it(key, value):
    recipe = load_recipe("cifar10_simple_vit")
    stated = plain(recipe.as_dict())
    assert differences(stated, recipe, Path("a.pt")) == []
    stated["model"]["options"][key] = value
    with pytest.raises(CheckpointError, match=f"{key} is {value}, in the recipe .* no tensor"):
        differences(stated, recipe, Path("a.pt"))
