"""What becomes of attention while a run trains: see `AttentionWatcher`.

An init that makes heads sharp writes large logits: those of `impulse` begin at some tens, where
neighbouring numbers of bf16 are .125 or .25 apart. Whether they grow, and whether heads still look
where they were aimed, no loss shows.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..mixing import run, shares_of_patches
from ..models.shift import Shift
from ..models.simple_vit import SimpleViT
from ..models.vit import VisionTransformer
from ..recipe.files import RecipeError
from ..runs.data import training_views
from ..train.loop import autocast
from .mass import masses_on, mean, targets_in

if TYPE_CHECKING:
    from ..data.sources import Source
    from ..recipe.sections import Recipe

WATCHED_IMAGES = 8
BY_BLOCK = {
    "logits": "largest |logit| of attention",
    "entropy": "entropy of attention (nats)",
    "mass": "attention on the init's targets",
}


def attention_of(model: nn.Module) -> dict[int, Any]:
    """The attention of a ViT or SimpleViT by block, without blocks of shifts; of others nothing."""
    if not isinstance(model, (VisionTransformer, SimpleViT)):
        return {}
    return {
        number: block.attn
        for number, block in enumerate(model.blocks)
        if not isinstance(block.attn, Shift)
    }


class AttentionWatcher:
    """Adds BY_BLOCK to the rows of steps.jsonl, each as "logits/0" and so on by block; None for shifts.

    logits: the largest of all heads, queries and keys, in the precision of the run. entropy: the mean
    over heads and queries, at most log N for N tokens. mass: as at the start of a run, the mean over
    heads; None if the init has no targets. All of WATCHED_IMAGES training images, the first of those
    on which that one is measured, without augmentation.
    """

    images: Tensor | None = None  # once they were read

    @staticmethod
    def require_model(model: nn.Module) -> None:
        """Raise RecipeError unless some block of it has attention that can be watched."""
        if not attention_of(model):
            raise RecipeError(
                f"--log attention: this {type(model).__name__} has no attention among all patches; "
                "expected a ViT or a SimpleViT with attention in some block"
            )

    def measured(self, row: dict[str, Any], model: Any, recipe: Recipe, train_set: Source) -> None:
        if self.images is None:
            self.images = training_views(recipe, train_set, WATCHED_IMAGES)
        heads = [block.attn.num_heads for block in model.blocks]
        row |= {f"{key}/{block}": None for key in BY_BLOCK for block in range(len(heads))}
        targets = targets_in(model, recipe.init.name, recipe.init.options, heads)

        def read(block: int, inputs: tuple, _: Tensor) -> None:
            logits = mixers[block].mixing_logits(*inputs)  # (n, h, N, N), or one for all images
            weights = logits.float().softmax(-1)
            row[f"logits/{block}"] = logits.abs().max().item()
            row[f"entropy/{block}"] = torch.special.entr(weights).sum(-1).mean().item()
            if targets:
                shares = shares_of_patches(weights, model.grid).mean(0)  # (h, cells, cells)
                masses = masses_on([targets[block]], [shares], [model.grid])[1]
                row[f"mass/{block}"] = mean(masses[0])

        mixers = attention_of(model)
        images = self.images.to(next(model.parameters()).device)
        with autocast(images.device, recipe.engine.amp):
            run(model, images, after={mixers[block]: partial(read, block) for block in mixers})
