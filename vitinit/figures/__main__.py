"""Draw figures of attention, filters, augmentation and training runs.

    python -m vitinit.figures kernels --out kernels.png
    python -m vitinit.figures maps --recipe quickstart --init default impulse --out maps.png
    python -m vitinit.figures maps --run RUN --epochs 0,10,300 --kinds qk --out trained.png
    python -m vitinit.figures attention photograph.jpg --recipe deit_small --out attention.png
    python -m vitinit.figures mass --recipe deit_tiny --data-dir photographs --out mass.png
    python -m vitinit.figures equivariance --recipe deit_tiny --data-dir photographs --out moved.png
    python -m vitinit.figures spectrum --recipe deit_tiny --data-dir photographs --out spectrum.png
    python -m vitinit.figures filters --recipe cifar10_convmixer --init impulse --out filters.png
    python -m vitinit.figures curves RUN [RUN …] --out curves.png
    python -m vitinit.figures curves --steps RUN [RUN …] --out steps.png
    python -m vitinit.figures operations photograph.jpg --out operations.png
    python -m vitinit.figures batch --data-dir photographs --out batch.png

This needs the extra `figures` (matplotlib). An init has the same colour and line in every picture.
Maps use cividis, viridis, or a scale from blue through white at 0 to red. Colour-blind readers can
tell these colours apart.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from ..command_line import Parser, integer, one_of, real, run_program
from ..init import INITS
from ..runs.archive import read_runs
from ..runs.groups import finished_groups, group_runs
from .attention import draw_attention
from .augmentation import draw_batch, draw_operations
from .curves import draw_curves, draw_steps
from .equivariance import draw_equivariance
from .kernels import draw_filters, draw_kernels
from .maps import KINDS, draw_maps
from .mass import draw_mass
from .plot import FigureError, pyplot
from .spectrum import draw_spectrum
from .subjects import Subject, fresh, of_runs

# The figure `kernels` shows this variant of quickstart: a head for each offset of a 3×3 kernel.
KERNELS = ["model.options.embed_dim=288", "model.options.num_heads=9"]
RUNS = "folders of runs, archives of runs, or archive/pattern"


def numbers(text: str) -> list[int]:
    """Parse a list of epochs, such as "0,10,300"."""
    try:
        return list(map(integer(0), text.split(",")))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text}: expected numbers such as 0,10,300") from None


def pair(text: str) -> tuple[int, int]:
    """Parse "ROW,COLUMN" or "DOWN,RIGHT"."""
    try:
        row, column = map(integer(-2**15, 2**15), text.split(","))
    except (argparse.ArgumentTypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text}: expected two numbers such as 3,5") from None
    return row, column


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m vitinit.figures", description=__doc__)
    figures = parser.add_subparsers(dest="figure", required=True)
    size, seed, init = integer(1), integer(0, 2**63), one_of(INITS)
    index = integer(-2**31)                          # range checked once the model is known

    def figure(name: str, text: str) -> Parser:
        added = figures.add_parser(name, help=text, description=text)
        added.add_argument("--out", type=Path, required=True, help="PNG file to write")
        return added

    def of_models(name: str, text: str, default: bool = False) -> Parser:
        """Add a figure of models, either freshly initialised from recipes or read from runs.

        default: without either, it shows KERNELS.
        """
        added = figure(name, text)
        source = added.add_mutually_exclusive_group(required=not default)
        source.add_argument("--recipe", nargs="+", metavar="NAME",
                            help="models freshly initialised from these recipes")
        source.add_argument("--run", nargs="+", type=Path, metavar="RUN",
                            help="run folders or their checkpoints")
        added.add_argument("--init", nargs="+", metavar="NAME", type=init,
                           help="for --recipe: one or more inits in place of the recipe's: "
                                f"{', '.join(INITS)}")
        added.add_argument("--seed", type=seed, help="for --recipe: run.seed")
        added.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                           help="for --recipe: override any key")
        added.add_argument("--epochs", type=numbers, default=[], metavar="0,10,300",
                           help="for --run: epochs whose checkpoints the run kept; default: "
                                "last.pt")
        added.add_argument("--weights", choices=["model", "ema"], help="for --run, default model")
        return added

    def of_photographs(added: Parser) -> None:
        added.add_argument("--data-dir", type=Path, help="a folder with photographs; default: the "
                                                         "images that a recipe of `shapes` draws")
        added.add_argument("--count", type=size, default=24, help="use the first COUNT of them")

    kernels = of_models("kernels", "mean attention by offset: the kernels that heads start as",
                        default=True)
    of_photographs(kernels)
    kernels.add_argument("--blocks", nargs="+", type=index, default=[0])
    kernels.add_argument("--heads", nargs="+", type=index, help="default: all")
    maps = of_models("maps", "Q Kᵀ, P Q Kᵀ Pᵀ and its softmax for every head of ViTs")
    maps.add_argument("--kinds", nargs="+", type=one_of(KINDS), default=list(KINDS),
                      help=", ".join(KINDS))
    maps.add_argument("--blocks", nargs="+", type=index, default=[0])
    maps.add_argument("--heads", nargs="+", type=index, help="default: all")
    attention = of_models("attention", "what tokens of a photograph attend to")
    attention.add_argument("image", type=Path)
    attention.add_argument("--blocks", nargs="+", type=index, default=[0])
    attention.add_argument("--heads", nargs="+", type=index, default=[0, 1, 2])
    attention.add_argument("--queries", nargs="+", type=pair, default=[], metavar="ROW,COLUMN",
                           help="query patches, counted from 0; default: the one in the middle")
    of_photographs(of_models("mass", "share of attention on the heads' targets, by depth"))
    equivariance = of_models("equivariance", "whether tokens move with the image, by depth")
    of_photographs(equivariance)
    equivariance.add_argument("--step", type=pair, default=(1, 1), metavar="DOWN,RIGHT",
                              help="by how many patches images are moved")
    of_photographs(of_models("spectrum", "singular values and ranks of patch embeddings"))
    filters = of_models("filters", "a ConvMixer's depthwise filters or a Swin's position bias")
    filters.add_argument("--blocks", nargs="+", type=index, default=[0])
    filters.add_argument("--columns", nargs="+", type=index, default=[0, 1, 2],
                         help="channels or heads, default: the first three")
    curves = figure("curves", "validation top-1 of finished runs by epoch, or quantities by step")
    curves.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=RUNS)
    curves.add_argument("--steps", action="store_true",
                        help="loss, learning rate and gradient norm by step; also of unfinished "
                             "runs")
    operations = figure("operations", "a photograph under each of RandAugment's operations")
    operations.add_argument("image", type=Path)
    operations.add_argument("--magnitude", type=real(minimum=0.0, maximum=10.0), default=9.0)
    batch = figure("batch", "batches after the whole augmentation")
    batch.add_argument("--data-dir", type=Path, required=True, help="a folder with images in it")
    batch.add_argument("--seed", type=seed, default=0)
    return parser.parse_args(arguments)


def subjects(args: argparse.Namespace) -> Iterator[Subject]:
    """The models that the arguments name, built one at a time.

    Raises FigureError for an option of --recipe that comes with --run, and the other way round.
    """
    unused = {"--init": args.init, "--seed": args.seed is not None, "--set": args.set} if args.run \
        else {"--epochs": args.epochs, "--weights": args.weights}
    for option, given in unused.items():
        if given:
            raise FigureError(f"{option} goes with {'--recipe' if args.run else '--run'}")
    if args.run:
        return of_runs(args.run, args.epochs, args.weights or "model")
    if not args.recipe:
        args.recipe, args.init = ["quickstart"], args.init or ["default", "mimetic", "impulse"]
        args.set = [*KERNELS, *args.set]
    return fresh(args.recipe, args.init or [None], seed=args.seed, sets=args.set)


def draw(args: argparse.Namespace) -> None:
    """Draw the figure that the arguments name."""
    if args.figure == "kernels":
        draw_kernels(args.out, subjects(args), folder=args.data_dir, count=args.count,
                     blocks=args.blocks, heads=args.heads)
    elif args.figure == "maps":
        draw_maps(args.out, subjects(args), kinds=args.kinds, blocks=args.blocks, heads=args.heads)
    elif args.figure == "attention":
        draw_attention(args.out, subjects(args), args.image, blocks=args.blocks, heads=args.heads,
                       queries=args.queries)
    elif args.figure == "mass":
        draw_mass(args.out, subjects(args), folder=args.data_dir, count=args.count)
    elif args.figure == "equivariance":
        draw_equivariance(args.out, subjects(args), folder=args.data_dir, count=args.count,
                          step=args.step)
    elif args.figure == "spectrum":
        draw_spectrum(args.out, subjects(args), folder=args.data_dir, count=args.count)
    elif args.figure == "filters":
        draw_filters(args.out, subjects(args), blocks=args.blocks, columns=args.columns)
    elif args.figure == "curves" and args.steps:
        draw_steps(args.out, group_runs(read_runs(args.runs)))
    elif args.figure == "curves":
        groups, unfinished = finished_groups(args.runs)
        for line in unfinished:
            print(line)
        draw_curves(args.out, groups)
    elif args.figure == "operations":
        draw_operations(args.out, args.image, magnitude=args.magnitude)
    else:
        draw_batch(args.out, args.data_dir, seed=args.seed)


def main(arguments: list[str] | None = None) -> int:
    def program() -> None:
        args = parse_arguments(arguments)
        pyplot()                                     # fails at once if matplotlib is missing
        draw(args)
        print(f"wrote {args.out}")
    return run_program("vitinit.figures", program)


if __name__ == "__main__":
    sys.exit(main())
