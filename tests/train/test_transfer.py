"""Fine-tuning: what fits is copied to the bit, what does not is resized, reported or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitinit
from vitinit.models.layers import sincos_position_embedding
from vitinit.recipe.files import RECIPES, load_recipe
from vitinit.recipe.sections import Recipe
from vitinit.runs.fine_tune import fine_tune
from vitinit.train.checkpoint import CheckpointError, save_atomically
from vitinit.train.ema import Ema
from vitinit.train.transfer import Transfer, start_from

PATH = Path("runs/a/last.pt")
WIDTH = 11
FIXED = "pos_embed (the model's are fixed)"


def vit(seed: int, *, grid: tuple[int, int] = (5, 5), classes: int = 7, **sizes) -> nn.Module:
    """A small ViT whose parameters are all random, so that no two of them can be confused."""
    sizes = dict(embed_dim=WIDTH, depth=2, num_heads=1) | sizes
    model = vitinit.build_model("vit_tiny", num_classes=classes, patch_size=(2, 3),
                                image_size=(2 * grid[0], 3 * grid[1]), **sizes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def distilled(grid: tuple[int, int]) -> dict[str, Tensor]:
    """A checkpoint like DeiT's distilled ones: with a second token and a second classifier."""
    tensors = snapshot(vit(1, grid=grid))
    return {"cls_token": tensors.pop("cls_token"), "dist_token": drawn(1, 1, WIDTH),
            "pos_embed": drawn(1, 2 + grid[0] * grid[1], WIDTH)} | {
        name: value for name, value in tensors.items() if name != "pos_embed"} | {
        "head_dist.weight": drawn(7, WIDTH), "head_dist.bias": drawn(7)}


def resized_by_hand(patches: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """(1, h·w, D) → (1, h'·w', D), one channel after another."""
    if old == new:
        return patches
    channels = [F.interpolate(patches[0, :, channel].reshape(1, 1, *old), size=new, mode="bicubic",
                              antialias=True).flatten() for channel in range(patches.shape[2])]
    return torch.stack(channels, dim=1)[None]


def assert_equal(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """Every tensor of the model equals the expected one to the bit."""
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name


def assert_equal_but_for_positions(model: nn.Module, expected: dict[str, Tensor],
                                   positions: Tensor) -> None:
    """Every tensor is equal to the bit, but position embeddings only to 1e-6: they were resized."""
    assert_equal(model, expected | {"pos_embed": model.pos_embed})
    torch.testing.assert_close(model.pos_embed.data, positions, rtol=0, atol=1e-6)


def refusal(model: nn.Module, tensors: dict[str, Tensor],
            grid: tuple[int, int] | None = None) -> str:
    """The one-line error of the transfer; also checks that the model has not changed."""
    before = snapshot(model)
    with pytest.raises(CheckpointError) as caught:
        start_from(model, tensors, PATH, grid)
    assert_equal(model, before)
    message = str(caught.value)
    assert message.startswith(f"{PATH}: ") and "\n" not in message
    return message


# ---------------------------------------------------------------------------------------------
# What fits
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool, grid", [("class", (3, 5)), ("mean", (5, 5))])
def test_a_model_of_the_same_shapes_becomes_the_checkpoints(pool, grid):
    model, source = vit(0, grid=grid, pool=pool), vit(1, grid=grid, pool=pool)
    report = start_from(model, source.state_dict(), PATH, grid)
    assert_equal(model, source.state_dict())
    assert report == Transfer(list(source.state_dict()), [], [], [])
    assert str(report) == f"{len(source.state_dict())} tensors loaded"
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_half_precision_is_read_into_the_models_own():
    model, source = vit(0), {name: value.half() for name, value in snapshot(vit(1)).items()}
    start_from(model, source, PATH, None)
    assert_equal(model, {name: value.float() for name, value in source.items()})
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}


def test_a_classifier_of_other_classes_stays_as_the_init_drew_it():
    model, source = vit(0, classes=13), vit(1, classes=7)
    head = {name: value for name, value in snapshot(model).items() if name.startswith("head.")}
    report = start_from(model, source.state_dict(), PATH, None)
    assert_equal(model, source.state_dict() | head)
    assert report.kept == list(head) == ["head.weight", "head.bias"]
    assert report.dropped == ["head.weight (7, 11)", "head.bias (7,)"]
    assert report.loaded == [name for name in source.state_dict() if name not in head]
    assert report.resized == []
    assert str(report) == (f"{len(report.loaded)} tensors loaded; dropped: head.weight (7, 11), "
                           "head.bias (7,); as the init drew them: head.weight, head.bias")


def test_blocks_that_only_one_side_has_are_dropped_or_stay_as_the_init_drew_them():
    for own, theirs in ((3, 2), (2, 3)):
        model, source = vit(0, depth=own), snapshot(vit(1, depth=theirs))
        before = snapshot(model)
        third = [name for name in (before if own > theirs else source) if "blocks.2." in name]
        report = start_from(model, source, PATH, None)
        assert_equal(model, {name: source.get(name, value) for name, value in before.items()})
        assert (report.dropped, report.kept) == (([], third) if own > theirs else (third, []))
        assert str(report).endswith(f" and {len(third) - 5} more")


# ---------------------------------------------------------------------------------------------
# Position embeddings
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool, before, old, new, given", [
    ("class", 1, (5, 5), (3, 7), False), ("mean", 0, (3, 3), (7, 7), False),
    ("class", 1, (2, 7), (11, 13), True), ("mean", 0, (5, 5), (3, 3), True),
    ("class", 1, (3, 5), (5, 3), True)])             # the last has as many positions as before
def test_position_embeddings_of_another_grid_are_resized_and_nothing_else_is(pool, before, old, new,
                                                                             given):
    model, source = vit(0, grid=new, pool=pool), vit(1, grid=old, pool=pool)
    tensors = snapshot(source)
    report = start_from(model, source.state_dict(), PATH, old if given else None)
    positions = tensors["pos_embed"]
    expected = resized_by_hand(positions[:, before:], old, new)
    assert_equal_but_for_positions(model, tensors, torch.cat([positions[:, :before], expected], dim=1))
    assert torch.equal(model.pos_embed[:, :before], positions[:, :before])
    assert report.resized == [f"pos_embed {old[0]}×{old[1]} → {new[0]}×{new[1]}"]
    assert report.loaded == [name for name in tensors if name != "pos_embed"]
    assert (report.dropped, report.kept) == ([], [])
    assert str(report) == f"{len(tensors) - 1} tensors loaded; {report.resized[0]} resized"
    assert_equal(source, tensors)                    # the checkpoint's tensors are read only


def test_position_embeddings_of_no_square_grid_are_copied_where_they_fit_as_they_are():
    model, source = vit(0, grid=(3, 5)), vit(1, grid=(3, 5))
    report = start_from(model, source.state_dict(), PATH, None)
    assert_equal(model, source.state_dict())
    assert report == Transfer(list(source.state_dict()), [], [], [])


@pytest.mark.parametrize("grid, words", [(None, "no square grid"), ((3, 3), "no 3×3 grid")])
def test_position_embeddings_whose_grid_is_unknown_are_refused_where_they_do_not_fit(grid, words):
    message = refusal(vit(0, grid=(5, 7)), snapshot(vit(1, grid=(2, 7))), grid)
    assert "pos_embed has embeddings for 14 patches" in message and words in message


@pytest.mark.parametrize("old, new", [((5, 5), (5, 5)), ((3, 5), (7, 2))])
def test_a_class_token_that_the_checkpoint_lacks_stays_with_its_position_as_the_init_drew_it(old, new):
    model, source = vit(0, grid=new, pool="class"), vit(1, grid=old, pool="mean")
    own, tensors = snapshot(model), snapshot(source)
    report = start_from(model, tensors, PATH, old)
    positions = resized_by_hand(tensors["pos_embed"], old, new)
    assert_equal_but_for_positions(model, tensors | {"cls_token": own["cls_token"]},
                                   torch.cat([own["pos_embed"][:, :1], positions], dim=1))
    assert torch.equal(model.pos_embed[:, :1], own["pos_embed"][:, :1])
    assert (report.dropped, report.kept) == ([], ["cls_token"])


@pytest.mark.parametrize("new, pool, ours", [((5, 5), "class", 1), ((3, 7), "mean", 0)])
def test_a_distilled_checkpoint_gives_a_plain_model_all_but_its_second_token(pool, ours, new):
    model, tensors = vit(0, grid=new, pool=pool), distilled((5, 5))
    report = start_from(model, tensors, PATH, None)
    positions = resized_by_hand(tensors["pos_embed"][:, 2:], (5, 5), new)
    expected = {name: tensors[name] for name in model.state_dict()}
    assert_equal_but_for_positions(model, expected,
                                   torch.cat([tensors["pos_embed"][:, :ours], positions], dim=1))
    assert report.dropped == ["cls_token"] * (1 - ours) + ["dist_token", "head_dist.weight",
                                                           "head_dist.bias"]
    assert report.kept == []


@pytest.mark.parametrize("old, kind", [((5, 5), "sincos"), ((3, 7), "learned")])
def test_fixed_position_embeddings_stay_and_are_reported(kind, old):
    width = 20                                       # which 4 divides
    model = vit(0, embed_dim=width, pos_embed="sincos")
    source = vit(1, grid=old, embed_dim=width, pos_embed=kind)
    report = start_from(model, source.state_dict(), PATH, old)
    fixed = torch.cat([torch.zeros(1, width), sincos_position_embedding((5, 5), width)])[None]
    assert_equal(model, source.state_dict() | {"pos_embed": fixed})
    assert (report.dropped, report.kept) == ([FIXED], ["pos_embed"])
    assert report.resized == [] and "pos_embed" not in report.loaded


# ---------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------


def test_a_model_of_another_width_lists_the_names_with_both_shapes():
    source = vit(1, embed_dim=13)
    message = refusal(vit(0), source.state_dict(), (5, 5))
    for words in ("cls_token (1, 1, 13) where the model has (1, 1, 11)",
                  "pos_embed (1, 26, 13) where the model has (1, 26, 11)",
                  "patch_embed.proj.weight (13, 3, 2, 3) where the model has (11, 3, 2, 3)"):
        assert words in message
    misfits = [name for name in source.state_dict() if not name.startswith("head.")]
    assert f" and {len(misfits) - 5} more; vitinit/train/README.md names" in message


@pytest.mark.parametrize("tensors", [
    {"conv1.weight": drawn(11, 3, 7, 7), "fc.bias": drawn(7)},
    {"head.weight": drawn(7, WIDTH), "head.bias": drawn(7)},        # both fit
    {"stem.weight": drawn(11, 3, 2, 3), "head.bias": drawn(7)},
])
def test_a_checkpoint_of_which_no_more_than_the_classifier_fits_is_refused(tensors):
    message = refusal(vit(0), tensors)
    assert "none of its tensors fits" in message and message.endswith(", ".join(tensors))


# ---------------------------------------------------------------------------------------------
# The same model at another image size
# ---------------------------------------------------------------------------------------------


def small(name: str, size: int | tuple[int, int], **sizes) -> nn.Module:
    """A small model of any family, all random."""
    model = vitinit.build_model(name, num_classes=7, image_size=size, **sizes)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model.eval()


@pytest.mark.parametrize("name, sizes, old, new", [
    ("convmixer_256_8", dict(embed_dim=5, depth=2), 10, (6, 14)),
    ("simple_vit", dict(embed_dim=12, depth=1, num_heads=3), 10, (6, 14)),
    ("swin_tiny", dict(embed_dim=6, depths=(2, 1), num_heads=(1, 2), window_size=3), 24, (48, 72))])
def test_a_model_that_knows_no_size_takes_any_with_its_own_fixed_positions(name, sizes, old, new):
    model, resized = small(name, old, **sizes), small(name, new, **sizes)
    for buffer in (*model.buffers(), *resized.buffers()):
        if buffer.is_floating_point() and "simple" not in name:
            buffer.uniform_(1, 2, generator=torch.Generator().manual_seed(7))   # batch statistics
    fixed = {key: value for key, value in snapshot(resized).items() if key == "pos_embed"}
    next(model.parameters()).data += 1.0             # else they are equal to begin with
    start_from(resized, model.state_dict(), PATH, model.grid)
    assert_equal(resized, snapshot(model) | fixed)
    assert resized(torch.zeros(1, 3, *new)).shape == (1, 7)


@pytest.mark.parametrize("name, sizes, bound", [
    ("mixer_s32", dict(embed_dim=4, depth=1, patch_size=4), "blocks.0.mlp_tokens.fc1.weight"),
    ("swin_tiny", dict(embed_dim=6, depths=(1, 1), num_heads=(1, 2), window_size=4),
     "layers.1.blocks.0.attn.relative_position_bias_table")])
def test_a_model_that_is_bound_to_its_size_is_refused(name, sizes, bound):
    """Swin where its windows were cut down to a small grid: 2 of 4 tokens in the last stage."""
    model, resized = small(name, 16, **sizes), small(name, 32, **sizes)
    assert f"other shape: {bound} (" in refusal(resized, model.state_dict(), model.grid)


# ---------------------------------------------------------------------------------------------
# From a file
# ---------------------------------------------------------------------------------------------


def starting_from(path: Path, weights: str) -> Recipe:
    recipe = load_recipe(RECIPES / "quickstart.toml")
    return replace(recipe, init=replace(recipe.init, checkpoint=str(path), checkpoint_weights=weights))


@pytest.mark.parametrize("weights", ["model", "ema"])
def test_a_runs_folder_means_its_last_checkpoint_with_its_grid(tmp_path, weights):
    trained, average = vit(1, grid=(3, 5)), vit(2, grid=(3, 5))
    save_atomically({"model": trained.state_dict(), "grid": trained.grid,
                     "ema": Ema(average, decay=0.5, warmup=False).state_dict()},
                    tmp_path / "last.pt")
    source = {"model": trained, "ema": average}[weights]
    expected = vit(0, grid=(5, 3))
    start_from(expected, source.state_dict(), PATH, (3, 5))
    for path in (tmp_path, tmp_path / "last.pt"):
        model = vit(0, grid=(5, 3))
        [line] = fine_tune(model, starting_from(path, weights))[:1]
        assert_equal(model, expected.state_dict())
        assert "pos_embed 3×5 → 5×3 resized" in line
