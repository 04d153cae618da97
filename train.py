"""Train a model as a recipe describes.

    python train.py --recipe deit_base --init impulse --data-dir /data/imagenet
    torchrun --nproc_per_node=8 train.py --recipe deit_base --init impulse --data-dir /data/imagenet

The parts of a run, in order; after the first they are those of `Run.train` in vitinit/run.py:

    arguments   vitinit/programs/train.py     parse_arguments      the command line
    processes   vitinit/train/distributed.py  start                one, or those of torchrun
    recipe      vitinit/runs/resume.py        choose_run           of a new run, or of one to resume
    data        vitinit/runs/data.py          open_data            images and batches
    task        vitinit/runs/model.py         task_of              what is learned
    teacher     vitinit/runs/teacher.py       learn_from_teacher   if the recipe names one
    model       vitinit/runs/model.py         build                as its constructor draws it
    init        vitinit/runs/start.py         initialise           its weights, in place
    optimiser   vitinit/train/optim.py        optimizer_for        AdamW, or Muon with AdamW
    summary     vitinit/runs/summary.py       summary              all of this, printed
    folder      vitinit/runs/folder.py        record_start         recipe.toml, run.json, last.pt, …
    loop        vitinit/train/loop.py         train_epochs         from a batch to the checkpoint

In Python the same is `vitinit.Run("deit_base", init="impulse", data_dir="/data/imagenet").train()`,
and an installed package has this program as `vitinit train`.
"""

if __name__ == "__main__":
    from vitinit.base.begin import begin

    begin()  # before torch is imported, and not in a loader's workers

import sys

from vitinit.programs.train import main

if __name__ == "__main__":
    sys.exit(main())
