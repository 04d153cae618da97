"""Fine-tuning: what fits is copied to the bit, what does not is resized, reported or refused."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
import torch.nn.functional as F
from refused import refused
from small_models import SMALL, redraw, state_of
from torch import Tensor, nn

import vitinit
from vitinit.base.files import CheckpointError
from vitinit.models.layers import sincos_position_embedding
from vitinit.recipe.files import RECIPES, load_recipe, overrides
from vitinit.runs.folder import save_atomically
from vitinit.runs.model import build, task_of
from vitinit.runs.start import fine_tune
from vitinit.runs.transfer import start_from
from vitinit.train.state import Ema

PATH = Path("runs/a/last.pt")
WIDTH = 11


def vit(seed: int, *, grid: tuple[int, int] = (5, 5), classes: int = 7, **sizes) -> nn.Module:
    sizes = dict(embed_dim=WIDTH, depth=2, num_heads=1) | sizes
    return (
        redraw(
            vitinit.build_model(
                "vit_tiny",
                num_classes=classes,
                patch_size=(2, 3),
                image_size=(2 * grid[0], 3 * grid[1]),
                **sizes,
            ),
            first=100 * seed,
        )
        .float()
        .eval()
    )


def resized_by_hand(patches: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """(1, h·w, D) → (1, h'·w', D), one channel after another."""
    if old == new:
        return patches
    channels = [
        F.interpolate(
            patches[0, :, channel].reshape(1, 1, *old), size=new, mode="bicubic", antialias=True
        ).flatten()
        for channel in range(patches.shape[2])
    ]
    return torch.stack(channels, dim=1)[None]


def assert_equal(
    model: nn.Module, expected: dict[str, Tensor], positions: Tensor | None = None
) -> None:
    """Every tensor equals the expected one to the bit; positions that were resized, to 1e-6."""
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        if name == "pos_embed" and positions is not None:
            torch.testing.assert_close(value, positions, rtol=0, atol=1e-6)
        else:
            assert torch.equal(value, expected[name]), name


def refusal(
    model: nn.Module, tensors: dict[str, Tensor], grid: tuple[int, int] | None = None
) -> str:
    """The one-line error of the transfer; also checks that the model has not changed."""
    before = state_of(model)
    message = refused(CheckpointError, start_from, model, tensors, PATH, grid)
    assert_equal(model, before)
    assert message.startswith(f"{PATH}: ")
    return message


def test_a_classifier_of_other_classes_stays_as_the_init_drew_it():
    """All else is the checkpoint's, whose half precision is read into the model's own."""
    model, source = vit(0, classes=13), dict(vit(1, classes=7).half().state_dict())
    head = {name: value for name, value in state_of(model).items() if name.startswith("head.")}
    report = start_from(model, source, PATH, None)
    assert_equal(model, {name: value.float() for name, value in source.items()} | head)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert report.loaded == [name for name in source if name not in head] and report.resized == []
    assert str(report) == (
        f"{len(report.loaded)} tensors loaded; dropped: head.weight (7, 11), "
        "head.bias (7,); as the init drew them: head.weight, head.bias"
    )


def test_rows_of_both_classifiers_are_those_of_the_same_classes():
    model, source = (
        vit(seed, classes=classes, distilled=True) for seed, classes in ((0, 3), (1, 7))
    )
    own, tensors = state_of(model), state_of(source)
    report = start_from(model, tensors, PATH, None, [5, None, 0])
    for name in ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias"):
        expected = torch.stack([tensors[name][5], own[name][1], tensors[name][0]])
        assert torch.equal(model.state_dict()[name], expected) and name in report.loaded
    same = vit(2, distilled=True)
    own = state_of(same)
    report = start_from(same, tensors, PATH, None, [None] * 7)  # none, though they are as many
    assert (
        {name.partition(" ")[0] for name in report.dropped}
        == {*report.kept}
        == {name for name in own if name.startswith("head")}
    )
    assert all(torch.equal(same.state_dict()[name], own[name]) for name in report.kept)


ANIMALS = ("cat", "dog", "eel")


@pytest.mark.parametrize(
    "choice, data, known, classes, words, rows",
    [
        (
            "match",
            "photos",
            ANIMALS,
            ("ant", "eel", "cat"),
            "2 of 3 rows by class name, 1 as drawn",
            [None, 2, 0],
        ),
        (
            "match",
            "imagenet",
            ANIMALS,
            ("ant", "bee", "cow"),
            "0 of 3 rows by class name, 3 as drawn",
            None,
        ),
        (
            "match",
            "photos",
            ("cat", "dog", "cat"),
            ("dog", "cat"),
            "1 of 2 rows by class name, 1 as d",
            [1, None],
        ),
        (
            "match",
            "photos",
            ("0", "1", "10"),
            ("0", "10", "2"),
            "2 of 3 rows by class name, 1 as drawn",
            [0, 2, None],
        ),
        (
            "match",
            "photos",
            None,
            ANIMALS,
            "as drawn: the checkpoint names no classes; init.checkpoint_classes=FILE does, a name per line",
            None,
        ),
        ("match", "imagenet", None, ANIMALS, "all 3 rows, taken for the same classes", [0, 1, 2]),
        (
            "match",
            "imagenet",
            None,
            ("a", "b"),
            "as drawn: the checkpoint's has 3 rows, and 2",
            None,
        ),
        ("keep", "photos", ANIMALS, ("ant", "eel", "cat"), "all 3 rows, taken for", [0, 1, 2]),
        ("drop", "imagenet", ANIMALS, ANIMALS, "as drawn: init.checkpoint_head is drop", None),
        *(
            ("match", "photos", (known, "dog", "eel"), ("dog", wanted), "2 of 2 rows by", [1, 0])
            for known, wanted in (("caf\u00e9", "cafe\u0301"), ("cafe\u0301", "caf\u00e9"))
        ),
    ],
)
def test_which_rows_a_run_starts_from(choice, data, known, classes, words, rows, tmp_path):
    recipe = load_recipe(
        RECIPES / "deit_tiny.toml",
        overrides(sets=[f"init.checkpoint={tmp_path}/a.pt", f"init.checkpoint_head={choice}"]),
    )
    recipe = replace(recipe, data=replace(recipe.data, name=data))
    model, source = vit(0, classes=len(classes)), vit(1, classes=3)
    torch.save({"model": source.state_dict(), "classes": known}, tmp_path / "a.pt")
    own, tensors = state_of(model), state_of(source)
    _, line, *_ = fine_tune(model, recipe, task_of(recipe, classes))
    assert line.startswith(f"head    {words}")
    for row, now, before in zip(
        rows or [None] * len(classes), model.head.weight, own["head.weight"], strict=True
    ):
        assert torch.equal(now, before if row is None else tensors["head.weight"][row])


def started(classes: tuple[str, ...], folder: Path, known, *sets: str) -> list[int]:
    """The rows of a checkpoint's classifier that a run on these classes starts from."""
    recipe = load_recipe(
        RECIPES / "deit_tiny.toml", overrides(sets=[f"init.checkpoint={folder}/a.pt", *sets])
    )
    recipe = replace(recipe, data=replace(recipe.data, name="photos"))
    model, source = vit(0, classes=len(classes)), vit(1, classes=3)
    tensors = state_of(source)
    torch.save(
        tensors | {} if known is None else {"model": tensors, "classes": known}, folder / "a.pt"
    )
    fine_tune(model, recipe, task_of(recipe, classes))
    rows = tensors["head.weight"].tolist()
    return [rows.index(row.tolist()) for row in model.head.weight]


def test_a_file_names_the_classes_of_a_checkpoint_that_does_not(tmp_path):
    (tmp_path / "names.txt").write_text("1\n2\n10\n")
    file = f"init.checkpoint_classes={tmp_path}/names.txt"
    assert started(("1", "10", "2"), tmp_path, None, file) == [0, 2, 1]
    message = refused(CheckpointError, started, ("1", "10", "2"), tmp_path, ("1", "2", "3"), file)
    assert message.endswith(
        f"names its classes itself; {tmp_path}/names.txt is for checkpoints that do not"
    )
    (tmp_path / "names.txt").write_text("1\n2\n")
    message = refused(CheckpointError, started, ("1", "10", "2"), tmp_path, None, file)
    assert message.endswith("names 2 classes, and its classifier has 3 rows")


def test_rows_are_kept_in_order_only_where_the_classes_have_that_order(tmp_path):
    keep, known = "init.checkpoint_head=keep", ("1", "2", "10")
    assert started(known, tmp_path, known, keep) == [0, 1, 2]
    assert started(("a", "b", "c"), tmp_path, known, keep) == [0, 1, 2]  # under other names
    message = refused(CheckpointError, started, ("1", "10", "2"), tmp_path, known, keep)
    assert "in another order" in message and "init.checkpoint_head=match" in message


def test_a_checkpoint_of_another_known_size_says_which(tmp_path):
    """Where the recipe has sizes of its own, the tensors are named that do not fit."""
    path = tmp_path / "a.pth"
    torch.save(vitinit.build_model("vit_tiny", num_classes=3, image_size=32).state_dict(), path)
    for name, sets, expected in (
        ("vit_small", [], "with model.name = vit_small; expected --set model.name=vit_tiny"),
        ("vit_tiny", ["model.options.depth=1"], "name the options for known ones"),
    ):
        sets = [f"model.name={name}", f"init.checkpoint={path}", "data.image_size=32", *sets]
        recipe = load_recipe("deit_base", overrides(sets=sets))
        message = refused(CheckpointError, fine_tune, build(recipe), recipe, task_of(recipe))
        assert (f"{path}: of a vit_tiny, by its width and depth" in message) == (
            "depth" not in sets[-1]
        )
        assert message.endswith(expected)


def test_position_embeddings_of_another_grid_are_resized_and_nothing_else_is():
    """Any grids, stated or, if square, recognised; one of them with as many positions as before."""
    grids = [((3, 5), (3, 5), False), ((3, 5), (5, 3), True)]
    for number in range(6):
        sides = [Random(f"{number} {side}").choice((2, 3, 5, 7)) for side in range(4)]
        grids.append(((sides[0], sides[0]), (sides[2], sides[3]), False))
        grids.append(((sides[0], sides[1]), (sides[2], sides[3]), True))
    for number, (old, new, stated) in enumerate(grids):
        pool, before = (("class", 1), ("mean", 0))[number % 2]
        model, source = vit(0, grid=new, pool=pool), vit(1, grid=old, pool=pool)
        tensors = state_of(source)
        report = start_from(model, source.state_dict(), PATH, old if stated else None)
        expected = resized_by_hand(tensors["pos_embed"][:, before:], old, new)
        assert_equal(model, tensors, torch.cat([tensors["pos_embed"][:, :before], expected], dim=1))
        assert torch.equal(model.pos_embed[:, :before], tensors["pos_embed"][:, :before])
        change = [] if old == new else [f"pos_embed {old[0]}×{old[1]} → {new[0]}×{new[1]}"]
        assert (report.resized, report.dropped, report.kept) == (change, [], [])
        assert report.loaded == [name for name in tensors if not change or name != "pos_embed"]
        assert_equal(source, tensors)  # the checkpoint's tensors are read only


def test_a_class_token_that_the_checkpoint_lacks_stays_with_its_position_as_the_init_drew_it():
    model, source = vit(0, grid=(7, 2), pool="class"), vit(1, grid=(3, 5), pool="mean")
    own, tensors = state_of(model), state_of(source)
    report = start_from(model, tensors, PATH, (3, 5))
    positions = resized_by_hand(tensors["pos_embed"], (3, 5), (7, 2))
    assert_equal(
        model,
        tensors | {"cls_token": own["cls_token"]},
        torch.cat([own["pos_embed"][:, :1], positions], dim=1),
    )
    assert (report.dropped, report.kept) == ([], ["cls_token"])


@pytest.mark.parametrize("new, pool, ours", [((5, 5), "class", 1), ((3, 7), "mean", 0)])
def test_a_distilled_checkpoint_gives_a_plain_model_all_but_its_second_token(pool, ours, new):
    model, tensors = vit(0, grid=new, pool=pool), state_of(vit(1))
    tensors |= {
        "dist_token": torch.randn(1, 1, WIDTH),
        "pos_embed": torch.randn(1, 27, WIDTH),
        "head_dist.weight": torch.randn(7, WIDTH),
        "head_dist.bias": torch.randn(7),
    }
    report = start_from(model, tensors, PATH, None)
    positions = resized_by_hand(tensors["pos_embed"][:, 2:], (5, 5), new)
    assert_equal(
        model,
        {name: tensors[name] for name in model.state_dict()},
        torch.cat([tensors["pos_embed"][:, :ours], positions], dim=1),
    )
    assert report.kept == [] and set(report.dropped) == {
        "dist_token",
        "head_dist.weight",
        "head_dist.bias",
        *["cls_token"] * (1 - ours),
    }


@pytest.mark.parametrize("old, kind", [((5, 5), "sincos"), ((3, 7), "learned")])
def test_fixed_position_embeddings_stay_and_are_reported(kind, old):
    width = 20  # which 4 divides
    model = vit(0, embed_dim=width, pos_embed="sincos")
    source = vit(1, grid=old, embed_dim=width, pos_embed=kind)
    report = start_from(model, source.state_dict(), PATH, old)
    fixed = torch.cat([torch.zeros(1, width), sincos_position_embedding((5, 5), width)])[None]
    assert_equal(model, source.state_dict() | {"pos_embed": fixed})
    assert (report.dropped, report.kept) == (["pos_embed (the model's are fixed)"], ["pos_embed"])


def test_what_does_not_fit_is_refused_with_its_names_and_shapes():
    source = vit(1, embed_dim=13)
    message = refusal(vit(0), source.state_dict(), (5, 5))
    for words in (
        "cls_token (1, 1, 13) where the model has (1, 1, 11)",
        "pos_embed (1, 26, 13) where the model has (1, 26, 11)",
        "patch_embed.proj.weight (13, 3, 2, 3) where the model has (11, 3, 2, 3)",
    ):
        assert words in message
    misfits = [name for name in source.state_dict() if not name.startswith("head.")]
    assert f" and {len(misfits) - 5} more; the pages vitinit/models/README.md and" in message
    assert message.count(" where the model has ") == 5
    for tensors in (
        {"conv1.weight": torch.ones(11, 3, 7, 7), "fc.bias": torch.ones(7)},
        {"head.weight": torch.ones(7, WIDTH), "head.bias": torch.ones(7)},
    ):  # both fit
        message = refusal(vit(0), tensors)
        assert "none of its tensors fits" in message and message.endswith(", ".join(tensors))
    flat = state_of(vit(1, pool="class")) | {"cls_token": torch.ones(WIDTH)}
    assert "other shape: cls_token (11,) where the model has (1, 1, 11)" in refusal(vit(0), flat)
    assert "surplus: cls_token" in refusal(
        vit(0, pool="mean", num_registers=1, fc_norm=True),
        flat | {"fc_norm.weight": torch.ones(WIDTH)},
    )
    for more, name in (({"depth": 3}, "blocks.2.norm1."), ({"num_registers": 2}, "reg_token")):
        assert f"surplus: {name}" in refusal(vit(0), state_of(vit(1, **more)))
    for grid, words in ((None, "no square grid"), ((3, 3), "no 3×3 grid")):
        message = refusal(vit(0, grid=(5, 7)), state_of(vit(1, grid=(2, 7))), grid)
        assert "pos_embed has embeddings for 14 patches" in message and words in message


def small(name: str, size: int | tuple[int, int], sizes: dict, seed: int = 0) -> nn.Module:
    model = vitinit.build_model(name, num_classes=7, image_size=size, **sizes)
    return redraw(model, first=100 * seed).float().eval()


@pytest.mark.parametrize(
    "name, sizes, old, new",
    [
        ("convmixer_256_8", dict(embed_dim=5, depth=2), 10, (6, 14)),
        ("simple_vit", dict(embed_dim=12, depth=1, num_heads=3), 10, (6, 14)),
        (
            "swin_tiny",
            dict(embed_dim=6, depths=(2, 1), num_heads=(1, 2), window_size=3),
            24,
            (48, 72),
        ),
    ],
)
def test_a_model_that_knows_no_size_takes_any_with_its_own_fixed_positions(name, sizes, old, new):
    model, resized = small(name, old, sizes, 1), small(name, new, sizes)
    fixed = {key: value for key, value in state_of(resized).items() if key == "pos_embed"}
    start_from(resized, model.state_dict(), PATH, model.grid)
    assert_equal(resized, state_of(model) | fixed)
    assert resized(torch.zeros(1, 3, *new)).shape == (1, 7)


@pytest.mark.parametrize(
    "name, sizes, bound",
    [
        ("mixer_s32", dict(embed_dim=4, depth=1, patch_size=4), "blocks.0.mlp_tokens.fc1.weight"),
        (
            "swin_tiny",
            dict(embed_dim=6, depths=(1, 1), num_heads=(1, 2), window_size=4),
            "layers.1.blocks.0.attn.relative_position_bias_table",
        ),
    ],
)
def test_a_model_that_is_bound_to_its_size_is_refused(name, sizes, bound):
    """Swin where its windows were cut down to a small grid: 2 of 4 tokens in the last stage."""
    model, resized = small(name, 16, sizes), small(name, 32, sizes)
    assert f"other shape: {bound} (" in refusal(resized, model.state_dict(), model.grid)


def test_a_runs_folder_means_its_last_checkpoint_with_its_grid(tmp_path):
    trained, average = vit(1, grid=(3, 5)), vit(2, grid=(3, 5))
    save_atomically(
        {
            "model": trained.state_dict(),
            "grid": trained.grid,
            "ema": Ema(average, decay=0.5, warmup=False).state_dict(),
        },
        tmp_path / "last.pt",
    )
    recipe = load_recipe(RECIPES / "quickstart.toml")
    for weights, path, source in (
        ("model", tmp_path, trained),
        ("ema", tmp_path / "last.pt", average),
    ):
        model, expected = vit(0, grid=(5, 3)), vit(0, grid=(5, 3))
        start_from(expected, source.state_dict(), PATH, (3, 5))
        changed = replace(
            recipe,
            init=replace(
                recipe.init,
                checkpoint=str(path),
                checkpoint_weights=weights,
                checkpoint_head="keep",
            ),
        )
        line, *_ = fine_tune(model, changed, task_of(changed))
        assert_equal(model, expected.state_dict())
        assert "pos_embed 3×5 → 5×3 resized" in line


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("name", ["vit_tiny", "swin_tiny", "mixer_s16", "convmixer_256_8"])
@torch.no_grad()
def test_weights_for_rgb_compute_the_same_of_equal_channels(name, count):
    """So those of RGB of a grey image, repeated, for one channel; and no other tensor changes."""
    rgb, other = (
        redraw(
            vitinit.build_model(
                name, num_classes=7, image_size=16, in_channels=channels, **SMALL[name]
            ),
            first=channels,
        )
        .float()
        .eval()
        for channels in (3, count)
    )
    before = state_of(rgb)
    transfer = start_from(other, before, PATH, rgb.grid)
    grey = torch.randn(11, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = rgb(grey.expand(-1, 3, -1, -1))
    assert expected.std() > 1e-3
    torch.testing.assert_close(other(grey.expand(-1, count, -1, -1)), expected, rtol=0, atol=1e-4)
    [words] = transfer.resized
    assert (
        f"{words.partition(' ')[0]} 3 → {count} channels (each the sum of all / {count})" == words
    )
    assert f"; {words} resized" in str(transfer)
    for layer, value in other.state_dict().items():
        assert torch.equal(value, before[layer]) == (layer not in words), layer


def test_weights_of_a_simple_vit_for_another_number_of_channels_are_refused():
    """Its first norm mixes pixels and channels, so that no tensors of another size compute the same."""
    one, three = (
        vitinit.build_model(
            "simple_vit", num_classes=7, image_size=16, in_channels=channels, **SMALL["simple_vit"]
        )
        for channels in (1, 3)
    )
    assert "other shape: patch_embed.norm1.weight (48,) where the model has (16,), " in refusal(
        one, state_of(three)
    )


def test_positions_of_patches_alone_are_resized_as_deits_code_does_and_lose_no_others():
    """DeiT III fine-tunes at 224 px what was trained at 192, without antialiasing."""
    model = vit(0, grid=(5, 7), prefix_positions=False)
    source = state_of(vit(1, grid=(3, 4), prefix_positions=False))
    start_from(model, source, PATH, (3, 4), antialias=False)
    image = source["pos_embed"].reshape(1, 3, 4, -1).movedim(-1, 1)
    plain = F.interpolate(image, (5, 7), mode="bicubic").flatten(2).mT
    assert_equal(model, source, plain)
    assert not torch.allclose(
        plain, resized_by_hand(source["pos_embed"], (3, 4), (5, 7)), atol=0.01
    )
    with_token = state_of(vit(1, grid=(5, 7)))
    assert refusal(model, with_token, (5, 7)).endswith(
        "pos_embed has 1 more than the patches, for cls_token; "
        "expected model.options.prefix_positions = true"
    )
