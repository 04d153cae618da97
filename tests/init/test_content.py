"""The content of tokens at the start: its size beside the positions, and whitened patches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import vitinit
from vitinit.figures.subjects import fresh
from vitinit.init.content import direction_count, known_content
from vitinit.init.position_mass import position_mass
from vitinit.init.stream_scales import stream_scales
from vitinit.runs import start

SIZES = dict(num_classes=5, image_size=(32, 32), patch_size=4, embed_dim=111, depth=3, num_heads=3,
             pool="mean")
ALL = {"impulse": dict(rank=11), "mimetic": {},
       "deep_impulse": dict(base="default", target_mass=0.9, code_channels=1 / 3, bias_channels=True)}
each_init = pytest.mark.parametrize("init", ALL)


def initialised(init: str, images: Tensor | None = None, seed: int = 0, **options) -> nn.Module:
    model = vitinit.build_model("vit_tiny", **SIZES)
    vitinit.init_weights(model, init, generator=torch.Generator().manual_seed(seed), images=images,
                         **ALL[init] | options)
    return model


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def content_and_positions(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """What the patch embedding adds to the stream, (n, N, D), and the position embedding (N, D)."""
    with torch.no_grad():
        return model.patch_embed(images), model.pos_embed[0, model.num_prefix_tokens:]


# ---------------------------------------------------------------------------------------------
# Its scale
# ---------------------------------------------------------------------------------------------


@each_init
@pytest.mark.parametrize("base", ["default", "torch"])
@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_content_has_the_scale_that_was_asked_for_on_pixels_of_the_assumed_size(init, base, scale):
    model = initialised(init, base=base, content_scale=scale)
    noise = math.sqrt(2.0) * torch.randn(257, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    content, positions = content_and_positions(model, noise)
    assert rms(content) / rms(positions) == pytest.approx(scale, rel=0.02)


@each_init
@pytest.mark.parametrize("patch_embed", ["base", "whitened"])
def test_scaling_content_changes_the_patch_embedding_and_sharpness_alone(init, patch_embed, images):
    before = initialised(init, images, patch_embed=patch_embed).state_dict()
    after = initialised(init, images, patch_embed=patch_embed, content_scale=0.7).state_dict()
    gain = (after["patch_embed.proj.weight"] / before["patch_embed.proj.weight"]).nanmedian()
    for name, value in after.items():
        if name.startswith("patch_embed"):
            torch.testing.assert_close(value, gain * before[name])
        elif init == "mimetic" or not name.endswith("qkv.weight"):
            assert torch.equal(value, before[name]), name
        else:                                        # queries and keys by one factor per block
            assert torch.equal(value[222:], before[name][222:])
            factors = (value[:222] / before[name][:222])[before[name][:222] != 0]
            torch.testing.assert_close(factors, factors[0].expand_as(factors), rtol=1e-4, atol=0)


def test_impulses_logits_of_positions_are_those_without_content():
    """LayerNorm divides tokens by √(positions² + content²), of which Q and K take their part."""
    plain, loud = initialised("impulse"), initialised("impulse", content_scale=1.7)
    growth = math.sqrt(1.0 + 1.7**2)
    for part in ("q_weight", "k_weight"):
        for before, after in zip(plain.blocks, loud.blocks):
            torch.testing.assert_close(getattr(after.attn, part), growth * getattr(before.attn, part))
    masses = [position_mass(model, "impulse", ALL["impulse"] | dict(content_scale=scale))
              for model, scale in ((plain, 0.0), (loud, 1.7))]
    torch.testing.assert_close(masses[1].others, masses[0].others, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [dict(), dict(patch_embed="whitened")])
def test_deep_impulse_has_its_mass_whatever_the_content(options, images):
    """On images: Q and K of each block are as large as that block's LayerNorm asks for."""
    for scale in (0.3, 1.0):
        options |= dict(content_scale=scale, target_mass=0.8)
        model = initialised("deep_impulse", images, **options)
        found = position_mass(model, "deep_impulse", ALL["deep_impulse"] | options)
        assert min(*found.centre, *found.others) > 0.79 and max(*found.centre, *found.others) < 0.81
        with torch.no_grad():
            x = model.embed(images)
            variance = x.var(-1, correction=0).mean()
        positions = model.pos_embed[0]
        content = known_content(model, patch_embed=options.get("patch_embed", "base"),
                                content_scale=scale, first=0)
        assert content == pytest.approx((scale * rms(positions))**2, rel=1e-5)
        if "patch_embed" in options:                 # measured on these very images
            assert variance == pytest.approx(rms(positions)**2 * (1 + scale**2), rel=0.1)
            expected = stream_scales(model, 37, 0.36, content)[0]
            assert expected == pytest.approx(variance.item(), rel=0.1)


@each_init
@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_scales_out_of_range_are_refused(init, value):
    with pytest.raises(ValueError, match="content_scale"):
        initialised(init, content_scale=value)


# ---------------------------------------------------------------------------------------------
# Whitened patches
# ---------------------------------------------------------------------------------------------


@each_init
def test_whitened_content_is_uncorrelated_and_of_variance_one_in_both_signs(init, images):
    model = initialised(init, images, patch_embed="whitened")
    first = 37 if init == "deep_impulse" else 0      # a third of 111 channels is reserved: 17 waves, 3
    count = direction_count(model, first)
    assert (first, count) in ((0, 48), (37, 37))
    content, _ = content_and_positions(model, images)
    channels = content.flatten(0, 1).double()        # (patches, D)
    assert not channels[:, :first].any() and not channels[:, first + 2 * count:].any()
    pairs = channels[:, first:first + 2 * count]
    torch.testing.assert_close(pairs[:, ::2], -pairs[:, 1::2], rtol=0, atol=1e-5)
    assert pairs.mean(0).abs().max() < 1e-4
    covariance = pairs[:, ::2].T.cov(correction=0)
    apart = covariance - covariance.diagonal().diag()
    assert apart.abs().max() < 1e-3
    # Below 1 only where the floor is not small beside the direction's own variance.
    assert covariance.diagonal().max() < 1.0 and covariance.diagonal()[:11].min() > 0.99
    assert (covariance.diagonal().diff() < 1e-4).all()


def test_directions_are_those_of_an_independent_decomposition(images):
    """torch's SVD of the patches, cut out one by one."""
    model = initialised("impulse", images, patch_embed="whitened")
    patches = torch.stack([images[:, :, y:y + 4, x:x + 4].flatten(1) for y in range(0, 32, 4)
                           for x in range(0, 32, 4)], dim=1).flatten(0, 1).double()
    centred = patches - patches.mean(0)
    _, values, directions = torch.linalg.svd(centred, full_matrices=False)
    values = values**2 / len(patches)
    expected = directions / (values + 1e-3 * values.mean()).sqrt()[:, None]
    ours = model.patch_embed.proj.weight.flatten(1)[:96:2].double()
    signs = (ours * expected).sum(1).sign()
    torch.testing.assert_close(ours, signs[:, None] * expected, rtol=0, atol=1e-3)


def test_whitening_draws_nothing_and_changes_nothing_else(images):
    plain = initialised("impulse").state_dict()
    whitened = initialised("impulse", images, patch_embed="whitened").state_dict()
    assert {name for name, value in whitened.items() if not torch.equal(value, plain[name])} == {
        "patch_embed.proj.weight", "patch_embed.proj.bias"}


def test_the_gain_of_whitened_content_is_exact_on_the_images_given(images):
    model = initialised("impulse", images, patch_embed="whitened", content_scale=0.6)
    content, positions = content_and_positions(model, images)
    assert rms(content) / rms(positions) == pytest.approx(0.6, rel=1e-4)


def test_what_whitening_cannot_do_is_refused(images):
    with pytest.raises(ValueError, match="reads training images, and none were given"):
        initialised("impulse", patch_embed="whitened")
    with pytest.raises(ValueError, match="all patches of the images given are equal"):
        initialised("impulse", torch.ones(3, 3, 32, 32), patch_embed="whitened")
    with pytest.raises(ValueError, match='patch_embed is \'white\', expected "base" or "whitened"'):
        initialised("impulse", patch_embed="white")


def test_content_is_a_vits(images):
    model = vitinit.build_model("swin_tiny", num_classes=3, image_size=32, patch_size=2, embed_dim=6,
                                depths=(1, 1), num_heads=(2, 3), window_size=4)
    for options in (dict(content_scale=0.5), dict(patch_embed="whitened")):
        with pytest.raises(ValueError, match="content_scale and patch_embed are for a ViT"):
            vitinit.init_weights(model, "mimetic", generator=torch.Generator(), images=images, **options)


def test_a_run_and_its_figures_hand_training_images_to_an_init_that_reads_them(
        train_program, small_run, tmp_path, monkeypatch, capsys):
    """Keyed by the run's seed: the same weights again, and others for another seed."""
    monkeypatch.setattr(start, "INIT_IMAGES", 13)
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        words = small_run(tmp_path / name, "--set", "init.options.patch_embed=whitened", "--seed",
                          str(seed), schedule__epochs="1", checkpoint__keep_epochs="[0]")
        assert train_program.main(words) == 0
        model = torch.load(tmp_path / name / "epoch_0000.pt")["model"]
        weights.append(model["patch_embed.proj.weight"])
        subject, = fresh([str(tmp_path / name / "recipe.toml")], [None], seed=None, sets=[])
        for key, value in subject.model.state_dict().items():
            assert torch.equal(value, model[key]), key
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    torch.testing.assert_close(weights[0][0], -weights[0][1])
    capsys.readouterr()
    with pytest.raises(ValueError, match="reads training images, and none were given"):
        list(fresh([str(tmp_path / "a" / "recipe.toml")], [None], seed=None, sets=["data.root=nowhere"]))
    assert "there is no folder nowhere: noise stands in for them" in capsys.readouterr().out
