"""How large the residual stream of a fresh ViT is before each block, told from its weights alone.

`deep_impulse` divides by it what LayerNorm will multiply its queries and keys with.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ..models.vit import VisionTransformer

ROWS_APART = 8          # of a matrix of independent draws, every 8th row tells its mean square
# What `stream_scales` takes for granted, chosen so that on photographs at 224 px (ViT-T, S, B) and on
# CIFAR-10 (ViT-T, patch 2) every block reaches the default target mass.
PIXELS = 2.0            # mean square of normalised pixels: 1 on average, but more in many a patch
ALIKE = 0.7             # how neighbouring tokens' content correlates at first: .7 to .9 was measured
LESS_ALIKE = 0.4        # and what each block leaves of it, by mixing their channels


def stream_scales(model: VisionTransformer, reserved: int, code_rms: float) -> list[float]:
    """The mean square of the patch tokens before each block's first LayerNorm, as weights suggest.

    No image is looked at. Content starts as normalised pixels times the patch embedding's weights. A
    branch adds its own mean square, and attention, whose V·proj is partly a multiple of the identity,
    what it has in common with the stream, where neighbouring tokens are alike.
    """
    dim = model.pos_embed.shape[2]
    share = (dim - reserved) / dim                   # of the channels that hold content
    patches, position = model.patch_embed.proj, model.pos_embed[0, model.num_prefix_tokens:]
    content = (PIXELS * patches.weight[reserved:].flatten(1).square().sum(1)
               + patches.bias[reserved:].square()).mean().item()
    if reserved:
        content += position[:, reserved:].square().mean().item()
    scales = []
    for number, block in enumerate(model.blocks):
        scale = code_rms**2 + share * content
        scales.append(scale)
        # Inner channel i of V·proj carries ‖v_i‖² ‖p_i‖², whether factors or independent draws.
        value = block.attn.v_weight.flatten(0, 1).square().sum(1)        # (D,)
        carried = (value @ block.attn.proj.weight.square().sum(0)).item()
        kept = (block.attn.v_weight.flatten(0, 1).T * block.attn.proj.weight).sum().item()
        common = 2.0 * ALIKE * LESS_ALIKE**number * kept / math.sqrt(scale)
        content += content * (carried / scale + common) / (dim - reserved)
        content += mlp_mean_square(block.mlp) * dim / (dim - reserved)
    return scales


def mlp_mean_square(mlp: torch.nn.Module) -> float:
    """What an MLP gives on average over all its channels, for inputs with a mean square of 1."""
    rows = slice(None, None, ROWS_APART)
    hidden, dim = mlp.fc1.weight.shape
    spread = math.sqrt(mlp.fc1.weight[rows].square().mean().item() * dim)
    grid = torch.linspace(-6.0, 6.0, 1201)
    density = (-0.5 * grid.square()).softmax(0)      # of a standard normal, on the grid
    activation = (density * F.gelu(spread * grid).square()).sum().item()
    return mlp.fc2.weight[:, rows].square().mean().item() * hidden * activation
