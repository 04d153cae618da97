"""Batches on the device equal the CPU's to the bit, however they are made."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import vitinit.run
from vitinit.data.draw import Augmentation, SampleKey, Samples
from vitinit.data.encoded import views_of
from vitinit.data.loader import TrainViews
from vitinit.data.pipeline import preparing_stream
from vitinit.data.sources import LooseImages
from vitinit.programs.bench.loader import draw_photographs
from vitinit.programs.shared.steps import alone, measured_recipe
from vitinit.recipe.files import load_recipe

SETS = (
    "data.name=image_folder",
    "data.num_classes=3",
    "data.image_size=13",
    "optim.global_batch=20",
    "mix.group=10",
    "eval.batch_size=20",
    "data.on_device_gib=0",
    "eval.cache_gib=0",
    "rand_augment.layers=2",
    "rand_augment.interpolation=random",
    "augment.erase_probability=0.6",
    "augment.repeats=2",
)
RESIZED = (
    "augment.crop_scale=[0.3, 1.0]",
    "augment.crop_ratio=[0.75, 1.25]",
    "augment.crop_padding=0",
    "augment.interpolation=random",
)
BOTH = ("mix.mixup_alpha=0.8", "mix.cutmix_alpha=1")
# How images are augmented → (overrides that change the images, others that must not).
WAYS = {
    "every operation, kept on the device": (
        ("rand_augment.probability=1", *BOTH),
        ("data.on_device_gib=1",),
    ),
    "kept, drawn by workers": (BOTH, ("data.on_device_gib=1", "data.workers=2")),
    "resized, by workers": (
        (*RESIZED, *BOTH, "eval.crop_pct=0.875"),
        ("data.workers=2", "eval.cache_gib=1"),
    ),
    "erased after mixing": (
        (
            "augment.erase_after_mix=true",
            "augment.erase_fill=rand",
            "mix.cutmix_alpha=1",
            "mix.label_smoothing=0.1",
        ),
        (),
    ),
    "some unmixed": (
        ("augment.erase_fill=const", "mix.mixup_alpha=0.8", "mix.probability=0.5"),
        ("engine.channels_last=false",),
    ),
    "3-Augment": (("three_augment.probability=0.8", "three_augment.color_jitter=0.3"), ()),
    "none mixed": (("augment.erase_fill=const", "rand_augment.magnitude=10"), ()),
}


def test_the_device_decodes_nearly_what_workers_do(device, tmp_path, record_property):
    """Photographs of ImageNet's size. nvJPEG enlarges colours in another way than libjpeg."""
    source = LooseImages(draw_photographs(tmp_path / "drawn", 7)[0].parent)
    deit = load_recipe("deit_base")
    drawn = Augmentation(0, (224, 224), deit.augment, deit.rand_augment, deit.mix)
    samples = Samples(0, [SampleKey(0, index) for index in range(7)], np.zeros(7, np.int64))
    on_cpu = TrainViews(source, drawn)[samples].images
    files = TrainViews(source, drawn, encoded=True)[samples].images
    made = views_of(files, (224, 224), device, source)
    apart = (made.cpu().int() - on_cpu.int()).abs().float()
    record_property("levels apart", f"{apart.mean():.2f}, at most {apart.max():.0f}")
    assert apart.mean() < 2


def test_views_that_the_device_decodes_are_the_same_however_busy_it_is(cuda, tmp_path):
    """A thread decodes them, in a stream of its own, while earlier ones are prepared and read."""
    for name in "abc":
        draw_photographs(tmp_path / "train" / name, 30)
        draw_photographs(tmp_path / "val" / name, 3)
    decode = ("data.decode=cuda", "augment.repeats=1", "augment.erase_probability=0")
    sets = (*SETS, *RESIZED, *decode, f"data.root={tmp_path}", "rand_augment.layers=0")
    matrix = torch.ones(4096, 4096, device=cuda)
    busy = epochs_of(vitinit.run, sets, cuda, lambda: [matrix @ matrix for _ in range(20)])
    idle = epochs_of(vitinit.run, sets, cuda, torch.cuda.synchronize)
    assert all(map(torch.equal, busy, idle)) and len(busy) == len(idle)


def epochs_of(
    program, sets: tuple[str, ...], device: torch.device, work: Callable[[], object] = lambda: None
) -> list[Tensor]:
    """Two epochs of training, each step's images and targets in order, and two of validation.
    work: what keeps the device busy before each micro-batch is made, and before it is copied. It
    has to be copied, since its memory is used again for a later one."""
    recipe = measured_recipe("quickstart", sets)
    data = program.open_data(recipe, alone(device), dry_run=False)
    found, made = [], []
    for epoch in range(2):
        for _, micro_batches in data.train_batches.steps(epoch):
            images, targets = torch.empty(20, 3, 13, 13), torch.empty(20, 3)
            found += [images, targets]
            for micro_batch in micro_batches:
                if device.type == "cuda":
                    with torch.cuda.stream(preparing_stream(device)):
                        work()
                some, their_targets = micro_batch.prepare()
                work()
                made += [
                    (images, micro_batch.positions, some.clone()),
                    (targets, micro_batch.positions, their_targets.clone()),
                ]
        for images, labels in data.val_batches:
            work()
            found += [images.clone(), labels.clone()]
    for place, positions, values in made:  # so late that no wait hides a missing one
        place[positions] = values.cpu()
    return [one.cpu() for one in found]


@pytest.mark.parametrize("image_tree", [(13, 13)], indirect=True)  # so that it may be kept
@pytest.mark.parametrize("way", WAYS)
def test_batches_are_the_cpus_to_the_bit(image_tree, device, way):
    """Whole batches on the device against pairs of images on the CPU, loaded one by one. On a GPU,
    batches are prepared in a CUDA stream of their own. If the streams did not wait for each other,
    memory would be read or overwritten too early."""
    matrix = torch.ones(4096, 4096, device=device) if device.type == "cuda" else torch.ones(1, 1)
    changes, ways = WAYS[way]
    sets = (*SETS, f"data.root={image_tree}", *changes)
    found = epochs_of(
        vitinit.run, (*sets, *ways), device, lambda: [matrix @ matrix for _ in range(20)]
    )  # tens of milliseconds
    expected = epochs_of(vitinit.run, (*sets, "optim.max_batch_per_process=2"), torch.device("cpu"))
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
    assert len({tensor.sum().item() for tensor in found[::2]}) > 4  # epochs, steps differ
