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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..messages import in_brief, one_line
from ..mixing import run
from . import BASES, apply, init_function
from .baseline import EMBED_STD
from .deep_impulse import NOISE_IMAGES
from .layout import Block, Layout, layout_of
from .mass import measured, with_defaults
from .report import Description, Report, patterns
from .stream import image_shape_of, noise_images, stream_of

DRAWS_POSITIONS = ("impulse", "norm_matched")    # scale pos_embed, so that it has to be drawn
OTHERWISE = 1e-3        # by which an attention's output may differ from its formula, relatively


def init_(model: nn.Module, name: str, *, generator: torch.Generator, base: str | None = None,
          images: Tensor | None = None, layout: Callable[[nn.Module], Layout] = layout_of,
          **options: Any) -> Report:
    """Initialise a ViT or a Swin of any library in place by the init `name`.

    name: one of `INITS` that is defined for the ViT, or for the Swin, of this package.
    generator: a CPU generator; the same state gives the same bits.
    base: "default", "torch" or "lecun" draws all other weights first. None leaves them as they are:
        written are Q, K, V, proj, their biases (to 0) and the position embedding or relative bias,
        as far as the init defines them (for deep_impulse also the norms, and rows that write to its
        channels).
    images: (n, 3, H, W), normalised as for training. On these the mass is measured, too, and
        deep_impulse measures its norms (on white noise where there are none). For a Swin, whose
        mass is that of its relative bias, only with "whitened".
    layout: describes the model, where it is of no library that is known here.
    options: of the init, see its function; for example `kernel_size`.

    Raises ValueError, in one line with the reason, for a model that the init does not cover, and
    TypeError for unknown options. Then no tensor has changed.
    """
    model = unwrapped(model)
    work = copied(model)
    vit = layout(work)
    function = init_function(name, "swin" if vit.in_windows else "vit")
    chosen = with_defaults(function, options)
    require_covered(vit, work, name)
    if vit.in_windows and images is not None and name != "whitened":
        raise ValueError("a Swin's mass is measured on its relative bias alone; leave out images")
    size = None if vit.in_windows else image_shape_of(vit)
    if images is not None and (not len(images) or size not in (None, tuple(images.shape[1:]))):
        raise ValueError(f"images are {tuple(images.shape)}; expected (n, {size or 'C, H, W'})")
    whole = name in (*BASES, "whitened")             # which write beside what a layout lists
    given, parameters = {}, inspect.signature(function).parameters
    if "images" in parameters:
        given["images"] = None if images is None else images.detach().to(vit.blocks[0].q)
    if base is not None:
        options["base"] = base
    elif "base" in parameters:
        given["base"] = None                         # which is no word of the option
        if not whole and generator.device.type == "cpu":     # else `apply` refuses it
            prepare(vit, name, chosen, generator)
    apply(function, work, work if whole else vit, options, name=name, generator=generator, **given)
    found = recognised(model, vit)
    results = dict(images=0 if images is None else len(images))
    if images is None and name == "deep_impulse":
        images = noise_images(vit, NOISE_IMAGES, torch.Generator().manual_seed(0))
    results |= measured(vit, name, chosen, images)
    written, notes = write_back(model, work)
    kept = sum(1 for _ in tensors(model)) - len(written)
    return Report(**vars(found), init=name, written=written, kept=kept, notes=notes, **results,
                  uniform=1.0 / (found.grid[0] * found.grid[1]))


def impulse_(model: nn.Module, *, generator: torch.Generator, **options: Any) -> Report:
    """Let each head start by attending to one neighbour: see `init_`, `impulse`, `impulse_swin`."""
    return init_(model, "impulse", generator=generator, **options)


def mimetic_(model: nn.Module, *, generator: torch.Generator, **options: Any) -> Report:
    """Let the attention of a ViT start like that of trained ones: see `init_`, `mimetic`."""
    return init_(model, "mimetic", generator=generator, **options)


def deep_impulse_(model: nn.Module, *, generator: torch.Generator, **options: Any) -> Report:
    """As `impulse_`, but so that it reaches every block: see `init_`, `deep_impulse`."""
    return init_(model, "deep_impulse", generator=generator, **options)


def describe(model: nn.Module, *, layout: Callable[[nn.Module], Layout] = layout_of) -> Description:
    """What is recognised of a model, or why nothing, and which inits fit. Changes nothing."""
    model, fits = unwrapped(model), {}
    try:
        work = copied(model)
        vit = layout(work)
        require_covered(vit, work, "mimetic")
        found = recognised(model, vit)
    except ValueError as error:
        return Description(model=type(model).__name__, reason=str(error))
    rng = torch.Generator().manual_seed(0)
    few = {"deep_impulse": noise_images(vit, 1, rng)} if image_shape_of(vit) else {}
    for init in ("impulse", "mimetic", "deep_impulse"):
        try:
            init_(work, init, generator=rng, images=few.get(init), layout=layout)
            fits[init] = ""
        except (ValueError, RuntimeError) as error:
            fits[init] = one_line(error)
    return replace(found, fits=tuple(fits.items()))


# What can be initialised, and on what ---------------------------------------------------------


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DataParallel and DistributedDataParallel."""
    model = getattr(model, "_orig_mod", model)
    wrapped = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    return unwrapped(model.module) if wrapped else model


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers of a model by name, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def copied(model: nn.Module) -> nn.Module:
    """A copy on the CPU, in float64 if the model has such parameters, else in float32.

    Raises ValueError for tensors without storage, sharded, quantised and computed ones.
    """
    for name, tensor in tensors(model):
        kind = type(tensor).__name__
        if kind not in ("Tensor", "Parameter", "Buffer") or tensor.device.type == "meta" or (
                kind == "Parameter" and not tensor.is_floating_point()):
            raise ValueError(f"{name} is a {kind} of {str(tensor.dtype).removeprefix('torch.')} on "
                             f"{tensor.device}; initialise before sharding or quantising, and "
                             'after model.to_empty(device="cpu"), with base="default" then')
    wide = any(tensor.dtype == torch.float64 for tensor in model.parameters())
    try:
        work = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:       # weights that are computed from others
        raise ValueError(f"the model cannot be copied ({in_brief(error, 80)})") from error
    return work.to("cpu", torch.float64 if wide else torch.float32)


def require_covered(vit: Layout, model: nn.Module, name: str) -> None:
    """Raise ValueError, with the reason, unless the init `name` covers the model of a layout."""
    own = {tensor.untyped_storage().data_ptr() for _, tensor in tensors(model)}
    views = [vit.pos_embed, *vit.tokens,
             *(view for block in vit.blocks for view in vars(block).values())]
    if any(view.untyped_storage().data_ptr() not in own for view in views
           if isinstance(view, Tensor)):
        raise ValueError("not all tensors of the layout are views of parameters of the model that "
                         "the layout is asked for (some weights are computed from others, or are "
                         "another model's)")
    if vit.in_windows:
        for block in vit.blocks:
            block.bias_row((0, 0))                   # raises if the table is of another kind
        return
    if vit.pos_embed is None or vit.grid is None:
        raise ValueError(vit.missing)
    if not all(isinstance(block.norm, nn.LayerNorm) for block in vit.blocks):
        raise ValueError("a block has no LayerNorm before its attention (post-norm, or another "
                         "norm)")
    if name == "deep_impulse":
        stream_of(vit)
        if image_shape_of(vit) is None:
            raise ValueError("init 'deep_impulse' passes images through the model, whose size is "
                             "not known; describe the model by a Layout")


def recognised(model: nn.Module, vit: Layout) -> Description:
    """The sizes of a layout, whose attentions are compared with their formula (a ViT's)."""
    prefix, block = 0 if vit.in_windows else require_formula(vit), vit.blocks[0]
    return Description(model=type(model).__name__, blocks=len(vit.blocks), heads=block.q.shape[0],
                       head_dim=block.q.shape[1], grid=block.window or vit.grid,
                       in_windows=vit.in_windows, prefix_tokens=prefix)


@torch.no_grad()
def require_formula(vit: Layout) -> int:
    """Pass an image through the model and compare each attention with its formula.

    Returns the number of prefix tokens. Raises ValueError if an attention does not read the output
    of its norm, or computes something else than softmax(Q Kᵀ / √d) V·proj from it. A layout by hand
    whose blocks do not name their attention is not checked.
    """
    cells, read, agree = vit.grid[0] * vit.grid[1], {}, []
    if image_shape_of(vit) is None or any(block.attention is None for block in vit.blocks):
        return len(vit.pos_embed) - cells

    def keep(norm: nn.Module, _: tuple, y: Tensor) -> None:
        read[norm] = y

    def compare(block: Block, _: tuple, found: Any) -> None:
        found = found[0] if isinstance(found, tuple) else found
        wanted = block.output(read[block.norm]) if block.norm in read else found.new_zeros(())
        found = found if found.shape == wanted.shape else found.transpose(0, 1)
        if found.shape != wanted.shape or not (found - wanted).abs().max() <= OTHERWISE * (
                wanted.abs().max() + 1e-6):
            raise ValueError("an attention computes something else than softmax(Q Kᵀ / √d) V·proj "
                             "of its norm's output (rotary or relative positions, norms of Q and "
                             "K, gates, post-norm or parallel blocks, another scale)")
        agree.append(block)

    image = noise_images(vit, 1, torch.Generator().manual_seed(0))
    try:
        run(vit.model, image, after={
            **{block.norm: partial(keep, block.norm) for block in vit.blocks},
            **{block.attention: partial(compare, block) for block in vit.blocks}})
    except (RuntimeError, TypeError, AssertionError) as error:           # a convolutional stem, say
        raise ValueError(f"an image of the shape {tuple(image.shape[1:])}, which the patches seem "
                         f"to be of, does not pass through the model ({in_brief(error, 80)}); "
                         "describe it by a Layout") from error
    if len(agree) != len(vit.blocks):
        raise ValueError(f"of {len(vit.blocks)} attentions {len(agree)} were called once in a "
                         "forward pass")
    return read[vit.blocks[0].norm].shape[1] - cells


# Before the init, and after -------------------------------------------------------------------


def prepare(vit: Layout, name: str, options: Mapping[str, Any], generator: torch.Generator) -> None:
    """Without a base: set attention's biases to 0 and draw a position embedding that is scaled."""
    if vit.in_windows and name == "impulse":         # which writes the relative bias alone
        return
    for block in vit.blocks:
        biases = [block.q_bias, block.k_bias]
        if options.get("value_init") != "base":
            biases += [block.v_bias, block.proj_bias]
        for bias in biases:
            if bias is not None:
                bias.zero_()
    if name in DRAWS_POSITIONS and vit.learned:
        vit.pos_embed.normal_(std=EMBED_STD, generator=generator)


@torch.no_grad()
def write_back(model: nn.Module, work: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy the tensors in which `work` differs to the model: their names, and notes about them."""
    changed = [(name, old, new) for (name, old), (_, new) in zip(tensors(model), tensors(work))
               if not torch.equal(old.to(new), new)]
    for name, old, new in changed:
        if not new.to(old.dtype).isfinite().all():
            raise ValueError(f"{name} is {str(old.dtype).removeprefix('torch.')}, too narrow for "
                             "what the init writes; initialise in float32 and convert then")
    before = [old.clone() for _, old, _ in changed]      # all, as memory may run out
    try:
        for _, old, new in changed:
            old.copy_(new)
    except BaseException:
        for (_, old, _), value in zip(changed, before):
            old.copy_(value)
        raise
    written = {name: old for name, old, _ in changed}
    every = dict(model.named_parameters(remove_duplicate=False))
    notes = {
        "frozen, and written nevertheless": [name for name, tensor in every.items()
                                             if name in written and not tensor.requires_grad],
        "tied to what was written": [name for name, tensor in every.items() if name not in written
                                     and any(tensor is old for old in written.values())],
        "rounded from what was computed, of which the mass is": [
            name for name, old, new in changed if old.dtype != new.dtype]}
    return tuple(written), tuple(f"{note}: {patterns(names)}" for note, names in notes.items()
                                 if names)
