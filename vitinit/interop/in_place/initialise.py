"""Initialise any ViT in place, of this package or of another library, and say what was achieved.

A copy of the model, on the CPU and in float32 (or float64), is probed first (`probe.py`). Then the
init is applied to it, its attentions are compared with their formula once more, and the tensors
that the init changed are copied back when all is well. So after an error no tensor has changed, and
the model may be on any device and, but for rotary attention in bfloat16, in half precision. The
inits are those of this package: with `base=`, a ViT of timm and ours get the same bits from the
same generator.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ...base.messages import in_brief, one_line
from ...init import BASES, ROTARY, apply, family_of, init_function
from ...init.attentions import Attentions, Layout, SwinLayout
from ...init.baseline import EMBED_STD
from ...init.deep_impulse import NOISE_IMAGES
from ...init.residual_stream import noise_images
from ...models.layers import uncompiled
from ...watch.mass import InitOptions, with_defaults
from .foreign_layouts import block_paths, foreign_layout_of
from .formula import require_formula_as_written
from .probe import probe
from .receipt import Description, Report, measured, patterns

Describing = Callable[[nn.Module], Attentions]


@torch.autocast("cpu", enabled=False)
def init_(
    model: nn.Module,
    name: str,
    *,
    generator: Generator,
    base: str | None = None,
    images: Tensor | None = None,
    layout: Describing = foreign_layout_of,
    **options: Any,
) -> Report:
    """Initialise a ViT or a Swin of any library in place by the init `name`.

    name: one of `INITS` that is defined for the ViT, or for the Swin, of this package.
    generator: a CPU generator; the same state gives the same bits.
    base: "default", "torch" or "lecun" draws all other weights first. None leaves them as they are:
        written is what the init's docstring lists, and 0 to the biases of what it lists.
    images: (n, 3, H, W), normalised as for training. On these the model is probed and the mass
        measured, too, and deep_impulse measures its norms. Without: white noise, of a stated size.
    layout: describes the model, where it is of no library that is known here.
    options: of the init, see its function; for example `kernel_size`.

    Raises ValueError, in one line with the reason, for a model that the init does not cover, and
    TypeError for unknown options. Then no tensor has changed.
    """
    model = unwrapped(model)
    vit = probed(model, layout, images)
    options = write(vit, name, generator, base, images, options)
    require_formula_as_written(vit, images)
    count = 0 if images is None else len(images)
    if images is None and name == "deep_impulse":
        images = noise_images(vit, NOISE_IMAGES, Generator().manual_seed(0))
    targets, mass, mass_on_images = measured(vit, name, options, images)
    written, notes = write_back(model, vit.model)
    description = recognised(model, vit)
    return Report(
        **vars(description),
        init=name,
        written=written,
        notes=notes,
        images=count,
        kept=len(list(tensors(model))) - len(written),
        targets=targets,
        mass=mass,
        mass_on_images=mass_on_images,
        uniform=1.0 / math.prod(description.grid),
    )


def impulse_(model: nn.Module, *, generator: Generator, **options: Any) -> Report:
    """Let each head start by attending to one neighbour: see `init_`, `impulse`, `impulse_swin`."""
    return init_(model, "impulse", generator=generator, **options)


def mimetic_(model: nn.Module, *, generator: Generator, **options: Any) -> Report:
    """Let the attention of a ViT start like that of trained ones: see `init_`, `mimetic`."""
    return init_(model, "mimetic", generator=generator, **options)


def deep_impulse_(model: nn.Module, *, generator: Generator, **options: Any) -> Report:
    """As `impulse_`, but so that it reaches every block: see `init_`, `deep_impulse`."""
    return init_(model, "deep_impulse", generator=generator, **options)


@torch.autocast("cpu", enabled=False)
def describe(
    model: nn.Module, *, images: Tensor | None = None, layout: Describing = foreign_layout_of
) -> Description:
    """What is recognised of a model, or why nothing, and which inits fit. Changes nothing.

    The model is probed as by the inits themselves; images, layout: see `init_`.
    """
    model = unwrapped(model)
    try:
        vit = probed(model, layout, images)
    except ValueError as error:
        return Description(model=type(model).__name__, reason=str(error))
    rng = Generator().manual_seed(0)
    if images is None and vit.image_shape:
        images = noise_images(vit, 1, rng)
    fits = []
    for init in ("impulse", "mimetic", "deep_impulse"):
        fault = ""
        try:
            write(vit, init, rng, None, images, {})
            require_formula_as_written(vit, images)
        except (ValueError, RuntimeError) as error:
            fault = one_line(error)
        fits.append((init, fault))
    return replace(recognised(model, vit), fits=tuple(fits))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model in a wrapper of torch, or alone in a LightningModule without its own forward."""
    model = uncompiled(model)
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return unwrapped(model.module)
    forward_of = next(kind.__name__ for kind in type(model).__mro__ if "forward" in vars(kind))
    inside = [child for child in model.children() if list(child.parameters())]
    if forward_of in ("Module", "LightningModule") and len(inside) == 1:
        return unwrapped(inside[0])
    return model


def probed(model: nn.Module, layout: Describing, images: Tensor | None) -> Attentions:
    """The layout of a copy, to which inits may write; ValueError, in one line, if none does fit."""
    if images is not None and (images.ndim != 4 or not len(images)):
        raise ValueError(f"images are {tuple(images.shape)}; expected (n, C, H, W)")
    by_hand = layout is not foreign_layout_of
    try:
        work = copied(model)
        stated = layout(work)
        require_views(stated, work)
        if by_hand:
            stated = with_blocks(stated)
        return probe(stated, images, by_hand=by_hand)
    except Exception as error:
        reason = str(error)
        if not isinstance(error, ValueError):
            kind = type(error).__name__
            reason = f"a {type(model).__name__} is of no layout known here: {kind}: {reason}"
        raise ValueError(one_line(reason)) from error


def with_blocks(layout: Attentions) -> Attentions:
    """A layout that the user has written, with the blocks around its attentions, if they are seen."""
    modules = dict(layout.model.named_modules())
    try:
        paths = block_paths(layout.model)
    except ValueError:
        return layout
    around: dict[Any, nn.Module] = {modules[path]: modules[paths[path]] for path in paths}
    blocks = [
        replace(block, around=block.around or around.get(block.attention))
        for block in layout.blocks
    ]
    return replace(layout, blocks=tuple(blocks))


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers of a model by name, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def copied(model: nn.Module) -> nn.Module:
    """A copy on the CPU, in float64 or float32; ValueError for what cannot be written in place."""
    for path, module in model.named_modules():
        if hasattr(module, "_orig_mod"):
            raise ValueError(f"{path} is compiled; initialise the model before torch.compile")
    for name, tensor in tensors(model):
        kind = type(tensor).__name__
        if (
            kind not in ("Tensor", "Parameter", "Buffer")
            or tensor.device.type == "meta"
            or (kind == "Parameter" and not tensor.is_floating_point())
        ):
            raise ValueError(
                f"{name} is a {kind} of {str(tensor.dtype).removeprefix('torch.')} on "
                f"{tensor.device}; initialise before sharding or quantising, and a model that "
                "was built on a device"
            )
        if kind == "Parameter" and tensor.is_inference():
            raise ValueError(
                f"{name} was made in torch.inference_mode, so nothing can be written to it; build "
                "the model outside of it"
            )
        if kind == "Parameter" and tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(
                f"{name} is expanded: its elements share memory, so they cannot differ; make it a "
                "parameter of its own by .clone()"
            )
    wide = any(tensor.dtype == torch.float64 for tensor in model.parameters())
    try:
        work = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:  # weights that are computed from others
        raise ValueError(f"the model cannot be copied ({in_brief(error, 80)})") from error
    work.cpu()
    return work.double() if wide else work.float()  # `to` would cast complex ones


def require_views(layout: Attentions, model: nn.Module) -> None:
    """Raise ValueError, with the reason, for a layout whose tensors are not the model's."""
    storages = {tensor.untyped_storage().data_ptr() for _, tensor in tensors(model)}
    views = list(layout.tokens) if isinstance(layout, Layout) else []
    for part in (layout, *layout.blocks):
        views += [value for value in vars(part).values() if isinstance(value, Tensor)]
    if any(view.numel() and view.untyped_storage().data_ptr() not in storages for view in views):
        raise ValueError(
            "not all tensors of the layout are views of parameters of the model that the layout is "
            "asked for (some weights are computed from others, or are another model's)"
        )


def recognised(model: nn.Module, vit: Attentions) -> Description:
    """The sizes of a layout, and what was checked."""
    heads, head_dim, _ = vit.blocks[0].q.shape
    return Description(
        model=type(model).__name__,
        blocks=len(vit.blocks),
        heads=heads,
        head_dim=head_dim,
        grid=vit.grids[0],
        in_windows=isinstance(vit, SwinLayout),
        prefix_tokens=vit.prefix,
        checked=vit.checked,
    )


def write(
    vit: Attentions,
    name: str,
    generator: Generator,
    base: str | None,
    images: Tensor | None,
    options: InitOptions,
) -> dict[str, Any]:
    """Write the init `name` to the model of a layout; return all its options, also by default."""
    function = init_function(name, family_of(vit))
    complete = with_defaults(function, options)
    whole = name in (*BASES, "whitened")  # which write beside what a layout lists
    given: dict[str, Any] = {}
    if "images" in complete:
        given["images"] = None if images is None else images.detach().to(vit.blocks[0].q)
    if base is not None:
        options = {**options, "base": base}
    elif "base" in complete:
        given["base"] = None  # which is no word of the option
        if not whole and generator.device.type == "cpu":  # else `apply` refuses it
            prepare(vit, name, complete, generator)
    target = vit.model if whole else vit
    apply(function, vit.model, target, options, name=name, generator=generator, **given)
    return complete


def prepare(vit: Attentions, name: str, options: InitOptions, generator: Generator) -> None:
    """Without a base: set attention's biases to 0 and draw a position embedding that is scaled."""
    if isinstance(vit, SwinLayout) and name == "impulse":  # which writes its bias table alone
        return
    rotary = family_of(vit) == ROTARY
    values = options.get("value_init", "base" if rotary else "mimetic")
    for block in vit.blocks:
        biases = []
        if not rotary:  # whose inits write the biases of Q and K
            biases += [block.q_bias, block.k_bias]
        if values != "base":
            biases += [block.v_bias, block.proj_bias]
        for bias in biases:
            if bias is not None:
                bias.zero_()
    if name in ("impulse", "norm_matched") and isinstance(vit, Layout) and vit.learned:
        vit.pos_embed.normal_(std=EMBED_STD, generator=generator)


@torch.no_grad()
def write_back(model: nn.Module, work: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy the tensors in which `work` differs to the model: their names, and notes about them."""
    computed = dict(tensors(work))  # and buffers that a forward pass has made
    changed = []
    for name, old in tensors(model):
        new = computed[name]
        if not torch.allclose(old.to(new), new, rtol=0.0, atol=0.0, equal_nan=True):
            changed.append((name, old, new))
    for name, old, new in changed:
        if not new.to(old.dtype).isfinite().all():
            raise ValueError(
                f"{name} is {str(old.dtype).removeprefix('torch.')}, too narrow for "
                "what the init writes; initialise in float32 and convert then"
            )
    before = [old.clone() for _, old, _ in changed]  # all, as memory may run out
    try:
        for _, old, new in changed:
            old.copy_(new)
    except BaseException:
        for (_, old, _), value in zip(changed, before):
            old.copy_(value)
        raise
    written = {name: old for name, old, _ in changed}
    rounded = [name for name, old, new in changed if old.dtype != new.dtype]
    return tuple(written), notes_on(model, written, rounded)


def notes_on(
    model: nn.Module, written: Mapping[str, Tensor], rounded: list[str]
) -> tuple[str, ...]:
    frozen, tied = [], []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in written and not parameter.requires_grad:
            frozen.append(name)
        elif name not in written and any(parameter is old for old in written.values()):
            tied.append(name)
    notes = {
        "frozen, and written nevertheless": frozen,
        "tied to what was written": tied,
        "rounded when written (the masses above are those before rounding)": rounded,
    }
    return tuple(f"{note}: {patterns(names)}" for note, names in notes.items() if names)
