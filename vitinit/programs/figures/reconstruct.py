"""The figure `reconstruct`: photographs, what a masked autoencoder sees, what it makes of it."""

from collections.abc import Sequence
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor

from ...base.keys import Purpose, keyed_generator
from ...data.augment import normalise
from ...models.layers import patches_of
from ...models.masked_autoencoder import MaskedAutoencoder, mean_and_deviation, take
from ...recipe.sections import DataSection
from ...runs.data import masks_of
from ...runs.load import open_saved
from ..shared.plot import FigureError, pixels, save, subplots
from .subjects import view_of

TITLES = ("photograph", "what the encoder sees", "reconstruction")
GREY = 0.5  # of hidden patches


@torch.no_grad()
def pasted(
    model: MaskedAutoencoder, data: DataSection, views: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """Views (B, 3, H, W) uint8 with the hidden patches grey, and with them reconstructed, float32
    in [0, 1]. Where targets are normalised, a patch gets the mean and deviation that it has in the
    image, which the model does not know.
    """
    inputs = normalise(views, data.mean, data.std)
    hidden, predicted = model.reconstruct(inputs, visible)
    if model.normalise_targets:
        mean, deviation = mean_and_deviation(take(patches_of(inputs, model.patch), hidden))
        predicted = predicted * deviation + mean
    # Back to [0, 1]: (B, hidden, p·q, 3).
    colours = predicted.unflatten(2, (-1, data.channels)) * torch.tensor(data.std) + torch.tensor(
        data.mean
    )
    patches = patches_of(views / 255, model.patch)
    rows = torch.arange(len(views))[:, None]  # (B, 1)

    def image(content: Tensor) -> Tensor:
        tiles = patches.index_put((rows, hidden), content)
        return rearrange(tiles, "b (h w) (p q c) -> b c (h p) (w q)", **sizes)

    sizes = {"h": model.grid[0], "p": model.patch[0], "q": model.patch[1]}
    return image(torch.tensor(GREY)), image(colours.flatten(2).clamp(0, 1))


def draw_reconstruct(out: Path, photographs: Sequence[Path], *, run: Path) -> None:
    """Draw each photograph, its visible patches, and the reconstruction, a row per photograph."""
    saved = open_saved(run)
    masks = masks_of(saved.recipe)
    if masks is None:
        raise FigureError(
            f"{saved.name}: learned classes, and not to reconstruct images, as "
            "recipe own_images does"
        )

    views = torch.stack([view_of(path, saved.recipe) for path in photographs])  # (B, 3, H, W)
    rngs = (keyed_generator(0, Purpose.EVAL_MASK, index) for index in range(len(views)))
    visible = torch.from_numpy(masks.draw(rngs))
    seen, reconstructed = pasted(saved.autoencoder().eval(), saved.recipe.data, views, visible)
    figure, axes = subplots(len(views), 3, 6.0, 2.0 * len(views) + 0.3)
    for row, tiles in zip(axes, zip(views / 255, seen, reconstructed)):
        for axis, tile in zip(row, tiles):
            axis.imshow(pixels(tile), interpolation="nearest")
            axis.set_axis_off()
    for axis, words in zip(axes[0], TITLES):
        axis.set_title(words, fontsize=9)
    share = 1 - masks.visible / masks.patches
    heading = f"{saved.recipe.name}: {share:.0%} of the patches are hidden"
    save(figure, out, heading)
