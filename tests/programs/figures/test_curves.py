"""Figures are written with the right contents, or refused in one line that says why."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitinit.mixing import mean_kernel, mixing_matrices
from vitinit.mixing.filters import ordered_offsets
from vitinit.programs.figures import augmentation, data, program as figures
from vitinit.programs.figures.subjects import fresh, photographs
from vitinit.programs.shared import curves
from vitinit.programs.shared.groups import Group
from vitinit.programs.shared.plot import LOOKS
from vitinit.recipe.files import load_recipe


def run(*arguments: object) -> None:
    assert figures.main(list(map(str, arguments))) == 0


def test_kernels_are_the_mean_attention_by_offset_of_all_images(tmp_path, panels):
    run("kernels", "--init", "default", "impulse", "--count", 3, "--out", tmp_path / "kernels.png")
    shown = [axis.images[0] for axis in panels if axis.images]
    (subject,) = fresh(["quickstart"], ["impulse"], seed=None, sets=figures.VARIANT)
    matrices = mixing_matrices(subject.model, photographs(None, 3, subject.recipe))[0]
    kernels = mean_kernel(matrices, subject.model.grid, 3).mean(0)
    for image, kernel, offset in zip(shown[9:], kernels, ordered_offsets(3), strict=True):
        np.testing.assert_allclose(image.get_array(), kernel, atol=1e-6)
        assert divmod(int(kernel.argmax()), 7) == (3 + offset[0], 3 + offset[1])
        assert image.get_extent() == [-3.5, 3.5, 3.5, -3.5]


def test_a_curve_is_the_mean_over_seeds_and_its_band_reaches_from_lowest_to_highest(
    tmp_path, written_run, panels, capsys
):
    """What was drawn is read back from matplotlib's own objects; unfinished runs are left out."""
    runs = [
        written_run("a-0", [10.0, None, 50.0], init="impulse"),
        written_run("a-1", [26.0, None, 58.0], init="impulse", seed=1),
        written_run("b-1", [9.0], epochs=3, seed=1),
        written_run("b-0", [15.0, 30.0, 31.0]),
    ]
    run("curves", *runs, "--out", tmp_path / "curves.png")
    assert f"left out, not finished: {runs[2]}, 1 of 3 epochs" in capsys.readouterr().out
    (axis,) = panels
    assert [line.get_label() for line in axis.lines] == ["impulse (2 seeds)", "default (1 seed)"]
    assert axis.lines[0].get_xydata().tolist() == [[1.0, 18.0], [3.0, 54.0]]
    assert axis.lines[1].get_xydata().tolist() == [[1.0, 15.0], [2.0, 30.0], [3.0, 31.0]]
    corners = {tuple(corner) for corner in axis.collections[0].get_paths()[0].vertices.tolist()}
    assert corners == {(1.0, 10.0), (1.0, 26.0), (3.0, 50.0), (3.0, 58.0)}
    assert len(axis.collections) == 1  # a single seed has no band
    assert [(line.get_color(), line.get_linestyle()) for line in axis.lines] == [
        LOOKS["impulse"],
        LOOKS["default"],
    ]
    run("curves", runs[3], "--out", tmp_path / "curves.png")
    run("curves", written_run("c-0", [7.0]), "--out", tmp_path / "curves.png")
    assert [axis.figure.get_suptitle() for axis in panels] == [
        "Top-1 by epoch: mean over seeds, band from lowest to highest",
        *["Top-1 by epoch"] * 2,
    ]
    one, (low, high) = panels[-1], panels[-1].get_xlim()  # a point above the 1
    assert [tick for tick in one.get_xticks() if low <= tick <= high] == [1.0]
    assert one.lines[0].get_marker() == "."


def test_top1_across_a_key_has_a_line_per_experiment_and_a_bar_over_its_seeds(
    tmp_path, written_run, panels, complains
):
    def few(images: int) -> tuple[str]:
        return (f"optim.global_batch={images}",)

    runs = [
        written_run("a-0", [10.0, 50.0], sets=few(20)),
        written_run("a-1", [26.0, 58.0], sets=few(20), seed=1),
        written_run("b-0", [15.0, 70.0], sets=(*few(10), "eval.every_epochs=7")),
        written_run("c-0", [11.0, 31.0], sets=few(10), init="impulse"),
        written_run("c-1", [11.0, 33.0], sets=few(40), init="impulse"),
    ]
    run("curves", "--across", "optim.global_batch", *runs, "--out", tmp_path / "across.png")
    (axis,) = panels
    labels = axis.get_legend_handles_labels()[1]
    assert labels == ["default", "impulse"]
    (default, _, (bars,)), (impulse, _, _) = axis.containers
    assert default.get_xydata().tolist() == [[10.0, 70.0], [20.0, 54.0]]
    assert impulse.get_xydata().tolist() == [[10.0, 31.0], [40.0, 33.0]]
    assert [part.tolist() for part in bars.get_segments()] == [
        [[10.0, 70.0], [10.0, 70.0]],
        [[20.0, 50.0], [20.0, 58.0]],
    ]
    complains("init.name is 'default' in default", "curves", *runs, "--across", "init.name")
    complains("differ in optim.eps alone", "curves", *runs, "--across", "optim.eps")
    runs.append(written_run("d-0", [1.0, 2.0], sets=few(20), start={"git_commit": "decaf"}))
    complains("commit c0ffee and", "curves", *runs, "--across", "optim.global_batch")
    run(
        "curves",
        "--across",
        "training images",
        "--out",
        tmp_path / "images.png",
        *(
            written_run(
                f"n-{count}",
                [5.0 * count],
                start={"data": {"training images": count}},
                sets=(f"data.images_per_class={each}", "schedule.epochs=1"),
            )
            for count, each in ((7, 3), (13, 0))
        ),
    )  # 0: all images
    assert panels[-1].containers[0][0].get_xydata().tolist() == [[7.0, 35.0], [13.0, 65.0]]
    run(
        "curves",
        "--across",
        "schedule.epochs",
        "--out",
        tmp_path / "epochs.png",
        *(
            written_run(
                f"e-{epochs}-{each}", [5.0] * epochs, sets=(f"data.images_per_class={each}",)
            )
            for epochs in (1, 2)
            for each in (3, 5)
        ),
    )
    axis = panels[-1]
    assert axis.get_legend_handles_labels()[1] == [
        "default, 3 images per class",
        "default, 5 images per class",
    ]
    assert [axis.get_xlabel(), axis.figure.get_suptitle()] == [
        "epochs",
        "Validation top-1 by epochs",
    ]


def test_the_keys_of_a_label_are_in_words():
    group = Group(
        ("r", "impulse"),
        {
            "optim.name": "muon",
            "optim.betas": [0.9, 0.95],
            "init.options.a_b": None,
            "schedule.epochs": 1,
            "model.options.num_heads": 3,
        },
        "commit c0ffee",
        {},
    )
    assert group.label == (
        'r, impulse, optim.name = "muon", optim.betas = [0.9, 0.95], without init.options.a_b'
        ", schedule.epochs = 1, model.options.num_heads = 3, commit c0ffee"
    )
    assert group.in_words() == (
        "r, impulse, muon, betas [0.9, 0.95], without a b, 1 epoch, 3 heads, commit c0ffee"
    )
    assert group.in_words(("optim.betas", "init.options.a_b")) == (
        "r, impulse, muon, 1 epoch, 3 heads, commit c0ffee"
    )


def with_steps(folder: Path, losses: list[float], **values: list[float | None]) -> Path:
    rows = [
        {
            "step": 10 * number,
            "loss": loss,
            "lr": 1e-3 * number,
            "grad_norm": 0.5 + number,
            "scale": None,
            "images_per_second": 100.0,
            "waiting": 0.25,
        }
        | {key: column[number - 1] for key, column in values.items()}
        for number, loss in enumerate(losses, 1)
    ]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_steps_are_drawn_as_far_as_all_seeds_of_a_group_have_come(tmp_path, written_run, panels):
    """The runs are unfinished; where fp16 overflowed there is no gradient norm."""
    run(
        "curves",
        "--steps",
        "--out",
        tmp_path / "steps.png",
        with_steps(written_run("a-0", [1.0], epochs=9, init="impulse"), [3.0, 2.0, 1.0]),
        with_steps(
            written_run("a-1", [1.0], epochs=9, init="impulse", seed=1),
            [5.0, 3.0],
            grad_norm=[None, 4.5],
        ),
        with_steps(written_run("b-0", [1.0, 2.0], epochs=9), [7.0]),
    )
    loss, lr, norm = panels
    assert [axis.get_title() for axis in panels] == [
        "training loss",
        "learning rate",
        "gradient norm",
    ]
    assert [line.get_label() for line in loss.lines] == ["impulse (2 seeds)", "default (1 seed)"]
    assert loss.lines[0].get_xydata().tolist() == [[10.0, 4.0], [20.0, 2.5]]
    assert loss.lines[1].get_xydata().tolist() == [[10.0, 7.0]]
    corners = {tuple(corner) for corner in loss.collections[0].get_paths()[0].vertices.tolist()}
    assert corners == {(10.0, 3.0), (10.0, 5.0), (20.0, 2.0), (20.0, 3.0)}
    assert lr.lines[0].get_ydata().tolist() == [1e-3, 2e-3]
    first, second = norm.lines[0].get_ydata().tolist()
    assert math.isnan(first) and second == 3.5


def test_a_long_line_is_drawn_as_means_of_neighbours_and_none_is_refused(
    tmp_path, written_run, panels, complains, monkeypatch
):
    monkeypatch.setattr(curves, "POINTS", 3)
    run(
        "curves",
        "--steps",
        "--out",
        tmp_path / "steps.png",
        with_steps(
            written_run("a", [1.0]),
            [1.0, 2.0, 6.0, 4.0, 5.0, 9.0, 8.0],
            grad_norm=[None, None, None, 2.0, None, 4.0, None],
        ),
    )
    loss, _, norm = panels
    assert loss.lines[0].get_xydata().tolist() == [[20.0, 3.0], [50.0, 6.0], [70.0, 8.0]]
    first, second, third = norm.lines[0].get_ydata().tolist()
    assert math.isnan(first) and second == 3.0 and math.isnan(third)
    assert norm.figure.get_suptitle() == "Every tenth step, 3 to a point"
    run("curves", written_run("c", [1.0, 3.0, None, 8.0, 4.0]), "--out", tmp_path / "curves.png")
    assert panels[-1].lines[0].get_xydata().tolist() == [[1.5, 2.0], [4.5, 6.0]]
    assert panels[-1].figure.get_suptitle() == "Top-1 by epoch, 2 to a point"
    complains(
        "b: no steps on record to draw; steps.jsonl has a line from the tenth on",
        "curves",
        "--steps",
        written_run("b", [1.0]),
    )
    steps = with_steps(written_run("d", [1.0]), [1.0, 2.0]) / "steps.jsonl"
    steps.write_text(
        steps.read_text().replace('"loss": 2.0, ', "").replace('"lr": ', '"lr": -1e308, "x": ')
    )
    complains("cannot be drawn: ", "curves", "--steps", steps.parent)


def test_operations_show_the_photograph_and_what_each_makes_of_it(tmp_path, monkeypatch, panels):
    """The image has one colour, so a tile's colour is given by the operation's formula."""
    plain = torch.tensor([200, 100, 40], dtype=torch.uint8).view(3, 1, 1).expand(3, 31, 37)
    monkeypatch.setattr(augmentation, "decode_image", lambda path: plain)
    run("operations", "plain.png", "--out", tmp_path / "operations.png")
    tiles = [axis.images[0].get_array() for axis in panels if axis.images]
    colours = {tuple(colour) for tile in tiles for colour in tile[::7, ::7].reshape(-1, 3).tolist()}
    assert {
        (200, 100, 40),  # the original
        (55, 155, 215),  # inverted; solarised above 26, too
        (128, 0, 0),  # posterised to one bit
        (200, 199, 139),  # 99 added below 128
        (255, 181, 72),  # 1.81 times as bright
        (124, 116, 104),
    } <= colours  # the fill colour outside the image


def test_a_batch_figure_is_determined_by_its_seed(tmp_path, image_tree, panels):
    for seed in (0, 0, 1):
        run("batch", "--data-dir", image_tree, "--seed", seed, "--out", tmp_path / "batch.png")
    tiles = [axis.images[0].get_array().tobytes() for axis in panels]  # of three figures
    assert tiles[:12] == tiles[12:24] and len({*tiles}) == 24
    for row, kind in (panels[:6], "mixup"), (panels[6:12], "cutmix"):
        assert [axis.get_ylabel() for axis in row] == [kind, *[""] * 5]
        shares = {axis.get_title().split(" × ")[0] for axis in row}
        (share,) = map(float, shares)  # all images of a batch have one
        assert [axis.get_title() for axis in row] == [
            f"{share:.2f} × {place} + {1 - share:.2f} × {7 - place}" for place in range(1, 7)
        ]


def test_a_tile_is_the_image_in_its_partners_share_and_in_its_place(tmp_path, panels, monkeypatch):
    """Images of one level each, which nothing else changes: a mixup of two is their mean by λ, and
    of a cutmix the share 1 − λ of the pixels has the partner's level."""
    levels = [10 + 20 * number for number in range(12)]
    for number, level in enumerate(levels):
        Image.new("RGB", (9, 9), (level,) * 3).save(tmp_path / f"{number:02}.png")
    deit = load_recipe("deit_base")
    plain = dict(
        augment=replace(deit.augment, erase_probability=0.0),
        rand_augment=replace(deit.rand_augment, layers=0),
        mix=replace(deit.mix, probability=1.0),
    )
    monkeypatch.setattr(augmentation, "load_recipe", lambda name: replace(deit, **plain))
    run("batch", "--data-dir", tmp_path, "--out", tmp_path / "batch.png")
    for number, axis in enumerate(panels):
        tile = 255 * axis.images[0].get_array()[..., 0]
        row, column = divmod(number, 6)
        own, other = levels[6 * row + column], levels[6 * row + 5 - column]
        share = float(axis.get_title().split(" × ")[0])
        if row == 0:
            np.testing.assert_allclose(tile, share * own + (1 - share) * other, atol=2.0)
        else:
            assert {*np.unique(tile.round(3)).tolist()} <= {own, other}
            assert abs((tile.round(3) == own).mean() - share) < 0.01


def test_the_sheet_of_a_data_set_shows_each_class_with_its_number_of_images(
    image_tree, tmp_path, panels, capsys, monkeypatch
):
    for name in ("03", "04", "05"):
        (image_tree / "train" / "green" / f"{name}.png").unlink()
    train = image_tree / "train"
    shutil.copy(train / "red" / "02.png", train / "blue" / "copy.png")
    (train / "blue" / "00.png").write_bytes(b"damaged")  # the first of its class
    run("data", "--data-dir", image_tree, "--out", tmp_path / "sheet.png")
    examples, bars = panels
    assert [text.get_text() for text in bars.texts] == [" 18", " 17", " 14"]
    assert [label.get_text() for label in examples.get_yticklabels()] == ["blue", "red", "green"]
    pixels = examples.images[0].get_array()
    rows = [pixels[start : start + 64] for start in range(0, 192, 64)]
    brightest = [int(row[:, 64:].mean((0, 1)).argmax()) for row in rows]
    assert brightest == [2, 0, 1] and pixels.shape == (192, 512, 3)
    for number, row in enumerate(rows):  # eight different images, of one of them grey
        tiles = [row[:, start : start + 64] for start in range(0, 512, 64)]
        assert len({tile.tobytes() for tile in tiles}) == 8
        assert (tiles[0] == 200).all() == (number == 0)
    assert f"{train}/blue/copy.png\n{train}/red/02.png\n" in capsys.readouterr().out
    listed, other = train / "red" / "02.png", train / "red" / "03.png"
    (tmp_path / "images.csv").write_text(f"path,label\n{listed},a\n{other},b\n")
    before = listed.read_bytes()
    assert figures.main(["data", "--data-dir", str(tmp_path), "--out", str(listed)]) == 2
    assert listed.read_bytes() == before
    monkeypatch.setattr(data, "MOST_CLASSES", 2)
    run("data", "--data-dir", image_tree, "--out", tmp_path / "few.png")
    assert [text.get_text() for text in panels[-1].texts] == [" 18", " 14"]
    assert "of 3 classes; 1 classes in between" in panels[-1].figure.get_suptitle()
