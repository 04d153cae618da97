"""Train a model as a recipe describes: what train.py and `vitinit train` do."""

import argparse
import sys
from pathlib import Path

from ..init import INITS
from ..recipe.files import RecipeError
from ..run import Run
from ..train.interruption import Interrupted
from .shared.command_line import Parser, add_log, add_set, add_trust, integer, run_program


def parse_arguments(arguments: list[str] | None, name: str = "train.py") -> argparse.Namespace:
    """Parse the command line; RecipeError for what it cannot be."""
    program = f"python {name}" if name.endswith(".py") else name
    parser = Parser(
        prog=program,
        description=(
            "Train a model as a recipe describes.\n\n    "
            f"{program} --recipe deit_base --init impulse --data-dir /data/imagenet"
        ),
    )
    parser.add_argument("--recipe", help="name in recipes/, or path of a .toml file")
    parser.add_argument("--init", help=f"init.name: {', '.join(INITS)}")
    parser.add_argument("--data-dir", help="data.root: folder of the data set")
    parser.add_argument(
        "--out-dir", type=Path, help="folder of this run; default runs/<recipe>-<init>-s<seed>"
    )
    parser.add_argument("--seed", type=integer(0, 2**63), help="run.seed")
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="continue the run in this folder; 'auto': the one in --out-dir if any",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build everything, print it, run one forward pass, write nothing",
    )
    parser.add_argument(
        "--read-images",
        action="store_true",
        help="with --dry-run: decode all images, and list those that cannot be",
    )
    add_set(parser, "override any key of the recipe; may be repeated")
    parser.add_argument(
        "--verbose", action="store_true", help="print all that the run's start.txt will say"
    )
    add_log(parser)
    add_trust(parser)
    args = parser.parse_args(arguments)
    if args.read_images and not args.dry_run:
        raise RecipeError("--read-images is what a dry run may do; give --dry-run, too")
    return args


def main(arguments: list[str] | None = None, name: str = "train.py") -> int:
    """Do the run of these arguments; messages begin with `name`. Return the exit status."""

    def program() -> int:
        args = parse_arguments(arguments, name)
        words = sys.argv[1:] if arguments is None else arguments
        run = Run(
            args.recipe,
            init=args.init,
            seed=args.seed,
            data_dir=args.data_dir,
            out_dir=args.out_dir,
            resume=args.resume,
            overrides=args.set,
            verbose=args.verbose,
            log=args.log,
            trust_teacher=args.trust_teacher,
            imports=args.imports,
            command=[*name.split(), *words],
        )
        if args.dry_run:
            return 0 if run.rehearse(read=args.read_images) else 1
        try:
            run.train()
        except Interrupted as ended:  # which the run has said
            return 128 + ended.number
        return 0

    return run_program(name, program, cleans=False)
