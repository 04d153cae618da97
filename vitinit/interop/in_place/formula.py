"""What the attentions of a model are seen to compute in forward passes; `probe.py` asks for it.

`turned_blocks` sees how they turn their queries, `require_formula` whether they are the formula
with any weights, `require_formula_as_written` whether they are with those that an init has written.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode

from ...base.messages import in_brief
from ...init.attentions import Attentions, Block, Layout, Rotation, WindowBlock, projected
from ...init.residual_stream import noise_images
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
            self.factors.append(
                args[0] if args else kwargs["query" if "query" in kwargs else "input"]
            )
        return function(*args, **kwargs)


def turned_blocks(layout: Layout, images: Tensor) -> tuple[Block, ...]:
    """The blocks, with the rotation that each is seen to make of its queries, if all do."""
    blocks = layout.blocks
    if layout.rotary:
        return blocks
    for block in blocks:
        if block.attention is None or type(block.attention) is nn.MultiheadAttention:
            return blocks  # PyTorch's own never turns
    turned: list[Rotation | None] = []
    for pair in queries_as_they_meet_keys(layout, images):
        rotation = None
        if pair is not None:
            queries, met = pair
            if met.dtype != queries.dtype:
                kind, own = (str(x.dtype).removeprefix("torch.") for x in (met, queries))
                raise ValueError(
                    f"attention computes in {kind} within a model of {own}, by a cast or an "
                    f"autocast of its own; initialise it without, all in {own}, and cast then"
                )
            rotation = rotation_between(queries, met)
        turned.append(rotation)
    count = len(turned) - turned.count(None)
    if 0 < count < len(turned):
        raise ValueError(
            f"{count} of {len(turned)} blocks turn their "
            "queries by their places, expected all or none"
        )
    return tuple(replace(block, rotation=rotation) for block, rotation in zip(blocks, turned))


def queries_as_they_meet_keys(layout: Layout, images: Tensor) -> list[tuple[Tensor, Tensor] | None]:
    """By block, the queries as their layer projects them, and as they meet keys, where it is seen."""
    norms = [block.norm for block in layout.blocks]
    products = _Products()  # of one block at a time: its norm clears them
    projections: dict[nn.Module, Tensor] = {}
    met: dict[nn.Module, Tensor] = {}  # the queries as they meet the keys

    def project(block: Block, _: tuple, y: Tensor) -> None:
        products.factors.clear()
        projections[block.norm] = projected(layout.batch_first(y), block.q, block.q_bias)

    def compare(block: Block, _: tuple, output: Any) -> None:
        queries = projections.get(block.norm)
        for turned in products.factors:
            if queries is not None and turned.shape == queries.shape:
                met[block.norm] = turned
                break

    after: dict[Any, Any] = {}
    for block in layout.blocks:
        after[block.norm] = partial(project, block)
        after[block.attention] = partial(compare, block)
    with products:
        passed(layout.model, images, after=after)
    return [(projections[norm], met[norm]) if norm in met else None for norm in norms]


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


class Seen(NamedTuple):
    """What a block's attention did in a forward pass."""

    y: Tensor  # the output of its norm, (n, T, D), or a Swin's map (n, H, W, D)
    given: Tensor | None  # its first input, if it is not called by keywords
    output: Tensor | None  # None: the layout does not name the attention


def observed(
    layout: Attentions, images: Tensor, *, before: Mapping[nn.Module, Callable] | None = None
) -> list[Seen]:
    """What the attention of each block does as images, (n, C, H, W), pass through the model.

    before: by module, what is called with its input. Raises ValueError if an attention, or the norm
    before it, is not called once.
    """
    calls: Counter[Any] = Counter()
    read, done = dict[Any, Tensor](), dict[Any, tuple[Tensor | None, Tensor]]()

    def keep(norm: nn.Module, _: tuple, y: Tensor) -> None:
        calls[norm] += 1
        read[norm] = layout.batch_first(y).clone()

    def record(attention: nn.Module, inputs: tuple, output: Any) -> None:
        calls[attention] += 1
        first = output[0] if isinstance(output, tuple) else output
        given = layout.batch_first(inputs[0]).clone() if inputs else None
        done[attention] = given, first.clone()

    after: dict[Any, Any] = {}
    for block in layout.blocks:
        if block.attention is not None:
            after[block.attention] = partial(record, block.attention)
        after[block.norm] = partial(keep, block.norm)
    passed(layout.model, images, before=before, after=after)
    for module in after:
        if calls[module] != 1:
            raise ValueError(
                f"the attention of a block, or the norm before it, {type(module).__name__}, is "
                f"called {calls[module]} times in a forward pass, expected once"
            )
    nothing = None, None
    return [Seen(read[block.norm], *done.get(block.attention, nothing)) for block in layout.blocks]


def require_formula(layout: Attentions, images: Tensor, rng: Generator) -> None:
    """Draw the weights of each attention at random, for a while, and compare it with its formula.

    Raises ValueError, with what is seen of the cause, if one computes something else than
    softmax(Q Kᵀ / √d) V·proj of its norm's output, or if it or its norm is not called once.
    """
    weights = []
    for block in layout.blocks:
        for module in (block.attention, block.norm):
            weights += parameters_of(module)
    with as_before(weights):
        for weight in weights:
            draw = torch.randn(weight.shape, generator=rng)
            spread = weight[0].numel() ** -0.5 if weight.ndim > 1 else 0.2
            mean = 0.0 if weight.ndim > 1 else 1.0  # of what a norm multiplies by, and of biases
            weight.copy_(mean + draw * spread)  # so logits are about 1
        others = those_that_differ(layout, observed(layout, images))
        if others:
            raise ValueError(
                f"the attention of {len(others)} of {len(layout.blocks)} blocks computes "
                "something else than softmax(Q Kᵀ / √d) V·proj of its norm's output: "
                f"{cause_of(layout, images, others[0])}"
            )


@torch.no_grad()
def require_formula_as_written(layout: Attentions, images: Tensor | None) -> None:
    """Compare each attention with its formula at the queries and keys that an init has written.

    These make logits larger than `require_formula` does, which a model may cap or clamp. They are
    largest on positions alone, which is where the receipt's masses are: so that is what all norms
    read here. Values and projections may be 0, so others are drawn for a while. layout, images: as
    of `probe`; nothing is compared where it has checked nothing. Raises ValueError.
    """
    if images is None and layout.image_shape is None:
        return
    rng = Generator().manual_seed(0)
    image = noise_images(layout, 1, rng) if images is None else images[:1].detach()

    def see_positions_alone(x: Tensor) -> None:
        """In place; a Swin's blocks then have their relative bias alone."""
        tokens = layout.batch_first(x)
        if isinstance(layout, Layout):
            tokens[:, layout.prefix :] = layout.entry(layout.positions[None])
        else:
            tokens.zero_()

    alone: dict[nn.Module, Callable] = {block.norm: see_positions_alone for block in layout.blocks}
    with as_before(behind_the_logits(layout)):
        for block in layout.blocks:
            for weight in (block.v, block.proj):
                draw = torch.randn(weight.shape, generator=rng)
                weight.copy_(draw * weight[0].numel() ** -0.5)
        seen = observed(layout, image.to(layout.blocks[0].q), before=alone)
        others = those_that_differ(layout, seen)
    if others:
        raise ValueError(
            f"once written, the attention of {len(others)} of {len(layout.blocks)} blocks computes "
            "something else than its formula, as if it capped or clamped its logits, which are "
            "larger now; what was asked for would not be reached"
        )


def behind_the_logits(layout: Attentions) -> list[Tensor]:
    """The values, the projections and their biases, of all blocks."""
    parts = [(block.v, block.v_bias, block.proj, block.proj_bias) for block in layout.blocks]
    return [part for of_block in parts for part in of_block if part is not None]


def parameters_of(module: nn.Module | None) -> list[nn.Parameter]:
    """The parameters of a module, without those of rotary positions, by which tokens turn."""
    if module is None:
        return []
    parts = [part for part in module.modules() if not isinstance(part, Rotary)]
    return [weight for part in parts for weight in part.parameters(recurse=False)]


@contextmanager
def as_before(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A context after which these tensors have the values that they had before."""
    saved = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in saved:
            tensor.copy_(value)


def those_that_differ(layout: Attentions, seen: Sequence[Seen]) -> list[int]:
    """The numbers of the blocks whose attention computes something else than its formula."""
    numbers = []
    for number, (block, of_block) in enumerate(zip(layout.blocks, seen)):
        if block.attention is not None and not follows(block, of_block):
            numbers.append(number)
    return numbers


def cause_of(layout: Attentions, images: Tensor, number: int) -> str:
    """Why the attention of a block is not its formula, as far as changes of its queries show it.

    Its weights are those that `require_formula` has drawn.
    """
    block = layout.blocks[number]
    before = observed(layout, images)[number]
    twice = observed(layout, images[:1].repeat(2, 1, 1, 1))[number].output
    assert before.output is not None and twice is not None
    if not close(*layout.batch_first(twice).chunk(2)):
        return "it is random in evaluation mode, too (dropout, noise)"
    if isinstance(block, WindowBlock) and before.y.ndim == 4:
        if not list(within_windows(block, before.y, before.output)):
            return "images= have room for no whole shifted window"
    given, holder = before.given, block.attention
    outside = holder is not None and block.norm not in holder.modules()
    if outside and given is not None and given.shape == before.y.shape:
        if not close(given, before.y):
            return (
                "it does not read the output of the norm before it (post-norm or parallel blocks)"
            )
    queries = [part for part in (block.q, block.q_bias) if part is not None]
    with as_before(queries):
        for part in queries:
            part.mul_(2.0)
        doubled = observed(layout, images)[number].output
        for part in queries:
            part.zero_()
        averages = follows(block, observed(layout, images)[number])
    if not averages:
        return (
            "without queries it does not average its values (relative positions, masks, gates, "
            "values that are no linear layer's)"
        )
    if doubled is not None and close(doubled, before.output):
        return "twice the queries change nothing (norms of Q and K)"
    return (
        "its weights are another function of Q and K (another scale, a cap, another rotation, heads "
        "that are mixed, weights that are changed after the softmax)"
    )


def follows(block: Block, seen: Seen) -> bool:
    """Whether an attention returns what the formula makes of its norm's output."""
    y, output = seen.y, seen.output
    assert output is not None
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
    of_windows = output.ndim == 3
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
