"""The examples of how to add an init, and of how to use one elsewhere, do what the pages say."""

import copy
from pathlib import Path

import torch
from optimisers import muon
from pages import README, read_page
from torchvision.models import VisionTransformer

import vitinit
from vitinit.init import INITS
from vitinit.train.optim import decays, hidden_matrices, set_learning_rate

HERE, PAGE = (
    read_page(Path(vitinit.__file__).parent / name)
    for name in ("interop/in_place/your_own_code.md", "init/README.md")
)


def test_the_example_of_an_init_of_ones_own_starts_every_block_as_the_identity(monkeypatch):
    monkeypatch.setattr("vitinit.init.INITS", dict(INITS))
    code = "\n".join(PAGE.section("How to add an init").blocks("python"))
    names: dict = {}
    exec(code.replace("import mine, ", "import "), names)  # the row is made here
    model, x = names["model"], torch.randn(2, 7, 192, generator=torch.Generator().manual_seed(1))
    assert all(torch.equal(block(x), x) for block in model.blocks)
    other = vitinit.build_model("vit_tiny", num_classes=10, image_size=32, patch_size=4)
    vitinit.init_weights(other, "lecun", generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.blocks[0].attn.qkv.weight, other.blocks[0].attn.qkv.weight)


def test_the_examples_for_ones_own_code_print_what_the_page_shows(monkeypatch, capsys):
    """The first on three of the twelve blocks: attentions as large, and MLPs of a few channels."""
    sizes = dict(image_size=224, patch_size=32, num_heads=12, hidden_dim=768)
    monkeypatch.setattr(
        "torchvision.models.vit_b_32",
        lambda num_classes: VisionTransformer(
            num_layers=3, mlp_dim=7, num_classes=num_classes, **sizes
        ),
    )
    first, own, _ = HERE.blocks("python")
    exec(first, {})
    printed = capsys.readouterr().out.splitlines()
    (shown,) = (block for block in HERE.blocks("") if block.startswith("Vision"))
    for of_twelve, of_three in (
        ("12 blocks", "3 blocks"),
        ("wrote 25 tensors", "wrote 7 tensors"),  # two of each block, and the positions
        ("all 144 heads", "all 36 heads"),
    ):
        assert of_twelve in shown
        shown = shown.replace(of_twelve, of_three)
    for line, expected in zip(printed, shown.splitlines(), strict=True):
        before, _, after = expected.partition("…")
        assert line.startswith(before.rstrip()) and line.endswith(after.strip())
    names: dict = {}
    exec(own, names)
    assert names["report"].mass[0][0] > 0.9 and len(names["report"].mass[0]) == 3


def test_pytorchs_muon_as_the_page_sets_it_is_ours_to_rounding():
    """Its iteration is in bfloat16, ours in float32 here; a larger decay than the page's shows."""
    model = vitinit.build_model(
        "vit_tiny", num_classes=3, image_size=16, patch_size=8, embed_dim=22, depth=2, num_heads=2
    )
    generator = torch.Generator().manual_seed(0)
    vitinit.init_weights(model, "lecun", generator=generator)
    *_, code = HERE.blocks("python")
    names: dict = {"torch": torch, "model": model}
    exec(code.replace("0.05", "5.0").replace("model.encoder.layers", "model.blocks"), names)
    theirs, adamw = names["optimisers"]
    matrices = {name: model.get_parameter(name) for name in hidden_matrices(model)}
    assert set(names["matrices"]) == set(matrices.values())
    left = {
        weight: decays(name, weight) * names["decay"]
        for name, weight in model.named_parameters()
        if name not in matrices
    }
    assert left == {
        weight: group["weight_decay"] for group in adamw.param_groups for weight in group["params"]
    }
    start, other = copy.deepcopy(model), copy.deepcopy(model)
    ours = muon(other, factor=names["factor"], momentum=0.95, weight_decay=names["decay"])
    set_learning_rate(ours, names["rate"])
    for _ in range(3):
        for name, weight in matrices.items():
            weight.grad = torch.randn(weight.shape, generator=generator)
            other.get_parameter(name).grad = weight.grad.clone()
        theirs.step()
        ours.step()
    for name, weight in matrices.items():
        after, before = other.get_parameter(name), start.get_parameter(name)
        assert (weight - after).norm() < 0.02 * (after - before).norm(), name


def test_the_readme_shows_a_part_of_that_page():
    section = README.section("Keep your own trainer")
    (code, *_), (output, *_) = section.blocks("python"), section.blocks("")
    page = HERE.text.replace("import describe, impulse_", "import impulse_")
    assert all(line in page for line in code.splitlines())
    assert "impulse_(model" in code and output.strip() in page
