"""[optim], [schedule] and [distill] of a recipe; parameter groups, optimiser, learning rate."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from torch import nn

from ..base.messages import OneLineError
from ..base.values import (
    LARGEST,
    TINIEST,
    AtLeastOne,
    BelowOne,
    Bounds,
    Count,
    Fraction,
    NonNegative,
    PositiveNumber,
    Proportion,
)
from .lamb import Lamb

LINEAR_SCALING_BATCH = 512  # base_lr is for this global batch (DeiT, arXiv 2012.12877, §6)

# Parameters with these names are exempt from weight decay, whatever their shape, as in DeiT, Swin
# and timm 1.0 (but for dist_token, which DeiT's own code decays).
UNDECAYED_NAMES = {
    "pos_embed",
    "frequencies",
    "cls_token",
    "dist_token",
    "reg_token",
    "mask_token",
    "relative_position_bias_table",
}
# None: bfloat16 on a GPU that computes it, else float32.
MUON_DTYPES: dict[str, torch.dtype | None] = {
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "bf16_on_gpu": None,
}
BLOCK = re.compile(r"((.*\.)?blocks\.\d+)\.")


@dataclass(frozen=True)
class Optim:
    name: Literal["adamw", "muon", "lamb"]  # muon: AdamW for all but `hidden_matrices`
    train: Literal["all", "head"]  # head: the classifier alone, a linear probe
    global_batch: AtLeastOne  # images per step, over all processes
    max_batch_per_process: AtLeastOne  # most images per micro-batch
    base_lr: PositiveNumber
    lr_scaling: Literal["linear", "none"]  # linear: base_lr · global_batch / 512
    weight_decay: Annotated[float, Bounds(minimum=0.0, below=LARGEST)]
    betas: tuple[BelowOne, BelowOne]
    eps: Annotated[float, Bounds(minimum=TINIEST, below=LARGEST)]
    layer_decay: Fraction  # rate's factor per layer, from the head down
    muon_factor: PositiveNumber  # on Muon's updates; 1: as large as AdamW's
    muon_momentum: BelowOne
    # Of the iteration's products. auto: what is fastest on the device that the run starts on, and
    # fixed from then on. bf16_on_gpu: what it was before there was this key.
    muon_dtype: Literal["auto", "bf16", "float32", "bf16_on_gpu"]
    clip_norm: NonNegative  # global gradient norm; 0: no clipping

    @property
    def peak_lr(self) -> float:
        """The peak learning rate; only here base_lr is scaled by the batch (arXiv 1706.02677)."""
        scaled = self.base_lr * self.global_batch / LINEAR_SCALING_BATCH
        return scaled if self.lr_scaling == "linear" else self.base_lr


@dataclass(frozen=True)
class Schedule:
    shape: Literal["cosine", "one_cycle"]  # one_cycle has its own warm-up, ⅖ of epochs
    epochs: AtLeastOne  # warm-up and decay together
    cooldown_epochs: Count  # further epochs at min_lr
    warmup_epochs: Count
    warmup_lr: NonNegative  # where the warm-up starts; at most the peak
    cosine_after_warmup: bool  # false: the cosine begins at epoch 0
    min_lr: NonNegative  # where the decay ends; at most the peak
    step_on: Literal["epoch", "update"]  # when the learning rate changes
    shift_epochs: Count  # the first epochs, in which rotary attention is held to shifts; 0: none

    @property
    def total_epochs(self) -> int:
        """How many epochs the run trains for, the cool-down included."""
        return self.epochs + self.cooldown_epochs


@dataclass(frozen=True)
class Distill:
    teacher: str  # a run, a checkpoint, a model in recipes/trained, a program (.pt2)
    # of torch.export, or torchvision:NAME; "": none
    weights: str  # torchvision: the file of weights; a run: "model" or "ema"; or ""
    classes: str  # a file of its classes' names, one per line, if it has none; "": there is none
    kind: Literal["hard", "soft"]  # learn its decision, or its probabilities
    alpha: Proportion  # the teacher's share of the loss
    tau: PositiveNumber  # soft: the temperature of both


# The section of a recipe that states none: the constants of DeiT's code, for a --set of a teacher.
NO_TEACHER = dict(teacher="", weights="", classes="", kind="hard", alpha=0.5, tau=1.0)


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: not to vectors, biases, position embeddings and tokens."""
    leaf = name.rpartition(".")[2]
    return parameter.ndim > 1 and leaf != "bias" and leaf not in UNDECAYED_NAMES


def layer_numbers(names: Iterable[str]) -> dict[str, int]:
    """The layer number of each parameter, by name, given all names in the model's order.

    Layer 0 is everything before the first block, layer i the i-th block with what lies between it
    and the block before (Swin's patch merging), and layer L + 1 everything after the last of L.
    """
    number_of: dict[str, int] = {}  # block → layer
    numbers = {}
    for name in names:
        block = BLOCK.match(name)
        if block:
            numbers[name] = number_of.setdefault(block[1], len(number_of) + 1)
        elif number_of:
            numbers[name] = len(number_of) + 1
        else:
            numbers[name] = 0
    return numbers


def hidden_matrices(model: nn.Module) -> set[str]:
    """What Muon trains, by name: weights of linear layers and 1×1 convolutions in the blocks and
    between them (Swin's patch merging, what an autoencoder's decoder begins with).
    """
    layers = layer_numbers(dict(model.named_parameters()))
    last_block = max((layers[name] for name in layers if BLOCK.match(name)), default=0)
    names = set()
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        if is_linear(module) and 1 <= layers[weight] <= last_block:
            names.add(weight)
    return names


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer, or a convolution that is one of each pixel."""
    if isinstance(module, nn.Conv2d):
        return module.kernel_size == (1, 1) and module.groups == 1
    return isinstance(module, nn.Linear)


def parameter_groups(
    model: nn.Module, weight_decay: float, *, layer_decay: float = 1.0, muon: bool = False
) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser: Muon's, then the decayed parameters, then the exempt ones.

    model: the bare model, since a wrapper changes the names that `decays` compares. Parameters that
        do not require gradients are in no group.
    layer_decay: a parameter of layer i of `layer_numbers` has the "layer_factor"
        layer_decay ** (L + 1 − i), for L blocks (ELECTRA, arXiv 2003.10555; BEiT, arXiv 2106.08254)
    muon: whether the weights of `hidden_matrices` are in groups of their own, with "muon": True.
    """
    layers = layer_numbers(dict(model.named_parameters()))
    last = max(layers.values(), default=0)
    matrices = hidden_matrices(model) if muon else set()
    members: dict[tuple[bool, bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            by_adamw, exempt = name not in matrices, not decays(name, parameter)
            factor = layer_decay ** (last - layers[name])
            members.setdefault((by_adamw, exempt, factor), []).append(parameter)
    if not members:
        raise OneLineError(
            "no weight of this model requires a gradient, as vitinit.load and ema leave them; "
            "model.requires_grad_(True) makes them trainable"
        )
    groups = []
    for kind in sorted(members, key=lambda kind: kind[:2]):  # keeps the layers' order
        by_adamw, exempt, factor = kind
        groups.append(
            {
                "params": members[kind],
                "weight_decay": 0.0 if exempt else weight_decay,
                "layer_factor": factor,
                "muon": not by_adamw,
            }
        )
    return groups


def freeze_below_head(model: nn.Module) -> None:
    """Let only classifiers, all that is called head…, require gradients and be trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("head")


def optimizer_for(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """Fused AdamW (arXiv 1711.05101), or with Muon for `hidden_matrices`, or LAMB; the loop sets
    its rate.
    """
    groups = parameter_groups(
        model, optim.weight_decay, layer_decay=optim.layer_decay, muon=optim.name == "muon"
    )
    if optim.name != "muon":
        kind = Lamb if optim.name == "lamb" else torch.optim.AdamW
        return kind(groups, lr=0.0, betas=optim.betas, eps=optim.eps, fused=True)
    from .muon import MuonWithAdamW  # which not every run needs

    return MuonWithAdamW(
        groups,
        factor=optim.muon_factor,
        momentum=optim.muon_momentum,
        dtype=MUON_DTYPES[optim.muon_dtype],
        lr=0.0,
        betas=optim.betas,
        eps=optim.eps,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group, times the group's factor if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("layer_factor", 1.0)


@dataclass(frozen=True)
class LearningRate:
    """The learning rate as a function of the step.

    Let t = step / steps_per_epoch be the time in epochs, rounded down if step_on is "epoch", and
    T = schedule.epochs. With shape "cosine" the learning rate is

        t < warmup_epochs:      linear in t, from warmup_lr at t = 0 to peak at t = warmup_epochs
        warmup_epochs ≤ t < T:  min_lr + ½ (peak − min_lr) (1 + cos(π t / T))
        t ≥ T:                  min_lr (the cool-down)

    As in timm and DeiT (which lags by one epoch), the cosine starts at t = 0, so that the learning
    rate drops slightly at the end w of the warm-up. With cosine_after_warmup it starts there, as in
    Swin's code and big_vision's: π (t − w) / (T − w).

    With shape "one_cycle", the schedule of ConvMixer's code (arXiv 2201.09792), the learning rate
    is piecewise linear: warmup_lr at t = 0, peak at 0.4 T, peak / 20 at 0.8 T, and min_lr at T.
    """

    schedule: Schedule
    peak: float
    steps_per_epoch: int

    def __call__(self, step: int) -> float:
        """The learning rate of a step of the run, counted from 0."""
        schedule, peak = self.schedule, self.peak
        epochs, warmup_lr, min_lr = schedule.epochs, schedule.warmup_lr, schedule.min_lr
        time = step / self.steps_per_epoch
        if schedule.step_on == "epoch":
            time = step // self.steps_per_epoch
        if time >= epochs:
            return min_lr
        if schedule.shape == "one_cycle":
            corners = [(0.0, warmup_lr), (0.4, peak), (0.8, peak / 20), (1.0, min_lr)]
            for (start, low), (end, high) in pairwise(corners):
                if time / epochs < end:
                    return low + (high - low) * (time / epochs - start) / (end - start)
        if time < schedule.warmup_epochs:
            return warmup_lr + (peak - warmup_lr) * time / schedule.warmup_epochs
        start = schedule.warmup_epochs if schedule.cosine_after_warmup else 0
        turned = math.pi * (time - start) / (epochs - start)
        return min_lr + 0.5 * (peak - min_lr) * (1.0 + math.cos(turned))
