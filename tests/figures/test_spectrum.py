"""Ranks of matrices with known singular values, and patch embeddings by their definition."""

from __future__ import annotations

import pytest
import torch
from einops import rearrange

import vitinit
from vitinit.figures import spectrum
from vitinit.figures.subjects import fresh, photographs
from vitinit.init.impulse import numerical_rank


def with_singular_values(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, len(values), generator=generator).double())[0]
                   for size in (rows, columns))
    return left * values @ right.mT


def test_ranks_are_those_of_known_singular_values():
    """13 × 11 with values 3, 2, 1, .031, .029, 1e-4 and zeros: ‖X‖_F² / ‖X‖₂² = 14.0018 / 9."""
    known = torch.tensor([3, 2, 1, 0.031, 0.029, 1e-4, 0, 0, 0, 0, 0], dtype=torch.float64)
    matrix = with_singular_values(known, 13, 11)
    found = spectrum.ranks(torch.linalg.svdvals(matrix)[None], (13, 11))
    assert found.stable.item() == pytest.approx((14 + 0.031**2 + 0.029**2 + 1e-8) / 9)
    assert found.above_share.item() == 4             # .031 / 3 is above 1 %, .029 / 3 below
    assert found.numerical.item() == 6 == numerical_rank(matrix.float())


def test_patch_embeddings_are_the_patches_times_the_filters():
    model = vitinit.build_model("vit_tiny", num_classes=3, image_size=(10, 14), patch_size=2,
                                embed_dim=39, depth=1, num_heads=3).double()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 10, 14, generator=generator, dtype=torch.float64)
    patches = rearrange(images, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)
    weights = model.patch_embed.proj
    expected = patches @ weights.weight.flatten(1).mT + weights.bias     # no class token, no code
    torch.testing.assert_close(spectrum.patch_embeddings(model, images), expected.detach())


def test_a_swins_map_counts_as_tokens():
    model = vitinit.build_model("swin_tiny", num_classes=3, image_size=32, patch_size=4,
                                embed_dim=12, depths=(1,), num_heads=(3,), window_size=4)
    assert spectrum.patch_embeddings(model, torch.zeros(2, 3, 32, 32)).shape == (2, 64, 12)


def test_ranks_are_printed_as_means_over_photographs(draw, sizes, image_tree, capsys):
    draw("spectrum", "--recipe", "quickstart", *sizes, "--data-dir", image_tree / "val",
         "--count", 5)
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("quickstart, default: X is 35×39; mean over 5 images: stable rank ")
    subject, = fresh(["quickstart"], [None], seed=None, sets=sizes[1::2])
    images = photographs(image_tree / "val", 5, subject.recipe)
    tokens = subject.model.patch_embed(images).detach()
    stable = [(matrix.square().sum() / torch.linalg.matrix_norm(matrix, 2)**2).item()
              for matrix in tokens.double()]
    assert f"stable rank {sum(stable) / 5:.2f}, " in line
    # A patch of 2×2 pixels in three colours has 12 values, and the bias adds a direction.
    assert line.endswith(", 13.0 above float32's limit")
