"""Several views of an image at evaluation: airbench's six as their formula, said beside numbers."""

import json

import torch
import torch.nn.functional as F
from torch import nn

from vitinit.programs.shared.views import AIRBENCH, Shift, Views, in_words


def test_the_six_views_are_those_of_airbench():
    """Half of the weight has the image with its mirror image, half two such pairs, shifted."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 7 * 11, 5), nn.Tanh()).double()
    images = torch.randn(
        2, 3, 7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )

    def with_mirror(view):
        return 0.5 * model(view) + 0.5 * model(view.flip(-1))

    padded = F.pad(images, (1, 1, 1, 1), "reflect")
    corners = [with_mirror(padded[:, :, 0:7, 0:11]), with_mirror(padded[:, :, 2:9, 2:13])]
    expected = 0.5 * with_mirror(images) + 0.5 * torch.stack(corners).mean(0)
    torch.testing.assert_close(Views(model, AIRBENCH, True)(images), expected, rtol=1e-12, atol=0)
    asymmetric = Views(model, [Shift(2, -1, 1.0)], False)(images)  # lower by 2, further left by 1
    view = F.pad(images, (2, 2, 2, 2), "reflect")[:, :, 4:11, 1:12]
    torch.testing.assert_close(asymmetric, model(view), rtol=1e-12, atol=0)


def test_views_are_said_beside_the_numbers_that_they_change(
    eval_program, straight, tmp_path, capsys
):
    run, out = straight(schedule__epochs="1"), tmp_path / "found.json"
    words = in_words(AIRBENCH, True)
    assert words == "6 views each: shifts 0,0:0.5 -1,-1:0.25 1,1:0.25, also mirrored"
    losses = []
    for options in ([], ["--flips"], ["--flips", "--shifts"], ["--shifts=0,0:0.5 3,-2:0.5"]):
        assert eval_program.main([str(run), "--json", str(out), "--per-class", *options]) == 0
        found, said = json.loads(out.read_text()), capsys.readouterr().out
        losses.append(found["model"]["loss"])
        assert said.count(f"; {found['views']}") == 3 if options else "views" not in found
    assert len({*losses}) == 4 and found["views"].startswith("2 views each: shifts 0,0:0.5 3,-2")
    assert eval_program.main([str(run), str(run / "best.pt"), "--flips"]) == 0
    assert "| images; 2 views each: also mirrored |" in capsys.readouterr().out
    for wrong, line in (
        ("0,0:0.5", "expected weights above 0 that add up to 1, not 0.5"),
        ("-1,-1:-0.5 0,0:1.5", "expected weights above 0 that add up to 1"),
        ("1:1", "1:1: expected DOWN,RIGHT:WEIGHT"),
        ("8,0:1", "by 8 pixels, and"),
    ):
        assert eval_program.main([str(run), "--shifts", wrong]) == 2
        assert line in capsys.readouterr().err
    assert eval_program.main([str(run), "--flips", "--fit-temperature"]) == 2
    assert "is fitted on one view of each image" in capsys.readouterr().err
