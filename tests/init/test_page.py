"""The examples of how to add an init, and of how to use one elsewhere, do what the pages say."""

import copy
from pathlib import Path

import torch
from optimisers import muon

import vitinit
from vitinit.init import INITS
from vitinit.train.optim import decays, hidden_matrices, set_learning_rate

HERE = Path(vitinit.__file__).parent / "init" / "your_own_code.md"
PAGE = Path(vitinit.__file__).parent / "init" / "README.md"


def codes(page: Path) -> list[str]:
    return [part.partition("```")[0]
            for part in page.read_text(encoding="utf-8").split("```python\n")[1:]]


def test_the_example_of_an_init_of_ones_own_starts_every_block_as_the_identity(monkeypatch):
    monkeypatch.setattr("vitinit.init.INITS", dict(INITS))
    code = PAGE.read_text(encoding="utf-8").partition("## How to add an init")[2]
    code = code.partition("```python\n")[2].partition("```")[0]
    names: dict = {}
    exec(code, names)
    model, x = names["model"], torch.randn(2, 7, 192, generator=torch.Generator().manual_seed(1))
    assert all(torch.equal(block(x), x) for block in model.blocks)
    other = vitinit.build_model("vit_tiny", num_classes=10, image_size=32, patch_size=4)
    vitinit.init_weights(other, "lecun", generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.blocks[0].attn.qkv.weight, other.blocks[0].attn.qkv.weight)


def test_the_examples_for_ones_own_code_print_what_the_page_shows(capsys):
    text = HERE.read_text(encoding="utf-8")
    first, _, own = codes(HERE)
    exec(first, {})
    printed, shown = capsys.readouterr().out.splitlines(), text.partition("```\nVision")[2]
    shown = ("Vision" + shown.partition("\n```")[0]).splitlines()
    assert len(printed) == len(shown)
    for line, expected in zip(printed, shown):
        before, _, after = expected.partition("…")
        assert line.startswith(before.rstrip()) and line.endswith(after.strip())
    names: dict = {}
    exec(own, names)
    assert names["report"].mass[0][0] > 0.9 and len(names["report"].mass[0]) == 3


def test_pytorchs_muon_as_the_page_sets_it_is_ours_to_rounding():
    """Its iteration is in bfloat16, ours in float32 here; a larger decay than the page's shows."""
    model = vitinit.build_model("vit_tiny", num_classes=3, image_size=16, patch_size=8,
                                embed_dim=22, depth=2, num_heads=2)
    generator = torch.Generator().manual_seed(0)
    vitinit.init_weights(model, "lecun", generator=generator)
    code = codes(HERE)[1].replace("0.05", "5.0").replace("model.encoder.layers", "model.blocks")
    names: dict = {"torch": torch, "model": model}
    exec(code, names)
    theirs, adamw = names["optimisers"]
    matrices = {name: model.get_parameter(name) for name in hidden_matrices(model)}
    assert set(names["matrices"]) == set(matrices.values())
    left = {weight: decays(name, weight) * names["decay"] for name, weight
            in model.named_parameters() if name not in matrices}
    assert left == {weight: group["weight_decay"] for group in adamw.param_groups
                    for weight in group["params"]}
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
    readme = (HERE.parents[2] / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n## Keep your own trainer\n")[2].partition("\n## ")[0]
    code, output = section.split("```")[1], section.split("```")[3]
    page = HERE.read_text(encoding="utf-8").replace("import describe, impulse_", "import impulse_")
    assert all(line in page for line in code.removeprefix("python").splitlines())
    assert "impulse_(model" in code and output.strip() in page
