"""Measure how well an init reached what it aims at: on images, and on the position embedding alone.

Inits that write attention aim each head at one neighbour, its target. Whether the head reaches it
depends on the grid, the number of heads, the width and the images, and no loss shows it. This
module measures the mass, the share of a head's attention on its target, on a freshly initialised
model. `mass_on_images` is what train.py prints. `position_mass` leaves the content of patches out:
where it is low, Q and K could not be solved for, which options can mend, and of which `shortfall`
warns.

| family    | what "the position embedding alone" means                                           |
|-----------|-------------------------------------------------------------------------------------|
| ViT       | LayerNorm of the patch tokens' pos_embed; for `deep_impulse`, pos_embed divided by  |
|           |   the standard deviation that the init expects before each block                    |
| SimpleViT | what queries and keys read if patches have no content                               |
| Swin      | the relative position bias within a window                                          |

In Mixer and ConvMixer the shifts are exact by construction, so there is nothing to measure.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..filters import Offset, ordered_offsets
from ..mixing import shares_of_patches, target_mass
from ..models import SimpleViT, SwinTransformer, VisionTransformer
from ..models.attention import attention_weights
from . import init_function
from .code_plan import code_size, slowest_waves
from .content import known_content
from .deep_impulse import masses_by_block
from .impulse import head_offsets, normalised_positions
from .mimetic import attentions
from .steady_norms import constant_slice
from .stream_scales import stream_scales

AIMED = ("impulse", "impulse_gd", "deep_impulse", "mimetic")
FAINT = 0.3             # a mass below this causes a warning
REACHED = 0.9           # share of the wanted target_mass that counts as having reached it
SHARPER = 2.0           # multiple of qk_norm for which the warning states the mass
AT_ONCE = 8             # images per forward pass, whose attention matrices are all computed

HeadMaps = Callable[[int], Tensor]   # head → its attention, (1, N, N)


class Mass(NamedTuple):
    """The mass on the heads' targets, one entry per block; NaN where a block has no such head."""

    centre: list[float]         # mean over the heads whose target is their own token
    others: list[float]         # mean over all other heads
    uniform: list[float]        # the share of one token under uniform attention

    def __str__(self) -> str:
        """For example ".99 / .05 (uniform .001) on the targets of centre / other heads".

        The numbers are means over the blocks, or one for each block where they differ by more than
        0.05, with "–" for a block that has no such head.
        """
        kinds = {kind: (values, known)
                 for kind, values in (("centre", self.centre), ("other", self.others))
                 if (known := [value for value in values if not math.isnan(value)])}
        shown = [_decimal(_mean(known)) if max(known) - min(known) <= 0.05 else
                 " ".join("–" if math.isnan(value) else _decimal(value) for value in values)
                 for values, known in kinds.values()]
        return (f"{' / '.join(shown)} (uniform {_decimal(_mean(self.uniform))}) on the targets of "
                f"{' / '.join(kinds)} heads")


@torch.no_grad()
def mass_on_images(model: nn.Module, name: str, options: Mapping[str, Any],
                   images: Tensor) -> Mass | None:
    """The masses in a forward pass of `images`, (n, 3, H, W), normalised; else as `position_mass`.

    The model runs in evaluation mode, and is left as it was.
    """
    return _mass(model, name, all_options(model, name, options),
                 lambda chosen: image_readers(model, images))


@torch.no_grad()
def position_mass(model: nn.Module, name: str, options: Mapping[str, Any], *,
                  sharper: float = 1.0) -> Mass | None:
    """The masses that the init `name` reached on the position embedding of `model`, without images.

    options: those given to the init, which has just been applied to the model. sharper: compute as
        if Q and K of a ViT were this many times as large.

    Returns None where there is nothing to measure: for baselines and controls, for Mixer and
    ConvMixer, for `mimetic` on a Swin, whose tokens have no position embedding, for mimetic queries
    and keys left as the base drew them, and for Gaussian targets. The target of `mimetic` is the
    token itself. If offsets were drawn at random, the target of a head is the offset of the kernel
    to which it attends most.
    """
    return _mass(model, name, all_options(model, name, options),
                 lambda chosen: readers(model, name, chosen, sharper))


def _mass(model: nn.Module, name: str, chosen: dict[str, Any], read_by: Callable) -> Mass | None:
    """The masses of the maps that `read_by`, a function of all options, returns as `readers` does."""
    families = (VisionTransformer, SimpleViT) + (SwinTransformer,) * (name != "mimetic")
    if (name not in AIMED or not isinstance(model, families)
            or chosen.get("qk_init") == "base" or chosen.get("target") == "gaussian"):
        return None
    cells = [(0, 0)] if name == "mimetic" else ordered_offsets(chosen["kernel_size"])
    assignment = "ordered" if name == "mimetic" else chosen.get("offsets", "rotating")
    maps, grids = read_by(chosen)

    masses, heads_before = Mass([], [], []), 0
    for (heads, read), grid in zip(maps, grids):
        targets = None if assignment == "random" else head_offsets(
            heads, cells, assignment, torch.Generator(), first=heads_before)
        heads_before += heads
        centre, others = [], []
        for head in range(heads):
            offset, mass = reached(read(head), cells if targets is None else [targets[head]], grid)
            (centre if offset == (0, 0) else others).append(mass)
        masses.centre.append(_mean(centre))
        masses.others.append(_mean(others))
        masses.uniform.append(1.0 / math.prod(grid))
    return masses


def all_options(model: nn.Module, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of the init `name` for this model: those that were given, else the defaults."""
    parameters = inspect.signature(init_function(name, type(model))).parameters
    return {key: parameter.default for key, parameter in parameters.items()} | dict(options)


def reached(weights: Tensor, offsets: list[Offset], grid: tuple[int, int]) -> tuple[Offset, float]:
    """The offset with the largest mass in weights, (1, N, N), and that mass; NaN without a target."""
    masses = [target_mass(weights, [offset], grid).item() for offset in offsets]
    best = max(range(len(offsets)), key=lambda index: (not math.isnan(masses[index]), masses[index]))
    return offsets[best], masses[best]


def readers(model: nn.Module, name: str, options: Mapping[str, Any], sharper: float,
            ) -> tuple[list[tuple[int, HeadMaps]], list[tuple[int, int]]]:
    """Return two lists with one entry per block: how to read its heads' attention, and its grid.

    An entry of the first is the number of heads and a function head → (1, N, N), the attention of
    that head on the position embedding alone.
    """
    if isinstance(model, SwinTransformer):
        return ([(attention.num_heads, _bias_reader(attention)) for attention in attentions(model)],
                [attention.window for attention in attentions(model)])
    grids = [model.grid] * len(model.blocks)
    if isinstance(model, SimpleViT):
        return [(block.attn.num_heads, _simple_reader(model, block)) for block in model.blocks], grids
    if name == "deep_impulse":
        count = code_size(slowest_waves(model, options["code_channels"], options["period"],
                                        options["bias_channels"]), options["bias_channels"])
        positions = torch.zeros_like(model.pos_embed[0, model.num_prefix_tokens:])
        positions[:, :count] = model.pos_embed[0, model.num_prefix_tokens:, :count]       # (N, D)
        constants = constant_slice(count, options["constant_share"], model.pos_embed.shape[2])
        reserved = constants.stop if options["reserve"] else 0
        content = known_content(model, patch_embed=options["patch_embed"], first=reserved,
                                content_scale=options["content_scale"], constants=constants)
        scales = stream_scales(model, reserved, options["code_rms"], content)
        scaled = [positions / math.sqrt(scale) for scale in scales]
    else:
        # Content makes the LayerNorm divide by more; for that Q and K are larger.
        growth = math.sqrt(1.0 + options.get("content_scale", 0.0)**2) if name == "impulse" else 1.0
        scaled = [normalised_positions(model) / growth] * len(model.blocks)
    return [(block.attn.num_heads, _reader(block.attn, positions, sharper))
            for block, positions in zip(model.blocks, scaled)], grids


def image_readers(model: nn.Module, images: Tensor
                  ) -> tuple[list[tuple[int, HeadMaps]], list[tuple[int, int]]]:
    """As `readers`, but of a head's attention among the patches, averaged over `images`."""
    swin = isinstance(model, SwinTransformer)
    layers = attentions(model) if swin else [block.attn for block in model.blocks]
    grids = [layer.window if swin else model.grid for layer in layers]
    means: list[Tensor] = [images.new_zeros(())] * len(layers)                # (h, N, N) each

    def record(number: int) -> Callable:
        def hook(layer: nn.Module, arguments: tuple) -> None:
            weights = layer.mixing_weights(*arguments)                   # of images, or their windows
            means[number] = means[number] + len(batch) / len(images) * shares_of_patches(
                weights, grids[number]).mean(0)
        return hook
    hooks = [layer.register_forward_pre_hook(record(number)) for number, layer in enumerate(layers)]
    training = model.training
    model.eval()
    for batch in images.split(AT_ONCE):
        model(batch)
    model.train(training)
    for hook in hooks:
        hook.remove()
    return [(len(mean), lambda head, mean=mean: mean[head:head + 1]) for mean in means], grids


def _reader(attention: nn.Module, positions: Tensor, sharper: float) -> HeadMaps:
    def read(head: int) -> Tensor:
        return attention_weights(sharper**2 * query[:, head], key[:, head])
    query, key, _ = attention.queries_keys_values(positions[None])            # (1, h, N, d) each
    return read


def _simple_reader(model: SimpleViT, block: nn.Module) -> HeadMaps:
    x = torch.zeros_like(model.pos_embed)            # (N, C): patches without content
    if model.input_pos_embed:
        x = block.norm1((1.0 - model.alpha) * model.pos_embed)
    weights = block.attn.mixing_weights(x[None], model.pos_embed)        # (1, h, N, N)
    return lambda head: weights[:, head]


def _bias_reader(attention: nn.Module) -> HeadMaps:
    weights = attention.relative_bias().softmax(-1)                      # (h, w², w²)
    return lambda head: weights[head:head + 1]


# ---------------------------------------------------------------------------------------------
# The warning
# ---------------------------------------------------------------------------------------------


def shortfall(mass: Mass, model: nn.Module, name: str, options: Mapping[str, Any]) -> str:
    """One line that names the heads that fall short and says what would help; "" if none does.

    Heads fall short if their mass in some block is less than FAINT, or than REACHED times the
    target_mass that was asked for, whichever is lower. `mimetic` asks for no mass, so it cannot
    fall short.
    """
    if name == "mimetic":
        return ""
    wanted_mass = all_options(model, name, options).get("target_mass", 1.0)
    asked = masses_by_block(wanted_mass, len(mass.uniform), mass.uniform[0])
    for kind, values in (("centre", mass.centre), ("other", mass.others)):
        short = [value for value, wanted in zip(values, asked)
                 if value < min(FAINT, REACHED * wanted)]                # false for NaN
        if short:
            return (f"{kind} heads have only {_decimal(min(short))} of their attention on their target, "
                    f"on the position embedding alone; {_advice(kind, min(short), model, name, options)}")
    return ""


def _advice(kind: str, mass: float, model: nn.Module, name: str, options: Mapping[str, Any]) -> str:
    if name == "impulse_gd":
        if "pos_embed" not in options.get("pseudo_input", "pos_embed"):
            return 'pseudo_input = "pos_embed" would solve on the position embedding itself'
        return ("renorm_every = 0, more steps or a larger step_size sharpen it"
                + (", and init impulse needs no descent" if isinstance(model, SimpleViT)
                   or model.learns_positions else ""))
    if name != "impulse" or not isinstance(model, VisionTransformer):
        return "a larger head_dim, or fewer patches, would help"
    sharp = position_mass(model, name, options, sharper=SHARPER)
    would = min(value for value in (sharp.centre if kind == "centre" else sharp.others)
                if not math.isnan(value))
    norm = SHARPER * all_options(model, name, options)["qk_norm"]
    return (f"qk_norm = {norm:g} would give {_decimal(would)}, " if would > 1.1 * mass else "") + (
        "init deep_impulse with target_mass = 0.9 gives .9 in every block; a wider model, or fewer and "
        "larger patches, would help, too")


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _decimal(value: float) -> str:
    """For example .99, .05, .0013: two decimals, or, below 0.1, two digits."""
    text = f"{value:.2f}" if value >= 0.0995 else f"{float(f'{value:.2g}'):.6f}".rstrip("0")
    return text.removeprefix("0")
