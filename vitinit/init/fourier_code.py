"""The position embedding of `deep_impulse`: the Fourier code and the bias channels.

**The Fourier code** is a table of cosines and sines of 2-D waves over the token grid. For wave k
with frequency (u_k, v_k), in radians per row and per column, the token in row y and column x holds
the pair

    (cos a, sin a)   with   a = u_k · y + v_k · x + phase_k.

Moving by an offset (δy, δx) adds u_k · δy + v_k · δx to the angle a, whatever the token, and so
rotates the pair by that angle. A linear layer can therefore compute the pair of another grid cell
from the pair of its own. If K selects the pairs of some waves and Q selects them and rotates them
by the head's offset δ, the logit between tokens at displacement Δ is

    Σ_k w_k cos(u_k · (Δy − δy) + v_k · (Δx − δx)),

which is largest at the target, Δ = δ, because all cosines are 1 there.

**The bias channels**, an option, are three more channels of the position embedding, each constant on
all patch tokens and on all prefix tokens (class, distillation and register tokens):

| bias channel | patch tokens | prefix tokens |
|--------------|--------------|---------------|
| first        | 1            | 0             |
| second       | 0            | 0             |
| third        | 0            | 1             |

They are of use because attention reads the code through a LayerNorm, which subtracts a mean from
every token and divides it by a standard deviation, both of which depend on the token's content. The
bias channels pass through the same LayerNorm. The second then holds nothing but the subtracted
mean, so Q and K can cancel it. With the other two, Q and K subtract the value of the peak from all
logits, so that the logit at the target is 0 whatever the standard deviation; see
`extend_to_bias_channels`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..filters import Offset

GOLDEN_ANGLE = math.pi * (3.0 - math.sqrt(5.0))
BIAS_CHANNELS = 3
STEEPEST = 1e3          # a mass that needs a larger logit than this counts as out of reach
BISECTIONS = 60         # more than a double has significant bits


def waves(grid: tuple[int, int], period: float = 1.0) -> Tensor:
    """The frequencies of all waves of the grid, slowest first: (K, 2), radians per row and column.

    These are the frequencies of the grid's discrete Fourier transform, one of each pair ±(u, v),
    divided by `period`. The waves that equal their own mirror image (the constant, and those whose
    sign alternates) are left out, since they have no sine. That leaves 30 waves on 8×8 tokens, 96
    on 14×14 and 126 on 16×16. At period 1 the waves are orthogonal on the grid and wrap around its
    borders; at longer periods they are slower and do neither.
    """
    height, width = grid
    frequencies = []
    for u in range(height):
        for v in range(width):
            if (u, v) < ((-u) % height, (-v) % width):       # one of each pair ±(u, v)
                across = v - width if 2 * v > width else v   # the slower of two aliases; u already is
                frequencies.append((2.0 * math.pi * u / (period * height),
                                    2.0 * math.pi * across / (period * width)))
    frequencies.sort(key=lambda wave: math.hypot(*wave))
    return torch.tensor(frequencies, dtype=torch.float64).view(-1, 2)


def wave_code(frequencies: Tensor, grid: tuple[int, int]) -> Tensor:
    """The Fourier code, (N, 2K) in float64: the cosines of all K waves, then their sines.

    The phases advance by the golden angle from wave to wave, so that there is no token at which all
    waves peak together. At such a token the mean over channels would be large, and LayerNorm's
    standard deviation therefore small.
    """
    cells = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).double()    # (N, 2)
    phases = GOLDEN_ANGLE * torch.arange(len(frequencies)).double()
    angles = cells @ frequencies.T + phases                              # (N, K)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def gaussian_weights(frequencies: Tensor, grid: tuple[int, int], period: float,
                     sigma: float) -> Tensor:
    """Weights w, (K,), for which Σ w cos is near −‖Δ‖² / 2σ², up to a constant.

    Δ is the displacement from the target. The weights are fitted by least squares over the
    displacements that occur on the grid, with a constant as a free term; some are negative. Raises
    ValueError if sigma² underflows to 0.
    """
    away = displacements(grid, period)                                   # (M, 2), from the target
    wanted = -away.square().sum(1) / (2.0 * sigma**2)
    if not wanted.isfinite().all():
        raise ValueError(f"sigma is {sigma}, so small that its square is 0; use a larger one")
    shapes = (away @ frequencies.T).cos()                                # (M, K)
    shapes = torch.cat([shapes, torch.ones(len(away), 1, dtype=torch.float64)], dim=1)
    return torch.linalg.lstsq(shapes, wanted[:, None]).solution[:-1, 0]


def displacements(grid: tuple[int, int], period: float) -> Tensor:
    """All displacements from a query's target at which there may be tokens: (M, 2).

    At period 1 the waves wrap around the borders, so each token of the grid counts once, at its
    nearest displacement on the torus (M = N). At longer periods these are all displacements from
    1 − size to size − 1 on each axis; any one query finds tokens at only a part of them.
    """
    def axis(size: int) -> Tensor:
        if period == 1.0:
            return torch.arange(size) - size // 2
        return torch.arange(1 - size, size)
    return torch.cartesian_prod(axis(grid[0]), axis(grid[1])).double()


def impulse_weights(frequencies: Tensor, grid: tuple[int, int], period: float,
                    mass: float) -> Tensor:
    """Equal weights, (K,), just large enough to give the target the share `mass` of the attention.

    Their sum is the logit at the target. Raises ValueError if a logit of STEEPEST is not enough.
    """
    shape = (displacements(grid, period) @ frequencies.T).cos().mean(1)  # (M,), 1 at the target
    target = int(shape.argmax())

    def reached(logit: float) -> bool:
        return (logit * shape).softmax(0)[target].item() >= mass
    logit = smallest_reaching(reached, STEEPEST)
    if logit is None:
        raise ValueError(f"{len(frequencies)} wave(s) cannot give one token of a {grid[0]}×{grid[1]} "
                         f"grid a mass of {mass:g}; use more channels, a lower target_mass or a shorter "
                         "period")
    return torch.full((len(frequencies),), logit / len(frequencies), dtype=torch.float64)


def smallest_reaching(reached: Callable[[float], bool], largest: float) -> float | None:
    """The smallest number in [0, largest] for which `reached` is true, or None.

    Returns None if `reached` is false for `largest`. The search is a bisection, so `reached` must
    be monotone: true for all numbers above the smallest for which it is true. An example is whether
    the mass of a target, which grows with the scale of the logits, exceeds a wanted value.
    """
    if not reached(largest):
        return None
    low, high = 0.0, largest
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def rotated_factors(frequencies: Tensor, chosen: Tensor, weights: Tensor,
                    offset: Offset) -> tuple[Tensor, Tensor]:
    """Q and K, each (2m, 2K), of a head that reads m of the K waves of `wave_code`.

    frequencies: (K, 2). chosen: (m,) indices of waves. weights: (m,).

    With code(n) the row of token n, code(n) Qᵀ K code(n′)ᵀ = Σ w cos(angle between n + offset and
    n′), a sum over the chosen waves. A negative weight reverses the sign of the query's pair.
    """
    pairs, count = len(frequencies), len(chosen)
    query, key = (torch.zeros(2 * count, 2 * pairs, dtype=torch.float64) for _ in range(2))
    cosine, sine = torch.arange(count), torch.arange(count, 2 * count)
    root = weights.abs().sqrt()
    turn = frequencies[chosen] @ torch.tensor(offset, dtype=torch.float64)       # (m,) angles
    key[cosine, chosen] = key[sine, pairs + chosen] = root
    signed = root * weights.sign()
    # cos(a + t) = cos t · cos a − sin t · sin a; sin(a + t) = sin t · cos a + cos t · sin a
    query[cosine, chosen], query[cosine, pairs + chosen] = signed * turn.cos(), -signed * turn.sin()
    query[sine, chosen], query[sine, pairs + chosen] = signed * turn.sin(), signed * turn.cos()
    return query, key


def with_bias_channels(code: Tensor, prefix_tokens: int) -> Tensor:
    """Add the bias channels and the rows of the prefix tokens to the code: (P + N, C + 3).

    code: (N, C), of the patch tokens.

    The rows of the P prefix tokens come first. They have zeros in place of the code. The table in
    the module's docstring lists the values of the bias channels.
    """
    table = code.new_zeros(prefix_tokens + len(code), code.shape[1] + BIAS_CHANNELS)
    table[prefix_tokens:, :-BIAS_CHANNELS] = code
    table[prefix_tokens:, -3] = 1.0
    table[:prefix_tokens, -1] = 1.0
    return table


def extend_to_bias_channels(query: Tensor, key: Tensor, peak: float) -> tuple[Tensor, Tensor]:
    """Extend Q and K to the bias channels, so that LayerNorm disturbs the logits less.

    query, key: (m, C) each. peak: the logit at the target, which is the largest.

    Returns two matrices of (m + 1, C + 3).

    *Mean.* LayerNorm subtracts a token's mean over channels from every channel. A row of Q or K is
    unaffected if its entries sum to 0. Each row's entry for the second bias channel, which is 0 on
    all tokens, is chosen to make that so.

    *Scale.* LayerNorm also divides each key by a standard deviation that differs from token to
    token. Where it differs by a tenth, a logit of 30 changes by 3, more than the code's logits of
    neighbouring tokens differ where the waves are slow. The additional row of Q and K subtracts
    `peak` from all logits. The logit at the target is then 0, which a division leaves unchanged,
    and all others are negative. A prefix token, as a key, gets the logit −peak: as far below the
    target's as without bias channels. As a query, it attends to all patches equally.
    """
    root = math.sqrt(abs(peak))
    rows = []
    for factor, biases in ((query, (-math.copysign(root, peak), 0.0, 0.0)), (key, (root, 0.0, root))):
        row = factor.new_zeros(len(factor) + 1, factor.shape[1] + BIAS_CHANNELS)
        row[:-1, :-BIAS_CHANNELS] = factor
        row[-1, -BIAS_CHANNELS:] = row.new_tensor(biases)
        row[:, -2] = -row.sum(1)
        rows.append(row)
    return rows[0], rows[1]
