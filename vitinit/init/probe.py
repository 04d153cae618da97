"""What forward passes show of a model of another library, before an init is believed to fit it.

A layout (`layout.py`) is what attributes seem to say. Whether an init does what it promises depends
on more, which `probe` sees in forward passes of a copy of the model, which is then as it was: the
order of tokens, positions, and the formula of attention, as the page your_own_code.md explains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ..messages import in_brief
from ..mixing import run
from .stream import image_shape_of, noise_images
from .views import Block, Layout, SwinLayout, VitLayout, WindowBlock

FEW = 2                 # images on which the formula is checked
OTHERWISE = 1e-3        # by which what is computed may differ from what is expected, relatively
MOST_PREFIX_TOKENS = 32
AT_ONCE = 16            # images that pass through the patch embedding together

Changes = Callable[[Tensor], Tensor]    # (m, N) patches that change → (m, T), by how much tokens do


class _Reached(Exception):
    """Ends a forward pass at the first block."""


@torch.no_grad()
def probe(layout: Layout | SwinLayout, images: Tensor | None, *, by_hand: bool = False
          ) -> VitLayout | SwinLayout:
    """See how the model of a layout works: the layout, with what was seen.

    images: (n, C, H, W), normalised, or None for white noise of the size that the model states.
    by_hand: whether the user has written the layout. It is believed where no size of images is
        known, and its attentions where it does not name their modules.
    Raises ValueError for a model that is not what its layout says, or of unknown size of images.
    """
    rng, where = torch.Generator().manual_seed(0), "white noise"
    if images is not None:
        where = f"{min(FEW, len(images))} images"
    elif by_hand and isinstance(layout, Layout) and layout.grid and not image_shape_of(layout):
        return VitLayout(**vars(layout) | dict(
            prefix=len(layout.pos_embed) - layout.grid[0] * layout.grid[1],
            checked="nothing was checked, as the Layout states no image_shape"))
    else:
        images = noise_images(layout, FEW, rng)
    images = images[:FEW].detach().to(layout.blocks[0].q)
    x = entering(layout, images)[layout.blocks[0].norm]      # (n, T, D), (T, n, D) or a Swin's map
    count = by_image(x, len(images)).shape[1]
    grid = grid_of(layout, images[0], count, rng)
    channels, height, width = images.shape[1:]
    layout, what = replace(layout, image_shape=(channels, height, width)), "grid, order"
    if isinstance(layout, Layout):
        layout = VitLayout(**vars(layout) | dict(
            grid=grid, prefix=count - grid[0] * grid[1],
            sequence_first=x.ndim == 3 and len(x) != len(images)))
        layout = replace(layout, entry=entry_of(layout, images[:1], rng))
        what += ", positions"
    attentions = [block.attention for block in layout.blocks if block.attention is not None]
    if len(attentions) == len(layout.blocks):
        require_formula(layout, attentions, images, grid, rng)
        what += " and formula"
    return replace(layout, checked=f"{what} checked on {where}")


def passed(model: nn.Module, images: Tensor, **hooks: Any) -> None:
    """`run` the model, whose own errors become a ValueError of one line."""
    try:
        run(model, images, **hooks)
    except _Reached:
        pass
    except Exception as error:
        raise ValueError(f"an image of the shape {tuple(images.shape[1:])} does not pass through "
                         f"the model ({in_brief(error, 80)}); give images= of the size that it "
                         "takes, or describe it by a Layout") from error


# Which token is which patch -------------------------------------------------------------------


def entering(layout: Layout | SwinLayout, images: Tensor) -> dict[nn.LayerNorm, Tensor]:
    """What the first block's norm reads, and all LayerNorms before it, in the order of calls."""
    first, attention = layout.blocks[0].norm, layout.blocks[0].attention
    read: dict[nn.LayerNorm, Tensor] = {}
    outside = attention is not None and first not in attention.modules()

    def keep(module: nn.Module, x: Tensor) -> None:
        if isinstance(module, nn.LayerNorm):
            read.setdefault(module, x.clone())
        if module is first or outside and module is attention:
            raise _Reached
    passed(layout.model, images, before={
        module: partial(keep, module) for module in layout.model.modules()
        if isinstance(module, nn.LayerNorm) or module is attention})
    if first not in read:
        raise ValueError("the first attention is called before its norm: post-norm blocks, or "
                         "another norm")
    return read


def by_image(x: Tensor, count: int) -> Tensor:
    """The tokens of `count` images as (count, T, D), whichever of them and T is first."""
    return (x if len(x) == count else x.transpose(0, 1)).flatten(1, -2)


def grid_of(layout: Layout | SwinLayout, image: Tensor, count: int, rng: torch.Generator
            ) -> tuple[int, int]:
    """The grid whose patches of an image, (C, H, W), are the last tokens of `count`, row by row.

    That is the grid that the model states, or one that divides the image. Where a patch changes
    one token alone, few images show it. Otherwise (a stem of several convolutions) one image per
    patch does: what changes a token must move with its row and column. Raises ValueError.
    """
    height, width = image.shape[1:]
    least, most, stated = count, count, None         # tokens of patches, and their grid
    if isinstance(layout, Layout):
        most, stated = min(count, len(layout.pos_embed)), layout.grid
        least = most - MOST_PREFIX_TOKENS
    grids = [grid for grid in ([stated] if stated else sorted(
        product(range(1, min(height, most) + 1), range(1, min(width, most) + 1)),
        key=lambda grid: abs(height / grid[0] - width / grid[1])))       # square patches first
        if least <= grid[0] * grid[1] <= most and not (height % grid[0] or width % grid[1])]
    for grid in grids:
        cells = grid[0] * grid[1]
        tokens = tokens_of_patches(cells, partial(changed, layout, image, rng, grid))
        if tokens is None:
            continue
        if torch.equal(tokens, torch.arange(count - cells, count)):
            return grid
        raise ValueError(
            "tokens of no patch follow those of the patches; expected before them, as a class "
            "token is" if torch.equal(tokens, tokens[0] + torch.arange(cells)) else
            "the tokens of the patches are not in the order of rows")
    for grid in grids:
        if move_with_patches(grid, partial(changed, layout, image, rng, grid)):
            return grid
    raise ValueError(f"in images of {height}×{width}, no grid of patches is seen in which each has "
                     "a token of its own, row by row (the model states "
                     f"{'×'.join(map(str, stated or ['no']))} grid); give images= of the size that "
                     "it takes")


def changed(layout: Layout | SwinLayout, image: Tensor, rng: torch.Generator,
            grid: tuple[int, int], cells: Tensor) -> Tensor:
    """How much each token of the first block changes, (m, T), with these patches, (m, N)."""
    other = torch.randn(image.shape, generator=rng).to(image)
    masks = cells.unflatten(1, grid)                 # (m, rows, columns)
    for axis in (1, 2):
        masks = masks.repeat_interleave(image.shape[axis] // grid[axis - 1], axis)
    images = torch.where(masks[:, None], other, image)                   # (m, C, H, W)
    x = entering(layout, torch.cat([image[None], images]))[layout.blocks[0].norm]
    x = by_image(x, 1 + len(cells))
    return (x[1:] - x[:1]).norm(dim=-1)


def tokens_of_patches(cells: int, changes: Changes) -> Tensor | None:
    """The token of each patch, (N,), if it has one of its own: patches change by binary codes."""
    bits, codes = torch.arange(cells.bit_length())[:, None], torch.arange(1, cells + 1)
    change = changes((codes >> bits) % 2 == 1)       # (bits, T)
    patches = ((change > OTHERWISE * change.max()).long() << bits).sum(0)    # (T,), 0 of no patch
    ordered, tokens = patches.sort(stable=True)
    return tokens[-cells:] if torch.equal(ordered[ordered > 0], codes) else None


def move_with_patches(grid: tuple[int, int], changes: Changes) -> bool:
    """Whether the patches that change the last N tokens lie, on average, as these on the grid."""
    cells = torch.cartesian_prod(*map(torch.arange, grid)).float()       # (N, 2)
    change = torch.cat(list(map(changes, torch.eye(len(cells)).bool().split(AT_ONCE))))
    share = change[:, -len(cells):] / change[:, -len(cells):].sum(0)     # (patches, tokens)
    rows, columns = (share.mT @ cells.to(share)).T.unflatten(1, grid)
    return bool((rows.diff(dim=0) > 0).all() and (columns.diff(dim=1) > 0).all())


def entry_of(vit: VitLayout, image: Tensor, rng: torch.Generator) -> nn.Module:
    """The norm that reads the sum of patches and positions, if the first block reads its output.

    The identity if the first block reads the sum. Raises ValueError if the rows of the position
    embedding are not added to the tokens of the patches, row by row and as they are.
    """
    first, cells, rows = vit.blocks[0].norm, len(vit.positions), len(vit.pos_embed)
    as_it_was = vit.pos_embed.clone()
    before = {norm: by_image(x, 1)[0] for norm, x in entering(vit, image).items() if x.ndim == 3}
    delta, number = torch.randn(vit.pos_embed.shape[1], generator=rng), torch.arange(1, rows + 1)
    norms = [norm for norm, x in before.items()      # those that may read the sum
             if len(x) >= cells and x.shape[1] == len(delta)]
    for bit in range(rows.bit_length()):
        step = ((number >> bit) % 2)[:, None] * delta.to(vit.pos_embed)  # (rows, D)
        vit.pos_embed.add_(step)
        after = entering(vit, image)
        vit.pos_embed.copy_(as_it_was)
        norms = [norm for norm in norms if close(
            by_image(after[norm], 1)[0, -cells:] - before[norm][-cells:], step[-cells:])]
    if first in norms:
        return nn.Identity()
    for norm in norms:
        if close(norm(before[norm]), before[first]):
            return norm
    raise ValueError("the rows of the position embedding are not added to the tokens of the "
                     "patches, row by row and as they are, before the first block")


def close(value: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are of one shape, and agree but for rounding."""
    return value.shape == expected.shape and bool(
        (value - expected).abs().max() <= OTHERWISE * (expected.abs().max() + 1e-6))


# What the attention computes ------------------------------------------------------------------


def require_formula(layout: VitLayout | SwinLayout, attentions: Sequence[nn.Module], images: Tensor,
                    grid: tuple[int, int], rng: torch.Generator) -> None:
    """Draw the weights of each attention at random, for a while, and compare it with its formula.

    attentions: of the blocks. Raises ValueError if one does not read the output of its norm, or
    computes something else than softmax(Q Kᵀ / √d) V·proj from it, or is not called once.
    """
    read: dict[nn.Module, Tensor] = {}
    calls: Counter[nn.Module] = Counter()
    others: list[Block] = []                         # which compute something else
    pairs = list(zip(attentions, layout.blocks))
    saved = {weight: weight.clone() for attention, block in pairs
             for part in (attention, block.norm) for weight in part.parameters()}
    for weight in saved:                             # so that logits are about 1
        draw = torch.randn(weight.shape, generator=rng)
        weight.copy_(draw * weight[0].numel()**-0.5 if weight.ndim > 1 else 1.0 + 0.2 * draw)

    def keep(norm: nn.Module, _: tuple, y: Tensor) -> None:
        read[norm] = y if isinstance(layout, SwinLayout) else layout.batch_first(y)

    def compare(attention: nn.Module, block: Block, _: tuple, output: Any) -> None:
        output, y = output[0] if isinstance(output, tuple) else output, read.get(block.norm)
        calls[attention] += 1
        results: Iterable[tuple[Tensor, Tensor]] = ()        # of the attention, and of the formula
        if y is not None and isinstance(block, WindowBlock):
            results = within_windows(block, y, output, grid)
        elif y is not None:
            results = product((output, output.transpose(0, 1)), [block.output(y)])
        if not any(close(*pair) for pair in results):
            others.append(block)

    passed(layout.model, images, after={
        **{block.norm: partial(keep, block.norm) for block in layout.blocks},
        **{attention: partial(compare, attention, block) for attention, block in pairs}})
    for weight, value in saved.items():
        weight.copy_(value)
    for attention in attentions:
        if (times := calls[attention]) != 1:
            raise ValueError(f"the attention of a block, {type(attention).__name__}, is called "
                             f"{times} times in a forward pass, expected once")
    if others:
        raise ValueError(f"the attention of {len(others)} of {len(attentions)} blocks computes "
                         "something else than softmax(Q Kᵀ / √d) V·proj of its norm's output "
                         "(rotary or relative positions, norms of Q and K, masks, gates, post-norm "
                         "or parallel blocks, another scale)")


def within_windows(block: WindowBlock, y: Tensor, output: Tensor, grid: tuple[int, int]
                   ) -> Iterator[tuple[Tensor, Tensor]]:
    """What a Swin's attention makes of its norm's output y, and what the formula does, by shift.

    y: (n, H, W, D), or (n, H·W, D), with H : W as in `grid`. output: the same, or by windows. Each
    pair is (windows, n, D), without those of a shift's last row and column, which are masked.
    """
    down, across = block.window
    if y.ndim == 3:
        y = y.unflatten(1, (round((y.shape[1] * grid[0] / grid[1])**0.5), -1))
    _, height, width, _ = y.shape
    of_windows = len(output) != len(y)
    if of_windows:                                   # which are padded, and shifted already
        output = rearrange(output, "(n r c) (i j) d -> n (r i) (c j) d", i=down, j=across,
                           n=len(y), r=-(-height // down))
    elif output.ndim == 3:
        output = output.unflatten(1, (height, width))
    for shift in product({0, down // 2}, {0, across // 2}):
        rows, columns = (height - shift[0]) // down, (width - shift[1]) // across
        back = partial(torch.roll, shifts=(-shift[0], -shift[1]), dims=(1, 2))
        if rows and columns:
            inside, made = (rearrange(x[:, :rows * down, :columns * across],
                                      "n (r i) (c j) d -> (n r c) (i j) d", i=down, j=across)
                            for x in (back(y), output if of_windows else back(output)))
            yield made, block.output(inside)
