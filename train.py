"""Train a model as a recipe describes.

    python train.py --recipe deit_base --init impulse --data-dir /data/imagenet

Read this file from top to bottom:
    recipe → data → model → init → optimiser → engine → run folder
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)     # Ctrl-C before the first step just ends it

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitinit.command_line import Parser, building, integer, run_program
from vitinit.data.images import DataError
from vitinit.data.pipeline import Data
from vitinit.data.sources import Source, file_sizes, fingerprint, folder_of
from vitinit.init import INITS
from vitinit.keys import Stream, keyed_generator
from vitinit.models.layers import draw_drop_path
from vitinit.recipe.sections import Recipe
from vitinit.runs.data import open_data
from vitinit.runs.folder import RunFolder
from vitinit.runs.resume import RunLock, choose_run, require_same_data
from vitinit.runs.start import (build, cautions, initialise, measure_mass, read_images, rehearsal,
                                set_up_folder, summary)
from vitinit.train import distributed
from vitinit.train.device import describe_device, memory_for, peak_gib
from vitinit.train.distributed import Processes
from vitinit.train.engine import (cross_entropy, evaluate, read_losses, set_precision, train_epochs,
                                  tune_convolutions)
from vitinit.train.interruption import Interrupted, StopRequest
from vitinit.train.metrics import (Diverged, Progress, ProgressBar, StepRow, epoch_line,
                                   metrics_row, training_flops)
from vitinit.train.optim import learning_rate, optimizer_for, set_learning_rate
from vitinit.train.state import Ema, TrainState

# Modules that only some runs need, for fine-tuning and a teacher, are imported where they are used.
REPOSITORY = Path(__file__).resolve().parent


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; an error ends the program with exit status 2."""
    parser = Parser(prog="train.py", description=__doc__)
    parser.add_argument("--recipe", help="name in recipes/, or path of a .toml file")
    parser.add_argument("--init", help=f"init.name: {', '.join(INITS)}")
    parser.add_argument("--data-dir", help="data.root: folder of the data set")
    parser.add_argument("--out-dir", type=Path,
                        help="folder of this run; default runs/<recipe>-<init>-s<seed>")
    parser.add_argument("--seed", type=integer(0, 2**63), help="run.seed")
    parser.add_argument("--resume", metavar="RUN",
                        help="continue the run in this folder; 'auto': the one in --out-dir if any")
    parser.add_argument("--dry-run", action="store_true",
                        help="build everything, print it, run one forward pass, write nothing")
    parser.add_argument("--read-images", action="store_true",
                        help="with --dry-run: decode all images, and list those that cannot be")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="override any key of the recipe; may be repeated")
    return parser.parse_args(arguments)


# Model and optimiser --------------------------------------------------------------------------


def initial_state(recipe: Recipe, processes: Processes, saved: dict[str, Any] | None,
                  path: Path, train_set: Source) -> tuple[TrainState, list[str]]:
    """The state that training starts from, and lines for the terminal about it.

    In a new run the weights are those of the init, or of the checkpoint that the recipe names. All
    processes take the main one's, before the moving average copies them.

    saved: the contents of the checkpoint at `path`, to resume from; None for a new run.
    train_set: the training images, which some inits read.
    """
    model, notes = build(recipe), []
    if saved is None:
        with processes.together():
            initialise(model, recipe, train_set)
            if recipe.init.checkpoint:
                from vitinit.runs.saved import fine_tune
                notes = fine_tune(model, recipe, [*map(str, train_set.classes)])
            elif processes.is_main:
                notes = measure_mass(model, recipe, train_set)
    model.to(processes.device, memory_format=(
        torch.channels_last if recipe.engine.channels_last else torch.contiguous_format))
    if saved is None:
        processes.share(model)
    with building(f"recipe {recipe.name}", "optim"):
        optimizer = optimizer_for(model, recipe.optim)
    scaler = torch.amp.GradScaler(processes.device.type, enabled=recipe.engine.amp == "fp16")
    ema = Ema(model, decay=recipe.ema.decay, warmup=recipe.ema.warmup) if recipe.ema.decay else None
    state = TrainState(model, optimizer, scaler, ema, Progress())
    if saved is not None:
        state.load_state_dict(saved, path)
    return state, notes


def wrap_models(state: TrainState, recipe: Recipe, processes: Processes
                ) -> tuple[nn.Module, list[nn.Module]]:
    """The state's models as modules to call: the one to train, and a list to evaluate.

    The list holds the model and, if there is one, its moving average; they share their weights.
    """
    forward, measured = state.model, [state.model, *([state.ema.model] if state.ema else [])]
    if processes.world_size > 1:
        forward = DistributedDataParallel(forward, gradient_as_bucket_view=True)
    if recipe.engine.compile:
        forward, measured = torch.compile(forward), [torch.compile(one) for one in measured]
    return forward, measured


# The run --------------------------------------------------------------------------------------


def train(args: argparse.Namespace, processes: Processes, lock: RunLock) -> int:
    """Do one run, from the parsed command line to the last line printed; return the exit status."""
    # Recipe: of a new run, or of one to resume. --------------------------------------------------
    chosen = choose_run(args, processes, lock)
    if chosen is None:
        return 0
    folder, saved, recipe, written_root = chosen
    resumed, root = saved is not None, recipe.data.root
    processes.require_equal(recipe.keys | {"the version of torch": torch.__version__,
                                           "the step to go on from": folder.step})

    # Data, and the teacher of its classes. -------------------------------------------------------
    with building(f"recipe {recipe.name}", "data"):
        data = open_data(recipe, processes, dry_run=args.dry_run)
    classes, per_epoch = list(map(str, data.whole_set.classes)), data.train_batches.steps_per_epoch
    recipe = recipe.with_data(num_classes=len(classes))
    teacher = None                                   # of the loss; see vitinit/train/distill.py
    if recipe.distill.teacher:
        from vitinit.runs.teacher import learn_from_teacher
        with processes.together():
            teacher = learn_from_teacher(recipe, classes, processes.device)
    seen = {"training images": len(data.train_set), "validation images": len(data.val_set),
            "files and labels": fingerprint(data.train_set, root) + fingerprint(data.val_set, root),
            "teacher": teacher.teacher.digest if teacher else "none"}
    if recipe.model.name.startswith("convmixer"):    # whose BatchNorm sees a micro-batch
        seen["images per micro-batch"] = data.plan.micro_batch_size
    processes.require_equal(seen)
    if args.read_images and read_images(recipe, data, processes):
        return 1
    if processes.is_main and not args.dry_run:
        seen |= file_sizes([data.train_set, data.val_set], recipe.run.seed)
    seen["root"] = root and str(folder_of(root).absolute())
    if resumed:
        with processes.together():
            require_same_data(folder, saved, classes, seen)

    # Model, init and optimiser. -----------------------------------------------------------------
    state, notes = initial_state(recipe, processes, saved, folder.read_from, data.train_set)
    state.about = {"recipe": recipe.with_data(root=written_root).as_dict(), "classes": classes}
    notes += [f"teacher {teacher}"] if teacher else []
    chosen = saved = None                            # frees the second copy of its tensors
    progress = state.progress
    lr_at = partial(learning_rate, schedule=recipe.schedule, steps_per_epoch=per_epoch,
                    peak=recipe.optim.peak_lr)
    if progress.step:                                # for a checkpoint before the next step
        set_learning_rate(state.optimizer, lr_at(progress.step - 1))
    set_precision(recipe.engine.tf32)
    tune_convolutions(state.model)
    processes.say(summary(recipe, data, state.model, notes, state.optimizer, lr_at, processes))
    for caution in cautions(recipe, data):
        processes.say(f"warning {caution}")
    if args.dry_run:
        processes.say(rehearsal(recipe, data, state, teacher))
        return 0

    # Run folder and engine: from here on there is something to save. ----------------------------
    with StopRequest() as stop:
        with processes.together():
            if processes.is_main:
                set_up_folder(folder, lock, recipe, state, resumed=resumed,
                              starts_again=args.resume is not None)
                folder.record_start(REPOSITORY, processes=processes.world_size,
                                    device=describe_device(processes.device), data=seen)
        processes.say(f"run     {folder.path}"
                      + (f", resumed at step {progress.step:,}" if resumed else ""))
        return run_epochs(recipe, data, state, folder, processes, stop, lr_at=lr_at,
                          teacher=teacher)


def save_last(state: TrainState, folder: RunFolder, processes: Processes) -> None:
    """Write last.pt; all processes wait until the main one has written it."""
    read_losses(state, processes)
    with processes.together():
        if processes.is_main:
            folder.save(state.state_dict(), folder.last)


def run_epochs(recipe: Recipe, data: Data, state: TrainState, folder: RunFolder,
               processes: Processes, stop: StopRequest, *, lr_at: Callable[[int], float],
               teacher: Any) -> int:
    """Train, evaluate and save until the run ends or is stopped; return the exit status.

    teacher: a `LearnFromTeacher`, or None.
    """
    progress, epochs = state.progress, recipe.schedule.total_epochs
    best_by, batch = recipe.checkpoint.best_by, recipe.optim.global_batch
    flops = training_flops(state.model, data.plan.micro_batch_size, recipe.data.image_size)
    forward, measured = wrap_models(state, recipe, processes)

    def drop_path_at(step: int) -> Tensor | None:    # (branches, global batch)
        if not any(state.model.drop_path_rates):
            return None
        rng = keyed_generator(recipe.run.seed, Stream.DROP_PATH, step)
        return draw_drop_path(state.model.drop_path_rates, batch, rng)

    def record(row: StepRow) -> None:
        with processes.together():
            if processes.is_main:
                folder.steps.append(row._asdict())

    def finish_epoch(epoch: int) -> None:
        evaluated = epoch % recipe.eval.every_epochs == 0 or epoch == epochs
        save_due = epoch % recipe.checkpoint.every_epochs == 0 or epoch == epochs
        results = []
        if evaluated and save_due:                   # an error in evaluation then loses no training
            save_last(state, folder, processes)
        if evaluated:
            processes.share(*measured)
            with (ProgressBar("validate", len(data.val_batches), shown=processes.is_main) as bar,
                  memory_for("eval.batch_size", recipe.eval.batch_size, processes.rank)):
                results = evaluate(measured, bar.over(data.val_batches), amp=recipe.engine.amp,
                                   num_classes=recipe.data.num_classes, processes=processes,
                                   stop=stop)
        row = metrics_row(progress, results, lr=lr_at(progress.step - 1), flops=flops,
                          global_batch=batch, processes=processes)
        progress.finish_epoch()
        processes.say(epoch_line(row, epochs))
        is_best = progress.improves(row[best_by], best_by)
        with processes.together():
            if processes.is_main:
                # If the run dies before last.pt is written, resuming removes the line of metrics.
                folder.metrics.append(row)
                if is_best:
                    folder.save(state.weights(), folder.best)
                if epoch in recipe.checkpoint.keep_epochs:
                    folder.save(state.weights(), folder.kept(epoch))
        if save_due:
            save_last(state, folder, processes)

    try:
        with memory_for("optim.max_batch_per_process", data.plan.micro_batch_size, processes.rank):
            train_epochs(
                state, forward, data.train_batches.steps, epochs=epochs, lr_at=lr_at,
                global_batch=batch, amp=recipe.engine.amp, objective=teacher or cross_entropy,
                drop_path_at=drop_path_at, clip_norm=recipe.optim.clip_norm,
                processes=processes, stop=stop, record=record,
                save_every=recipe.checkpoint.every_steps,
                save=partial(save_last, state, folder, processes), finish_epoch=finish_epoch,
                bar_total=data.train_batches.steps_per_epoch * processes.is_main)
    except (Interrupted, DataError) as ended:        # between two steps
        save_last(state, folder, processes)
        if isinstance(ended, DataError):
            if processes.is_main:
                folder.forget_sizes()
            processes.say(f"the run is safe at step {progress.step:,}; once the data is mended, go "
                          f"on with --resume {folder.path}")
            raise
        processes.say(f"stopped by signal {ended.number} after step {progress.step:,}; go on "
                      f"with --resume {folder.path}")
        return 128 + ended.number
    except Diverged as diverged:
        fault = teacher.fault(processes, data.plan.accumulation) if teacher else ""
        advice = (f"; {folder.last} is from before, but would go the same way again: start anew "
                  "with a lower optim.base_lr, say, or optim.clip_norm")
        raise Diverged(f"{diverged}{fault or advice}") from None
    best = "none" if progress.best is None else f"{progress.best:.2f}"
    processes.say(f"done    {epochs} epochs, best {best_by} {best}, peak memory "
                  f"{peak_gib(processes.device):.2f} GiB; everything is in {folder.path}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the program with these arguments (default: the command line); return the exit status."""
    def program() -> int:
        args = parse_arguments(arguments)
        with distributed.joined() as processes, RunLock() as lock:
            return train(args, processes, lock)
    return run_program("train.py", program)


if __name__ == "__main__":
    sys.exit(main())
