"""Variants of a step: compiled at once, each in a process of its own, and measured in turn.

To compile takes most of the time of a measurement, and a GPU is idle meanwhile. Ten variants were
ready in the time of two, and none runs while another one is measured.
"""

import math
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import torch

from ...runs.model import without_data
from ...train.device import forget_peak, matrix_rate, peak_gib
from ..shared.steps import clock_of, measured_recipe
from .step import engine_of, step_seconds
from .training import ResultRow

ROUNDS = 2
PATIENCE = 75.0  # seconds until all of a wave are ready, and those that are not are left out
SHARE = 0.9  # of a GPU's memory
MASKED = (
    "task.name=reconstruct",
    "mix.probability=0",
    "mix.label_smoothing=0",
    "checkpoint.best_by=val_loss",
)

LARGE = (  # ViT-L
    "model.name=vit_large",
    "model.options={patch_size = 16, drop_path = 0.1}",
)


class Variant(NamedTuple):
    recipe: str
    batch: int
    gib: float  # of a GPU, at most, while it compiles
    sets: tuple[str, ...] = ()
    goal: float | None = None  # images/s on an H100


# In the order of what they may tell. Each is beside those before it.
VARIANTS = (
    Variant("deit_small", 256, 10.0, goal=10_000.0),
    Variant("deit_base", 256, 19.0, goal=3_760.0),  # 40 % of its rate
    Variant("deit_base", 512, 36.0),
    Variant("deit_base", 256, 7.0, ("engine.recompute=true",)),
    Variant("deit_base", 64, 22.0, LARGE),
    Variant("deit_small", 256, 11.0, ("model.options.pos_embed=rope",)),
    Variant("deit_small", 256, 10.0, ("optim.name=muon",)),
    Variant("deit_base", 256, 15.0, MASKED),
)


def waves(variants: Sequence[Variant], device: torch.device) -> list[list[Variant]]:
    """The variants in order, as many at once as fit on the device together."""
    room = math.inf
    if device.type == "cuda":
        room = SHARE * torch.cuda.get_device_properties(device).total_memory / 2**30
    parts: list[list[Variant]] = []
    for variant in variants:
        if not parts or sum(other.gib for other in parts[-1]) + variant.gib > room:
            parts.append([])
        parts[-1].append(variant)
    return parts


def variant_rows(
    variants: Sequence[Variant], device: torch.device, sets: Sequence[str]
) -> list[ResultRow]:
    """Images/s of each variant with further overrides; of one that failed, or took too long, why."""
    context = multiprocessing.get_context("spawn")  # CUDA cannot be forked
    pipes: list[Connection] = []
    processes = []
    for variant in variants:
        ours, theirs = context.Pipe()
        arguments = theirs, variant, device, sets
        process = context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        processes.append(process)
        theirs.close()  # so that there is an end of what a process says that was killed
        pipes.append(ours)
    deadline = time.monotonic() + PATIENCE
    facts = [answer(pipe, deadline - time.monotonic()) for pipe in pipes]
    for process, fact in zip(processes, facts):
        if "failed" in fact:
            process.kill()  # it would go on compiling, and trying kernels
    seconds: list[list[float]] = [[] for _ in variants]
    for _ in range(ROUNDS):
        for pipe, fact, found in zip(pipes, facts, seconds):
            if "failed" not in fact:
                pipe.send("turn")
                said = answer(pipe, PATIENCE)
                fact |= said
                found += said.get("seconds", [])
    for process in processes:
        process.kill()
        process.join()  # the memory that it has on the device is for the next wave
    return [row_of(*measured) for measured in zip(variants, facts, seconds)]


def row_of(variant: Variant, fact: dict[str, Any], seconds: list[float]) -> ResultRow:
    row: ResultRow = {
        "recipe": variant.recipe,
        "with": " ".join(variant.sets) or None,
        "batch": variant.batch,
        "failed": fact.get("failed"),
    }
    if seconds:
        rate = variant.batch / median(seconds)
        card = fact["card"]
        row |= {
            "images/s": rate,
            "÷ goal for an H100": rate / variant.goal if variant.goal else None,
            "ms": 1e3 * median(seconds),
            "% of the card's rate": 100 * rate * fact["flops"] / 1e12 / card if card else None,
            "peak GiB": fact["peak"],
            "s to compile": fact["compiled"],
        }
    return row


def answer(pipe: Connection, seconds: float) -> dict[str, Any]:
    """What a process says within some seconds, or that it failed."""
    if not pipe.poll(max(0.0, seconds)):
        return {"failed": "not ready in time"}
    try:
        return pipe.recv()
    except EOFError:
        return {"failed": "its process ended"}


def serve(pipe: Connection, variant: Variant, device: torch.device, sets: Sequence[str]) -> None:
    """Compile a step, say so, then make STEPS steps whenever the pipe asks, and say how long."""
    try:
        torch.set_num_threads(1)
        began, clock = time.monotonic(), clock_of(device)
        recipe = without_data(measured_recipe(variant.recipe, [*variant.sets, *sets], device))
        engine = engine_of(recipe, device, variant.batch)
        if device.type == "cuda":
            forget_peak(device)
        engine.run()
        pipe.send(
            {
                "compiled": time.monotonic() - began,
                "peak": peak_gib(device),
                "flops": engine.flops,
                "card": matrix_rate(device),
            }
        )
        while True:
            if device.type == "cuda":
                torch.cuda.empty_cache()  # all of them are on the device
            pipe.recv()
            pipe.send({"seconds": [step_seconds(engine, clock, device)]})
    except EOFError:  # nobody asks any more
        return
    except Exception as error:
        pipe.send({"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]})
