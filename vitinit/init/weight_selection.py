"""Weight selection: a small model starts as every s-th element of a trained larger one.

Xu et al., "Initializing Models with Larger Ones", arXiv 2311.18823, §3: same family, the first blocks
("first-N layer selection"), and evenly spaced elements along every width ("uniform element
selection"). It needs a checkpoint, so it is no init by name: a recipe's `init.checkpoint_fit = "select"`
applies it before the tensors are copied into the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

# Dimensions that count channels, hidden units or heads, by the end of a tensor's name; of the others
# of these tensors, which count tokens, windows' places or pixels, none may be thinned out.
WIDTHS = {
    "pos_embed": (-1,),                              # (1, N, C)
    "reg_token": (-1,),                              # (1, registers, C)
    "relative_position_bias_table": (1,),            # (places, heads)
    "mlp_tokens.fc1.weight": (0,),                   # (hidden, N)
    "mlp_tokens.fc2.weight": (1,),                   # (N, hidden)
    "mlp_tokens.fc2.bias": (),                       # (N,)
    "attn.query": (0, 2),                            # (heads, N, d), free ones of a SimpleViT
    "attn.key": (0, 2),
    "fn.0.weight": (0,),                             # (C, 1, k, k) or (F, N, N), of a ConvMixer
}


def select_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with every one that the model has, too, thinned out to the model's widths.

    tensors: a trained model's state dict under our names. Classifiers (`head…`) are left out, since
        the paper draws them anew; what the model does not have (deeper blocks) comes back as it is.
    Packed tensors need no unpacking: even spacing of (3·C) is even spacing of each third. As in the
    paper, a head takes its channels from as many of the larger model's heads as there are to one.

    Raises ValueError, listing the names, where the model is the wider one.
    """
    own, selected, narrower = model.state_dict(), {}, []
    for name, value in tensors.items():
        if name.startswith("head"):
            continue
        wanted = own[name].shape if name in own else value.shape
        if len(wanted) == value.ndim:
            for dim in widths(name, value.ndim):
                if value.shape[dim] < wanted[dim]:
                    narrower.append(f"{name} {tuple(value.shape)} for {tuple(wanted)}")
                    break
                value = value.index_select(dim, evenly_spaced(value.shape[dim], wanted[dim]))
        selected[name] = value
    if narrower:
        raise ValueError("weights are selected from a larger model, but this one is narrower than the "
                         f"model: {', '.join(narrower[:3])}" +
                         (f" and {len(narrower) - 3} more" if len(narrower) > 3 else ""))
    return selected


def widths(name: str, ndim: int) -> tuple[int, ...]:
    """Which dimensions of a tensor may be thinned out."""
    for ending, dims in WIDTHS.items():
        if name.endswith(ending):
            return dims
    return (0, 1) if ndim == 4 else tuple(range(ndim))   # not the sides of a patch


def evenly_spaced(large: int, small: int) -> Tensor:
    """(small,) indices into `large` elements: 0, s, 2s, … with s = large / small, rounded down.

    Where the smaller width divides the larger these are the paper's. Elsewhere its code rounds
    linspace(0, large − 1, small), which takes other channels from each third of a packed qkv; these
    take the same.
    """
    return torch.arange(small) * large // small
