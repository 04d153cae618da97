"""Parameter groups, AdamW, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

from torch import nn

from .parts import PartAdamW, PartRates, query_key_rows, rates_by_name

LINEAR_SCALING_BATCH = 512      # base_lr is for this global batch (DeiT, arXiv 2012.12877, §6)

# Parameters with these names are exempt from weight decay, whatever their shape, as in DeiT, Swin
# and timm 1.0. The lists agree but for dist_token, which DeiT's own code decays; like timm 1.0, we
# do not.
UNDECAYED_NAMES = {"pos_embed", "cls_token", "dist_token", "reg_token",
                   "relative_position_bias_table"}


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies to a parameter.

    Exempt are vectors and scalars, biases, position embeddings, and class, distillation and
    register tokens.
    """
    leaf = name.rpartition(".")[2]
    return parameter.ndim > 1 and leaf != "bias" and leaf not in UNDECAYED_NAMES


def parameter_groups(model: nn.Module, weight_decay: float,
                     rates: PartRates = PartRates()) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser: first the decayed parameters, then the exempt ones.

    model: the bare model, since a wrapper such as DistributedDataParallel changes the names that
        `decays` compares. Parameters that do not require gradients are in no group.
    rates: splits both by learning rate. Each group states its factor on the learning rate and for
        how many steps at the start it is not trained.
    """
    rate_of, groups = rates_by_name(model, rates), []
    for decayed in (True, False):
        by_rate: dict[tuple[float, int], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and decays(name, parameter) == decayed:
                by_rate.setdefault(rate_of[name], []).append(parameter)
        groups += [{"params": parameters, "weight_decay": weight_decay if decayed else 0.0,
                    "factor": factor, "hold_steps": hold_steps}
                   for (factor, hold_steps), parameters in (by_rate or {(1.0, 0): []}).items()]
    return groups


def adamw(model: nn.Module, *, weight_decay: float, betas: tuple[float, float], eps: float,
          rates: PartRates = PartRates()) -> PartAdamW:
    """Fused AdamW (Loshchilov and Hutter, arXiv 1711.05101) over the model's parameter groups.

    Its learning rate is 0 until the engine sets it, which happens at every step.
    """
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    rows = [(parameters[number], rows) for number, rows in query_key_rows(model).items()
            if rows != slice(None) and parameters[number].requires_grad]
    return PartAdamW(parameter_groups(model, weight_decay, rates), rows, rates, lr=0.0, betas=betas,
                     eps=eps, fused=True)


def scaled_lr(base_lr: float, lr_scaling: Literal["linear", "none"], global_batch: int) -> float:
    """The peak learning rate.

    "linear": base_lr · global_batch / 512, as in DeiT (the rule is that of Goyal et al., arXiv
    1706.02677). "none": base_lr.
    """
    return base_lr * global_batch / LINEAR_SCALING_BATCH if lr_scaling == "linear" else base_lr


def learning_rate(step: int, *, shape: Literal["cosine", "one_cycle"], steps_per_epoch: int,
                  peak: float, epochs: int, warmup_epochs: int, warmup_lr: float, min_lr: float,
                  step_on: Literal["epoch", "update"]) -> float:
    """The learning rate of step number `step`, counted from 0.

    Let t = step / steps_per_epoch be the time in epochs, rounded down to whole epochs if step_on is
    "epoch", and T = epochs. With shape "cosine" the learning rate is

        t < warmup_epochs:      linear in t, from warmup_lr at t = 0 to peak at t = warmup_epochs
        warmup_epochs ≤ t < T:  min_lr + ½ (peak − min_lr) (1 + cos(π t / T))
        t ≥ T:                  min_lr (the cool-down)

    As in timm and DeiT, the cosine starts at t = 0, not at the end of the warm-up, so that the
    learning rate drops slightly when the warm-up ends. DeiT's loop sets the learning rate of epoch
    t after epoch t, so that its schedule lags by one epoch; this one does not.

    With shape "one_cycle", the schedule of ConvMixer's code (arXiv 2201.09792), the learning rate
    is piecewise linear through warmup_lr at t = 0, peak at 0.4 T, peak / 20 at 0.8 T, and min_lr at
    T; warmup_epochs plays no part.
    """
    time = step // steps_per_epoch if step_on == "epoch" else step / steps_per_epoch
    if time >= epochs:
        return min_lr
    if shape == "one_cycle":
        return _on_lines(time / epochs,
                         [(0.0, warmup_lr), (0.4, peak), (0.8, peak / 20), (1.0, min_lr)])
    if time < warmup_epochs:
        return warmup_lr + (peak - warmup_lr) * time / warmup_epochs
    return min_lr + 0.5 * (peak - min_lr) * (1.0 + math.cos(math.pi * time / epochs))


def _on_lines(x: float, corners: list[tuple[float, float]]) -> float:
    """Interpolate linearly between the corners (x, value); ValueError for x beyond the last one."""
    for (start, low), (end, high) in pairwise(corners):
        if x < end:
            return low + (high - low) * (x - start) / (end - start)
    raise ValueError(f"x is {x}, expected less than {corners[-1][0]}")
