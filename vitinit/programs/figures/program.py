"""Draw figures of attention, augmentation and training runs.

    vitinit figures kernels --out kernels.png
    vitinit figures maps --recipe quickstart --init default impulse --out maps.png
    vitinit figures maps --run RUN --epochs 0,10,300 --kinds qk --out trained.png
    vitinit figures attention photograph.jpg --recipe deit_small --out attention.png
    vitinit figures explore photograph.jpg --run RUN --epochs 0,10 --out explore.html
    vitinit figures mass --recipe deit_tiny --data-dir photographs --out mass.png
    vitinit figures curves RUN [RUN …] --out curves.png
    vitinit figures curves --steps RUN [RUN …] --out steps.png
    vitinit figures curves --across "training images" RUN [RUN …] --out worth.png
    vitinit figures report RUN [RUN …] --out report.html
    vitinit figures operations photograph.jpg --out operations.png
    vitinit figures batch --data-dir photographs --out batch.png
    vitinit figures data --data-dir photographs --out data.png
    vitinit figures reconstruct photograph.jpg --run RUN --out reconstruct.png

This needs the extra `figures` (matplotlib). An init has the same colour and line in every picture.
Maps use cividis, viridis, or a scale from blue through white at 0 to red. Colour-blind readers can
tell these colours apart.
"""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from ...init import INITS
from ..shared.command_line import Output, Parser, add_set, integer, main_of, one_of
from ..shared.curves import draw_across, draw_curves, draw_steps
from ..shared.groups import finished_runs, group_runs
from ..shared.plot import FigureError, pyplot
from ..shared.records import read_runs
from .attention import FIGURE_KINDS, draw_attention, draw_kernels, draw_maps, draw_mass
from .augmentation import draw_batch, operations_figure
from .data import draw_data
from .explore import write_explorer
from .reconstruct import draw_reconstruct
from .report import write_report
from .subjects import Subject, fresh, of_runs

# Without --recipe and --run, this variant of quickstart is shown after these inits: it has a head
# for each offset of a 3×3 kernel.
VARIANT = ["model.options.embed_dim=288", "model.options.num_heads=9"]
VARIANT_INITS = ["default", "mimetic", "impulse"]
SEED = integer(0, 2**63)
WEIGHTS = ("model", "ema")


def numbers(text: str) -> list[int] | Literal["all"]:
    with suppress(ArgumentTypeError):
        return "all" if text == "all" else list(map(integer(0), text.split(",")))
    raise ArgumentTypeError(f"{text}: expected numbers such as 0,10,300, or all")


def models(figure: Parser) -> None:
    """Add the arguments of `subjects`."""
    source = figure.add_mutually_exclusive_group()
    source.add_argument(
        "--recipe",
        nargs="+",
        metavar="NAME",
        help="models freshly initialised from these recipes; default: quickstart "
        f"with nine heads, after the inits {', '.join(VARIANT_INITS)}",
    )
    source.add_argument(
        "--run", nargs="+", type=Path, metavar="RUN", help="run folders or their checkpoints"
    )
    figure.add_argument(
        "--init",
        nargs="+",
        metavar="NAME",
        type=one_of(INITS),
        help=f"for --recipe: one or more inits in place of the recipe's: {', '.join(INITS)}",
    )
    figure.add_argument("--seed", type=SEED, help="for --recipe: run.seed")
    add_set(figure, "for --recipe: override any key")
    figure.add_argument(
        "--epochs",
        type=numbers,
        default=[],
        metavar="0,10,300",
        help="for --run: epochs whose checkpoints the run kept, or `all` of these "
        "with the last; default: last.pt",
    )
    figure.add_argument("--weights", choices=WEIGHTS, help="for --run, default model")


def images(figure: Parser) -> None:
    figure.add_argument(
        "--data-dir",
        type=Path,
        dest="folder",
        help="a folder with photographs; default: the images that a recipe of `shapes` draws",
    )
    figure.add_argument("--count", type=integer(1), default=24, help="use the first COUNT of them")


def blocks_and_heads(figure: Parser) -> None:
    index = integer(-(2**31))  # range checked once the model is known
    figure.add_argument("--blocks", nargs="+", type=index, default=[0])
    figure.add_argument(
        "--heads",
        nargs="+",
        type=index,
        help="default: all; for the figure attention, the first three",
    )


def other_curves(figure: Parser) -> None:
    instead = figure.add_mutually_exclusive_group()
    instead.add_argument(
        "--steps",
        action="store_true",
        help="loss, learning rate, gradient norm by step; also of unfinished runs",
    )
    instead.add_argument(
        "--across",
        metavar="SECTION.KEY",
        help='last top-1 by a key, such as schedule.epochs, or "training images"',
    )


def judged_on(figure: Parser) -> None:
    figure.add_argument("--data-dir", help="folder of the data set, if not the recipe's")
    figure.add_argument(
        "--images",
        type=integer(0),
        default=10_000,
        metavar="N",
        help="validation images to judge a run on, at most (10000)",
    )
    figure.add_argument("--weights", choices=(*WEIGHTS, "best"), default="model")


def seeded_images(figure: Parser) -> None:
    figure.add_argument(
        "--data-dir", type=Path, dest="folder", required=True, help="a folder with images in it"
    )
    figure.add_argument("--seed", type=SEED, default=0)


def data_set(figure: Parser) -> None:
    figure.add_argument(
        "--data-dir", required=True, help="a folder as `photos` trains on, or lists"
    )
    figure.add_argument(
        "--image-size",
        type=integer(1),
        default=128,
        metavar="PIXELS",
        help="of the model that is to be trained (128)",
    )


def argument(name: str, **options: Any) -> Callable[[Parser], object]:
    """What adds one argument alone."""
    return lambda figure: figure.add_argument(name, **options)


KINDS_SHOWN = argument(
    "--kinds",
    nargs="+",
    type=one_of(FIGURE_KINDS),
    default=list(FIGURE_KINDS),
    help=", ".join(FIGURE_KINDS),
)
PHOTOGRAPH = argument("photograph", type=Path)
PHOTOGRAPHS = argument("photographs", type=Path, nargs="+", metavar="photograph")
AUTOENCODER = argument("--run", type=Path, required=True, help="a run of own_images, say")
RUNS = argument(
    "runs",
    nargs="+",
    type=Path,
    metavar="RUN",
    help="folders of runs, archives of runs, or archive/pattern",
)


def draw_runs(out: Path, *, runs: list[Path], steps: bool, across: str | None) -> None:
    """Draw top-1 of finished runs, by epoch or by a key, or quantities by step of all runs."""
    if steps:
        return draw_steps(out, group_runs(read_runs(runs)))
    finished, unfinished = finished_runs(read_runs(runs))
    print("".join(f"{line}\n" for line in unfinished), end="")
    groups = group_runs(finished)
    return draw_across(out, groups, across) if across else draw_curves(out, groups)


# Name: the function that draws it, what it shows, and what adds its arguments.
FIGURES: dict[str, tuple[Callable[..., None], str, list]] = {
    "kernels": (
        draw_kernels,
        "mean attention by offset: the kernels that heads start as",
        [models, images, blocks_and_heads],
    ),
    "maps": (
        draw_maps,
        "Q Kᵀ, P Q Kᵀ Pᵀ and its softmax for every head of ViTs",
        [models, blocks_and_heads, KINDS_SHOWN],
    ),
    "attention": (
        draw_attention,
        "what the patch in the middle of a photograph attends to",
        [models, blocks_and_heads, PHOTOGRAPH],
    ),
    "explore": (
        write_explorer,
        "an HTML page of the attention of every head of every block",
        [models, PHOTOGRAPHS],
    ),
    "mass": (draw_mass, "share of attention on the heads' targets, by depth", [models, images]),
    "curves": (
        draw_runs,
        "validation top-1 of finished runs by epoch, or quantities by step",
        [RUNS, other_curves],
    ),
    "report": (
        write_report,
        "an HTML page about runs: curves, mistakes, recipe, comparison",
        [RUNS, judged_on],
    ),
    "operations": (
        operations_figure,
        "a photograph under each of RandAugment's operations",
        [PHOTOGRAPH],
    ),
    "batch": (draw_batch, "batches after the whole augmentation", [seeded_images]),
    "data": (draw_data, "what a folder of classes is like: examples, counts, copies", [data_set]),
    "reconstruct": (
        draw_reconstruct,
        "photographs, what a masked autoencoder sees of them, and what it makes of it",
        [PHOTOGRAPHS, AUTOENCODER],
    ),
}


def parse_arguments(arguments: list[str]) -> Namespace:
    """`draw` is the figure's function, whose parameters are named as the arguments; those of `models`
    make `subjects`.
    """
    parser = Parser(prog="vitinit figures", description=__doc__)
    commands = parser.add_subparsers(metavar="FIGURE", required=True)
    for name, (draw, text, parts) in FIGURES.items():
        figure = commands.add_parser(name, help=text, description=text)
        suffix = ".html" if draw in (write_explorer, write_report) else ".png"
        figure.add_argument(
            "--out",
            type=Output(suffix),
            required=True,
            metavar=f"FILE{suffix}",
            help="file to write",
        )
        figure.set_defaults(draw=draw)
        for part in parts:
            part(figure)
    return parser.parse_args(arguments)


def subjects(args: Namespace) -> Iterator[Subject]:
    """The models named, one by one; FigureError for options of --recipe with --run or reverse."""
    if args.run:
        place = "--recipe"
        unused = {"--init": args.init, "--seed": args.seed is not None, "--set": args.set}
    else:
        place = "--run"
        unused = {"--epochs": args.epochs, "--weights": args.weights}
    for option, given in unused.items():
        if given:
            raise FigureError(f"{option} goes with {place}")
    if args.run:
        return of_runs(args.run, args.epochs, args.weights or "model")
    if args.recipe:
        return fresh(args.recipe, args.init or [None], seed=args.seed, sets=args.set)
    inits = args.init or VARIANT_INITS
    return fresh(["quickstart"], inits, seed=args.seed, sets=VARIANT + args.set)


def figures(args: Namespace) -> None:
    pyplot()  # fails at once if matplotlib is missing
    given = vars(args).copy()
    if "recipe" in given:
        given["subjects"] = subjects(args)
    args.draw(**{name: given[name] for name in signature(args.draw).parameters})
    print(f"wrote {args.out}")


main = main_of("vitinit figures", parse_arguments, figures)
