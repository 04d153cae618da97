"""Initialise any ViT in place, of this package or of another library, and say what was achieved.

    report = impulse_(model, generator=torch.Generator().manual_seed(0))
    print(report)                                   # the receipt: what was written, and the mass

The init is applied to a copy of the model, on the CPU and in float32 (or float64), and the tensors
that it changed are copied back when all is well. So after an error no tensor has changed, and the
model may be on any device and in half precision. The inits are those of this package: a ViT of
timm and ours of the same size get the same bits from the same generator.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..filters import Offset, head_offsets, ordered_offsets
from ..messages import in_brief
from ..mixing import shares_of_patches, target_mass
from .baseline import BASES, EMBED_STD
from .deep_impulse import NOISE_IMAGES, deep_impulse
from .impulse import impulse
from .impulse_gd import impulse_gd
from .layout import Block, Layout, layout_of, run
from .mimetic import mimetic
from .norm_matched import norm_matched

ANY_VIT = {"impulse": impulse, "mimetic": mimetic, "deep_impulse": deep_impulse,
           "impulse_gd": impulse_gd, "norm_matched": norm_matched, **BASES}
DRAWS_POSITIONS = ("impulse", "norm_matched")    # scale pos_embed, so that it has to be drawn
AIMED = ("impulse", "impulse_gd", "deep_impulse", "mimetic")         # have a target per head
AT_ONCE = 8             # images per forward pass, whose attention matrices are all computed
OTHERWISE = 1e-3        # by which an attention's output may differ from its formula, relatively

Masses = tuple[tuple[float, ...], ...]           # by block and head


@dataclass(frozen=True)
class Report:
    """What `init_` has done to a model. `str` of it is the receipt."""

    init: str
    model: str                  # the model's class
    blocks: int
    heads: int                  # in the first block
    head_dim: int
    grid: tuple[int, int]       # patch tokens down and across
    prefix_tokens: int
    written: tuple[str, ...]    # names of the tensors that changed
    kept: int                   # how many others there are
    targets: tuple[tuple[Offset, ...], ...]      # (down, right), by block and head; may be empty
    mass: Masses                # share of each head's attention on its target, on positions alone
    mass_on_images: Masses      # the same in a forward pass of images; empty without. deep_impulse
                                #   takes white noise where none are given
    images: int
    uniform: float              # the mass under uniform attention
    notes: tuple[str, ...]      # about frozen, tied and rounded weights

    def __str__(self) -> str:
        lines = [f"{self.init}: {self.model}, {_described(self)}",
                 f"wrote {len(self.written)} tensors: "
                 f"{', '.join(_patterns(self.written)) or 'none'}; "
                 f"kept {self.kept} others"]
        on_images = f"{self.images} images" if self.images else "white noise"
        for masses, where in ((self.mass, "positions alone"), (self.mass_on_images, on_images)):
            if masses:
                blocks = {0: "first", len(masses) // 2: "middle", len(masses) - 1: "last"}
                found = "; ".join(f"{word} block {' '.join(map(decimal, masses[block]))}"
                                  for block, word in sorted(blocks.items()))
                lines.append(f"mass on the target, on {where}: {found} "
                             f"(uniform {decimal(self.uniform)})")
        return "\n".join([*lines, *self.notes])


@dataclass(frozen=True)
class Description:
    """What `describe` has recognised of a model. reason: why nothing, else None."""

    model: str
    reason: str | None
    blocks: int = 0
    heads: int = 0
    head_dim: int = 0
    grid: tuple[int, int] | None = None
    prefix_tokens: int = 0
    fits: tuple[tuple[str, str], ...] = ()       # (init, why not, or "")

    def __str__(self) -> str:
        if self.reason:
            return f"{self.model}: not recognised: {self.reason}"
        return "\n".join([f"{self.model}: {_described(self)}", *(
            f"  {init}_: {why or 'fits'}" for init, why in self.fits)])


def init_(model: nn.Module, name: str, *, generator: torch.Generator, base: str | None = None,
          images: Tensor | None = None, layout: Callable[[nn.Module], Layout] = layout_of,
          **options: Any) -> Report:
    """Initialise a ViT of any library in place by the init `name`.

    name: one of ANY_VIT. generator: a CPU generator; the same state gives the same bits.
    base: "default", "torch" or "lecun" draws all other weights first. None leaves them as they are:
        written are Q, K, V, proj, their biases (to 0) and the position embedding, as far as the
        init defines them (for deep_impulse also the norms, and rows that write to its channels).
    images: (n, 3, H, W), normalised as for training. On these the mass is measured, too, and
        deep_impulse measures its norms (on white noise where there are none).
    layout: describes the model, where it is of no library that is known here.
    options: of the init, see its function; for example `kernel_size`.

    Raises ValueError, in one line with the reason, for a model that the init does not cover, and
    TypeError for unknown options. Then no tensor has changed, nor the generator.
    """
    if name not in ANY_VIT:
        raise ValueError(f"there is no init '{name}' of any ViT; there are: {', '.join(ANY_VIT)}")
    if generator.device.type != "cpu":
        raise ValueError(f"the generator is on {generator.device}; inits draw on the CPU: use "
                         "torch.Generator()")
    model, state, function = unwrapped(model), generator.get_state(), ANY_VIT[name]
    chosen = _with_defaults(function, options)
    try:
        work = copied(model)
        vit = understood(layout(work), work, name)
        given = {} if name in BASES else {"base": base}
        if "images" in inspect.signature(function).parameters:
            given["images"] = None if images is None else images.detach().to(vit.pos_embed)
        if base is None and name not in BASES:
            _prepare(vit, name, chosen, generator)
        call(function, work if name in BASES else vit, name, options, generator=generator, **given)
        prefix = check(vit)
        targets, cells = targets_of(name, chosen, [len(block.q) for block in vit.blocks])
        alone = mean_shares(vit) if targets else []
        aims = tuple(tuple(target or _strongest(share, cells, vit.grid)
                           for target, share in zip(of_block, shares))
                     for of_block, shares in zip(targets, alone))
        seen = images
        if seen is None and name == "deep_impulse":
            seen = torch.randn(NOISE_IMAGES, *vit.image_shape,
                               generator=torch.Generator().manual_seed(0))
        on_images = mean_shares(vit, seen) if targets and seen is not None else []
        changed, notes = write_back(model, work)
    except BaseException:
        generator.set_state(state)
        raise
    return Report(name, type(model).__name__, len(vit.blocks), *vit.blocks[0].q.shape[:2], vit.grid,
                  prefix, changed, sum(1 for _ in tensors(model)) - len(changed), aims,
                  _masses(alone, aims, vit.grid), _masses(on_images, aims, vit.grid),
                  0 if images is None else len(images), 1.0 / (vit.grid[0] * vit.grid[1]), notes)


def _prepare(vit: Layout, name: str, options: Mapping[str, Any],
             generator: torch.Generator) -> None:
    """Without a base: set attention's biases to 0 and draw a position embedding that is scaled."""
    for block in vit.blocks:
        values = () if options.get("value_init") == "base" else (block.v_bias, block.proj_bias)
        for bias in (block.q_bias, block.k_bias, *values):
            if bias is not None:
                bias.zero_()
    if name in DRAWS_POSITIONS and vit.learned:
        vit.pos_embed.normal_(std=EMBED_STD, generator=generator)


def impulse_(model: nn.Module, *, generator: torch.Generator, **options: Any) -> Report:
    """Let each head of a ViT start by attending to one neighbour: see `init_`, `impulse`."""
    return init_(model, "impulse", generator=generator, **options)


def mimetic_(model: nn.Module, *, generator: torch.Generator, **options: Any) -> Report:
    """Let the attention of a ViT start like that of trained ones: see `init_`, `mimetic`."""
    return init_(model, "mimetic", generator=generator, **options)


def deep_impulse_(model: nn.Module, *, generator: torch.Generator, **options: Any) -> Report:
    """As `impulse_`, but so that it reaches every block: see `init_`, `deep_impulse`."""
    return init_(model, "deep_impulse", generator=generator, **options)


def describe(model: nn.Module, *, layout: Callable[[nn.Module], Layout] = layout_of) -> Description:
    """What is recognised of a model, or why nothing, and which inits fit. Changes nothing."""
    name = type(model).__name__
    try:
        model = unwrapped(model)
        name = type(model).__name__
        work = copied(model)
        vit = understood(layout(work), work, "mimetic")
        prefix = check(vit)
    except ValueError as error:
        return Description(name, str(error))
    fits = []
    for init in ("impulse", "mimetic", "deep_impulse"):
        try:
            understood(vit, work, init)
            fits.append((init, ""))
        except ValueError as error:
            fits.append((init, str(error)))
    return Description(name, None, len(vit.blocks), *vit.blocks[0].q.shape[:2], vit.grid, prefix,
                       tuple(fits))


# ---------------------------------------------------------------------------------------------
# What can be initialised, and on what
# ---------------------------------------------------------------------------------------------


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DataParallel, DistributedDataParallel and PEFT's wrappers."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers of a model by name, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def copied(model: nn.Module) -> nn.Module:
    """A copy on the CPU, in float64 if the model has such parameters, else in float32.

    Raises ValueError for tensors that cannot be copied or written: without storage, sharded,
    quantised, computed from others.
    """
    for name, tensor in tensors(model):
        kind = type(tensor).__name__
        if tensor.device.type == "meta":
            raise ValueError(f"{name} is on the meta device, without storage; call model.to_empty("
                             "device=\"cpu\") first, with base=\"default\" then")
        if kind not in ("Tensor", "Parameter", "Buffer"):
            raise ValueError(f"{name} is a {kind}; initialise on the CPU before sharding or "
                             f"quantising")
        if isinstance(tensor, nn.Parameter) and not tensor.is_floating_point():
            raise ValueError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, quantised; "
                             "initialise before quantising")
        if tensor.is_inference():
            raise ValueError(f"{name} was made in inference mode and cannot be written")
    if any(hasattr(module, "_fsdp_wrapped_module") for module in model.modules()):
        raise ValueError("the model is sharded by FSDP; initialise on the CPU before sharding")
    wide = any(tensor.dtype == torch.float64 for tensor in model.parameters())
    try:
        work = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:       # weights that are computed from others
        raise ValueError(f"the model cannot be copied ({in_brief(error, 80)})") from error
    return work.to("cpu", torch.float64 if wide else torch.float32)


def understood(vit: Layout, model: nn.Module, name: str) -> Layout:
    """The layout, if the init `name` covers the model; raises ValueError with the reason if not."""
    own = {tensor.untyped_storage().data_ptr() for _, tensor in tensors(model)}
    views = [vit.pos_embed, *vit.writers, *vit.tokens, *(
        tensor for block in vit.blocks for tensor in vars(block).values())]
    if any(tensor.untyped_storage().data_ptr() not in own for tensor in views
           if isinstance(tensor, Tensor)):
        raise ValueError("not all tensors of the layout are views of parameters of the model that "
                         "the "
                         "layout is asked for (some weights are computed from others, or are "
                         "another "
                         "model's)")
    parts = {path.rpartition(".")[2] for path, module in model.named_modules()
             if not isinstance(module, nn.Identity)}
    if any(re.search("(^|_)(rope|rotary)", part) for part in parts):
        raise ValueError("the model has rotary positions, which turn Q and K; only learned "
                         "position "
                         "embeddings, added before the first block, are covered")
    if parts & {"q_norm", "k_norm", "norm_q", "norm_k", "q_layernorm", "k_layernorm"}:
        raise ValueError("the model normalises Q and K (q_norm, k_norm), which undoes their scale")
    if vit.pos_embed is None or vit.grid is None:
        raise ValueError(vit.missing)
    if not all(isinstance(block.norm, nn.LayerNorm) for block in vit.blocks):
        raise ValueError("a block has no LayerNorm before its attention (post-norm, or another "
                         "norm)")
    if name == "deep_impulse":
        affine = all(norm.weight is not None for norm in
                     (*vit.norms, *vit.ends, *(block.norm for block in vit.blocks)))
        if not (vit.writers and affine and len(vit.norms) == len(vit.blocks) and vit.image_shape):
            raise ValueError("init 'deep_impulse' writes the patch embedding, the last layer of "
                             "each "
                             "MLP and a LayerNorm before it, and finds no such in the model")
    return vit


@torch.no_grad()
def check(vit: Layout) -> int:
    """Pass an image through the model and compare each attention with its formula.

    Returns the number of prefix tokens. Raises ValueError if an attention does not read the output
    of its norm, or computes something else than softmax(Q Kᵀ / √d) V·proj from it. A layout by hand
    whose blocks do not name their attention is not checked.
    """
    cells, seen = vit.grid[0] * vit.grid[1], {}
    if vit.image_shape is None or any(block.attention is None for block in vit.blocks):
        return len(vit.pos_embed) - cells

    def compare(block: Block, found: Any) -> None:
        found = found[0] if isinstance(found, tuple) else found
        if block.norm not in seen:
            raise ValueError("an attention does not read the output of the norm before it "
                             "(post-norm or "
                             "parallel blocks)")
        y = seen[block.norm]
        values = y[:, None] @ block.v.mT + _bias(block.v_bias)           # (1, h, T, d)
        wanted = torch.einsum("bhtd, chd -> btc", attention(block, y) @ values, block.proj)
        wanted = wanted if block.proj_bias is None else wanted + block.proj_bias
        found = found if found.shape == wanted.shape else found.transpose(0, 1)
        if found.shape != wanted.shape or not (found - wanted).abs().max() <= OTHERWISE * (
                wanted.abs().max() + 1e-6):
            raise ValueError("an attention computes something else than softmax(Q Kᵀ / √d) V·proj "
                             "of its "
                             "norm's output (rotary or relative positions, norms, gates, post-norm "
                             "or "
                             "parallel blocks, another scale)")
        seen["blocks"] = seen.get("blocks", 0) + 1

    image = torch.randn(1, *vit.image_shape, generator=torch.Generator().manual_seed(0))
    run(vit.model, image.to(vit.pos_embed), after={
        **{block.norm: partial(seen.__setitem__, block.norm) for block in vit.blocks},
        **{block.attention: partial(compare, block) for block in vit.blocks}})
    if seen.get("blocks") != len(vit.blocks):
        raise ValueError(f"of {len(vit.blocks)} attentions {seen.get('blocks', 0)} were called "
                         f"once in a "
                         "forward pass")
    return seen[vit.blocks[0].norm].shape[1] - cells


def call(function: Callable, target: nn.Module | Layout, name: str, options: Mapping[str, Any],
         **given: Any) -> None:
    """Apply an init; raises ValueError if weights cannot be computed or are not finite."""
    shown = ", ".join(f"{key}={value}" for key, value in options.items()
                      if not isinstance(value, (bool, str)))
    what = f"init '{name}'" + (f" with {shown}" if shown else "")
    try:
        function(target, **given, **options)
    except (ArithmeticError, RuntimeError) as error:     # overflow, or a failed decomposition
        raise ValueError(f"{what} cannot be computed ({in_brief(error, 60)}); use values nearer to "
                         f"the "
                         "defaults") from error
    model = target.model if isinstance(target, Layout) else target
    for tensor_name, tensor in model.named_parameters():
        # A NaN or an infinity shows in the extremes: an eighth of the time of isfinite().all().
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise ValueError(f"{what} makes {tensor_name} infinite or NaN; use values nearer to "
                             f"the "
                             "defaults")


@torch.no_grad()
def write_back(model: nn.Module, work: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy the tensors that differ from `work` to the model: their names, and notes about them."""
    changed = [(name, old, new) for (name, old), (_, new) in zip(tensors(model), tensors(work))
               if not torch.equal(old.to(new), new)]
    for name, old, new in changed:
        if not new.to(old.dtype).isfinite().all():
            raise ValueError(f"{name} is {str(old.dtype).removeprefix('torch.')}, too narrow for "
                             f"what the "
                             "init writes; initialise in float32 and convert then")
    before = []
    try:
        for _, old, new in changed:
            before.append((old, old.clone()))
            old.copy_(new)
    except BaseException:
        for old, value in before[:-1]:
            old.copy_(value)
        raise
    names, ids = tuple(name for name, _, _ in changed), {id(old) for _, old, _ in changed}
    frozen = [name for name, old, _ in changed
              if isinstance(old, nn.Parameter) and not old.requires_grad]
    every = [(name, id(tensor)) for name, tensor in model.named_parameters(remove_duplicate=False)]
    tied = [name for name, number in every if number in ids and name not in names]
    half = {str(old.dtype).removeprefix("torch.") for _, old, new in changed
            if old.dtype != new.dtype}
    return names, tuple(line for line, about in (
        (f"frozen, and written nevertheless: {', '.join(_patterns(frozen))}", frozen),
        (f"tied to what was written: {', '.join(_patterns(tied))}", tied),
        (f"computed in float32 and rounded to {', '.join(sorted(half))}; the mass is that "
         f"before", half))
        if about)


# ---------------------------------------------------------------------------------------------
# The mass
# ---------------------------------------------------------------------------------------------


def targets_of(name: str, options: Mapping[str, Any], heads: list[int]
               ) -> tuple[list[list[Offset | None]], list[Offset]]:
    """The target of each head of each block, and the offsets that occur; empty without targets.

    options: all options of the init. heads: their number by block. None stands for an offset that
    was drawn at random.
    """
    if name not in AIMED or options.get("qk_init") == "base":
        return [], []
    cells = [(0, 0)] if name == "mimetic" else ordered_offsets(options["kernel_size"])
    assignment = "ordered" if name == "mimetic" else options.get("offsets", "rotating")
    if assignment == "random":
        return [[None] * count for count in heads], cells
    return [head_offsets(count, cells, assignment, torch.Generator(), first=sum(heads[:block]))
            for block, count in enumerate(heads)], cells


def attention(block: Block, y: Tensor) -> Tensor:
    """softmax(Q Kᵀ / √d) of a norm's output y, (n, T, D): (n, h, T, T)."""
    query = y[:, None] @ block.q.mT + _bias(block.q_bias)
    key = y[:, None] @ block.k.mT + _bias(block.k_bias)
    return (query @ key.mT * block.q.shape[1] ** -0.5).softmax(-1)


def _bias(bias: Tensor | None) -> Tensor | float:
    """(h, d) → (h, 1, d)."""
    return 0.0 if bias is None else bias[:, None]


def _shares(vit: Layout, block: Block, y: Tensor) -> Tensor:
    """The attention among the patches, (h, N, N), averaged over images."""
    return shares_of_patches(attention(block, y), vit.grid).mean(0)


@torch.no_grad()
def mean_shares(vit: Layout, images: Tensor | None = None) -> list[Tensor]:
    """By block `_shares` in forward passes of the images, (n, 3, H, W), or of positions alone."""
    if images is None:
        return [_shares(vit, block, block.norm(vit.positions[None])) for block in vit.blocks]
    means: list[Any] = [0.0] * len(vit.blocks)

    def record(number: int, weight: float, y: Tensor) -> None:
        means[number] = means[number] + weight * _shares(vit, vit.blocks[number], y)
    for batch in images.detach().to(vit.pos_embed).split(AT_ONCE):
        weight = len(batch) / len(images)
        run(vit.model, batch, after={block.norm: partial(record, number, weight)
                                     for number, block in enumerate(vit.blocks)})
    return means


def _strongest(shares: Tensor, cells: list[Offset], grid: tuple[int, int]) -> Offset:
    """The offset at which a head's attention among the patches, (N, N), has the largest mass."""
    return max(cells, key=lambda cell: target_mass(shares[None], [cell], grid).item())


def _masses(shares: list[Tensor], aims: tuple[tuple[Offset, ...], ...], grid: tuple[int, int]
            ) -> Masses:
    return tuple(tuple(target_mass(each, list(targets), grid).tolist())
                 for each, targets in zip(shares, aims))


# ---------------------------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------------------------


def decimal(value: float) -> str:
    """For example .99, .05, .0013: two decimals, or, below 0.1, two digits."""
    text = f"{value:.2f}" if value >= 0.0995 else f"{float(f'{value:.2g}'):.6f}".rstrip("0")
    return text.removeprefix("0")


def _described(found: Report | Description) -> str:
    prefix = f" + {found.prefix_tokens}" if found.prefix_tokens else ""
    return (f"{found.blocks} blocks, {found.heads} heads of {found.head_dim}, {found.grid[0]}×"
            f"{found.grid[1]} tokens{prefix}")


def _patterns(names: tuple[str, ...] | list[str]) -> list[str]:
    """Names with * for the numbers of blocks, each once."""
    return list(dict.fromkeys(re.sub(r"(?<![a-z])\d+", "*", name) for name in names))


def _with_defaults(function: Callable, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of an init; raises TypeError for one that it does not have."""
    known = {name: parameter.default for name, parameter in
             inspect.signature(function).parameters.items()
             if parameter.kind is parameter.KEYWORD_ONLY}
    unknown = options.keys() - known.keys()
    if unknown:
        raise TypeError(f"{function.__name__} has no option {', '.join(sorted(unknown))}; it has: "
                        f"{', '.join(known.keys() - {'generator', 'images'})}")
    return known | dict(options)
