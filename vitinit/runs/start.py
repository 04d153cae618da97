"""What a run starts from: its task; its init, or the weights of another run or project; its state."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..base.files import CheckpointError
from ..base.keys import Purpose, keyed_generator
from ..base.messages import in_brief
from ..base.values import ReadOnly, flat, plain, to_toml
from ..data.classes import rows_by_name
from ..data.folders import composed
from ..data.pipeline import Data
from ..data.sources import Source
from ..init import family_of, init_weights, reads_images
from ..models import MODELS
from ..models.attention import hold_to_shifts
from ..models.layers import Classifier, draw_drop_path, recompute_blocks
from ..recipe.files import RecipeError, building
from ..recipe.sections import Recipe
from ..tasks import Task, TensorFunction
from ..train.distributed import Processes
from ..train.loop import set_precision, tune_convolutions
from ..train.metrics import Progress
from ..train.optim import LearningRate, freeze_below_head, optimizer_for, set_learning_rate
from ..train.state import Ema, TrainState
from .data import training_views
from .load import Saved, fetch_published, open_file, published_weights, rows_of
from .model import compiled, task_of
from .transfer import start_from
from .watching import Watchers

# Keys of a recipe that no tensor shows: of the model's function, and of how images are prepared.
FUNCTION = tuple(
    f"model.options.{key}"
    for key in (
        "num_heads",
        "norm_eps",
        "activation",
        "alpha",
        "reads",
        "input_pos_embed",
        "logit_scale",
        "rope_frequencies",
        "rope_base",
        "rope_coordinates",
    )
)
PREPARATION = ("data.mean", "data.std", "eval.crop_pct", "eval.interpolation", "augment.fit")
INIT_IMAGES = 512  # training images that an init may read


def fetch_weights(recipe: Recipe, processes: Processes) -> None:
    """Fetch the published weights that the recipe starts from, if any, once on each machine."""
    if not recipe.init.checkpoint:
        return
    weights = published_weights(recipe.init.checkpoint)
    with processes.together():
        if weights is not None and processes.local_rank == 0:
            fetch_published(weights)


def open_task(
    recipe: Recipe,
    classes: Sequence[str],
    processes: Processes,
    objective: Callable[..., Tensor] | None = None,
    trust_teacher: bool = False,
) -> Task:
    """What the recipe learns of these classes, with the teacher that it names, if any. objective:
    a loss in place of the task's, if any. Raises the same OneLineError on all processes.
    """
    if not recipe.distill.teacher:
        return task_of(recipe, classes)
    if objective is not None:
        raise RecipeError(
            "distill.teacher is given, and another objective, which would not ask it: leave one of "
            "them out"
        )
    from .teacher import learn_from_teacher  # here, as only some runs need it

    with processes.together():
        return learn_from_teacher(recipe, classes, processes.device, trusted=trust_teacher)


def objective_of(recipe: Recipe, data: Data, task: Task, processes: Processes) -> TensorFunction:
    """The loss that is minimised: the task's, as [loss] says it. Raises RecipeError."""
    with building(f"recipe {recipe.name}", "loss"):
        class_images = data.train_set.class_images.tolist()
        return task.objective(recipe.loss, class_images, processes.device)


def initialise(model: Classifier, recipe: Recipe, source: Source | None) -> torch.Generator:
    """Apply the recipe's init to its model, on the CPU, from a generator of the run's seed, which
    is returned. source: the training images, of which some inits read INIT_IMAGES; None: there are
    none. Raises RecipeError, and DataError for an image that cannot be read.
    """
    init = recipe.init
    with building(f"recipe {recipe.name}", "init"):
        images = None
        replaced = init.checkpoint != ""  # by weights for which no image counts
        if source is not None and not replaced and reads_images(init.name, family_of(model)):
            images = training_views(recipe, source, INIT_IMAGES)
        generator = torch.Generator().manual_seed(recipe.run.seed)
        init_weights(model, init.name, **init.options, images=images, generator=generator)
    return generator


def draw_weights(
    model: nn.Module,
    classifier: Classifier,
    recipe: Recipe,
    task: Task,
    processes: Processes,
    train_set: Source | None = None,
    watchers: Watchers | None = None,
) -> list[str]:
    """Give a new run its first weights: those of the init, or of the checkpoint that the recipe
    names. Returns lines about it for the start of the run; raises the same on all processes.

    classifier: the part of `model` that has an init, or all of it. train_set: the training images,
        which some inits read, if they are there. watchers: which see the init.
    """
    with processes.together():
        generator = initialise(classifier, recipe, train_set)
        task.initialise(model, generator)
        if recipe.init.checkpoint:
            return fine_tune(classifier, recipe, task)
        if processes.is_main and watchers is not None:
            return watchers.tell("initialised", classifier, recipe, train_set)
    return []


def new_state(
    model: nn.Module, recipe: Recipe, processes: Processes, about: Mapping[str, Any] = ReadOnly()
) -> TrainState:
    """The state that training starts from: the model, which moves to the device, its optimiser,
    loss scale and moving average. about: further entries of every checkpoint.

    All processes take the main one's weights, before the moving average copies them.
    """
    memory_format = torch.contiguous_format
    if recipe.engine.channels_last:
        memory_format = torch.channels_last
    model.to(processes.device).to(memory_format=memory_format)
    processes.share(model)
    if recipe.optim.train == "head":
        freeze_below_head(model)
    with building(f"recipe {recipe.name}", "optim"):
        optimizer = optimizer_for(model, recipe.optim)
    scaler = torch.amp.GradScaler(processes.device.type, enabled=recipe.engine.amp == "fp16")
    ema = None
    if recipe.ema.decay:
        ema = Ema(model, decay=recipe.ema.decay, warmup=recipe.ema.warmup)
    return TrainState(model, optimizer, scaler, ema, Progress(), dict(about))


def restore(
    state: TrainState, saved: dict[str, Any], path: Path, learning_rate: LearningRate
) -> None:
    """Let a run go on from what it saved in the checkpoint at `path`. Raises CheckpointError if
    that is not of this run.
    """
    state.load_state_dict(saved, path)
    progress = state.progress
    steps = progress.epochs * learning_rate.steps_per_epoch + progress.epoch_steps
    if progress.step != steps or (progress.epoch_steps and not progress.seconds):
        raise CheckpointError(
            f"{path}: its progress contradicts itself: {in_brief(progress)}, of "
            f"{learning_rate.steps_per_epoch:,} per epoch"
        )
    if progress.step:  # the one of the last step, which a checkpoint holds, too
        set_learning_rate(state.optimizer, learning_rate(progress.step - 1))


def model_to_train(state: TrainState, recipe: Recipe, processes: Processes) -> nn.Module:
    """The model as the loop calls it: in DistributedDataParallel if there are several processes,
    compiled if engine.compile says so, with the precision and kernels that [engine] lets it have.
    """
    model, engine = state.model, recipe.engine
    set_precision(engine.tf32)
    tune_convolutions(model)
    if engine.recompute:
        recompute_blocks(model)
    if processes.world_size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        # Only BatchNorm's statistics change; before evaluation `Processes.share` sends them.
        model.broadcast_buffers = False  # an argument that torch 2.14 deprecates
    return compiled(model, engine)


def drop_path_of(model: Classifier, recipe: Recipe) -> Callable[[int], Tensor | None]:
    """Step → its drop-path scales (branches, global batch), keyed by the run's seed; or → None,
    without drop path, and where the blocks are not trained.
    """
    rates = model.drop_path_rates
    if not any(rates) or recipe.optim.train == "head":
        return lambda step: None

    def scales(step: int) -> Tensor:
        generator = keyed_generator(recipe.run.seed, Purpose.DROP_PATH, step)
        return draw_drop_path(rates, recipe.optim.global_batch, generator)

    return scales


def shifts_of(model: Classifier, recipe: Recipe, done: int) -> Callable[[int], None]:
    """Epoch, from 0 → lets the attention be shifts, in the first schedule.shift_epochs, or itself.
    done: how many epochs are. Raises RecipeError if it cannot be shifts, and still has to be.
    """
    epochs = recipe.schedule.shift_epochs
    if done < epochs:
        key = f"recipe {recipe.name}: schedule.shift_epochs = {epochs}"
        with building(key, "schedule"):
            hold_to_shifts(model, held=True)  # which raises if it cannot be
            hold_to_shifts(model, held=False)
    return lambda epoch: hold_to_shifts(model, held=epoch < epochs)


def fine_tune(model: Classifier, recipe: Recipe, task: Task) -> list[str]:
    """Start a run from the weights of init.checkpoint: load them into `model`, as initialised.
    Returns lines for the summary. Raises CheckpointError if the checkpoint does not fit, or
    computes another function.
    """
    name, kind = recipe.init.checkpoint, recipe.init.checkpoint_weights
    weights = published_weights(name)
    if weights and weights.model != recipe.model.name:
        raise CheckpointError(
            f"init.checkpoint = {name}, of a {weights.model}, with model.name = "
            f"{recipe.model.name}; expected --set model.name={weights.model}"
        )
    path, state, reader = open_file(Path(name), recipe.init.checkpoint_classes)
    saved = Saved(path, state, recipe, recipe.data.image_size, reader)
    grid, description = state.get("grid"), reader.config
    if description is None:
        warnings = differences(state.get("recipe", {}), recipe, path)
    else:  # another project's, which says how its model was made
        warnings = differences(description.values, recipe, description.file)
        if "data.image_size" in description.values:
            grid = grid_of(description.values["data.image_size"], model, saved.size)
    tensors = saved.tensors(kind)
    classes = task.classes or [str(number) for number in range(model.num_classes)]
    rows, words = _classifier_rows(saved, tensors, classes)
    antialias = recipe.init.checkpoint_positions == "antialiased"
    try:
        transfer = start_from(model, tensors, path, grid, rows, antialias=antialias)
    except CheckpointError:
        known = known_size(tensors)
        if known in ("", recipe.model.name):
            raise
        raise CheckpointError(
            f"{path}: of a {known}, by its width and depth, with model.name = "
            f"{recipe.model.name}; expected --set model.name={known}"
        ) from None
    notes = [f"start   {name}: {transfer}", task.head_note or f"head    {words}"]
    if not saved.brings_recipe:  # all is assumed from the run's
        notes.append(f"note    {saved.assumptions(kind, files=False)}")
    return notes + warnings


def known_size(tensors: Mapping[str, Tensor]) -> str:
    """Which of MODELS the tensors are of, by their width and depth; "" if that is not known."""
    width = len(tensors.get("patch_embed.proj.weight", ()))
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    found = {"embed_dim": width, "depth": len(blocks)}
    names = [name for name, (_, sizes) in MODELS.items() if found.items() <= sizes.items()]
    return names[0] if names else ""


def grid_of(
    image_size: tuple[int, int], model: Classifier, model_size: tuple[int, int]
) -> tuple[int, ...]:
    """The grid of an image's patches, (rows, columns), if they are as large as the model's, which
    takes images of `model_size`.
    """
    sides = zip(image_size, model.grid, model_size)
    return tuple(side * count // model_side for side, count, model_side in sides)


def _classifier_rows(
    saved: Saved, tensors: Mapping[str, Tensor], classes: Sequence[str]
) -> tuple[list[int | None], str]:
    """For each class of a run the row of the classifiers that it starts from, or None for the
    init's; and in words. saved: with the run's recipe. Raises CheckpointError if all rows are to
    stay in order, and the names are those of the classes in another order.
    """
    choice, known = saved.recipe.init.checkpoint_head, saved.classes
    wanted, count = len(classes), rows_of(tensors)
    if not count:
        why = "the checkpoint has none"
    elif choice == "drop":
        why = "init.checkpoint_head is drop"
    elif choice == "match" and known:
        row_of = rows_by_name(known)
        rows = [row_of.get(composed(name)) for name in classes]
        lost = rows.count(None)
        return rows, f"{wanted - lost} of {wanted} rows by class name, {lost} as drawn"
    elif count != wanted:
        why = f"the checkpoint's has {count} rows, and {wanted} are expected"
    elif choice == "match" and saved.recipe.data.name != "imagenet":
        why = "the checkpoint names no classes; init.checkpoint_classes=FILE does, a name per line"
    elif known and list(known) != list(classes) and sorted(known) == sorted(classes):
        raise CheckpointError(
            f"{saved.path}: has these classes in another order, and init.checkpoint_head is keep; "
            "expected --set init.checkpoint_head=match, which takes rows by name"
        )
    else:
        return list(range(count)), f"all {count} rows, taken for the same classes"
    return [None] * wanted, f"as drawn: {why}"


def differences(stated: Mapping[str, Any], recipe: Recipe, source: Path) -> list[str]:
    """A line for the summary if images were prepared for a checkpoint otherwise than by the recipe.
    stated: what `source`, of the checkpoint, says of it by keys of a recipe. Raises CheckpointError
    if it computes another function than the recipe's model, which no tensor shows.
    """
    stated = {key: plain(value) for key, value in flat(stated).items()}
    position, keys = "model.options.pos_embed", recipe.keys
    compared = [*FUNCTION, *PREPARATION]
    # Positions may be replaced in fine-tuning, but no tensor shows if queries and keys are turned.
    if position in stated and position in keys:
        if ("rope" in str(stated[position])) != ("rope" in str(keys[position])):
            compared.insert(len(FUNCTION), position)
    remedies = {}  # by key, in words of the command line
    for key in compared:
        comparable = isinstance(stated.get(key), (int, float, str, list))
        if comparable and keys.get(key, stated[key]) != stated[key]:
            remedies[key] = f"--set {key}={to_toml(stated[key]).replace(' ', '')}"
    for key in (*FUNCTION, position):
        if key in remedies:
            raise CheckpointError(
                f"{source}: {key.rpartition('.')[2]} is {stated[key]}, in the recipe {keys[key]}, "
                f"and no tensor would show it; expected {remedies[key]}"
            )
    way = stated.get("eval.interpolation")
    if "eval.interpolation" in remedies and way not in ("bilinear", "bicubic"):
        remedies["eval.interpolation"] = f"(eval.interpolation has no {way})"
    if not remedies:
        return []
    return [
        f"warning {source}: images were prepared otherwise than by the recipe; as they were: "
        f"{' '.join(remedies.values())}"
    ]
