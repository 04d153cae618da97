"""What forward passes show of a model of another library, before an init is believed to fit it.

A layout (`layout.py`) is what attributes seem to say. Whether an init does what it promises depends
on more, which `probe` sees in forward passes of a copy of the model, which is then as it was: the
order of tokens, positions, and the formula of attention, as the page your_own_code.md explains.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode

from ..filters import Grid
from ..messages import in_brief
from ..mixing import run
from ..models.rotary import Rotary
from .stream import image_shape_of, noise_images, stream_of
from .views import Attentions, Block, Layout, Rotation, WindowBlock, projected

FEW = 2                 # images on which the formula is checked
OTHERWISE = 1e-3        # by which what is computed may differ from what is expected, relatively
MOST_PREFIX_TOKENS = 32
AT_ONCE = 16            # images that pass through the patch embedding together
PRODUCTS = {F.scaled_dot_product_attention, torch.matmul, Tensor.matmul, Tensor.__matmul__}


class _Reached(Exception):
    """Ends a forward pass at the first block."""


@torch.no_grad()
def probe(layout: Attentions, images: Tensor | None, *, by_hand: bool = False) -> Attentions:
    """See how the model of a layout works: the layout, with what was seen.

    images: (n, C, H, W), normalised, or None for white noise of the size that the model states.
    by_hand: whether the user has written the layout. It is believed where no size of images is
        known, and its attentions where it does not name their modules.
    Raises ValueError for a model that is not what its layout says, or of unknown size of images.
    """
    rng, where = Generator().manual_seed(0), "white noise"
    if images is not None:
        where = f"{min(FEW, len(images))} images"
    elif by_hand and isinstance(layout, Layout) and all(layout.grid) and (
            not image_shape_of(layout)):
        return replace(layout, prefix=max(0, len(layout.pos_embed) - len(layout.positions)),
                       checked="nothing was checked, as the Layout states no image_shape")
    else:
        images = noise_images(layout, FEW, rng)
    images = images[:FEW].detach().to(layout.blocks[0].q)
    x = entering(layout, images)[layout.blocks[0].norm]      # (n, T, D), (T, n, D) or a Swin's map
    count = by_image(x, len(images)).shape[1]
    grid = grid_of(layout, images[0], count, rng)
    channels, height, width = images.shape[1:]
    layout, what = replace(layout, image_shape=(channels, height, width)), "grid, order"
    if isinstance(layout, Layout):
        layout = replace(layout, grid=grid, prefix=count - grid[0] * grid[1],
                         sequence_first=x.ndim == 3 and len(x) != len(images))
        if len(layout.pos_embed):
            layout = replace(layout, entry=entry_of(layout, images[:1], rng))
            what += ", positions"
        layout = replace(layout, blocks=turned_blocks(layout, images))
        what += ", rotation" * layout.rotary
    attentions = [block.attention for block in layout.blocks if block.attention is not None]
    if len(attentions) == len(layout.blocks):
        require_formula(layout, attentions, images, grid, rng)
        what += " and formula"
    if isinstance(layout, Layout) and not (len(layout.pos_embed) or layout.rotary):
        raise ValueError("the model has no learned position embedding, and turns no queries, by "
                         "which heads find their target")
    if isinstance(layout, Layout) and layout.rotary and layout.blocks[0].k_bias is None:
        stream_of(layout)                            # raises if MLPs have no norm of their own
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


def entering(layout: Attentions, images: Tensor) -> dict[nn.LayerNorm, Tensor]:
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


def grid_of(layout: Attentions, image: Tensor, count: int, rng: Generator) -> Grid:
    """The grid whose patches of an image, (C, H, W), are the last tokens of `count`, row by row.

    That is the grid that the model states, or one that divides the image; without a position
    embedding the model may take images of other sizes. Rows of patches change in turn, then
    columns. What changes a token must, on average, move down with its row and to the right with its
    column, and change no other token. Raises ValueError.
    """
    height, width = image.shape[1:]
    least, most, stated, fixed = count, count, (0, 0), False         # tokens of patches, their grid
    if isinstance(layout, Layout):
        stated, fixed = layout.grid, len(layout.pos_embed) > 0
        most = min(count, len(layout.pos_embed)) if fixed else count
        least = most - MOST_PREFIX_TOKENS
    for grid in [stated] if all(stated) and fixed else sorted(           # square patches first
            product(range(1, min(height, most) + 1), range(1, min(width, most) + 1)),
            key=lambda grid: (grid != stated, abs(height / grid[0] - width / grid[1]))):
        cells = grid[0] * grid[1]
        if not least <= cells <= most or height % grid[0] or width % grid[1]:
            continue
        for axis, side in enumerate(grid):
            strips = torch.eye(side).bool().repeat_interleave(image.shape[1 + axis] // side, dim=1)
            change = changes(layout, image, strips.unflatten(1, (1, -1, 1) if axis == 0 else
                                                             (1, 1, -1)), rng)
            share = change[:, -cells:] / change[:, -cells:].sum(0)       # (strips, N)
            place = (torch.arange(side).to(share) @ share).unflatten(0, grid)
            if not (place.diff(dim=axis) > 0).all() or (
                    change[:, :-cells] > OTHERWISE * change.max()).any():
                break
        else:
            return grid
    raise ValueError(f"in images of {height}×{width}, no grid of patches is seen in which each has "
                     "a token of its own, in the order of rows, and no tokens follow those of the "
                     f"patches{f' (the model states {stated[0]}×{stated[1]})' * all(stated)}; "
                     "give images= of the size that it takes")


def changes(layout: Attentions, image: Tensor, masks: Tensor, rng: Generator) -> Tensor:
    """How much each token of the first block changes, (m, T), with the pixels of (m, 1, H, W)."""
    other, change = torch.randn(image.shape, generator=rng).to(image), list[Tensor]()
    for part in masks.split(AT_ONCE):
        images = torch.cat([image[None], torch.where(part, other, image)])
        x = by_image(entering(layout, images)[layout.blocks[0].norm], len(images))
        change.append((x[1:] - x[:1]).norm(dim=-1))
    return torch.cat(change)


def entry_of(vit: Layout, image: Tensor, rng: Generator) -> nn.Module:
    """The norm that reads the sum of patches and positions, if the first block reads its output.

    The identity if the first block reads the sum. Raises ValueError if the rows of the position
    embedding are not added to the tokens of the patches, row by row and as they are.
    """
    first, cells = vit.blocks[0].norm, len(vit.positions)
    as_it_was, step = vit.pos_embed.clone(), torch.randn(vit.pos_embed.shape, generator=rng)
    before = {norm: by_image(x, 1)[0] for norm, x in entering(vit, image).items() if x.ndim == 3}
    vit.pos_embed.add_(step)
    after = entering(vit, image)
    vit.pos_embed.copy_(as_it_was)
    norms = [norm for norm, x in before.items()      # which read the sum
             if close(by_image(after[norm], 1)[0, -cells:] - x[-cells:], step[-cells:].to(x))]
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


class _Products(TorchFunctionMode):
    """Keeps what is multiplied: the first factors, among them the queries as they meet the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: tuple = (),
                           kwargs: dict | None = None) -> Any:
        if function in PRODUCTS:
            self.factors.append(args[0] if args else (kwargs or {})["query"])
        return function(*args, **(kwargs or {}))


def turned_blocks(layout: Layout, images: Tensor) -> tuple[Block, ...]:
    """The blocks, with the rotation that each is seen to make of its queries, if all do."""
    if layout.rotary or any(block.attention is None for block in layout.blocks):
        return layout.blocks
    projections: dict[nn.Module, Tensor] = {}
    rotations: dict[nn.Module, Rotation | None] = {}

    def project(block: Block, _: tuple, y: Tensor) -> None:
        products.factors.clear()
        projections[block.norm] = projected(layout.batch_first(y), block.q, block.q_bias)

    def compare(block: Block, _: tuple, output: Any) -> None:
        queries = projections.get(block.norm)
        for turned in products.factors:
            if queries is not None and turned.shape == queries.shape:
                rotations[block.norm] = rotation_between(queries, turned)
                break

    products = _Products()
    with products:
        passed(layout.model, images, after={
            **{block.norm: partial(project, block) for block in layout.blocks},
            **{block.attention: partial(compare, block) for block in layout.blocks}})
    turned = [rotations.get(block.norm) for block in layout.blocks]
    if None in turned and any(turned):
        raise ValueError(f"{len(turned) - turned.count(None)} of {len(turned)} blocks turn their "
                         "queries by their places, expected all or none")
    return tuple(replace(block, rotation=rotation)
                 for block, rotation in zip(layout.blocks, turned))


def rotation_between(queries: Tensor, turned: Tensor) -> Rotation | None:
    """That which turns queries, (n, h, T, d), into others of any scale; None if none does.

    The channels of a pair are neighbours, or d / 2 apart.
    """
    channels = torch.arange(queries.shape[-1] // 2 * 2)
    for pairs in (channels.view(-1, 2), channels.view(2, -1).T):
        before, after = (torch.view_as_complex(x[..., pairs].contiguous())
                         for x in (queries, turned))
        turns = torch.view_as_real((before.conj() * after).sum(0).sgn()).transpose(0, 1)
        rotation, scale = Rotation(pairs, turns.contiguous()), turned.norm() / queries.norm()
        if close(rotation(queries) * scale, turned) and not close(queries * scale, turned):
            return rotation                          # turns: (T, h, d / 2, 2)
    return None


def require_formula(layout: Attentions, attentions: Sequence[nn.Module], images: Tensor,
                    grid: Grid, rng: Generator) -> None:
    """Draw the weights of each attention at random, for a while, and compare it with its formula.

    attentions: of the blocks. Raises ValueError if one does not read the output of its norm, or
    computes something else than softmax(Q Kᵀ / √d) V·proj from it, or is not called once.
    """
    read: dict[nn.Module, Tensor] = {}
    calls: Counter[nn.Module] = Counter()
    others: list[Block] = []                         # which compute something else
    pairs = list(zip(attentions, layout.blocks))
    saved = {weight: weight.clone() for attention, block in pairs
             for part in (*attention.modules(), block.norm) if not isinstance(part, Rotary)
             for weight in part.parameters(recurse=False)}
    for weight in saved:                             # so that logits are about 1
        draw = torch.randn(weight.shape, generator=rng)
        weight.copy_(draw * weight[0].numel()**-0.5 if weight.ndim > 1 else 1.0 + 0.2 * draw)

    def keep(norm: nn.Module, _: tuple, y: Tensor) -> None:
        read[norm] = layout.batch_first(y)

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
                         "(relative or other rotary positions, norms of Q and K, masks, gates, "
                         "post-norm or parallel blocks, another scale)")


def within_windows(block: WindowBlock, y: Tensor, output: Tensor, grid: Grid
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
