"""Training steps and evaluation on fake CUDA tensors: what they ask of a GPU, tested without one.

FakeTensorMode computes only shapes and devices. An operation between two devices, a value read on
the host (`.item()`) and a shape that depends on values therefore raise an error. Two things it does
not do: its backward pass needs a driver, so that gradients are set by hand instead; and it permits
`.cpu()`, so that copies to the host are counted.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from deit import OnHost
from launches import Launches, launches_of
from optimisers import OPTIMISERS, state_of
from small_models import SMALL
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
    unset_fake_temporarily,
)

from vitinit import models
from vitinit.data.augment import IMAGENET_MEAN, IMAGENET_STD, ToDevice, TrainToDevice
from vitinit.data.draw import Augmentation, SampleKey, Samples
from vitinit.data.loader import Batch, EvalViews
from vitinit.data.pipeline import EvaluationBatches, TrainingBatches
from vitinit.data.sampler import BatchPlan, TrainSampler
from vitinit.data.sources import ImagesInMemory
from vitinit.models.layers import draw_drop_path
from vitinit.programs.shared.steps import given_step
from vitinit.recipe.files import RECIPES, load_recipe
from vitinit.tasks.labels import cross_entropy, evaluate
from vitinit.train import loop
from vitinit.train.distributed import Processes
from vitinit.train.interruption import StopRequest
from vitinit.train.loop import Keeper, Training, train_epochs
from vitinit.train.meter import StepMeter
from vitinit.train.optim import hidden_matrices
from vitinit.train.state import Ema, TrainState

DEIT = load_recipe(RECIPES / "deit_base.toml")
CUDA, SIZE, CLASSES = torch.device("cuda", 0), 16, 7
BATCH, ACCUMULATION, STEPS = 6, 2, 2
ALONE = Processes(rank=0, local_rank=0, world_size=1, device=CUDA)
AS_INPUT = dict(mean=IMAGENET_MEAN, std=IMAGENET_STD, channels_last=True)
AUGMENTATION = Augmentation(0, (SIZE, SIZE), DEIT.augment, DEIT.rand_augment, DEIT.mix)


@pytest.fixture
def as_if_there_were_a_gpu(monkeypatch) -> None:
    # autocast and GradScaler would switch themselves off.
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(
        torch.amp.grad_scaler, "amp_definitely_not_available", lambda: False, raising=False
    )
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *arguments, **options: True)
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())


def build(name: str, device: torch.device) -> nn.Module:
    # Not by build_model, which first builds the model on the meta device to find its size; under
    # FakeTensorMode torch 2.11 would build a real one there.
    family, sizes = models.MODELS[name]
    kind = models.model_class(family)
    with device:  # modules of fake tensors cannot be moved
        return kind(num_classes=CLASSES, image_size=SIZE, **sizes | SMALL[name])


def fresh_state(
    name: str, amp: str, device: torch.device = CUDA, *, optimiser: str = "adamw"
) -> TrainState:
    model, other = build(name, device), build(name, device)
    model.__deepcopy__ = lambda memo: other  # nor copied, as a moving average needs
    return state_of(
        model,
        OPTIMISERS[optimiser](model),
        ema=Ema(model, decay=0.9, warmup=True),
        scaler=torch.amp.GradScaler(device.type, enabled=amp == "fp16"),
    )


def loaded(augmentation: Augmentation = AUGMENTATION) -> Iterator[Batch]:
    """Batches as a loader yields them: images and labels on the host, and all random draws."""
    for step in itertools.count():
        with unset_fake_temporarily():  # the host reads the draws
            drawn = OnHost(
                augmentation.draws(
                    Samples(
                        step, [SampleKey(step, image) for image in range(BATCH)], np.zeros(BATCH)
                    )
                )
            )
        yield Batch(
            torch.zeros(BATCH, 3, SIZE, SIZE, dtype=torch.uint8),
            torch.zeros(BATCH, dtype=torch.int64),
            drawn,
        )


def training_batches() -> TrainingBatches:
    prepare = TrainToDevice(CUDA, AUGMENTATION, **AS_INPUT, num_classes=CLASSES)
    plan = BatchPlan(BATCH * ACCUMULATION, 1, BATCH, group=BATCH)
    count = STEPS * plan.global_batch
    sampler = TrainSampler(count, plan, rank=0, seed=0, repeats=1)
    source = ImagesInMemory(torch.empty(count, 3, 1, 1), np.zeros(count, np.int64), ["one"])
    batches = TrainingBatches(source, sampler, prepare)
    batches.loader = loaded()
    return batches


@pytest.fixture
def read(monkeypatch) -> list[tuple[int, int]]:
    """`check_finite`, which waits for the device, replaced by counts of losses and of skip flags."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(
        loop,
        "check_finite",
        lambda state, processes: found.append(
            (len(state.progress.losses), len(state.progress.skipped))
        ),
    )
    return found


def train(
    state: TrainState, steps: Iterable, amp: str, clip_norm: float, device: torch.device
) -> None:
    def drop_path_at(step: int) -> Tensor | None:
        rates = state.model.drop_path_rates
        rng = np.random.default_rng(step)
        return draw_drop_path(rates, BATCH * ACCUMULATION, rng) if any(rates) else None

    processes, epochs = Processes(0, 0, 1, device), state.progress.epochs + 1
    training = Training(
        state=state,
        forward=state.model,
        steps=lambda epoch, done: steps,
        loss=cross_entropy,
        learning_rate=lambda step: 1e-3,
        drop_path=drop_path_at,
        processes=processes,
        stop=StopRequest(),
        epochs=epochs,
        amp=amp,
        clip_norm=clip_norm,
    )
    meter = StepMeter(state.progress, processes, epochs=epochs, steps_per_epoch=0, global_batch=12)
    train_epochs(training, Keeper(), meter)


@pytest.mark.parametrize(
    "name, amp, clip_norm, optimiser",
    [
        ("vit_tiny", "fp16", 1.0, "adamw"),
        ("vit_tiny", "fp16", 0.0, "muon"),
        ("swin_tiny", "bf16", 1.0, "muon"),
        ("vit_tiny", "fp16", 0.0, "lamb"),
        ("swin_tiny", "fp16", 1.0, "lamb"),
        ("mixer_s16", "bf16", 1.0, "adamw"),
        ("convmixer_256_8", "fp16", 0.0, "adamw"),
        ("simple_vit", "off", 0.0, "adamw"),
    ],
)
def test_a_step_mixes_up_no_device_and_waits_for_nothing(
    as_if_there_were_a_gpu, read, monkeypatch, name, amp, clip_norm, optimiser
):
    """From the loader's batches to the moving average. Reading the losses waits, but only every
    tenth step does that."""
    backward_passes = []
    with FakeTensorMode():
        state = fresh_state(name, amp, optimiser=optimiser)

        def backward(loss: Tensor) -> None:
            assert loss.device == CUDA and loss.shape == ()
            backward_passes.append(loss)
            for parameter in state.model.parameters():
                parameter.grad = torch.zeros_like(parameter)

        monkeypatch.setattr(Tensor, "backward", backward)
        steps = training_batches().steps(0)
        with Launches() as launches:
            train(state, steps, amp, clip_norm, CUDA)
    assert len(backward_passes) == STEPS * ACCUMULATION
    assert read == [(STEPS, STEPS if amp == "fp16" else 0)]  # at the end of the epoch
    assert launches.uploads > 0 and (launches.downloads, launches.waits) == (0, 0)
    tensors = [*state.model.state_dict().values(), *state.ema.model.state_dict().values()]
    moments = [value for values in state.optimizer.state.values() for value in values.values()]
    matrices = len(hidden_matrices(state.model)) if optimiser == "muon" else 0
    assert len(moments) == 3 * len(list(state.model.parameters())) - 2 * matrices
    assert {tensor.device for tensor in [*tensors, *moments]} == {CUDA}


def test_sets_on_the_device_are_cut_there_and_reach_it_once_without_waiting(as_if_there_were_a_gpu):
    with FakeTensorMode():
        images, labels = torch.zeros(BATCH, 3, SIZE, SIZE, dtype=torch.uint8), torch.zeros(BATCH)
        training = training_batches()
        training.stored = images.to(CUDA)
        windows = torch.zeros(BATCH, 4, dtype=torch.int64)
        training.loader = (batch._replace(images=windows) for batch in loaded())
        source = ImagesInMemory(images, np.zeros(BATCH, np.int64), ["one"])
        square = dict(size=(SIZE, SIZE), view=lambda image: image)
        evaluation = EvaluationBatches(
            EvalViews(source, rank=0, world_size=1, **square),
            ToDevice(CUDA, **AS_INPUT),
            batch_size=BATCH,
            workers=0,
            on_device_gib=1.0,
        )
        evaluation.loader = [(images, labels), (images, labels)]

        def train_on_all() -> None:
            for _, micro_batches in training.steps(0):
                for micro_batch in micro_batches:
                    assert micro_batch.prepare()[0].device == CUDA

        first, *passes = (
            launches_of(action) for action in (train_on_all, *[lambda: list(evaluation)] * 2)
        )
    assert first.uploads == 3 * STEPS * ACCUMULATION and first.waits == 0
    assert [(one.uploads, one.waits) for one in passes] == [(4, 0), (0, 0)]


def test_views_in_any_format_are_erased(as_if_there_were_a_gpu):
    """Views of workers are channels-last, and without RandAugment no operation has copied them."""
    drawn = replace(
        AUGMENTATION,
        augment=replace(DEIT.augment, erase_probability=1.0),
        rand_augment=replace(DEIT.rand_augment, layers=0),
    )
    with FakeTensorMode():
        prepare = TrainToDevice(CUDA, drawn, **AS_INPUT, num_classes=CLASSES)
        (batch,) = itertools.islice(loaded(drawn), 1)
        for form in (torch.contiguous_format, torch.channels_last):
            views = batch.images.contiguous(memory_format=form)
            assert prepare(batch._replace(images=views))[0].device == CUDA


@pytest.mark.parametrize("name, amp", [*zip(SMALL, ["fp16", "bf16", "off", "bf16", "fp16"])])
def test_no_backward_pass_waits_for_a_value_either(read, name, amp):
    cpu = torch.device("cpu")
    with FakeTensorMode():
        state = fresh_state(name, amp, cpu)
        part = (torch.zeros(BATCH, 3, SIZE, SIZE), torch.zeros(BATCH, CLASSES))
        seen = []
        for parameter in state.model.parameters():
            parameter.register_hook(lambda gradient: seen.append(gradient.shape))
        train(state, [given_step(0, [part] * ACCUMULATION)], amp, 1.0, cpu)
    assert len(seen) == ACCUMULATION * len(list(state.model.parameters()))


@pytest.mark.parametrize("name, amp", [("vit_tiny", "bf16"), ("convmixer_256_8", "fp16")])
def test_evaluation_waits_only_for_its_result(as_if_there_were_a_gpu, monkeypatch, name, amp):
    seen = []
    with FakeTensorMode():
        model, prepare = build(name, CUDA), ToDevice(CUDA, **AS_INPUT)

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for size in (BATCH, BATCH, BATCH - 1):
                seen.append(size)
                yield prepare(
                    (
                        torch.zeros(size, 3, SIZE, SIZE, dtype=torch.uint8),
                        torch.zeros(size, dtype=torch.int64),
                    )
                )

        counted = []

        def summed(processes: Processes, values: Tensor) -> Tensor:
            counted.append((values.device, values.shape))
            return values

        monkeypatch.setattr(Processes, "sum", summed)
        with Launches() as launches, pytest.raises(DataDependentOutputException):
            evaluate(
                [model, model],
                batches(),
                num_classes=CLASSES,
                amp=amp,
                processes=ALONE,
                stop=StopRequest(),
                columns=torch.arange(CLASSES),
            )
    # Everything was counted on the device before the host read the first number; `columns` alone,
    # once in an evaluation, are no batch.
    assert seen == [BATCH, BATCH, BATCH - 1] and (launches.downloads, launches.waits) == (0, 1)
    assert counted == [
        (CUDA, size)
        for size in [(2, 2), (2, CLASSES), (2, CLASSES), (CLASSES,), *[(CLASSES, CLASSES)] * 2]
    ]
