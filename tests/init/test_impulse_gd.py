"""Impulse initialisation by gradient descent: its steps written out, and its attention."""

import sys
from functools import partial

import pytest
import torch
from small_models import drawn, seeded, written
from torch import Tensor

import vitinit
from vitinit.init.impulse_gd import draw_pseudo_input, solve
from vitinit.mixing import mixing_matrices, target_mass
from vitinit.mixing.filters import ordered_offsets, shift_matrix

GRID = (5, 7)
initialised = partial(written, "impulse_gd")
FAST = dict(steps=150, step_size=0.01, renorm_every=0)  # sharp maps, in a fraction of a second


def vit(**options) -> torch.nn.Module:
    return vitinit.build_model(
        "vit_tiny",
        num_classes=11,
        **dict(image_size=(10, 21), patch_size=(2, 3), embed_dim=44, depth=2, num_heads=2)
        | options,
    )


def simple_vit(**options) -> torch.nn.Module:
    if options.get("reads", "content") != "content":
        options |= dict(input_pos_embed=False)
    return vitinit.build_model(
        "simple_vit",
        num_classes=11,
        **dict(
            image_size=(10, 21), patch_size=(2, 3), embed_dim=44, depth=2, num_heads=2, head_dim=17
        )
        | options,
    )


def solved_by_hand(
    maps: Tensor,
    tokens: Tensor,
    *,
    rank: int,
    logit_scale: float,
    steps: int,
    step_size: float,
    renorm_every: int,
) -> list[list[Tensor]]:
    """Head by head, with the gradient of the mean squared error and Adam's update written out."""
    heads, count, _ = maps.shape
    bound, generator = 1 / (rank * heads) ** 0.5, seeded(3)
    shape = heads, tokens.shape[1], rank
    drawn = [maps.new_empty(shape).uniform_(-bound, bound, generator=generator) for _ in range(2)]
    norm = drawn[0].square().sum(1).sqrt().mean()
    solutions = []
    for head in range(heads):
        factors = [drawn[0][head].clone(), drawn[1][head].clone()]
        first, second = ([torch.zeros_like(drawn[0][head])] * 2 for _ in range(2))
        for step in range(steps):
            if renorm_every and step % renorm_every == 0:
                query, key = factors
                query = torch.stack([norm * c / c.square().sum().sqrt() for c in query.T], dim=1)
                key = torch.stack([norm * c / c.square().sum().sqrt() for c in key], dim=0)
                factors = [query, key]
            left, right = (tokens @ factor for factor in factors)
            exponentials = (logit_scale * left @ right.T).exp()
            found = exponentials / exponentials.sum(1, keepdim=True)
            slope = 2 * (found - maps[head]) / (heads * count * count)
            slope = found * (slope - (found * slope).sum(1, keepdim=True))
            gradients = [
                logit_scale * tokens.T @ slope @ right,
                logit_scale * tokens.T @ slope.T @ left,
            ]
            for index, gradient in enumerate(gradients):
                first[index] = 0.9 * first[index] + 0.1 * gradient
                second[index] = 0.999 * second[index] + 0.001 * gradient**2
                mean = first[index] / (1 - 0.9 ** (step + 1))
                square = second[index] / (1 - 0.999 ** (step + 1))
                factors[index] = factors[index] - step_size * mean / (square.sqrt() + 1e-8)
        solutions.append(factors)
    return solutions


@pytest.mark.parametrize("free, renorm_every", [(False, 0), (False, 7), (True, 1)])
def test_solutions_equal_steps_written_out(free, renorm_every, held_against):
    maps = torch.stack([shift_matrix(cell, GRID) for cell in ((-1, 0), (0, 1), (1, 1))]).double()
    tokens = None if free else drawn(35, 11)
    options = dict(rank=13, logit_scale=0.83, steps=23, step_size=0.02, renorm_every=renorm_every)
    query, key = solve(maps, tokens, generator=seeded(3), **options)
    assert query.shape == key.shape == (3, 13, 35 if free else 11)
    expected = solved_by_hand(maps, torch.eye(35).double() if free else tokens, **options)
    for head, (left, right) in enumerate(expected):
        torch.testing.assert_close(query[head].T, left, rtol=0, atol=1e-9)
        torch.testing.assert_close(key[head].T, right, rtol=0, atol=1e-9)
        held_against([query[head].T, key[head].T], [left, right])


def on_positions_alone(model) -> list[Tensor]:
    """The maps of all blocks, (h, N, N) each, when neither patches nor branches add content."""
    if isinstance(model, vitinit.models.VisionTransformer):
        model.patch_embed.proj.bias.data.zero_()
        for block in model.blocks:
            for layer in (block.attn.proj, block.mlp.fc2):
                layer.weight.data.zero_()
                layer.bias.data.zero_()
    return [maps[0] for maps in mixing_matrices(model, torch.zeros(1, 3, 10, 21)).values()]


LOOKING = {
    "learned positions": vit,
    "mixed": lambda: simple_vit(reads="mixed", alpha=0.0),
    "position": lambda: simple_vit(reads="position", logit_scale=0.83),
    "free": lambda: simple_vit(reads="free", logit_scale=0.83),
}


@pytest.mark.parametrize("family", LOOKING)
def test_the_heads_of_every_block_attend_to_their_offsets(family):
    model = initialised(LOOKING[family](), offsets="ordered", **FAST)
    for maps in on_positions_alone(model):
        mass = target_mass(maps, ordered_offsets(3)[:2], GRID)
        assert mass.min() > 25 / 35  # 25 times the uniform map's


def test_noise_is_that_of_the_papers_code_and_the_sum_with_positions_is_normalised():
    """arXiv 2404.01139's: U(−1, 1) or a normal of variance ½, added to P; then a LayerNorm."""
    positions = 0.1 + torch.randn(101, 211, generator=seeded(1), dtype=torch.float64)
    for kind, variance, largest, fourth in (
        ("uniform", 1 / 3, 1.0, 1 / 5),
        ("normal", 1 / 2, 4.3, 3 / 4),
    ):
        noise = draw_pseudo_input(positions, kind, None, seeded())
        assert noise.mean().item() == pytest.approx(0.0, abs=0.02)
        assert noise.square().mean().item() == pytest.approx(variance, abs=0.015)
        assert noise.pow(4).mean().item() == pytest.approx(fourth, abs=0.04)
        assert noise.abs().max() <= largest
        for name, tokens in ((kind, noise), (f"pos_embed+{kind}", positions + noise)):
            centred = tokens - tokens.mean(dim=1, keepdim=True)
            expected = centred / (centred.square().mean(dim=1, keepdim=True) + 1e-3).sqrt()
            torch.testing.assert_close(draw_pseudo_input(positions, name, 1e-3, seeded()), expected)
    assert torch.equal(draw_pseudo_input(positions, "pos_embed", None, seeded()), positions)


def test_maps_are_sharp_on_the_pseudo_input_that_was_drawn(monkeypatch):
    """One for each block, where they share no solution; noise contains no positions."""
    drawn, module = [], sys.modules["vitinit.init.impulse_gd"]

    def recorded(*arguments):
        drawn.append(draw_pseudo_input(*arguments))
        return drawn[-1]

    monkeypatch.setattr(module, "draw_pseudo_input", recorded)
    model = initialised(
        vit(pos_embed="sincos", pool="mean"),
        offsets="ordered",
        pseudo_input="uniform",
        share_blocks=False,
        **FAST,
    )
    assert len(drawn) == 2 and not torch.equal(*drawn)
    for block, tokens in zip(model.blocks, drawn):
        query, key = block.attn.q_weight.detach(), block.attn.k_weight.detach()
        maps = ((tokens @ query.mT) @ (tokens @ key.mT).mT / 22**0.5).softmax(-1)
        assert target_mass(maps, ordered_offsets(3)[:2], GRID).min() > 25 / 35
    on_positions = target_mass(on_positions_alone(model)[0], ordered_offsets(3)[:2], GRID)
    assert on_positions.max() < 5 / 35


def test_a_model_without_positions_has_noise_to_solve_on_or_is_refused():
    model = vit(pos_embed="none", pool="mean")
    with pytest.raises(ValueError, match="solves on positions, and this model has none"):
        vitinit.init_weights(model, "impulse_gd", generator=seeded())
    initialised(model, pseudo_input="normal", steps=1)
