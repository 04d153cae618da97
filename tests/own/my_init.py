"""An init of one's own: every block starts as the identity."""

import torch

from vitinit.init import INITS
from vitinit.init.baseline import Base, draw_base


@torch.no_grad()
def zero_branches(model: torch.nn.Module, *, generator: torch.Generator, base: Base = "default"):
    draw_base(model, base, generator)
    for block in model.blocks:
        for layer in (block.attn.proj, block.mlp.fc2):
            layer.weight.zero_()
            layer.bias.zero_()


INITS["zero_branches"] = {"vit": zero_branches, "parallel_vit": zero_branches}
