"""Parameter groups, AdamW, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

LINEAR_SCALING_BATCH = 512      # base_lr is meant for this global batch (DeiT, arXiv 2012.12877, §6)

# Names that are never decayed, whatever their shape, as DeiT, Swin and timm 1.0 list them. One differs:
# DeiT's own code decays dist_token; timm 1.0 does not, and neither is it here.
UNDECAYED_NAMES = {"pos_embed", "cls_token", "dist_token", "reg_token",
                   "relative_position_bias_table"}


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: not to vectors, biases, position embeddings and extra tokens."""
    leaf = name.rpartition(".")[2]
    return parameter.ndim > 1 and leaf != "bias" and leaf not in UNDECAYED_NAMES


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups for an optimiser: decayed parameters, then exempt ones.

    model: the bare model. A wrapper such as DistributedDataParallel would change the names.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [{"params": [p for name, p in named if decays(name, p)], "weight_decay": weight_decay},
            {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0}]


def adamw(model: nn.Module, *, weight_decay: float, betas: tuple[float, float],
          eps: float) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), fused; the engine sets its lr every step."""
    return torch.optim.AdamW(parameter_groups(model, weight_decay), lr=0.0, betas=betas, eps=eps,
                             fused=True)


def scaled_lr(base_lr: float, lr_scaling: Literal["linear", "none"], global_batch: int) -> float:
    """The peak learning rate; linear: base_lr · global_batch / 512 (Goyal et al., 1706.02677)."""
    return base_lr * global_batch / LINEAR_SCALING_BATCH if lr_scaling == "linear" else base_lr


def learning_rate(step: int, *, shape: Literal["cosine", "one_cycle"], steps_per_epoch: int,
                  peak: float, epochs: int, warmup_epochs: int, warmup_lr: float, min_lr: float,
                  step_on: Literal["epoch", "update"]) -> float:
    """The learning rate of `step`, counted from 0.

    With t the time in epochs, whole ones if step_on is "epoch", and T = epochs; "cosine":

        t < warmup_epochs:  linear from warmup_lr, reaching `peak` at warmup_epochs
        t < T:              min_lr + ½ (peak − min_lr) (1 + cos(π t / T))
        after that:         min_lr (the cool-down)

    The cosine counts from epoch 0, so the rate dips a little when the warm-up ends, as in timm and
    DeiT. Unlike DeiT's loop, which sets an epoch's rate after it, nothing lags.

    "one_cycle", as ConvMixer trains (arXiv 2201.09792, its code), has a warm-up of its own: straight
    lines from warmup_lr at 0 to `peak` at ⅖ T, peak / 20 at ⅘ T and min_lr at T.
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
    """The value at x of the straight lines through (x, value) corners; x before the last of them."""
    for (start, low), (end, high) in pairwise(corners):
        if x < end:
            return low + (high - low) * (x - start) / (end - start)
    raise ValueError(f"x is {x}, expected less than {corners[-1][0]}")
