"""What a probe sees of other libraries' models: what is not as it seems is refused, or seen."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from other_models import (
    CLASSES,
    DIM,
    GRID,
    HEADS,
    OtherAttention,
    OtherViT,
    assert_masses,
    put,
    turning,
)
from small_models import seeded, state_of
from torch import Tensor, nn
from torchvision.models.swin_transformer import ShiftedWindowAttention, SwinTransformer

import vitinit
from vitinit.init import deep_impulse_, describe, impulse_, init_
from vitinit.interop.in_place.foreign_layouts import foreign_layout_of
from vitinit.interop.in_place.formula import turned_blocks
from vitinit.interop.in_place.probe import probe
from vitinit.mixing import target_mass

IMAGES = torch.randn(5, 3, 20, 28, generator=seeded(1))


# Attentions that compute something else --------------------------------------------------------
class Attention(OtherAttention):
    """One that has the attributes of timm's, and does something else with Q, K and logits."""

    def __init__(self, change: Callable) -> None:
        super().__init__("timm")
        self.change, self.gate = change, nn.Parameter(torch.zeros(HEADS, 1, 1))
        nn.init.zeros_(self.proj.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        packed = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = self.change(self, *packed, self.scale)  # (n, h, T, d)
        return self.proj(mixed.transpose(1, 2).flatten(2)), None


ATTENTIONS: dict[str, Callable] = {
    "the formula": lambda own, q, k, v, scale: (q @ k.mT * scale).softmax(-1) @ v,
    "another scale": lambda own, q, k, v, scale: (q @ k.mT * scale**2).softmax(-1) @ v,
    "keys that are not turned": lambda own, q, k, v, scale: (
        (turning("mixed", 0)(q) @ k.mT * scale).softmax(-1) @ v
    ),
    "norms of Q and K": lambda own, q, k, v, scale: (
        (nn.functional.normalize(q, dim=-1) @ nn.functional.normalize(k, dim=-1).mT).softmax(-1) @ v
    ),
    "the diagonal masked": lambda own, q, k, v, scale: (
        (q @ k.mT * scale).masked_fill(torch.eye(q.shape[2]).bool(), -torch.inf).softmax(-1) @ v
    ),
    "a gate that is 0": lambda own, q, k, v, scale: (
        (q @ k.mT * scale + own.gate * torch.arange(q.shape[2])).softmax(-1) @ v
    ),
    "dropout": lambda own, q, k, v, scale: (
        nn.functional.dropout((q @ k.mT * scale).softmax(-1), 0.1, training=True) @ v
    ),
    "talking heads": lambda own, q, k, v, scale: (q @ k.mT * scale).softmax(-1).roll(1, 1) @ v,
    "over channels": lambda own, q, k, v, scale: ((q.mT @ k * scale).softmax(-1) @ v.mT).mT,
    "heads in another order": lambda own, q, k, v, scale: (
        (
            torch.stack([q, k, v], 2).flatten(1, 2).unflatten(1, (3, HEADS))[:, 0] @ k.mT * scale
        ).softmax(-1)
        @ v
    ),
}


CAUSES = {
    "another scale": "its weights are another function of Q and K",
    "keys that are not turned": "its weights are another function of Q and K",
    "norms of Q and K": "twice the queries change nothing",
    "the diagonal masked": "without queries it does not average",
    "a gate that is 0": "without queries it does not average",
    "dropout": "it is random in evaluation mode, too",
    "talking heads": "its weights are another function of Q and K",
    "over channels": "without queries it does not average",
    "heads in another order": "without queries it does not average",
}


def with_attention(change: Callable) -> OtherViT:
    model = OtherViT("timm")
    for block in model.blocks:
        block.attn = Attention(change)
    return model


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_the_formula_is_compared_though_proj_is_0(kind):
    model = with_attention(ATTENTIONS[kind])
    before = state_of(model)
    if kind == "the formula":
        report = impulse_(model, generator=seeded(), value_init="base")
        assert report.mass[0][0] > 0.9 and not any("proj" in name for name in report.written)
        assert not model.blocks[0].attn.proj.weight.any()
        return
    with pytest.raises(ValueError, match="of 3 of 3 blocks computes something else than softmax"):
        impulse_(model, generator=seeded(), value_init="base")
    assert f"its norm's output: {CAUSES[kind]}" in describe(model, images=IMAGES).reason
    assert all(map(torch.equal, state_of(model).values(), before.values()))


@pytest.mark.parametrize(
    "cap", [lambda logits: logits.clamp(-20, 20), lambda logits: 200 * (logits / 200).tanh()]
)
def test_logits_that_are_capped_are_seen_once_they_are_written(cap):
    """They are small before. proj is 0 and stays, so that the model's own output shows nothing; of
    mimetic_, whose logits stay below ±20 here, nothing is capped."""
    model = with_attention(lambda own, q, k, v, scale: cap(q @ k.mT * scale).softmax(-1) @ v)
    before = state_of(model)
    for images in (None, IMAGES):
        with pytest.raises(ValueError, match="^once written, the attention of 3 of 3 blocks comp"):
            impulse_(model, generator=seeded(), images=images, value_init="base", qk_norm=60.0)
    assert all(map(torch.equal, state_of(model).values(), before.values()))
    model = with_attention(
        lambda own, q, k, v, scale: (q @ k.mT * scale).clamp(-20, 20).softmax(-1) @ v
    )
    fits = dict(describe(model).fits)
    assert "once written" in fits["impulse"] and fits["mimetic"] == fits["deep_impulse"] == ""


def test_the_cause_of_an_attention_that_has_its_norm_inside():
    """Its input is never the norm's output, which is no fault."""
    model = OtherViT("vit-pytorch")
    for block in model.blocks:
        block.attn.scale = 1.0
        block.attn.turn = lambda x: 1.5 * x
    assert "its weights are another function of Q and K" in describe(model, images=IMAGES).reason


class Half(OtherAttention):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_attention_in_half_precision_and_compiled_blocks_are_named():
    for rope in ("", "mixed"):
        model = OtherViT("timm", rope=rope)
        for block in model.blocks:
            block.attn.__class__ = Half
        assert describe(model).reason.startswith(
            "attention computes in bfloat16 within a model of float32, by a cast or an autocast"
        )
    model = OtherViT("timm")
    model.blocks[1] = torch.compile(model.blocks[1])
    assert describe(model).reason == (
        "blocks.1 is compiled; initialise the model before torch.compile"
    )


def test_an_attention_of_several_blocks_and_one_that_is_not_called():
    shared, idle, mixed = OtherViT("timm", 1), OtherViT("timm"), OtherViT("timm")
    shared.blocks.append(shared.blocks[0])
    idle.blocks[2].forward = lambda x: x
    mixed.blocks[2].post_norm = True
    assert "attention of 1 of 3 blocks computes" in describe(mixed).reason
    assert "it does not read the output of the norm before it" in describe(mixed).reason
    assert "OtherAttention, is called 2 times in a forward pass" in describe(shared).reason
    assert "is called 0 times in a forward pass, expected once" in describe(idle).reason


def test_a_norm_that_is_called_twice_and_blocks_of_fewer_tokens_are_refused():
    """Masses would be measured on other tokens than those that attention reads."""
    within, between, merged = OtherViT("timm"), OtherViT("timm"), OtherViT("timm")
    within.blocks[1].norm2 = within.blocks[1].norm1
    between.blocks[1].norm1 = between.blocks[0].norm1
    for model in (within, between):
        assert "the norm before it, LayerNorm, is called 2 times" in describe(model).reason
    merged.blocks[2].register_forward_pre_hook(lambda _, inputs: (inputs[0][:, 2:],))
    for images in (None, IMAGES):
        assert "a block has 34 tokens, and the first one 36: tokens are merged, left out or" in (
            describe(merged, images=images).reason
        )


def test_images_that_are_the_probes_own_noise_are_as_good_as_any():
    assert describe(OtherViT("timm"), images=torch.randn(2, 3, 20, 28, generator=seeded(0))).fits


class Gated(nn.Module):
    """A block of another kind."""

    def __init__(self, width: int = DIM) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(DIM), nn.Linear(DIM, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.norm(x)).tanh()


def test_a_stack_of_which_some_blocks_are_unknown_is_refused_and_a_classifier_below_it_is_not():
    for holder in (nn.ModuleList, nn.Sequential):
        model = OtherViT("timm")
        model.blocks = (
            holder([*model.blocks, Gated()])
            if holder is nn.ModuleList
            else holder(*model.blocks, Gated())
        )
        assert describe(model).reason == (
            "blocks.3, a Gated, has no attention of a layout known here, as others of its list have"
        )
    model = OtherViT("timm")
    model.blocks = nn.Sequential(*model.blocks, Gated(CLASSES))
    model.norm = model.head = nn.Identity()
    assert describe(model).fits


class Doubled(ShiftedWindowAttention):
    def get_relative_position_bias(self) -> Tensor:
        return 2.0 * super().get_relative_position_bias()


class Apart(ShiftedWindowAttention):
    """Its windows are of every other row and column."""

    def forward(self, x: Tensor) -> Tensor:
        order = [
            torch.cat([torch.arange(0, side, 2), torch.arange(1, side, 2)]) for side in x.shape[1:3]
        ]
        x = super().forward(x[:, order[0]][:, :, order[1]])
        return x[:, order[0].argsort()][:, :, order[1].argsort()]


def swin() -> SwinTransformer:
    """Images of 20×28 pixels are padded, with a shift in the first stage."""
    sizes = dict(embed_dim=22, depths=[2, 2], num_heads=[2, 11], window_size=[3, 5])
    return SwinTransformer(patch_size=[2, 2], **sizes)


@pytest.mark.parametrize("kind", [ShiftedWindowAttention, Doubled, Apart])
def test_a_swins_windows_and_bias_are_compared(kind):
    model = swin()
    model.features[1][1].attn.__class__ = kind
    for images in (None, IMAGES):
        reason = describe(model, images=images).reason
        assert (
            reason == ""
            if kind is ShiftedWindowAttention
            else ("the attention of 1 of 4 blocks computes something else" in reason)
        )


def test_a_last_stage_of_one_window_is_no_map():
    """As of images of 224 pixels: then there are as many windows as images."""
    sizes = dict(embed_dim=22, depths=[2, 2], num_heads=[2, 11], window_size=[3, 5], patch_size=2)
    model = vitinit.build_model("swin_tiny", num_classes=3, image_size=(12, 20), **sizes)
    assert dict(describe(model).fits)["impulse"] == ""


# Rotations --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind, rotation",
    [
        ("timm", "halves"),
        ("eva", "neighbours"),
        ("siglip", "mixed"),
        ("eager", "mixed"),
        ("by keywords", "mixed"),
    ],
)
def test_a_rotation_is_read_from_the_queries_as_they_meet_the_keys(kind, rotation):
    """eager: in a product that is scaled before, and not in scaled_dot_product_attention."""
    product = {
        "eager": torch.matmul,
        "by keywords": lambda q, k: torch.matmul(other=k, input=q),
    }.get(kind)
    model = OtherViT("timm" if product else kind, rope=rotation, registers=2)
    for block in model.blocks if product else []:
        block.attn = Attention(
            lambda own, q, k, v, scale, turn=block.attn.turn: (
                product(turn(scale * q), turn(k).mT).softmax(-1) @ v
            )
        )
    vit = probe(foreign_layout_of(model), IMAGES)
    for number, block in enumerate(vit.blocks):
        x = torch.randn(2, HEADS, 38, DIM // HEADS, generator=seeded())
        assert torch.allclose(block.rotation(x), turning(rotation, number)(x), atol=1e-4)
    assert ", positions, rotation and formula" in vit.checked and vit.prefix == 3


class Complex(Attention):
    """It turns by complex numbers in a buffer, as LLaMA's freqs_cis."""

    def __init__(self) -> None:
        super().__init__(self.turned)
        places = torch.cartesian_prod(*map(torch.arange, GRID)).float()
        angles = places @ torch.rand(2, DIM // HEADS // 2, generator=seeded())
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles))

    def turned(self, own: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k = (
            torch.view_as_real(
                torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * self.freqs_cis
            )
            .flatten(-2)
            .to(x)
            for x in (q, k)
        )
        return nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rotation_by_complex_numbers_is_read_and_they_stay(dtype):
    model = OtherViT("timm", class_token=False)
    for block in model.blocks:
        block.attn = Complex()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    before = state_of(model)
    report = impulse_(model, generator=seeded(), images=IMAGES.to(dtype))
    assert ", rotation and formula" in report.checked
    assert torch.equal(model.blocks[2].attn.freqs_cis, before["blocks.2.attn.freqs_cis"])


@pytest.mark.parametrize("frequencies", ["axial", "mixed"])
def test_the_rotation_of_our_own_models_is_as_it_is_read(frequencies):
    model = vitinit.build_model(
        "vit_tiny",
        num_classes=3,
        image_size=(20, 28),
        patch_size=4,
        embed_dim=60,
        depth=2,
        pos_embed="rope",
        num_registers=1,
        rope_frequencies=frequencies,
        rope_coordinates="centred",
    )
    known = probe(foreign_layout_of(model), IMAGES)
    plain = [replace(block, rotation=None) for block in known.blocks]
    for block, other in zip(known.blocks, turned_blocks(replace(known, blocks=plain), IMAGES)):
        omega, read = (each.rotation.frequencies(GRID) for each in (block, other))
        assert torch.allclose(omega, read, atol=1e-5) and omega.abs().max() > 0.5


def test_what_is_refused_of_rotary_models_and_the_grid_that_need_not_be_as_stated():
    model, still = OtherViT("timm", rope="mixed"), OtherViT("timm", positions=False)
    model.blocks[1].attn.turn = lambda x: turning("mixed", 1)(x.flip(2)).flip(2)
    assert "frequencies are not one for the rows" in dict(describe(model).fits)["impulse"]
    assert "position embedding, and turns no queries" in describe(still).reason
    model.blocks[1].attn.turn = lambda x: x
    assert "2 of 3 blocks turn their queries" in describe(model).reason
    shared, larger = OtherViT("eva", rope="mixed"), OtherViT("eva", rope="mixed", positions=False)
    for block in shared.blocks:  # as if MLPs read what attention reads
        block.norm2 = nn.Identity()
    assert "a LayerNorm before it, and finds no such" in describe(shared).reason
    larger.patch_embed.grid_size = (9, 11)
    assert describe(larger, images=IMAGES).grid == GRID


# Which token is which patch --------------------------------------------------------------------
class Plain(nn.Module):
    """vit-pytorch's kind of ViT: no attribute says the size of images or the grid."""

    def __init__(self, lie: str = "") -> None:
        super().__init__()
        self.inside, self.lie = OtherViT("vit-pytorch", class_token=False), lie
        self.patches = nn.Linear(48, DIM)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(36, DIM))
        self.cls_token = nn.Parameter(torch.randn(1, DIM))
        self.places, self.blocks = torch.randperm(35, generator=seeded()), self.inside.blocks
        del self.inside

    def forward(self, images: Tensor) -> Tensor:
        x = nn.functional.unfold(images, 4, stride=4).mT  # (n, N, 48), row by row
        if self.lie == "in the order of rows":
            x = x.unflatten(1, (images.shape[2] // 4, -1)).transpose(1, 2).flatten(1, 2)
        x, first = self.patches(x), self.cls_token.expand(len(x), 1, DIM)
        places = self.pos_embed
        if self.lie == "row by row and as they are":
            places = torch.cat([places[:1], places[1:][self.places]])
        elif self.lie == "before the first block":
            places = 0.5 * places
        last = self.lie == "follow those of the patches"
        x = torch.cat([x, first] if last else [first, x], 1) + places
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


def test_as_many_as_32_tokens_may_come_before_those_of_the_patches():
    """More are rather patches of a grid that is smaller than the one that is meant."""
    assert describe(OtherViT("timm", 1, registers=31)).prefix_tokens == 32
    assert "no grid of patches is seen" in describe(OtherViT("timm", 1, registers=32)).reason


@pytest.mark.parametrize("size", [(20, 28), (28, 20)])
def test_images_show_the_grid_that_no_attribute_states(size):
    model, images = Plain().eval(), torch.randn(3, 3, *size, generator=seeded(1))
    assert "the size of its images is not seen in the model; give images=" in describe(model).reason
    convolution = OtherViT("timm")  # its size is in a configuration, as DINOv3's
    del convolution.patch_embed.grid_size
    convolution.config = SimpleNamespace(image_size=(20, 28))
    assert describe(convolution).grid == GRID
    assert describe(model, images=images).grid == (size[0] // 4, size[1] // 4)
    report = impulse_(model, generator=seeded(), images=images)
    model(images)
    assert_masses(report, [block.attn.seen for block in model.blocks])
    assert str(report).splitlines()[1] == "grid, order, positions and formula checked on 2 images"


@pytest.mark.parametrize(
    "lie",
    [
        "in the order of rows",
        "follow those of the patches",
        "row by row and as they are",
        "before the first block",
    ],
)
def test_tokens_and_positions_in_another_order_are_refused(lie):
    assert lie in describe(Plain(lie), images=IMAGES).reason


ANOTHER_ORDER = "tokens are in another order in some blocks than in the first"
ORDERS: dict[str, Callable] = {
    "rolled": lambda x: torch.cat([x[:, :1], x[:, 1:].roll(1, 1)], 1),
    "rolled with the class token": lambda x: x.roll(1, 1),
    "permuted": lambda x: x[:, torch.randperm(36, generator=seeded())],
    "transposed": lambda x: torch.cat(
        [x[:, :1], x[:, 1:].unflatten(1, GRID).transpose(1, 2).flatten(1, 2)], 1
    ),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_the_order_of_tokens_is_followed_from_block_to_block(kind):
    model = OtherViT("timm")
    model.blocks[1].register_forward_pre_hook(lambda _, inputs: (ORDERS[kind](inputs[0]),))
    assert ANOTHER_ORDER in describe(model, images=IMAGES).reason


def test_tokens_that_are_smoothed_between_blocks_and_copied_before_norms_keep_their_order():
    """Attention that writes a lot does not hide whose token is whose."""
    model = OtherViT("timm")
    for block in model.blocks:
        block.norm1.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(),))
        block.attn.proj.weight.data *= 1e3
    model.blocks[1].register_forward_pre_hook(
        lambda _, inputs: (
            nn.functional.avg_pool1d(inputs[0].mT, 3, 1, 1, count_include_pad=False).mT,
        )
    )
    assert describe(model, images=IMAGES).reason == ""


def test_the_order_of_a_swins_tokens_is_followed_within_a_stage():
    model = swin()
    model.features[3][1].register_forward_pre_hook(lambda _, inputs: (inputs[0].roll(1, 2),))
    assert ANOTHER_ORDER in describe(model, images=IMAGES).reason


def test_tokens_that_come_behind_the_patches_later_are_seen():
    model = OtherViT("timm")
    model.blocks[1].register_forward_pre_hook(
        lambda _, inputs: (torch.cat([inputs[0], inputs[0][:, :2]], 1),)
    )
    assert "a block has 38 tokens, and the first one 36: tokens are" in describe(model).reason


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = OtherViT("timm")

    def forward(self, images: Tensor) -> Tensor:
        return self.inside(torch.cat([images, images.flip(-1)]))


class Map(OtherViT):
    """Its tokens are a map, (n, H, W, D), as in SAM's encoder."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed.proj(images).movedim(1, -1) + self.pos_embed.unflatten(1, GRID)
        for block in self.blocks:
            y = block.norm1(x).flatten(1, 2)
            x = x + block.attn(y)[0].unflatten(1, GRID)
        return self.head(x.mean((1, 2)))


def test_several_views_of_an_image_and_maps_of_tokens_are_named():
    assert describe(Twice()).reason.startswith(
        "the first block reads 4×36×66 of 2 images: several crops or views of each"
    )
    assert describe(Map("timm", class_token=False)).reason.startswith(
        "the first block reads a map of tokens, 2×5×7×66, as in SAM's encoder"
    )


def test_a_stem_of_several_convolutions_is_seen_by_what_moves_with_the_patches():
    model = OtherViT("timm")
    model.patch_embed.proj = nn.Sequential(
        nn.Conv2d(3, 17, 3, 2, 1), nn.ReLU(), nn.Conv2d(17, DIM, 3, 2, 1)
    )
    assert describe(model, images=IMAGES).grid == GRID
    model.patch_embed.proj.append(nn.Conv2d(DIM, DIM, (1, 13), padding=(0, 6), groups=DIM))
    with torch.no_grad():
        model.patch_embed.proj[-1].weight.copy_(torch.eye(13)[9])  # to the left
    assert "no grid of patches is seen" in describe(model, images=IMAGES).reason


# Recognition ------------------------------------------------------------------------------------
def test_a_stack_that_is_known_in_part_is_refused():
    model = OtherViT("timm")
    put(model.blocks[1].attn, "key_value", model.blocks[1].attn.qkv)
    del model.blocks[1].attn.qkv
    assert describe(model).reason == (
        "blocks.1, a OtherBlock, has no attention of a layout known "
        "here, as others of its list have"
    )
    narrow = OtherViT("timm")
    narrow.blocks[0].attn.qkv = nn.Linear(DIM, 2 * DIM)  # keys and values
    assert "132 rows of Q, K and V for 3 heads of 66 channels" in describe(narrow).reason
    adapted = OtherViT("timm")
    adapted.blocks[0].attn.proj = type("Linear", (nn.Module,), {"__module__": "peft.tuners"})()
    assert "has a Linear of peft where nn.Linear is expected" in describe(adapted).reason
    assert (
        "a OtherViT is of no layout known here: KeyError: 'no such'"
        == describe(narrow, layout=lambda model: {}["no such"]).reason
    )


def test_frozen_sines_and_cosines_stay_and_other_frozen_positions_do_not():
    model = OtherViT("timm", class_token=False)
    angles = torch.rand(35, DIM // 2, generator=seeded())
    model.pos_embed.data[0] = torch.cat([angles.sin(), angles.cos()], 1)
    assert dict(describe(model).fits)["impulse"] == ""
    model.pos_embed.requires_grad_(False)
    fits = dict(describe(model).fits)
    assert "fixed position embedding" in fits["impulse"] and fits["mimetic"] == ""
    assert "fixed position embedding" in fits["deep_impulse"]


class Clip(nn.Module):
    """The names of CLIP's image towers, a norm before PyTorch's own blocks, the sequence first."""

    def __init__(self, ln_pre: bool = True, batch_first: bool = False, back: bool = False) -> None:
        super().__init__()
        self.batch_first, self.back = batch_first, back
        self.conv1, self.image_size = nn.Conv2d(3, DIM, 4, 4, bias=False), (20, 28)
        self.class_embedding = nn.Parameter(torch.randn(DIM))
        self.positional_embedding = nn.Parameter(torch.randn(36, DIM))
        self.ln_pre = nn.LayerNorm(DIM) if ln_pre else nn.Identity()
        self.transformer = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(DIM, HEADS, 31, norm_first=True, batch_first=batch_first),
            2,
            enable_nested_tensor=False,
        )
        self.norm = nn.LayerNorm(DIM)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv1(images).flatten(2).mT
        x = torch.cat([self.class_embedding.expand(len(x), 1, DIM), x], 1)
        x = self.ln_pre(x + self.positional_embedding)  # (n, T, D)
        if not self.batch_first:
            x = x.transpose(0, 1)
        x = self.transformer(x)
        if self.back:  # (n, T, D) before the last norm
            x = x.transpose(0, 1)
        return self.norm(x).mean(int(self.batch_first or self.back))


def test_clips_names_its_norm_before_the_blocks_and_the_sequence_first():
    model, maps = Clip().eval(), []
    with torch.no_grad():
        model.ln_pre.weight.copy_(2.0 * torch.rand(DIM, generator=seeded()))
    report = impulse_(model, generator=seeded(), images=IMAGES)
    for layer in model.transformer.layers:
        layer.norm1.register_forward_hook(
            lambda _, given, y, layer=layer: maps.append(
                layer.self_attn(y, y, y, average_attn_weights=False)[1]
            )
        )
    model(IMAGES)
    assert_masses(report, maps)
    with torch.no_grad():  # positions alone go through that norm, too
        first, block = (
            model.ln_pre(model.positional_embedding[1:]),
            foreign_layout_of(model).blocks[0],
        )
        weights = block.mixing_weights(block.norm(first[None]))[0]
    mass = target_mass(weights, list(report.targets[0]), GRID)
    assert torch.allclose(mass, torch.tensor(report.mass[0]), atol=1e-5)
    assert "before block 0 something did" in dict(describe(model).fits)["deep_impulse"]


def test_deep_impulse_writes_the_same_whichever_dimension_is_first():
    models = [
        Clip(ln_pre=False),
        Clip(ln_pre=False, batch_first=True),
        Clip(ln_pre=False, back=True),
    ]
    for model in models:
        deep_impulse_(model, generator=seeded(), images=IMAGES, base="lecun")
    for weight, *others in zip(*(model.parameters() for model in models)):
        assert all(torch.allclose(weight, other, atol=1e-5) for other in others)


class LightningModule(nn.Module):
    """As in Lightning, calling it raises an error unless a subclass has a forward."""

    def forward(self, *given: Tensor) -> Tensor:
        return super().forward(*given)


def test_the_one_model_of_a_lightning_module():
    module = LightningModule()
    module.loss, module.model = nn.CrossEntropyLoss(), OtherViT("timm")
    assert describe(module).model == "OtherViT"
    assert "attn.qkv.weight" in impulse_(module, generator=seeded()).written[1]


# What a probe leaves behind ---------------------------------------------------------------------
class Counting(OtherViT):
    def __init__(self) -> None:
        super().__init__("timm")
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("kept", None)
        self.register_buffer("unset", torch.full((2,), torch.nan))

    def forward(self, images: Tensor) -> Tensor:
        self.calls += torch.rand(()) + 1.0
        self.kept = images
        return super().forward(images)


@pytest.mark.parametrize("name", ["impulse", "deep_impulse"])
def test_buffers_modes_and_the_global_generator_are_as_before(name):
    model = Counting()
    model.blocks[1].eval()
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    describe(model)
    report = init_(model, name, generator=seeded(), images=IMAGES)
    assert not {"calls", "unset"} & {*report.written} and model.calls == 0 and model.kept is None
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
