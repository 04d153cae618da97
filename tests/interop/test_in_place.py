"""impulse_ and its sisters on other libraries' models: exact, told in a receipt, or refused."""

import copy
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torchvision
from other_models import CLASSES, DIM, GRID, HEADS, LAYERS, OtherViT, assert_masses, put
from small_models import seeded, state_of
from torch import Tensor, nn

import vitinit
from vitinit.init import deep_impulse_, describe, impulse_, init_, init_weights, mimetic_
from vitinit.init.attentions import Layout
from vitinit.interop.in_place.foreign_layouts import block_of, foreign_layout_of
from vitinit.interop.in_place.initialise import write_back
from vitinit.mixing import target_mass
from vitinit.watch.mass import Mass


def photographs(count: int = 11, *size: int) -> Tensor:
    return torch.randn(count, 3, *(size or (20, 28)), generator=seeded(1))


def ours(**sizes) -> nn.Module:
    return vitinit.build_model(
        "vit_tiny",
        **dict(
            num_classes=CLASSES,
            image_size=(20, 28),
            patch_size=4,
            embed_dim=DIM,
            depth=3,
            num_heads=HEADS,
            mlp_ratio=31 / DIM,
            norm_eps=1e-5,
        )
        | sizes,
    )


def bits(model: nn.Module) -> list[Tensor]:
    """What impulse_ and mimetic_ write, whatever it is called."""
    vit = foreign_layout_of(model)
    return [vit.pos_embed] + [
        tensor for block in vit.blocks for tensor in (block.q, block.k, block.v, block.proj)
    ]


@pytest.mark.parametrize("kind", LAYERS)
def test_all_layouts_get_the_same_bits_and_the_mass_is_that_of_their_own_forward_pass(kind):
    for init in (mimetic_, impulse_):
        model, mine, images = OtherViT(kind).eval(), ours(), photographs()
        with torch.no_grad():  # mimetic_ leaves the position embedding alone
            foreign_layout_of(mine).pos_embed.copy_(foreign_layout_of(model).pos_embed)
        before, report = state_of(model), init(model, generator=seeded(), images=images)
        init(mine, generator=seeded())
        assert all(map(torch.equal, bits(model), bits(mine)))
        assert not any(
            bias.any()
            for block in foreign_layout_of(model).blocks
            for bias in (block.q_bias, block.k_bias, block.v_bias, block.proj_bias)
            if bias is not None
        )
        changed = {
            name
            for name, value in model.state_dict().items()
            if not torch.equal(value, before[name])
        }
        assert changed == set(report.written) and report.kept == len(
            [*model.parameters(), *model.buffers()]
        ) - len(changed)
        assert all("attn" in name or "pos" in name for name in changed)
        model(images)
        assert_masses(report, [block.attn.seen for block in model.blocks])
    assert report.mass[0][0] > 0.9 > 0.2 > report.uniform == 1 / 35
    assert (report.blocks, report.heads, report.head_dim) == (3, HEADS, 22)
    assert (report.grid, report.prefix_tokens, report.images) == (GRID, 1, 11)
    assert "on 11 images: first block" in str(report)


@pytest.mark.parametrize(
    "name", ["impulse", "mimetic", "deep_impulse", "norm_matched", "lecun", "whitened"]
)
def test_with_a_base_a_vit_of_timm_and_ours_are_equal_to_the_bit(name):
    base, registers = ({}, 0) if name == "lecun" else (dict(base="lecun"), 2)
    model, mine = OtherViT("timm", registers=registers), ours(num_registers=registers)
    init_(model, name, generator=seeded(), **base)
    init_weights(mine, name, generator=seeded(), **base)
    theirs = model.state_dict()
    assert theirs.keys() == mine.state_dict().keys()
    assert all(torch.equal(value, mine.state_dict()[key]) for key, value in theirs.items())


def test_a_baseline_draws_every_weight_of_a_model_whatever_holds_it():
    """As nn.MultiheadAttention and nn.Embedding, and under its library's names."""
    for model in (
        OtherViT("siglip", registers=2),
        torchvision.models.VisionTransformer(28, 4, 2, HEADS, DIM, 31),
    ):
        for parameter in model.parameters():
            nn.init.normal_(parameter, generator=seeded(1))
        assert init_(model, "torch", generator=seeded()).kept == 0
        assert not next(value for name, value in model.named_parameters() if "cl" in name).any()


def test_a_heads_target_is_that_which_was_drawn_and_masses_are_shown_by_block_if_they_differ():
    masses = impulse_(OtherViT("timm"), generator=seeded(), offsets="random").mass
    assert min(map(min, masses)) > 0.5
    assert mimetic_(OtherViT("timm"), generator=seeded(), qk_init="base").mass == ()
    assert str(Mass([0.987, float("nan")], [0.054, 0.62], [1 / 64] * 2)) == (
        ".99 / .054 .62 (uniform .016) on the targets of centre / other heads"
    )


@pytest.mark.parametrize(
    "kind, sizes",
    [
        ("timm", dict(class_token=False)),
        ("timm", dict(registers=2, gamma=0.1)),
        ("transformers 4", dict(registers=3, no_embed_class=True)),
        ("transformers 5", dict(registers=2, no_embed_class="registers")),
    ],
)
def test_deep_impulse_reaches_the_mass_that_is_asked_for_in_every_block(kind, sizes):
    model, images = OtherViT(kind, **sizes), photographs(61)
    report = deep_impulse_(model, generator=seeded(), images=images, target_mass=(0.6, 0.1))
    for block, wanted in ((0, 0.6), (2, 0.1)):
        assert report.mass_on_images[block] == pytest.approx([wanted] * HEADS, rel=0.1)
    assert not [name for name in report.written if "fc1" in name or "head" in name]
    assert "on white noise" in str(deep_impulse_(model, generator=seeded()))
    seen = []
    foreign_layout_of(model).blocks[0].norm.register_forward_pre_hook(
        lambda _, given: seen.append(given[0])
    )
    model(images)
    constants = seen[0][..., 8:10] * torch.tensor([1.0, -1.0])  # of all tokens
    assert constants.min() > 0.1 and torch.allclose(constants, constants.flatten()[0])


@pytest.mark.parametrize(
    "kind, sizes",
    [
        ("timm", dict(rope="neighbours")),
        ("eva", dict(rope="halves", registers=2)),
        ("transformers 5", dict(rope="mixed", positions=False, gamma=0.1)),
        ("siglip", dict(rope="neighbours", class_token=False)),
    ],
)
def test_a_rotary_model_gets_the_mass_that_is_asked_for_in_every_block(kind, sizes):
    """eva has no bias of K, and transformers 5 none at all. A norm of so few channels subtracts a
    mean by which patches read a little of what mutes the prefix tokens: up to .05 of mass."""
    for init, asked, masses in (
        (impulse_, 0.7, [0.7] * 3),
        (deep_impulse_, (0.9, 0.6), [0.9, 0.75, 0.6]),
    ):
        model, images = OtherViT(kind, **sizes).eval(), photographs()
        report = init(model, generator=seeded(), images=images, base="default", target_mass=asked)
        model(images)
        maps = [block.attn.seen for block in model.blocks]
        assert_masses(report, maps)
        assert not any("k_bias" in name for name in report.written)
        for of_block, weights, mass in zip(report.mass_on_images, maps, masses):
            prefix = report.prefix_tokens  # whose attention is even, as nothing turns it
            assert of_block == pytest.approx([mass] * HEADS, abs=0.06 if prefix else 0.02)
            assert not prefix or (weights[:, :, :prefix] - 1 / weights.shape[-1]).abs().max() < 0.02
            assert not prefix or weights[..., prefix:, :prefix].max() < 0.01
    model = OtherViT(kind, **sizes)
    assert [words == "" for _, words in describe(model).fits] == [1, 0, 1]
    kept = impulse_(model, generator=seeded()).written
    assert not any(part in name for name in kept for part in ("norm2", "fc1", "v_bias"))
    if kind in ("timm", "eva"):  # values that are written have no bias
        with torch.no_grad():
            model.blocks[1].attn.proj.bias.fill_(0.3)
        impulse_(model, generator=seeded(), value_init="mimetic")
        assert (model.blocks[1].attn.proj.bias == 0).all()


@pytest.mark.parametrize("init", [impulse_, deep_impulse_])
def test_torchvisions_own_vit(init):
    """The reference is nn.MultiheadAttention, asked for its weights by hand."""
    model = torchvision.models.VisionTransformer(
        image_size=28, patch_size=4, num_layers=3, num_heads=HEADS, hidden_dim=DIM, mlp_dim=31
    ).eval()
    images, found = photographs(11, 28, 28), []
    report = init(model, generator=seeded(), images=images, base="lecun")
    for layer in model.encoder.layers:
        layer.ln_1.register_forward_hook(
            lambda _, given, y, layer=layer: found.append(
                layer.self_attention(y, y, y, average_attn_weights=False)[1]
            )
        )
    model(images)
    assert_masses(report, found)


def test_torchvisions_own_swin(monkeypatch):
    """The mass is that of torchvision's own softmax, and only the tables are written."""
    sizes = dict(
        patch_size=[2, 2], embed_dim=22, depths=[2, 2], num_heads=[2, 11], window_size=[3, 5]
    )
    model = torchvision.models.SwinTransformer(**sizes).eval()
    before, found, softmax = state_of(model), [], nn.functional.softmax
    report = impulse_(model, generator=seeded(), target_mass=0.7)
    assert report.written == tuple(name for name in before if name.endswith("bias_table"))
    assert "windows of 3×5 tokens" in str(report) and "the relative bias alone: " in str(report)
    mine = vitinit.build_model("swin_tiny", num_classes=7, image_size=(24, 40), **sizes)
    init_weights(mine, "impulse", generator=seeded(), target_mass=0.7)
    tables = [
        [block.bias_table for block in foreign_layout_of(each).blocks] for each in (model, mine)
    ]
    assert all(map(torch.equal, *tables))
    with torch.no_grad():
        for block in foreign_layout_of(
            model
        ).blocks:  # so that the logits are the bias and the mask
            block.q.zero_()
            block.q_bias.zero_()
    monkeypatch.setattr(
        nn.functional,
        "softmax",
        lambda *given, **named: (found.append(softmax(*given, **named)), found[-1])[1],
    )
    model(photographs(2, 24, 40))
    for weights, targets, masses in list(zip(found, report.targets, report.mass))[::2]:
        mass = target_mass(weights, list(targets), (3, 5))  # of blocks not shifted
        assert torch.allclose(mass, torch.tensor(masses), atol=1e-5)
        assert masses == pytest.approx([0.7] * len(targets))
    assert impulse_(model, generator=seeded(), images=photographs()).mass_on_images == ()
    with pytest.raises(
        ValueError,
        match="'deep_impulse' is for vit, rotary_vit, the .* not defined for the family swin",
    ):
        deep_impulse_(model, generator=seeded())
    assert dict(describe(model).fits)["impulse"] == ""
    report = init_(model, "whitened", generator=seeded(), images=photographs(2, 24, 40))
    assert report.written == ("features.0.0.weight",)


class Encoder(nn.Module):
    """A model of one's own: PyTorch's encoder on patches."""

    def __init__(self, norm_first: bool = True) -> None:
        super().__init__()
        self.patches, self.places = nn.Linear(48, DIM), nn.Parameter(torch.randn(35, DIM))
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(DIM, HEADS, 31, norm_first=norm_first, batch_first=True),
            3,
            enable_nested_tensor=False,
        )

    def forward(self, images: Tensor) -> Tensor:
        x = nn.functional.unfold(images, 4, stride=4).mT
        return self.encoder(self.patches(x) + self.places)


def described(model: Encoder) -> Layout:
    return Layout(
        model,
        tuple(block_of(layer.self_attn, layer.norm1) for layer in model.encoder.layers),
        pos_embed=model.places.detach(),
        grid=GRID,
        image_shape=(3, 20, 28),
    )


def test_a_model_of_ones_own_is_described_in_five_lines():
    model, mine = Encoder(), ours(pool="mean")
    report = impulse_(model, generator=seeded(), images=photographs(), layout=described)
    impulse_(mine, generator=seeded())
    init_(model, "norm_matched", generator=seeded(), layout=described)
    init_(mine, "norm_matched", generator=seeded())
    for block, other in zip(described(model).blocks, foreign_layout_of(mine).blocks):
        assert torch.equal(block.q, other.q) and torch.equal(block.proj, other.proj)
    assert report.prefix_tokens == 0 and report.mass_on_images[0][0] > 0.2
    with pytest.raises(ValueError, match="views of parameters of the model"):
        impulse_(Encoder(), generator=seeded(), layout=lambda copy: described(model))
    with pytest.raises(ValueError, match="attention is called before its norm: post-norm blocks"):
        impulse_(Encoder(norm_first=False), generator=seeded(), layout=described)


def test_half_frozen_and_tied_weights_are_told_of_and_wrapped_models_are_unwrapped():
    half, full = OtherViT("timm").bfloat16(), OtherViT("timm")
    half.pos_embed.requires_grad_(False), half.head.requires_grad_(False)  # which stays
    half.zz = half.blocks[1].attn.proj  # named after the blocks
    compiled = nn.Module()
    compiled._orig_mod = nn.DataParallel(half)
    report = impulse_(compiled, generator=seeded())
    for exact in (OtherViT("timm").double(), full):
        assert impulse_(exact, generator=seeded()).notes == ()
    assert all(torch.equal(theirs, mine.bfloat16()) for theirs, mine in zip(bits(half), bits(full)))
    assert str(report).splitlines()[-3:] == [
        "frozen, and written nevertheless: pos_embed",
        "tied to what was written: zz.weight, zz.bias",
        "rounded when written (the masses above are those before rounding): pos_embed, "
        + ", ".join(
            f"blocks.*.attn.{name}"
            for name in ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias")
        ),
    ]


def test_what_surrounds_the_call_and_buffers_that_forward_passes_make_change_nothing():
    for init in (impulse_, deep_impulse_):
        plain = OtherViT("timm")
        cast, wide = (copy.deepcopy(plain) for _ in range(2))
        init(plain, generator=seeded())
        with torch.autocast("cpu", torch.bfloat16):
            assert describe(cast).fits
            init(cast, generator=seeded())
        torch.set_default_dtype(torch.float64)
        try:
            init(wide, generator=seeded())
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(map(torch.equal, bits(plain), bits(cast)))
        assert all(
            torch.allclose(mine, other, atol=1e-4) for mine, other in zip(bits(plain), bits(wide))
        )
    model = OtherViT("timm")
    model.blocks[0].register_forward_pre_hook(
        lambda block, _: block.register_buffer("made", torch.full((2,), 7.0))
    )
    model.norm.register_buffer("mine", torch.tensor([2.0, 3.0]))
    impulse_(model, generator=seeded())
    assert model.norm.mine.tolist() == [2.0, 3.0]


def test_after_an_error_while_writing_nothing_has_changed(monkeypatch):
    """As when a GPU's memory runs out, or Ctrl-C comes, at the third tensor."""
    model, done, copy_ = OtherViT("timm"), [], Tensor.copy_
    before = state_of(model)

    def stopped(tensor: Tensor, other: Tensor) -> Tensor:
        done.append(tensor)
        if len(done) == 3:
            raise KeyboardInterrupt
        return copy_(tensor, other)

    work = OtherViT("timm")
    monkeypatch.setattr(Tensor, "copy_", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_back(model, work)
    assert len(done) > 3 and all(map(torch.equal, state_of(model).values(), before.values()))
    monkeypatch.undo()
    narrow = OtherViT("timm").half()
    before = state_of(narrow)
    with pytest.raises(ValueError, match="qkv.weight is float16, too narrow for what the init wr"):
        impulse_(narrow, generator=seeded(), qk_norm=1e9)
    assert all(map(torch.equal, state_of(narrow).values(), before.values()))


def fixed(model: nn.Module) -> None:
    positions = model.pos_embed.detach()
    del model.pos_embed
    model.register_buffer("pos_embed", positions)


def without_versions(*shape: int) -> Tensor:
    with torch.inference_mode():
        return torch.zeros(shape)


REFUSALS: dict[str, Callable] = {
    "the size of its images is not seen": lambda model: put(  # the last says no size of images
        model, "patch_embed.proj", nn.Sequential(nn.Conv2d(3, 5, 4, 4), nn.Conv2d(5, DIM, 1))
    ),
    "something else than softmax": lambda model: put(model, "blocks.2.attn.scale", 1.0),
    "does not say how many heads it has, by num_heads or": lambda model: delattr(
        model.blocks[0].attn, "num_heads"
    ),
    "no learned position embedding": lambda model: put(
        model, "other", model._parameters.pop("pos_embed")
    ),
    "no LayerNorm before its attention": lambda model: put(
        model, "blocks.1.norm1", nn.RMSNorm(DIM)
    ),
    "2 lists of blocks": lambda model: put(model, "more", OtherViT("timm", 2).blocks),
    "with kdim, vdim or add_bias_kv": lambda model: put(
        model, "blocks.1.attn", nn.MultiheadAttention(DIM, HEADS, add_bias_kv=True)
    ),
    "cannot be copied": lambda model: put(model, "computed", model.head.weight * 2.0),
    "head.weight is a Parameter of int8 on cpu; initialise before sharding or quant": lambda model: (
        put(
            model,
            "head.weight",
            nn.Parameter(torch.zeros(7, DIM, dtype=torch.int8), requires_grad=False),
        )
    ),
    "head.weight was made in torch.inference_mode": lambda model: put(
        model, "head.weight", nn.Parameter(without_versions(7, DIM), requires_grad=False)
    ),
    "head.weight is expanded": lambda model: put(
        model, "head.weight", nn.Parameter(torch.randn(1, DIM).expand(7, DIM))
    ),
    "head.weight is a Parameter of float32 on meta": lambda model: model.head.to("meta"),
    "fixed position": fixed,
    "views of parameters": lambda model: nn.utils.parametrizations.orthogonal(
        model.blocks[0].attn.proj
    ),
    "has a Sequential where nn.Linear": lambda model: put(
        model, "blocks.0.attn.qkv", nn.Sequential(model.blocks[0].attn.qkv)
    ),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_is_not_covered_is_one_line_and_nothing_has_changed(message):
    model = OtherViT("timm")
    REFUSALS[message](model)
    before = state_of(model)
    with pytest.raises(ValueError, match=message) as error:
        impulse_(model, generator=seeded())
    assert "\n" not in str(error.value)
    assert all(
        value.is_meta or torch.equal(value, before[key])
        for key, value in model.state_dict().items()
    )


def test_describe_is_a_dry_run_that_says_which_inits_fit_or_why_none():
    model = OtherViT("transformers 5", registers=2)
    before, found = state_of(model), describe(model)
    assert str(found).splitlines() == [
        "OtherViT: 3 blocks, 3 heads of 22, 5×7 tokens + 3",
        "  grid, order, positions and formula checked on white noise",
        "  impulse_: fits",
        "  mimetic_: fits",
        "  deep_impulse_: fits",
    ]
    for block in model.blocks:
        block.layernorm_after = nn.Identity()
    assert "finds no such" in dict(describe(model).fits)["deep_impulse"]
    fits = describe(ours(pos_embed="sincos", embed_dim=72)).fits
    assert [words == "" for _, words in fits] == [0, 1, 0]
    assert dict(fits)["deep_impulse"].endswith(" and a fixed position embedding")  # in full
    plain = Encoder()  # blocks by hand, of no image that is known
    bare = describe(
        plain,
        layout=lambda one: replace(
            described(one),
            image_shape=None,
            blocks=tuple(replace(block, attention=None) for block in described(one).blocks),
        ),
    )
    assert [words == "" for _, words in bare.fits] == [1, 1, 0]
    around = OtherViT("vit-pytorch")
    for block in around.blocks:  # as its PreNorm of earlier versions
        block.norm, block.attn.norm = block.attn.norm, nn.Identity()
    assert describe(around).fits == describe(OtherViT("timm")).fits
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    post_norm, none = OtherViT("timm", post_norm=True), nn.Sequential(nn.Linear(2, 3))
    assert "post-norm" in describe(post_norm).reason
    assert str(describe(none)).startswith("Sequential: not recognised: a Sequential has no list")


def test_heads_with_nearly_one_mass_are_told_of_together():
    report = impulse_(OtherViT("timm"), generator=seeded())
    lines = [
        str(replace(report, mass=masses)).splitlines()[3].partition(": ")[2]
        for masses in (
            ((0.999, 1.0), (0.997, 0.996)),
            ((0.98, 1.0), (0.99, 0.96)),
            ((1.0, 1.0), (0.5, 0.25), (0.1, 0.1), (0.01, 0.07)),
        )
    ]
    assert lines == [
        "all 4 heads 1.00 (uniform .029)",
        "all 4 heads .96 to 1.00 (uniform .029)",
        "first block all heads 1.00; middle block all heads .10; last block .01 .07 (uniform .029)",
    ]


def test_unknown_names_and_options_are_errors():
    model = OtherViT("timm")
    for init, given in (
        (impulse_, dict(images=photographs(2, 24, 28))),
        (impulse_, dict(images=photographs(0))),
        (deep_impulse_, dict(images=photographs(2, 24, 28))),
        (deep_impulse_, dict(target_mass=0.9)),
        (impulse_, dict(generator=Mock(device=torch.device("cuda")))),
    ):
        with pytest.raises(ValueError, match="images are|does not pass|_mass is 0|generator is o"):
            init(model, **dict(generator=seeded()) | given)
    with pytest.raises(
        ValueError, match="family OtherViT; expected .*init.init_ for a model of another library$"
    ):
        init_weights(model, "impulse", generator=seeded())
    with pytest.raises(
        TypeError,
        match="^init 'impulse' got an unexpected keyword argument "
        "'scale'; it has: base, kernel_size, .*, value_beta$",
    ):
        impulse_(model, generator=seeded(), scale=2)
