"""Checkpoints of other implementations under our names; ours and unknown ones stay."""

import torch
from small_models import SMALL, redraw
from torchvision.models import VisionTransformer as TorchvisionViT

import vitinit
from vitinit.models.convert import native_tensors


def same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(ours[name] is theirs[name] for name in ours)


def test_the_vits_that_torchvision_publishes_have_older_names_in_their_mlps():
    new = TorchvisionViT(image_size=8, patch_size=4, num_layers=2, num_heads=3, hidden_dim=15,
                         mlp_dim=60).state_dict()
    old = {name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): value
           for name, value in new.items()}
    assert old.keys() != new.keys() and same_tensors(native_tensors(old), native_tensors(new))


def test_microsofts_swin_merges_a_stage_earlier_and_carries_buffers():
    model = redraw(vitinit.build_model(
        "swin_tiny", num_classes=11, image_size=(24, 48), patch_size=2, embed_dim=6,
        depths=(2, 2, 3), num_heads=(3, 2, 2), window_size=3))
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


def test_our_own_names_and_those_of_unknown_layouts_stay():
    for state in (*(dict(vitinit.build_model(name, num_classes=11, image_size=16, **sizes
                                             ).state_dict()) for name, sizes in SMALL.items()),
                  {name: torch.zeros(3) for name in ("0.weight", "features.0.weight", "head.weight",
                                                     "attn_mask", "layers.0.downsample.weight")}):
        converted = native_tensors(state)
        assert same_tensors(converted, state) and converted is not state
        assert list(converted) == list(state)
