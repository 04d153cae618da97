"""The lessons' pages: their code runs, and prints and draws what they show."""

import csv
import json
import re
from math import inf
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitinit.base.files import CheckpointError
from vitinit.programs.fit import program as fit
from vitinit.programs.lessons import FOLDER, PICTURES, lesson_paths, program as command
from vitinit.programs.lessons.page import (
    PICTURE,
    LessonError,
    check_page,
    difference,
    notebook,
    read_page,
    run_page,
    updated_page,
)
from vitinit.programs.lessons.program import main
from vitinit.programs.shared.plan import Plan, Rates

PATHS = lesson_paths()


@pytest.fixture(autouse=True)
def an_epoch_takes_a_second(monkeypatch):
    """Instead of measuring this machine for seconds: a run then has few epochs."""
    monkeypatch.setattr(
        fit,
        "plan_of",
        lambda one, *rest, **how: Plan(
            one.images.train, 0, 1, gpus=1, cores=1, rates=Rates(one.images.train, inf, inf)
        ),
    )


lessons = pytest.mark.parametrize("path", PATHS.values(), ids=lambda path: path.stem)


def thumbnail(path: Path) -> np.ndarray:
    """A picture at 24×24 pixels: what is drawn where, without the rendering of letters."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").resize((24, 24), Image.Resampling.BOX)
        return np.asarray(small, dtype=float)


@lessons
def test_code_prints_and_draws_what_the_page_shows(path, tmp_path):
    page = read_page(path)
    assert len(list(check_page(page, tmp_path))) == len(page.codes) > 0
    for picture in (name for code in page.codes for name in code.pictures):
        own = FOLDER / PICTURES / picture
        with Image.open(tmp_path / picture) as drawn, Image.open(own) as shown:
            assert drawn.size == shown.size
        levels = np.abs(thumbnail(tmp_path / picture) - thumbnail(own))
        assert levels.mean() <= 1.0, picture  # of 255


def test_the_last_lesson_looks_at_the_model_and_the_images_of_ones_own_folder(
    tmp_path, monkeypatch
):
    def no_network(published):
        raise CheckpointError("cannot be fetched")

    monkeypatch.setattr(fit, "fetch_published", no_network)
    draw, photos = np.random.default_rng(0), tmp_path / "photos"
    for name, brightest in (("dark", 90), ("bright", 256)):
        (photos / name).mkdir(parents=True)
        for number in range(13):
            pixels = draw.integers(brightest // 2, brightest, (37, 41, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(photos / name / f"{number}.png")
    text = PATHS[10].read_text(encoding="utf-8")
    for line, own in (
        ("FOLDER = PHOTOGRAPHS ", f"FOLDER = {str(photos)!r} "),
        ("MINUTES = 3 ", "MINUTES = 0.3 "),
    ):
        assert text.count(line) == 1
        text = text.replace(line, own)
    path = tmp_path / "10_page.md"
    path.write_text(text, encoding="utf-8")
    printed = "".join(words for _, words in run_page(read_page(path), tmp_path, train=False))
    with open(tmp_path / "runs" / "photos-0.3-minutes" / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    right = sum(row["truth"] == row["label"] for row in rows)
    assert f"{right} of {len(rows)} right: " in printed and len(rows) == 6
    assert f"from  0 % on: 6 answered, {right} of them right" in printed
    assert "airplane" not in printed and re.search(r"^(dark|bright) +\d+ %$", printed, re.MULTILINE)


@lessons
def test_a_page_is_short_and_ends_in_two_exercises_whose_answers_its_notebook_hides_too(path):
    text, page = path.read_text(encoding="utf-8"), read_page(path)
    assert page.minutes <= 15 and page.text() == text
    before, *exercises = re.split(r"\n## Exercise (?:1|2: your own)\n", text)
    assert len(exercises) == 2 and "<details>" not in before
    for exercise in exercises:
        question, answer = exercise.split("<details>\n<summary>Answer</summary>\n\n")
        assert question.strip() and "```python" in answer and answer.endswith("\n\n</details>\n")
    for code in page.codes:
        assert ("steps=" in code.source and not code.pictures) or not code.trains
    book = notebook(page)
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    codes = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    for cell, code in zip(codes, page.codes, strict=True):
        assert cell["source"] + "\n" == code.source
        kinds = [output["output_type"] for output in cell["outputs"]]
        assert kinds == ["stream"] * bool(code.output) + ["display_data"] * len(code.pictures)
        assert not code.output or cell["outputs"][0]["text"] == code.output
    # From the first cell of an answer to the next exercise each is collapsed; no other is.
    asked = False
    for cell in book["cells"]:
        prose = cell["cell_type"] == "markdown"
        assert not (prose and re.search(r"!\[|\]\((?!http)", cell["source"]))
        asked &= not (prose and cell["source"].startswith("## Exercise 2"))
        folded = cell["source"].startswith("<details>\n<summary>Answer</summary>\n\n")
        hidden = cell["metadata"].get("jupyter") == {"source_hidden": True, "outputs_hidden": True}
        assert (folded, hidden) == (asked and prose, asked and not prose)
        asked |= prose and "## Exercise" in cell["source"]


def test_lessons_are_numbered_and_every_picture_belongs_to_one():
    assert list(PATHS) == list(range(1, len(PATHS) + 1))
    shown = [
        name for path in PATHS.values() for code in read_page(path).codes for name in code.pictures
    ]
    assert sorted(shown) == sorted(path.name for path in (FOLDER / PICTURES).iterdir())
    for path in PATHS.values():
        numbers = {name.partition("_")[0] for name in re.findall(PICTURE, path.read_text("utf-8"))}
        assert numbers <= {path.name.partition("_")[0]}


PAGE = """# 7. A page

```python
a = 3
print(a / 7)
```

```text
0.43
```

```bash
not ours
```

```python
def fails():
    raise ValueError("too many".replace("x", "y"))
```

After it.
"""


@pytest.fixture
def written_page(tmp_path):
    def write(text: str = PAGE):
        path = tmp_path / "7_page.md"
        path.write_text(text, encoding="utf-8")
        return read_page(path)

    return write


def test_a_page_is_taken_apart_and_updated_by_code_that_trains_in_full(written_page, tmp_path):
    page = written_page()
    assert page.title == "A page"
    first, second = page.codes
    assert (first.source, first.line, first.output) == ("a = 3\nprint(a / 7)\n", 4, "0.43\n")
    assert (second.line, second.output, second.pictures) == (17, "", ())
    assert "not ours" in page.prose[1] and page.prose[2] == "\nAfter it.\n"
    assert written_page("# 1. One\n" + 148 * "word ").minutes == 2
    assert written_page("# 1. One\n\n```python\n" + 25 * "pass\n" + "```\n").minutes == 2
    wrong = PAGE.replace("0.43", "0.45").replace("a = 3\n", "a = 3.5\n")
    wrong += "\n```python train\nprint(dict(steps=1200), a)\n```\n"
    text = updated_page(written_page(wrong), tmp_path).text()
    assert text == wrong.replace("0.45\n", "0.5\n") + ("\n```text\n{'steps': 1200} 3.5\n```\n")


def test_outputs_agree_to_a_unit_of_the_last_digit():
    for wanted, found in (
        ("a 0.43", "a   0.434"),
        ("0.43", "0.42"),
        ("-1.2e-3", "-1.25e-3"),
        ("17 heads", "17 heads"),
        ("−3.0", "−3.1"),
        ("", ""),
    ):
        assert difference(wanted, found) is None
    for wanted, found, words in (
        ("0.43", "0.45", "line 1 of the output is '0.45', where the page has '0.43'"),
        ("17 heads", "18 heads", "'18 heads'"),
        ("-1.2e-3", "-1.4e-3", "'-1.4e-3'"),
        ("0.43", "-0.43", "'-0.43'"),
        ("rank 9", "Rank 9", "'Rank 9'"),
        ("1.0 2.0", "1.0", "'1.0'"),
        ("[0., 1.]", "[1., 0.]", "'[1., 0.]'"),
        ("a\nb", "a", "line 2 of the output is nothing"),
        ("a", "a\nb", "goes on with 'b'"),
        ("0.5", "nan", "'nan'"),
        ("True", "False", "'False'"),
    ):
        assert words in difference(wanted, found)


def test_code_that_fails_or_prints_something_else_is_named_by_its_line(written_page, tmp_path):
    page = written_page(PAGE + "\n```python\nfails()\n```\n")
    with pytest.raises(
        LessonError, match=r"^7_page\.md:24: the code fails: ValueError: too many$"
    ) as caught:
        list(run_page(page, tmp_path, train=False))
    trace = caught.value.__cause__.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    assert (trace.tb_frame.f_code.co_filename, trace.tb_lineno) == (str(page.path), 18)
    with pytest.raises(LessonError, match=r"^7_page\.md:4: line 1 of the output is '0\.4.*0\.45'"):
        list(check_page(written_page(PAGE.replace("0.43", "0.45")), tmp_path))


def test_the_command_lists_lessons_writes_a_notebook_and_runs_a_lesson(
    tmp_path, capsys, monkeypatch, written_page
):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("2  A convolution is a sum of shifts: ")
    assert len(lines) == len(PATHS) and lines[1].endswith("/lessons/2_convolution_as_shifts.md")
    file = tmp_path / "one.ipynb"
    assert main(["1", "--notebook", str(file)]) == 0
    assert json.loads(file.read_text(encoding="utf-8")) == notebook(read_page(PATHS[1]))
    assert capsys.readouterr().out == f"wrote {file}\n"
    assert main(["1", "--notebook", str(file)]) == 0  # the same again
    file.write_text(answers := file.read_text().replace('"source": "', '"source": "My answer. ', 1))
    assert main(["1", "--notebook", str(file)]) == 2 and file.read_text() == answers
    assert "is there already, perhaps with answers; move it away" in capsys.readouterr().err
    page = written_page(
        PAGE.replace("raise ValueError", "return ")
        + "\n```python train\nprint(dict(steps=1200, images=9))\n```\n"
    )
    monkeypatch.setattr(command, "lesson_paths", lambda: {7: page.path})
    for flags, words in (
        (
            [],
            "line 24 trains: not compared with the page, two steps\n"
            "    {'steps': 2, 'images': 2}\n",
        ),
        (
            ["--train"],
            "line 24 trains: not compared with the page\n    {'steps': 1200, 'images': 9}\n",
        ),
    ):
        assert main(["7", *flags]) == 0
        assert re.fullmatch(
            r"line 4\n    0\.428\d+\nline 17\n"
            + re.escape(words)
            + r"2 blocks of code print what the page shows, in \d+ s\n",
            capsys.readouterr().out,
        )
