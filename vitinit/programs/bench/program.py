"""Check vitinit on this machine, and measure it beside what one could use instead.

vitinit bench all --minutes 8 --out report.md --data-dir /data/imagenet/val
vitinit bench step --recipe deit_base swin_tiny --batch 64
vitinit bench loader --recipe deit_base --data-dir /data/imagenet/val --workers 8 16
vitinit bench plan --recipe deit_small --gpus 4 --cores 64 --limit-hours 4
vitinit bench memory --recipe deit_base swin_tiny --card-gib 24
"""

from argparse import Namespace
from pathlib import Path

import torch

from ...train.device import cores
from ..shared.command_line import Output, Parser, add_set, integer, main_of, one_of, real

BF16 = {"engine.amp": "bf16", "optim.muon_dtype": "bf16"}  # of the card that `memory` is about


def parse_arguments(arguments: list[str]) -> Namespace:
    parser = Parser(prog="vitinit bench", description=__doc__)
    commands = parser.add_subparsers(dest="bench", required=True)
    everything = commands.add_parser("all", help="checks and speeds, in one report")
    everything.add_argument("--out", type=Output(), help="file (.md) of the report, too")
    everything.add_argument("--minutes", type=real(above=0.0), default=8.0)
    here = commands.add_parser("machine", help="the hardware and the versions of the software")
    step = commands.add_parser("step", help="images/s of a training step")
    variants = commands.add_parser("variants", help="several steps, compiled at once")
    loader = commands.add_parser("loader", help="images/s out of files, alone and feeding a step")
    loader.add_argument(
        "--workers",
        nargs="+",
        type=integer(0, 2**15),
        default=[cores()],
        help="numbers of loader processes; default: that of the cores",
    )
    plan = commands.add_parser("plan", help="hours of a run, and what binds it")
    plan.add_argument(
        "--images",
        nargs=2,
        type=integer(1),
        default=[1_281_167, 50_000],
        metavar="N",
        help="to train and to validate on; default: ImageNet's",
    )
    plan.add_argument("--gpus", type=integer(1), default=1, help="of all nodes (1)")
    plan.add_argument(
        "--cores", type=integer(1), default=cores(), help="that load images; default: those here"
    )
    for part, whose in (
        ("step", "a GPU trains"),
        ("core", "a core loads"),
        ("prepare", "a GPU augments and mixes"),
    ):
        plan.add_argument(
            f"--{part}-rate",
            type=real(above=0.0),
            help=f"images/s that {whose}; default: measured here",
        )
    plan.add_argument("--limit-hours", type=real(above=0.0), default=24.0, help="of a job (24)")
    plan.add_argument(
        "--start-seconds",
        type=real(minimum=0.0),
        default=60.0,
        help="of a job, until it trains (60)",
    )
    memory = commands.add_parser("memory", help="how many images of a recipe fit on a GPU")
    for command in (plan, memory):
        command.add_argument(
            "--card-gib", type=real(above=0.0), default=24.0, help="memory of a GPU (24)"
        )
    for command in (step, memory):
        command.add_argument(
            "--recipe", nargs="+", required=True, help="names in recipes/, or paths"
        )
    loader.add_argument("--recipe", default="deit_small", help="name in recipes/, or path")
    plan.add_argument("--recipe", required=True, help="name in recipes/, or path")
    for command in (step, loader, plan):
        command.add_argument(
            "--batch",
            type=integer(1),
            help="images per step (in `step` fewer if they do not fit); default: the recipe's",
        )
    for command in (step, variants, loader, plan, memory):
        add_set(command, "override any key of the recipe; may be repeated")
    for command in (everything, here, loader, plan):
        command.add_argument(
            "--data-dir", type=Path, help="folder of photographs; default: drawn ones"
        )
    for command in (everything, here, step, variants, loader, plan):
        command.add_argument(
            "--device",
            type=one_of(["cuda", "cpu"]),
            default="cuda" if torch.cuda.is_available() else "cpu",
        )
    return parser.parse_args(arguments)


def run_bench(args: Namespace) -> int:
    # What measures imports torchvision and the compiler: here, so that --help need not.
    from ..shared.steps import measured_recipe
    from .all import bench_all, machine
    from .loader import print_loader
    from .plan import print_plan
    from .step import memory_row, print_step
    from .training import row_table
    from .variants import VARIANTS, variant_rows, waves

    if args.bench == "all":
        return bench_all(
            args.out, device=args.device, photographs=args.data_dir, minutes=args.minutes
        )
    device = torch.device("cuda:0" if getattr(args, "device", "cpu") == "cuda" else "cpu")
    torch.set_num_threads(1)  # so that a CPU's time is that of the processor
    row = machine(device, getattr(args, "data_dir", None))
    print(", ".join(f"{name} {value}" for name, value in row.items()))
    if args.bench == "memory":  # in the precision of a card
        recipes = [measured_recipe(name, args.set, device, automatic=BF16) for name in args.recipe]
        print("\n" + row_table([memory_row(recipe, args.card_gib) for recipe in recipes]))
    elif args.bench == "step":
        for recipe in [measured_recipe(name, args.set, device) for name in args.recipe]:
            print_step(recipe, device, args.batch or recipe.optim.max_batch_per_process)
    elif args.bench == "variants":
        for wave in waves(VARIANTS, device):
            print("\n" + row_table(variant_rows(wave, device, args.set)), flush=True)
    elif args.bench == "plan":
        print_plan(args, device)
    elif args.bench == "loader":
        print_loader(args, device)
    return 0


main = main_of("vitinit bench", parse_arguments, run_bench)
