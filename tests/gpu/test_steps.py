"""Training steps and evaluation on the device: right, finite, and without a wait."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from optimisers import OPTIMISERS, state_of
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend
from torch.nn.parallel import DistributedDataParallel

from vitinit import build_model
from vitinit.models.attention import attend, attention_weights
from vitinit.models.swin import WindowAttention, shift_mask
from vitinit.programs.bench.step import saved_bytes
from vitinit.programs.shared.steps import alone, clock_of, given_step, train_on
from vitinit.tasks.labels import evaluate
from vitinit.train.interruption import StopRequest
from vitinit.train.loop import AMP_DTYPES, autocast, set_precision
from vitinit.train.state import Ema

CLASSES = 7


@pytest.fixture(autouse=True)
def in_float32():
    set_precision(tf32=False)


@pytest.fixture
def gradients(device, batch_of, drop_path_of):
    """Computes the gradients of one step of the loop, in float64 on the CPU, and its loss. A step
    of plain SGD with learning rate 1 subtracts the gradient, so it is the difference of the
    weights."""

    def compute(
        model: nn.Module,
        on: torch.device = device,
        dtype: torch.dtype = torch.float32,
        *,
        amp: str = "off",
        wrap=lambda model: model,
        channels_last: bool = False,
        micro_batches: int = 1,
    ) -> tuple[dict[str, Tensor], float]:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        model = copy.deepcopy(model).to(on, dtype).to(memory_format=layout)
        before = in_float64(model)
        images, targets = batch_of(device=on, dtype=dtype)
        images = images.contiguous(memory_format=layout)
        parts = list(zip(images.chunk(micro_batches), targets.chunk(micro_batches)))
        state = state_of(model, torch.optim.SGD(model.parameters(), lr=1.0))
        train_on(
            state,
            [given_step(0, parts)],
            forward=wrap(model),
            amp=amp,
            learning_rate=lambda step: 1.0,
            drop_path=drop_path_of(model),
        )
        after = in_float64(model)
        return {name: before[name] - after[name] for name in before}, state.progress.loss_sum

    return compute


def in_float64(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.detach().cpu().to(torch.float64, copy=True) for name, p in model.named_parameters()
    }


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest relative distance between two gradients of the same tensor, over all tensors.
    Relative to the norm of the tensor's gradient in `other` plus a thousandth of that of the whole
    one: a floor for gradients that are zero but for rounding, such as those of keys' biases."""
    floor = 1e-3 * torch.stack([g.norm() for g in other.values()]).norm()
    return max(float((one[name] - g).norm() / (g.norm() + floor)) for name, g in other.items())


# Gradients. Bounds are margins for rounding, that of the weights (6e-8 relative) included. ----


def test_a_float32_step_is_the_cpus_in_float64(small_model, gradients, record_property):
    exact, exact_loss = gradients(small_model, torch.device("cpu"), torch.float64)
    found, loss = gradients(small_model)
    record_property("gradients apart", f"{apart(found, exact):.1e}")
    assert apart(found, exact) < 1e-4 and abs(loss / exact_loss - 1) < 1e-5


def test_layout_and_accumulation_change_rounding_only(small_model, gradients):
    """BatchNorm normalises each micro-batch by itself."""
    parts = 1 if small_model.small_name == "convmixer_256_8" else 3
    found, _ = gradients(small_model, channels_last=True, micro_batches=parts)
    assert apart(found, gradients(small_model)[0]) < 1e-4


def test_bf16_is_close_to_float32_and_not_equal(small_model, gradients, record_property):
    """Equal gradients would mean that autocast was not applied."""
    (full, full_loss), (half, loss) = gradients(small_model), gradients(small_model, amp="bf16")
    exact, rounded = (torch.cat([g.flatten() for g in found.values()]) for found in (full, half))
    distance = float((rounded - exact).norm() / exact.norm())
    record_property("gradients apart", f"{distance:.1e}")
    assert 0 < distance < 0.1 and abs(loss / full_loss - 1) < 0.02


def test_a_compiled_step_is_the_eager_one(small_model, gradients, cuda, record_property):
    """On a CPU, the test of DistributedDataParallel below compiles, too."""
    torch.compiler.reset()
    found, _ = gradients(small_model, wrap=torch.compile)
    distance = apart(found, gradients(small_model)[0])
    record_property("gradients apart", f"{distance:.1e}")
    assert distance < 1e-4


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_a_step_of_another_mode_is_the_eager_one(
    a_vit, gradients, cuda, record_property, mode, micro_batches
):
    """Both replay what was recorded, whose results the next replay overwrites."""
    torch.compiler.reset()
    found, _ = gradients(a_vit, wrap=partial(torch.compile, mode=mode), micro_batches=micro_batches)
    distance = apart(found, gradients(a_vit)[0])
    record_property("gradients apart", f"{distance:.1e}")
    assert distance < 1e-4


def test_nothing_is_compiled_again_after_the_first_epoch(
    a_vit, device, batch_of, drop_path_of, record_property
):
    torch.compiler.reset()
    counters.clear()
    model = a_vit.to(device)
    backend = "inductor" if device.type == "cuda" else "eager"
    forward, measured = (torch.compile(model, backend=backend) for _ in range(2))
    state, graphs = state_of(model, OPTIMISERS["adamw"](model)), []
    images, targets = batch_of(device=device)
    batches = [(images[:size], targets[:size].argmax(1)) for size in (12, 12, 5)]
    for epoch in range(3):
        steps = [given_step(2 * epoch + number, [(images, targets)]) for number in range(2)]
        train_on(state, steps, forward=forward, drop_path=drop_path_of(model))
        evaluate(
            [measured],
            batches,
            num_classes=CLASSES,
            amp="off",
            processes=alone(device),
            stop=StopRequest(),
        )
        graphs.append(counters["stats"]["unique_graphs"])
    record_property("graphs after each epoch", " ".join(map(str, graphs)))
    assert 0 < graphs[0] <= 4 and graphs[0] == graphs[1] == graphs[2]
    assert not counters["graph_break"]


# DistributedDataParallel ----------------------------------------------------------------------
@pytest.fixture
def process_group(device):
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("optimize_ddp", [None, True, False])
def test_wrapped_for_several_processes_a_step_is_the_bare_one(
    a_vit, device, gradients, process_group, record_property, optimize_ddp
):
    """With channels_last, without a warning about strides of gradients that fit no bucket; these
    are exchanged once, after the last of three micro-batches.
    None: not compiled. True, False: of the compiler, whether to cut its graph where a bucket of
    gradients ends, of which a model that is large enough has several."""
    if optimize_ddp and device.type == "cpu":
        pytest.skip("a small model has one bucket, so nothing is cut")
    torch.compiler.reset()
    counters.clear()
    if device.type == "cuda":
        a_vit = build_model("vit_small", num_classes=CLASSES, image_size=16, patch_size=4, depth=4)
    backend, exchanged = "inductor" if device.type == "cuda" else "aot_eager", []

    def exchange(_, bucket):
        exchanged.append(bucket.index())
        future = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        future.set_result(bucket.buffer())
        return future

    def wrap(model: nn.Module) -> nn.Module:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.register_comm_hook(None, exchange)
        return model if optimize_ddp is None else torch.compile(model, backend=backend)

    with (
        warnings.catch_warnings(record=True) as heard,
        torch._dynamo.config.patch(optimize_ddp=optimize_ddp is True),
    ):
        warnings.simplefilter("always")
        found, _ = gradients(a_vit, wrap=wrap, channels_last=True, micro_batches=3)
    assert sorted(exchanged) == list(range(len(exchanged))) and exchanged
    graphs = counters["stats"]["unique_graphs"]
    record_property("graphs", graphs)
    assert apart(found, gradients(a_vit)[0]) < 1e-4
    assert not [warning for warning in heard if "strides" in str(warning.message)]


# Attention in windows -------------------------------------------------------------------------
@pytest.mark.parametrize("amp, bound", [("off", 1e-5), ("bf16", 0.03), ("fp16", 0.005)])
@pytest.mark.parametrize(
    "side, shifted, backend",
    [(4, False, ""), (8, False, ""), (8, True, ""), (8, True, "aot_eager")],
)
def test_attention_in_windows_is_the_plain_product(
    device, record_property, side, shifted, backend, amp, bound
):
    """Forward and backward, finite, for windows of 16 and 64 tokens.
    cuDNN's kernel for an additive mask and 64 tokens has given NaN in the gradients of queries.
    backend: the compiler's, which chooses the kernel when it traces; "": not compiled."""
    if backend and device.type == "cpu":
        pytest.skip("where there is one kernel")
    torch.compiler.reset()
    torch.manual_seed(0)
    attention = WindowAttention(96, num_heads=3, window=(side, side), qkv_bias=True)
    nn.init.normal_(attention.relative_position_bias_table)
    mask = shift_mask((2 * side, 2 * side), (side, side), (side // 2,) * 2) if shifted else None
    x, weights = torch.randn(8, side * side, 96), torch.randn(8, side * side, 96)

    def of(module: WindowAttention, on: torch.device, dtype: torch.dtype, amp: str) -> list[Tensor]:
        """The result, and the gradients of the input and of all parameters."""
        module = copy.deepcopy(module).to(on, dtype)
        given = x.clone().to(on, dtype).requires_grad_()
        forward = torch.compile(module, backend=backend) if backend and amp != "off" else module
        with autocast(on, amp):
            found = forward(given, None if mask is None else mask.to(on, dtype))
        (found.to(dtype) * weights.to(on, dtype)).sum().backward()
        return [
            part.detach().cpu().double()
            for part in (found, given.grad, *(p.grad for p in module.parameters()))
        ]

    found = of(attention, device, torch.float32, amp)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            F,
            "scaled_dot_product_attention",
            lambda q, k, v, attn_mask, scale: attention_weights(q, k, attn_mask) @ v,
        )
        expected = of(attention, torch.device("cpu"), torch.float64, "off")
    distance = max(float((one - two).norm() / two.norm()) for one, two in zip(found, expected))
    record_property("apart", f"{distance:.1e}")
    assert all(part.isfinite().all() for part in found) and distance < bound


@pytest.mark.parametrize("amp, bound", [("bf16", 0.03), ("fp16", 0.005)])
def test_attention_is_the_plain_product(device, record_property, amp, bound):
    """At the size of ViT-S, without a bias, by whichever kernel PyTorch prefers."""
    given = torch.randn(3, 5, 6, 197, 64, generator=torch.Generator().manual_seed(0))
    results = []
    for dtype, on, way in (
        (AMP_DTYPES[amp], device, attend),
        (torch.float64, torch.device("cpu"), lambda q, k, v: attention_weights(q, k) @ v),
    ):
        parts = given.to(on, AMP_DTYPES[amp]).to(dtype).requires_grad_()
        output = way(*parts)
        (output * given[0].to(on, dtype)).sum().backward()
        results.append([part.detach().cpu().double() for part in (output, *parts.grad)])
    record_property(
        "kernel", SDPBackend(torch._fused_sdp_choice(*given.to(device, AMP_DTYPES[amp]))).name
    )
    distance = max(float((ours - exact).norm() / exact.norm()) for ours, exact in zip(*results))
    record_property("apart", f"{distance:.1e}")
    assert all(part.isfinite().all() for part in results[0]) and distance < bound


# fp16, the moving average, evaluation ---------------------------------------------------------
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_step_whose_fp16_overflows_is_skipped(a_vit, device, batch_of, drop_path_of, optimiser):
    """Weights, moments and moving average stay the same to the bit, the scale halves. The next
    step, at a lower scale, is made."""
    model, part = a_vit.to(device), batch_of(device=device)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**40)
    state = state_of(
        model, OPTIMISERS[optimiser](model), scaler=scaler, ema=Ema(model, decay=0.9, warmup=False)
    )
    before = copy.deepcopy([model.state_dict(), state.ema.model.state_dict()])

    def step(number: int) -> list[bool]:
        """Make a step; whether the weights, and the average, are still those at the start."""
        train_on(
            state,
            [given_step(number, [part])],
            drop_path=drop_path_of(model),
            amp="fp16",
            clip_norm=1.0,
        )
        return [
            all(torch.equal(now[name], then[name]) for name in then)
            for now, then in zip([model.state_dict(), state.ema.model.state_dict()], before)
        ]

    assert step(0) == [True, True] and scaler.get_scale() == 2.0**39
    assert (state.progress.step, state.progress.skipped_steps) == (1, 1)
    scaler.update(2.0**8)
    assert step(1) == [False, False] and scaler.get_scale() == 2.0**8
    assert (state.progress.step, state.progress.skipped_steps) == (2, 1)
    assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.parametrize("small_model", ["vit_tiny", "convmixer_256_8"], indirect=True)
@pytest.mark.parametrize("warmup", [False, True])
def test_the_moving_average_is_its_formula(small_model, device, warmup):
    model = small_model.to(device)  # the ConvMixer has integer buffers
    ema = Ema(model, decay=0.9, warmup=warmup)
    expected = {name: value.double().cpu() for name, value in model.state_dict().items()}
    for update in range(5):
        with torch.no_grad():
            for value in model.state_dict().values():
                value.mul_(2).add_(1)  # in place, as optimisers do
        decay = min(0.9, 1 - (1 + update) ** (-2 / 3)) if warmup else 0.9
        ema.update(torch.tensor(True, device=device))  # a skipped step is none
        ema.update(torch.tensor(False, device=device) if update % 2 else None)
        expected = {
            name: decay * expected[name] + (1 - decay) * value.double().cpu()
            if value.is_floating_point()
            else value.double().cpu()
            for name, value in model.state_dict().items()
        }
    for name, value in ema.model.state_dict().items():
        distance = (value.double().cpu() - expected[name]).abs().max()
        assert distance < 1e-6 * expected[name].abs().max()


def test_evaluation_counts_as_the_cpu_does(small_model, cuda, batch_of):
    images, targets = batch_of(53)
    labels, results = targets.argmax(1), []
    for on in (cuda, torch.device("cpu")):
        batches = [
            (images[start : start + 20].to(on), labels[start : start + 20].to(on))
            for start in range(0, 53, 20)
        ]
        results += evaluate(
            [copy.deepcopy(small_model).to(on)],
            batches,
            amp="off",
            num_classes=CLASSES,
            processes=alone(on),
            stop=StopRequest(),
        )
    found, expected = results
    assert found.images == 53 and found.class_images == labels.bincount(minlength=CLASSES).tolist()
    assert (found.class_hits, found.top5) == (expected.class_hits, expected.top5)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)


# Time, waiting, memory ------------------------------------------------------------------------
def test_the_engines_seconds_are_those_of_a_clock_outside(cuda, record_property):
    """Which is read when the device is idle; so the images/s that a run reports are no illusion."""
    model = build_model("vit_tiny", num_classes=CLASSES, image_size=64, depth=3).to(cuda)
    part = torch.randn(8, 3, 64, 64, device=cuda), torch.eye(CLASSES, device=cuda)[[1] * 8]
    state, clock = state_of(model, OPTIMISERS["adamw"](model)), clock_of(cuda)
    train_on(state, [given_step(0, [part])])
    before, began = state.progress.seconds, clock()
    train_on(state, [given_step(number, [part]) for number in range(1, 201)])
    outside = clock() - began
    record_property("engine ÷ clock", f"{(state.progress.seconds - before) / outside:.3f}")
    assert 0.95 * outside - 0.02 < state.progress.seconds - before <= outside


def test_the_host_waits_less_than_once_a_step(cuda, a_vit, batch_of, drop_path_of, record_property):
    """By torch's debug mode: the loop reads losses every ten steps, checks weights at the end."""
    model, part = a_vit.to(cuda), batch_of(device=cuda)
    state = state_of(model, OPTIMISERS["adamw"](model), ema=Ema(model, decay=0.9, warmup=False))

    def steps(numbers: range) -> None:
        train_on(
            state,
            [given_step(number, [part]) for number in numbers],
            amp="bf16",
            drop_path=drop_path_of(model),
            clip_norm=1.0,
        )

    steps(range(1))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            steps(range(1, 21))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = [
        f"{wait.filename.rpartition('/')[2]}:{wait.lineno}"
        for wait in waits
        if "synchroniz" in str(wait.message)
    ]
    record_property("waits in 20 steps", f"{len(places)}, at {' '.join(sorted(set(places)))}")
    assert len(places) < 20


@pytest.mark.parametrize("name", ["vit_tiny", "swin_tiny", "mixer_b16", "convmixer_768_32"])
def test_memory_for_the_backward_pass_is_what_bench_memory_counts(cuda, record_property, name):
    """Within .8 to 1.6: a GPU also holds workspace of kernels and rounds each tensor's size up."""
    model = build_model(name, num_classes=1000, image_size=224).to(cuda)
    images = torch.zeros(16, 3, 224, 224, device=cuda)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with autocast(cuda, "bf16"):
        loss = model(images).float().square().mean()
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    counted = saved_bytes(model, images, "bf16")
    record_property("MiB held ÷ counted", f"{held / 2**20:.0f} ÷ {counted / 2**20:.0f}")
    assert 0.8 < held / counted < 1.6
