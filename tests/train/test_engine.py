"""One step, however it is divided into micro-batches; skipping, stopping, and exact evaluation."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vitinit
from vitinit.data.mix import smooth_one_hot
from vitinit.data.pipeline import Prepared, TrainingStep
from vitinit.data.sampler import BatchPlan
from vitinit.messages import OneLineError
from vitinit.keys import Stream, keyed_generator
from vitinit.models.layers import draw_drop_path
from vitinit.train import engine
from vitinit.train.distributed import Processes
from vitinit.train.ema import Ema
from vitinit.train.engine import evaluate, train_epoch
from vitinit.train.interruption import Interrupted, StopRequest
from vitinit.train.metrics import Diverged, Progress
from vitinit.train.optim import adamw
from vitinit.train.state import TrainState

CPU = torch.device("cpu")
ALONE = Processes(rank=0, local_rank=0, world_size=1, device=CPU)
GLOBAL_BATCH, STEPS, CLASSES = 12, 5, 7
# The gradient of a key's bias is zero, since softmax ignores what is added to a whole row; in
# practice it is a rounding error. AdamW's usual eps of 1e-8 would scale that error up to a full
# step.
EPS = 1e-4


def small_model(drop_path: float = 0.0) -> torch.nn.Module:
    model = vitinit.build_model("vit_tiny", num_classes=CLASSES, image_size=8, patch_size=4,
                                embed_dim=12, depth=2, num_heads=3, drop_path=drop_path)
    vitinit.init_weights(model, "torch", generator=torch.Generator().manual_seed(0))
    return model


def batches(micro_batch_size: int, bad_step: int | None = None):
    """STEPS global batches, each as a list of micro-batches."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        images = torch.randn(GLOBAL_BATCH, 3, 8, 8, generator=generator)
        if step == bad_step:
            images[3] = float("nan")
        labels = torch.randint(CLASSES, (GLOBAL_BATCH,), generator=generator)
        plan = plan_of(micro_batch_size)
        carried = [plan.positions(0, micro_step) for micro_step in range(plan.accumulation)]
        yield [(images[places], labels[places]) for places in carried]


def plan_of(micro_batch_size: int) -> BatchPlan:
    return BatchPlan(GLOBAL_BATCH, world_size=1, micro_batch_size=micro_batch_size, group=1)


def soft_batches(micro_batch_size: int):
    """The same batches with a random distribution over the classes per image instead of a label."""
    generator = torch.Generator().manual_seed(2)
    for parts in batches(micro_batch_size):
        yield [(images, torch.randn(len(images), CLASSES, generator=generator)
                .softmax(dim=1)) for images, _ in parts]


def soft(batch, step: int, groups: np.ndarray, *, smoothing: float = 0.1):
    """Prepare a batch with labels: turn them into smoothed targets."""
    images, labels = batch
    return images, smooth_one_hot(labels, CLASSES, smoothing)


def as_it_is(batch, *_):
    """Prepare nothing."""
    return batch


def numbered(steps, micro_batch_size: int = GLOBAL_BATCH, *, prepare=soft, first: int = 0
             ) -> Iterator[TrainingStep]:
    """Turn lists of micro-batches into the steps that the engine takes."""
    plan = plan_of(micro_batch_size)

    def prepared(number: int, parts):
        for micro_step, batch in enumerate(parts):
            yield Prepared(number, *prepare(batch, number, plan.mixing_groups(0, micro_step)),
                           plan.positions(0, micro_step))
    for number, parts in enumerate(steps, first):
        yield TrainingStep(number, plan, prepared(number, parts))


def trained(micro_batch_size: int = GLOBAL_BATCH, *, drop_path: float = 0.0, amp: str = "off",
            clip_norm: float = 0.0, scaler=None, ema_decay: float = 0.0, steps=None,
            lr_at=lambda step: 1e-2, stop=None, count: int = STEPS, progress=None, prepare=soft,
            record=lambda row: None):
    """Train; returns (model, progress, ema, the signal that ended it or 0)."""
    model, progress = small_model(drop_path), progress or Progress()
    ema = Ema(model, decay=ema_decay, warmup=False) if ema_decay else None

    def drop_path_at(step: int):
        if not drop_path:
            return None
        return draw_drop_path(model.drop_path_rates, GLOBAL_BATCH,
                              keyed_generator(0, Stream.DROP_PATH, step))
    state = TrainState(model, adamw(model, weight_decay=0.1, betas=(0.9, 0.99), eps=EPS),
                       scaler or torch.amp.GradScaler("cpu", enabled=False), ema, progress)
    parts = itertools.islice(steps or batches(micro_batch_size), count)
    ended_by = 0
    try:
        for _ in train_epoch(
                state, model, numbered(parts, micro_batch_size, prepare=prepare, first=progress.step),
                lr_at=lr_at, drop_path_at=drop_path_at, amp=amp, clip_norm=clip_norm, every_steps=0,
                processes=ALONE, stop=stop or StopRequest(), record=record):
            pass
    except Interrupted as interrupted:
        ended_by = interrupted.number
    return model, progress, ema, ended_by


def assert_close(first: torch.nn.Module, second: torch.nn.Module, atol: float) -> None:
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_it_is_the_loop_that_one_would_write_by_hand(smoothing):
    """With hard targets, whose loss is the cross-entropy of the labels, and with smoothed ones."""
    model = small_model()
    optimizer = torch.optim.AdamW([
        {"params": [p for n, p in model.named_parameters()
                    if p.ndim > 1 and n not in ("pos_embed", "cls_token")], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters()
                    if p.ndim == 1 or n in ("pos_embed", "cls_token")], "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.99), eps=EPS)
    losses = []
    for [(images, labels)] in batches(GLOBAL_BATCH):
        loss = F.cross_entropy(model(images), labels, label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    ours, progress, _, ended_by = trained(clip_norm=0.5, prepare=partial(soft, smoothing=smoothing))
    assert_close(ours, model, atol=1e-6)
    assert progress.loss_sum == pytest.approx(sum(losses), rel=1e-6)
    assert progress.step == STEPS and ended_by == 0


@pytest.mark.parametrize("micro_batch_size", [GLOBAL_BATCH, 4])
def test_the_loss_is_the_mean_of_minus_target_times_log_softmax(micro_batch_size):
    """So is its gradient: a step of plain SGD equals one by the formula in float64."""
    by_hand, losses = small_model().double(), []
    for parts in soft_batches(micro_batch_size):
        images, targets = (torch.cat(side).double() for side in zip(*parts))
        logits = by_hand(images)
        log_softmax = logits - logits.exp().sum(dim=1, keepdim=True).log()
        losses.append(-(targets * log_softmax).sum() / GLOBAL_BATCH)

    # At a learning rate of 0 the weights stay, and the loss of every step is that of the first
    # weights.
    frozen, progress, *_ = trained(micro_batch_size, steps=soft_batches(micro_batch_size),
                                   prepare=as_it_is, lr_at=lambda step: 0.0)
    assert_close(frozen, small_model(), atol=0)
    assert progress.loss_sum == pytest.approx(sum(losses).item(), rel=1e-6)

    losses[0].backward()
    with torch.no_grad():
        for parameter in by_hand.parameters():
            parameter -= 0.3 * parameter.grad
    model = small_model()
    state = TrainState(model, torch.optim.SGD(model.parameters()),
                       torch.amp.GradScaler("cpu", enabled=False), None, Progress())
    first = itertools.islice(soft_batches(micro_batch_size), 1)
    list(train_epoch(state, model, numbered(first, micro_batch_size, prepare=as_it_is),
                     lr_at=lambda step: 0.3, drop_path_at=lambda step: None, amp="off", clip_norm=0.0,
                     every_steps=0, processes=ALONE, stop=StopRequest()))
    assert_close(model, by_hand.float(), atol=1e-6)


@pytest.mark.parametrize("first", [0, 40])
def test_each_micro_batch_is_prepared_under_its_own_step_and_groups(first):
    """Steps are counted from the start of the run, so that a resumed run makes the same draws."""
    prepared, all_steps = [], list(batches(4))

    def prepare(batch, step: int, groups: np.ndarray):
        prepared.append((batch[0], step, groups))
        return soft(batch, step, groups)
    trained(4, steps=all_steps, prepare=prepare, progress=Progress(step=first))
    assert [step for _, step, _ in prepared] == [
        step for step in range(first, first + STEPS) for _ in range(3)]
    for place, (images, step, groups) in enumerate(prepared):
        assert images is all_steps[step - first][place % 3][0]
        assert groups.tolist() == list(range(GLOBAL_BATCH))[place % 3::3]


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4, 6])
def test_accumulation_equals_the_whole_batch_drop_path_included(micro_batch_size):
    whole, progress, *_ = trained(drop_path=0.5)
    parts, other, *_ = trained(micro_batch_size, drop_path=0.5)
    assert_close(parts, whole, atol=1e-5)
    assert other.loss_sum == pytest.approx(progress.loss_sum, rel=1e-5)
    without, *_ = trained()
    assert not torch.allclose(whole.head.weight, without.head.weight, atol=1e-3)


def test_the_learning_rate_is_set_at_every_step():
    frozen, *_ = trained(lr_at=lambda step: 0.0)
    assert_close(frozen, small_model(), atol=0)
    seen = []
    trained(lr_at=lambda step: seen.append(step) or 1e-3, progress=Progress(step=40))
    assert seen == [40, 41, 42, 43, 44]


class SkippingScaler(torch.amp.GradScaler):
    """A GradScaler whose gradients overflow at one step."""

    def __init__(self, bad_step: int) -> None:
        super().__init__("cpu", init_scale=8.0)
        self.calls, self.bad_step = 0, bad_step

    def step(self, optimizer):
        if self.calls == self.bad_step:
            optimizer.param_groups[0]["params"][0].grad[..., 0] = float("inf")
        self.calls += 1
        return super().step(optimizer)


def test_a_skipped_step_changes_neither_weights_nor_average_and_is_counted():
    all_steps = list(batches(GLOBAL_BATCH))
    model, progress, ema, _ = trained(scaler=SkippingScaler(bad_step=STEPS - 1), ema_decay=0.5)
    assert (progress.skipped_steps, progress.step, ema.updates) == (1, STEPS, STEPS - 1)
    shorter, other, average, _ = trained(scaler=SkippingScaler(bad_step=-1), ema_decay=0.5,
                                         steps=all_steps[:-1], count=STEPS - 1)
    assert (other.skipped_steps, other.step) == (0, STEPS - 1)
    assert_close(model, shorter, atol=0)
    assert_close(ema.model, average.model, atol=0)


class OverflowingScaler(SkippingScaler):
    """A GradScaler under which gradients overflow in the backward pass."""

    def scale(self, outputs):
        scaled = super().scale(outputs)
        overflows = outputs.requires_grad and self.calls == self.bad_step
        return scaled * float("inf") if overflows else scaled

    def step(self, optimizer):
        self.calls += 1
        return torch.amp.GradScaler.step(self, optimizer)


def test_gradients_that_overflow_are_skipped_under_clipping_too():
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    model, progress, *_ = trained(scaler=scaler, clip_norm=1.0)
    assert progress.skipped_steps > 0
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("amp, atol", [("bf16", 0.05), ("fp16", 0.01)])
def test_mixed_precision_stays_near_full_precision(amp, atol):
    full, progress, *_ = trained()
    scaler = torch.amp.GradScaler("cpu", enabled=amp == "fp16", init_scale=64.0)
    mixed, other, *_ = trained(amp=amp, scaler=scaler)
    assert other.loss_sum / STEPS == pytest.approx(progress.loss_sum / STEPS, abs=atol)
    assert other.loss_sum != progress.loss_sum and other.skipped_steps == 0


def test_a_non_finite_loss_stops_and_names_the_step():
    with pytest.raises(Diverged, match="loss of step 2 is nan"):
        trained(steps=batches(GLOBAL_BATCH, bad_step=2))


def test_the_first_cause_of_a_divergence_is_the_one_that_is_told():
    """By the third step's NaN the weights are not finite either, but that came second."""
    model = small_model()
    state = TrainState(model, torch.optim.SGD(model.parameters()),
                       torch.amp.GradScaler("cpu", enabled=False), None, Progress())
    with pytest.raises(Diverged, match="the loss of step 2 is nan"):
        list(train_epoch(state, model, numbered(batches(GLOBAL_BATCH, bad_step=2)),
                         lr_at=lambda step: 1e-2, drop_path_at=lambda step: None, amp="off",
                         clip_norm=0.0, every_steps=1, processes=ALONE, stop=StopRequest()))


def test_a_stop_request_ends_between_two_steps(stop_before):
    model, progress, _, ended_by = trained(stop=stop_before(3))
    assert ended_by == signal.SIGTERM and progress.step == 3
    straight, *_ = trained(count=3)
    assert_close(model, straight, atol=0)


def test_a_request_during_the_last_step_is_not_lost(stop_before):
    _, progress, _, ended_by = trained(stop=stop_before(STEPS))
    assert ended_by == signal.SIGTERM and progress.step == STEPS


def test_checkpoints_are_asked_for_when_due_with_complete_sums():
    sums = []
    progress = Progress()
    model = small_model()
    state = TrainState(model, adamw(model, weight_decay=0.1, betas=(0.9, 0.99), eps=EPS),
                       torch.amp.GradScaler("cpu", enabled=False), None, progress)
    for _ in train_epoch(state, model, numbered(batches(GLOBAL_BATCH)), lr_at=lambda step: 1e-2,
                         drop_path_at=lambda step: None, amp="off", clip_norm=0.0, every_steps=2,
                         processes=ALONE, stop=StopRequest()):
        sums.append((progress.step, progress.loss_sum))
    assert [step for step, _ in sums] == [2, 4]
    assert 0 < sums[0][1] < sums[1][1] < progress.loss_sum


# ---------------------------------------------------------------------------------------------
# Steps on record
# ---------------------------------------------------------------------------------------------


def many_steps(count: int):
    """`count` global batches, each of its own images."""
    return list(itertools.islice(itertools.chain.from_iterable(
        [[(images + 0.01 * turn, labels) for images, labels in parts]
         for parts in batches(GLOBAL_BATCH)] for turn in itertools.count()), count))


@pytest.mark.parametrize("clip_norm", [0.0, 0.3])
def test_every_tenth_step_of_the_run_is_on_record_as_it_went(clip_norm):
    """Compared with a loop written by hand; the run resumes at step 3."""
    model, rows, expected, steps = small_model(), [], [], many_steps(21)
    optimizer = adamw(model, weight_decay=0.1, betas=(0.9, 0.99), eps=EPS)
    for number, [(images, labels)] in enumerate(steps, 3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (number + 1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        loss.backward()
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        expected.append((number + 1, loss.item(), 1e-3 * (number + 1), norm.item()))
    trained(steps=steps, count=21, progress=Progress(step=3), clip_norm=clip_norm,
            lr_at=lambda step: 1e-3 * (step + 1), record=rows.append)
    assert [row.step for row in rows] == [10, 20]
    for row, told in zip(rows, (expected[6], expected[16])):
        assert row[:4] == pytest.approx(told, rel=1e-4) and row.scale is None
        assert told[3] > 0.3                         # so that clipping shows


def test_rows_of_an_interrupted_run_are_those_of_a_straight_one(stop_before):
    straight, rows, steps = [], [], many_steps(21)
    trained(steps=steps, count=21, record=straight.append)
    model, progress, _, ended_by = trained(steps=steps, count=21, record=rows.append,
                                           stop=stop_before(20))
    assert ended_by and progress.step == 20
    assert [row[:5] for row in rows] == [row[:5] for row in straight]


def test_rows_in_fp16_give_the_scale_and_no_norm_where_it_overflowed():
    for clip_norm in (0.0, 0.3):
        plain, rows, steps = [], [], many_steps(20)
        trained(steps=steps, count=20, clip_norm=clip_norm, record=plain.append)
        _, progress, *_ = trained(
            steps=steps, count=20, clip_norm=clip_norm, record=rows.append,
            scaler=OverflowingScaler(bad_step=9))
        assert progress.skipped_steps == 1
        assert [row.scale for row in rows] == [8.0, 4.0] and rows[0].grad_norm is None
        assert rows[1].grad_norm == pytest.approx(plain[1].grad_norm, rel=0.2)


def test_a_rows_rates_are_of_the_time_since_the_row_before(monkeypatch):
    """The clock advances by one second while a step's data is awaited, and by three per step."""
    now = [0.0]
    monkeypatch.setattr(engine.time, "perf_counter", lambda: now[0])

    def slow(parts):
        for part in parts:
            now[0] += 1.0
            yield part

    def lr_at(step: int) -> float:
        now[0] += 3.0
        return 1e-3
    rows, progress = [], Progress()
    trained(steps=slow(many_steps(23)), count=23, lr_at=lr_at, record=rows.append,
            progress=progress)
    assert [row.images_per_second for row in rows] == [GLOBAL_BATCH / 4.0] * 2
    assert [row.waiting for row in rows] == [0.25] * 2
    assert (progress.seconds, progress.waiting_seconds) == (92.0, 23.0)


def test_time_counts_until_the_device_is_done_and_once(monkeypatch):
    """Reading the losses waits for the device, one second more at every reading: it is training time
    of the steps that were read, also at checkpoints and at the end of the epoch."""
    now, waits = [0.0], itertools.count(1)
    monkeypatch.setattr(engine.time, "perf_counter", lambda: now[0])

    def summed(processes, values):
        now[0] += next(waits)
        return values
    monkeypatch.setattr(Processes, "sum", summed)
    rows, progress, model = [], Progress(), small_model()
    state = TrainState(model, torch.optim.SGD(model.parameters()),
                       torch.amp.GradScaler("cpu", enabled=False), None, progress)
    saved = [progress.seconds for _ in train_epoch(
        state, model, numbered(many_steps(23)), lr_at=lambda step: 1e-2,
        drop_path_at=lambda step: None, amp="off", clip_norm=0.0, every_steps=15, processes=ALONE,
        stop=StopRequest(), record=rows.append)]
    assert [row.images_per_second for row in rows] == [10 * GLOBAL_BATCH / 1, 10 * GLOBAL_BATCH / 5]
    assert saved == [1.0 + 2.0] and progress.seconds == 1.0 + 2.0 + 3.0 + 4.0


def test_the_seconds_of_an_epoch_are_those_of_training_alone(monkeypatch):
    """Each reading of the clock takes a second; the caller takes a thousand at each checkpoint."""
    clock = itertools.count()
    offset = [0]
    monkeypatch.setattr(engine.time, "perf_counter", lambda: offset[0] + next(clock))
    model, progress = small_model(), Progress()
    state = TrainState(model, torch.optim.SGD(model.parameters()),
                       torch.amp.GradScaler("cpu", enabled=False), None, progress)
    for _ in train_epoch(state, model, numbered(batches(GLOBAL_BATCH)), lr_at=lambda step: 1e-2,
                         drop_path_at=lambda step: None, amp="off", clip_norm=0.0, every_steps=2,
                         processes=ALONE, stop=StopRequest()):
        offset[0] += 1000
    assert 0 < progress.seconds < 100


def test_broken_data_is_raised_after_the_steps_before_it_are_counted():
    def broken():
        yield from itertools.islice(batches(GLOBAL_BATCH), 2)
        raise OneLineError("image 7")
    progress = Progress()
    with pytest.raises(OneLineError, match="image 7"):
        trained(steps=broken(), progress=progress)
    assert progress.step == 2 and progress.loss_sum > 0


def bare_state(name: str, **options) -> TrainState:
    """The state of a small model, with a moving average and a loss scale that grows at every step."""
    model = vitinit.build_model(name, num_classes=CLASSES, image_size=8, embed_dim=12, depth=2,
                                **options)
    vitinit.init_weights(model, "torch", generator=torch.Generator().manual_seed(0))
    return TrainState(model, adamw(model, weight_decay=0.1, betas=(0.9, 0.99), eps=EPS),
                      torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1),
                      Ema(model, decay=0.8, warmup=True), Progress())


def through(state: TrainState, steps, micro_batch_size: int, stop=None) -> str:
    """Train on them; returns why it ended early, or ""."""
    try:
        for _ in train_epoch(state, state.model, numbered(steps, micro_batch_size), amp="off",
                             lr_at=lambda step: 1e-2, drop_path_at=lambda step: None, clip_norm=0.5,
                             every_steps=0, processes=ALONE, stop=stop or StopRequest()):
            pass
    except (OneLineError, Interrupted) as error:
        return str(error)
    return ""


def bits(value, path: str = "") -> dict[str, object]:
    """The contents of a checkpoint without times: name → number, or the bytes of a tensor."""
    if isinstance(value, dict):
        return {name: leaf for key, part in value.items() if not str(key).endswith("seconds")
                for name, leaf in bits(part, f"{path}/{key}").items()}
    if isinstance(value, torch.Tensor):
        return {path: value.detach().numpy().tobytes()}
    return {path: value}


def test_each_micro_batch_trains_as_soon_as_it_is_loaded():
    """The next micro-batch is requested only after the backward pass of the previous one."""
    model, order = small_model(), []

    def coming():
        for number, parts in enumerate(batches(4)):
            def told(parts=parts, number=number):
                for micro_step, part in enumerate(parts):
                    order.append(f"asked {number}.{micro_step}")
                    yield part
            yield told()
    model.head.bias.register_hook(lambda gradient: order.append("trained"))
    state = TrainState(model, torch.optim.SGD(model.parameters()),
                       torch.amp.GradScaler("cpu", enabled=False), None, Progress())
    assert through(state, coming(), 4) == ""
    assert order == [word for number in range(STEPS) for micro_step in range(3)
                     for word in (f"asked {number}.{micro_step}", "trained")]


@pytest.mark.parametrize("name, options", [
    ("vit_tiny", dict(patch_size=4, num_heads=3)),
    ("convmixer_256_8", dict(patch_size=2, kernel_size=3))])
@pytest.mark.parametrize("micro_step", [0, 1, 2])
@pytest.mark.parametrize("signalled", [False, True])
def test_a_step_that_is_abandoned_leaves_the_state_before_it_to_the_bit(name, options, micro_step,
                                                                       signalled, stop_before):
    """Broken data or a signal at any micro-batch of the third step."""
    all_steps = list(batches(4))
    expected, state = bare_state(name, **options), bare_state(name, **options)
    assert through(expected, all_steps[:2], 4) == ""

    def breaking(parts):
        yield from parts[:micro_step]
        raise OneLineError("image 7")
    if signalled:
        why = through(state, all_steps, 4, stop=stop_before(2 * 3 + micro_step))
        assert why == "stopped by SIGTERM"
    else:
        assert through(state, [*all_steps[:2], breaking(all_steps[2])], 4) == "image 7"
    assert bits(state.state_dict()) == bits(expected.state_dict())
    assert state.progress.step == 2 and state.scaler.get_scale() == 32.0
    assert all(parameter.grad is None for parameter in state.model.parameters())


def test_broken_data_is_raised_by_evaluation():
    def broken():
        yield torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
        raise OneLineError("image 7")
    with pytest.raises(OneLineError, match="image 7"):
        evaluate([small_model()], broken(), num_classes=CLASSES, amp="off", processes=ALONE,
                 stop=StopRequest())


def evaluated(models, images, labels, size: int, num_classes: int = CLASSES, columns=None):
    """`evaluate` on these images, `size` at a time."""
    return evaluate(models, zip(images.split(size), labels.split(size)), num_classes=num_classes,
                    amp="off", processes=ALONE, stop=StopRequest(), columns=columns)


def counted_by_hand(model, images, labels, chosen):
    """Loss, top-1, top-5 and hits per class, computed one image at a time in float64.

    chosen: the model's classes that compete; labels count within them. A rank is the number of
    classes that are ahead.
    """
    loss, top1, top5, hits = 0.0, 0, 0, [0] * len(chosen)
    for image, label in zip(images, labels.tolist()):
        logits = model.double()(image[None].double())[0].tolist()
        logits = [logits[place] for place in chosen]
        ahead = sum(logit > logits[label] for logit in logits)
        loss += math.log(sum(math.exp(logit - logits[label]) for logit in logits))
        top1, top5, hits[label] = top1 + (ahead < 1), top5 + (ahead < 5), hits[label] + (ahead < 1)
    return loss / len(images), 100 * top1 / len(images), 100 * top5 / len(images), hits


def images_to_evaluate(classes: int = CLASSES):
    """31 noise images, and labels of unequal frequencies."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(classes, (31,), generator=generator)
    return torch.randn(31, 3, 8, 8, generator=generator), labels


def other_model() -> torch.nn.Module:
    model = small_model()
    with torch.no_grad():
        model.head.weight *= 40                      # else all logits of an image are nearly equal
        model.head.bias += torch.arange(7) / 7
    return model


@pytest.mark.parametrize("size", [31, 7, 4])
def test_evaluation_equals_a_loop_over_all_images_whatever_the_batches(size):
    images, labels = images_to_evaluate()
    other, result = evaluated([small_model(), other_model()], images, labels, size)
    loss, top1, top5, hits = counted_by_hand(other_model(), images, labels, range(CLASSES))
    assert 0 < top1 < top5 < 100 and len(set(hits)) > 2      # else a mistake would not show
    assert result.images == 31 and other.loss != result.loss
    assert (result.top1, result.top5) == (pytest.approx(top1), pytest.approx(top5))
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.class_hits == hits
    assert result.class_images == [labels.tolist().count(label) for label in range(CLASSES)]


def test_columns_leave_the_other_classes_out_of_ranking_and_loss():
    """One model's columns are its first classes in order; the other's are chosen and reordered."""
    chosen = [5, 1, 4, 0, 3, 6]                      # without 2, which mostly ranks first
    images, labels = images_to_evaluate(len(chosen))
    plain, result = evaluated([small_model(), other_model()], images, labels, 7, len(chosen),
                              columns=[torch.arange(6), torch.tensor(chosen)])
    loss, top1, top5, hits = counted_by_hand(other_model(), images, labels, chosen)
    assert 0 < top1 < top5 < 100
    assert (result.top1, result.top5) == (pytest.approx(top1), pytest.approx(top5))
    assert result.loss == pytest.approx(loss, rel=1e-6) and result.class_hits == hits

    # The same results as by masking: logits of −∞ for all other classes, and the model's own
    # labels.
    logits = other_model()(images).detach()
    masked = torch.full_like(logits, -torch.inf)
    masked[:, chosen] = logits[:, chosen]
    theirs = torch.tensor(chosen)[labels]
    assert result.loss == pytest.approx(F.cross_entropy(masked, theirs).item(), rel=1e-6)
    right = (masked.argmax(1) == theirs).double().mean().item()
    assert result.top1 == pytest.approx(100 * right)
    assert right != (logits.argmax(1) == theirs).double().mean().item()     # the mask matters
    assert plain.class_hits == counted_by_hand(small_model(), images, labels, range(6))[3]


def test_top_5_is_measured_only_of_more_than_five_classes():
    for classes in (3, 5, 6):
        model = vitinit.build_model("vit_tiny", num_classes=classes, image_size=8, patch_size=4,
                                    embed_dim=12, depth=1, num_heads=3)
        result, = evaluated([model], torch.randn(5, 3, 8, 8), torch.arange(5) % 3, 5,
                            num_classes=classes)
        assert (result.top5 is None) == (classes < 6)


# ---------------------------------------------------------------------------------------------
# What wraps the model, and the mode that it is in
# ---------------------------------------------------------------------------------------------


class Wrapped:
    """Like DistributedDataParallel: gradients are exchanged in each backward pass outside no_sync."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.calls, self.silent = model, [], False

    def train(self) -> None:
        self.model.train()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.silent = True
        yield
        self.silent = False

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        self.calls.append(self.silent)
        return self.model(images)


def trained_once(model: torch.nn.Module, forward, micro_batch_size: int) -> None:
    state = TrainState(model, torch.optim.SGD(model.parameters()),
                       torch.amp.GradScaler("cpu", enabled=False), None, Progress())
    first = itertools.islice(batches(micro_batch_size), 2)
    for _ in train_epoch(state, forward, numbered(first, micro_batch_size), lr_at=lambda step: 0.1,
                         drop_path_at=lambda step: None, amp="off", clip_norm=0.0, every_steps=0,
                         processes=ALONE, stop=StopRequest()):
        pass


def test_gradients_are_exchanged_once_per_step():
    forward = Wrapped(small_model())
    trained_once(forward.model, forward, micro_batch_size=4)
    assert forward.calls == [True, True, False] * 2


def test_it_trains_in_training_mode_whatever_mode_the_model_was_in():
    """Otherwise BatchNorm would train with statistics that never change."""
    model = vitinit.build_model("convmixer_256_8", num_classes=CLASSES, image_size=8, patch_size=2,
                                embed_dim=12, depth=1, kernel_size=3).eval()
    vitinit.init_weights(model, "default", generator=torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in model.named_buffers()}
    trained_once(model, model, micro_batch_size=6)
    assert all(not torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert len(before) > 0


def test_compiled_and_wrapped_for_several_processes_it_trains_as_bare(tmp_path):
    """DistributedDataParallel under torch.compile, as in train.py, in a group of one process.

    Traced as for inductor, but run by PyTorch: what is tested is the wrapping, no_sync above all.
    """
    bare, wrapped = small_model(), small_model()
    trained_once(bare, bare, micro_batch_size=4)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0,
                                         world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(wrapped, gradient_as_bucket_view=True)
        forward = torch.compile(parallel, backend="aot_eager")
        exchanged = []
        parallel.register_comm_hook(exchanged, counting_hook)
        trained_once(wrapped, forward, micro_batch_size=4)
    finally:
        torch.distributed.destroy_process_group()
    assert_close(wrapped, bare, atol=1e-6)
    assert len(exchanged) == 2                       # one bucket, once in each of two steps


def counting_hook(exchanged: list, bucket):
    exchanged.append(bucket.index())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
