"""Apple's GPU, which no test has: when it is taken, what is said of it, and what it is given."""

import numpy as np
import torch
from refused import refused
from torch import Tensor

from vitinit.base.messages import OneLineError
from vitinit.data.draw import SampleKey, Samples
from vitinit.data.loader import Batch
from vitinit.recipe.files import load_recipe, overrides
from vitinit.runs.data import augmentation_of
from vitinit.train import device, distributed


def recorded_moves(moved: list[Tensor]):
    """Tensor.to, which keeps in `moved`, and on the CPU, what is to go to Apple's GPU."""
    move = Tensor.to

    def to(tensor: Tensor, *where, **how) -> Tensor:
        if where and where[0] == torch.device("mps"):
            moved.append(tensor)
            return tensor
        return move(tensor, *where, **how)

    return to


def test_apples_gpu_is_taken_where_it_is_asked_for_alone_and_said_to_be_untested(
    monkeypatch, tmp_path
):
    cpu, mps = torch.device("cpu"), torch.device("mps")
    line = "VITINIT_DEVICE={} in the environment; expected cpu, or mps where torch sees Apple's GPU"

    def is_there(answer: bool) -> None:
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: answer)

    is_there(False)
    monkeypatch.delenv("VITINIT_DEVICE", raising=False)
    assert device.this_device() == cpu and device.on_apples_gpu(cpu) == []
    monkeypatch.setenv("VITINIT_DEVICE", "mps")
    assert refused(OneLineError, device.this_device) == line.format("mps")
    is_there(True)
    assert device.this_device() == mps and distributed.start().device == mps
    [taken] = device.on_apples_gpu(mps)
    assert taken.startswith("Apple's GPU is taken") and taken.endswith("untested")
    (tmp_path / "cpuinfo").write_text("flags : amx_bf16\n")
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "cpuinfo")
    assert device.automatic_values(mps) == {"engine.amp": "off", "optim.muon_dtype": "float32"}
    monkeypatch.setenv("VITINIT_DEVICE", "gpu")
    assert refused(OneLineError, device.this_device) == line.format("gpu")
    monkeypatch.delenv("VITINIT_DEVICE")
    assert device.this_device() == cpu
    assert device.on_apples_gpu(cpu) == [
        "Apple's GPU is there, and the CPU is taken: VITINIT_DEVICE=mps takes it, untested"
    ]


def test_batches_for_apples_gpu_which_has_no_float64_are_prepared_on_the_cpu(monkeypatch):
    moved = []
    monkeypatch.setattr(Tensor, "to", recorded_moves(moved))
    recipe = load_recipe("quickstart", overrides(sets=["rand_augment.layers=1"]))
    prepare = augmentation_of(recipe, 10, torch.device("mps"))
    draws = prepare.augmentation.draws(Samples(0, [SampleKey(0, 1)] * 2, np.zeros(2)))
    images, targets = prepare(
        Batch(torch.ones(2, 3, 32, 32, dtype=torch.uint8), torch.ones(2, dtype=torch.int64), draws)
    )
    assert [(tensor is images, tensor.dtype) for tensor in moved] == [
        (True, torch.float32),
        (False, torch.float32),
    ]
    assert moved[1] is targets and device.dtype_of_sums(torch.device("mps")) == torch.float32
    assert device.dtype_of_sums(torch.device("cpu")) == torch.float64
