"""A run whose one part is slowed down says which, and what it advises would be enough."""

import math
import time

import pytest
import torch

from vitinit.data import loader
from vitinit.train import loop
from vitinit.train.metrics import Pace
from vitinit.watch import slowness
from vitinit.watch.slowness import bound_of, waits_for

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Sets the cores of a machine, whose process computes in two threads."""

    def set_cores(number: int) -> None:
        monkeypatch.setattr(slowness, "cores", lambda: number)

    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    set_cores(64)
    return set_cores


def paces_of(*loaders: float, alone: float = 0.5, images: int = 30, workers: int = 1) -> list[Pace]:
    """Of processes whose workers each load so many images/s: the slowest holds all of them."""
    own = [images / workers / rate for rate in loaders]  # seconds per step
    step = max(alone, *own)
    return [Pace(step, alone, (step - alone) / step, (seconds - alone) / step) for seconds in own]


@pytest.mark.parametrize("workers, rate", [(1, 50.0), (2, 7.0), (5, 10.5), (8, 7.5)])
def test_as_many_workers_as_it_advises_and_no_fewer_are_enough(workers, rate, machine):
    def line(workers: int) -> str:
        return waits_for(paces_of(rate, workers=workers), CPU, images=30, workers=workers)

    enough = math.ceil(60 / rate)  # a step alone takes 60 images/s
    if workers >= enough:
        assert line(workers) == ""
        return
    assert line(workers).endswith(f"data.workers={enough} would feed it")
    assert f"images: a step takes 60/s, a worker loads {rate:,.0f}/s; " in line(workers)
    assert line(enough) == ""
    machine(enough + 2)  # of which two compute
    assert line(workers).endswith(f"data.workers={enough} would feed it")
    machine(enough + 1)
    assert f"data.workers={enough} needs more than {enough + 1} cores" in line(workers)


def test_the_process_that_is_waited_for_is_named():
    def line(paces: list[Pace]) -> str:
        return waits_for(paces, CPU, images=12_345, workers=1)

    slow = line(paces_of(10_000, 10_000, 1_000, images=12_345, alone=0.01))
    assert "for images of process 2: " in slow and len(f"warning {slow}") <= 200
    assert "for images: " in line(paces_of(1_000, 1_100, images=12_345))
    busy = [Pace(1.0, 0.95, 0.3, 0.0), Pace(1.0, 0.95, 0.01, 0.0), Pace(1.0, 0.95, 0.4, 0.05)]
    assert line(busy) == "waiting 35 % of the time for process 1, whose steps are slower"
    # The host waits for images while its GPU is at work, which thus waits for nothing.
    assert line([Pace(0.26, 0.25, 0.8, 0.8)]) == line([Pace(0.26, 0.25, 0.8, 0.8)] * 3) == ""
    assert line([Pace(1.0, 0.95, 0.05, 0.05)]) == ""


def test_a_run_says_once_what_it_waits_for(
    train_program, small_run, tmp_path, monkeypatch, capsys, machine
):
    """By a clock that only loading a micro-batch (1.5 s) and a step (0.5 s) move on."""

    def taking(seconds, function):
        def taking_seconds(*arguments, **keywords):
            now[0] += seconds
            return function(*arguments, **keywords)

        return taking_seconds

    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(loop, "update_weights", taking(0.5, loop.update_weights))
    monkeypatch.setattr(
        loader.TrainViews, "__getitem__", taking(1.5, loader.TrainViews.__getitem__)
    )
    machine(9)
    assert (
        train_program.main(
            small_run(
                tmp_path / "run",
                optim__global_batch="2",
                optim__max_batch_per_process="2",
                mix__group="2",
                schedule__epochs="2",
                eval__every_epochs="2",
                optim__name="adamw",
            )
        )
        == 0
    )
    assert capsys.readouterr().err == (
        "warning waiting 75 % of the time for images: a step takes 4/s, a worker loads 1/s; "
        "data.workers=3 would feed it\n"
    )


def test_a_step_is_bound_by_launches_matrix_products_or_memory():
    assert [
        bound_of(launches=launches, products=products)
        for launches, products in ((0.7, 0.6), (0.3, 0.6), (0.3, 0.4))
    ] == ["launches", "matrix products", "memory"]
