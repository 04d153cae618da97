"""What an init achieves on its own terms: how much of each head's attention is on its target, on the
position embedding alone.

An init that writes attention aims each head at one neighbour. Whether it gets there depends on the
grid, the heads and the width, and no loss says so. This measures it on a freshly initialised model,
without images: what real images leave of it is less, by how much `figures mass` shows.

| family    | "the position embedding alone" is                                                                   |
|-----------|---------------------------------------------------------------------------------------|
| ViT       | LayerNorm of the patch tokens' pos_embed; of `deep_impulse` the same at the scale of  |
|           |   the stream that it expects before each block                                        |
| SimpleViT | what queries and keys read where patches add nothing                                  |
| Swin      | the relative position bias within a window                                            |

Mixer and ConvMixer hold their shifts exactly, by construction, so there is nothing to measure.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..filters import Offset, ordered_offsets
from ..mixing import target_mass
from ..models import SimpleViT, SwinTransformer, VisionTransformer
from ..models.attention import attention_weights
from . import init_function
from .code_plan import code_size, waves_with_room
from .deep_impulse import masses_by_block
from .impulse import head_offsets, normalised_positions
from .mimetic import attentions
from .stream_scales import stream_scales

AIMED = ("impulse", "impulse_gd", "deep_impulse", "mimetic")
FAINT = 0.3             # less than this on the targets is worth a warning
REACHED = 0.9           # of a mass that was asked for
SHARPER = 2.0           # times qk_norm: what the warning tries out

HeadMaps = Callable[[int], Tensor]   # head → (1, N, N), its attention on the position embedding alone


class PositionMass(NamedTuple):
    """Attention on the heads' targets, by block; NaN in a block that has no such head."""

    centre: list[float]         # mean over the heads whose target is their own token
    others: list[float]         # mean over all other heads
    uniform: list[float]        # what a token gets of uniform attention

    def __str__(self) -> str:
        """For example ".99 / .05 (uniform .001) on the targets of centre / other heads": means over
        the blocks, or the first and last where they are more than .05 apart."""
        kinds = {kind: known for kind, values in (("centre", self.centre), ("other", self.others))
                 if (known := [value for value in values if not math.isnan(value)])}
        shown = [_decimal(_mean(known)) if max(known) - min(known) <= 0.05 else
                 f"{_decimal(known[0])} … {_decimal(known[-1])}" for known in kinds.values()]
        return (f"{' / '.join(shown)} (uniform {_decimal(_mean(self.uniform))}) on the targets of "
                f"{' / '.join(kinds)} heads")


@torch.no_grad()
def position_mass(model: nn.Module, name: str, options: Mapping[str, Any], *,
              sharper: float = 1.0) -> PositionMass | None:
    """The masses that the init `name` with `options` reached on `model`, which it has just written.

    None where it aims at nothing that attention can miss: baselines and controls, Mixer, ConvMixer,
    Swin's mimetic (tokens have no position embedding), and mimetic queries and keys that were left as drawn. The
    target of `mimetic` is the token itself. Where offsets were drawn at random, a head's target is
    that of the kernel's offsets which it looks at most. sharper: as if a ViT's Q and K were so many
    times as large.
    """
    function = init_function(name, type(model))
    chosen = {key: parameter.default for key, parameter in inspect.signature(function).parameters
              .items()} | dict(options)
    families = (VisionTransformer, SimpleViT) + (SwinTransformer,) * (name != "mimetic")
    if (name not in AIMED or not isinstance(model, families)
            or chosen.get("qk_init") == "base" or chosen.get("target") == "gaussian"):
        return None
    cells = [(0, 0)] if name == "mimetic" else ordered_offsets(chosen["kernel_size"])
    assignment = "ordered" if name == "mimetic" else chosen.get("offsets", "rotating")
    maps, grids = readers(model, name, chosen, sharper)

    found, heads_before = PositionMass([], [], []), 0
    for (heads, read), grid in zip(maps, grids):
        targets = None if assignment == "random" else head_offsets(
            heads, cells, assignment, torch.Generator(), first=heads_before)
        heads_before += heads
        centre, others = [], []
        for head in range(heads):
            offset, mass = reached(read(head), cells if targets is None else [targets[head]], grid)
            (centre if offset == (0, 0) else others).append(mass)
        found.centre.append(_mean(centre))
        found.others.append(_mean(others))
        found.uniform.append(1.0 / math.prod(grid))
    return found


def reached(weights: Tensor, offsets: list[Offset], grid: tuple[int, int]) -> tuple[Offset, float]:
    """The offset with the largest mass in weights, (1, N, N), and that mass; NaN without a target."""
    masses = [target_mass(weights, [offset], grid).item() for offset in offsets]
    best = max(range(len(offsets)), key=lambda index: (not math.isnan(masses[index]), masses[index]))
    return offsets[best], masses[best]


def readers(model: nn.Module, name: str, options: Mapping[str, Any], sharper: float,
            ) -> tuple[list[tuple[int, HeadMaps]], list[tuple[int, int]]]:
    """For every block its number of heads and how to read a head's map, and the grid that it mixes."""
    if isinstance(model, SwinTransformer):
        return ([(attention.num_heads, _bias_reader(attention)) for attention in attentions(model)],
                [attention.window for attention in attentions(model)])
    grids = [model.grid] * len(model.blocks)
    if isinstance(model, SimpleViT):
        return [(block.attn.num_heads, _simple_reader(model, block)) for block in model.blocks], grids
    if name == "deep_impulse":
        count = code_size(waves_with_room(model, options["code_channels"], options["period"],
                                          options["bias_channels"]), options["bias_channels"])
        positions = torch.zeros_like(model.pos_embed[0, model.num_prefix_tokens:])
        positions[:, :count] = model.pos_embed[0, model.num_prefix_tokens:, :count]       # (N, D)
        scales = stream_scales(model, count if options["reserve"] else 0, options["code_rms"])
        scaled = [positions / math.sqrt(scale) for scale in scales]
    else:
        scaled = [normalised_positions(model)] * len(model.blocks)
    return [(block.attn.num_heads, _reader(block.attn, positions, sharper))
            for block, positions in zip(model.blocks, scaled)], grids


def _reader(attention: nn.Module, positions: Tensor, sharper: float) -> HeadMaps:
    def read(head: int) -> Tensor:
        return attention_weights(sharper**2 * query[:, head], key[:, head])
    query, key, _ = attention.queries_keys_values(positions[None])            # (1, h, N, d) each
    return read


def _simple_reader(model: SimpleViT, block: nn.Module) -> HeadMaps:
    x = torch.zeros_like(model.pos_embed)            # (N, C): patches that add nothing
    if model.input_pos_embed:
        x = block.norm1((1.0 - model.alpha) * model.pos_embed)
    weights = block.attn.mixing_weights(x[None], model.pos_embed)        # (1, h, N, N)
    return lambda head: weights[:, head]


def _bias_reader(attention: nn.Module) -> HeadMaps:
    weights = attention.relative_bias().softmax(-1)                      # (h, w², w²)
    return lambda head: weights[head:head + 1]


# ---------------------------------------------------------------------------------------------
# In words
# ---------------------------------------------------------------------------------------------


def shortfall(mass: PositionMass, model: nn.Module, name: str, options: Mapping[str, Any]) -> str:
    """One line that says which heads fall short, and what would help; "" where none does.

    Short is less than FAINT on the targets in some block, or less than REACHED times a target_mass
    that was asked for, if that is lower. `mimetic` promises no mass, so it cannot fall short.
    """
    if name == "mimetic":
        return ""
    asked = masses_by_block(options.get("target_mass", 1.0), len(mass.uniform))
    for kind, values in (("centre", mass.centre), ("other", mass.others)):
        short = [value for value, wanted in zip(values, asked)
                 if value < min(FAINT, REACHED * wanted)]                # NaN is not
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
    default = inspect.signature(init_function(name, type(model))).parameters["qk_norm"].default
    norm = SHARPER * options.get("qk_norm", default)
    return (f"qk_norm = {norm:g} would give {_decimal(would)}, " if would > 1.1 * mass else "") + (
        "init deep_impulse .9 in every block; a wider model, or fewer and larger patches, would help, too")


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _decimal(value: float) -> str:
    """.99, .05, .0013: two decimals, or two digits of what is smaller than a tenth."""
    text = f"{value:.2f}" if value >= 0.0995 else f"{float(f'{value:.2g}'):.6f}".rstrip("0")
    return text.removeprefix("0")
