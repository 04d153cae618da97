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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..filters import head_offsets, ordered_offsets
from ..mixing import shares_of_patches, target_mass
from ..models import SimpleViT, SwinTransformer, VisionTransformer
from ..models.attention import Attention, attention_weights
from ..models.simple_vit import SimpleAttention
from . import init_function
from .code_plan import code_size, slowest_waves
from .deep_impulse import masses_by_block
from .impulse import normalised_positions
from .stream_scales import stream_scales

AIMED = ("impulse", "impulse_gd", "deep_impulse", "mimetic")
FAINT = 0.3             # a mass below this causes a warning
REACHED = 0.9           # share of the wanted target_mass that counts as having reached it
SHARPER = 2.0           # multiple of qk_norm for which the warning states the mass
AT_ONCE = 8             # images per forward pass, whose attention matrices are all computed


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
        shown, kinds = [], []
        for kind, values in (("centre", self.centre), ("other", self.others)):
            known = [value for value in values if value == value]        # not NaN
            if known:
                kinds.append(kind)
                shown.append(_decimal(sum(known) / len(known)) if max(known) - min(known) <= 0.05 else
                             " ".join(_decimal(value) if value == value else "–" for value in values))
        uniform = _decimal(sum(self.uniform) / len(self.uniform))
        return f"{' / '.join(shown)} (uniform {uniform}) on the targets of {' / '.join(kinds)} heads"


@torch.no_grad()
def mass_on_images(model: nn.Module, name: str, options: Mapping[str, Any],
                   images: Tensor) -> Mass | None:
    """The masses in a forward pass of `images`, (n, 3, H, W), normalised; else as `position_mass`.

    The model runs in evaluation mode, and is left as it was.
    """
    return _mass(model, name, options, lambda chosen: iter(maps_on_images(model, images)))


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
    return _mass(model, name, options,
                 lambda chosen: maps_on_positions(model, name, chosen, sharper))


def _mass(model: nn.Module, name: str, options: Mapping[str, Any],
          maps: Callable[[dict[str, Any]], Iterator[Tensor]]) -> Mass | None:
    """The masses of the attention, (h, N, N) per block, that `maps`, a function of all options, yields."""
    families = (VisionTransformer, SimpleViT) + (SwinTransformer,) * (name != "mimetic")
    if name not in AIMED or not isinstance(model, families):
        return None
    chosen = all_options(model, name, options)
    if chosen.get("qk_init") == "base" or chosen.get("target") == "gaussian":
        return None
    cells = [(0, 0)] if name == "mimetic" else ordered_offsets(chosen["kernel_size"])
    assignment = "ordered" if name == "mimetic" else chosen["offsets"]
    masses, before = Mass([], [], []), 0
    for layer, weights in zip(attention_layers(model), maps(chosen)):
        grid, heads = getattr(layer, "window", model.grid), layer.num_heads
        if assignment == "random":
            by_cell = torch.stack([target_mass(weights, [cell] * heads, grid) for cell in cells])
            found, best = by_cell.max(0)                                 # (h,) each
            targets = [cells[index] for index in best]
        else:
            targets = head_offsets(heads, cells, assignment, torch.Generator(), first=before)
            found = target_mass(weights, targets, grid)
        before += heads
        centred = torch.tensor([target == (0, 0) for target in targets])
        masses.centre.append(found[centred].mean().item())               # NaN where there is none
        masses.others.append(found[~centred].mean().item())
        masses.uniform.append(1.0 / math.prod(grid))
    return masses


def all_options(model: nn.Module, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of the init `name` for this model: those that were given, else the defaults."""
    parameters = inspect.signature(init_function(name, type(model))).parameters
    return {key: parameter.default for key, parameter in parameters.items()} | dict(options)


def attention_layers(model: nn.Module) -> list[Attention | SimpleAttention]:
    """The attention layers of all blocks, from the first to the last."""
    return [layer for layer in model.modules() if isinstance(layer, (Attention, SimpleAttention))]


def maps_on_positions(model: nn.Module, name: str, options: Mapping[str, Any], sharper: float
                      ) -> Iterator[Tensor]:
    """Yield the attention of each block on the position embedding alone, (h, N, N)."""
    if isinstance(model, SwinTransformer):
        yield from (layer.relative_bias().softmax(-1) for layer in attention_layers(model))
    elif isinstance(model, SimpleViT):
        for block in model.blocks:
            x = torch.zeros_like(model.pos_embed)    # (N, C): patches without content
            if model.input_pos_embed:
                x = block.norm1((1.0 - model.alpha) * model.pos_embed)
            yield block.attn.mixing_weights(x[None], model.pos_embed)[0]
    else:
        scaled = [normalised_positions(model)] * len(model.blocks)
        if name == "deep_impulse":
            count = code_size(slowest_waves(model, options["code_channels"], options["period"],
                                            options["bias_channels"]), options["bias_channels"])
            positions = model.pos_embed[0, model.num_prefix_tokens:].clone()
            positions[:, count:] = 0.0                                   # (N, D)
            reserved = (count + 2 * bool(options["constant_share"])) * options["reserve"]
            scaled = [positions / math.sqrt(scale)
                      for scale in stream_scales(model, reserved, options["code_rms"])]
        for block, positions in zip(model.blocks, scaled):
            query, key, _ = block.attn.queries_keys_values(positions[None])      # (1, h, N, d) each
            yield attention_weights(sharper**2 * query, key)[0]


def maps_on_images(model: nn.Module, images: Tensor) -> list[Tensor]:
    """The attention of each block among the patches, averaged over `images`: (h, N, N) each."""
    layers = attention_layers(model)
    means: list[Tensor] = [images.new_zeros(())] * len(layers)

    def record(number: int) -> Callable:
        def hook(layer: nn.Module, arguments: tuple) -> None:
            weights = layer.mixing_weights(*arguments)                   # of images, or their windows
            means[number] = means[number] + len(batch) / len(images) * shares_of_patches(
                weights, getattr(layer, "window", model.grid)).mean(0)
        return hook
    hooks = [layer.register_forward_pre_hook(record(number)) for number, layer in enumerate(layers)]
    training = model.training
    model.eval()
    for batch in images.split(AT_ONCE):
        model(batch)
    model.train(training)
    for hook in hooks:
        hook.remove()
    return means


def shortfall(mass: Mass, model: nn.Module, name: str, options: Mapping[str, Any]) -> str:
    """One line that names the heads that fall short and says what would help; "" if none does.

    Heads fall short if their mass in some block is less than FAINT, or than REACHED times the
    target_mass that was asked for, whichever is lower. `mimetic` asks for no mass, so it cannot
    fall short.
    """
    options = all_options(model, name, options)
    asked = masses_by_block(options.get("target_mass", 1.0), len(mass.uniform), mass.uniform[0])
    for kind in ("centre", "others") if name != "mimetic" else ():
        short = [value for value, wanted in zip(getattr(mass, kind), asked)
                 if value < min(FAINT, REACHED * wanted)]                # false for NaN
        if not short:
            continue
        advice = "a larger head_dim, or fewer patches, would help"
        if name == "impulse_gd":
            advice = "renorm_every = 0, more steps or a larger step_size sharpen it"
        elif name == "impulse" and isinstance(model, VisionTransformer):
            sharp = position_mass(model, name, options, sharper=SHARPER)
            would = min(value for value in getattr(sharp, kind) if value == value)
            advice = "init deep_impulse with target_mass = 0.9 gives .9 in every block"
            if would > 1.1 * min(short):
                advice = (f"qk_norm = {SHARPER * options['qk_norm']:g} would give {_decimal(would)}, "
                          f"{advice}")
        return (f"{kind.replace('others', 'other')} heads have only {_decimal(min(short))} of their "
                f"attention on their target, on the position embedding alone; {advice}")
    return ""


def _decimal(value: float) -> str:
    """For example .99, .05, .0013: two decimals, or, below 0.1, two digits."""
    text = f"{value:.2f}" if value >= 0.0995 else f"{float(f'{value:.2g}'):.6f}".rstrip("0")
    return text.removeprefix("0")
