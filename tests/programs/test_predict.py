"""vitinit predict: one line per image, in a fixed order, even if some of the files are broken."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refused import refused
from small_models import built, seeded, written

import vitinit
from vitinit.data import images
from vitinit.data.datasets import open_split
from vitinit.data.images import HEIF_REMEDY, DataError
from vitinit.mixing import mixing_matrices
from vitinit.programs import predict as predict_module
from vitinit.programs.shared.plot import BLUE, VERMILION, FigureError, save
from vitinit.runs.trained import Trained

RUN = Path(__file__).parents[1] / "runs" / "data" / "version_12"  # of three colours, 8 px wide


def predicted(*arguments: object) -> int:
    return predict_module.main(list(map(str, arguments)))


@pytest.fixture
def folder(image_tree) -> Path:
    """The seven validation images of each of three classes."""
    return image_tree / "val"


def test_lines_are_the_models_guesses_in_order(folder, monkeypatch, capsys):
    monkeypatch.setattr(predict_module, "BATCH", 4)
    assert predicted(RUN, folder, folder / "red" / "03.png", "--top", 2) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    paths = [*sorted(folder.glob("*/*.png")), folder / "red" / "03.png"]
    trained, right = vitinit.load(RUN), 0
    assert len(lines) == len(paths) == 22
    for path, line in zip(paths, lines):
        (first, one), (second, two) = trained.predict(path, top=2)
        assert line == f"{path}  {first} {100 * one:.1f} %  {second} {100 * two:.1f} %"
        right += first == path.parent.name
    assert 0 < right < 22
    assert last == (
        f"{right} of 22 images are classified as their folder says ({100 * right / 22:.2f} %)"
    )


@pytest.mark.usefixtures("without_heif")
def test_what_a_folder_leaves_out_is_named_once(folder, capsys):
    for name in ("a.HEIC", "b.heic", "c.mov", ".d.heic"):
        (folder / "red" / name).touch()
    assert predicted(RUN, folder) == 0
    assert capsys.readouterr().err == (
        f"vitinit predict: left out: 2 .heic, 1 .mov in {folder}; {HEIF_REMEDY}\n"
    )


def test_dark_images_of_16_bits_are_cautioned_of_once(tmp_path, capsys):
    for number in range(3):
        Image.fromarray(np.full((8, 8), 4095, np.uint16)).save(tmp_path / f"{number}.png")
    assert predicted(RUN, tmp_path) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vitinit predict: warning 3 images of 16 bits were looked at, and their")


def test_a_photograph_that_a_link_leads_to_is_not_replaced(folder, tmp_path, capsys):
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "more").symlink_to(folder / "red")
    out = folder / "red" / "03.png"
    before = out.read_bytes()
    assert predicted(RUN, tmp_path / "linked", "--sheet", out) == 2 and out.read_bytes() == before
    assert "more/03.png, so that file stays as it is" in capsys.readouterr().err


def test_photographs_are_upright_whatever_the_runs_recipe_says(tmp_path, capsys):
    trained = vitinit.load(RUN)
    assert not trained.recipe.data.apply_exif_orientation
    pixels = np.random.default_rng(0).integers(0, 256, (11, 13, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "lying.png", exif=exif)
    Image.fromarray(np.rot90(pixels, -1).copy()).save(tmp_path / "upright.png")
    views = [trained.view(tmp_path / name) for name in ("lying.png", "upright.png")]
    assert torch.equal(*views) and trained.view(Image.open(tmp_path / "lying.png")).equal(views[0])
    assert trained.view((tmp_path / "lying.png").read_bytes()).equal(views[0])
    assert predicted(RUN, tmp_path) == 0
    lying, upright = (line.partition("  ")[2] for line in capsys.readouterr().out.splitlines())
    assert lying == upright


def test_json_holds_every_image(folder, tmp_path, capsys):
    (folder / "red" / "05.png").write_bytes(b"no image")
    strange = tmp_path / "elsewhere" / "a, b\nc.png"
    strange.parent.mkdir()
    os.rename(folder / "blue" / "00.png", strange)
    assert predicted(RUN, strange, folder, "--json", tmp_path / "a.jsonl") == 1
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and f"{strange.parent}/a, b\\nc.png  " in printed.out
    assert f"vitinit predict: {folder}/red/05.png: not a readable image, 8 bytes" in printed.err
    assert printed.out.endswith(f"1 of 21 could not be read\nwrote {tmp_path / 'a.jsonl'}\n")
    objects = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(objects) == 21 and objects[0].keys() == {"image", "classes"}
    trained, paths = vitinit.load(RUN), [strange, *sorted(folder.glob("*/*.png"))]
    for one, path in zip(objects, paths, strict=True):
        assert one["image"] == str(path)
        assert one.get("truth", "elsewhere") == path.parent.name
        if path == folder / "red" / "05.png":
            assert "not a readable image" in one["problem"] and "classes" not in one
        else:
            assert [(found["class"], found["probability"]) for found in one["classes"]] == [
                (name, pytest.approx(share, rel=1e-5)) for name, share in trained.predict(path)
            ]


def test_the_list_of_guesses_is_read_as_a_list(folder, tmp_path, capsys):
    strange = folder / os.fsdecode(b'caf\xe9, "\n.png')
    os.rename(folder / "blue" / "00.png", strange)
    (folder / "red" / "05.png").write_bytes(b"no image")
    Image.new("RGB", (8, 8)).save(tmp_path / "elsewhere.png")
    paths, trained = [*sorted(folder.rglob("*.png")), tmp_path / "elsewhere.png"], vitinit.load(RUN)
    paths.remove(folder / "red" / "05.png")
    assert (
        predicted(RUN, folder, strange, tmp_path / "elsewhere.png", "--csv", folder / "images.csv")
        == 1
    )
    assert capsys.readouterr().out.endswith(f"\nwrote {folder / 'images.csv'}\n")
    source = open_split("image_list", str(folder), "whole", 0)
    guesses = {path: trained.predict(path)[0] for path in paths}
    assert {
        Path(path): source.classes[label]
        for path, label in zip(source.paths, source.labels, strict=True)
    } == {path: name for path, (name, _) in guesses.items()}
    last = (folder / "images.csv").read_bytes().decode("utf-8", "surrogateescape").splitlines()[-1]
    assert last == f"{paths[-1]},{guesses[paths[-1]][0]},{guesses[paths[-1]][1]:.6f}"
    (folder / "train.csv").write_text("path,label\nred/00.png,red\n")  # the user's own
    assert predicted(RUN, folder, "--csv", folder / "train.csv") == 2
    assert "train.csv: is there already and no .csv file as this p" in capsys.readouterr().err


def test_none_of_these_is_the_answer_where_the_likeliest_class_is_not_likely_enough(
    folder, tmp_path, monkeypatch, capsys
):
    drawn, trained, paths = [], vitinit.load(RUN), sorted(folder.glob("*/*.png"))
    monkeypatch.setattr(predict_module, "save", lambda *what: drawn.append(what[0]) or save(*what))
    firsts = {path: trained.predict(path, top=1)[0] for path in paths}
    least = sorted(share for _, share in firsts.values())[8] - 1e-6  # eight are below it
    files = [tmp_path / name for name in ("a.jsonl", "a.csv", "a.png")]
    outputs = ["--json", files[0], "--csv", files[1], "--sheet", files[2]]
    assert predicted(RUN, folder, "--least", least, "--top", 1, *outputs) == 0
    out = capsys.readouterr().out
    *lines, last = out.splitlines()[:22]
    rows = files[1].read_text().splitlines()[1:]
    notes = [json.loads(line) for line in files[0].read_text().splitlines()]
    tiles = [axis.texts[1] for axis in drawn[0].axes if axis.texts]
    right = 0
    for path, line, row, note, tile in zip(paths, lines, rows, notes, tiles, strict=True):
        name, share = firsts[path]
        none, sure = share < least, f"{name} {100 * share:.1f} %"
        right += not none and name == path.parent.name
        assert line == f"{path}  {'none of these  ' * none}{sure}"
        assert row.endswith(f",{'none of these' if none else name},{share:.6f}")
        assert note.get("answer", name) == ("none of these" if none else name)
        assert note["classes"][0]["class"] == name
        assert (tile.get_text() == "none of these") == none
        assert (tile.get_color() == predict_module.UNKNOWN) == none
    assert last == (
        f"{right} of 13 images are classified as their folder says ({100 * right / 13:.2f} %); "
        "8 of 21 are none of these"
    )


def test_no_file_and_too_little_memory_are_named_and_passed(folder, tmp_path, monkeypatch, capsys):
    def resize_small_ones(image, *arguments):
        if image.shape[2] > 99:
            raise MemoryError
        return resize(image, *arguments)

    resize = images.resize
    monkeypatch.setattr(images, "resize", resize_small_ones)
    os.mkfifo(tmp_path / "a.png")
    large = Image.new("RGB", (101, 13))
    large.save(tmp_path / "b.png")
    assert predicted(RUN, tmp_path / "a.png", tmp_path / "b.png", folder / "red" / "03.png") == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"{folder}/red/03.png  ") and out.endswith("2 of 3 could not be read\n")
    assert err == (
        f"vitinit predict: {tmp_path}/a.png: is a pipe or a device, expected a file\n"
        f"vitinit predict: {tmp_path}/b.png: too little memory to read it (MemoryError)\n"
    )
    assert refused(DataError, vitinit.load(RUN).predict, large) == (
        "an image: too little memory to read it (MemoryError)"
    )


def test_the_sheet_shows_an_even_selection_of_images_with_guesses(folder, tmp_path, monkeypatch):
    drawn, places = [], [0, 4, 8, 12, 16]
    monkeypatch.setattr(predict_module, "SHEET", 5)
    monkeypatch.setattr(
        predict_module, "draw_sheet", lambda out, tiles, heading: drawn.append((tiles, heading))
    )
    assert predicted(RUN, folder, "--sheet", tmp_path / "a.png") == 0
    ((tiles, heading),) = drawn
    paths, trained = sorted(folder.glob("*/*.png")), vitinit.load(RUN)
    assert f"{len(places)} of 21 images: " in heading
    for tile, path in zip(tiles, [paths[place] for place in places], strict=True):
        assert torch.equal(tile.view, trained.view(path)) and tile.heat is None
        assert tile.guess.truth == path.parent.name
        (name, share), *_ = tile.guess.ranked
        assert (name, pytest.approx(share, rel=1e-5)) == trained.predict(path)[0]


def test_a_drawn_sheet_marks_each_guess_as_right_or_wrong_and_shows_attention(
    folder, tmp_path, monkeypatch, capsys
):
    (folder / "red" / "01.png").write_bytes(b"no image")
    out, drawn, trained = tmp_path / "sheet.png", [], vitinit.load(RUN)
    monkeypatch.setattr(predict_module, "save", lambda *what: drawn.append(what[0]) or save(*what))
    assert predicted(RUN, folder, "--sheet", out, "--attention") == 1
    assert capsys.readouterr().out.endswith(f"\nwrote {out}\n")
    image = np.asarray(Image.open(out).convert("RGB"))
    assert image.shape[0] > 300 and image.shape[1] > 900 and image.std() > 20
    tiles = [axis for axis in drawn[0].axes if axis.texts]
    paths = sorted({*folder.glob("*/*.png")} - {folder / "red" / "01.png"})
    for axis, path in zip(tiles, paths, strict=True):
        (name, share), truth = trained.predict(path)[0], path.parent.name
        file, guess = axis.texts
        words = f"{name} {100 * share:.0f} %" + f"\nis {truth}" * (name != truth)
        assert (file.get_text(), guess.get_text(), guess.get_color()) == (
            f"{truth}/{path.name}",
            words,
            BLUE if name == truth else VERMILION,
        )
        heat = predict_module.attended(trained, trained.view(path))
        np.testing.assert_allclose(axis.images[1].get_array(), heat * heat.numel(), rtol=1e-5)


def with_model(family: str, **sizes) -> Trained:
    """The run, but with another model, for images of 20×28 pixels."""
    run, model = vitinit.load(RUN), written("torch", built(family, num_classes=3, **sizes))
    return Trained(model.eval(), run.classes, run.recipe, (20, 28), RUN)


@torch.no_grad()
def test_heat_is_the_attention_of_the_pooled_tokens():
    view = torch.randint(0, 256, (3, 20, 28), dtype=torch.uint8, generator=seeded(1))
    for family, sizes in (
        ("vit", dict(pool="class", num_registers=2)),
        ("swin", {}),
        ("vit", dict(pool="mean", num_registers=2)),
        ("simple_vit, content", {}),
    ):
        trained = with_model(family, **sizes)
        matrices = mixing_matrices(trained.model, trained.preprocess(view))
        weights = matrices[max(matrices)][0].mean(0)  # (N, N)
        expected = weights[0] if sizes.get("pool") == "class" else weights[-35:].mean(0)
        heat = predict_module.attended(trained, view)
        torch.testing.assert_close(heat, expected[-35:].view(5, 7))
    with pytest.raises(FigureError, match="a MlpMixer has no attention; expected a V"):
        predict_module.require_attention(with_model("mixer"))


def test_what_cannot_be_predicted_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.png").write_bytes(b"text")
    for arguments, problem in (
        (
            "nowhere x.png",
            "nowhere: no such checkpoint; expected a run's folder, a file of weights, or a name such "
            "as cifar10_small",
        ),
        ("runs/nowhere x.png", "runs/nowhere: no such checkpoint; expected a run's folder"),
        (f"{RUN} x.png", "x.png: no such file or folder"),
        (f"{RUN} empty", "empty: no images in it"),
        (
            f"{RUN} https://a.org/b.png",
            "/b.png: an address; expected a file: curl -O https://a.org/",
        ),
        (f"{RUN}", "the following arguments are required: IMAGE|FOLDER"),
        (f"{RUN} empty --attention", "--attention is drawn on a contact sheet; give --sheet F"),
        (f"{RUN} empty --top 0", "0: expected an integer"),
        (f"{RUN} a.png --sheet b.png", "no image could be read, so there is nothing to dra"),
    ):
        assert predicted(*arguments.split()) == 2
        assert problem in capsys.readouterr().err.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "empty"]


RED, GREEN = "red", "gr\u00fcn"  # composed; the names of folders may be decomposed


@pytest.mark.parametrize(
    "argument, path, truth",
    [
        ("set", "red/1.png", RED),
        ("set", "red/day/1.png", RED),  # at any depth
        ("set", "red/gru\u0308n/1.png", RED),  # as in training, and not the folder next to it
        ("set/red", "red/gru\u0308n/1.png", RED),
        ("set/red/day", "red/day/1.png", RED),
        ("set/red/gru\u0308n/1.png", "red/gru\u0308n/1.png", RED),
        ("set/red/day/1.png", "red/day/1.png", RED),
        ("set", "gru\u0308n/1.png", GREEN),
        (".", "gru\u0308n/1.png", GREEN),  # though the folder of the set is below one called red
        ("other", "../other/red/1.png", RED),  # beside what is no class
        ("other", "../other/unsorted/1.png", None),
    ],
)
def test_the_truth_of_an_image_is_the_class_that_training_reads(tmp_path, argument, path, truth):
    root = tmp_path / "red" / "photos"
    for name in ("red/1.png", "red/day/1.png", "red/gru\u0308n/1.png", "gru\u0308n/1.png"):
        (root / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "set" / name).touch()
    for name in ("red/1.png", "unsorted/1.png"):
        (root / "other" / name).parent.mkdir(parents=True)
        (root / "other" / name).touch()
    (tmp_path / "neighbour").mkdir()
    truth_of = predict_module.Truths([RED, GREEN])
    images = predict_module.images_of([str(root / argument)])
    truths = {os.path.realpath(one): truth_of(one, given) for one, given in images}
    assert truths[os.path.realpath(root / "set" / path)] == truth
    if argument == "set":  # as training says
        source = open_split("image_folder", str(root / "set"), "train", 2)
        assert [source.classes[label] for label in source.labels] == [
            truths[os.path.realpath(one)] for one in source.paths
        ]
