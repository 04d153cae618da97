"""What cannot be drawn is refused in one line that says why, and no file is written."""

from __future__ import annotations

import pytest
import torch

QUICK = "--recipe quickstart --set model.options.depth=2 "


@pytest.mark.parametrize("arguments, text", [
    (f"maps {QUICK} --blocks 2", "block 2 is asked for, but the model has blocks 0…1"),
    (f"maps {QUICK} --heads 0 3", "head 3 is asked for, but the model has heads 0…2"),
    (f"kernels {QUICK} --heads -1", "head -1 is asked for, but the model has heads 0…2"),
    (f"attention {{photo}} {QUICK} --queries 8,0", "query 8,0 is not on the 8×8 grid of patches"),
    (f"attention {{tmp}}/absent.jpg {QUICK}", "absent.jpg: cannot be read"),
    (f"maps {QUICK} --init filters", "init 'filters' is not defined for a VisionTransformer"),
    (f"maps {QUICK} --epochs 3", "--epochs goes with --run"),
    ("maps --run {tmp} --init default", "--init goes with --recipe"),
    ("maps --run {tmp} --seed 0", "--seed goes with --recipe"),
    ("maps --run {tmp} --set a.b=1", "--set goes with --recipe"),
    ("maps --run {tmp} --epochs 1",
     "keeps no epoch 1; it has none, which checkpoint.keep_epochs would have kept"),
    ("maps --run {tmp}/a.pth", "holds no recipe"),
    (f"maps {QUICK} --set init.checkpoint=other.pt",
     "starts from init.checkpoint = other.pt; show a run of it"),
    ("maps --recipe cifar10_convmixer",
     "makes a ConvMixer; figure 'maps' is defined for VisionTransformer and SimpleViT"),
    ("attention {photo} --recipe cifar10_mixer",
     "makes a MlpMixer; figure 'attention' is defined for"),
    ("mass --recipe cifar10_swin_tiny --data-dir {images}",
     "makes a SwinTransformer; figure 'mass' is defined for VisionTransformer and SimpleViT"),
    ("mass --recipe deit_tiny", "deit_tiny has no images of its own: --data-dir names"),
    (f"mass {QUICK} --data-dir {{images}}/val --count 22", "holds 21 images, and 22 are asked for"),
    ("batch --data-dir {tmp}/empty", "no images in it"),
    ("curves {tmp}/empty", "neither a run's folder nor an archive of runs"),
    (f"kernels {QUICK} --set model.options.patch_size=5", "patches of 5×5 pixels do not tile"),
])
def test_what_cannot_be_drawn_is_refused_in_one_line(complains, image_tree, tmp_path, arguments,
                                                     text):
    torch.save({"model": {"w": torch.ones(1)}}, tmp_path / "a.pth")
    (tmp_path / "empty").mkdir()
    photo = image_tree / "val" / "red" / "03.png"
    complains(text, *arguments.format(photo=photo, tmp=tmp_path, images=image_tree).split())
