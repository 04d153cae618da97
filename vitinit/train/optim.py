"""Parameter groups, the optimisers, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from .muon import MuonWithAdamW

LINEAR_SCALING_BATCH = 512      # base_lr is for this global batch (DeiT, arXiv 2012.12877, §6)

# Parameters with these names are exempt from weight decay, whatever their shape, as in DeiT, Swin
# and timm 1.0. The lists agree but for dist_token, which DeiT's own code decays; like timm 1.0, we
# do not.
UNDECAYED_NAMES = {"pos_embed", "cls_token", "dist_token", "reg_token",
                   "relative_position_bias_table"}
BLOCK = re.compile(r"((.*\.)?blocks\.\d+)\.")


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies to a parameter.

    Exempt are vectors and scalars, biases, position embeddings, and class, distillation and
    register tokens.
    """
    leaf = name.rpartition(".")[2]
    return parameter.ndim > 1 and leaf != "bias" and leaf not in UNDECAYED_NAMES


def layer_numbers(names: Iterable[str]) -> list[int]:
    """The layer number of each parameter, given all names in the model's order.

    Layer 0 is everything before the first block, layer i the i-th block together with what is
    between it and the previous block (Swin's patch merging), and layer L + 1 everything after the
    last of L blocks.
    """
    seen: dict[str, int] = {}
    numbers = []
    for name in names:
        block = BLOCK.match(name)
        numbers.append(seen.setdefault(block[1], len(seen) + 1) if block else
                       len(seen) + 1 if seen else 0)
    return numbers


def hidden_matrices(model: nn.Module) -> set[str]:
    """The names of the weights that Muon trains: those of matrix products within the blocks.

    These are the weights of linear layers and of 1×1 convolutions from the first block to the last,
    Swin's patch merging included, and neither the patch embedding nor the classifier.
    """
    names = [name for name, _ in model.named_parameters()]
    layers = dict(zip(names, layer_numbers(names)))
    last = max((layers[name] for name in names if BLOCK.match(name)), default=0)
    return {f"{name}.weight" for name, module in model.named_modules()
            if (isinstance(module, nn.Linear) or isinstance(module, nn.Conv2d)
                and module.kernel_size == (1, 1) and module.groups == 1)
            and 1 <= layers[f"{name}.weight"] <= last}


def parameter_groups(model: nn.Module, weight_decay: float, *, layer_decay: float = 1.0,
                     muon: bool = False) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser: the decayed parameters, then the exempt ones.

    model: the bare model, since a wrapper such as DistributedDataParallel changes the names that
        `decays` compares. Parameters that do not require gradients are in no group.
    layer_decay: splits the groups by layer. A parameter of layer i of `layer_numbers` has the factor
        layer_decay ** (L + 1 − i) on its learning rate, for L blocks (ELECTRA, arXiv 2003.10555;
        for ViT: BEiT, arXiv 2106.08254). Each group states it as "layer_factor".
    muon: whether the weights of `hidden_matrices` are in groups of their own, which come first;
        each group states whether it is one of them as "muon".
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = [name for name, _ in model.named_parameters()]
    layers = dict(zip(names, layer_numbers(names)))
    last, matrices = max(layers.values(), default=0), hidden_matrices(model) if muon else set()
    groups = []
    for by_muon, decayed in ((True, True), (False, True), (False, False)):
        by_factor: dict[float, list[nn.Parameter]] = {}
        for name, parameter in named.items():
            if (name in matrices) == by_muon and decays(name, parameter) == decayed:
                by_factor.setdefault(layer_decay ** (last - layers[name]), []).append(parameter)
        if not by_factor and not by_muon:
            by_factor = {1.0: []}                    # AdamW always has a group of either kind
        groups += [{"params": parameters, "weight_decay": weight_decay if decayed else 0.0,
                    "layer_factor": factor, "muon": by_muon}
                   for factor, parameters in by_factor.items()]
    return groups


def adamw(model: nn.Module, *, weight_decay: float, betas: tuple[float, float], eps: float,
          layer_decay: float = 1.0) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov and Hutter, arXiv 1711.05101) for all parameters of the model.

    Its learning rate is 0 until the engine sets it, which happens at every step.
    """
    return torch.optim.AdamW(parameter_groups(model, weight_decay, layer_decay=layer_decay), lr=0.0,
                             betas=betas, eps=eps, fused=True)


def muon(model: nn.Module, *, factor: float, momentum: float, weight_decay: float,
         betas: tuple[float, float], eps: float, layer_decay: float = 1.0) -> MuonWithAdamW:
    """Muon for the weights of `hidden_matrices`, and AdamW as `adamw` makes it for all others.

    factor: of Muon's updates, which at 1 are about as large as AdamW's. momentum: Muon's.
    """
    groups = parameter_groups(model, weight_decay, layer_decay=layer_decay, muon=True)
    return MuonWithAdamW(groups, factor=factor, momentum=momentum, lr=0.0, betas=betas, eps=eps)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group, times the group's factor if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("layer_factor", 1.0)


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
