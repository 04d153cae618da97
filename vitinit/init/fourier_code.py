"""A position embedding that shifts by rotation: pairs of cosine and sine of 2-D waves over the grid.

Pair k of the token at place (y, x) is (cos, sin) of u_k·y + v_k·x + phase_k. Moving by an offset turns
each pair by the angle u_k·δy + v_k·δx, exactly; so of two tokens' pairs, one of them turned, the
products sum to Σ w_k cos(…(Δ − δ)), which is largest where the displacement Δ is the offset δ.

Attention reads the code through a LayerNorm, which shifts and divides each token by numbers that
depend on its content. Three more channels, the bias channels, are constant: 1 or 0 on all patches
and on all prefix tokens. They give queries and keys a bias that passes through the same LayerNorm as
the code, and so take both numbers out of the logit at the target.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..filters import Offset
from .factorize import STEEPEST, smallest_reaching

GOLDEN_ANGLE = math.pi * (3.0 - math.sqrt(5.0))
BIAS_CHANNELS = 3


def waves(grid: tuple[int, int], period: float = 1.0) -> Tensor:
    """(K, 2) radians down and across, slowest first: all waves of the grid up to sign, `period` times
    as long.

    Those that are their own mirror image (constant, and alternating signs) are left out, since they
    have no sine: 30 are left on 8×8, 96 on 14×14, 126 on 16×16. At period 1 they are orthogonal on
    the grid and go round its borders; a longer one does not, and its waves are slower.
    """
    height, width = grid
    found = []
    for u in range(height):
        for v in range(width):
            if (u, v) < ((-u) % height, (-v) % width):       # of two mirror images, one
                across = v - width if 2 * v > width else v   # the slow way round; u is slow already
                found.append((2.0 * math.pi * u / (period * height),
                              2.0 * math.pi * across / (period * width)))
    return torch.tensor(sorted(found, key=lambda wave: math.hypot(*wave)), dtype=torch.float64
                        ).view(-1, 2)


def wave_code(frequencies: Tensor, grid: tuple[int, int]) -> Tensor:
    """(N, 2K): the cosines of all K waves at every token, then their sines; float64.

    Phases go on by the golden angle, so that nowhere all waves peak together: LayerNorm divides by a
    standard deviation, which a large mean over channels would make smaller there.
    """
    places = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).double()   # (N, 2)
    phases = GOLDEN_ANGLE * torch.arange(len(frequencies)).double()
    angles = places @ frequencies.T + phases                             # (N, K)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def gaussian_weights(frequencies: Tensor, grid: tuple[int, int], period: float,
                     sigma: float) -> Tensor:
    """(K,) weights for which Σ w cos is −‖Δ‖² / 2σ² up to a constant, as far as the waves reach.

    They are its Fourier coefficients on the torus of period · grid, by least squares over the
    displacements of the grid; some are negative.
    """
    away = displacements(grid, period)                                   # (M, 2)
    wanted = -away.square().sum(1) / (2.0 * sigma**2)
    if not wanted.isfinite().all():
        raise ValueError(f"sigma is {sigma}, so small that its square is 0; use a larger one")
    shapes = (away @ frequencies.T).cos()                                # (M, K)
    shapes = torch.cat([shapes, torch.ones(len(away), 1, dtype=torch.float64)], dim=1)
    return torch.linalg.lstsq(shapes, wanted[:, None]).solution[:-1, 0]


def displacements(grid: tuple[int, int], period: float) -> Tensor:
    """(M, 2) all places that a query may see, counted from its target.

    Round the borders at period 1, so that each has one of all tokens on the torus, the nearest;
    beyond that the places of a grid twice as large, of which a query sees a part.
    """
    def axis(size: int) -> Tensor:
        if period == 1.0:
            return torch.arange(size) - size // 2
        return torch.arange(1 - size, size)
    return torch.cartesian_prod(axis(grid[0]), axis(grid[1])).double()


def impulse_weights(frequencies: Tensor, grid: tuple[int, int], period: float,
                    mass: float) -> Tensor:
    """(K,) equal weights, as large as it takes to give the target `mass` of the attention.

    Their sum is the logit at the target. Raises ValueError if a thousand would not do.
    """
    shape = (displacements(grid, period) @ frequencies.T).cos().mean(1)  # (M,), 1 at the target
    target = int(shape.argmax())

    def reached(logit: float) -> bool:
        return (logit * shape).softmax(0)[target].item() >= mass
    logit = smallest_reaching(reached, STEEPEST)
    if logit is None:
        raise ValueError(f"so few waves as {len(frequencies)} cannot give one token of a {grid[0]}×"
                         f"{grid[1]} grid a mass of {mass:g}; use more channels, a lower target_mass "
                         "or a shorter period")
    return torch.full((len(frequencies),), logit / len(frequencies), dtype=torch.float64)


def turned_factors(frequencies: Tensor, chosen: Tensor, weights: Tensor,
                   offset: Offset) -> tuple[Tensor, Tensor]:
    """Q and K, each (2m, 2K), of a head that uses the m `chosen` of K waves on `wave_code`.

    frequencies: (K, 2). weights: (m,). Then code(n) Qᵀ K code(n′)ᵀ = Σ w cos of the waves between
    n + offset and n′. A negative weight turns a pair round.
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
    """(P + N, C + 3): the patch tokens' code (N, C) after zeros for P prefix tokens, and the bias channels.

    The first bias channel is 1 on patch tokens, the second 0 on all, the third 1 on prefix tokens.
    """
    table = code.new_zeros(prefix_tokens + len(code), code.shape[1] + BIAS_CHANNELS)
    table[prefix_tokens:, :-BIAS_CHANNELS] = code
    table[prefix_tokens:, -3] = 1.0
    table[:prefix_tokens, -1] = 1.0
    return table


def reading_bias_channels(query: Tensor, key: Tensor, peak: float) -> tuple[Tensor, Tensor]:
    """Q and K, (m + 1, C + 3) each, for logits that LayerNorm upsets little, from those of the code.

    query, key: (m, C). peak: the logit at the target, which is the largest.

    LayerNorm takes the mean over all channels from each, from the second bias channel, too, where nothing but
    that is left; so a row with the sum 0 over all channels does not see it. And it divides a key by
    a scale that differs from token to token: by a tenth, a logit of 30 varies by 3, which is more
    than neighbours on slow waves differ by. The row that is added takes the peak from all logits: at
    the target that leaves 0, which no scale changes, and elsewhere less. A prefix token's logit is
    −peak, as far from the target's as without bias channels; its own queries see all patches alike.
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
