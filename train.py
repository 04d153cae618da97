"""Train a model as a recipe describes.

    python train.py --recipe deit_base --init impulse --data-dir /data/imagenet
    torchrun --nproc_per_node=8 train.py --recipe deit_base --init impulse --data-dir /data/imagenet

`main` in vitinit/programs/train.py reads the command line and makes a `Run`, whose `train`, in
vitinit/run.py, is all that happens then, from top to bottom:

    recipe       vitinit/runs/resume.py   choose_run     of a new run, or of one that goes on
    data         vitinit/runs/data.py     open_data      images, and batches of them
    task         vitinit/runs/start.py    open_task      labels, a teacher, or hidden patches
    model        vitinit/runs/model.py    build          as its constructor draws it
    init         vitinit/runs/start.py    draw_weights   the first weights
    optimiser    vitinit/runs/start.py    new_state      with loss scale and moving average
    folder       vitinit/runs/keeper.py   begin_folder   recipe.toml, run.json, last.pt, …
    loop         vitinit/train/loop.py    train_epochs   epochs, and their steps
    a step       vitinit/train/loop.py    train_step     forward, loss, backward; new weights
    epoch's end  vitinit/runs/keeper.py   end_epoch      evaluation, rows, checkpoints

In Python the same is `vitinit.Run("deit_base", init="impulse", data_dir="/data/imagenet").train()`.
"""

if __name__ == "__main__":
    from vitinit.base.begin import begin

    begin()  # before torch is imported, and not in a loader's workers

import sys

from vitinit.programs.train import main

if __name__ == "__main__":
    sys.exit(main())
