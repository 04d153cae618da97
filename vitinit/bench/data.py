"""How many images/s workers and the device prepare, beside torchvision's pipeline."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from ..data.augment import IMAGENET_MEAN, IMAGENET_STD, erase, rand_augment
from ..data.datasets import LooseImages
from ..data.draw import RandAugment, SampleDraws, SampleKey
from ..data.loader import TrainBatch, TrainViews, train_loader
from ..data.mix import MixDraw, MixSettings, mix_images
from ..data.passes import Passes
from ..data.sampler import TrainSampler, plan_batches
from ..data.to_device import TrainToDevice
from ..train.device import describe_device
from .timing import best_seconds, device_to_time


def deit_views(source: LooseImages, size: int) -> TrainViews:
    """The workers' part of DeiT's augmentation: decode, crop, resize, flip."""
    return TrainViews(source, SampleDraws(0, (size, size)))


def deit_device_part(device: torch.device, num_classes: int = 1000, *,
                     passes: Passes | None = None) -> TrainToDevice:
    """The device's part of DeiT's augmentation: RandAugment, normalise, erase, mix."""
    return TrainToDevice(device, mean=IMAGENET_MEAN, std=IMAGENET_STD, channels_last=True,
                         fill=RandAugment().fill, erase_fill="pixel", erase_after_mix=False,
                         mixing=MixSettings(), num_classes=num_classes, seed=0, passes=passes)


def noise_batch(batch: int, size: int, device: torch.device) -> TrainBatch:
    """Noise images on the device, with the random draws of DeiT's augmentation for them."""
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (batch, 3, size, size), dtype=np.uint8))
    draws = SampleDraws(0, (size, size)).batch_for_device(
        [SampleKey(0, index) for index in range(batch)])
    return TrainBatch(images.to(device), torch.arange(batch) % 1000, draws)


def torchvisions_pipeline(size: int) -> transforms.Compose:
    """The same augmentation as a user would write it with torchvision, on Pillow images.

    It lacks mixing, and its RandAugment is milder than DeiT's.
    """
    return transforms.Compose([
        transforms.RandomResizedCrop(size, interpolation=InterpolationMode.BICUBIC),
        transforms.RandomHorizontalFlip(), transforms.RandAugment(2, 9), transforms.ToTensor(),
        transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        transforms.RandomErasing(0.25, value="random")])


def loader_rates(source: LooseImages, size: int, batch: int = 50) -> dict[str, float]:
    """Images/s per core of parts of DeiT's augmentation, and of torchvision's pipeline.

    Keys of the result: "decode", decoding alone; "worker", the workers' part in this process;
    "through", the same in a worker process, counting its way to this one; "whole", the workers' and
    the device's part on one core; "torchvision". Each is the best of three. Sets torch's number of
    threads to 1.
    """
    torch.set_num_threads(1)
    views, prepare = deit_views(source, size), deit_device_part(torch.device("cpu"))
    pipeline = torchvisions_pipeline(size)
    batch = max(1, min(batch, len(source) // 4))     # several batches, of which one is a warm-up
    sampler = TrainSampler(len(source), plan_batches(batch, batch, 1, group=1), rank=0, seed=0,
                           repeats=1)
    count = batch * len(sampler)
    indices = [key.index for some in sampler for key in some]

    def rate(action: Callable[[], object]) -> float:
        return count / best_seconds(action)

    def loaded() -> Iterator[TrainBatch]:
        return iter(train_loader(views, sampler, workers=0, pin_memory=False))

    def torchvisions() -> None:
        for index in indices:
            pipeline(Image.open(source.paths[index]).convert("RGB"))

    def seconds_through_a_worker() -> float:
        """The time from the arrival of the first batch, which is a warm-up, to that of the last."""
        batches = iter(train_loader(views, sampler, workers=1, pin_memory=False))
        next(batches)
        began = time.perf_counter()
        deque(batches, maxlen=0)
        return time.perf_counter() - began

    one_group = np.zeros(batch, np.int64)            # all images are mixed by one draw
    decode = rate(lambda: [source.image(index) for index in indices])
    worker = rate(lambda: deque(loaded(), maxlen=0))
    through = (count - batch) / min(seconds_through_a_worker() for _ in range(3))
    whole = rate(lambda: [prepare(some, number, one_group) for number, some in enumerate(loaded())])
    pillow = rate(torchvisions)
    return {"decode": decode, "worker": worker, "through": through, "whole": whole,
            "torchvision": pillow}


def bench_loader(folder: Path, size: int, batch: int = 50) -> None:
    """Print what `loader_rates` measures on at most 400 images of a folder."""
    source = LooseImages(folder, 400)
    rates = loader_rates(source, size, batch)
    decode, worker, through, whole, pillow = rates.values()
    print(f"{len(source)} images to {size} px in batches of {batch}, images/s/core, best of three\n"
          f"decode alone                               {decode:6.0f}\n"
          f"workers' part: + draws, crop, flip, stack  {worker:6.0f}   "
          f"{100 * worker / decode:.0f} % of decoding alone, {worker / pillow:.2f} × torchvision's\n"
          f"the same out of another process            {through:6.0f}   "
          f"{1e6 / through - 1e6 / worker:+.0f} µs per image between processes\n"
          f"whole: + RandAugment, normalise, erase, mix, here on the same core\n"
          f"                                           {whole:6.0f}   {whole / pillow:.2f} × "
          f"torchvision's\n"
          f"torchvision's whole pipeline on Pillow     {pillow:6.0f}")


def augment_milliseconds(batch: int, size: int) -> dict[str, float]:
    """Milliseconds of each part of DeiT's augmentation on the device, best of three.

    The images are noise. The last entry is the whole augmentation, as in training.
    """
    device, wait = device_to_time()
    prepare = deit_device_part(device)
    loaded = noise_batch(batch, size, device)
    draws, floats = loaded.draws, prepare.normalised(loaded.images)

    def milliseconds(action: Callable[[], object]) -> float:
        def waited() -> None:
            action()
            wait()
        waited()
        return 1e3 * best_seconds(waited)

    parts = {
        "RandAugment": lambda: rand_augment(loaded.images, draws, prepare.fill),
        "normalise": lambda: prepare.normalised(loaded.images),
        "erase": lambda: erase(floats, draws, prepare.erase_fill, prepare.quantiles),
        "mixup": lambda: mix_images(floats, [MixDraw(0.3, None)] * batch),
        "all, as in training": lambda: prepare(loaded, 0, np.zeros(batch, np.int64)),
    }
    return {name: milliseconds(action) for name, action in parts.items()}


def bench_augment(batch: int, size: int) -> None:
    """Print what `augment_milliseconds` measures."""
    found = augment_milliseconds(batch, size)
    print(f"{batch}×3×{size}×{size} on {describe_device(device_to_time()[0])}, ms, best of three")
    for name, milliseconds in found.items():
        print(f"{name:20} {milliseconds:8.2f}")
