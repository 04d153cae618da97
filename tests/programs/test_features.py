"""Features of folders: those of the model, and accuracies as scikit-learn has them."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from small_models import SMALL, redraw

import vitinit
from vitinit.base.values import to_toml
from vitinit.programs import features, predict

RUN = Path(__file__).parents[1] / "runs" / "data" / "version_12"  # of three colours, 8 px wide


def drawn(path: Path, count: int, seed: int) -> features.Features:
    """Overlapping clouds of five classes in 7 dimensions, also as a file."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(5, size=count)
    rows = (rng.normal(size=(count, 7)) + 0.9 * np.eye(7)[numbers] + 3).astype(np.float32)
    files = np.array([f"{number}.png" for number in range(count)])
    found = features.Features(rows, files, np.array(list("edcba"))[numbers])
    np.savez(path, **found._asdict())
    return found


def test_accuracies_are_those_of_scikit_learn(tmp_path, capsys):
    train, held = drawn(tmp_path / "a.npz", 211, 0), drawn(tmp_path / "b.npz", 503, 1)
    of_cosine = KNeighborsClassifier(
        20, metric="cosine", weights=lambda distances: np.exp((1 - distances) / 0.07)
    )
    expected = of_cosine.fit(train.features, train.labels).predict(held.features)
    found = features.neighbours_of(train.features, held.features, 20)
    assert (features.voted(train.labels, *found) == expected).all()
    right = 100 * (expected == held.labels).mean()
    mean, std = train.features.mean(0), train.features.std(0)
    model = LogisticRegression(C=0.01, max_iter=500)
    model.fit((train.features - mean) / std, train.labels)
    of_linear = 100 * model.score((held.features - mean) / std, held.labels)
    paths = [str(tmp_path / name) for name in ("a.npz", "b.npz")]
    assert features.main([*paths, "--linear", "-C", "0.01", "--max-iter", "500"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"20 nearest  top-1 {right:.2f} %  over 503 images" and 20 < right < 90
    assert second.startswith(f"linear      top-1 {of_linear:.2f} %  over 503 images (C = 0.01, at")


def test_a_linear_classifier_of_one_class_is_refused_in_one_line(tmp_path, capsys):
    one = drawn(tmp_path / "a.npz", 3, 0)._replace(labels=np.array(["a"] * 3))
    np.savez(tmp_path / "a.npz", **one._asdict())
    assert features.main([*[str(tmp_path / "a.npz")] * 2, "--linear"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("a.npz: all images are of class 'a'; expected two classes for --linear")


def test_neighbours_are_the_same_however_many_images_are_compared_at_a_time(monkeypatch):
    rng = np.random.default_rng(0)
    signs = [rng.choice([-1.0, 1.0], (count, 16)) for count in (211, 53)]  # products are exact
    whole = features.neighbours_of(*signs, 31)
    for entries in (211 * 7, 1):
        monkeypatch.setattr(features, "ENTRIES", entries)
        for part, expected in zip(features.neighbours_of(*signs, 31), whole, strict=True):
            np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("bare", [False, True], ids=["classifier", "bare"])
@pytest.mark.parametrize("name", SMALL)
def test_every_family_writes_what_its_classifier_reads(name, bare, image_tree, tmp_path):
    model = redraw(vitinit.build_model(name, num_classes=5, image_size=16, **SMALL[name])).float()
    tensors = model.state_dict()
    head = {key.rpartition(".")[2]: tensors[key] for key in tensors if key.startswith("head.")}
    if bare:
        tensors = {key: value for key, value in tensors.items() if not key.startswith("head.")}
    torch.save(tensors, tmp_path / "model.pth")
    sizes = ",".join(f"{key}={to_toml(value)}" for key, value in SMALL[name].items())
    sets = [f"model.name={name}", f"model.options={{{sizes}}}", "data.image_size=16"]
    sets.append("data.num_classes=5")
    words = ["--recipe", "quickstart", *(word for one in sets for word in ("--set", one))]
    outs = [tmp_path / "a.npz", tmp_path / "a.csv"]
    for out in outs * 2:  # the second time in place of the first
        images = [str(tmp_path / "model.pth"), str(image_tree / "val")]
        assert predict.main([*images, *words, "--features", str(out)]) == 0
    found = features.read_features(outs[0])
    trained = vitinit.load(tmp_path / "model.pth", recipe="quickstart", overrides=sets)
    with torch.no_grad():
        logits = model.eval()(trained.preprocess(found.files.tolist()))
    torch.testing.assert_close(F.linear(torch.from_numpy(found.features), **head), logits)
    titles, *rows = csv.reader(outs[1].read_text().splitlines())
    assert titles[:3] == ["path", "label", "0"] and len(titles) == 2 + len(found.features[0])
    for path, label, *values in rows:
        place = found.files.tolist().index(path)
        assert label == found.labels[place]
        assert (np.float32(values) == found.features[place]).all()
    assert len(rows) == len(found.files) == 21


def test_a_folder_has_the_features_that_the_classifier_reads(image_tree, tmp_path, capsys):
    (image_tree / "val" / "red" / "05.png").write_bytes(b"no image")
    out, trained = tmp_path / "a.npz", vitinit.load(RUN)
    assert predict.main([str(RUN), str(image_tree / "val"), "--features", str(out)]) == 1
    assert "red/05.png: not a readable image" in capsys.readouterr().err
    found = features.read_features(out)
    assert found.labels.tolist() == [Path(path).parent.name for path in found.files]
    assert len(found.files) == 20
    logits = trained.model(trained.preprocess(found.files.tolist()))
    of_features = trained.model.head(torch.from_numpy(found.features))
    torch.testing.assert_close(of_features, logits)
    sheet = tmp_path / "a.png"
    assert features.main([str(out), str(out), "--sheet", str(sheet)]) == 0 and sheet.exists()


def test_what_is_no_such_file_is_one_line(image_tree, tmp_path, capsys):
    drawn(tmp_path / "a.npz", 31, 0)
    np.savez(tmp_path / "b.npz", other=np.zeros(3))
    (tmp_path / "c.npz").write_bytes(b"text")
    out = tmp_path / "d.npz"
    assert predict.main([str(RUN), str(image_tree / "val" / "red"), "--features", str(out)]) == 0
    few = {"features": np.zeros((1, 3)), "files": np.array(["a"]), "labels": np.array(["b"])}
    np.savez(tmp_path / "e.npz", **few)
    for name, words in (
        ("b.npz", "expected a .npz that vitinit predict --features wrote"),
        ("c.npz", "expected a .npz that vitinit predict --features wrote"),
        ("d.npz", "00.png has no label; expected images in folders of their classes"),
        ("e.npz", "has 3 features per image, and"),
        ("f.npz", "cannot be read: No such file"),
    ):
        capsys.readouterr()
        assert features.main([str(tmp_path / "a.npz"), str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and words in error


def test_without_scikit_learn_a_line_names_the_extra(tmp_path, monkeypatch, capsys):
    drawn(tmp_path / "a.npz", 31, 0)
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    path = str(tmp_path / "a.npz")
    assert features.main([path, path, "--linear"]) == 2
    assert "needs scikit-learn: pip install 'vitinit[probe]'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--top 3", "--json a.json", "--least 0.5"])
def test_features_are_written_without_guesses(option, capsys):
    words = f"run photos --features a.npz {option}".split()
    assert predict.main(words) == 2
    assert "--features is written without guesses" in capsys.readouterr().err
