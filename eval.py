"""Exact accuracy of a checkpoint over every image of a validation set, each counted once.

    python eval.py runs/deit_base-impulse-s0
    torchrun --nproc_per_node=8 eval.py deit_base_patch16_224.pth --recipe deit_base \\
        --data-dir /data/imagenet

A run folder (its last.pt) or a checkpoint of ours knows its recipe; model and EMA are evaluated. For
any other checkpoint, such as DeiT's own, --recipe says what it is a checkpoint of. The last line
printed is the result as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch

from vitinit.command_line import (USER_ERRORS, Parser, complain, loaded, moved, overrides,
                                  resolve_recipe)
from vitinit.data.datasets import download, open_split
from vitinit.data.images import DataError
from vitinit.data.loader import EvalViews, eval_loader
from vitinit.data.to_device import ToDevice
from vitinit.recipe import Recipe, RecipeError, find_recipe, from_dict
from vitinit.train import distributed
from vitinit.train.checkpoint import load
from vitinit.train.distributed import Processes
from vitinit.train.engine import evaluate
from vitinit.train.metrics import ProgressBar
from vitinit.train.run_folder import checkpoint_file

REPOSITORY = Path(__file__).resolve().parent


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="eval.py", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a run folder or a checkpoint file")
    parser.add_argument("--recipe", help="what a checkpoint without a recipe is a checkpoint of")
    parser.add_argument("--data-dir", help="data.root: folder of the data set")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="override any key of the recipe given by --recipe")
    return parser.parse_args(arguments)


def open_checkpoint(args: argparse.Namespace) -> tuple[Path, dict, Recipe]:
    """The file, what is in it, and the recipe that says how to evaluate it."""
    path = checkpoint_file(args.checkpoint)
    state = load(path)
    if args.recipe is not None:
        changes = overrides(data_dir=args.data_dir, sets=args.set)
        return path, state, resolve_recipe(find_recipe(args.recipe, REPOSITORY / "recipes"),
                                           changes)
    if "recipe" not in state:
        raise RecipeError(f"{path}: holds no recipe; say with --recipe what it is a checkpoint of")
    if args.set:
        raise RecipeError(f"--set {args.set[0]}: {path} brings its own recipe; --set goes with "
                          "--recipe")
    return path, state, moved(from_dict(state["recipe"], str(path)), args.data_dir)


def run(args: argparse.Namespace, processes: Processes) -> None:
    path, state, recipe = processes.together(lambda: open_checkpoint(args), USER_ERRORS)
    data, device = recipe.data, processes.device
    processes.together(lambda: download(data.name, data.root)
                       if processes.local_rank == 0 else None, USER_ERRORS)
    source = processes.together(lambda: open_split(data.name, data.root, "val", data.num_classes),
                                USER_ERRORS)
    batches = eval_loader(
        EvalViews(source, rank=processes.rank, world_size=processes.world_size,
                  size=data.image_size, crop_pct=recipe.eval.crop_pct,
                  interpolation=recipe.eval.interpolation),
        batch_size=recipe.eval.batch_size, workers=data.workers,
        pin_memory=device.type == "cuda")
    prepare = ToDevice(device, mean=data.mean, std=data.std,
                       channels_last=recipe.engine.channels_last)
    torch.set_float32_matmul_precision("high" if recipe.engine.tf32 else "highest")
    names = [name for name in ("model", "ema") if name == "model" or state.get(name)]
    models = processes.together(lambda: [loaded(recipe, state, path, name) for name in names],
                                USER_ERRORS)
    models = [model.to(device) for model in models]
    if recipe.engine.compile:
        models = [torch.compile(model) for model in models]
    with ProgressBar("validate", len(batches), shown=processes.is_main) as bar:
        results = evaluate(models, batches, prepare=prepare, amp=recipe.engine.amp,
                           processes=processes, data_errors=(DataError,), bar=bar)
    if processes.is_main:
        for name, result in zip(names, results):
            print(f"{name:5}  top-1 {result.top1:.3f} %  top-5 {result.top5:.3f} %  "
                  f"loss {result.loss:.4f}  over {result.images:,} images")
        print(json.dumps({"checkpoint": str(path), "recipe": recipe.name,
                          "data": data.root or data.name}
                         | {name: dataclasses.asdict(result)
                            for name, result in zip(names, results)}), flush=True)


def main(arguments: list[str] | None = None) -> int:
    try:
        run(parse_arguments(arguments), distributed.start())
        return 0
    except USER_ERRORS as error:
        complain("eval.py", error)
        return 2
    finally:
        distributed.stop()


if __name__ == "__main__":
    distributed.leave_program(main())
