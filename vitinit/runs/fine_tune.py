"""Start a run from the weights of a checkpoint: of another run, or of another project."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ..models.convert import native_tensors
from ..recipe.sections import Recipe
from ..train.checkpoint import model_state
from ..train.transfer import start_from
from . import foreign
from .folder import read_checkpoint


def fine_tune(model: nn.Module, recipe: Recipe) -> list[str]:
    """Load the weights of init.checkpoint into `model`, which has been initialised.

    The checkpoint is a file, a run folder, or a folder of transformers.

    Returns lines for the summary: what was loaded and, for another project's checkpoint, what is
    assumed that tensors do not show. Raises CheckpointError if the checkpoint does not fit.
    """
    init = recipe.init
    state, path = read_checkpoint(Path(init.checkpoint))
    tensors = native_tensors(model_state(state, path, init.checkpoint_weights))
    notes = []
    if "recipe" not in state:
        description = foreign.read_description(path, str(state.get("arch", "")))
        foreign.require_same_function(description, recipe)
        notes = [f"note    {foreign.assumptions(recipe, None)}"]
    transfer = start_from(model, tensors, path, state.get("grid"))
    return [f"start   {init.checkpoint}: {transfer}", *notes]
