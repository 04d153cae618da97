"""The maps Q Kᵀ, P Q Kᵀ Pᵀ and softmax equal the formulas written out."""

import numpy as np
import pytest
import torch
from small_models import written

import vitinit
from vitinit.programs.figures import attention
from vitinit.programs.figures.program import main
from vitinit.programs.shared import plot


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_maps_equal_the_formulas_written_out(pool):
    model = vitinit.build_model(
        "vit_tiny",
        num_classes=3,
        image_size=(10, 14),
        patch_size=2,
        embed_dim=39,
        depth=2,
        num_heads=3,
        pool=pool,
    ).double()
    generator, block = torch.Generator().manual_seed(0), 1
    vitinit.init_weights(model, "default", generator=generator)
    with torch.no_grad():  # a norm with a gain, as training leaves it
        for each in model.blocks:
            each.norm1.weight.uniform_(0.5, 1.5, generator=generator)
            each.norm1.bias.normal_(generator=generator)
    packed = model.blocks[block].attn.qkv.weight.detach().numpy()  # (3·39, 39)
    code = model.pos_embed.detach().numpy()[0, model.num_prefix_tokens :]
    norm = model.blocks[block].norm1
    code = (code - code.mean(1, keepdims=True)) / np.sqrt(code.var(1, keepdims=True) + 1e-6)
    code = code * norm.weight.detach().numpy() + norm.bias.detach().numpy()
    found = {
        kind: attention.position_maps(model, block, kind).numpy() for kind in attention.FIGURE_KINDS
    }
    for head in range(3):
        query, key = (packed[part * 39 + head * 13 :][:13].T for part in (0, 1))  # (D, d)
        logits = code @ query @ key.T @ code.T
        powers = np.exp(logits / np.sqrt(13))
        np.testing.assert_allclose(found["qk"][head], query @ key.T, rtol=0, atol=1e-12)
        np.testing.assert_allclose(found["logits"][head], logits, rtol=0, atol=1e-12)
        np.testing.assert_allclose(
            found["softmax"][head], powers / powers.sum(1, keepdims=True), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize(
    "pos_embed, qk_norm", [("rope", False), ("learned+rope", False), ("learned", True)]
)
def test_maps_of_turned_or_normalised_queries_are_those_of_the_attention(pos_embed, qk_norm):
    """With biases, in which a rotary ViT may have its positions; the class token is not shown."""
    model = vitinit.build_model(
        "vit_tiny",
        num_classes=3,
        image_size=(10, 14),
        patch_size=2,
        embed_dim=36,
        depth=2,
        num_heads=3,
        pos_embed=pos_embed,
        qk_norm=qk_norm,
    ).double()
    block = written("default", model).blocks[1]
    torch.nn.init.normal_(block.attn.qkv.bias, generator=torch.Generator().manual_seed(0))
    blank = torch.zeros(1, 36, 36).double() if model.pos_embed is None else model.pos_embed
    among = block.attn.mixing_weights(block.norm1(blank))[0, :, 1:, 1:].detach()
    softmax = attention.position_maps(model, 1, "softmax")
    torch.testing.assert_close(softmax, among / among.sum(-1, keepdim=True))
    logits = attention.position_maps(model, 1, "logits")
    torch.testing.assert_close((logits / 12**0.5).softmax(-1), softmax)


@pytest.mark.parametrize(
    "reads, entering", [("content", True), ("mixed", False), ("position", False), ("free", False)]
)
def test_a_simple_vits_maps_are_those_where_the_content_is_zero(reads, entering):
    """The formulas of simple_vit.py, written out; a free Q and K has no map between channels."""
    model = vitinit.build_model(
        "simple_vit",
        num_classes=3,
        image_size=(10, 14),
        patch_size=2,
        embed_dim=36,
        depth=2,
        num_heads=3,
        reads=reads,
        alpha=0.25,
        input_pos_embed=entering,
        logit_scale=0.1,
    ).double()
    written("default", model)
    block, code = model.blocks[1], model.pos_embed
    x = block.norm1(0.75 * code if entering else 0.0 * code)
    z = {"content": x, "mixed": 0.25 * x + 0.75 * code, "position": code, "free": None}[reads]
    for head in range(3):
        if z is None:
            query, key = block.attn.query[head], block.attn.key[head]
        else:
            part = slice(12 * head, 12 * head + 12)
            query, key = (z @ packed[part].T for packed in block.attn.qk.weight.chunk(2))
        logits = (query @ key.T).detach()
        torch.testing.assert_close(attention.position_maps(model, 1, "logits")[head], logits)
        torch.testing.assert_close(
            attention.position_maps(model, 1, "softmax")[head], (0.1 * logits).softmax(-1)
        )
    if reads == "free":
        with pytest.raises(plot.FigureError, match="expected --kinds logits softmax"):
            attention.position_maps(model, 1, "qk")


def test_rows_are_kinds_models_and_blocks_and_columns_heads(draw, sizes, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        attention,
        "draw_grid",
        lambda *arguments: (drawn.append(arguments), plot.draw_grid(*arguments)),
    )
    draw(
        "maps",
        "--recipe",
        "quickstart",
        "--init",
        "default",
        "impulse",
        "--seed",
        5,
        *sizes,
        "--blocks",
        1,
        0,
        "--heads",
        2,
        0,
        "--kinds",
        "qk",
        "softmax",
    )
    _, rows, heads, _ = drawn[0]
    assert heads == [2, 0]
    assert [row.label for row in rows] == [
        f"{init}\nblock {block}" for init in ("default", "impulse") for block in (1, 0)
    ] * 2
    assert [row.diverging for row in rows] == [True] * 4 + [False] * 4
    model = vitinit.build_model(
        "vit_tiny",
        num_classes=10,
        image_size=(10, 14),
        patch_size=2,
        embed_dim=39,
        depth=2,
        num_heads=3,
        pool="mean",
    )
    written("impulse", model, 5)
    assert torch.equal(rows[6].maps, attention.position_maps(model, 1, "softmax")[[2, 0]])
    assert torch.equal(rows[3].maps, attention.position_maps(model, 0, "qk")[[2, 0]])


def test_without_a_recipe_or_a_run_nine_heads_are_shown_after_three_inits(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(attention, "draw_grid", lambda out, rows, *_: drawn.extend(rows))
    assert main(["maps", "--kinds", "softmax", "--out", str(tmp_path / "maps.png")]) == 0
    assert [row.label.partition("\n")[0] for row in drawn] == ["default", "mimetic", "impulse"]
    assert all(len(row.maps) == 9 for row in drawn)
