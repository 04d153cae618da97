"""The report: what compare, curves and predictions say of the same runs stands on the page."""

import json
import math
import os
from collections import Counter
from pathlib import Path
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

import numpy as np
import pytest
import torch

import vitinit
from vitinit.programs.figures.program import main
from vitinit.programs.figures.report import address
from vitinit.programs.shared.plot import rounded
from vitinit.programs.shared.records import read_run, write_archive
from vitinit.programs.shared.results import compare_runs, t_interval

IMAGES = Path(__file__).parents[2] / "data" / "cifar10"


@pytest.fixture
def report(tmp_path):
    """Writes the report of these arguments and returns its path."""

    def write(*arguments: object) -> Path:
        out = tmp_path / "report.html"
        assert main(["report", *map(str, arguments), "--out", str(out)]) == 0
        return out

    return write


@pytest.fixture
def photographs(tmp_path) -> Path:
    """A data set whose validation images are the 50 of tests/data/cifar10."""
    root = tmp_path / "photographs"
    root.mkdir()
    for split in ("train", "val"):
        (root / split).symlink_to(IMAGES)
    return root


@pytest.fixture
def four_runs(written_run) -> list[Path]:
    """Two inits and two seeds; impulse is ahead by 10 and by 14 points."""
    runs = []
    for init, lasts in (("default", (50.0, 54.0)), ("impulse", (60.0, 68.0))):
        for seed, last in enumerate(lasts):
            folder = written_run(
                f"{init}|{seed}",
                [20.0, None, last],
                seed=seed,
                init=init,
                sets=("optim.base_lr=0.5",),
            )
            rows = [
                {
                    "step": 10 * step,
                    "loss": 3.0 / step + seed,
                    "lr": 0.1 * step,
                    "grad_norm": None if step == 2 else 2.0,
                }
                for step in (1, 2, 3)
            ]
            (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            recipe = (folder / "recipe.toml").read_text()  # of before there was this key
            (folder / "recipe.toml").write_text(recipe.replace('train = "all"\n', ""))
            runs.append(folder)
    return runs


def test_several_runs_are_compared_as_compare_does(report, contents, four_runs):
    meta, _ = contents(report(*four_runs))
    _, text = compare_runs([read_run(folder) for folder in four_runs])
    assert meta["comparison"]["text"] == text
    mean, half = t_interval([10.0, 14.0])
    assert meta["comparison"]["base"] == "default"
    assert meta["comparison"]["intervals"] == [
        {
            "label": "impulse",
            "weights": "model",
            "by_seed": [10.0, 14.0],
            "interval": [mean, pytest.approx(half, rel=1e-3)],
        }
    ]
    panels = {panel["title"]: panel for panel in meta["curves"]}
    assert list(panels) == [
        "validation top-1 (%)",
        "training loss",
        "learning rate",
        "gradient norm",
    ]
    impulse = panels["validation top-1 (%)"]["lines"][1]
    assert impulse["label"] == "impulse (2 seeds)"
    assert (impulse["x"], impulse["mean"]) == ([1, 3], [20.0, 64.0])
    assert (impulse["low"], impulse["high"]) == ([20.0, 60.0], [20.0, 68.0])
    assert panels["training loss"]["lines"][0]["mean"] == [3.5, 2.0, 1.5]
    norm = panels["gradient norm"]
    assert norm["lines"][0]["mean"] == [2.0, None, 2.0] and norm["log"]
    one = meta["runs"][3]
    assert (one["name"], one["group"], one["seed"]) == ("impulse|1", "impulse", 1)
    changes = {key: values for key, *values in one["changes"]}
    assert changes["optim.base_lr"] == ["0.002", "0.5"] and changes["run.seed"] == ["0", "1"]
    assert changes["init.name"] == ['"default"', '"impulse"']
    assert not changes.keys() & {"model.name", "optim.train"}
    assert dict(one["facts"])["training"] == "0 min 09 s" and one["starts"][0]["device"] == "CPU"
    assert one["judged"] is None and "holds no checkpoint" in one["note"] and one["finished"]
    assert dict(one["facts"])["top-1, last"] == "68.00 %" and meta["notes"] == []


def test_what_a_run_watched_of_attention_is_drawn_by_block_where_it_is_on_record(
    report, contents, written_run
):
    """The first, middle and last block; of two runs one watched, and not at all of its steps, and
    its first block is a shift."""
    folders = [written_run(init, [50.0], init=init) for init in ("default", "impulse")]
    for init, folder in zip(("default", "impulse"), folders):
        rows = [{"step": step, "loss": 1.0, "lr": 0.1, "grad_norm": 2.0} for step in (10, 20)]
        if init == "impulse":
            watched = {"logits": [None, 23.0, 31.0, 47.0], "entropy": [None, 1.0, 2.0, 3.0]}
            for key, values in (watched | {"mass": [None] * 4}).items():
                rows[1] |= {f"{key}/{block}": value for block, value in enumerate(values)}
        (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    panels = {panel["title"]: panel["lines"] for panel in contents(report(*folders))[0]["curves"]}
    assert list(panels)[1:] == [
        "training loss",
        "learning rate",
        "gradient norm",
        "largest |logit| of attention",
        "entropy of attention (nats)",
    ]
    middle, last = panels["largest |logit| of attention"]
    assert [line["label"] for line in (middle, last)] == [
        "impulse (1 seed), block 2",
        "impulse (1 seed), block 3",
    ]
    assert middle["mean"] == [None, 31.0] and last["mean"] == [None, 47.0]
    assert middle["colour"] == last["colour"] and middle["dash"] != last["dash"]
    assert [line["mean"][1] for line in panels["entropy of attention (nats)"]] == [2.0, 3.0]


def test_a_run_is_judged_on_its_validation_images(report, contents, photographs, tmp_path):
    meta, levels = contents(report("cifar10_small", "--data-dir", photographs))
    (run,) = meta["runs"]
    judged, trained = run["judged"], vitinit.load("cifar10_small")
    files, classes = sorted(IMAGES.glob("*/*.jpg")), judged["classes"]
    with torch.autocast("cpu", torch.bfloat16):  # as its recipe says
        ranked = [
            (share, file.parent.name, guess, file)
            for file, ((guess, share),) in zip(files, trained.predict_batch(files, top=1))
        ]
    assert {
        (classes[truth], classes[guess]): count for truth, guess, count in judged["pairs"]
    } == Counter(one[1:3] for one in ranked)
    confusion = np.zeros((10, 10))
    for truth, guess, count in judged["pairs"]:
        confusion[truth, guess] = count
    precision, recall = (confusion.diagonal() / confusion.sum(axis) for axis in (0, 1))
    f1 = 2 / (1 / precision + 1 / recall)
    np.testing.assert_allclose(judged["scores"], 100 * np.stack([precision, recall, f1], 1), 1e-3)
    balanced = dict(judged["numbers"])["balanced accuracy"]
    assert balanced == pytest.approx(100 * recall.mean(), rel=1e-3)
    bins = [[one for one in ranked if math.ceil(15 * one[0]) == m] for m in range(1, 16)]
    assert judged["reliability"] == [
        [
            len(inside),
            pytest.approx(np.mean([share for share, *_ in inside]), rel=1e-3),
            pytest.approx(np.mean([truth == guess for _, truth, guess, _ in inside]), rel=1e-3),
        ]
        if inside
        else None
        for inside in bins
    ]
    error = sum(
        abs(sum(share - (truth == guess) for share, truth, guess, _ in inside)) for inside in bins
    )
    found = dict(judged["numbers"])["expected calibration error"]
    assert found == pytest.approx(100 * error / 50, rel=1e-3) and judged["temperature"] == 1.0
    mistakes = sorted((one for one in ranked if one[1] != one[2]), reverse=True)
    assert [
        (one["share"], one["truth"], one["guess"], Path(one["file"]).resolve())
        for one in judged["mistakes"]
    ] == [(pytest.approx(share, rel=1e-3), *others) for share, *others in mistakes]
    for one in judged["mistakes"]:  # the page is in tmp_path
        assert (tmp_path / one["link"]).samefile(one["file"]) and one["link"][:3] != "../"
    assert (judged["images"], judged["of"], judged["parameters"]) == (50, 50, 683_050)
    assert meta["comparison"] is None and dict(run["facts"])["top-1, last"] == "90.23 %"
    meta, _ = contents(report("cifar10_small", "--data-dir", photographs, "--images", 20))
    few = meta["runs"][0]["judged"]
    assert (few["images"], few["of"]) == (17, 50)  # every third
    assert {one["file"] for one in few["mistakes"]} <= {
        str(photographs / "val" / file.relative_to(IMAGES)) for file in files[::3]
    }


def test_a_link_leads_to_the_file_whatever_its_name(tmp_path):
    for name in ("100 % #1?.jpg", 'a:b&"<é>.jpg', "b\udcff.jpg"):
        link = address(str(tmp_path / "cats" / name), tmp_path / "pages")
        url = urljoin(f"file://{tmp_path}/pages/report.html", link)
        assert unquote_to_bytes(urlsplit(url).path) == os.fsencode(tmp_path / "cats" / name)


def test_what_is_not_at_hand_is_left_out_with_a_line(
    report, contents, four_runs, written_run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # away from the images
    assert "data/cifar10" in contents(report("cifar10_small"))[0]["runs"][0]["note"]
    started = written_run("started", [9.0], epochs=3, recipe="mine.toml", seconds=7500.0)
    meta, _ = contents(report(started, "--images", 0))
    assert meta["notes"][1] == "started is not finished: 1 of 3 epochs so far."
    assert meta["runs"][0]["facts"][:2] == [
        ["epochs, not finished", "1 of 3"],
        ["top-1, so far", "9.00 %"],
    ]
    assert ["training", "2 h 05 min"] in meta["runs"][0]["facts"]
    odd = contents(report(written_run("odd", [9.0, 9.0], seconds=math.nan), "--images", 0))[0]
    assert ["training", "0 min 00 s"] in odd["runs"][0]["facts"]
    assert meta["comparison"] is None and not meta["runs"][0]["finished"]
    assert "recipe mine.toml: no such file" in meta["runs"][0]["changes"]
    assert meta["runs"][0]["note"] == "left out, as --images 0 asks"
    write_archive([read_run(folder) for folder in four_runs], tmp_path / "runs.tar.xz")
    meta, _ = contents(report(tmp_path / "runs.tar.xz"))
    assert "an archive holds no weights" in meta["runs"][0]["note"] and len(meta["runs"]) == 4
    assert "no steps on record" in meta["notes"][0]
    assert [panel["across"] for panel in meta["curves"]] == ["epoch"]


def test_numbers_that_json_does_not_know_are_left_out():
    """A page would refuse them; a loss can be infinite where fp16 overflowed."""
    assert rounded([1.23456, [float("nan"), float("inf"), -float("inf")]]) == [1.235, [None] * 3]


def test_a_browser_shows_the_report(report, contents, in_browser, four_runs, photographs):
    page = report(*four_runs, "cifar10_small", "--data-dir", photographs)
    found = in_browser(
        page,
        "run=4",
        """
        const cell = document.querySelectorAll("#matrix button")[35];    // class 3, taken for 5
        cell.dispatchEvent(new PointerEvent("pointerenter"));
        const read = {cell: cell.innerText, line: document.querySelector("#cell").innerText};
        const chart = [...document.querySelectorAll("#curves .chart")].at(-2);
        const svg = chart.querySelector("svg"), box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent("pointermove",
          {clientX: box.right - 10, clientY: box.top + 50}));
        read.tip = chart.querySelector(".tip").innerText;
        read.shown = !document.querySelector(".judged").hidden;
        read.mistakes = document.querySelectorAll("#mistakes img").length;
        read.links = [...document.querySelectorAll("#mistakes figcaption a")].map(
          (link) => [link.innerText, link.getAttribute("href")]);
        read.classes = [...document.querySelectorAll("#classes tr")].map((line) => line.innerText);
        read.intervals = document.querySelector("#intervals").innerText;
        read.tables = document.querySelectorAll("#text table").length;
        document.dispatchEvent(new KeyboardEvent("keydown", {key: ",", bubbles: true}));
        return {...read, run: document.querySelector("#run").innerText, address: location.hash,
          hidden: document.querySelector(".judged").hidden,
          note: document.querySelector("#note").innerText,
          wide: document.documentElement.scrollWidth <= innerWidth};
    """,
    )
    meta, _ = contents(page)
    judged = meta["runs"][4]["judged"]
    count = {(truth, guess): count for truth, guess, count in judged["pairs"]}[3, 5]
    assert found["cell"] == str(count)
    assert found["line"] == f"cat taken for dog: {count} of 5 images ({20 * count}.0 %)"
    (line,), tip = meta["curves"][-2]["lines"], found["tip"].splitlines()
    assert tip[0] == f"epoch {line['x'][-1]:g}"  # of the training loss, nearest to the right
    assert float(tip[1]) == pytest.approx(line["mean"][-1], rel=1e-3)
    assert found["shown"] and found["mistakes"] == len(judged["mistakes"]) == 2
    assert found["links"] == [[Path(one["file"]).name, one["link"]] for one in judged["mistakes"]]
    f1 = [float(line.split("\t")[-1]) for line in found["classes"][1:]]
    assert f1 == sorted(round(score[2], 1) for score in judged["scores"]) and len(f1) == 10
    assert "+12.00 ± 25.41" in found["intervals"]
    assert found["tables"] == 3 and found["wide"]
    assert (found["run"], found["address"], found["hidden"]) == ("impulse|1", "#run=3", True)
    assert "No confusion matrix and no mistakes" in found["note"]
