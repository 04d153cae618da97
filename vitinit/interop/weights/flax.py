"""Weights that Flax has written as arrays of numpy (.npz): Google's ViT, AugReg and Mixer, big_vision.

Flax's layers have inputs before outputs, its images channels last, and its attention an axis for
the heads. What is read here is under Flax's names, with dots, in the shapes of torch's layers;
names.py knows which of our layers they are.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from einops import rearrange

from ...base.values import Table
from ...models.layers import MOST_BLOCKS

# Before the names of a model's weights, where there are an optimiser's, too, or two models.
BEFORE = ("opt/target/", "params/img/", "params/")
SCANNED = "/encoderblock/"  # all blocks in one array, along its first axis
HEADS_INTO = "heads channels outputs -> outputs (heads channels)"
INTO_HEADS = "inputs heads channels -> (heads channels) inputs"
DENSE = "inputs outputs -> outputs inputs"
CONVOLUTION = "rows columns inputs outputs -> outputs inputs rows columns"


def read_npz(path: Path) -> Table:
    """The "model" in a file of arrays, and, of one with attention, its "num_heads".

    Raises errors of numpy and torch, also for arrays of objects, which are pickles.
    """
    with np.load(path, allow_pickle=False) as arrays:
        before = ""
        for start in BEFORE:
            if any(name.startswith(start) for name in arrays.files):
                before = start
                break
        chosen = {
            name.removeprefix(before): arrays[name]
            for name in arrays.files
            if name.startswith(before)
        }
    state: Table = {"model": {}}
    for name, array in _by_block(chosen):
        if name.endswith("/query/kernel"):
            state["num_heads"] = array.shape[1]
        name, array = _as_in_torch(name, array)
        state["model"][name.replace("/", ".")] = torch.from_numpy(np.ascontiguousarray(array))
    return state


def _by_block(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays with those of each block under a name of their own.

    Raises ValueError for more blocks than a model has, for which a few bytes may stand.
    """
    for name, array in arrays.items():
        if SCANNED not in name:
            yield name, array
            continue
        if not array.size or len(array) > MOST_BLOCKS:
            raise ValueError(
                f"{name} is {array.shape}, expected numbers of at most {MOST_BLOCKS} blocks"
            )
        for block, part in enumerate(array):
            yield name.replace(SCANNED, f"/encoderblock_{block}/"), part


def _as_in_torch(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """An array of a layer under the name and in the shape that torch's layer has."""
    layer, _, part = name.rpartition("/")
    if part == "scale":
        return f"{layer}/weight", array
    if part == "bias":
        return name, array.reshape(-1)  # (outputs,) or (heads, channels)
    if part != "kernel":
        return name, array
    into_outputs = HEADS_INTO if layer.endswith("/out") else INTO_HEADS
    shapes = {2: DENSE, 3: into_outputs, 4: CONVOLUTION}
    return f"{layer}/weight", rearrange(array, shapes[array.ndim])
