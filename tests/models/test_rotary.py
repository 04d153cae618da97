"""Rotary attention against the rotations of three papers, each written out as a matrix."""

from math import cos, pi, sin

import pytest
import torch
from small_models import drawn, normed, redraw
from torch import Tensor

import vitinit
from vitinit.models.attention import Attention
from vitinit.models.rotary import Rotary, frequencies_of
from vitinit.runs.transfer import start_from

GRID, PREFIX, HEADS, DIM = (3, 5), 2, 3, 12
TOKENS, N = PREFIX + 15, DIM // 4  # N: frequencies for each axis

# Which of our pairs, channels 2i and 2i + 1, is each of theirs; theirs, in their order, as (first,
# second channel, ω of the row, ω of the column); and how it is said here.
COLUMNS_FIRST, ROWS_FIRST = [*range(2 * N)], [*range(N, 2 * N), *range(N)]
ROTATIONS = {
    # arXiv 2403.13298, §3.1 and its code: (q[2t], q[2t + 1]) by θ_t p_x, then those by θ_t p_y.
    "RoPE-ViT": (
        COLUMNS_FIRST,
        [(2 * t, 2 * t + 1, 0.0, 100 ** (-t / N)) for t in range(N)]
        + [(2 * t, 2 * t + 1, 100 ** (1 - t / N), 0.0) for t in range(N, 2 * N)],
        (100.0, "index"),
    ),
    # arXiv 2303.11331's code: the row's first, and places scaled to a grid of 16×16.
    "EVA-02": (
        ROWS_FIRST,
        [(2 * t, 2 * t + 1, 16 / 3 * 1e4 ** (-t / N), 0.0) for t in range(N)]
        + [(2 * t, 2 * t + 1, 0.0, 16 / 5 * 1e4 ** (1 - t / N)) for t in range(N, 2 * N)],
        (1e4, "scaled"),
    ),
    # arXiv 2508.10104's code: halves; places from −1 to 1, in periods of 100^(t / n) / 2π.
    "DINOv3": (
        ROWS_FIRST,
        [(t, t + 6, 4 * pi / 3 / 100 ** (t / N), 0.0) for t in range(N)]
        + [(t, t + 6, 0.0, 4 * pi / 5 / 100 ** (t / N - 1)) for t in range(N, 2 * N)],
        (100.0, "centred"),
    ),
    # RoPE-ViT, §3.2: (q[2t], q[2t + 1]) by θx_t p_x + θy_t p_y, both learned for each head.
    "mixed": (COLUMNS_FIRST, [(2 * t, 2 * t + 1) for t in range(2 * N)], (10.0, "index")),
}


def rotary(kind: str = "axial", base: float = 100.0, coordinates: str = "index") -> Rotary:
    return Rotary(
        GRID,
        prefix_tokens=PREFIX,
        heads=HEADS,
        head_dim=DIM,
        kind=kind,
        base=base,
        coordinates=coordinates,
    )


def matrix(token: int, pairs: list[tuple], centred: bool) -> Tensor:
    """The rotation of a token in their channels, (d, d)."""
    rotation = torch.eye(DIM, dtype=torch.float64)
    for a, b, by_row, by_column in pairs if token >= PREFIX else []:
        row, column = divmod(token - PREFIX, GRID[1])
        if centred:  # 2 ((i + ½) / side) − 1, times side / 2
            row, column = row - 1, column - 2
        angle = by_row * row + by_column * column + torch.zeros(()).double()
        rotation[a, a] = rotation[b, b] = angle.cos()
        rotation[b, a], rotation[a, b] = angle.sin(), -angle.sin()
    return rotation


@pytest.mark.parametrize("name", ROTATIONS)
def test_attention_and_gradients_are_those_of_the_papers_rotation(name, monkeypatch, held_against):
    """Angles are rounded to float32 in a model; here they are kept in float64."""
    order, pairs, options = ROTATIONS[name]
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    attention = redraw(
        Attention(
            HEADS * DIM,
            num_heads=HEADS,
            qk_norm_eps=1e-6,
            rotary=rotary("mixed" if name == "mixed" else "axial", *options),
        )
    )
    ours = torch.empty(DIM, dtype=torch.long)  # their channel → ours
    for pair, (a, b, *_) in zip(order, pairs):
        ours[a], ours[b] = 2 * pair, 2 * pair + 1
    x, outputs, weights = drawn(2, TOKENS, HEADS * DIM), [], dict(attention.named_parameters())
    for head in range(HEADS):
        q, k, v = (
            x @ weight.T + bias
            for weight, bias in zip(
                *(
                    weights[f"qkv.{part}"].unflatten(0, (3, HEADS, DIM))[:, head]
                    for part in ("weight", "bias")
                )
            )
        )
        if name == "mixed":
            pairs = [
                (*pair[:2], *omega)
                for pair, omega in zip(pairs, weights["rotary.frequencies"][head])
            ]
        turn = torch.stack([matrix(token, pairs, name == "DINOv3") for token in range(TOKENS)])
        q, k = (
            normed(weights, y, f"{part}_norm", 1e-6)  # arXiv 2302.05442: of each head
            for y, part in ((q, "q"), (k, "k"))
        )
        q, k = (torch.einsum("nij, bnj -> bni", turn, y[..., ours]) for y in (q, k))
        outputs.append((q @ k.mT / DIM**0.5).softmax(-1) @ v)
    expected = torch.cat(outputs, -1) @ weights["proj.weight"].T + weights["proj.bias"]
    actual = attention(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    gradients = [
        torch.autograd.grad(y.square().sum(), weights.values()) for y in (actual, expected)
    ]
    for pair in zip(*gradients):
        torch.testing.assert_close(*pair, rtol=0, atol=1e-9)
    held_against(actual, expected, cases=2)
    held_against(*gradients, cases=0)


@pytest.mark.parametrize("kind", ["axial", "linear", "mixed"])
@pytest.mark.parametrize("coordinates", ["index", "scaled", "centred"])
def test_logits_depend_on_the_displacement_and_prefix_tokens_are_not_turned(kind, coordinates):
    content = drawn(2, 1, 1, HEADS, DIM).expand(-1, -1, TOKENS, -1, -1)
    q, k = rotary(kind, 100.0, coordinates)(*content)
    assert torch.equal(q[:, :PREFIX], content[0, :, :PREFIX])
    logits = torch.einsum("bqhd, bkhd -> qkh", q, k)[PREFIX:, PREFIX:]
    logits = logits.unflatten(1, GRID).unflatten(0, GRID)  # (H, W, H, W, h)
    assert logits.std((2, 3)).min() > 0.1
    torch.testing.assert_close(logits[1:, :, 1:], logits[:-1, :, :-1], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[:, 1:, :, 1:], logits[:, :-1, :, :-1], rtol=0, atol=1e-5)


def test_mixed_frequencies_begin_as_axial_ones_whose_axes_turn_by_a_part_of_a_right_angle():
    size = 10.0 ** (-torch.arange(N).double() / N)
    for head, omega in enumerate(frequencies_of("mixed", HEADS, DIM, 10.0)):
        across, along = size * sin(head / HEADS * pi / 2), size * cos(head / HEADS * pi / 2)
        expected = torch.stack([torch.cat([across, along]), torch.cat([along, -across])], 1)
        torch.testing.assert_close(omega, expected)


@pytest.mark.parametrize(
    "dtype, near", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)]
)
def test_what_is_compiled_is_what_runs(dtype, near, monkeypatch):
    turning = rotary("mixed").to(torch.promote_types(dtype, torch.float32))
    given = drawn(2, 2, TOKENS, HEADS, DIM).to(dtype).requires_grad_()

    def run() -> list[Tensor]:
        q, k = turning(*given)
        assert q.dtype == dtype
        return [q, k, *torch.autograd.grad((q * k).double().sum(), [given, turning.frequencies])]

    eager = run()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for value, other in zip(run(), eager):
        torch.testing.assert_close(value, other, rtol=0, atol=near)


@pytest.mark.parametrize("kind", ["axial", "mixed"])
def test_images_of_another_size_need_no_resizing(kind):
    small, large = (
        vitinit.build_model(
            "vit_tiny",
            num_classes=7,
            image_size=size,
            patch_size=4,
            embed_dim=24,
            depth=2,
            num_heads=3,
            pos_embed="rope",
            rope_frequencies=kind,
        )
        for size in ((12, 20), (20, 28))
    )
    report = start_from(large, small.state_dict(), "small", (3, 5))
    assert not (report.resized or report.dropped or report.kept)
    assert [name for name in small.state_dict() if "rotary" in name] == [
        f"blocks.{block}.attn.rotary.frequencies" for block in range(2) if kind == "mixed"
    ]
    few, many = (
        model.blocks[0].attn.rotary.turns()[1:].unflatten(0, model.grid) for model in (small, large)
    )
    assert torch.equal(few, many[:3, :5])
