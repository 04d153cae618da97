"""Deep impulse initialisation: a convolution in every block, by a code that no layer overwrites."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitinit
from vitinit.data.shapes import draw_image
from vitinit.filters import ordered_offsets, shift_targets
from vitinit.init.code_plan import slowest_waves
from vitinit.init.deep_impulse import masses_by_block
from vitinit.init.fourier_code import wave_code, waves
from vitinit.init.mimetic import noisy_identity
from vitinit.init.stream_scales import PIXELS, mlp_mean_square, stream_scales
from vitinit.mixing import mean_kernel, mixing_matrices, target_mass
from vitinit.models.attention import attention_weights

# 5×7 tokens, which have 17 waves; a third of the width has room for eight and the bias channels.
SIZES = dict(image_size=(20, 28), patch_size=4, embed_dim=57, depth=5, num_heads=3)
RESERVED = 19               # a third of 57
# What tests of this file have where they give nothing else: near exact, on the ViT's own base, and with
# bias channels. The softer defaults of the init have a section of their own.
NEAR_EXACT = dict(base="default", target_mass=0.9, code_channels=1 / 3, bias_channels=True)
KINDS = {"class token": {}, "mean pool": dict(pool="mean"), "distilled": dict(distilled=True)}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def built(**sizes) -> nn.Module:
    return vitinit.build_model("vit_tiny", num_classes=7, **SIZES | sizes).double().eval()


def initialised(name: str = "deep_impulse", seed: int = 0, model: nn.Module | None = None,
                sizes: dict | None = None, **options) -> nn.Module:
    model = built(**sizes or {}) if model is None else model
    if name == "deep_impulse":
        options = NEAR_EXACT | options
    vitinit.init_weights(model, name, generator=torch.Generator().manual_seed(seed), **options)
    return model


def images_for(model: nn.Module, count: int = 3, mean_square: float = 1.0) -> Tensor:
    shape = [size * patch for size, patch in zip(model.grid, model.patch_embed.proj.kernel_size)]
    return mean_square**0.5 * torch.randn(count, 3, *shape, dtype=torch.float64,
                                          generator=torch.Generator().manual_seed(1))


def rotating(model: nn.Module, block: int, cells: int = 9) -> list[tuple[int, int]]:
    """The offsets of the heads of a block: number l · heads + h, modulo the number of offsets."""
    heads, offsets = model.blocks[0].attn.num_heads, ordered_offsets(math.isqrt(cells))
    return [offsets[(block * heads + head) % cells] for head in range(heads)]


def circular_shift(offset: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """(N, N): row n is one at n + offset, wrapping around the borders."""
    tokens = torch.eye(grid[0] * grid[1], dtype=torch.float64).view(*grid, -1)
    return tokens.roll((-offset[0], -offset[1]), dims=(0, 1)).flatten(0, 1)


def code_attention(model: nn.Module, block: int, reserved: int = RESERVED,
                   code_rms: float = 0.36, reserve: bool = True) -> Tensor:
    """(h, N, N): attention on the code alone, divided by the expected scale of LayerNorm."""
    scale = stream_scales(model, reserved if reserve else 0, code_rms)[block]
    code = model.pos_embed[0, model.num_prefix_tokens:, :reserved] / math.sqrt(scale)
    attention = model.blocks[block].attn
    return attention_weights(code @ attention.q_weight[..., :reserved].mT,
                             code @ attention.k_weight[..., :reserved].mT).detach()


@pytest.fixture(scope="module")
def images() -> Tensor:
    """Seven of the embedded data set, smooth as photographs are: (7, 3, 32, 32)."""
    rng = np.random.default_rng(0)
    drawn = np.stack([draw_image(rng)[0] for _ in range(7)])
    return (torch.from_numpy(drawn).double() / 255.0 - 0.5) / 0.25


# ---------------------------------------------------------------------------------------------
# A convolution in every block
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["default"])
def test_every_block_has_the_mass_on_images_where_impulse_fades(images, base):
    """The defining property. Measured: .97 to .99, and for `impulse` .45 falling to .18–.2."""
    sizes = dict(image_size=32, patch_size=4, embed_dim=96, depth=6, num_heads=3)
    deep, plain = (initialised(name, base=base, sizes=sizes)
                   for name in ("deep_impulse", "impulse"))
    found = torch.stack([target_mass(matrices, rotating(deep, block), deep.grid)
                         for block, matrices in mixing_matrices(deep, images).items()])
    assert found.min() > 0.95                        # of all heads and blocks
    faded = torch.stack([target_mass(matrices, ordered_offsets(3)[:3], plain.grid).mean()
                         for matrices in mixing_matrices(plain, images).values()])
    assert (faded.diff() < 0).sum() >= 4 and faded[0] < 0.5 and faded[-1] < 0.25


@pytest.mark.parametrize("dim, heads, base, kind", [
    (37, 1, "default", {}), (58, 2, "torch", dict(pool="mean")), (85, 5, "torch", dict(distilled=True))])
def test_even_noise_for_images_leaves_every_head_its_target(dim, heads, base, kind):
    """White noise is harder than images, as neighbours have nothing in common. Measured: ≥ .83."""
    model = initialised(base=base, sizes=dict(embed_dim=dim, num_heads=heads, depth=3) | kind)
    for block, matrices in mixing_matrices(model, images_for(model)).items():
        assert target_mass(matrices, rotating(model, block), model.grid).min() > 0.82


def test_of_a_pair_of_masses_the_odds_fall_by_the_same_factor_from_block_to_block():
    """Of the attention's odds: 4, 2, 1, 1/2, 1/4 to 1 from the first of five blocks to the last."""
    model = initialised(target_mass=(0.8, 0.2))
    for block, odds in enumerate((4.0, 2.0, 1.0, 0.5, 0.25)):
        weights = code_attention(model, block)
        for head, offset in enumerate(rotating(model, block)):
            masses = (weights[head] * circular_shift(offset, model.grid)).sum(1)
            expected = torch.full_like(masses, odds / (1.0 + odds))
            torch.testing.assert_close(masses, expected, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------
# The defaults: a soft start that fades with depth, on every grid
# ---------------------------------------------------------------------------------------------


DEFAULTS = dict(base="lecun", target_mass=(0.3, 0.02), code_channels=1 / 12, bias_channels=False)


def weights_of(sizes: dict, **options) -> dict[str, Tensor]:
    """The weights of a model that was initialised with these options alone, others at their defaults."""
    model = built(**sizes)
    vitinit.init_weights(model, "deep_impulse", generator=torch.Generator().manual_seed(0), **options)
    return model.state_dict()


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, second[key]) for key, value in first.items())


@pytest.mark.parametrize("tokens", [3, 62])
def test_an_end_of_a_pair_too_near_to_uniform_attention_is_raised_to_five_quarters_of_it(tokens):
    least = 1.25 * (1 / tokens)
    for low in (1e-300, 0.9 / tokens, 1.1 / tokens):
        for ends in ((0.7, low), (low, 0.7), (low, low)):
            masses = masses_by_block(ends, 5, 1 / tokens)
            raised = [max(end, least) for end in ends]
            assert masses == masses_by_block(raised, 5, 1 / tokens)
            assert (masses[0], masses[-1]) == pytest.approx(raised, rel=1e-12)
    assert masses_by_block((0.3, 0.02), 5, 1 / tokens)[-1] == pytest.approx(least, rel=1e-12)
    assert masses_by_block(0.02, 5, 1 / tokens) == [0.02] * 5            # a single number is not


@pytest.mark.parametrize("grid", [(1, 3), (7, 8), (9, 7)])
def test_by_default_every_head_has_its_mass_and_gradients_on_small_grids_too(grid):
    sizes = dict(image_size=tuple(4 * side for side in grid), depth=3)
    tokens = math.prod(grid)
    model = initialised(sizes=sizes, **DEFAULTS, kernel_size=1)
    assert equal(model.state_dict(), weights_of(sizes, kernel_size=1))   # these are the defaults
    count = int((model.patch_embed.proj.weight == 0).all((1, 2, 3)).sum())           # D_p
    for block, wanted in ((0, max(0.3, 1.25 / tokens)), (2, max(0.02, 1.25 / tokens))):
        weights = code_attention(model, block, count)
        own = weights.diagonal(dim1=1, dim2=2)       # the centre is the target of every head
        torch.testing.assert_close(own, torch.full_like(own, wanted), rtol=0, atol=1e-5)
    model(images_for(model)).square().sum().backward()
    for block in model.blocks[:2]:                   # of the last block only the class token is read
        for rows in block.attn.qkv.weight.grad[:114].view(2, 3, 19, 57):
            assert (rows[:, :2, :count] != 0).all()


# ---------------------------------------------------------------------------------------------
# Channels of their own
# ---------------------------------------------------------------------------------------------


@torch.no_grad()
def streams(model: nn.Module) -> list[Tensor]:
    """The residual stream after the embedding and after every block, (B, N, C)."""
    x = model.embed(images_for(model))
    found = [x]
    for block in model.blocks:
        x = block(x)
        found.append(x)
    return found


@pytest.mark.parametrize("value_init, base, kind", [
    ("mimetic", "torch", dict(distilled=True)), ("base", "default", dict(pool="mean"))])
def test_nothing_writes_to_the_codes_channels_at_any_depth(value_init, base, kind):
    model = initialised(base=base, value_init=value_init, sizes=kind)
    code = model.pos_embed[..., :RESERVED].detach()
    assert (code[:, model.num_prefix_tokens:].square().mean(-1) > 0.1).all()
    for x in streams(model):
        assert torch.equal(x[..., :RESERVED], code.expand(len(x), -1, -1))
        assert x[..., RESERVED:].std() > 0.1         # while the others have content


@pytest.mark.parametrize("kind", [{}])
@torch.no_grad()
def test_mlps_read_the_code_unless_told_not_to(kind):
    """Changing the code's channels changes the output of the MLPs or not. The columns are all that
    differs outside Q and K.
    """
    reading, not_reading = (initialised(mlp_reads_code=reads, sizes=kind) for reads in (True, False))
    z = torch.randn(2, 5, 57, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    other = z.clone()
    other[..., :RESERVED] += 1.0
    for block in not_reading.blocks:
        assert torch.equal(block.mlp(z), block.mlp(other))
    found = not_reading.state_dict()
    for key, value in reading.state_dict().items():
        if key.endswith("mlp.fc1.weight"):
            assert (value[:, :RESERVED] != 0).all()
            value[:, :RESERVED] = 0.0
        if not key.endswith("qkv.weight"):           # scaled by what the MLPs add to the stream
            assert torch.equal(found[key], value), key


@each_kind
def test_the_code_is_that_of_the_slowest_waves_and_has_the_rms_that_was_asked_for(kind):
    model = initialised(code_rms=0.7, period=1.5, sizes=kind)
    code, prefix = model.pos_embed[0, :, :RESERVED].detach(), model.num_prefix_tokens
    amplitude = 0.7 * math.sqrt(57 / 9)      # 8 waves and the first bias channel: squares of 1 each
    expected = wave_code(waves((5, 7), 1.5)[:8], (5, 7))
    torch.testing.assert_close(code[prefix:, :16], amplitude * expected, rtol=1e-6, atol=1e-7)
    for tokens, biases in ((code[:prefix], [0, 0, 1]), (code[prefix:], [1, 0, 0])):
        torch.testing.assert_close(tokens[:, 16:], amplitude * tokens.new_tensor([biases]).expand(
            len(tokens), -1), rtol=1e-6, atol=0)
    assert not code[:prefix, :16].any()
    assert (code[prefix:].square().sum() / (35 * 57)).sqrt().item() == pytest.approx(0.7)


@pytest.mark.parametrize("grid, bias_channels", [((3, 1), True), ((2, 19), False), ((13, 13), True)])
def test_however_small_its_share_the_code_tells_all_tokens_apart(grid, bias_channels):
    """With as few waves as that takes: without the last, two tokens have the same code."""
    model = built(image_size=tuple(4 * side for side in grid))
    frequencies = slowest_waves(model, 1e-9, 1.0, bias_channels)
    for count, apart in ((len(frequencies), True), (len(frequencies) - 1, False)):
        code = wave_code(frequencies[:count], grid)                      # (N, 2K)
        gaps = torch.cdist(code, code) + 9.0 * torch.eye(len(code), dtype=torch.float64)
        assert (gaps.min() > 1e-3) == apart


# ---------------------------------------------------------------------------------------------
# What is written
# ---------------------------------------------------------------------------------------------


def as_the_table_has_it(base: dict[str, Tensor], found: dict[str, Tensor], *, reserve: bool,
                        mimetic: bool) -> dict[str, Tensor]:
    """The base's tensors with the zeros and the init's own values of the docstring's table."""
    expected = {key: value.clone() for key, value in base.items()}
    for key, value in expected.items():
        if key == "pos_embed":
            value[..., :RESERVED] = found[key][..., :RESERVED]
        if key.endswith("attn.qkv.weight"):
            value[:114] = 0.0
            value[:114, :RESERVED] = found[key][:114, :RESERVED]
            if mimetic:
                value[114:] = found[key][114:]
            if reserve:
                value[114:, :RESERVED] = 0.0
        if key.endswith("attn.qkv.bias"):
            value[:114] = 0.0
        if key.endswith("attn.proj.weight") and mimetic:
            value.copy_(found[key])
        if reserve and key.endswith(("patch_embed.proj.weight", "patch_embed.proj.bias",
                                     "attn.proj.weight", "attn.proj.bias",
                                     "mlp.fc2.weight", "mlp.fc2.bias")):
            value[:RESERVED] = 0.0
        if reserve and key in ("cls_token", "dist_token"):
            value[..., :RESERVED] = 0.0
    return expected


@pytest.mark.parametrize("reserve, value_init, base, kind", [
    (True, "mimetic", "torch", {}), (True, "base", "default", dict(distilled=True)),
    (False, "mimetic", "default", dict(pool="mean"))])
def test_the_tables_tensors_are_all_that_is_written(reserve, value_init, base, kind):
    """To the bit, part by part; and what the init writes itself differs from the base's draw."""
    reference = initialised(base, sizes=kind).state_dict()
    model = initialised(base=base, reserve=reserve, bias_channels=reserve, value_init=value_init,
                        sizes=kind)
    found = model.state_dict()
    expected = as_the_table_has_it(reference, found, reserve=reserve,
                                   mimetic=value_init == "mimetic")
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key
    for block in range(5):
        weight, drawn = (state[f"blocks.{block}.attn.qkv.weight"] for state in (found, reference))
        assert not torch.equal(weight[:57], drawn[:57]) and not torch.equal(weight[57:114],
                                                                            drawn[57:114])
        values = torch.equal(weight[114:, RESERVED:], drawn[114:, RESERVED:])
        weight, drawn = (state[f"blocks.{block}.attn.proj.weight"] for state in (found, reference))
        projections = torch.equal(weight[RESERVED:], drawn[RESERVED:])
        assert values == projections == (value_init == "base")


@pytest.mark.parametrize("reserve, reserved", [(True, RESERVED), (False, 0)])
def test_values_multiply_to_the_noisy_identity_and_are_assigned_by_a_permutation(reserve, reserved):
    """x @ V.T @ proj.T = x @ (αZ − βI) on the other channels: Z, then the permutation."""
    model = initialised(seed=3, reserve=reserve, bias_channels=reserve, value_alpha=0.3,
                        value_beta=0.7)
    generator = torch.Generator().manual_seed(3)
    vitinit.init_weights(built(), "default", generator=generator)        # the base's draws
    for block in model.blocks:
        value = block.attn.v_weight.flatten(0, 1).detach()
        projection = block.attn.proj.weight.detach()
        product = torch.zeros(57, 57, dtype=torch.float64)
        drawn = noisy_identity(57 - reserved, 0.3, -0.7, projection, generator)
        product[reserved:, reserved:] = drawn
        torch.testing.assert_close((projection @ value).T, product, rtol=0, atol=1e-8)
        inner = torch.randperm(57, generator=generator)[:57 - reserved]
        # Both factors carry the root of the singular values, in decreasing order along `inner`.
        singular = torch.linalg.svdvals(drawn)
        for energy in (value.square().sum(1), projection.square().sum(0)):
            torch.testing.assert_close(energy[inner], singular, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------


def strongest_offsets(weights: Tensor, kernel_size: int = 3) -> list[tuple[int, int]]:
    """For each head, the offset that has most of the attention, on 5×7 tokens."""
    radius = kernel_size // 2
    peaks = mean_kernel(weights, (5, 7), radius).flatten(1).argmax(1).tolist()
    return [(peak // kernel_size - radius, peak % kernel_size - radius) for peak in peaks]


def test_rotating_offsets_cover_the_kernel_over_depth():
    model = initialised()
    found = [strongest_offsets(code_attention(model, block)) for block in range(5)]
    assert found == [rotating(model, block) for block in range(5)]
    assert set(sum(found[:3], [])) == set(ordered_offsets(3))            # of three blocks


def test_random_offsets_are_drawn_for_each_block_after_its_values():
    model, generator = initialised(seed=3, offsets="random"), torch.Generator().manual_seed(3)
    vitinit.init_weights(built(), "default", generator=generator)
    for block in range(5):
        noisy_identity(57 - RESERVED, 0.4, -0.4, torch.empty(0).double(), generator)
        torch.randperm(57, generator=generator)
        drawn = torch.randint(9, (3,), generator=generator).tolist()
        assert strongest_offsets(code_attention(model, block)) == [
            ordered_offsets(3)[index] for index in drawn]


@pytest.mark.parametrize("code_rms", [0.7])
def test_a_random_code_is_normal_with_a_mean_square_of_a_half_and_has_the_mass_on_average(code_rms):
    model = initialised(seed=3, code="random", code_rms=code_rms, sizes=dict(embed_dim=111))
    generator = torch.Generator().manual_seed(3)
    vitinit.init_weights(built(embed_dim=111), "default", generator=generator)
    drawn = torch.empty(35, 34, dtype=torch.float64).normal_(generator=generator) / 2**0.5
    amplitude = code_rms * math.sqrt(111 / (drawn.square().sum(1).mean().item() + 1))
    torch.testing.assert_close(model.pos_embed[0, 1:, :34].detach(), amplitude * drawn,
                               rtol=1e-6, atol=1e-7)
    assert drawn.square().mean().item() == pytest.approx(0.5, rel=0.05)
    for block in range(5):
        weights = code_attention(model, block, 37, code_rms)
        mass = target_mass(weights, rotating(model, block), (5, 7))
        torch.testing.assert_close(mass, torch.full_like(mass, 0.9), rtol=0, atol=1e-3)


def used_waves(model: nn.Module, block: int, waves: int) -> list[set[int]]:
    """For each head, the waves that its keys read, out of `waves` in the code."""
    weight = model.blocks[block].attn.k_weight[..., :2 * waves].unflatten(2, (2, waves))
    return [set(rows.abs().sum((0, 1)).nonzero()[:, 0].tolist()) for rows in weight.detach()]


def test_disjoint_heads_share_out_the_waves_and_others_take_the_slowest():
    """Three heads of eight channels have room for three waves each: all nine."""
    sizes = dict(embed_dim=24)
    options = dict(code_channels=0.9, target_mass=0.3, sizes=sizes)
    for block in range(5):
        assert used_waves(initialised(**options), block, 9) == [{0, 1, 2}] * 3
        shared = used_waves(initialised(waves_of_heads="disjoint", **options), block, 9)
        assert shared == [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}]
    model = initialised(waves_of_heads="disjoint", **options)
    for block in range(5):
        masses = target_mass(code_attention(model, block, 21), rotating(model, block), (5, 7))
        torch.testing.assert_close(masses, torch.full_like(masses, 0.3), rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------
# The bias channels
# ---------------------------------------------------------------------------------------------


@torch.no_grad()
def heads_logits(model: nn.Module, block: int, x: Tensor) -> Tensor:
    """(B, h, N, N), before the softmax, of a stream x that includes prefix tokens."""
    attention = model.blocks[block].attn
    query, key, _ = attention.queries_keys_values(model.blocks[block].norm1(x))
    return query @ key.mT / math.sqrt(attention.head_dim)


@pytest.mark.parametrize("code, kind", [("fourier", {}), ("random", dict(distilled=True))])
def test_the_logit_at_the_target_is_zero_whatever_content_is_beside_the_code(code, kind):
    """Exact for waves, whose targets all have the same logit; for a random code, on average.

    Without bias channels it is 8 to 30 on the same stream, and varies.
    """
    sizes = dict(embed_dim=111) | kind
    content = 3.0 * torch.randn(7, 111, dtype=torch.float64,
                                generator=torch.Generator().manual_seed(1)).exp()
    peaks = {}
    for bias_channels in (True, False):
        model = initialised(code=code, bias_channels=bias_channels, sizes=sizes)
        x = model.pos_embed.detach().expand(7, -1, -1).clone()
        x[:, :, 37:] += content[:, None, 37:] * torch.linspace(0.1, 1.0, x.shape[1]).double()[:, None]
        for block in range(5):
            logits = heads_logits(model, block, x)[..., model.num_prefix_tokens:, :]
            for head, offset in enumerate(rotating(model, block)):
                shift = circular_shift(offset, model.grid).bool()
                inside = shift_targets(offset, model.grid) >= 0
                at_target = logits[:, head, :, model.num_prefix_tokens:][:, shift].view(7, -1)[:, inside]
                peaks.setdefault(bias_channels, []).append(at_target)
    found = {bias_channels: torch.cat(values, 1) for bias_channels, values in peaks.items()}
    if code == "fourier":
        assert found[True].abs().max() < 1e-9
    else:
        assert found[True].mean(1).abs().max() < 0.1 * found[False].mean(1).abs().max()
    assert found[False].abs().max() > 0.1 and found[False].std(1).min() > 0.01


# ---------------------------------------------------------------------------------------------
# How large the stream is expected to be
# ---------------------------------------------------------------------------------------------


@torch.no_grad()
def measured_scales(model: nn.Module, images: Tensor) -> Tensor:
    """(depth,): the mean square of the patch tokens before each block's first LayerNorm."""
    x, found = model.embed(images), []
    for block in model.blocks:
        found.append(x[:, model.num_prefix_tokens:].square().mean())
        x = block(x)
    return torch.stack(found)


@pytest.mark.parametrize("base, options", [("default", {}), ("torch", dict(value_init="base", code_rms=0.7))])
def test_the_expected_scale_is_that_of_noise_with_the_assumed_mean_square(base, options):
    """In block 0 to 2 %; later up to .26 too low, as neighbours in noise are not alike."""
    model = initialised(base=base, **options, sizes=dict(embed_dim=85, num_heads=5))
    expected = torch.tensor(stream_scales(model, 27, options.get("code_rms", 0.36))).double()
    ratio = expected / measured_scales(model, images_for(model, count=11, mean_square=PIXELS))
    assert ratio[0].item() == pytest.approx(1.0, abs=0.02)
    assert ratio.min() > 0.7 and ratio.max() < 1.1


@torch.no_grad()
@pytest.mark.parametrize("base, scale", [("default", 1.0), ("torch", 20.0)])
def test_the_mlps_mean_square_is_that_of_a_sample(base, scale):
    """Sampled without biases; small weights leave GELU nearly linear, large ones bend it."""
    mlp = initialised(base, sizes=dict(embed_dim=191, depth=1, num_heads=1)).blocks[0].mlp
    mlp.fc1.weight.mul_(scale)
    x = torch.randn(1009, 191, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    hidden = x @ mlp.fc1.weight.T
    hidden = hidden * (1.0 + torch.erf(hidden / math.sqrt(2.0))) / 2.0
    sampled = (hidden @ mlp.fc2.weight.T).square().mean().item()
    assert mlp_mean_square(mlp) == pytest.approx(sampled, rel=0.04)


# ---------------------------------------------------------------------------------------------
# Seeds, gradients, errors
# ---------------------------------------------------------------------------------------------


@each_kind
def test_gradients_reach_what_starts_as_zero(kind):
    """Every layer can learn to write to the code's channels and to read them."""
    model = initialised(sizes=kind)
    images, labels = images_for(model, count=5), torch.tensor([0, 3, 1, 6, 2])
    F.cross_entropy(model(images), labels).backward()
    assert (model.pos_embed.grad[..., :RESERVED] != 0).all()
    assert (model.patch_embed.proj.weight.grad[:RESERVED] != 0).any((1, 2, 3)).all()
    for number, block in enumerate(model.blocks):
        attention = block.attn
        # Only the class token of the last block is read, and the code of class tokens is zero.
        if number < 4 or model.num_prefix_tokens == 0:
            gradient = attention.qkv.weight.grad[:114].view(2, 3, 19, 57)
            assert (gradient[:, :, :17] != 0).all()  # in the code's channels and in the others
        assert (attention.proj.weight.grad[:RESERVED] != 0).any(1).all()
        assert (attention.qkv.weight.grad[114:, :RESERVED] != 0).any(0).all()
        assert (block.mlp.fc2.weight.grad[:RESERVED] != 0).all()
        assert (attention.proj.bias.grad[:RESERVED] != 0).all()
        assert (block.mlp.fc2.bias.grad[:RESERVED] != 0).all()


FIXED = dict(pos_embed="sincos", embed_dim=60)


@pytest.mark.parametrize("sizes, options, message", [
    (FIXED, {}, "writes the position embedding, and the model's is fixed; use pos_embed = \"learned\""),
    ({}, dict(target_mass=0.0), "target_mass is 0.0 and code_channels .* expected 0.029 .uniform "
                                "attention. < target_mass"),
    ({}, dict(target_mass=0.028), "target_mass is 0.028"),               # of 35 tokens
    ({}, dict(target_mass=(1.0, 0.5)), r"target_mass is \(1.0, 0.5\) .* expected 0 < target_mass < 1 "
                                       "for both"),
    ({}, dict(target_mass=(0.5, 0.0)), r"target_mass is \(0.5, 0.0\)"),
    ({}, dict(target_mass=math.nan), "target_mass is nan"),
    (dict(embed_dim=24), dict(code_channels=1.0), "code_channels is 1 and the code takes 24 of 24"),
    (dict(embed_dim=3, num_heads=1), dict(reserve=False), "the code takes 4 of 3 channels"),
    ({}, dict(code_channels=1.01), "code_channels 1.01; .* 0 < code_channels ≤ 1"),
    ({}, dict(sigma=0.0), "sigma is 0.0, code_rms .* expected sigma and code_rms > 0"),
    ({}, dict(period=0.99), "period 0.99; .* period ≥ 1"),
    ({}, dict(offsets="spiral"), "offsets is 'spiral', expected one of ordered, rotating, random"),
    ({}, dict(reserve=False, bias_channels=True),
     "bias_channels = true needs reserve = true, .*; set bias_channels = false"),
    ({}, dict(value_init="x"), "value_init is 'x', expected one of mimetic, base"),
    ({}, dict(base="zeros"), "base is 'zeros'"),
    ({}, dict(code="random", target="gaussian"), 'code is "random", which has no waves for target '
                                                 '"gaussian" and waves_of_heads "disjoint"; use'),
    ({}, dict(code="random", waves_of_heads="disjoint"), 'which has no waves'),
    (dict(embed_dim=6), dict(bias_channels=True), "head_dim is 2, on a 5×7 grid; .* at least 3"),
    (dict(embed_dim=3), {}, "head_dim is 1, .* at least 2, .* have fewer and wider heads, or"),
    (dict(image_size=8), {}, "a 2×2 grid"),          # which has no waves
    ({}, dict(kernel_size=0), "kernel_size is 0"),
    ({}, dict(kernel_size=10), "kernel_size is 10, but beyond 9 .* no target on the 5×7 grid"),
    (dict(image_size=4), dict(kernel_size=1), "a 1×1 grid"),
    (dict(embed_dim=6), dict(target_mass=0.9),
     r"^1 wave\(s\) cannot give one token of a 5×7 grid a mass of 0.9"),
    ({}, dict(period=30.0) | NEAR_EXACT, r"^8 wave\(s\) cannot give")])
def test_the_impossible_is_refused_in_one_line_before_anything_is_drawn(sizes, options, message):
    model, generator = built(**sizes), torch.Generator().manual_seed(0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = generator.get_state()
    with pytest.raises(ValueError, match=message) as error:
        vitinit.init_weights(model, "deep_impulse", generator=generator, **options)
    assert "\n" not in str(error.value)
    assert torch.equal(generator.get_state(), state)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_mass_that_a_random_code_cannot_reach_is_an_error_of_one_line():
    with pytest.raises(ValueError, match="^a random code of 4 channels cannot give one token of a "
                                         "5×7 grid a mass of 0.9; use more") as error:
        initialised(code="random", code_channels=0.13)
    assert "\n" not in str(error.value)
