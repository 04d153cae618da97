"""What the attentions of a model are seen to compute in forward passes; `probe.py` asks for it."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode

from ...base.messages import in_brief
from ...init.attentions import Attentions, Block, Layout, Rotation, WindowBlock, projected
from ...mixing import run
from ...models.rotary import Rotary

TOLERANCE = 1e-3  # by which what is computed may differ from what is expected, relatively
PRODUCTS = {F.scaled_dot_product_attention, torch.matmul, Tensor.matmul, Tensor.__matmul__}


class Reached(Exception):
    """Ends a forward pass at the first block."""


def passed(model: nn.Module, images: Tensor, **hooks: Any) -> None:
    """`run` the model, whose own errors become a ValueError of one line."""
    try:
        run(model, images, **hooks)
    except Reached:
        pass
    except Exception as error:
        raise ValueError(
            f"an image of the shape {tuple(images.shape[1:])} does not pass through "
            f"the model ({in_brief(error, 80)}); give images= of the size that it "
            "takes, or describe it by a Layout"
        ) from error


def close(value: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are of one shape, and agree but for rounding."""
    if value.shape != expected.shape:
        return False
    error = (value - expected).abs().max()
    return bool(error <= TOLERANCE * (expected.abs().max() + 1e-6))


class _Products(TorchFunctionMode):
    """Keeps what is multiplied: the first factors, among them the queries as they meet the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[Tensor] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in PRODUCTS:
            self.factors.append(args[0] if args else kwargs["query"])
        return function(*args, **kwargs)


def turned_blocks(layout: Layout, images: Tensor) -> tuple[Block, ...]:
    """The blocks, with the rotation that each is seen to make of its queries, if all do."""
    blocks = layout.blocks
    if layout.rotary:
        return blocks
    for block in blocks:
        if block.attention is None or type(block.attention) is nn.MultiheadAttention:
            return blocks  # PyTorch's own never turns
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
    after: dict[Any, Any] = {}
    for block in blocks:
        after[block.norm] = partial(project, block)
        after[block.attention] = partial(compare, block)
    with products:
        passed(layout.model, images, after=after)
    turned = [rotations.get(block.norm) for block in blocks]
    count = len(turned) - turned.count(None)
    if 0 < count < len(turned):
        raise ValueError(
            f"{count} of {len(turned)} blocks turn their "
            "queries by their places, expected all or none"
        )
    return tuple(replace(block, rotation=rotation) for block, rotation in zip(blocks, turned))


def rotation_between(queries: Tensor, turned: Tensor) -> Rotation | None:
    """That which turns queries, (n, h, T, d), into others of any scale; None if none does.

    The channels of a pair are neighbours, or d / 2 apart.
    """
    channels = torch.arange(queries.shape[-1] // 2 * 2)
    scale = turned.norm() / queries.norm()
    if close(queries * scale, turned):
        return None
    for pairs in (channels.view(-1, 2), channels.view(2, -1).T):
        before, after = (
            torch.view_as_complex(x[..., pairs].contiguous()) for x in (queries, turned)
        )
        turns = torch.view_as_real((before.conj() * after).sum(0).sgn()).transpose(0, 1)
        rotation = Rotation(pairs, turns.contiguous())  # turns: (T, h, d / 2, 2)
        if close(rotation(queries) * scale, turned):
            return rotation
    return None


def require_formula(layout: Attentions, images: Tensor, rng: Generator) -> None:
    """Draw the weights of each attention at random, for a while, and compare it with its formula.

    Raises ValueError if one does not read the output of its norm, or computes something else than
    softmax(Q Kᵀ / √d) V·proj from it, if one or its norm is not called once, and if a later block
    has fewer tokens than the first.
    """
    read = {}
    calls: Counter[Any] = Counter()
    others = []  # which compute something else

    def keep(norm: nn.Module, _: tuple, y: Tensor) -> None:
        calls[norm] += 1
        read[norm] = layout.batch_first(y)

    def compare(block: Block, _: tuple, output: Any) -> None:
        calls[block.attention] += 1
        if block.norm not in read or not follows(block, read[block.norm], output):
            others.append(block)

    after: dict[Any, Any] = {}
    for block in layout.blocks:
        after[block.attention] = partial(compare, block)
        after[block.norm] = partial(keep, block.norm)
    saved = draw_for_a_while(after, rng)
    passed(layout.model, images, after=after)
    for weight, value in saved.items():
        weight.copy_(value)

    for module in after:
        if calls[module] != 1:
            raise ValueError(
                f"the attention of a block, or the norm before it, {type(module).__name__}, is "
                f"called {calls[module]} times in a forward pass, expected once"
            )
    counts = [read[block.norm].shape[1] for block in layout.blocks]
    if isinstance(layout, Layout) and min(counts) < counts[0]:
        raise ValueError(
            f"a block has {min(counts)} tokens, and the first one {counts[0]}: tokens "
            "are merged, or left out, between them"
        )
    if others:
        raise ValueError(
            f"the attention of {len(others)} of {len(layout.blocks)} blocks computes "
            "something else than softmax(Q Kᵀ / √d) V·proj of its norm's output "
            "(relative or other rotary positions, or rotary ones in half precision, "
            "norms of Q and K, masks, gates, post-norm or parallel blocks, another "
            "scale, images= with room for no whole shifted window)"
        )


def draw_for_a_while(modules: Iterable[nn.Module], rng: Generator) -> dict[nn.Parameter, Tensor]:
    """Draw the weights of modules so that logits are about 1; returns what they were before."""
    saved = {}
    for module in modules:
        for part in module.modules():
            if not isinstance(part, Rotary):
                for weight in part.parameters(recurse=False):
                    saved[weight] = weight.clone()
    for weight in saved:
        draw = torch.randn(weight.shape, generator=rng)
        weight.copy_(draw * weight[0].numel() ** -0.5 if weight.ndim > 1 else 1.0 + 0.2 * draw)
    return saved


def follows(block: Block, y: Tensor, output: Any) -> bool:
    """Whether an attention returns, alone or first, what the formula makes of its norm's output y."""
    if isinstance(output, tuple):
        output = output[0]
    if isinstance(block, WindowBlock):
        return y.ndim == 4 and any(close(*pair) for pair in within_windows(block, y, output))
    expected = block.output(y)
    return close(output, expected) or close(output.transpose(0, 1), expected)


def within_windows(
    block: WindowBlock, y: Tensor, output: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """What a Swin's attention makes of its norm's output y, and what the formula does, by shift.

    y: (n, H, W, D). output: the same, or by windows. Each pair is (windows, n, D), without those of
    a shift's last row and column, which are masked.
    """
    down, across = block.window
    _, height, width, _ = y.shape
    of_windows = len(output) != len(y)
    if of_windows:  # which are padded, and shifted already
        joined = "(n r c) (i j) d -> n (r i) (c j) d"
        rows = -(-height // down)
        output = rearrange(output, joined, i=down, j=across, n=len(y), r=rows)
    apart = partial(rearrange, pattern="n (r i) (c j) d -> (n r c) (i j) d", i=down, j=across)
    for below, right in product({0, down // 2}, {0, across // 2}):
        rows, columns = (height - below) // down, (width - right) // across
        if rows and columns:
            whole = ..., slice(rows * down), slice(columns * across), slice(None)
            inside = y.roll((-below, -right), dims=(1, 2))[whole]
            made = output if of_windows else output.roll((-below, -right), dims=(1, 2))
            yield apart(made[whole]), block.output(apart(inside))
