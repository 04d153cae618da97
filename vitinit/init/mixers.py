"""Inits of an MLP-Mixer and of a ConvMixer, whose layers can be shifts exactly; see `impulse`."""

from typing import Literal

import torch
from torch import Generator, Tensor

from ..base.values import AtLeastOne, Count, PositiveNumber
from ..mixing.filters import (
    Order,
    head_offsets,
    impulse_kernel,
    offsets_on_grid,
    ordered_offsets,
    shift_matrix,
)
from ..models.conv_mixer import ConvMixer
from ..models.layers import Mlp
from ..models.mlp_mixer import MlpMixer
from .baseline import Base, draw_base

ENERGY = 1 / 3  # expected Σ w² of PyTorch's draw: k² cells of variance 1 / (3 k²)


@torch.no_grad()
def impulse_mixer(
    model: MlpMixer,
    *,
    generator: Generator,
    base: Base = "default",
    kernel_size: AtLeastOne = 3,
    offsets: Order = "ordered",
    gain: float = 1.0,
    linear_bias: PositiveNumber = 4.0,
) -> None:
    """Make the token MLP of each block a shift by one offset, the same for all channels.

    | tensor (every block)     | N tokens, hidden ≥ 2N            | N ≤ hidden < 2N               |
    |--------------------------|----------------------------------|-------------------------------|
    | mlp_tokens.fc1           | [H; −H], bias 0                  | H, bias b                     |
    | mlp_tokens.fc2           | gain · [I, −I], bias 0           | gain · I, bias −gain · b      |
    | everything else          | as `base` drew it                | as `base` drew it             |

    H is the matrix of the shift. With at least twice as many hidden units as tokens the MLP is
    exactly linear, because GELU(x) − GELU(−x) = x. With fewer (Mixer-S/16 and B/16) the hidden
    units work where GELU is nearly linear: GELU(x + b) − b ≈ x with b = linear_bias. For standard
    normal x, a fair assumption after LayerNorm, the root mean square error is 1.5 % at b = 4 and
    6e-6 at b = 8. The larger b is, the longer the MLP stays linear in training. Surplus hidden
    units keep their rows of fc1 and get zero columns in fc2.

    kernel_size: of the impulse kernel.
    offsets: each block has one, in turn if "ordered", drawn if "random".
    gain: factor on the shifted tokens, which are added to the block's input by the skip connection.

    arXiv 2505.19985 reports results for Mixer without a construction; this one is ours. Raises
    ValueError for options out of range and for fewer hidden units than tokens.
    """
    tokens = model.grid[0] * model.grid[1]
    hidden = model.blocks[0].mlp_tokens.fc1.out_features
    if hidden < tokens:
        raise ValueError(
            f"init 'impulse' needs as many hidden units in the token MLP as tokens, "
            f"{tokens}, and it has {hidden}; raise tokens_ratio or patch_size"
        )
    cells = offsets_on_grid(kernel_size, model.grid)  # checks kernel_size, before any draw
    draw_base(model, base, generator)

    targets = head_offsets(len(model.blocks), cells, offsets, generator)
    for block, offset in zip(model.blocks, targets):
        shift = shift_matrix(offset, model.grid)
        write_linear_map(block.mlp_tokens, shift, gain=gain, linear_bias=float(linear_bias))


def write_linear_map(mlp: Mlp, matrix: Tensor, *, gain: float, linear_bias: float) -> None:
    """Make x ↦ fc2(GELU(fc1(x))) the map gain · matrix, (N, N); see `impulse_mixer`."""
    identity = torch.eye(len(matrix))
    bias = linear_bias
    if mlp.fc1.out_features >= 2 * len(matrix):
        matrix = torch.cat([matrix, -matrix])
        identity = torch.cat([identity, -identity], dim=1)
        bias = 0.0
    used = len(matrix)  # hidden units
    mlp.fc1.weight[:used] = matrix
    mlp.fc1.bias[:used] = bias
    mlp.fc2.weight.zero_()
    mlp.fc2.weight[:, :used] = gain * identity
    mlp.fc2.bias.fill_(0.0 - gain * bias)


@torch.no_grad()
def impulse_conv_mixer(
    model: ConvMixer,
    *,
    generator: Generator,
    base: Base = "default",
    kernel_size: Count = 0,
    offsets: Order = "ordered",
    gain: float = 1.0,
) -> None:
    """Make every depthwise filter an impulse, which picks one neighbour (arXiv 2401.12511, §3).

    | tensor (every block)       | value                                                        |
    |----------------------------|--------------------------------------------------------------|
    | blocks.i.0.fn.0.weight     | gain at the filter's offset, 0 elsewhere                     |
    | blocks.i.0.fn.0.bias       | 0                                                            |
    | everything else            | as `base` drew it                                            |

    kernel_size: of the kernel whose offsets are used, centred in the model's; 0: the model's.
    offsets: "ordered": in turn, the same in every block. "random": a draw per filter (the paper's).
    gain: the value of the impulse. The paper's code uses √⅓, the norm of PyTorch's draw.
    Raises ValueError for options out of range.
    """
    size = model.kernel_size
    if kernel_size > size:
        raise ValueError(
            f"kernel_size is {kernel_size}, expected at most the model's {size}, or 0 for that"
        )
    cells = ordered_offsets(kernel_size or size)
    draw_base(model, base, generator)

    for layer in map(model.depthwise, model.blocks):
        targets = head_offsets(len(layer.weight), cells, offsets, generator)
        kernels = torch.stack([gain * impulse_kernel(offset, size) for offset in targets])
        layer.weight.copy_(kernels[:, None])  # (F, 1, k, k)
        layer.bias.zero_()


@torch.no_grad()
def filters_conv_mixer(
    model: ConvMixer,
    *,
    generator: Generator,
    base: Base = "default",
    kind: Literal["random", "box", "gaussian"] = "random",
    cells: AtLeastOne = 2,
    sigma: PositiveNumber = 1.0,
) -> None:
    """Draw depthwise filters of one kind, at the scale of the paper's code: Σ w² = ⅓ on average.

    | tensor (every block)       | value                                                        |
    |----------------------------|--------------------------------------------------------------|
    | blocks.i.0.fn.0.weight     | see kind                                                     |
    | everything else            | as `base` drew it                                            |

    cells: of "box". sigma: of "gaussian", in cells. (The paper's code calls σ² what is σ here.)

    | kind       | filter                                                                       |
    |------------|------------------------------------------------------------------------------|
    | "random"   | uniform on ±1/k, as PyTorch draws filters                                    |
    | "box"      | one value in `cells` cells, drawn without replacement, 0 in the others; with |
    |            |   cells = k² every filter has the same value in all of its window            |
    | "gaussian" | exp(−‖δ − c‖² / 2σ²) around a random cell c; all filters of a block are      |
    |            |   multiplied by one factor, so that their mean Σ w² is ⅓                     |

    With `train_filters = false` the model keeps them. Raises ValueError for values out of range.
    """
    size = model.kernel_size
    if cells > size**2:
        raise ValueError(f"cells is {cells}, expected at most the {size**2} of the model's kernel")
    draw_base(model, base, generator)

    def draw() -> Tensor:
        if kind == "gaussian":
            return placed_gaussian(size, sigma, generator)
        if kind == "box":
            kernel = torch.zeros(size**2)
            chosen = torch.randperm(size**2, generator=generator)[:cells]
            kernel[chosen] = (ENERGY / cells) ** 0.5
            return kernel.view(size, size)
        return (2.0 * torch.rand(size, size, generator=generator) - 1.0) / size

    for layer in map(model.depthwise, model.blocks):
        weight = layer.weight  # (F, 1, k, k)
        kernels = torch.stack([draw() for _ in range(len(weight))])  # (F, k, k)
        if kind == "gaussian":
            kernels *= (ENERGY / kernels.square().sum((1, 2)).mean()) ** 0.5
        weight.copy_(kernels[:, None])


def placed_gaussian(size: int, sigma: float, generator: Generator) -> Tensor:
    """(size, size): a Gaussian with peak value 1 around a random cell."""
    centre = torch.randint(size, (2,), generator=generator)
    down, right = (torch.arange(size) - centre[:, None]).square()  # (size,) each
    squares = down[:, None] + right  # (size, size)
    return (-squares / (2.0 * sigma**2)).exp()
