"""Heat over a photograph is the query's row of the attention matrix; `mass` is what targets get."""

import pytest
import torch

from vitinit.data.images import decode_image
from vitinit.mixing import mixing_matrices, target_mass
from vitinit.mixing.filters import ordered_offsets
from vitinit.programs.figures import attention
from vitinit.programs.figures.program import main
from vitinit.programs.figures.subjects import fresh, photographs
from vitinit.programs.shared.plot import LOOKS
from vitinit.runs.data import as_input, evaluation_view


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_heat_is_the_querys_row_without_prefix_tokens(prefix):
    """Entry (query, key) of the matrix is 100 · query + key, so the result shows its origin."""
    tokens = torch.arange(-prefix, 35)
    weights = (100 * tokens[:, None] + tokens).expand(3, -1, -1).float()
    heat = attention.heat_maps(weights, (5, 7), (2, 4))
    expected = 100 * 18 + torch.arange(35.0).view(5, 7)  # query 2 · 7 + 4
    assert torch.equal(heat, expected.expand(3, -1, -1))


def test_rows_are_blocks_and_the_query_is_in_the_middle(draw, sizes, image_tree, monkeypatch):
    seen, corners = [], []
    real, rectangle = attention.heat_maps, attention.pyplot().Rectangle
    monkeypatch.setattr(
        "matplotlib.pyplot.Rectangle",
        lambda corner, *more, **how: (corners.append(corner), rectangle(corner, *more, **how))[1],
    )

    def remember(weights, grid, query):
        seen.append((query, real(weights, grid, query)))
        return seen[-1][1]

    monkeypatch.setattr(attention, "heat_maps", remember)
    photograph = image_tree / "val" / "red" / "03.png"
    draw(
        "attention",
        photograph,
        "--recipe",
        "quickstart",
        "--init",
        "impulse",
        *sizes,
        "--blocks",
        1,
        0,
        "--heads",
        2,
        1,
    )
    assert [query for query, _ in seen] == [(2, 3)] * 2
    (subject,) = fresh(["quickstart"], ["impulse"], seed=None, sets=sizes[1::2])
    view = evaluation_view(subject.recipe)(decode_image(str(photograph)))
    image = as_input(view[None], subject.recipe)
    rows = mixing_matrices(subject.model, image)[1][0][[2, 1], 17]  # token 2 · 7 + 3 of 35
    assert torch.equal(seen[0][1], rows.view(2, 5, 7))
    assert [*dict.fromkeys(corners)] == [(6.0, 4.0)]  # of patches of 2×2 pixels


@pytest.mark.parametrize("heads, shown", [(1, 1), (2, 2), (3, 3), (13, 3)])
def test_the_first_three_heads_are_shown_as_far_as_there_are(
    heads, shown, sizes, image_tree, panels, tmp_path
):
    size = ("--set", f"model.options.num_heads={heads}", "--set", "model.options.embed_dim=78")
    paths = (str(image_tree / "val" / "red" / "03.png"), "--out", str(tmp_path / "a.png"))
    assert main(["attention", *paths, "--recipe", "quickstart", *sizes, *size]) == 0
    titles = [axis.get_title() for axis in panels if axis.get_title()]
    assert titles == ["photograph", *(f"head {head}" for head in range(shown))]


def test_blocks_of_fewer_heads_leave_the_last_places_empty(image_tree, panels, tmp_path):
    sizes = "{depths = [1, 1], num_heads = [1, 2], embed_dim = 12, window_size = 4, patch_size = 4}"
    model = ["--set", "data.image_size=32", "--set", f"model.options={sizes}", "--init", "lecun"]
    model += ["--recipe", "quickstart", "--set", "model.name=swin_tiny"]
    paths = (str(image_tree / "val" / "red" / "03.png"), "--out", str(tmp_path / "a.png"))
    assert main(["attention", *paths, *model, "--blocks", "0", "1"]) == 0
    places = [axis for axis in panels if axis.get_label() != "<colorbar>"]
    assert [axis.axison for axis in places] == [True, True, False, True, True, True]


def test_a_swins_later_stages_have_their_own_grid(draw, image_tree, monkeypatch):
    grids = []
    real = attention.heat_maps
    monkeypatch.setattr(
        attention, "heat_maps", lambda *arguments: grids.append(arguments[1:]) or real(*arguments)
    )
    draw(
        "attention",
        image_tree / "val" / "red" / "03.png",
        "--recipe",
        "cifar10_swin_tiny",
        "--set",
        "model.options.depths=[2,1]",
        "--set",
        "model.options.embed_dim=12",
        "--set",
        "model.options.num_heads=[3,3]",
        "--blocks",
        0,
        2,
    )
    assert grids == [((16, 16), (8, 8)), ((8, 8), (4, 4))]  # each with its middle


@pytest.mark.parametrize("init", ["default", "mimetic", "impulse", "deep_impulse"])
def test_the_masses_are_those_on_the_inits_targets(sizes, init):
    """In order in every block for `impulse` and for inits without any; else on from block to block.
    Of three heads, the first of block 0 alone has the offset (0, 0) if the offsets go on."""
    (subject,) = fresh(["quickstart"], [init], seed=None, sets=sizes[1::2])
    found = attention.mass_of(subject, None, 5)
    cells, goes_on = ordered_offsets(3), init == "deep_impulse"
    for block, weights in mixing_matrices(
        subject.model, photographs(None, 5, subject.recipe)
    ).items():
        first = 3 * block if goes_on else 0
        each = target_mass(weights, [cells[first + head] for head in range(3)], (5, 7)).tolist()
        centre, others = (each[:1], each[1:]) if first == 0 else ([], each)
        assert found.others[block] == pytest.approx(sum(others) / len(others))
        assert centre == pytest.approx([found.centre[block]] if centre else [])
    assert found.uniform == pytest.approx([1 / 35] * 2)


def test_the_numbers_are_printed_and_drawn_by_part_and_init(panels, sizes, tmp_path, capsys):
    assert (
        main(
            [
                "mass",
                "--recipe",
                "quickstart",
                "--init",
                "default",
                "impulse",
                *sizes,
                "--count",
                "5",
                "--out",
                str(tmp_path / "mass.png"),
            ]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()[:3]) for line in lines[:4]] == [
        f"quickstart, {init}: {part}"
        for init in ("default", "impulse")
        for part in ("centre", "others")
    ]
    default, impulse = (float(lines[row].split()[-2]) for row in (0, 2))  # centre head, block 0
    assert default == pytest.approx(1 / 35, abs=0.01) and impulse > 10 * default
    assert [axis.get_title() for axis in panels] == [
        "quickstart, centre heads",
        "quickstart, other heads",
    ]
    uniform, _, last = panels[0].lines
    assert uniform.get_ydata().tolist() == pytest.approx([1 / 35] * 2)
    assert (last.get_color(), last.get_linestyle()) == LOOKS["impulse"]
    assert last.get_ydata()[0] == pytest.approx(impulse, abs=1e-3)
    labels = [text.get_text() for text in panels[0].figure.legends[0].get_texts()]
    assert labels == ["uniform attention", "default", "impulse"]
