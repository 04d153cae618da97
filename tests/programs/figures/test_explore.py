"""The explorer: the page holds what the model computes, and a browser shows it."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitinit.data.images import decode_image
from vitinit.mixing import mixing_matrices
from vitinit.programs import figures
from vitinit.programs.figures.program import main
from vitinit.programs.figures.subjects import fresh
from vitinit.runs.data import as_input, evaluation_view

VIT = [
    "model.options.embed_dim=48",
    "model.options.depth=2",
    "model.options.num_heads=3",
    "model.options.pool=class",
    "data.num_classes=7",
]
SWIN = [f"model.options.{size}" for size in ("depths=[2, 1]", "embed_dim=12", "num_heads=[2, 3]")]
MIXER = ["model.options.embed_dim=18", "model.options.depth=2", "model.options.tokens_ratio=4.0"]
INITS = ["default", "impulse"]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> list[Path]:
    """Two images of noise; the name of one would end the script that it stands in."""
    folder, rng = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for name in ("</script>{{weights}}", "plain"):
        Image.fromarray(rng.integers(0, 256, (41, 47, 3), dtype=np.uint8)).save(
            folder / name.replace("/", "∕"), "PNG"
        )
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def explored(photographs, tmp_path_factory):
    """Writes the page of a recipe's model after each of INITS; returns its path."""

    def write(recipe: str, sets: list[str]) -> Path:
        out = tmp_path_factory.mktemp("page") / "page.html"
        words = [word for text in sets for word in ("--set", text)]
        assert (
            main(
                [
                    "explore",
                    *map(str, photographs),
                    "--recipe",
                    recipe,
                    "--init",
                    *INITS,
                    *words,
                    "--out",
                    str(out),
                ]
            )
            == 0
        )
        return out

    return write


@pytest.fixture(scope="module")
def page(explored) -> Path:
    return explored("quickstart", VIT)


@torch.no_grad()
def computed(
    recipe: str, sets: list[str], init: str, path: Path
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What the init's model computes: matrices (h, P + N, P + N) per block, and probabilities."""
    (subject,) = fresh([recipe], [init], seed=None, sets=sets)
    view = evaluation_view(subject.recipe)(decode_image(str(path)))
    inputs = as_input(view[None], subject.recipe)
    matrices = mixing_matrices(subject.model, inputs)
    return [matrices[block][0] for block in sorted(matrices)], subject.model(inputs).softmax(1)[0]


@pytest.mark.parametrize(
    "recipe, sets", [("quickstart", VIT), ("cifar10_swin_tiny", SWIN), ("cifar10_mixer", MIXER)]
)
@pytest.mark.parametrize("most", [figures.explore.MOST, 0])
def test_the_page_holds_what_the_model_mixes(
    explored, photographs, contents, monkeypatch, recipe, sets, most
):
    """With room for few letters, weights are told apart in steps of 1/14 of the root."""
    real = figures.explore.packed
    if not most:
        monkeypatch.setattr(
            figures.explore,
            "packed",
            lambda levels: real(levels) if max(levels) == 14 else "x" * (figures.explore.MOST + 1),
        )
    meta, levels = contents(explored(recipe, sets))
    steps = meta["levels"]
    assert steps == (254 if most else 14) and [model["name"] for model in meta["models"]] == INITS
    assert [image["name"] for image in meta["images"]] == [path.name for path in photographs]
    start = 0
    for model in meta["models"]:
        assert model["prefix"] == ["class token"] * (sets is VIT)
        assert model["signed"] == (sets is MIXER)
        for image, path in zip(model["images"], photographs, strict=True):
            expected, probabilities = computed(recipe, sets, model["name"], path)
            assert image["probabilities"] == pytest.approx(probabilities.tolist(), rel=1e-3)
            for block, grid, theirs in zip(image["blocks"], model["grids"], expected, strict=True):
                theirs = theirs.mean(0, keepdim=True) if sets is MIXER else theirs
                theirs = theirs[:, :, len(model["prefix"]) :].numpy()
                assert theirs.shape[2] == grid[0] * grid[1]
                roots = levels[start : start + theirs.size].reshape(theirs.shape) / steps
                start += theirs.size
                roots = 2 * roots - 1 if sets is MIXER else roots
                found = np.array(block["largest"])[:, None, None] * roots * np.abs(roots)
                # Half a step, twice as much where steps span both signs, or are rounded twice.
                near = 1.1 * (1 + (sets is MIXER)) * (1 + (most == 0)) / steps
                np.testing.assert_allclose(found, theirs, atol=near * max(block["largest"]))
    assert start == levels.size


def test_the_page_says_how_far_heads_attend_and_what_kernels_they_are(page, contents, photographs):
    meta, _ = contents(page)
    impulse = meta["models"][1]["images"][0]["blocks"][0]
    shares = computed("quickstart", VIT, "impulse", photographs[0])[0][0][:, 1:, 1:].numpy()
    away = np.hypot(*(places[:, None] - places for places in np.divmod(np.arange(64), 8)))
    far = (shares * away).sum((1, 2)) / shares.sum((1, 2))
    np.testing.assert_allclose(impulse["distance"], far, rtol=1e-3)
    assert [*map(np.argmax, impulse["kernels"][:2])] == [24, 17]  # the middle of 7 × 7, up
    centre, others, uniform = meta["models"][1]["masses"][0]
    assert centre > 0.2 and others > 0.05 and uniform == pytest.approx(1 / 64, rel=1e-3)
    assert meta["models"][0]["masses"] is None  # default has no targets


def test_the_page_opens_on_the_head_that_gives_most_to_one_patch(
    page, photographs, contents, in_browser
):
    """Of the model and the photograph that the address names; the class token does not count."""
    matrices, _ = computed("quickstart", VIT, "default", photographs[1])
    peaks = torch.stack([theirs[:, 1:, 1:].amax(2).mean(1) for theirs in matrices]) - 1 / 64
    blocks = contents(page)[0]["models"][0]["images"][1]["blocks"]
    np.testing.assert_allclose([block["sharpness"] for block in blocks], peaks, rtol=1e-3)
    assert peaks.argmax() > 0  # else the page would open on it in any case
    view = in_browser(page, "model=0&image=1", "return explorer.view")
    assert (view["block"], view["head"]) == divmod(int(peaks.argmax()), 3)


def test_a_page_says_what_its_small_pictures_are_and_how_fine_weights_are(tmp_path, in_browser):
    """Photographs of one name by their folders, the kernel, and as many levels as on the README."""
    for folder in ("cat", "dog"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (9, 9)).save(tmp_path / folder / "0.png")
    page = tmp_path / "page.html"
    assert (
        main(
            [
                "explore",
                *map(str, sorted(tmp_path.glob("*/0.png"))),
                "--recipe",
                "quickstart",
                "--out",
                str(page),
            ]
        )
        == 0
    )
    kernel, *names, made = in_browser(
        page,
        "",
        """
        return [...document.querySelectorAll("#images button, .detail > div, #made")].map(
          (part) => part.innerText)""",
    )
    assert names == ["cat/0.png", "dog/0.png"]
    readme = (Path(figures.__file__).parent / "README.md").read_text()
    (count,) = re.findall(r"weights of (\d+) levels", readme)
    assert kernel == "mean by offset" and f"one of {count} levels" in made


def test_a_browser_shows_what_python_computed(page, photographs, in_browser):
    found = in_browser(
        page,
        "model=1&beside=0&image=1&block=1&head=2&scale=own",
        """
        const event = (type, x, y, more = {}) => {
          const photo = document.querySelector(".photo"), box = photo.getBoundingClientRect();
          photo.dispatchEvent(new PointerEvent(type, {bubbles: true, pointerType: "mouse",
            clientX: box.left + x * box.width, clientY: box.top + y * box.height, ...more}));
          return state();
        };
        const key = (key) => {
          document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
          return state();
        };
        const state = () => {
          explorer.drawNow();
          const overlays = [...document.querySelectorAll(".photo canvas")];
          return {...explorer.view, shown: explorer.maps(), pixels: overlays.map(read),
            facts: document.querySelector("dl").innerText};
        };
        const read = (canvas) => {                   // from a copy; to read often is warned of
          const {width, height} = canvas, copy = document.createElement("canvas");
          Object.assign(copy, {width, height});
          const context = copy.getContext("2d", {willReadFrequently: true});
          context.drawImage(canvas, 0, 0);
          return [...context.getImageData(0, 0, width, height).data];
        };
        const states = {hover: event("pointermove", .7, .3), held: event("pointerdown", .4, .9)};
        states.still = event("pointermove", .1, .1);
        states.touch = event("pointerdown", .6, .2, {pointerType: "touch"});
        states.up = key("ArrowUp");
        states.head = key("[");
        states.offset = key("m");
        document.querySelector("#beside").value = -1;
        document.querySelector("#beside").dispatchEvent(new Event("change"));
        document.querySelectorAll(".maps button")[0].click();
        states.click = state();
        await new Promise((resolve) => setTimeout(resolve, 400));
        return {...states, address: location.hash};
    """,
    )
    expected = [computed("quickstart", VIT, init, photographs[1])[0][1] for init in INITS[::-1]]

    def agrees(state, x: float, y: float, head: int) -> None:
        query = 1 + int(y * 8) * 8 + int(x * 8)  # 8 × 8 patches
        for values, theirs, pixels in zip(state["shown"], expected, state["pixels"], strict=True):
            row = theirs[head, query, 1:].numpy()
            np.testing.assert_allclose(values, row, atol=2 * theirs.max().item() / 254)
            alphas = np.array(pixels).reshape(64, 4)[:, 3]  # rise with the root
            np.testing.assert_allclose(alphas, 90 + 130 * np.sqrt(row / row.max()), atol=5)
        assert f"row {int(y * 8)}, column {int(x * 8)}" in state["facts"]

    agrees(found["hover"], 0.7, 0.3, head=2)
    agrees(found["held"], 0.4, 0.9, head=2)
    agrees(found["still"], 0.4, 0.9, head=2)
    agrees(found["touch"], 0.6, 0.2, head=2)
    agrees(found["up"], 0.6, 0.2 - 1 / 8, head=2)
    agrees(found["head"], 0.6, 0.2 - 1 / 8, head=1)
    assert found["offset"]["maps"] == "offset" and len(found["offset"]["shown"][0]) == 49
    assert (found["click"]["block"], found["click"]["head"], found["click"]["beside"]) == (0, 0, -1)
    assert "image=1&model=1&beside=-1&block=0&head=0&x=0.6&y=0.075" in found["address"]


def test_blocks_run_the_same_way_alone_and_beside_another_model(explored, in_browser):
    """Of four blocks of three heads, where the screen is wide."""
    page = explored("quickstart", ["model.options.embed_dim=48", "model.options.num_heads=3"])
    headings = [
        in_browser(
            page,
            f"model=0&beside={beside}",
            'return [...document.querySelectorAll(".panel h3")].map((part) => part.innerText)',
        )
        for beside in (-1, 1)
    ]
    assert headings == [["block →, head ↓"], [f"{init}: block →, head ↓" for init in INITS]]


def test_a_convmixer_and_too_many_weights_are_refused(photographs, tmp_path, capsys, monkeypatch):
    command = ["explore", str(photographs[0]), "--out", str(tmp_path / "page.html"), "--recipe"]
    assert main([*command, "cifar10_convmixer"]) == 2
    assert "makes a ConvMixer, whose kernels are the same for every pat" in capsys.readouterr().err
    for limit in ("MOST_WEIGHTS", "MOST"):
        with monkeypatch.context() as patch:
            patch.setattr(figures.explore, limit, 1000)
            assert main([*command, "quickstart"]) == 2
        error = capsys.readouterr().err
        assert "weights do not fit into a page of 5 MB; show fewer images" in error
        assert error.count("\n") == 1 and not (tmp_path / "page.html").exists()


def test_models_that_see_an_image_otherwise_have_a_page_each(
    photographs, tmp_path, capsys, monkeypatch
):
    def view_of(path, recipe):
        return torch.full((3, *recipe.data.image_size), len(recipe.name), dtype=torch.uint8)

    monkeypatch.setattr(figures.explore, "view_of", view_of)
    command = ["explore", str(photographs[0]), "--out", str(tmp_path / "page.html"), "--recipe"]
    assert main([*command, "quickstart", "cifar10_vit_tiny"]) == 2
    error = capsys.readouterr().err
    assert "does not see the images as the model before it does" in error
    assert error.count("\n") == 1 and not (tmp_path / "page.html").exists()
