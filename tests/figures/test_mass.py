"""Target mass by depth: batching does not change it, and heads are averaged in the right groups."""

from __future__ import annotations

import pytest
import torch

import vitinit
from vitinit.figures import mass
from vitinit.filters import ordered_offsets
from vitinit.mixing import logit_peak, mixing_matrices, target_mass


def built(init: str = "impulse", num_heads: int = 11):
    model = vitinit.build_model("vit_tiny", num_classes=3, image_size=(10, 14), patch_size=2,
                                embed_dim=13 * num_heads, depth=3, num_heads=num_heads)
    vitinit.init_weights(model, init, generator=torch.Generator().manual_seed(0))
    return model.eval()


def in_order(kernel_size: int, heads: int = 11, blocks: int = 3) -> list[list[tuple[int, int]]]:
    """Targets of a model whose heads have the kernel's offsets in order, repeated if necessary."""
    cells = ordered_offsets(kernel_size)
    return [[cells[head % len(cells)] for head in range(heads)]] * blocks


def test_batches_give_the_mean_over_all_images_of_each_heads_target():
    """There are more images than a batch holds, not a multiple; and more heads than offsets."""
    model = built()
    images = torch.randn(mass.BATCH + 3, 3, 10, 14, generator=torch.Generator().manual_seed(1))
    found, peaks = mass.masses_by_block(model, images, in_order(3))
    offsets = [*ordered_offsets(3), *ordered_offsets(3)[:2]]
    expected = torch.stack([target_mass(weights, offsets, (5, 7))
                            for weights in mixing_matrices(model, images).values()])
    torch.testing.assert_close(found, expected)
    assert found.shape == peaks.shape == (3, 11) and found[0, 0] > 0.5
    expected = torch.stack([logit_peak(weights, (5, 7))
                            for weights in mixing_matrices(model, images).values()])
    torch.testing.assert_close(peaks, expected)


def test_a_perfect_shift_in_every_head_has_all_mass(monkeypatch):
    """The model's matrices are replaced by shift matrices of a 5×5 kernel, built token by token."""
    def shifts(model, images):
        weights = torch.zeros(len(images), 11, 35, 35)
        for head, (down, right) in enumerate(sorted(
                ((down, right) for down in range(-2, 3) for right in range(-2, 3)),
                key=lambda offset: offset[0]**2 + offset[1]**2)[:11]):
            for token in range(35):
                row, column = token // 7 + down, token % 7 + right
                inside = 0 <= row < 5 and 0 <= column < 7
                weights[:, head, token, row * 7 + column if inside else 0] = 1.0
        return {block: weights for block in range(3)}
    monkeypatch.setattr(mass, "mixing_matrices", shifts)
    images = torch.zeros(3, 3, 10, 14)
    assert torch.equal(mass.masses_by_block(built("default"), images, in_order(5))[0],
                       torch.ones(3, 11))
    assert (mass.masses_by_block(built("default"), images, in_order(3))[0] < 1.0).any()


def test_heads_are_summarised_by_whether_their_target_is_the_query_token():
    masses = torch.arange(22.0).view(2, 11)          # heads 0 and 9 have the offset (0, 0)
    found = mass.summarised(masses, in_order(3, blocks=2))
    assert found.heads.tolist() == [5.0, 16.0]
    assert found.centre.tolist() == [4.5, 15.5]
    assert torch.allclose(found.others, torch.tensor([(55 - 9) / 9, (55 + 121 - 31) / 9]))


def test_a_block_without_a_centre_head_has_no_mean_of_them():
    found = mass.summarised(torch.tensor([[2.0, 3.0], [5.0, 7.0]]), [[(0, 0), (0, 1)],
                                                                     [(1, 0), (1, 1)]])
    assert found.centre[0] == 2.0 and found.centre[1].isnan()
    assert found.others.tolist() == [3.0, 6.0] and found.heads.tolist() == [2.5, 6.0]


def test_rotating_offsets_are_measured_where_each_block_has_them(draw, sizes, image_tree, capsys):
    draw("mass", "--recipe", "quickstart", "--init", "impulse", *sizes, "--data-dir",
         image_tree / "val", "--count", 2, "--set", "init.options.offsets=rotating")
    centre = capsys.readouterr().out.splitlines()[1].split(":")[1].split()[1:]
    # Block 0 starts with the offset (0, 0), which returns after nine heads; a block has three.
    assert centre[0] != "nan" and centre[1] == "nan"


def test_the_numbers_are_printed_by_model_and_init(draw, sizes, image_tree, capsys):
    draw("mass", "--recipe", "quickstart", "--init", "default", "impulse", *sizes, "--data-dir",
         image_tree / "val", "--count", 5)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:8]] == \
        ["quickstart, default"] * 4 + ["quickstart, impulse"] * 4
    default, impulse = (float(lines[row].split()[-2]) for row in (1, 5))    # centre head, block 0
    assert default == pytest.approx(1 / 35, abs=0.01) and impulse > 10 * default


def test_models_without_global_attention_are_refused_in_one_line(complains, image_tree):
    complains("makes a SwinTransformer; figure 'mass' is defined for VisionTransformer and "
              "SimpleViT", "mass", "--recipe", "cifar10_swin_tiny", "--data-dir", image_tree)


def test_a_kernel_of_one_cell_is_refused_in_one_line(complains, sizes, image_tree):
    complains("every head's target is its own token", "mass", "--recipe", "quickstart", *sizes,
              "--data-dir", image_tree, "--count", 2, "--kernel-size", 1)


@pytest.mark.parametrize("option, text", [
    ("kernel_size=5", "has kernel_size = 5; give --kernel-size 5"),
    ("offsets=random", 'init.options.offsets = "random" drew the targets of recipe quickstart'),
])
def test_targets_other_than_the_inits_are_refused_in_one_line(complains, sizes, image_tree, option,
                                                              text):
    complains(text, "mass", "--recipe", "quickstart", "--init", "impulse", *sizes, "--set",
              f"init.options.{option}", "--data-dir", image_tree, "--count", 2)


@pytest.mark.parametrize("norm, saturated", [(4.0, False), (90.0, True)])
def test_logits_are_printed_and_called_saturated_above_30(draw, sizes, image_tree, capsys, norm,
                                                          saturated):
    draw("mass", "--recipe", "quickstart", "--init", "impulse", *sizes, "--data-dir",
         image_tree / "val", "--count", 2, "--set", f"init.options.qk_norm={norm}")
    line, = (line for line in capsys.readouterr().out.splitlines() if ": logits" in line)
    assert line.endswith("saturated)") == saturated
    assert (float(line.split("logits")[1].split()[0]) > 30) == saturated
