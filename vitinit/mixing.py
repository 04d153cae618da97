"""What spatial mixing does a model apply right now?

Every model here alternates channel mixing with spatial mixing X ← M X. For attention M is the
softmax matrix of a head, which depends on the input; `mixing_matrices` reads it off a real forward
pass, and `target_mass` says how much of it lies on the token that an impulse filter would pick.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from .filters import Offset, shift_targets
from .models.vit import VisionTransformer


@torch.no_grad()
def mixing_matrices(model: nn.Module, images: Tensor, *, blocks: Iterable[int] | None = None,
                    heads: Sequence[int] | None = None) -> dict[int, Tensor]:
    """The attention matrices that the model applies to `images`, by block.

    images: (B, 3, H, W), normalised as for the model. blocks, heads: indices, default all.
    Returns {block: (B, len(heads), N, N)}, N counting the class token where there is one.
    Raises ValueError for a model without attention or a block that it lacks.
    """
    if not isinstance(model, VisionTransformer):
        raise ValueError(f"mixing matrices of a {type(model).__name__} are not defined here; "
                         "expected a VisionTransformer")
    wanted = range(len(model.blocks)) if blocks is None else list(blocks)
    for block in wanted:
        if not 0 <= block < len(model.blocks):
            raise ValueError(f"block {block} is asked for, but the model has blocks 0…"
                             f"{len(model.blocks) - 1}")
    found: dict[int, Tensor] = {}

    def reader(block: int):
        def read(attention, arguments):
            weights = attention.mixing_weights(*arguments)               # (B, h, N, N)
            found[block] = weights if heads is None else weights[:, list(heads)]
        return read

    # The hook sees the very input that the attention of this block gets.
    hooks = [model.blocks[block].attn.register_forward_pre_hook(reader(block)) for block in wanted]
    training = model.training
    try:
        model.eval()
        model(images)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return found


def target_mass(weights: Tensor, offsets: Sequence[Offset], grid: tuple[int, int]) -> Tensor:
    """The share of attention on each head's target token, (h,): 1 is a perfect shift.

    weights: (..., h, N, N) with N = grid cells, or that plus prefix tokens, which come first. Their
        rows are left out, and the other rows are normalised over the patch tokens alone.
    offsets: one (down, right) a head. Rows whose target is off the grid are left out of the mean.
    """
    cells = grid[0] * grid[1]
    if weights.shape[-3] != len(offsets):
        raise ValueError(f"{weights.shape[-3]} heads but {len(offsets)} offsets")
    patches = weights[..., -cells:, -cells:]
    patches = patches / patches.sum(dim=-1, keepdim=True)                # (..., h, cells, cells)
    masses = []
    for head, offset in enumerate(offsets):
        targets = shift_targets(offset, grid).to(weights.device)
        rows = (targets >= 0).nonzero()[:, 0]
        masses.append(patches[..., head, rows, targets[rows]].mean())
    return torch.stack(masses)


def mean_kernel(weights: Tensor, grid: tuple[int, int], radius: int) -> Tensor:
    """Mean attention by offset, (..., 2·radius + 1, 2·radius + 1): the kernel that a head is nearest
    to being. Entry [radius + down, radius + right] averages over the tokens that have a token there.

    weights: (..., N, N), prefix tokens first and left out, as in `target_mass`.
    """
    cells = grid[0] * grid[1]
    patches = weights[..., -cells:, -cells:]
    patches = patches / patches.sum(dim=-1, keepdim=True)
    kernel = []
    for down in range(-radius, radius + 1):
        for right in range(-radius, radius + 1):
            targets = shift_targets((down, right), grid)
            rows = (targets >= 0).nonzero()[:, 0]
            kernel.append(patches[..., rows, targets[rows]].mean(dim=-1))
    return torch.stack(kernel, dim=-1).unflatten(-1, (2 * radius + 1, 2 * radius + 1))
