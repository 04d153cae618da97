"""Evaluate checkpoints exactly: every image of a data set counts once.

    python eval.py runs/deit_base-impulse-s0
    torchrun --nproc_per_node=8 eval.py runs/*/best.pt --data imagenet_r=/data/imagenet-r

The parts of an evaluation, in order; `python eval.py --help` has all options:

    arguments    vitinit/programs/evaluate.py        parse_arguments      the command line
    checkpoints  vitinit/runs/load.py                open_saved           contents, recipe, size
    data sets    vitinit/programs/evaluate.py        open_set             files and labels
    classes      vitinit/programs/evaluate.py        columns_of           which logits are theirs
    models       vitinit/programs/evaluate.py        models_of            and their moving averages
    batches      vitinit/runs/data.py                evaluation_batches   resized, centre-cropped
    measures     vitinit/tasks/labels.py             evaluate             one exact pass for all
    results      vitinit/programs/shared/results.py  print_results        lines or a table, and JSON
"""

if __name__ == "__main__":
    from vitinit.base.begin import begin

    begin()  # before torch is imported, and not in a loader's workers

import sys

from vitinit.programs.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
