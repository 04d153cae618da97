"""Estimate how large the residual stream of a freshly initialised ViT is before each block.

The estimate uses the weights alone, no image. `deep_impulse` uses it to make up for LayerNorm,
which divides each token by its standard deviation before queries and keys are computed.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ..models.vit import VisionTransformer
ROWS_APART = 8          # every 8th row of independent draws is enough for their mean square
# Assumptions of `stream_scales`, chosen so that every block reaches the default target mass both on
# photographs at 224 px (ViT-T, S, B) and on CIFAR-10 (ViT-T with patch size 2).
ALIKE = 0.7             # correlation of neighbouring tokens' content before the first block
LESS_ALIKE = 0.4        # factor by which each block reduces it, because it mixes channels
PIXELS = 2.0            # mean square of normalised pixels: 1 on average, but many patches have more


def stream_scales(model: VisionTransformer, reserved: int, code_rms: float) -> list[float]:
    """The expected mean square of the patch tokens before each block's first LayerNorm.

    reserved: number of channels to which only the position embedding writes. code_rms: of the code,
        see `deep_impulse`.

    The estimate starts with `content_mean_square`. Each branch then adds the
    mean square of its output. Attention adds a further term: V·proj is partly a multiple of the
    identity, and neighbouring tokens are alike, so its output correlates with the stream.
    """
    dim = model.pos_embed.shape[2]
    share = (dim - reserved) / dim                   # share of the channels that hold content
    position = model.pos_embed[0, model.num_prefix_tokens:]
    # Per channel that holds content.
    content = content_mean_square(model, reserved)
    if reserved:
        content += position[:, reserved:].square().mean().item()
    scales = []
    for number, block in enumerate(model.blocks):
        scale = code_rms**2 + share * content
        scales.append(scale)
        # Inner channel i of V·proj contributes ‖v_i‖² ‖p_i‖², whether V and proj are factors of a
        # given product or independent draws.
        value = block.attn.v_weight.flatten(0, 1).square().sum(1)        # (D,)
        energy = (value @ block.attn.proj.weight.square().sum(0)).item()
        trace = (block.attn.v_weight.flatten(0, 1).T * block.attn.proj.weight).sum().item()
        common = 2.0 * ALIKE * LESS_ALIKE**number * trace / math.sqrt(scale)
        content += content * (energy / scale + common) / (dim - reserved)
        content += mlp_mean_square(block.mlp) * dim / (dim - reserved)
    return scales


def content_mean_square(model: VisionTransformer, first: int = 0) -> float:
    """The expected mean square of the patch embedding's output over its channels from `first` on.

    A weight matrix drawn at random gives PIXELS · ‖w‖² + b² per channel on average over draws,
    whatever the correlation between pixels.
    """
    weight, bias = (parameter[first:] for parameter in (model.patch_embed.proj.weight,
                                                        model.patch_embed.proj.bias))
    return (PIXELS * weight.flatten(1).square().sum(1) + bias.square()).mean().item()


def mlp_mean_square(mlp: torch.nn.Module) -> float:
    """The mean square of an MLP's output over all its channels, for standard normal inputs.

    Biases are taken as 0. The expectation over the GELU is a sum over a grid of the normal density.
    """
    rows = slice(None, None, ROWS_APART)
    hidden, dim = mlp.fc1.weight.shape
    spread = math.sqrt(mlp.fc1.weight[rows].square().mean().item() * dim)
    grid = torch.linspace(-6.0, 6.0, 1201)
    density = (-0.5 * grid.square()).softmax(0)      # standard normal, on the grid
    activation = (density * F.gelu(spread * grid).square()).sum().item()
    return mlp.fc2.weight[:, rows].square().mean().item() * hidden * activation
