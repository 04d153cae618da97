"""Checkpoints of other implementations under our names: all names, the same tensors and outputs."""

from __future__ import annotations

import torch
from redrawn import drawn, redraw
from torch import nn
from torchvision.models import VisionTransformer as TorchvisionViT

import vitinit
from vitinit.models.convert import native_tensors

SMALL = {
    "vit_tiny": dict(image_size=(12, 20), patch_size=4, embed_dim=15, depth=2, num_heads=3),
    "vit_tiny_distilled": dict(image_size=8, patch_size=4, embed_dim=15, depth=2, num_heads=3),
    "swin_tiny": dict(image_size=(24, 48), patch_size=2, embed_dim=6, depths=(2, 2, 3),
                      num_heads=(3, 2, 2), window_size=3),
    "mixer_s16": dict(image_size=(12, 20), patch_size=4, embed_dim=14, depth=2),
    "convmixer_256_8": dict(image_size=(12, 20), patch_size=4, embed_dim=13, depth=3,
                            kernel_size=3),
}


def small(name: str) -> nn.Module:
    return redraw(vitinit.build_model(name, num_classes=11, **SMALL[name]))


def same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(ours[name] is theirs[name] for name in ours)


def test_torchvisions_vit_of_old_checkpoints_has_other_names_in_its_mlp():
    state = TorchvisionViT(image_size=8, patch_size=4, num_layers=2, num_heads=3, hidden_dim=15,
                           mlp_dim=60).state_dict()
    old = {name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): value
           for name, value in state.items()}
    assert old.keys() != state.keys()
    assert same_tensors(native_tensors(old), native_tensors(state))


# The authors' own -------------------------------------------------------------------------------


def test_microsofts_swin_merges_a_stage_earlier_and_carries_buffers():
    model = small("swin_tiny")
    ours, theirs = dict(model.state_dict()), {}
    for name, value in ours.items():
        for stage in (1, 2):
            name = name.replace(f"layers.{stage}.downsample", f"layers.{stage - 1}.downsample")
        theirs[name.replace("head.fc.", "head.")] = value
    for name, buffer in model.named_buffers():       # the masks and the indices of every block
        theirs[name.replace(".mask", ".attn_mask")] = buffer
    for name in ("head.weight", "layers.1.downsample.reduction.weight",
                 "layers.0.blocks.1.attn_mask", "layers.2.blocks.2.attn.relative_position_index"):
        assert name in theirs
    assert same_tensors(native_tensors(theirs), ours)


class AddedTo(nn.Module):
    """x + fn(x), as the authors of ConvMixer write it."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x) + x


def authors_conv_mixer(dim: int, depth: int, kernel_size: int, patch_size: int, classes: int):
    """The model of arXiv 2201.09792, figure 3."""
    return nn.Sequential(
        nn.Conv2d(3, dim, kernel_size=patch_size, stride=patch_size), nn.GELU(),
        nn.BatchNorm2d(dim),
        *[nn.Sequential(
            AddedTo(nn.Sequential(
                nn.Conv2d(dim, dim, kernel_size, groups=dim, padding="same"), nn.GELU(),
                nn.BatchNorm2d(dim))),
            nn.Conv2d(dim, dim, kernel_size=1), nn.GELU(), nn.BatchNorm2d(dim))
          for _ in range(depth)],
        nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(dim, classes))


def test_the_authors_conv_mixer_gives_the_same_outputs_here():
    """Of eleven blocks, whose names have two digits."""
    theirs = redraw(authors_conv_mixer(13, 11, kernel_size=3, patch_size=4, classes=11)).eval()
    ours = vitinit.build_model("convmixer_256_8", num_classes=11,
                               **SMALL["convmixer_256_8"] | dict(depth=11)).double().eval()
    ours.load_state_dict(native_tensors(theirs.state_dict()))
    with torch.no_grad():
        logits = ours(drawn(2, 3, 12, 20))
        assert logits.std() > 0.01                   # not a comparison of zeros
        torch.testing.assert_close(logits, theirs(drawn(2, 3, 12, 20)), rtol=1e-12, atol=1e-12)


# What needs nothing -----------------------------------------------------------------------------


def test_our_own_names_and_those_of_unknown_layouts_stay():
    for state in (*(dict(small(name).state_dict()) for name in SMALL),
                  {name: torch.zeros(3) for name in ("0.weight", "features.0.weight", "head.weight",
                                                     "attn_mask", "layers.0.downsample.weight")}):
        converted = native_tensors(state)
        assert same_tensors(converted, state) and converted is not state
        assert list(converted) == list(state)
