"""The one command: `vitinit PROGRAM …`, and `python -m vitinit PROGRAM …` without its script."""

import sys
from typing import NamedTuple

from .base.begin import begin
from .base.messages import nearest
from .base.table import find


class Program(NamedTuple):
    main: str  # where its function is: (words, its name) → exit status
    what: str  # in a line


PROGRAMS = {
    "fit": Program(".programs.fit.program:main", "from a folder of images to a model, in minutes"),
    "train": Program(".programs.train:main", "train a model as a recipe describes"),
    "eval": Program(".programs.evaluate:main", "evaluate checkpoints exactly, on any data set"),
    "predict": Program(".programs.predict:main", "say what images show, by a trained model"),
    "features": Program(".programs.features:main", "say how well features tell classes apart"),
    "sweep": Program(".programs.sweep:main", "train with every init, variant and seed"),
    "compare": Program(".programs.compare:main", "compare runs, with intervals; replay, pack them"),
    "recipe": Program(".programs.recipe:main", "print a recipe, or what several differ in"),
    "figures": Program(".programs.figures.program:main", "draw models, data and runs; reports"),
    "export": Program(".programs.export:main", "write weights or a program for other libraries"),
    "lessons": Program(".programs.lessons.program:main", "run the code of the lessons"),
    "bench": Program(".programs.bench.program:main", "check and measure this machine"),
}
HELP = "\n".join(
    [
        "usage: vitinit PROGRAM …",
        *(f"  {name:9}{program.what}" for name, program in PROGRAMS.items()),
        "vitinit PROGRAM --help shows a program's options. For several processes:",
        "torchrun --nproc_per_node=N -m vitinit train …, or train.py and eval.py of the repository",
    ]
)


def main() -> int:
    """Start the program that the command line names; return the exit status."""
    begin()  # before a program imports torch
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        print(HELP)
        return 0
    if name not in PROGRAMS:
        print(f"vitinit: there is no program '{name}'{nearest(name, PROGRAMS)}", file=sys.stderr)
        return 2
    return find(PROGRAMS[name].main)(words, f"vitinit {name}")


if __name__ == "__main__":
    sys.exit(main())
