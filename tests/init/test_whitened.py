"""whitened: what the patch embedding makes of patches, in float64."""

import pytest
import torch
from einops import rearrange
from small_models import built, seeded
from torch import Tensor, nn

import vitinit
from vitinit.init.baseline import FLOOR, whiten_patches


def embedding(family: str, init: str, images: Tensor | None) -> nn.Conv2d:
    model = built(family).double()
    vitinit.init_weights(model, init, generator=seeded(5), images=images)
    return next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))


@pytest.mark.parametrize("family", ["vit", "swin", "mixer", "conv_mixer"])
@torch.no_grad()
def test_patches_are_white_above_the_floor_and_as_large_as_before(family, images):
    """White: with the floor added to what patches are, all components have one mean square."""
    images = images[..., :20, :28]
    for given in (images, None):
        layer, base = (embedding(family, init, given) for init in ("whitened", "default"))
        (down, across), weight = layer.kernel_size, layer.weight.flatten(1)
        patches = rearrange(
            images.double(),
            "n c (y down) (x across) -> (n y x) (c down across)",
            down=down,
            across=across,
        )
        square = patches.T @ patches / len(patches)  # (P, P)
        if given is None:
            square = torch.eye(len(square), dtype=torch.float64)
        floor = FLOOR * square.trace() / len(square) * torch.eye(len(square))
        found = torch.linalg.eigvalsh(weight @ (square + floor) @ weight.T)
        assert found[-min(weight.shape) :].tolist() == pytest.approx(
            [found[-1].item()] * min(weight.shape), rel=1e-6
        )
        ours, theirs = ((w @ square @ w.T).trace() for w in (weight, base.weight.flatten(1)))
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_a_first_convolution_that_does_not_cut_patches_is_refused():
    for stem in (nn.Conv2d(3, 5, 3, stride=2), nn.Linear(3, 5), nn.Conv2d(3, 6, 2, 2, groups=3)):
        with pytest.raises(ValueError, match="the patch embedding is not one convolution"):
            whiten_patches(stem, None, seeded())


@pytest.mark.parametrize("width", [3, 5])  # patches as wide as images have channels
@torch.no_grad()
def test_a_layer_that_mixes_colours_before_the_patches_stays(width):
    adapter, patches = nn.Conv2d(3, 3, 1), nn.Conv2d(3, width, 2, 2)
    before = adapter.weight.clone(), patches.weight.clone()
    whiten_patches(nn.Sequential(adapter, patches), None, seeded())
    assert torch.equal(adapter.weight, before[0]) and not torch.equal(patches.weight, before[1])
