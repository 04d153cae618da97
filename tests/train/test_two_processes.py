"""Two processes under DistributedDataParallel: their steps equal those of a single process, and a
step that one of them cannot finish is abandoned by both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import vitinit
from vitinit.data.mix import smooth_one_hot
from vitinit.data.pipeline import Prepared, TrainingStep
from vitinit.data.sampler import BatchPlan
from vitinit.messages import OneLineError
from vitinit.train import distributed
from vitinit.train.distributed import Processes
from vitinit.train.ema import Ema
from vitinit.train.engine import train_epoch
from vitinit.train.interruption import Interrupted, StopRequest
from vitinit.train.metrics import Progress
from vitinit.train.optim import muon
from vitinit.train.state import TrainState

GLOBAL_BATCH, STEPS, CLASSES, ACCUMULATION = 12, 3, 7, 3
MODELS = {"vit_tiny": dict(patch_size=4, num_heads=3),
          "convmixer_256_8": dict(patch_size=2, kernel_size=3)}
ALONE = Processes(0, 0, 1, torch.device("cpu"))


def fresh(name: str) -> TrainState:
    model = vitinit.build_model(name, num_classes=CLASSES, image_size=8, embed_dim=12, depth=2,
                                **MODELS[name])
    vitinit.init_weights(model, "torch", generator=torch.Generator().manual_seed(0))
    optimizer = muon(model, factor=1.3, momentum=0.9, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-4)
    return TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False),
                      Ema(model, decay=0.8, warmup=True), Progress())


class Trouble(StopRequest):
    """Broken data, or a signal, at one micro-batch of one step; by default never."""

    def __init__(self, *, step: int = -1, micro_step: int = 0, signalled: bool = False) -> None:
        super().__init__()
        self.place, self.signalled = (step, micro_step), signalled

    def meet(self, step: int, micro_step: int) -> None:
        if (step, micro_step) != self.place:
            return
        if not self.signalled:
            raise OneLineError("image 7")
        self.number = 15
        raise Interrupted(15)


def steps(processes: Processes, count: int, trouble: Trouble) -> Iterator[TrainingStep]:
    plan = BatchPlan(GLOBAL_BATCH, processes.world_size,
                     GLOBAL_BATCH // processes.world_size // ACCUMULATION, group=1)
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        images = torch.randn(GLOBAL_BATCH, 3, 8, 8, generator=generator)
        targets = smooth_one_hot(torch.randint(CLASSES, (GLOBAL_BATCH,), generator=generator),
                                 CLASSES, 0.1)

        def prepared(number=number, images=images, targets=targets):
            for micro_step in range(ACCUMULATION):
                trouble.meet(number, micro_step)
                positions = plan.positions(processes.rank, micro_step)
                yield Prepared(number, images[positions], targets[positions], positions)
        yield TrainingStep(number, plan, prepared())


def trained(processes: Processes, name: str, count: int = STEPS,
            trouble: Trouble | None = None) -> tuple[TrainState, str]:
    """The state after `count` steps, and why they ended early, or ""."""
    state, trouble = fresh(name), trouble or Trouble()
    forward = state.model
    if processes.world_size > 1:
        forward = DistributedDataParallel(state.model, gradient_as_bucket_view=True)
    try:
        for _ in train_epoch(state, forward, steps(processes, count, trouble), amp="off",
                             lr_at=lambda step: 1e-2, drop_path_at=lambda step: None, clip_norm=0.5,
                             every_steps=0, processes=processes, stop=trouble):
            pass
    except (OneLineError, Interrupted) as error:
        return state, str(error)
    return state, ""


def tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """The tensors of the model, its moving average and the optimiser."""
    moments = {f"{number}.{name}": value
               for number, values in state.optimizer.state_dict()["state"].items()
               for name, value in values.items()}
    average = {f"average {name}": value for name, value in state.ema.model.state_dict().items()}
    return state.model.state_dict() | average | moments


def weights_of_each(processes: Processes) -> dict[str, dict[str, torch.Tensor]]:
    return {name: trained(processes, name)[0].model.state_dict() for name in MODELS}


def test_two_processes_train_as_one(in_two_processes):
    first, second = in_two_processes(weights_of_each)
    for name in MODELS:
        weights = {key for key, _ in fresh(name).model.named_parameters()}
        assert all(torch.equal(first[name][key], second[name][key]) for key in weights)
        before = fresh(name).model.state_dict()
        assert all(not torch.equal(first[name][key], before[key]) for key in weights)
    # Without BatchNorm it does not matter which process trains on which image.
    alone = trained(ALONE, "vit_tiny")[0].model.state_dict()
    for key, value in alone.items():
        torch.testing.assert_close(first["vit_tiny"][key], value, rtol=0, atol=1e-5)


# Within the second step, in whose first forward pass DistributedDataParallel exchanges the order of
# gradients, and within the third.
TROUBLES = [(name, rank, dict(step=step, micro_step=micro_step, signalled=signalled))
            for name in MODELS for rank, step, micro_step, signalled in
            [(0, 1, 0, False), (1, 1, 0, True), (1, 1, 1, False), (0, 1, 2, True), (1, 2, 2, False),
             (0, 2, 1, True)]]


def abandoned(processes: Processes) -> list[tuple[str, int, list[str], int]]:
    """Per trouble: why this process stopped, its steps, changed tensors, and gradients left over."""
    found = []
    for name, rank, trouble in TROUBLES:
        state, why = trained(processes, name, STEPS,
                             Trouble(**trouble) if processes.rank == rank else None)
        expected, _ = trained(processes, name, trouble["step"])
        before = tensors(expected)
        other = [key for key, value in tensors(state).items() if not torch.equal(value, before[key])]
        gradients = sum(parameter.grad is not None for parameter in state.model.parameters())
        found.append((why, state.progress.step, other, gradients))
    return found


def test_a_step_that_one_process_cannot_end_is_abandoned_by_both(in_two_processes):
    for found in in_two_processes(abandoned):
        for (_, _, trouble), (why, step, other, gradients) in zip(TROUBLES, found, strict=True):
            assert why == ("stopped by SIGTERM" if trouble["signalled"] else "image 7"), trouble
            assert (step, other, gradients) == (trouble["step"], [], 0), trouble


def threads_left(processes: Processes) -> list[str]:
    """The names of this process's threads after it was stopped and has left the process group."""
    trained(processes, "vit_tiny", STEPS, Trouble(step=1, signalled=processes.rank == 0))
    distributed.stop()
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def test_no_thread_of_the_process_group_outlives_it(in_two_processes):
    """Beside one, Python would abort at its end now and then."""
    for names in in_two_processes(threads_left):
        assert names and not [name for name in names if "gloo" in name]
