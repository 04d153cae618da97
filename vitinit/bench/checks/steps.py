"""Checks of training steps and evaluation on a device, against the CPU and plain formulas."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ...train.ema import Ema
from ...train.engine import evaluate, set_precision
from ...train.interruption import StopRequest
from ...train.optim import adamw
from ..item import Conditions, Row
from ..training import GivenStep, alone, state_of, train_on
from .families import CLASSES, FAMILIES, batch_of, drop_path_of, small_model

CPU = torch.device("cpu")
# Tolerances, as relative errors.
FLOAT32_STEP = 1e-4             # of gradients, which are sums of 10² to 10⁴ float32 products
COMPILED = 1e-4                 # of gradients, since a compiler sums in another order
BF16_GRADIENT = 0.1             # bf16 has 8 significant bits and rounds after every layer
BF16_LOSS = 0.02


def gradients(model: nn.Module, device: torch.device, *, dtype: torch.dtype = torch.float32,
              amp: str = "off", compiled: bool = False, channels_last: bool = False,
              micro_batches: int = 1) -> tuple[dict[str, Tensor], float]:
    """The gradients of one step of the engine, by name in float64 on the CPU, and the loss.

    A step of plain SGD with learning rate 1 subtracts the gradient from the weights, so the
    gradient is the difference of the weights before and after it.
    dtype: of weights and images. amp: as `engine.amp` of a recipe. compiled: use torch.compile.
    """
    model = copy.deepcopy(model).to(device, dtype)
    before = in_float64(model)
    images, targets = (part.to(device, dtype) for part in batch_of())
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
        model.to(memory_format=torch.channels_last)
    parts = list(zip(images.chunk(micro_batches), targets.chunk(micro_batches)))
    state = state_of(model, torch.optim.SGD(model.parameters(), lr=1.0))
    train_on(state, [GivenStep(0, parts)], forward=torch.compile(model) if compiled else model,
             lr=1.0, drop_path=drop_path_of(model), amp=amp)
    after = in_float64(model)
    return {name: before[name] - after[name] for name in before}, state.progress.loss_sum


def in_float64(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters in float64 on the CPU, by name."""
    return {name: p.detach().cpu().to(torch.float64, copy=True)
            for name, p in model.named_parameters()}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest relative distance between two gradients of the same tensor, over all tensors.

    It is relative to the norm of the tensor's gradient in `other`, plus a thousandth of the norm of
    the whole gradient. That floor is for gradients that are zero but for rounding, such as those of
    keys' biases.
    """
    floor = 1e-3 * torch.stack([g.norm() for g in other.values()]).norm()
    return max(float((one[name] - g).norm() / (g.norm() + floor)) for name, g in other.items())


# ---------------------------------------------------------------------------------------------
# In float32
# ---------------------------------------------------------------------------------------------


def train_step(conditions: Conditions) -> list[Row]:
    """A float32 step of each family without TF32: gradients and loss against the CPU's float64.

    It is made on the device, and on the CPU to see what float32 costs there. Gradients have to be
    within 1e-4, relative to each tensor's norm. That is a margin for rounding, which includes the
    rounding of the weights from whose difference a gradient is computed (6e-8 relative).
    """
    set_precision(tf32=False)
    rows = []
    for name in FAMILIES:
        model = small_model(name)
        exact, exact_loss = gradients(model, CPU, dtype=torch.float64)
        for device in dict.fromkeys((conditions.torch_device, CPU)):
            found, loss = gradients(model, device)
            row = {"family": name, "on": device.type, "gradients apart": apart(found, exact),
                   "loss apart": abs(loss - exact_loss) / exact_loss}
            assert row["gradients apart"] < FLOAT32_STEP and row["loss apart"] < 1e-5, row
            rows.append(row)
    return rows


def micro_batches(conditions: Conditions) -> list[Row]:
    """A step in three micro-batches equals the same step in one, within rounding.

    Models with BatchNorm are left out, since they normalise each micro-batch by its own statistics.
    """
    set_precision(tf32=False)
    rows = []
    for name in ("vit_tiny", "swin_tiny", "mixer_s16", "simple_vit"):
        model = small_model(name)
        whole, _ = gradients(model, conditions.torch_device)
        parts, _ = gradients(model, conditions.torch_device, micro_batches=3)
        rows.append({"family": name, "gradients apart": apart(parts, whole)})
        assert rows[-1]["gradients apart"] < FLOAT32_STEP, rows[-1]
    return rows


def moving_average(conditions: Conditions) -> list[Row]:
    """The moving average after five updates of known weights, against its formula in float64.

    Weights and integer buffers are checked, with and without warm-up.
    """
    largest = 0.0
    for warmup in (False, True):
        model = small_model("convmixer_256_8").to(conditions.torch_device)   # has integer buffers
        ema = Ema(model, decay=0.9, warmup=warmup)
        expected = {name: value.double().cpu() for name, value in model.state_dict().items()}
        for update in range(5):
            with torch.no_grad():
                for value in model.state_dict().values():
                    value.mul_(2).add_(1)            # in place, as optimisers do
            decay = min(0.9, 1 - (1 + update) ** (-2 / 3)) if warmup else 0.9
            ema.update(model)
            expected = {name: decay * expected[name] + (1 - decay) * value.double().cpu()
                        if value.is_floating_point() else value.double().cpu()
                        for name, value in model.state_dict().items()}
        for name, value in ema.model.state_dict().items():
            error = (value.double().cpu() - expected[name]).abs().max() / expected[name].abs().max()
            largest = max(largest, float(error))
    assert largest < 1e-6, f"relative error {largest:.2g}"
    return [{"relative error": largest}]


def channels_last(conditions: Conditions) -> list[Row]:
    """Images in channels-last layout give the same step, within rounding.

    The layout selects other kernels, which sum in another order.
    """
    set_precision(tf32=False)
    rows = []
    for name in FAMILIES:
        model = small_model(name)
        plain, _ = gradients(model, conditions.torch_device)
        last, _ = gradients(model, conditions.torch_device, channels_last=True)
        rows.append({"family": name, "gradients apart": apart(last, plain)})
        assert rows[-1]["gradients apart"] < FLOAT32_STEP, rows[-1]
    return rows


def compiled(conditions: Conditions) -> list[Row]:
    """A step of the compiled model equals the eager one in float32, within rounding.

    All families are checked on a GPU, the ViT only on a CPU, where compiling takes long.
    """
    set_precision(tf32=False)
    rows = []
    for name in FAMILIES if conditions.on_gpu else ["vit_tiny"]:
        torch.compiler.reset()
        model = small_model(name)
        eager, _ = gradients(model, conditions.torch_device)
        found, _ = gradients(model, conditions.torch_device, compiled=True)
        rows.append({"family": name, "gradients apart": apart(found, eager)})
        assert rows[-1]["gradients apart"] < COMPILED, rows[-1]
    return rows


# ---------------------------------------------------------------------------------------------
# In 16 bits
# ---------------------------------------------------------------------------------------------


def bf16(conditions: Conditions) -> list[Row]:
    """A step in bf16 is close to the float32 one but not equal: gradients to 0.1, the loss to 0.02.

    The bounds are relative. Equal gradients would mean that autocast was not applied.
    """
    set_precision(tf32=False)
    rows = []
    for name in FAMILIES:
        model = small_model(name)
        full, full_loss = gradients(model, conditions.torch_device)
        half, loss = gradients(model, conditions.torch_device, amp="bf16")
        exact, rounded = (torch.cat([g.flatten() for g in found.values()])
                          for found in (full, half))
        row = {"family": name, "gradients apart": float((rounded - exact).norm() / exact.norm()),
               "loss apart": abs(loss - full_loss) / full_loss}
        assert 0 < row["gradients apart"] < BF16_GRADIENT and row["loss apart"] < BF16_LOSS, row
        rows.append(row)
    return rows


def fp16_overflow(conditions: Conditions) -> list[Row]:
    """A step whose fp16 gradients overflow is skipped; the next one, at a lower scale, is made.

    In the skipped step weights, moving average and its update count stay the same to the bit, the
    loss scale halves, and the step counts as done and as skipped.
    """
    device = conditions.torch_device
    model = small_model("vit_tiny").to(device)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**40)
    state = state_of(model, adamw(model, weight_decay=0.05, betas=(0.9, 0.999), eps=1e-8),
                     ema=Ema(model, decay=0.9, warmup=False), scaler=scaler)
    weights = copy.deepcopy(model.state_dict())
    average = copy.deepcopy(state.ema.model.state_dict())
    part = tuple(tensor.to(device) for tensor in batch_of())

    def step(number: int) -> None:
        train_on(state, [GivenStep(number, [part])], drop_path=drop_path_of(model), amp="fp16",
                 clip_norm=1.0)
    step(0)
    assert scaler.get_scale() == 2.0**39, f"the scale is {scaler.get_scale()}, not half of 2^40"
    assert (state.progress.step, state.progress.skipped_steps) == (1, 1), state.progress
    assert _same(model.state_dict(), weights), "a skipped step changed the weights"
    assert _same(state.ema.model.state_dict(), average) and state.ema.updates == 0, \
        "a skipped step changed the moving average"
    scaler.update(2.0**8)
    step(1)
    assert scaler.get_scale() == 2.0**8 and state.progress.skipped_steps == 1
    assert not _same(model.state_dict(), weights) and state.ema.updates == 1
    return [{"skipped": 1, "of steps": 2}]


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())


# ---------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------


def evaluation(conditions: Conditions) -> list[Row]:
    """Evaluation of each family gives the CPU's counts exactly and its loss within rounding.

    The last batch is smaller than the others, and every image has to count once.
    """
    set_precision(tf32=False)
    images, targets = batch_of(seed=2, count=53)
    labels = targets.argmax(1)
    rows = []
    for name in FAMILIES:
        results = []
        for device in (conditions.torch_device, CPU):
            batches = [(images[start:start + 20].to(device), labels[start:start + 20].to(device))
                       for start in range(0, 53, 20)]
            results += evaluate([small_model(name).to(device)], batches, amp="off",
                                num_classes=CLASSES, processes=alone(device), stop=StopRequest())
        found, reference = results
        row = {"family": name, "images": found.images,
               "loss apart": abs(found.loss - reference.loss)}
        assert found.images == 53 and found.class_images == labels.bincount(minlength=CLASSES).tolist()
        assert found.class_hits == reference.class_hits and found.top5 == reference.top5, \
            (found, reference)
        assert row["loss apart"] < 1e-5 * reference.loss, row
        rows.append(row)
    return rows
