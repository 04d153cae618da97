"""Pictures: what an init makes of attention, how runs went, what augmentation does to images.

    python -m vitinit.figures kernels --out kernels.png
    python -m vitinit.figures curves RUN [RUN …] --out curves.png
    python -m vitinit.figures operations photograph.jpg --out operations.png
    python -m vitinit.figures batch --data-dir photographs --out batch.png

Needs the extra `figures` (matplotlib). Colours are those of Okabe and Ito and of cividis, which
colour-blind readers tell apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .data import shapes
from .data.augment import (IMAGENET_MEAN, IMAGENET_STD, erase, normal_quantiles, normalise,
                           rand_augment)
from .data.datasets import LoosePictures
from .data.draw import CropAndFlip, Draws, Erasing, Operation, RandAugment, SampleKey
from .data.images import decode_image, resize_and_centre_crop
from .data.loader import TrainViews, train_loader
from .data.mix import Mixing, mix_images
from .init import INITS, init_weights
from .keys import Stream, keyed_generator
from .mixing import mean_kernel, mixing_matrices
from .models import build_model

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES = ("-", "--", "-.", ":")
RADIUS = 3                      # of the kernels shown, in patches


def pyplot():
    """matplotlib without a display; one clear line where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("vitinit.figures needs matplotlib: pip install 'vitinit[figures]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def example_pictures(count: int) -> Tensor:
    """The first pictures of the embedded set's validation split, (count, 3, 32, 32), normalised."""
    pictures = [shapes.draw_picture(keyed_generator(shapes.SEED, Stream.SHAPES, 1, index))[0]
                for index in range(count)]
    return normalise(torch.stack([torch.from_numpy(p) for p in pictures]), [0.5] * 3, [0.25] * 3)


def draw_kernels(out: Path, *, inits: list[str], embed_dim: int, num_heads: int, patch_size: int,
                 block: int) -> None:
    """Mean attention by offset, one row an init, one column a head: kernels that heads start as.

    A ViT for 32-pixel pictures with mean pooling, on 64 pictures of `shapes`, seed 0.
    """
    plt = pyplot()
    pictures = example_pictures(64)
    figure, axes = plt.subplots(len(inits), num_heads, squeeze=False, layout="constrained",
                                figsize=(1.35 * num_heads + 1.6, 1.45 * len(inits) + 0.5))
    for number, (row, name) in enumerate(zip(axes, inits)):
        model = build_model("vit_tiny", num_classes=10, image_size=32, patch_size=patch_size,
                            embed_dim=embed_dim, num_heads=num_heads, depth=block + 1, pool="mean")
        init_weights(model, name, generator=torch.Generator().manual_seed(0))
        weights = mixing_matrices(model, pictures, blocks=[block])[block]  # (B, h, N, N)
        kernels = mean_kernel(weights, model.grid, RADIUS).mean(0)        # (h, 2r + 1, 2r + 1)
        for head, axis in enumerate(row):
            image = axis.imshow(kernels[head].numpy(), vmin=0, vmax=1, cmap="cividis",
                                extent=(-RADIUS - .5, RADIUS + .5, RADIUS + .5, -RADIUS - .5))
            axis.set(xticks=[-RADIUS, 0, RADIUS], yticks=[-RADIUS, 0, RADIUS])
            axis.tick_params(labelsize=7)
            if number == 0:
                axis.set_title(f"head {head}", fontsize=9)
        row[0].set_ylabel(f"{name}\npatches down", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("patches right", fontsize=8)
    figure.colorbar(image, ax=axes, label="mean attention", shrink=0.8)
    figure.suptitle(f"Where each head looks before training, block {block}", fontsize=11)
    figure.savefig(out, dpi=130)


def draw_curves(out: Path, runs: list[Path]) -> None:
    """Validation top-1 by epoch, one line a recipe and init: mean over seeds, band from the lowest
    to the highest."""
    plt = pyplot()
    groups: dict[str, list[list[dict]]] = defaultdict(list)
    for run in runs:
        try:
            recipe = torch.load(run / "last.pt", weights_only=True, mmap=True)["recipe"]
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        except OSError as error:
            raise SystemExit(f"{error.filename}: not a finished run's file ({error.strerror})"
                             ) from None
        groups[f"{recipe['name']}, {recipe['init']['name']}"].append(
            [row for row in rows if row["val_top1"] is not None])
    figure, axis = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for number, (label, members) in enumerate(groups.items()):
        epochs = [row["epoch"] for row in min(members, key=len)]
        tops = torch.tensor([[row["val_top1"] for row in rows[:len(epochs)]] for rows in members])
        colour = COLOURS[number % len(COLOURS)]
        axis.plot(epochs, tops.mean(0), color=colour, linestyle=LINES[number % len(LINES)],
                  label=f"{label} ({len(members)} seed{'s' * (len(members) > 1)})")
        axis.fill_between(epochs, tops.amin(0), tops.amax(0), color=colour, alpha=0.2, linewidth=0)
    axis.set(xlabel="epoch", ylabel="validation top-1 (%)", title="Top-1 by epoch")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(out, dpi=130)


def draw_operations(out: Path, picture: Path, *, magnitude: float) -> None:
    """One photograph under each of RandAugment's operations at one magnitude, sign +, bicubic."""
    plt = pyplot()
    image = resize_and_centre_crop(decode_image(str(picture)), (224, 224), 0.875, "bicubic")
    settings, operations = RandAugment(), list(Operation)                # the first is NONE
    arguments = [settings.argument(operation, magnitude, 1.0) for operation in operations]
    column = (len(operations), 1)
    draws = Draws(np.array(operations).reshape(column), np.array(arguments).reshape(column),
                  np.full(column, True), erase_boxes=np.zeros((len(operations), 4), np.int64),
                  noise_keys=np.zeros(len(operations), np.int64))
    images = rand_augment(image.expand(len(operations), -1, -1, -1), draws, settings.fill)
    figure, axes = plt.subplots(4, 4, figsize=(9.0, 9.7), layout="constrained")
    for axis, tile, operation, argument in zip(axes.flat, images, operations, arguments):
        axis.imshow(tile.permute(1, 2, 0).numpy())
        axis.set_title(f"{operation.name} {argument:.3g}" if argument else
                       operation.name if operation else "original", fontsize=9)
        axis.set_axis_off()
    figure.suptitle(f"RandAugment's operations at magnitude {magnitude:g}", fontsize=11)
    figure.savefig(out, dpi=72)


def draw_batch(out: Path, folder: Path, *, seed: int) -> None:
    """Two batches of six as a model sees them: DeiT's whole augmentation, by mixup and by cutmix."""
    plt = pyplot()
    source, size, count = LoosePictures(folder, 12), (224, 224), 6
    settings = RandAugment()
    views = TrainViews(source, seed=seed, size=size, crop=CropAndFlip(), rand_augment=settings,
                       erasing=Erasing())
    keys = [[SampleKey(0, (row * count + place) % len(source)) for place in range(count)]
            for row in range(2)]
    figure, axes = plt.subplots(2, count, figsize=(2.05 * count, 4.9), layout="constrained")
    kinds = {"mixup": Mixing(cutmix_alpha=0.0), "cutmix": Mixing(mixup_alpha=0.0)}
    batches = train_loader(views, keys, workers=0, pin_memory=False)
    for step, (row, batch, (kind, mixing)) in enumerate(zip(axes, batches, kinds.items())):
        mix = mixing.draw(keyed_generator(seed, Stream.MIX, step, 0, 0), *size)
        images = rand_augment(batch.images, batch.draws, settings.fill)
        images = erase(normalise(images, IMAGENET_MEAN, IMAGENET_STD), batch.draws, "pixel",
                       normal_quantiles())
        # Back to what eyes see; noise of erased boxes is cut off at black and white.
        mixed = mix_images(images, mix) * torch.tensor(IMAGENET_STD).view(3, 1, 1)
        mixed = (mixed + torch.tensor(IMAGENET_MEAN).view(3, 1, 1)).clamp(0, 1)
        for place, (axis, tile) in enumerate(zip(row, mixed)):
            axis.imshow(tile.permute(1, 2, 0).numpy())
            axis.set_title(f"{mix.share:.2f} × {place + 1} + {1 - mix.share:.2f} × {count - place}",
                           fontsize=9)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(kind, fontsize=10)
    figure.suptitle("Two augmented batches: each image with its partner, targets in these shares",
                    fontsize=11)
    figure.savefig(out, dpi=72)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vitinit.figures", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    figures = parser.add_subparsers(dest="figure", required=True)
    kernels = figures.add_parser("kernels", help="the kernels that heads start as")
    kernels.add_argument("--inits", nargs="+", default=["default", "mimetic", "impulse"],
                         choices=list(INITS))
    kernels.add_argument("--embed-dim", type=int, default=288)
    kernels.add_argument("--num-heads", type=int, default=9)
    kernels.add_argument("--patch-size", type=int, default=4)
    kernels.add_argument("--block", type=int, default=0)
    curves = figures.add_parser("curves", help="validation top-1 of runs by epoch")
    curves.add_argument("runs", nargs="+", type=Path)
    operations = figures.add_parser("operations", help="a photograph under each of RandAugment's")
    operations.add_argument("picture", type=Path)
    operations.add_argument("--magnitude", type=float, default=9.0)
    batch = figures.add_parser("batch", help="batches after the whole augmentation")
    batch.add_argument("--data-dir", type=Path, required=True, help="a folder with pictures in it")
    batch.add_argument("--seed", type=int, default=0)
    for figure in (kernels, curves, operations, batch):
        figure.add_argument("--out", type=Path, required=True, help="PNG file to write")
    args = parser.parse_args()
    try:
        if args.figure == "kernels":
            draw_kernels(args.out, inits=args.inits, embed_dim=args.embed_dim, block=args.block,
                         num_heads=args.num_heads, patch_size=args.patch_size)
        elif args.figure == "curves":
            draw_curves(args.out, args.runs)
        elif args.figure == "operations":
            draw_operations(args.out, args.picture, magnitude=args.magnitude)
        else:
            draw_batch(args.out, args.data_dir, seed=args.seed)
    except ValueError as error:
        sys.exit(f"vitinit.figures: {error}")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
