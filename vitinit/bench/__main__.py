"""Check and measure vitinit on this machine.

Most measurements are made beside an alternative that a user could choose, in the same run.

    python -m vitinit.bench all --out report --data-dir /data/imagenet/val --minutes 15
    python -m vitinit.bench init
    python -m vitinit.bench loader --data-dir /data/imagenet/train
    python -m vitinit.bench listing
    python -m vitinit.bench augment
    python -m vitinit.bench step --model vit_base --batch 64 --amp bf16 --compile
    python -m vitinit.bench step --model vit_base --batch 64 --amp bf16 --compile \\
        --data-dir /data/imagenet/train --workers 16
    python -m vitinit.bench memory --recipe deit_base swin_tiny --card-gib 24
    python -m vitinit.bench pixels --data-dir /data/imagenet/train
    python -m vitinit.bench corrupt --count 1440
    python -m vitinit.bench fuzz --count 2000
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from ..command_line import Parser, integer, one_of, real, run_program
from ..messages import OneLineError
from ..models import MODELS, VisionTransformer
from ..recipe.files import RECIPES, find_recipe, load_recipe
from ..train.engine import AMP_DTYPES
from .corrupt import bench_corrupt
from .data import bench_augment, bench_loader
from .everything import bench_all
from .fuzz import bench_fuzz
from .init import bench_init
from .items import ITEMS
from .listing import bench_listing
from .memory import bench_memory
from .pixels import bench_pixels
from .step import bench_step


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `arguments` stands for sys.argv[1:]."""
    parser = Parser(prog="python -m vitinit.bench", description=__doc__)
    size, workers, seed = integer(1), integer(0, 2**15), integer(0, 2**63)
    benches = parser.add_subparsers(dest="bench", required=True)
    everything = benches.add_parser(
        "all", help="run all checks and measurements that have no result yet, and write a report")
    everything.add_argument("--out", type=Path, help="folder of the report")
    everything.add_argument("--data-dir", type=Path,
                            help="folder of photographs; default: artificial ones are drawn")
    everything.add_argument("--minutes", type=real(above=0.0), default=10.0)
    everything.add_argument("--only", nargs="+", metavar="NAME", default=(),
                            help="run these items only")
    everything.add_argument("--again", action="store_true",
                            help="repeat failed items; with --only, repeat all items named")
    everything.add_argument("--list", action="store_true", help="list the items and run nothing")
    init = benches.add_parser("init", help="how long each init takes")
    loader = benches.add_parser("loader", help="images/s per core, against torchvision")
    loader.add_argument("--data-dir", type=Path, required=True)
    listing = benches.add_parser("listing", help="how long it takes to list a folder of many files")
    listing.add_argument("--files", type=size, default=130_000)
    listing.add_argument("--folders", type=size, default=1_000)
    augment = benches.add_parser("augment", help="how long augmentation takes on the device")
    augment.add_argument("--batch", type=size, default=256)
    pixels = benches.add_parser("pixels", help="RandAugment's operations against Pillow's")
    pixels.add_argument("--data-dir", type=Path, required=True)
    pixels.add_argument("--count", type=size, default=200, help="photographs")
    pixels.add_argument("--rounds", type=size, default=2, help="draws per photograph")
    corrupt = benches.add_parser("corrupt", help="broken files: none may crash the decoder")
    corrupt.add_argument("--count", type=size, default=1440)
    corrupt.add_argument("--seed", type=seed, default=0)
    corrupt.add_argument("--workers", type=integer(1, 2**15), default=os.cpu_count())
    fuzz = benches.add_parser("fuzz", help="invalid recipes and arguments: each ends in one line")
    fuzz.add_argument("--count", type=size, default=2000)
    fuzz.add_argument("--seed", type=seed, default=0)
    for bench in (loader, augment, pixels):
        bench.add_argument("--image-size", type=size, default=224)
    step = benches.add_parser("step", help="images/s of a training step")
    step.add_argument("--batch", type=size, default=64)
    step.add_argument("--image-size", type=size, default=224)
    step.add_argument("--amp", type=one_of(AMP_DTYPES), default="bf16",
                      help=", ".join(AMP_DTYPES))
    step.add_argument("--compile", action="store_true")
    step.add_argument("--data-dir", type=Path, help="also measure it on the images in this folder")
    step.add_argument("--workers", type=workers, default=os.cpu_count())
    memory = benches.add_parser("memory", help="how many images of a recipe fit on a GPU")
    memory.add_argument("--recipe", nargs="+", required=True, help="names in recipes/, or paths")
    memory.add_argument("--card-gib", type=real(above=0.0), default=24.0)
    vits = [name for name, (family, _) in MODELS.items() if family is VisionTransformer]
    for bench, models in ((init, vits), (step, list(MODELS))):
        bench.add_argument("--model", type=one_of(models), default="vit_base",
                           help=", ".join(models))
    return parser.parse_args(arguments)


def everything(args: argparse.Namespace) -> int:
    """Run `bench all`; the exit status is 1 if an item failed."""
    if args.list:
        print("\n".join(f"{item.name:24} {item.kind:6} {item.what}" for item in ITEMS))
        return 0
    if args.out is None:
        raise OneLineError("bench all needs --out DIR, where its report goes")
    return min(1, bench_all(ITEMS, args.out, photographs=args.data_dir, minutes=args.minutes,
                            only=args.only, again=args.again))


def main(arguments: list[str] | None = None) -> int:
    def program() -> int:
        args = parse_arguments(arguments)
        if args.bench == "all":
            return everything(args)
        print(f"torch {torch.__version__}, {os.cpu_count()} cores")
        if args.bench == "init":
            bench_init(args.model)
        elif args.bench == "loader":
            bench_loader(args.data_dir, args.image_size)
        elif args.bench == "listing":
            bench_listing(args.files, args.folders)
        elif args.bench == "augment":
            bench_augment(args.batch, args.image_size)
        elif args.bench == "pixels":
            bench_pixels(args.data_dir, args.image_size, args.count, args.rounds)
        elif args.bench == "corrupt":
            return min(bench_corrupt(args.count, args.seed, args.workers), 1)
        elif args.bench == "fuzz":
            return min(bench_fuzz(args.count, args.seed), 1)
        elif args.bench == "memory":
            for name in args.recipe:
                bench_memory(load_recipe(find_recipe(name, RECIPES)), args.card_gib)
        else:
            bench_step(args.model, batch=args.batch, image_size=args.image_size, amp=args.amp,
                       compiled=args.compile, folder=args.data_dir, workers=args.workers)
        return 0
    return run_program("vitinit.bench", program)


if __name__ == "__main__":
    sys.exit(main())
