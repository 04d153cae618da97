"""One step, however it is divided into micro-batches; skipping, stopping, and exact evaluation."""

import contextlib
import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from counting import counted_by_hand
from optimisers import OPTIMISERS, adamw, state_of
from small_models import written

import vitinit
from vitinit.data.augment import smooth_one_hot
from vitinit.programs.shared.steps import given_step
from vitinit.tasks import labels as labels_module, reconstruction
from vitinit.tasks.labels import cross_entropy, evaluate
from vitinit.train import metrics
from vitinit.train.distributed import Processes
from vitinit.train.interruption import StopRequest
from vitinit.train.loop import Training, check_finite, train_epochs
from vitinit.train.meter import Meter, StepMeter, Update
from vitinit.train.metrics import Diverged, Progress
from vitinit.train.state import Ema, TrainState

CPU = torch.device("cpu")
ALONE = Processes(rank=0, local_rank=0, world_size=1, device=CPU)
GLOBAL_BATCH, STEPS, CLASSES = 12, 5, 7
# The gradient of a key's bias is zero, since softmax ignores what is added to a whole row; in
# practice it is a rounding error. AdamW's usual eps of 1e-8 would scale that error up to a full
# step.
EPS = 1e-4
Batch = tuple[torch.Tensor, torch.Tensor]  # images and targets


def small_model(name: str = "vit_tiny", **options) -> torch.nn.Module:
    sizes = {
        "vit_tiny": dict(patch_size=4, num_heads=3),
        "convmixer_256_8": dict(patch_size=2, kernel_size=3),
    }[name]
    model = vitinit.build_model(
        name, num_classes=CLASSES, image_size=8, embed_dim=12, depth=2, **sizes | options
    )
    return written("torch", model)


def batches(count: int = STEPS) -> list[Batch]:
    """Global batches with smoothed labels."""
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(count):
        images = torch.randn(GLOBAL_BATCH, 3, 8, 8, generator=generator)
        labels = torch.randint(CLASSES, (GLOBAL_BATCH,), generator=generator)
        found.append((images, smooth_one_hot(labels, CLASSES, 0.1)))
    return found


def fresh(model: torch.nn.Module, **parts) -> TrainState:
    return state_of(model, adamw(model, weight_decay=0.1, betas=(0.9, 0.99), eps=EPS), **parts)


def train(
    state: TrainState,
    steps,
    *,
    size: int = GLOBAL_BATCH,
    change=lambda micro_batch: micro_batch,
    on_row=lambda row: None,
    on_paces=lambda paces: None,
    save=lambda: None,
    end_epoch=lambda epoch: None,
    measured: bool = True,
    **options,
) -> None:
    """Train the state on these global batches, in micro-batches of `size`, as one epoch."""
    given = (
        given_step(number, [*zip(*(part.split(size) for part in batch))])
        for number, batch in enumerate(steps, state.progress.step)
    )
    given = ((number, [*map(change, micro_batches)]) for number, micro_batches in given)
    usual = dict(
        loss=cross_entropy, learning_rate=lambda step: 1e-2, drop_path=lambda step: None, epochs=1
    )
    training = Training(
        state=state,
        forward=state.model,
        steps=lambda epoch, done: given,
        processes=ALONE,
        stop=StopRequest(),
        **usual | options,
    )
    meter = Meter()
    if measured:
        meter = StepMeter(
            state.progress,
            ALONE,
            epochs=1,
            steps_per_epoch=0,
            global_batch=GLOBAL_BATCH,
            on_row=on_row,
            on_paces=on_paces,
        )
    train_epochs(training, SimpleNamespace(save=save, end_epoch=end_epoch), meter)


def trained(
    steps=None, *, scaler=None, ema_decay: float = 0.0, progress=None, **options
) -> TrainState:
    """The state of a small model after `train`."""
    model = small_model()
    ema = Ema(model, decay=ema_decay, warmup=False) if ema_decay else None
    state = fresh(model, scaler=scaler, ema=ema, progress=progress)
    train(state, batches() if steps is None else steps, **options)
    return state


def assert_close(first: torch.nn.Module, second: torch.nn.Module, atol: float) -> None:
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("clip_norm, size", [(0.0, 4), (0.3, GLOBAL_BATCH)])
def test_it_is_the_loop_that_one_would_write_by_hand_and_rows_tell_of_it(
    clip_norm, size, held_against
):
    """Also in micro-batches. It resumes at step 3; steps 10 and 20 of the run are on record."""
    model, rows, expected, steps = small_model(), [], [], batches(21)
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [
                    p
                    for n, p in model.named_parameters()
                    if p.ndim > 1 and n not in ("pos_embed", "cls_token")
                ],
                "weight_decay": 0.1,
            },
            {
                "params": [
                    p
                    for n, p in model.named_parameters()
                    if p.ndim == 1 or n in ("pos_embed", "cls_token")
                ],
                "weight_decay": 0.0,
            },
        ],
        betas=(0.9, 0.99),
        eps=EPS,
    )
    for number, (images, targets) in enumerate(steps, 3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (number + 1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        expected.append((number + 1, loss.item(), 1e-3 * (number + 1), norm.item()))
    state = trained(
        steps,
        size=size,
        progress=Progress(step=3),
        clip_norm=clip_norm,
        learning_rate=lambda step: 1e-3 * (step + 1),
        on_row=rows.append,
    )
    assert_close(state.model, model, atol=1e-5)
    held_against([*state.model.parameters()], [*model.parameters()], cases=21)
    assert state.progress.loss_sum == pytest.approx(sum(loss for _, loss, *_ in expected), rel=1e-5)
    assert state.progress.step == 24 and [row.step for row in rows] == [10, 20]
    for row, told in zip(rows, (expected[6], expected[16])):
        assert row[:4] == pytest.approx(told, rel=1e-4) and row.scale is None
        assert told[3] > 0.3  # so that clipping shows


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_step_is_the_same_however_it_is_divided_into_micro_batches(optimiser):
    """With each optimiser, also in fp16 with a loss scale."""
    found = []
    for size, scaler in ((GLOBAL_BATCH, None), (4, None), (3, OverflowingScaler(-1))):
        model = small_model()
        state = state_of(model, OPTIMISERS[optimiser](model, eps=EPS), scaler=scaler)
        train(state, batches(), size=size, learning_rate=lambda step: 1e-3)
        found.append(model)
    for other in found[1:]:
        assert_close(other, found[0], atol=1e-5)


def test_a_micro_batch_is_prepared_once_the_one_before_was_trained_on_with_its_own_scales():
    """Its memory is used again for a later one; see data/pipeline.py. Gradients of all but the last
    stay in their process."""
    model, order, seen, drawn = small_model(), [], [], torch.arange(180).view(STEPS, 3, 12)

    def told(micro_batch):
        return micro_batch._replace(
            prepare=lambda: (order.append("prepared"), micro_batch.prepare())[1]
        )

    @contextmanager
    def no_sync():
        order.append("local")
        yield

    model.no_sync = no_sync
    model.head.bias.register_hook(lambda gradient: order.append("trained"))
    train(
        fresh(model),
        batches(),
        size=4,
        change=told,
        drop_path=drawn.__getitem__,
        amp="bf16",
        loss=lambda forward, images, scales, targets: (
            seen.extend(scales),
            order.append(forward(images).dtype),
            F.cross_entropy(forward(images), targets),
        )[2],
    )
    assert (
        order
        == (
            ["prepared", "local", torch.bfloat16, "trained"] * 2
            + ["prepared", torch.bfloat16, "trained"]
        )
        * STEPS
    )
    assert torch.equal(torch.cat(seen, dim=1), torch.cat([*drawn], dim=1))


def test_what_measures_beside_the_loop_changes_no_weight_nor_what_is_saved_but_times():
    states = [fresh(small_model(), ema=None) for _ in range(2)]
    for state, measured in zip(states, (True, False)):
        train(state, batches(21), size=4, clip_norm=0.3, measured=measured)
    told, untold = (state.state_dict() for state in states)
    for name, value in told["model"].items():
        assert torch.equal(value, untold["model"][name]), name
    times = {"seconds", "cpu_seconds", "waiting_seconds"}
    assert told["progress"]["seconds"] > 0 and untold["progress"]["seconds"] == 0
    assert {**told["progress"], **dict.fromkeys(times)} == {
        **untold["progress"],
        **dict.fromkeys(times),
    }


class OverflowingScaler(torch.amp.GradScaler):
    """A GradScaler under which gradients overflow in the backward pass of one step."""

    def __init__(self, bad_step: int) -> None:
        super().__init__("cpu", init_scale=8.0)
        self.calls, self.bad_step = 0, bad_step

    def scale(self, outputs):
        scaled = super().scale(outputs)
        overflows = outputs.requires_grad and self.calls == self.bad_step
        return scaled * float("inf") if overflows else scaled

    def step(self, optimizer):
        self.calls += 1
        return super().step(optimizer)


@pytest.mark.parametrize("clip_norm", [0.0, 0.3])
def test_rows_in_fp16_give_the_scale_and_no_norm_where_it_overflowed(clip_norm):
    plain, rows, steps = [], [], batches(20)
    trained(steps, clip_norm=clip_norm, on_row=plain.append)
    state = trained(
        steps, clip_norm=clip_norm, on_row=rows.append, scaler=OverflowingScaler(9), ema_decay=0.5
    )
    assert (state.progress.skipped_steps, int(state.ema.updates)) == (1, 19)
    assert [row.scale for row in rows] == [8.0, 4.0] and rows[0].grad_norm is None
    assert rows[1].grad_norm == pytest.approx(plain[1].grad_norm, rel=0.2)


@pytest.mark.parametrize("count, at", [(29, []), (30, [30]), (99, [99]), (131, [100])])
def test_how_fast_it_goes_is_told_once_after_a_hundred_steps_or_an_epoch_of_thirty(count, at):
    state, told = fresh(small_model()), []
    train(state, batches(1) * count, on_paces=lambda paces: told.append(state.progress.step))
    assert told == at


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_the_bar_says_the_mean_loss_of_the_epoch_so_far_and_waits_for_no_device(kind, monkeypatch):
    """A CPU has it at once; of another device it is what the tenth step has fetched."""
    said = []

    class Bar(contextlib.nullcontext):
        disable = False

        def set_postfix_str(self, text, refresh):
            said.append(text)

        def update(self):
            said.append(None)

    monkeypatch.setattr("vitinit.train.meter.ProgressBar", lambda *_, **how: Bar())
    progress, processes = Progress(), Processes(0, 0, 1, torch.device(kind))
    meter = StepMeter(progress, processes, epochs=1, steps_per_epoch=11, global_batch=3)
    losses = [float(number**2) for number in range(1, 12)]
    with meter.epoch(0):
        for step, loss in enumerate(losses):
            meter.begin_step(step)
            progress.add(torch.tensor(loss), None)
            meter.end_step(Update(1e-3, torch.tensor(1.0), None))
    means = [f"loss {sum(losses[:n]) / n:.3f}" for n in range(1, 12)]
    if kind == "cpu":
        assert said == [part for mean in means for part in (mean, None)]
    else:
        assert said == [None] * 9 + [means[9], None] * 2


def test_a_loss_that_is_not_finite_is_told_by_its_step_before_the_weights():
    """The third step's NaN makes weights that are not finite either."""
    steps = batches()
    steps[2][0][3] = float("nan")
    for save_every in (0, 1):
        state = fresh(small_model())
        with pytest.raises(Diverged, match="the loss of step 3 is nan"):
            train(state, steps, save_every=save_every, save=lambda: check_finite(state, ALONE))


@pytest.mark.parametrize("factor, diverges", [(1e15, False), (1e25, True)])
def test_moments_that_are_not_finite_replace_no_checkpoint_though_loss_and_weights_are(
    factor, diverges
):
    """The square of a gradient of 1e25 is infinite, and so the update is 0. Of 1e15 it is finite,
    but not the square of that."""

    def loss(*arguments):
        return cross_entropy(*arguments) * factor

    state = fresh(small_model())
    ending = pytest.raises(Diverged, match="moments or the weights after step 1 are not finite")
    with ending if diverges else contextlib.nullcontext():
        train(state, batches(1), loss=loss, save_every=1, save=lambda: check_finite(state, ALONE))
    assert all(weight.isfinite().all() for weight in state.model.parameters())
    squares = [kept["exp_avg_sq"] for kept in state.optimizer.state.values()]
    assert diverges == any(square.isinf().any() for square in squares)


def test_time_counts_until_the_device_is_done_once_and_without_saving_and_evaluating(monkeypatch):
    """A step takes a second for its data and three for itself. Reading the losses waits for the
    device, one second more at every reading: it is training time of the steps that were read, also
    at checkpoints and at the end of the epoch. A row's rates are since the row before, and what is
    measured for it is not training."""
    now, waits = [0.0], itertools.count(1)
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])

    def after(seconds: float, value):
        now[0] += seconds
        return value

    def take_long(epoch: int = 0) -> None:
        check_finite(state, ALONE)
        saved.append(state.progress.seconds)
        now[0] += 1000.0

    monkeypatch.setattr(Processes, "sum", lambda self, values: after(next(waits), values))
    rows, saved, state = [], [], fresh(small_model())
    train(
        state,
        (after(1, batch) for batch in batches(23)),
        save_every=15,
        save=take_long,
        learning_rate=lambda step: after(3, 1e-3),
        end_epoch=take_long,
        on_row=lambda row: after(500, rows.append(row)),
    )
    check_finite(state, ALONE)  # as after an evaluation that was stopped
    since_last = [10 * 4.0 + 1.0, 10 * 4.0 + 2.0 + 3.0]
    assert [row.images_per_second for row in rows] == [10 * GLOBAL_BATCH / t for t in since_last]
    assert [row.waiting for row in rows] == [10 / t for t in since_last]
    assert saved == [15 * 4.0 + 1.0 + 2.0, 23 * 4.0 + 1.0 + 2.0 + 3.0 + 4.0]
    assert (state.progress.seconds, state.progress.waiting_seconds) == (saved[1], 23.0)


@pytest.mark.parametrize(
    "size, chosen",
    [
        (31, range(CLASSES)),
        (7, range(CLASSES)),
        (31, [0, 3, 5]),
        (7, [5, 1, 4, 0, 3, 6]),
        (13, [0, 1, 2, 3, 4]),
    ],
)
def test_evaluation_equals_a_loop_over_all_images_and_the_chosen_columns(
    size, chosen, held_against
):
    """However large the batches. The top 5 are measured only of more than five classes."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(len(chosen), (31,), generator=generator)  # of unequal frequencies
    images, other = torch.randn(31, 3, 8, 8, generator=generator), small_model()
    with torch.no_grad():
        other.head.weight *= 40  # else all logits of an image are nearly equal
        other.head.bias += torch.arange(7) / 7
    plain, result = evaluate(
        [small_model(), other],
        zip(images.split(size), labels.split(size)),
        amp="off",
        num_classes=len(chosen),
        processes=ALONE,
        stop=StopRequest(),
        columns=torch.tensor(chosen) if isinstance(chosen, list) else None,
    )
    (half,) = evaluate(
        [other],
        [(images, labels)],
        amp="bf16",
        num_classes=len(chosen),
        processes=ALONE,
        stop=StopRequest(),
        columns=torch.tensor(chosen),
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = other(images)[:, chosen].double()
    assert half.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    of_plain = counted_by_hand(small_model(), images, labels.tolist(), chosen)[-1]
    assert not other.training and plain.class_hits == of_plain.diagonal().tolist()
    loss, top1, top5, confusion = counted_by_hand(other, images, labels.tolist(), chosen)
    hits = confusion.diagonal().tolist()
    assert 0 < top1 < 100 and len(set(hits)) > 1  # else a mistake would not show
    assert result.top1 == pytest.approx(top1) and result.loss == pytest.approx(loss, rel=1e-6)
    assert result.top5 == (pytest.approx(top5) if len(chosen) > 5 else None)
    assert (result.images, result.class_hits) == (31, hits)
    assert result.class_images == [labels.tolist().count(label) for label in range(len(chosen))]
    assert result.confusion.tolist() == confusion.tolist()
    held_against(result.loss, loss, cases=31)
    held_against([result.top1, result.confusion], [top1, confusion], cases=0)
    assert result.class_guesses == confusion.sum(0).tolist()
    (mean,) = reconstruction.mean_losses(  # by hand it was counted in float64
        [other.train()],
        zip(images.double().split(size), labels.split(size)),
        amp="off",
        loss=labels_module.cross_entropy,
        processes=ALONE,
        stop=StopRequest(),
    )
    assert isinstance(chosen, list) or not other.training and mean.loss == pytest.approx(loss)


@pytest.mark.parametrize("most", [CLASSES, CLASSES - 1])
def test_processes_add_their_counts_and_a_matrix_has_a_bound(most, monkeypatch):
    """As if a second process had the same images."""
    monkeypatch.setattr(labels_module, "MOST_PAIRED", most)
    images, labels = torch.randn(31, 3, 8, 8), torch.randint(CLASSES, (31,))
    confusion = counted_by_hand(small_model(), images, labels.tolist(), range(CLASSES))[-1]
    monkeypatch.setattr(Processes, "sum", lambda self, values: values.mul_(2))
    (result,) = evaluate(
        [small_model()],
        [(images, labels)],
        amp="off",
        num_classes=CLASSES,
        processes=ALONE,
        stop=StopRequest(),
    )
    assert (None if result.confusion is None else result.confusion.tolist()) == (
        (2 * confusion).tolist() if most == CLASSES else None
    )
    assert result.class_guesses == (2 * confusion.sum(0)).tolist() and result.images == 62


def test_it_trains_in_training_mode_whatever_mode_the_model_was_in():
    """Otherwise BatchNorm would train with statistics that never change."""
    model = small_model("convmixer_256_8").eval()
    before = {name: value.clone() for name, value in model.named_buffers()}
    train(fresh(model), batches()[:1], size=4)
    assert before and not any(torch.equal(now, before[name]) for name, now in model.named_buffers())
