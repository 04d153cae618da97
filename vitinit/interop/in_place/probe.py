"""What forward passes show of a model of another library, before an init is believed to fit it.

A layout (`foreign_layouts.py`) is what attributes seem to say. Whether an init does what it
promises depends on more, which `probe` sees in forward passes of a copy of the model, which is then
as it was: the order of tokens, positions, and the formula of attention (`formula.py`), as the page
your_own_code.md explains.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from math import prod

import torch
from torch import Generator, Tensor, nn

from ...init.attentions import Attentions, Layout
from ...init.residual_stream import noise_images, stream_of
from ...mixing.filters import Grid
from .foreign_layouts import image_shape_of
from .formula import (
    TOLERANCE,
    Reached,
    as_before,
    behind_the_logits,
    close,
    observed,
    passed,
    require_formula,
    turned_blocks,
)

FEW = 2  # images on which the formula is checked
ABOUT = 0.2  # which share of the largest change is about as much
CHANGED = 2  # tokens by which the order of tokens is followed from block to block
MOST_PREFIX_TOKENS = 32
AT_ONCE = 16  # images that pass through the patch embedding together


@torch.no_grad()
def probe(layout: Attentions, images: Tensor | None, *, by_hand: bool = False) -> Attentions:
    """See how the model of a layout works: the layout, with what was seen.

    images: (n, C, H, W), normalised, or None for white noise of the size that the model states.
    by_hand: whether the user has written the layout. It is believed where no size of images is
        known, and its attentions where it does not name their modules.
    Raises ValueError for a model that is not what its layout says, or of unknown size of images.
    """
    rng = Generator().manual_seed(0)
    if images is not None:
        images = images[:FEW]
        where = f"{len(images)} images"
    else:
        shape = image_shape_of(layout)
        if by_hand and shape is None and isinstance(layout, Layout) and all(layout.grid):
            prefix = max(0, len(layout.pos_embed) - len(layout.positions))
            unchecked = "nothing was checked, as the Layout states no image_shape"
            return replace(layout, prefix=prefix, checked=unchecked)
        images = noise_images(replace(layout, image_shape=shape), FEW, rng)
        where = "white noise"
    images = images.detach().to(layout.blocks[0].q)
    x = entering(layout, images)[layout.blocks[0].norm]  # (n, T, D), (T, n, D) or a Swin's map
    require_tokens_of(layout, x, len(images))
    count = by_image(x, len(images)).shape[1]
    grid = grid_of(layout, images[0], count, rng)
    channels, height, width = images.shape[1:]
    layout = replace(layout, image_shape=(channels, height, width))
    what = "grid, order"
    if isinstance(layout, Layout):
        first = x.ndim == 3 and len(x) != len(images)
        layout = replace(layout, grid=grid, prefix=count - prod(grid), sequence_first=first)
        if len(layout.pos_embed):
            layout = replace(layout, entry=entry_of(layout, images[:1], rng))
            what += ", positions"
        layout = replace(layout, blocks=turned_blocks(layout, images))
        if layout.rotary:
            what += ", rotation"
    if all(block.attention is not None for block in layout.blocks):
        require_formula(layout, images, rng)
        what += " and formula"
    require_order(layout, images[:1], rng)
    if isinstance(layout, Layout):
        require_positions(layout)
    return replace(layout, checked=f"{what} checked on {where}")


def require_positions(vit: Layout) -> None:
    """Raise ValueError unless heads can find their target, by learned positions or rotary ones."""
    if not (len(vit.pos_embed) or vit.rotary):
        raise ValueError(
            "the model has no learned position embedding, and turns no queries, "
            "by which heads find their target"
        )
    if vit.rotary and vit.blocks[0].k_bias is None:
        stream_of(vit)  # raises if MLPs have no norm of their own


def entering(layout: Attentions, images: Tensor) -> dict[nn.LayerNorm, Tensor]:
    """What the first block's norm reads, and all LayerNorms before it, in the order of calls."""
    first, attention = layout.blocks[0].norm, layout.blocks[0].attention
    outside = attention is not None and first not in attention.modules()
    read: dict[nn.LayerNorm, Tensor] = {}

    def keep(module: nn.Module, x: Tensor) -> None:
        if isinstance(module, nn.LayerNorm):
            read.setdefault(module, x.clone())
        if module is first or outside and module is attention:
            raise Reached

    before = {}
    for module in layout.model.modules():
        if isinstance(module, nn.LayerNorm) or module is attention:
            before[module] = partial(keep, module)
    passed(layout.model, images, before=before)
    if first not in read:
        raise ValueError(
            "the first attention is called before its norm: post-norm blocks, or another norm"
        )
    return read


def require_tokens_of(layout: Attentions, x: Tensor, count: int) -> None:
    """Raise ValueError unless x, which the first norm reads, are the tokens of `count` images."""
    shape = "×".join(map(str, x.shape))
    if isinstance(layout, Layout) and x.ndim != 3:
        raise ValueError(
            f"the first block reads a map of tokens, {shape}, as in SAM's encoder, expected a "
            "sequence for each image: its attention is within windows, or of two axes"
        )
    if count not in (x.shape[:2] if x.ndim == 3 else x.shape[:1]):
        raise ValueError(
            f"the first block reads {shape} of {count} images: several crops or views of each; "
            "initialise the model that sees one of them"
        )


def by_image(x: Tensor, count: int) -> Tensor:
    """The tokens of `count` images as (count, T, D), whichever of them and T is first."""
    return (x if len(x) == count else x.transpose(0, 1)).flatten(1, -2)


def grid_of(layout: Attentions, image: Tensor, count: int, rng: Generator) -> Grid:
    """The grid whose patches of an image, (C, H, W), are the last tokens of `count`, row by row.

    That is the grid that the model states, or one that divides the image; without a position
    embedding the model may take images of other sizes. Rows of patches change in turn, then
    columns. What changes a token must, on average, move down with its row and to the right with its
    column, and change no other token. Raises ValueError.
    """
    height, width = image.shape[1:]
    stated, least, most = (0, 0), count, count  # the model's grid, and how many tokens it may have
    grids: list[Grid] = []
    if isinstance(layout, Layout):
        stated = layout.grid
        most = min(count, len(layout.pos_embed) or count)
        least = most - MOST_PREFIX_TOKENS
        if len(layout.pos_embed) and all(stated):
            grids = [stated]
    if not grids:
        grids = list(product(range(1, min(height, most) + 1), range(1, min(width, most) + 1)))
        grids.sort(key=lambda grid: (grid != stated, abs(height / grid[0] - width / grid[1])))
    for grid in grids:  # the stated one first, then those of square patches
        whole = height % grid[0] == 0 and width % grid[1] == 0
        if whole and least <= prod(grid) <= most and are_patches(layout, image, grid, rng):
            return grid
    hint = f" (the model states {stated[0]}×{stated[1]})" if all(stated) else ""
    raise ValueError(
        f"in images of {height}×{width}, no grid of patches is seen in which each has "
        "a token of its own, in the order of rows, and no tokens follow those of the "
        f"patches{hint}; give images= of the size that it takes"
    )


def are_patches(layout: Attentions, image: Tensor, grid: Grid, rng: Generator) -> bool:
    """Whether the last tokens are the patches of this grid, as `grid_of` sees it."""
    cells = prod(grid)
    for axis, side in enumerate(grid):
        strips = torch.eye(side).bool().repeat_interleave(image.shape[1 + axis] // side, dim=1)
        masks = strips[:, None, :, None] if axis == 0 else strips[:, None, None]
        change = changes(layout, image, masks, rng)  # (strips, T)
        prefix, patches = change[:, :-cells], change[:, -cells:]
        share = patches / patches.sum(0)
        place = (torch.arange(side).to(share) @ share).unflatten(0, grid)
        if not (place.diff(dim=axis) > 0).all() or (prefix > TOLERANCE * change.max()).any():
            return False
    return True


def changes(layout: Attentions, image: Tensor, masks: Tensor, rng: Generator) -> Tensor:
    """How much the first block's tokens change, (m, T), by pixels in (m, 1, H, 1), (m, 1, 1, W)."""
    other = torch.randn(image.shape, generator=rng).to(image)
    change = []
    for part in masks.split(AT_ONCE):
        images = torch.cat([image[None], torch.where(part, image + other, image)])
        x = by_image(entering(layout, images)[layout.blocks[0].norm], len(images))
        change.append((x[1:] - x[:1]).norm(dim=-1))
    return torch.cat(change)


def require_order(layout: Attentions, image: Tensor, rng: Generator) -> None:
    """Raise ValueError unless the tokens of every block are those of the first, in their order.

    Some tokens of an image, (1, C, H, W), change as they enter the first block. While attentions
    add nothing, no others change, unless something else mixes them. So in all blocks, of a Swin in
    those of a stage, the token at the same place must change, and about as much as any other.
    """
    _, columns = grid = layout.grids[0]
    cells = torch.randperm(prod(grid), generator=rng)[:CHANGED]

    def change(x: Tensor | None) -> None:
        """In place, so that it goes on past attention."""
        if x is None:  # a block that is called by keywords
            return
        tokens = layout.batch_first(x)
        for copy, cell in enumerate(cells.tolist(), start=1):
            place = divmod(cell, columns) if tokens.ndim == 4 else (layout.prefix + cell,)
            tokens[(copy, *place)] += torch.randn(x.shape[-1], generator=rng).to(x)

    first, quiet = layout.blocks[0], behind_the_logits(layout)
    with as_before(quiet):
        for weight in quiet:
            weight.zero_()
        copies = image.repeat(1 + len(cells), 1, 1, 1)
        # A norm may read a copy of the residual stream, which the block around it does not.
        seen = observed(layout, copies, before={first.around or first.norm: change})
    counts = [of_block.y.shape[1] for of_block in seen]
    if isinstance(layout, Layout) and len(set(counts)) > 1:
        other = next(count for count in counts if count != counts[0])
        raise ValueError(
            f"a block has {other} tokens, and the first one {counts[0]}: tokens are merged, left "
            "out or added between them"
        )
    stages = dict[torch.Size, Tensor]()  # the places by the shape of all tokens
    for y, *_ in seen:
        changes = (y[1:] - y[:1]).norm(dim=-1).flatten(1)  # (CHANGED, T)
        largest = changes.amax(dim=1)
        places = stages.setdefault(y.shape, changes.argmax(dim=1))
        own = changes.gather(1, places[:, None])[:, 0]
        if (own < ABOUT * largest).any():
            raise ValueError(
                "tokens are in another order in some blocks than in the first: rolled, permuted or "
                "transposed between them"
            )


def entry_of(vit: Layout, image: Tensor, rng: Generator) -> nn.Module:
    """The norm that reads the sum of patches and positions, if the first block reads its output.

    The identity if the first block reads the sum. Raises ValueError if the rows of the position
    embedding are not added to the tokens of the patches, row by row and as they are.
    """
    first, cells = vit.blocks[0].norm, len(vit.positions)
    as_it_was = vit.pos_embed.clone()
    step = torch.randn(vit.pos_embed.shape, generator=rng)
    before = {norm: by_image(x, 1)[0] for norm, x in entering(vit, image).items() if x.ndim == 3}
    vit.pos_embed.add_(step)
    after = entering(vit, image)
    vit.pos_embed.copy_(as_it_was)
    norms = []  # which read the sum
    for norm, x in before.items():
        moved = by_image(after[norm], 1)[0, -cells:] - x[-cells:]
        if close(moved, step[-cells:].to(x)):
            norms.append(norm)
    if first in norms:
        return nn.Identity()
    for norm in norms:
        if close(norm(before[norm]), before[first]):
            return norm
    raise ValueError(
        "the rows of the position embedding are not added to the tokens of the "
        "patches, row by row and as they are, before the first block"
    )
