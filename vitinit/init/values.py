"""Values that pass each channel on as it is, so that every head shifts channels of its own.

With a head's attention on one neighbour, V·proj = s·I makes the attention layer a depthwise shift: each
channel of the LayerNorm's output, moved by the offset of the channel's head and multiplied by s, is added
to the stream. ShiftViT (arXiv 2201.10801) replaces attention by such shifts of some channels; ConViT
(arXiv 2103.10697) starts V at the identity beside convolution-like attention.
"""

from __future__ import annotations

import math

from ..models.attention import Attention


def write_identity_values(attention: Attention, first: int, scale: float) -> None:
    """Make V·proj = scale · I on all but the first `first` channels of the stream, and zero on those.

    Channels are assigned to the heads in turn, so that each head has as many. Inner channels that are
    left over have V = 0, but keep the base's draw in proj, so that gradients reach V. Biases stay as
    they are. Raises ValueError for a scale of 0, at which no gradient would reach V or proj.
    """
    if scale == 0.0:
        raise ValueError('value_scale is 0, and value_init = "identity" needs another number')
    heads, root = attention.num_heads, math.sqrt(abs(scale))
    attention.v_weight.zero_()
    attention.proj.weight[:first] = 0.0
    for channel in range(first, attention.proj.in_features):
        slot, head = divmod(channel - first, heads)
        attention.v_weight[head, slot, channel] = root
        attention.proj_weight[:, head, slot] = 0.0
        attention.proj_weight[channel, head, slot] = math.copysign(root, scale)
