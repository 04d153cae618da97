"""Weight selection: initialise a small model with evenly spaced weights of a larger trained one.

The method is that of Xu et al., "Initializing Models with Larger Ones", arXiv 2311.18823, §3. Both
models belong to the same family. The small one takes the first blocks ("first-N layer selection")
and, along every width, evenly spaced elements ("uniform element selection"). As it needs a
checkpoint, it is not in the table of inits: the recipe key `init.checkpoint_fit = "select"` applies
it before the tensors are copied into the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

# By the end of a tensor's name: the dimensions that count channels, hidden units or heads.
# Their other dimensions count tokens, relative positions or pixels, and must not be thinned out.
WIDTHS = {
    "pos_embed": (-1,),                              # (1, N, C)
    "reg_token": (-1,),                              # (1, registers, C)
    "relative_position_bias_table": (1,),            # (relative positions, heads)
    "mlp_tokens.fc1.weight": (0,),                   # (hidden, N)
    "mlp_tokens.fc2.weight": (1,),                   # (N, hidden)
    "mlp_tokens.fc2.bias": (),                       # (N,)
    "attn.query": (0, 2),                            # (heads, N, d), of a SimpleViT with free Q, K
    "attn.key": (0, 2),
    "fn.0.weight": (0,),                             # (C, 1, k, k) or (F, N, N), of a ConvMixer
}


def select_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` with those that the model also has thinned out to the model's widths.

    tensors: a trained model's state dict, under this package's names. Classifiers (`head…`) are
        left out, because the paper draws them anew. Tensors that the model does not have, such as
        those of deeper blocks, are returned unchanged.

    A packed qkv needs no unpacking: evenly spaced elements of (3·C) are evenly spaced elements of
    each third. As in the paper, each head takes its channels from several consecutive heads of the
    larger model if that has more of them.

    Raises ValueError, listing the names, if the checkpoint is the narrower one.
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
        raise ValueError("weights are selected from a larger model, but this one is narrower than "
                         f"the model: {', '.join(narrower[:3])}" +
                         (f" and {len(narrower) - 3} more" if len(narrower) > 3 else ""))
    return selected


def widths(name: str, ndim: int) -> tuple[int, ...]:
    """The dimensions of a tensor that may be thinned out."""
    for ending, dims in WIDTHS.items():
        if name.endswith(ending):
            return dims
    return (0, 1) if ndim == 4 else tuple(range(ndim))   # not the height and width of a patch


def evenly_spaced(large: int, small: int) -> Tensor:
    """(small,) indices into `large` elements: 0, s, 2s, … with s = large / small, rounded down.

    If the smaller width divides the larger one, these are the paper's indices. Otherwise its code
    rounds linspace(0, large − 1, small), which takes different channels from each third of a packed
    qkv, whereas these take the same from each.
    """
    return torch.arange(small) * large // small
