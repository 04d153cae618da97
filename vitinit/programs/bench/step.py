"""A training step's speed, beside a bare loop and the device's matrix rate, and its memory."""

import gc
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...interop.weights.libraries import counterpart
from ...models import MODELS
from ...models.layers import Classifier, draw_drop_path, recompute_blocks
from ...models.masked_autoencoder import MaskedAutoencoder
from ...recipe.files import building
from ...recipe.sections import Recipe
from ...runs.model import build, compiled, task_of, trained_model, without_data
from ...runs.teacher import learn_from_teacher
from ...tasks.reconstruction import reconstruction
from ...train.device import forget_peak, matrix_rate, peak_gib
from ...train.loop import AMP_DTYPES, autocast
from ...train.metrics import training_flops
from ...train.optim import hidden_matrices
from ...watch.slowness import BOUNDS, bound_of
from ..shared.steps import Part, clock_of, given_step, set_up, train_on
from .training import ResultRow, interleave, row_table, times_as_fast

STEPS = {"cuda": 30, "cpu": 1}  # of each measurement
SIDES = {"cuda": 8192, "cpu": 1024}  # of a large product's matrices
GIB, MIB = 2**30, 2**20
FLOAT_BYTES = 4  # of a weight, a gradient and a moment: they are float32
SHARE = 0.5  # of the GPU's memory; augmentation, kernels and gaps need the rest


def step_row(recipe: Recipe, device: torch.device, batch: int) -> ResultRow:
    """A training step of the recipe on synthetic images, with a batch that fits on the device.

    The step is train.py's. It is compared with a bare loop (forward, cross-entropy, backward, fused
    AdamW) over torchvision's model if it has this one, else over the same model (over the encoder
    alone, as a classifier, if it is to reconstruct images), and with large matrix products in the
    recipe's precision.
    batch: images per step, halved for as long as they do not fit.
    """
    recipe = without_data(recipe)
    while True:
        gc.collect()  # frees what an earlier measurement left
        try:
            return measure(recipe, device, batch)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        batch //= 2  # not inside `except`, where the exception still holds tensors
        torch.cuda.empty_cache()


def print_step(recipe: Recipe, device: torch.device, batch: int) -> None:
    """Measure a step, and print what bounds it."""
    row = step_row(recipe, device, batch)
    bound = row["bound by"]
    # What helps was measured on a GPU, and eager. On a CPU compilation gained nothing.
    if device.type == "cuda" and not recipe.engine.compile:
        bound += f": {BOUNDS[bound]}"
    print(f"\n{row_table([row])}\n\n{recipe.name}: a step is bound by {bound}", flush=True)


class Engine(NamedTuple):
    """train.py's step of a recipe, ready to be made on a batch of noise."""

    run: Callable[..., None]  # makes STEPS steps, of `batch` images or fewer
    model: Classifier | MaskedAutoencoder
    forward: nn.Module  # the model as it is trained, perhaps compiled
    labelled: Part  # images, and one-hot labels even if they are not learned
    flops: float  # of an image


def engine_of(recipe: Recipe, device: torch.device, batch: int) -> Engine:
    state, forward = set_up(recipe, device)
    model = state.model
    assert isinstance(model, (Classifier, MaskedAutoencoder))  # the recipe's
    labelled = synthetic_batch(recipe, batch, device)
    rates = model.drop_path_rates
    drop_path = draw_drop_path(rates, batch, np.random.default_rng(0)) if any(rates) else None
    task = task_of(recipe)
    if recipe.distill.teacher:
        task = learn_from_teacher(recipe, [*map(str, range(recipe.data.num_classes))], device)
    images, targets = labelled
    if isinstance(model, MaskedAutoencoder):
        targets = first_patches(model, images)

    def run(size: int = batch) -> None:
        part = images[:size], targets[:size]
        train_on(
            state,
            [given_step(number, [part]) for number in range(STEPS[device.type])],
            forward=forward,
            drop_path=drop_path,
            amp=recipe.engine.amp,
            clip_norm=recipe.optim.clip_norm,
            loss=task.loss,
        )

    flops = training_flops(model, batch, recipe.data.image_size, recipe.data.channels)
    return Engine(run, model, forward, labelled, flops)


def step_seconds(engine: Engine, clock: Callable[[], float], device: torch.device) -> float:
    """The seconds of a step on a clock, by STEPS of them after as many that do not count."""
    engine.run()
    began = clock()
    engine.run()
    return (clock() - began) / STEPS[device.type]


def measure(recipe: Recipe, device: torch.device, batch: int) -> ResultRow:
    clock, amp, count = clock_of(device), recipe.engine.amp, STEPS[device.type]
    engine, model, forward, labelled, flops = engine_of(recipe, device, batch)
    compiles = recipe.engine.compile
    engine()
    if device.type == "cuda":
        forget_peak(device)
        engine()
    # Before there is a second model; a CPU's is that of all that its process has done.
    peak = peak_gib(device) if device.type == "cuda" else None
    other, whose = bare_model(recipe, model, device)
    if other is model:
        callee = forward
    else:
        callee = compiled(other, recipe.engine)
    multiply, product_flops = product(device, amp)
    few = max(1, batch // 8)  # images, whose step takes as many launches
    loops = {
        "engine": engine,
        "bare": bare_loop(other, callee, labelled, amp, count),
        "product": multiply,
    }
    if not compiles:  # would compile again, for another size
        loops["few"] = lambda: engine(few)

    seconds = interleave(loops, clock)
    second = median(seconds["engine"]) / count
    flops *= batch / second
    best, card = product_flops / median(seconds["product"]), matrix_rate(device)
    launches = None
    if batch > few and "few" in seconds:
        # A step of n images takes a + b·n. The share a / second, to which no image adds, is
        # launches.
        by_few = batch * median(seconds["few"]) / count - few * second
        launches = by_few / (batch - few) / second
    return {
        "recipe": recipe.name,
        "way": f"amp {amp}, {'compiled' if compiles else 'eager'}",
        "batch": batch,
        "images/s": batch / second,
        "ms": 1e3 * second,
        "peak GiB": peak,
        "beside a bare loop over": whose,
        "× as fast": times_as_fast(seconds["engine"], seconds["bare"]),
        "TFLOP/s": flops / 1e12,
        "% of large products": 100 * flops / best,
        "% not for images": None if launches is None else 100 * launches,
        "bound by": bound_of(launches=launches or 0.0, products=flops / best),
        "% of the card's rate": 100 * flops / 1e12 / card if card else None,
    }


def bare_model(recipe: Recipe, model: nn.Module, device: torch.device) -> tuple[nn.Module, str]:
    """The model that a bare loop trains, torchvision's if it has one like it, and whose it is."""
    try:
        name, arguments, _ = counterpart(
            "torchvision",
            MODELS[recipe.model.name][0],
            image_size=recipe.data.image_size,
            **recipe.model.options,
        )
    except ValueError:  # torchvision has no such model
        if isinstance(model, MaskedAutoencoder):
            return build(recipe).to(device), "its encoder, learning classes"
        return model, "the same model"
    kind = name.rpartition(".")[2]
    theirs = getattr(torchvision.models, kind)(**arguments, num_classes=recipe.data.num_classes)
    return theirs.to(device), f"torchvision's {kind}"


def synthetic_batch(recipe: Recipe, batch: int, device: torch.device) -> Part:
    """Noise images in the recipe's memory format, and one-hot targets."""
    classes = recipe.data.num_classes
    images = torch.randn(batch, recipe.data.channels, *recipe.data.image_size, device=device)
    if recipe.engine.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, torch.eye(classes, device=device)[torch.arange(batch, device=device) % classes]


def first_patches(model: MaskedAutoencoder, images: Tensor) -> Tensor:
    """As many patches of each image as the model sees, from the first on: (B, n) int64."""
    return torch.arange(model.visible, device=images.device).expand(len(images), -1)


def bare_loop(
    model: nn.Module, forward: Callable[[Tensor], Tensor], part: Part, amp: str, steps: int
) -> Callable[[], None]:
    """A function that makes `steps` steps in the training loop that one would write first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=True)
    images, targets = part

    def run() -> None:
        model.train()
        for _ in range(steps):
            with autocast(images.device, amp):
                loss = F.cross_entropy(forward(images).float(), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def product(device: torch.device, amp: str) -> tuple[Callable[[], None], float]:
    """A function that multiplies large matrices in a precision, and how many operations it does."""
    side, repeats = SIDES[device.type], 10
    matrix = torch.randn(side, side, device=device, dtype=AMP_DTYPES[amp])

    def multiply() -> None:
        for _ in range(repeats):
            matrix @ matrix

    return multiply, repeats * 2 * side**3


def saved_bytes(model: Classifier | MaskedAutoencoder, images: Tensor, amp: str) -> int:
    """Bytes of storages that a forward pass on (B, 3, H, W) saves for backward, but the model's."""

    def storage(tensor: Tensor) -> int:  # fake tensors have one, but no address
        return tensor.untyped_storage()._cdata

    stored = set(map(storage, (*model.parameters(), *model.buffers())))
    saved = {}  # keeps tensors alive, so that ids stay unique

    def save(tensor: Tensor) -> Tensor:
        if storage(tensor) not in stored:
            saved[storage(tensor)] = tensor
        return tensor

    drop_path = []
    if any(model.drop_path_rates):
        drop_path.append(torch.ones(len(model.drop_path_rates), len(images)))
    with (
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
        autocast(images.device, amp),
    ):
        if isinstance(model, MaskedAutoencoder):
            reconstruction(model, images, drop_path, first_patches(model, images))
        else:
            logits = model(images, *drop_path).float()
            F.cross_entropy(logits, torch.zeros_like(logits))
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def numbers_kept(model: nn.Module, recipe: Recipe) -> tuple[int, int]:
    """How many numbers a run keeps of a model: weights, with their average if there is one, and the
    optimiser's moments, of a Muon's matrix one for each weight, of all others two.
    """
    matrices = hidden_matrices(model) if recipe.optim.name == "muon" else ()
    weights = moments = 0
    for name, parameter in model.named_parameters():
        weights += parameter.numel() * (1 + (recipe.ema.decay > 0.0))
        moments += parameter.numel() * (1 if name in matrices else 2)
    return weights, moments


def memory_row(recipe: Recipe, card_gib: float) -> ResultRow:
    """How many images per micro-batch of a recipe fit into a share of `card_gib` GiB.

    Memory is counted with fake tensors, so nothing is computed; which tensors are saved is decided
    by the operations that PyTorch uses on a CPU.
    """
    with building(f"recipe {recipe.name}", "model"), FakeTensorMode():
        recipe = without_data(recipe)
        model = trained_model(task_of(recipe), build(recipe), recipe).train()
        assert isinstance(model, (Classifier, MaskedAutoencoder))
        # In bf16 `attend` calls no fused kernel on a CPU; fp16 has as many bytes.
        amp = recipe.engine.amp.replace("bf16", "fp16")
        shape = recipe.data.channels, *recipe.data.image_size
        two, four = (saved_bytes(model, torch.zeros(count, *shape), amp) for count in (2, 4))
        block = 0  # of an image, for the block that is computed again
        if recipe.engine.recompute:
            whole = four - two
            blocks = recompute_blocks(model)
            two, four = (saved_bytes(model, torch.zeros(count, *shape), amp) for count in (2, 4))
            block = (whole - four + two) // (2 * blocks)
    image = (four - two) // 2 + block  # a part that does not grow with B cancels
    weights, moments = numbers_kept(model, recipe)
    gradients = sum(parameter.numel() for parameter in model.parameters())
    state = FLOAT_BYTES * (weights + gradients + moments)
    available = SHARE * card_gib * GIB - state - (two - 2 * image)
    batch = recipe.optim.global_batch
    sizes = [size for size in range(2, batch + 1, 2) if batch % size == 0]
    fits = max((size for size in sizes if size * image <= available), default=0)
    return {
        "recipe": recipe.name,
        "amp": recipe.engine.amp,
        "MiB per image": image / MIB,
        "GiB of weights and optimiser": state / GIB,
        "global batch": batch,
        f"images that fit in half of {card_gib:g} GiB": fits,
    }
