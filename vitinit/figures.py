"""Pictures: what an init makes of attention, and how runs went.

    python -m vitinit.figures kernels --out kernels.png
    python -m vitinit.figures curves RUN [RUN …] --out curves.png

Needs the extra `figures` (matplotlib). Colours are those of Okabe and Ito and of cividis, which
colour-blind readers tell apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from .data import shapes
from .data.augment import normalise
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
    for figure in (kernels, curves):
        figure.add_argument("--out", type=Path, required=True, help="PNG file to write")
    args = parser.parse_args()
    try:
        if args.figure == "kernels":
            draw_kernels(args.out, inits=args.inits, embed_dim=args.embed_dim, block=args.block,
                         num_heads=args.num_heads, patch_size=args.patch_size)
        else:
            draw_curves(args.out, args.runs)
    except ValueError as error:
        sys.exit(f"vitinit.figures: {error}")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
