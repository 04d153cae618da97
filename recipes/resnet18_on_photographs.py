"""What the ViTs of `photos` and `photos_ahead` are measured against: torchvision's ResNet-18 from scratch.

    python recipes/resnet18_on_photographs.py photos --epochs 14 --lr 0.02 --out rows.jsonl

The images, crops, flips, batches and their order are those of the recipe `photos` with this seed,
without RandAugment. SGD with Nesterov's momentum .9, weight decay 5e-4, one cycle of the learning
rate up to --lr, label smoothing .1, channels last, bf16, or float32 by --set engine.amp=off. The
last line of --out has the result. The same command goes on where it was stopped, by the .pt file
beside --out, and starts again once it has ended.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision

from vitinit.recipe.files import load_recipe, overrides
from vitinit.runs.data import open_data
from vitinit.tasks.labels import evaluate
from vitinit.train.distributed import joined
from vitinit.train.interruption import StopRequest
from vitinit.train.loop import autocast

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("data_dir")
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", required=True)
parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
args = parser.parse_args()
recipe = load_recipe(
    "photos",
    overrides(
        data_dir=args.data_dir,
        seed=args.seed,
        sets=["rand_augment.layers=0", "data.workers=0", "engine.amp=bf16", *args.set],
    ),
)

with joined() as processes, StopRequest() as stop:
    data = open_data(recipe, processes, dry_run=False)
    torch.manual_seed(args.seed)
    model = torchvision.models.resnet18(num_classes=len(data.whole_set.classes))
    model = model.to(processes.device, memory_format=torch.channels_last)
    batches, first, seconds = data.train_batches, 0, 0.0
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.epochs * batches.steps_per_epoch
    )
    parts, last = (model, optimizer, schedule), Path(args.out).with_suffix(".pt")
    if last.exists() and (saved := torch.load(last))["arguments"] == vars(args):
        first, seconds = saved["epochs"], saved["seconds"]
        for part, state in zip(parts, saved["states"]):
            part.load_state_dict(state)
    for epoch in range(first, args.epochs):
        began = time.process_time()  # CPU seconds of training and loading alone
        model.train()
        for _, micro_batches in batches.steps(epoch):
            for micro_batch in micro_batches:
                images, targets = micro_batch.prepare()  # (B, 3, H, W), (B, K)
                with autocast(processes.device, recipe.engine.amp):
                    logits = model(images.to(memory_format=torch.channels_last))
                (F.cross_entropy(logits.float(), targets) / len(micro_batches)).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seconds += time.process_time() - began
        [result] = evaluate(
            [model],
            data.val_batches,
            amp=recipe.engine.amp,
            processes=processes,
            stop=stop,
            num_classes=len(data.whole_set.classes),
        )
        row = {
            "data": args.data_dir,
            "seed": args.seed,
            "lr": args.lr,
            "epochs": args.epochs,
            "epoch": epoch + 1,
            "val_top1": result.top1,
            "cpu_seconds": seconds,
        }
        print(json.dumps(row), flush=True)
        with open(args.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        torch.save(
            {
                "arguments": vars(args),
                "epochs": epoch + 1,
                "seconds": seconds,
                "states": [part.state_dict() for part in parts],
            },
            last,
        )
    last.unlink()
