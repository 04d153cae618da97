"""Deep impulse initialisation: every block of a ViT starts as a convolution, not only the first.

`impulse` (arXiv 2505.19985) solves Q and K of each head so that every token attends to one of its
neighbours, which the head recognises by the position embedding. The effect fades with depth: V,
proj and the MLPs write over the position embedding, and LayerNorm divides it by more and more.
`deep_impulse` reserves ten channels of the residual stream, to which no layer writes at the start:

- The *code*, eight channels: cosine and sine of four waves over the token grid. Moving by an offset
  turns each pair by an angle that is the same for every token. So if K selects the pairs, and Q
  selects them and turns them by the head's offset, the logit at displacement Δ from a query's
  target is ℓ times the mean of the waves' cosines at Δ: largest, ℓ, at the target.
- Two *constants*, ±a on every token, which hold most of the variance that LayerNorm divides by. So
  it divides all tokens by nearly the same number, and its weight makes up for that.

All sizes are measured: images pass through the model while it is written. No paper describes this.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from ..base.values import AtLeastOne, BelowOne, NonNegative, ProperFraction
from ..mixing import run
from ..mixing.filters import head_offsets, logit_for, offsets_on_grid
from .attentions import Block, Layout
from .baseline import Base, draw_base, whiten_patches
from .layout import vit_layout
from .mimetic import write_values
from .residual_stream import ResidualStream, noise_images, stream_of

WAVES = ((1, 0), (0, 1), (1, 1), (1, -1))  # turns over the height, and over the width, of the grid
PHASE = math.pi * (3.0 - math.sqrt(5.0))  # the golden angle, so that no token is at all peaks
CODE_RMS = 0.36  # of what the code adds to pos_embed, over all channels; as in `impulse`
MOST_IMAGES, NOISE_IMAGES = 512, 64  # used of those given; drawn where none are
LEAST_MASS = 1.25  # in units of uniform attention, where Q, K and their gradients are 0


def waves_of(vit: Layout) -> tuple[Tensor, Tensor]:
    """The frequencies of the K waves, (K, 2) in radians per row and column, and all cells, (N, 2).

    A head reads two channels per wave: K is 4, or less for a head_dim below 8. Raises ValueError.
    """
    if vit.shifting:
        raise ValueError(
            "init 'deep_impulse' reserves channels in every block, and the first "
            f"{len(vit.shifting)} mix by shifts; expected shift_blocks = 0, or another init"
        )
    _, head_dim, dim = vit.first.q.shape
    count = min(len(WAVES), head_dim // 2)
    if not vit.learned or count < 2 or dim <= 2 * count + 2:
        raise ValueError(
            "init 'deep_impulse' writes pos_embed = \"learned\", and needs head_dim ≥ "
            f"4 and embed_dim > 10; the model has head_dim {head_dim}, embed_dim {dim}"
            + ("" if vit.learned else " and a fixed position embedding")
        )
    cells = torch.cartesian_prod(*map(torch.arange, vit.grid)).float()
    turns = torch.tensor(WAVES[:count]).to(cells)  # (K, 2)
    return 2.0 * math.pi * turns / torch.tensor(vit.grid), cells


def logits_of(target_mass: tuple[float, float], shape: Tensor, depth: int) -> list[float]:
    """The logit ℓ of each block, which changes linearly from one target_mass to the other.

    shape: (N,), the logits in units of ℓ, with the target at cell 0. Raises ValueError.
    """
    floor = min(LEAST_MASS / len(shape), 0.999)
    first, last = (logit_for(max(mass, floor), shape, target=0) for mass in target_mass)
    if first is None or last is None:
        raise ValueError(
            f"target_mass is {target_mass}, which no logit below 1,000 gives to one "
            f"of {len(shape)} tokens; lower it"
        )
    return torch.linspace(first, last, depth).tolist()


def write_positions(
    vit: Layout, stream: ResidualStream, waves: Tensor, cells: Tensor, first: int
) -> None:
    """Write the code into pos_embed, and zero what else writes to the channels before `first`."""
    angles = cells @ waves.T + PHASE * torch.arange(len(waves))  # (N, K)
    amplitude = CODE_RMS * math.sqrt(vit.pos_embed.shape[1] / len(waves))
    vit.pos_embed[:, :first] = 0.0
    code = torch.cat([angles.cos(), angles.sin()], 1)  # (N, 2K)
    vit.positions[:, : 2 * len(waves)] = amplitude * code
    for tensor in stream.writers:
        tensor[:first] = 0.0
    for token in vit.tokens:
        token[..., :first] = 0.0


def write_constants(vit: Layout, x: Tensor, share: float, first: int) -> None:
    """Write ±size into the two channels before `first` of all tokens: in x, (n, P + N, D), and in
    what makes it up. share: of the variance of the patches' tokens that the constants then have.
    """
    channels = slice(first - 2, first)
    of_content = variance(vit, x)
    size = (share / (1.0 - share) * of_content * x.shape[2] / 2) ** 0.5
    pair = size * torch.tensor([1.0, -1.0])
    x[..., channels] = pair
    vit.pos_embed[:, channels] = pair
    missing = x.shape[1] - len(vit.pos_embed)  # prefix tokens without positions: the last
    for token in reversed(vit.tokens):
        if missing > 0:
            token[..., channels] = pair
            missing -= token.shape[-2]


def write_turns(block: Block, turn: Tensor, logit: float, y: Tensor) -> None:
    """Let K select the code, and Q select it and turn it by `turn`, (h, K) in radians.

    y: what they read of patches, (n, N, D), by which they are scaled, so that the logit is `logit`.
    """
    for tensor in (block.q, block.k, block.q_bias, block.k_bias):
        if tensor is not None:
            tensor.zero_()
    code = 2 * turn.shape[1]  # channels
    square = y[..., :code].square().sum(-1).mean().item()  # the length of what is read
    gain = math.sqrt(logit * math.sqrt(block.q.shape[1]) / square)
    cos = turn.cos().diag_embed()  # (h, K, K)
    sin = turn.sin().diag_embed()
    # cos(a + t) = cos t · cos a − sin t · sin a;  sin(a + t) = sin t · cos a + cos t · sin a
    to_cos = torch.cat([cos, -sin], 2)  # (h, K, 2K)
    to_sin = torch.cat([sin, cos], 2)
    block.q[:, :code, :code] = gain * torch.cat([to_cos, to_sin], 1)
    block.k[:, :code, :code] = gain * torch.eye(code)


def scale(vit: Layout, first: int, norm: nn.LayerNorm, x: Tensor) -> None:
    """Let a norm make the variance of all channels of x but the constants 1, and these 0."""
    others = torch.cat([x[..., : first - 2], x[..., first:]], dim=-1)
    ratio = variance(vit, x) / variance(vit, others)
    norm.weight.fill_(math.sqrt(ratio))
    norm.weight[first - 2 : first] = 0.0  # else they would be large inputs of all layers


def patches(vit: Layout, x: Tensor) -> Tensor:
    """(n, P + N, D) without the prefix tokens; pooled features, (n, D), as they are."""
    if x.ndim == 2:
        return x
    return x[:, -math.prod(vit.grid) :]


def variance(vit: Layout, x: Tensor) -> float:
    """What LayerNorm divides patches by, squared: over channels, on average over tokens."""
    return patches(vit, x).var(-1, correction=0).mean().item()


def require_reserved(vit: Layout, number: int, x: Tensor, first: int) -> None:
    """Raise an error unless what a block reads, x, (n, P + N, D), is finite, and its channels
    before `first` hold positions and nothing else.
    """
    if not x.isfinite().all():
        raise ArithmeticError(f"what block {number} reads would be infinite or NaN")
    read = patches(vit, x)[..., :first]
    expected = vit.positions[:, :first].expand_as(read)
    if not torch.allclose(read, expected, rtol=1e-4, atol=1e-4):
        raise ValueError(
            "init 'deep_impulse' needs channels that nothing writes to after the "
            f"position embedding, and before block {number} something did"
        )


def pass_images(
    vit: Layout,
    stream: ResidualStream,
    images: Tensor,
    first: int,
    before: Callable[[int, Tensor], None],
    after: Callable[[int, tuple, Tensor], None],
) -> None:
    """Pass images through the model, and `scale` each norm by what it reads, before it computes.

    The norms before attention have more to do. before: called with the number of a block and what
    its norm reads, (n, P + N, D); it scales the norm, too. after: called with the number, the
    norm's inputs and its output.
    """
    reached = set[nn.Module]()

    def reach(norm: nn.Module, write: Callable[[Tensor], None], x: Tensor) -> None:
        if norm in stream.ends:  # of which only the first after the blocks is written
            if vit.blocks[-1].norm not in reached or reached & stream.ends:
                return
        reached.add(norm)
        if x.shape[1] == len(images):  # (P + N, n, D), in a model that has the sequence first
            x = vit.batch_first(x)
        write(x)

    readers: dict[nn.Module, partial[None]] = {}
    for norm in stream.norms | stream.ends:
        readers[norm] = partial(reach, norm, partial(scale, vit, first, norm))
    for number, block in enumerate(vit.blocks):
        readers[block.norm] = partial(reach, block.norm, partial(before, number))
    run(
        vit.model,
        images,
        before=readers,
        after={block.norm: partial(after, number) for number, block in enumerate(vit.blocks)},
    )


@torch.no_grad()
def deep_impulse(
    model: nn.Module | Layout,
    *,
    generator: Generator,
    base: Base = "lecun",
    kernel_size: AtLeastOne = 3,
    target_mass: tuple[ProperFraction, ProperFraction] = (0.66, 0.025),
    value_init: Literal["mimetic", "base"] = "mimetic",
    value_alpha: NonNegative = 0.4,
    value_beta: float = 0.4,
    constant_variance: BelowOne = 0.95,
    patch_init: Literal["whitened", "base"] = "base",
    images: Tensor | None = None,
) -> None:
    """Let every head of every block of a ViT attend to one neighbour, as a convolution does.

    | tensor                                | value                                               |
    |---------------------------------------|-----------------------------------------------------|
    | pos_embed, the first ten channels     | the code, on patch tokens; the constants, on all    |
    | what writes to these channels: rows   | 0                                                   |
    |   of patch_embed, proj, fc2; prefix   |                                                     |
    |   tokens; columns of V                |                                                     |
    | patch_embed, other rows               | "whitened": whitened patches                        |
    | every block: Q and K                  | select the code, Q turned; 0 elsewhere, also biases |
    | every block: V, proj.weight           | "mimetic": factors of αZ − βI on other channels     |
    | LayerNorms, weight                    | makes the variance of other channels 1; constants 0 |
    | everything else                       | as `base` drew it                                   |

    kernel_size: heads go through its offsets in turn, on from block to block (9 for 3×3).
    target_mass: the share of a head's attention to patch tokens that lies on its target, in the
        first block and in the last, at least 1.25 times that of uniform attention; in between, the
        logit changes linearly. Off the grid, the target is at the opposite border.
    value_init, value_alpha, value_beta: as for `mimetic`.
    constant_variance: the share of the constants in the tokens' variance before the first block.
        The larger it is, the more evenly LayerNorm divides the tokens, and the less it holds what
        the blocks write at one size: Muon needs .5 (recipes/what_an_init_is_worth.md).
    patch_init: "whitened": the other channels start as `whitened` writes them. images: as there.
    """
    vit = vit_layout(model)
    stream = stream_of(vit)
    waves, cells = waves_of(vit)
    offsets = offsets_on_grid(kernel_size, vit.grid)
    shape = (cells @ waves.T).cos().mean(1).double()  # (N,), of the logits around cell 0
    logits = logits_of(target_mass, shape, len(vit.blocks))
    first = 2 * len(waves) + 2  # channel after the code and the constants
    draw_base(vit.model, base, generator)
    if patch_init == "whitened":
        whiten_patches(vit.model, images, generator)
    write_positions(vit, stream, waves, cells, first)
    if images is None:
        images = noise_images(vit, NOISE_IMAGES, generator)
    images = images[:MOST_IMAGES].to(vit.pos_embed)

    def before(number: int, x: Tensor) -> None:
        if number == 0:
            write_constants(vit, x, constant_variance, first)
        require_reserved(vit, number, x, first)
        scale(vit, first, vit.blocks[number].norm, x)

    def after(number: int, _: tuple, y: Tensor) -> None:
        block = vit.blocks[number]
        block.v[..., :first] = 0.0
        if value_init == "mimetic":
            write_values(block, value_alpha, value_beta, generator, first=first, shuffled=True)
        heads = len(block.q)
        targets = head_offsets(heads, offsets, "ordered", generator, first=number * heads)
        turn = torch.tensor(targets).to(waves) @ waves.T  # (h, K)
        write_turns(block, turn, logits[number], patches(vit, vit.batch_first(y)))

    pass_images(vit, stream, images, first, before, after)
