"""Compare finished runs: groups over seeds, paired differences, curves.

    vitinit compare runs/quickstart-*
    vitinit compare runs/quickstart-default-* runs/quickstart-impulse-* --out comparison
    vitinit compare runs/quickstart-* --pack quickstart.tar.xz
    vitinit compare quickstart.tar.xz/*-default-* quickstart.tar.xz/*-impulse-*
    vitinit compare quickstart.tar.xz --replay quickstart-impulse-s0 --epochs 1

Runs that differ in nothing but the seed form a group. Every other group is compared with that of
the run named first, seed by seed. --out writes comparison.md and curves.png into a folder (needs
the extra `figures`).

--pack keeps the runs in one compressed file instead: recipe.toml, run.json and metrics.jsonl of
each finished one. Such a file stands for all its runs wherever a run's folder is expected here; a
pattern after its name chooses some of them (zsh needs it in quotes).

--replay trains one of the runs again, in runs/replay-NAME or --out, and goes on there if it was
stopped. On the same kind of machine its rows are those on record, to the bit; elsewhere its last
one should lie within what another seed would have, by the seeds on record. The exit status is 1 if
it does not. --data-dir and --set data.KEY=VALUE say where its images are here.
"""

from argparse import Namespace
from pathlib import Path

from ..base.files import write_text_atomically
from ..base.messages import counted
from .shared.command_line import Output, Parser, add_set, add_trust, integer, main_of
from .shared.curves import draw_curves
from .shared.groups import finished_runs
from .shared.outputs import require_replaceable
from .shared.records import SUFFIX, read_runs, write_archive
from .shared.results import compare_runs

# What a replay may change: where images are, and how they are stored.
PLACES = ("data.name", "data.root", "data.workers", "data.on_device_gib")


def compare(args: Namespace) -> int:
    out = args.out
    if args.replay:
        from .shared.replay import replay  # here, as a comparison trains nothing

        text, holds = replay(
            read_runs(args.runs),
            args.replay,
            data_dir=args.data_dir,
            sets=args.set,
            epochs=args.epochs,
            folder=out or Path("runs", f"replay-{args.replay}"),
            trust_teacher=args.trust_teacher,
            imports=args.imports,
        )
        print(f"\n{text}", end="")
        return int(not holds)
    if out and out.exists():
        require_replaceable(out / "comparison.md", ".md")
        require_replaceable(out / "curves.png", ".png")
    runs = read_runs(args.runs)
    if args.pack:
        finished, unfinished = finished_runs(runs)
        write_archive(finished, args.pack)
        size = args.pack.stat().st_size
        written = f"wrote {args.pack}: {counted(len(finished), 'run')}, {size:,} bytes"
        print(*unfinished, written, sep="\n")
        return 0
    groups, text = compare_runs(runs)
    print(text, end="", flush=True)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        write_text_atomically(text, out / "comparison.md")
        draw_curves(out / "curves.png", groups)
        print(f"\nwrote {out / 'comparison.md'} and {out / 'curves.png'}")
    return 0


def parse_arguments(arguments: list[str]) -> Namespace:
    parser = Parser(prog="vitinit compare", description=__doc__)
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a run, archive of runs, or archive/pattern",
    )
    parser.add_argument(
        "--out",
        type=Output(),
        metavar="FOLDER",
        help="write the comparison and its curves into this folder, too",
    )
    to = parser.add_mutually_exclusive_group()
    to.add_argument(
        "--pack",
        type=Output(SUFFIX, grows=True),
        metavar="FILE.tar.xz",
        help="write the finished runs into this archive, without comparing them",
    )
    to.add_argument("--replay", metavar="NAME", help="train this one of the runs again")
    parser.add_argument("--data-dir", help="with --replay: data.root, the folder of its data set")
    words = "with --replay: how its images are stored, such as data.name=cifar10"
    add_set(parser, words, "data.KEY=VALUE")
    parser.add_argument(
        "--epochs",
        type=integer(1),
        default=0,
        help="with --replay: so many epochs from the start, and not all",
    )
    add_trust(parser)
    args = parser.parse_args(arguments)
    if args.out and args.pack:
        parser.error("argument --pack: not allowed with argument --out")
    if not args.replay and (args.data_dir or args.epochs or args.set or args.trust_teacher):
        parser.error("--data-dir, --set, --epochs and --trust-teacher are for --replay NAME")
    for text in args.set:
        if text.partition("=")[0] not in PLACES:
            parser.error(
                f"--set {text}: a replay has all from the record but where its images "
                f"are: {', '.join(PLACES)}"
            )
    return args


main = main_of("vitinit compare", parse_arguments, compare)
