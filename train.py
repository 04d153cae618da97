"""Train a model by a recipe.

    torchrun train.py --recipe deit_base --init impulse --data-dir /data/imagenet

Read it from top to bottom:
    recipe → data → model → init → optimiser → engine → run folder
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from vitinit.command_line import USER_ERRORS, Parser, choose_run, complain
from vitinit.data.datasets import download, open_split
from vitinit.data.draw import CropAndFlip, Erasing, RandAugment, SampleDraws
from vitinit.data.images import DataError
from vitinit.data.loader import steps
from vitinit.data.mix import Mixing
from vitinit.data.resident import ResidentTrainLoader, evaluation_batches, training_batches
from vitinit.data.sampler import TrainSampler, plan_batches
from vitinit.data.subset import stratified_part
from vitinit.data.to_device import ToDevice, TrainToDevice
from vitinit.init import INITS, init_weights
from vitinit.init.weight_selection import select_weights
from vitinit.keys import Stream, keyed_generator
from vitinit.models import build_model
from vitinit.models.convert import native_names
from vitinit.models.layers import draw_keep
from vitinit.recipe import RecipeError, dump_recipe
from vitinit.train import distributed
from vitinit.train.checkpoint import CheckpointError, load, load_model, model_state
from vitinit.train.distributed import Processes, StopRequest
from vitinit.train.ema import Ema
from vitinit.train.engine import evaluate, train_epoch
from vitinit.train.metrics import METRICS, Diverged, Progress, ProgressBar, epoch_line
from vitinit.train.optim import adamw, learning_rate, scaled_lr
from vitinit.train.run_folder import checkpoint_file, describe_device, peak_memory
from vitinit.train.transfer import Transfer, start_from
from vitinit.values import to_toml

REPOSITORY = Path(__file__).resolve().parent


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="train.py", description=__doc__)
    parser.add_argument("--recipe", help="name in recipes/, or path of a .toml file")
    parser.add_argument("--init", help=f"init.name: {', '.join(INITS)}")
    parser.add_argument("--data-dir", help="data.root: folder of the data set")
    parser.add_argument("--out-dir", type=Path,
                        help="folder of this run; default runs/<recipe>-<init>-s<seed>")
    parser.add_argument("--seed", type=int, help="run.seed")
    parser.add_argument("--resume", metavar="RUN",
                        help="continue the run in this folder; 'auto': the one in --out-dir if any")
    parser.add_argument("--dry-run", action="store_true",
                        help="build everything, print it, run one forward pass, write nothing")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="override any key of the recipe; may be repeated")
    return parser.parse_args(arguments)


# ---------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, processes: Processes) -> int:
    """One run from its command line to its last line; returns the exit status."""
    together = partial(processes.together, errors=USER_ERRORS)
    say = partial(print, flush=True) if processes.is_main else lambda *_: None

    # Recipe: a new one, or that of the run to continue. ----------------------------------------
    folder, state, recipe = choose_run(args, processes, REPOSITORY / "recipes", say)

    # Data: sources, then batches of this process. ----------------------------------------------
    data, device = recipe.data, processes.device
    if not args.dry_run:
        together(lambda: download(data.name, data.root) if processes.local_rank == 0 else None)
    whole_set, val_set = together(lambda: [
        open_split(data.name, data.root, split, data.num_classes) for split in ("train", "val")])
    train_set = together(lambda: stratified_part(
        whole_set, share=data.subset, images_per_class=data.images_per_class, seed=data.subset_seed))
    optim, augment, mixing = recipe.optim, recipe.augment, Mixing(**vars(recipe.mix))
    try:
        plan = plan_batches(optim.global_batch, optim.max_batch_per_process, processes.world_size)
        sampler = TrainSampler(len(train_set), plan, rank=processes.rank, seed=recipe.run.seed,
                               repeats=augment.repeats)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    if plan.micro_batch == 1 and mixing.mixes:
        raise RecipeError("[mix] finds no partners in micro-batches of one image; raise "
                          "optim.max_batch_per_process or set mix.probability=0")
    crop = CropAndFlip(scale=augment.crop_scale, ratio=augment.crop_ratio, flip=augment.flip,
                       padding=augment.crop_padding, interpolation=augment.interpolation)
    erasing = Erasing(probability=augment.erase_probability, area=augment.erase_area,
                      ratio=augment.erase_ratio, fill=augment.erase_fill)
    rand_augment = RandAugment(**vars(recipe.rand_augment))
    draws = SampleDraws(seed=recipe.run.seed, size=data.image_size, crop=crop,
                        rand_augment=rand_augment, erasing=erasing)
    loading = dict(device=device, budget_gib=0.0 if args.dry_run else data.on_device_gib,
                   workers=data.workers)
    with ProgressBar("decode", len(train_set) + len(val_set), shown=processes.is_main) as bar:
        train_batches = together(lambda: training_batches(
            train_set, sampler, draws, advance=bar.advance, **loading))
        val_batches = together(lambda: evaluation_batches(
            val_set, rank=processes.rank, world_size=processes.world_size, size=data.image_size,
            crop_pct=recipe.eval.crop_pct, interpolation=recipe.eval.interpolation,
            batch_size=recipe.eval.batch_size, advance=bar.advance, **loading))
    looks = dict(mean=data.mean, std=data.std, channels_last=recipe.engine.channels_last)
    prepare_to_measure = ToDevice(device, **looks)
    prepare_to_train = TrainToDevice(
        device, **looks, fill=rand_augment.fill, erase_fill=erasing.fill,
        erase_after_mix=augment.erase_after_mix, mixing=mixing, num_classes=data.num_classes,
        seed=recipe.run.seed, rank=processes.rank)

    # Model and init. The init draws on the CPU from its own generator, so that its weights are the
    # same on every machine. -------------------------------------------------------------------
    try:
        model = build_model(recipe.model.name, num_classes=data.num_classes,
                            image_size=data.image_size, **recipe.model.options)
        if state is None:
            init_weights(model, recipe.init.name, **recipe.init.options,
                         generator=torch.Generator().manual_seed(recipe.run.seed))
        else:
            load_model(model, state["model"], folder.last)
    except ValueError as error:
        raise RecipeError(f"recipe {recipe.name}: {error}") from None
    transfer = together(lambda: fine_tune(
        model, Path(recipe.init.checkpoint), recipe.init.checkpoint_weights,
        recipe.init.checkpoint_fit)) if recipe.init.checkpoint and state is None else None
    model.to(device)

    # Optimiser: AdamW, its learning rate, loss scaling, moving average. ------------------------
    schedule = recipe.schedule
    optimizer = adamw(model, weight_decay=optim.weight_decay, betas=optim.betas, eps=optim.eps)
    peak_lr = scaled_lr(optim.base_lr, optim.lr_scaling, optim.global_batch)
    steps_per_epoch = sampler.steps_per_epoch
    lr_at = partial(learning_rate, shape=schedule.shape, steps_per_epoch=steps_per_epoch,
                    peak=peak_lr, epochs=schedule.epochs, warmup_epochs=schedule.warmup_epochs,
                    warmup_lr=schedule.warmup_lr, min_lr=schedule.min_lr, step_on=schedule.step_on)
    epochs = schedule.epochs + schedule.cooldown_epochs
    scaler = torch.amp.GradScaler(device.type, enabled=recipe.engine.amp == "fp16")
    ema = Ema(model, decay=recipe.ema.decay, warmup=recipe.ema.warmup) if recipe.ema.decay else None
    progress = Progress()
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        progress = Progress(**state["progress"])
        if ema is not None:
            ema.load_state_dict(state["ema"])
    resumed, state = state is not None, None         # its tensors need no second place in memory

    # Engine: what wraps the model, and what it is told. ----------------------------------------
    torch.set_float32_matmul_precision("high" if recipe.engine.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = recipe.engine.tf32
    forward = model
    if processes.world_size > 1:
        forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
    measured = [model, ema.model] if ema else [model]
    if recipe.engine.compile:
        forward, measured = torch.compile(forward), [torch.compile(one) for one in measured]

    def keep_at(step: int) -> torch.Tensor | None:
        if not any(model.drop_path_rates):
            return None
        rng = keyed_generator(recipe.run.seed, Stream.DROP_PATH, step)
        return draw_keep(model.drop_path_rates, optim.global_batch, rng)

    def measure(epoch: int) -> dict[str, Any]:
        """The finished epoch's line of metrics; null where nothing was evaluated."""
        row = dict.fromkeys(METRICS) | {
            "epoch": epoch + 1, "lr": lr_at(progress.step - 1),
            "train_loss": progress.loss_sum / progress.epoch_steps,
            "images_per_second": progress.epoch_steps * optim.global_batch / progress.seconds,
            "skipped_steps": progress.skipped_steps, "seconds": progress.seconds}
        if (epoch + 1) % recipe.eval.every_epochs and epoch + 1 < epochs:
            return row
        with ProgressBar("validate", len(val_batches), shown=processes.is_main) as bar:
            processes.share_buffers(measured)
            results = evaluate(measured, val_batches, amp=recipe.engine.amp, bar=bar,
                               prepare=prepare_to_measure, processes=processes,
                               num_classes=data.num_classes, data_errors=(DataError,))
        row |= {f"val_{key}": getattr(results[0], key) for key in ("loss", "top1", "top5")}
        if ema:
            row |= {"ema_top1": results[1].top1, "ema_top5": results[1].top5}
        return row

    parameters = sum(p.numel() for p in model.parameters())
    part = f" of {len(whole_set):,}" if len(train_set) < len(whole_set) else ""
    where = ", all on the device" if isinstance(train_batches, ResidentTrainLoader) else ""
    say(f"recipe  {recipe.name}, seed {recipe.run.seed}\n"
        f"data    {data.name}{data.root and ' ' + data.root}: {len(train_set):,}{part} to train on, "
        f"{len(val_set):,} to validate, {data.num_classes} classes, "
        f"{data.image_size[0]}×{data.image_size[1]}{where}\n"
        f"augment {augment.repeats} view(s) of an image, RandAugment {rand_augment.layers} × magnitude "
        f"{rand_augment.magnitude:g}, erasing {erasing.probability:g}, mixup {mixing.mixup_alpha:g}, "
        f"cutmix {mixing.cutmix_alpha:g}, label smoothing {mixing.label_smoothing:g}\n"
        f"model   {recipe.model.name}: {parameters:,} parameters, {to_toml(recipe.model.options)}\n"
        f"init    {recipe.init.name}: {to_toml(recipe.init.options)}\n"
        + (f"start   {recipe.init.checkpoint}, {recipe.init.checkpoint_fit}: {transfer}\n"
           if transfer else "") +
        f"batch   {optim.global_batch} = {processes.world_size} process(es) × {plan.accumulation} "
        f"micro-batch(es) × {plan.micro_batch} images, on {describe_device(device)}\n"
        f"steps   {steps_per_epoch:,} an epoch × {epochs} epochs = {steps_per_epoch * epochs:,}\n"
        f"lr      peak {peak_lr:g}; first step {lr_at(0):g}, last step "
        f"{lr_at(steps_per_epoch * epochs - 1):g}, changing every {schedule.step_on}")
    if args.dry_run:
        images, _ = prepare_to_measure(next(iter(val_batches)))
        with torch.no_grad():
            say(f"dry run: images {tuple(images.shape)} → logits "
                f"{tuple(model.eval()(images[:plan.micro_batch]).shape)}; nothing was written")
        return 0

    # Run folder. -------------------------------------------------------------------------------
    def checkpoint() -> dict[str, Any]:
        return {"model": model.state_dict(), "ema": ema.state_dict() if ema else None,
                "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(),
                "grid": model.grid, "step": progress.step, "progress": progress.state_dict(),
                "recipe": recipe.as_dict(), "classes": list(map(str, whole_set.classes))}

    def write(path: Path, *, to_resume: bool = False) -> None:
        if processes.is_main:
            kept = checkpoint()
            folder.save(kept if to_resume else {key: kept[key] for key in (
                "model", "ema", "grid", "step", "progress", "recipe", "classes")}, path)

    def set_up_folder() -> None:
        if not resumed:
            folder.create(dump_recipe(recipe), again=args.resume == "auto")
            if 0 in recipe.checkpoint.keep_epochs:
                write(folder.kept(0))
        else:
            folder.metrics.cut_back(progress.epochs)
        folder.record_start(REPOSITORY, processes=processes.world_size,
                            device=describe_device(device))
    processes.main_only(set_up_folder, USER_ERRORS)
    say(f"run     {folder.path}" + (f", resumed at step {progress.step:,}" if resumed else ""))

    # Epochs. -----------------------------------------------------------------------------------
    stop = StopRequest()
    every_steps = recipe.checkpoint.every_steps
    for epoch in range(progress.epochs, epochs):
        sampler.start(epoch=epoch, step=progress.epoch_steps)
        remaining = steps_per_epoch - progress.epoch_steps
        try:
            with ProgressBar(f"epoch {epoch + 1}/{epochs}", steps_per_epoch,
                             initial=progress.epoch_steps, shown=processes.is_main) as bar:
                for signal_number in train_epoch(
                        model=model, forward=forward, count=remaining, prepare=prepare_to_train,
                        steps=steps(train_batches, plan.accumulation), progress=progress,
                        lr_at=lr_at, keep_at=keep_at,
                        positions=partial(plan.positions, processes.rank),
                        optimizer=optimizer, scaler=scaler, ema=ema, amp=recipe.engine.amp,
                        clip_norm=optim.clip_norm, processes=processes, stop=stop,
                        data_errors=(DataError,), bar=bar,
                        save_due=lambda step: every_steps > 0 and step % every_steps == 0):
                    write(folder.last, to_resume=True)
                    if signal_number:
                        say(f"stopped by signal {signal_number} after step {progress.step:,}; "
                            f"go on with --resume {folder.path}")
                        return 128 + signal_number
            row = measure(epoch)
        except DataError:
            write(folder.last, to_resume=True)
            say(f"the run is safe at step {progress.step:,}; once the data is mended, go on with "
                f"--resume {folder.path}")
            raise

        progress.finish_epoch()
        say(epoch_line(row, epochs))

        # Metrics first: a run that dies before last.pt is written cuts the line back on resume.
        if processes.is_main:
            folder.metrics.append(row)
        best_by = recipe.checkpoint.best_by
        if progress.improves(row[best_by], best_by):
            write(folder.best)
        if epoch + 1 in recipe.checkpoint.keep_epochs:
            write(folder.kept(epoch + 1))
        if (epoch + 1) % recipe.checkpoint.every_epochs == 0 or epoch + 1 == epochs:
            write(folder.last, to_resume=True)

    say(f"done    {epochs} epochs, best {recipe.checkpoint.best_by} {progress.best:.2f}, peak memory "
        f"{peak_memory(device)}; everything is in {folder.path}")
    return 0


def fine_tune(model: torch.nn.Module, path: Path, weights: str, fit: str) -> Transfer:
    """Another run's weights into the initialised model; a run's folder means its last.pt."""
    path = checkpoint_file(path)
    state = load(path)
    tensors = native_names(model_state(state, path, weights))
    if fit == "select":
        try:
            tensors = select_weights(model, tensors)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from None
    return start_from(model, tensors, path, state.get("grid"))


def main(arguments: list[str] | None = None) -> int:
    try:
        return train(parse_arguments(arguments), distributed.start())
    except USER_ERRORS as error:
        complain("train.py", error)
        return 2
    except Diverged as error:
        complain("train.py", error)
        return 1
    finally:
        distributed.stop()


if __name__ == "__main__":
    distributed.leave_program(main())
