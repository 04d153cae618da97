"""ViT against torchvision's; its distilled form and its registers against what the papers say."""

import pytest
import torch
from small_models import assert_same_function, drawn, redraw
from torchvision.models import VisionTransformer as TorchvisionViT

import vitinit
from vitinit.interop.weights.names import native_tensors
from vitinit.mixing.filters import neighbours, ordered_offsets
from vitinit.models.attention import hold_to_shifts

SMALL = dict(num_classes=13, image_size=(12, 20), patch_size=4, embed_dim=12, depth=2, num_heads=3)


def test_outputs_and_gradients_equal_torchvisions(held_against):
    theirs = redraw(
        TorchvisionViT(
            image_size=20,
            patch_size=4,
            num_layers=3,
            num_heads=3,
            hidden_dim=21,
            mlp_dim=84,
            num_classes=11,
        ),
        0.2,
    ).eval()
    ours = vitinit.build_model(
        "vit_tiny", num_classes=11, image_size=20, patch_size=4, embed_dim=21, depth=3, num_heads=3
    ).double()
    ours.load_state_dict(native_tensors(theirs.state_dict()))
    images = drawn(2, 3, 20, 20)
    assert_same_function(
        ours,
        ours(images),
        theirs(images),
        native_tensors(dict(theirs.named_parameters())),
        held_against,
        atol=1e-9,
    )


def test_a_gated_mlp_and_layer_scale_are_those_of_their_papers(held_against):
    """arXiv 2002.05202, §2: (swish(x W) ⊗ x V) W₂; arXiv 2103.17239, §2.1: x + diag(γ) f(x)."""
    model = vitinit.build_model("vit_tiny", mlp="swiglu", mlp_ratio=1.5, layer_scale=0.25, **SMALL)
    assert {block.ls2.gamma.mean().item() for block in model.blocks} == {0.25}
    block, x = redraw(model).blocks[1], drawn(2, 5, 12)
    mlp = block.mlp
    middle = x + block.ls1.gamma * block.attn(block.norm1(x))
    both = block.norm2(middle) @ mlp.fc1.weight.T + mlp.fc1.bias
    gate, value = both[..., :18], both[..., 18:36]
    hidden = gate / (1 + (-gate).exp()) * value @ mlp.fc2.weight.T + mlp.fc2.bias
    both_ways = [
        [y, *torch.autograd.grad(y.square().sum(), [*block.parameters()])]
        for y in (block(x), middle + block.ls2.gamma * hidden)
    ]
    for pair in zip(*both_ways):
        torch.testing.assert_close(*pair, rtol=0, atol=1e-9)
    held_against(*both_ways, cases=2)


def test_without_positions_patches_could_be_shuffled():
    model, without = (
        vitinit.build_model("vit_tiny", pool="mean", pos_embed=kind, **SMALL).double()
        for kind in ("learned", "none")
    )
    without.load_state_dict(redraw(model).state_dict() | {"pos_embed": without.pos_embed})
    assert model.learns_positions and not without.learns_positions
    images = drawn(2, 3, 12, 20)
    swapped = torch.cat([images[..., 4:8], images[..., :4], images[..., 8:]], dim=-1)
    assert not torch.allclose(model(images), model(swapped), atol=1e-6)
    torch.testing.assert_close(without(images), without(swapped))


@pytest.mark.parametrize(
    "pool, distilled, fc_norm, pos_embed",
    [
        ("class", False, False, "learned"),
        ("class", True, False, "sincos"),
        ("mean", False, False, "sincos"),
        ("mean", False, True, "learned"),
    ],
)
def test_registers_take_part_in_attention_and_are_not_read(
    pool, distilled, fc_norm, pos_embed, held_against
):
    """arXiv 2309.16588, §2.2: they come after the other prefix tokens and before the patches."""
    model = redraw(
        vitinit.build_model(
            "vit_tiny",
            pool=pool,
            distilled=distilled,
            num_registers=5,
            fc_norm=fc_norm,
            pos_embed=pos_embed,
            **SMALL,
        )
    )
    before = (pool == "class") + distilled + 5
    assert model.num_prefix_tokens == before and model.pos_embed.shape == (1, before + 15, 12)
    assert model.learns_positions == (pos_embed == "learned")
    if pos_embed == "sincos":
        assert (model.pos_embed[:, :before] == 0).all() and (model.pos_embed[:, before:] != 0).any()
    images = drawn(7, 3, 12, 20)
    tokens = [
        getattr(model, name)
        for name in ("cls_token", "dist_token", "reg_token")
        if hasattr(model, name)
    ]
    x = torch.cat([*(token.repeat(7, 1, 1) for token in tokens), model.patch_embed(images)], dim=1)
    x = x + model.pos_embed
    for block in model.blocks:
        x = block(x)
    x = model.norm(x)  # with fc_norm the identity
    if distilled:
        apart = torch.stack([model.head(x[:, 0]), model.head_dist(x[:, 1])], 1)
        assert (apart[:, 0] - apart[:, 1]).std() > 0.1  # else either head would do
        torch.testing.assert_close(model(images, apart=True), apart, rtol=0, atol=1e-12)
        expected = apart.mean(1)
    else:
        expected = model.head(x[:, 0] if pool == "class" else model.fc_norm(x[:, 5:].mean(1)))
    logits = model(images)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    held_against(logits, expected, cases=7)
    logits.square().sum().backward()
    assert all(p.grad.abs().max() > 1e-6 for p in model.parameters())
    model.reg_token.data.neg_()  # they are attended to
    assert not torch.allclose(model(images), logits, atol=1e-3)


@pytest.mark.parametrize("pool, registers", [("class", 0), ("class", 5), ("mean", 3)])
def test_without_positions_of_prefix_tokens_they_have_zeros(pool, registers, held_against):
    """DeiT III adds positions to patches alone, before the class token (arXiv 2204.07118)."""
    sizes = SMALL | dict(pool=pool, num_registers=registers)
    model = redraw(vitinit.build_model("vit_tiny", prefix_positions=False, **sizes))
    state = model.state_dict()
    assert state["pos_embed"].shape == (1, 15, 12)
    zeros = torch.zeros(1, registers + (pool == "class"), 12, dtype=torch.float64)
    full = vitinit.build_model("vit_tiny", **sizes).double()
    full.load_state_dict(state | {"pos_embed": torch.cat([zeros, state["pos_embed"]], dim=1)})
    images = drawn(2, 3, 12, 20)
    torch.testing.assert_close(model(images), full(images), rtol=0, atol=1e-12)
    held_against(model(images), full(images), cases=2)


def test_drop_path_rises_from_block_to_block_or_is_the_same_in_all():
    def rates(**options: object) -> tuple[float, ...]:
        model = vitinit.build_model("vit_tiny", drop_path=0.3, **SMALL | dict(depth=3), **options)
        return model.drop_path_rates

    assert rates() == pytest.approx((0, 0, 0.15, 0.15, 0.3, 0.3))
    assert rates(constant_drop_path=True) == (0.3,) * 6


@torch.no_grad()
@pytest.mark.parametrize(
    "frequencies, coordinates",
    [
        ("linear", "index"),
        ("axial", "index"),
        ("mixed", "index"),
        ("axial", "scaled"),
        ("axial", "centred"),
        ("linear", "scaled"),  # of which some turn by more than π from row to row
    ],
)
def test_shifts_are_rotary_attention_at_mass_one(frequencies, coordinates):
    """The impulse's constants alone, many times as large: also where the offset leads off the grid.
    The last block keeps its attention, and continues with the offsets."""
    sizes = SMALL | dict(depth=3, embed_dim=48, num_heads=3, pool="mean", pos_embed="rope")
    sizes |= dict(rope_frequencies=frequencies, rope_coordinates=coordinates)
    model = vitinit.build_model("vit_tiny", **sizes)
    generator = torch.Generator().manual_seed(0)
    vitinit.init_weights(model, "impulse", generator=generator, kernel_size=3, target_mass=0.6)
    model = model.double()
    for block in model.blocks:
        block.attn.qkv.weight[:96] = 0.0
        block.attn.qkv.bias[:96] *= 1e3
    shifts = vitinit.build_model("vit_tiny", shift_blocks=2, **sizes).double()
    state = model.state_dict()
    for name in list(state):
        if ".qkv." in name and "blocks.2" not in name:
            state[name.replace("qkv", "v")] = state.pop(name)[96:]
        if name.endswith("frequencies") and "blocks.2" not in name:
            del state[name]
    shifts.load_state_dict(state)
    images = drawn(2, 3, 12, 20)
    torch.testing.assert_close(shifts(images), model(images), rtol=0, atol=1e-6)
    apart = vitinit.build_model("vit_tiny", shift_blocks=2, **sizes)
    generator.manual_seed(0)
    vitinit.init_weights(apart, "impulse", generator=generator, kernel_size=3, target_mass=0.9)
    weights = apart.blocks[2].attn.mixing_weights(torch.zeros(1, 15, 48))
    expected = model.blocks[2].attn.mixing_weights(torch.zeros(1, 15, 48).double())
    assert torch.equal(weights.argmax(-1), expected.argmax(-1))


def test_shifts_have_their_target_wherever_it_is_on_the_grid():
    """Also where frequencies, of 4 channels a head, hold others of its tokens for the same."""
    sizes = dict(num_classes=2, image_size=(9, 13), patch_size=1, embed_dim=20, num_heads=5)
    rope = dict(pos_embed="rope", rope_frequencies="linear", pool="mean")
    model = vitinit.build_model("vit_tiny", shift_blocks=2, depth=2, **sizes, **rope)
    offsets = ordered_offsets(3)
    for number, block in enumerate(model.blocks):
        for head, index in enumerate(block.attn.index):
            tokens, targets = neighbours(offsets[(5 * number + head) % 9], (9, 13))
            assert torch.equal(index[tokens], targets)


def test_shifts_refuse_other_tokens_than_those_of_a_whole_grid():
    sizes = SMALL | dict(depth=3)
    for options in (
        dict(shift_blocks=1),
        dict(shift_blocks=4, pool="mean"),
        dict(shift_blocks=1, pool="mean", num_registers=2),
    ):
        with pytest.raises(
            ValueError, match=f"shift_blocks is {options['shift_blocks']}, expected"
        ):
            vitinit.build_model("vit_tiny", **sizes, **options)
    model = vitinit.build_model("vit_tiny", shift_blocks=1, pool="mean", **sizes)
    index = model.blocks[0].attn.index[0]
    assert torch.equal(index, torch.arange(15))  # the first offset is the token itself
    with pytest.raises(ValueError, match="some are hidden here"):
        model.blocks[0](torch.zeros(2, 7, 12), tokens=torch.zeros(2, 7, dtype=torch.int64))


def test_attention_that_is_held_is_the_shift_in_training_and_attention_in_evaluation():
    """The impulse's own, at mass .9: only values and what follows them have gradients."""
    sizes = SMALL | dict(embed_dim=48, pool="mean", pos_embed="rope", rope_frequencies="linear")
    model = vitinit.build_model("vit_tiny", **sizes)
    vitinit.init_weights(model, "impulse", generator=torch.Generator().manual_seed(0))
    model, shifts = (
        model.double(),
        vitinit.build_model("vit_tiny", shift_blocks=2, **sizes).double(),
    )
    state = model.state_dict()
    for name in [name for name in state if ".qkv." in name]:
        state[name.replace("qkv", "v")] = state.pop(name)[96:]
    shifts.load_state_dict(state)
    images = drawn(2, 3, 12, 20)
    attention = model(images)
    hold_to_shifts(model, held=True)
    held = model(images)
    assert_close = torch.testing.assert_close
    assert_close(held, shifts(images), rtol=0, atol=1e-12)
    assert (held - attention).abs().max() > 1e-3
    for logits in (held, shifts(images)):
        logits.square().sum().backward()
    for block, shift in zip(model.blocks, shifts.blocks):
        for name in ("weight", "bias"):
            gradient = getattr(block.attn.qkv, name).grad
            assert not gradient[:96].any()
            assert_close(gradient[96:], getattr(shift.attn.v, name).grad, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="some are hidden here"):
        model.blocks[0](torch.zeros(2, 7, 48).double(), tokens=torch.zeros(2, 7, dtype=torch.int64))
    assert torch.equal(model.eval()(images), attention)
    hold_to_shifts(model.train(), held=False)
    assert torch.equal(model(images), attention)


@pytest.mark.parametrize(
    "init, options, expected",
    [
        ("default", {}, "has a mass of .* on one token by place alone"),
        ("impulse", dict(pos_embed="learned"), "expected rotary positions with fixed frequencies"),
        ("impulse", dict(rope_frequencies="mixed"), "with fixed frequencies"),  # parameters here
        ("impulse", dict(qkv_bias=False), "has a mass of .*"),  # by content, of channel 0
        ("impulse", dict(pool="class"), "has no place from which to look"),
    ],
)
def test_attention_whose_biases_choose_no_token_is_not_held(init, options, expected):
    sizes = SMALL | dict(embed_dim=144, pool="mean", pos_embed="rope", rope_frequencies="linear")
    model = vitinit.build_model("vit_tiny", **sizes | options)
    vitinit.init_weights(model, init, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=expected):
        hold_to_shifts(model, held=True)
