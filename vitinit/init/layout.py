"""Where a ViT keeps the tensors of its attention: the one door through which inits write.

A `Layout` names, block by block, views of Q, K, V and proj with their biases and the norm before
the attention, and the position embedding. `layout_of` finds them by their attributes, in the models
of this package and in those of other libraries, of which it imports none:

| library                   | layers of one attention                          | norm              |
|---------------------------|--------------------------------------------------|-------------------|
| vitinit, timm, DeiT, Swin | qkv, proj; in timm also q_proj, k_proj, v_proj   | norm1             |
| transformers 5            | q_proj, k_proj, v_proj, o_proj; SigLIP: out_proj | layernorm_before, |
| transformers 4            | attention.query, .key, .value, output.dense      |   norm1, …        |
| torchvision, torch.nn     | nn.MultiheadAttention                            | ln_1, norm1       |
| vit-pytorch               | to_qkv, to_out[0]                                | norm inside       |

Any other model is described by hand: a function of the model that returns a `Layout`, whose blocks
`block_of` makes of an attention with one of these layouts, or `Block` of views.

Shapes: D channels of the residual stream, h heads, d channels per head, N patch tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = (                      # the layers of Q, K and V, one where they are packed, and proj
    (("qkv",), "proj"),
    (("q_proj", "k_proj", "v_proj"), "proj"),
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q_proj", "k_proj", "v_proj"), "out_proj"),
    (("attention.query", "attention.key", "attention.value"), "output.dense"),
    (("to_qkv",), "to_out.0"))
HEADS = ("num_heads", "num_attention_heads", "attention.num_attention_heads", "heads")
NORMS = ("norm1", "layernorm_before", "layer_norm1", "ln_1")         # before the attention
POSITIONS = ("pos_embed", "pos_embedding", "position_embeddings", "position_embedding")
PREFIX_TOKENS = ("cls_token", "class_token", "dist_token", "distillation_token", "reg_token",
                 "register_tokens")


@dataclass(frozen=True)
class Block:
    """The attention of one block, as views: writing to them writes to the model's parameters.

    Head i adds softmax(Qᵢ Kᵢᵀ / √d) Vᵢ @ proj[:, i].T to the stream, with Qᵢ = x @ q[i].T +
    q_bias[i], where x is the output of `norm`.
    """

    q: Tensor                   # (h, d, D)
    k: Tensor                   # (h, d, D)
    v: Tensor                   # (h, d, D)
    proj: Tensor                # (D, h, d)
    q_bias: Tensor | None       # (h, d)
    k_bias: Tensor | None       # (h, d)
    v_bias: Tensor | None       # (h, d)
    proj_bias: Tensor | None    # (D,)
    norm: nn.Module             # the LayerNorm before the attention
    attention: nn.Module | None = None           # the whole, by which the formula can be checked


@dataclass(frozen=True)
class Layout:
    """Where a ViT keeps what inits write.

    pos_embed: (rows, D), a view; its last N rows are those of the patch tokens, row by row of the
        grid, and those before them of prefix tokens. None: there is none.
    learned: whether pos_embed is a parameter.
    grid: the patch tokens down and across; None if the blocks have several grids.
    missing: where there is no pos_embed or no grid, why.
    image_shape: (channels, height, width); None where it is not known.
    writers: what else writes to the stream, weights and biases whose first dimension is D: of the
        patch embedding and of each block's MLP. tokens: the prefix tokens, (…, D). norms: the other
        LayerNorms of the blocks. ends: those outside, of which the first after the blocks counts.
        `deep_impulse` alone needs these.
    """

    model: nn.Module
    blocks: tuple[Block, ...]
    pos_embed: Tensor | None
    grid: tuple[int, int] | None
    learned: bool = True
    missing: str = "the layout has no position embedding or no grid"
    image_shape: tuple[int, int, int] | None = None
    writers: tuple[Tensor, ...] = ()
    tokens: tuple[Tensor, ...] = ()
    norms: tuple[nn.Module, ...] = ()
    ends: tuple[nn.Module, ...] = ()

    @property
    def positions(self) -> Tensor:
        """The position embedding of the patch tokens, (N, D), a view."""
        return self.pos_embed[-self.grid[0] * self.grid[1]:]

    def normalised_positions(self) -> Tensor:
        """`positions` after a LayerNorm of gain 1 and bias 0, (N, D).

        This is what the first attention would read if the patches had no content.
        """
        return nn.functional.layer_norm(self.positions, self.positions.shape[-1:],
                                        eps=self.blocks[0].norm.eps)


def layout_of(model: nn.Module | Layout) -> Layout:
    """Find the attentions and positions of a model of this package or of another library.

    A `Layout` is returned as it is. Raises ValueError if there are no blocks with one attention
    each. What else is missing is None or empty.
    """
    if isinstance(model, Layout):
        return model
    stages = list(_stages(model))
    if not stages:
        raise ValueError(f"a {type(model).__name__} has no list of blocks with one attention each, "
                         f"of "
                         "a layout known here")
    children = [child for stage in stages for child in stage]
    blocks = tuple(block_of(attention, _norm_before(child, attention))
                   for child in children for attention in _attentions(child))
    dim = blocks[0].proj.shape[0]
    positions = [tensor for tensor in _named(model, POSITIONS) if tensor.shape[-1] == dim]
    tokens = [token for token in _named(model, PREFIX_TOKENS) if token.shape[-1] == dim]
    known = len(positions) == len(stages) == 1
    pos_embed = positions[0].detach().flatten(0, -2) if known else None
    grid = _grid(model, len(pos_embed), sum(token.shape[-2] for token in tokens)) if known else None

    if len(stages) > 1:
        missing = (f"the model has {len(stages)} lists of blocks: several grids of tokens, "
                   f"parallel blocks, "
                   "or an encoder and a decoder")
    elif not known:
        missing = (f"the model has {len(positions) or 'no'} learned position embedding"
                   f"{'s' * (len(positions) > 1)}, expected one, by which heads find their target")
    else:
        missing = (f"the grid is not known: the position embedding has {len(pos_embed)} rows; "
                   f"describe "
                   "the model by a Layout")

    inside = [module for child in children for module in child.modules()]
    outside = [module for module in model.modules() if module not in set(inside)]
    writers = [_stem(outside, dim), *(_mlp_end(child, dim) for child in children)]
    skipped = {*writers, *(block.norm for block in blocks)}
    norms, ends = (tuple(module for module in modules if isinstance(module, nn.LayerNorm)
                         and module.normalized_shape == (dim,) and module not in skipped)
                   for modules in (inside, outside))
    return Layout(model, blocks, pos_embed, grid,
                  learned=known and isinstance(positions[0], nn.Parameter), missing=missing,
                  image_shape=grid and _image_shape(outside, grid),
                  writers=() if None in writers else tuple(
                      tensor.detach() for layer in writers for tensor in (layer.weight, layer.bias)
                      if tensor is not None),
                  tokens=tuple(token.detach() for token in tokens), norms=norms, ends=ends)


@torch.no_grad()
def run(model: nn.Module, images: Tensor, *,
        before: Mapping[nn.Module, Callable[[Tensor], None]] | None = None,
        after: Mapping[nn.Module, Callable[[Any], None]] | None = None) -> None:
    """Pass images through a model in evaluation mode, which is left as it was.

    before: by module, what is called with the module's input. after: with its output.
    PyTorch takes its fast paths for whole layers, which call no module, only without hooks.
    """
    modes = [(module, module.training) for module in model.modules()]
    hooks = [module.register_forward_pre_hook(lambda _, given, call=call: call(given[0]))
             for module, call in (before or {}).items()]
    hooks += [module.register_forward_hook(lambda _, given, found, call=call: call(found))
              for module, call in (after or {}).items()]
    try:
        model.eval()
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training


def block_of(attention: nn.Module, norm: nn.Module) -> Block:
    """The views of one attention with one of the layouts above; norm: the LayerNorm before it.

    Raises ValueError for another layout, and for layers that are not nn.Linear.
    """
    if isinstance(attention, nn.MultiheadAttention):
        if not attention._qkv_same_embed_dim or attention.bias_k is not None:
            raise ValueError("an nn.MultiheadAttention with kdim, vdim or add_bias_kv is not known "
                             "here")
        layers, proj = [attention], attention.out_proj
        weights, biases = [attention.in_proj_weight], [attention.in_proj_bias]
    else:
        layers, proj = _layers(attention) or (None, None)
        wrong = [layer for layer in (*(layers or [attention]), proj)
                 if not isinstance(layer, nn.Linear)]
        if wrong:
            kind = f"{type(wrong[0]).__module__.partition('.')[0]}'s {type(wrong[0]).__name__}"
            raise ValueError(f"{type(attention).__name__} has {kind} where nn.Linear is expected "
                             f"for Q, "
                             "K, V or proj")
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    heads = next(value for name in HEADS if (value := _get(attention, name)) is not None)

    def parts(tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Those of Q, K and V, each (h, d, …)."""
        if len(tensors) == 1:
            tensors = [None] * 3 if tensors[0] is None else tensors[0].chunk(3)
        return [tensor if tensor is None else tensor.detach().unflatten(0, (heads, -1))
                for tensor in tensors]
    return Block(*parts(weights), proj.weight.detach().unflatten(1, (heads, -1)), *parts(biases),
                 None if proj.bias is None else proj.bias.detach(), norm, attention)


def _get(module: Any, path: str) -> Any:
    """The attribute at a dotted path, where a number is an index; None if there is none."""
    for name in path.split("."):
        if name.isdigit():
            parts = list(module.children()) if isinstance(module, nn.Sequential) else []
            module = parts[int(name)] if int(name) < len(parts) else None
        else:
            module = getattr(module, name, None)
    return module


def _layers(attention: nn.Module) -> tuple[list[nn.Module], nn.Module] | None:
    """The layers of Q, K, V, and proj; None if the module has no known layout."""
    for names, last in LAYERS:
        layers, proj = [_get(attention, name) for name in names], _get(attention, last)
        if None not in layers and proj is not None:
            return layers, proj
    return None


def _attentions(module: nn.Module) -> list[nn.Module]:
    """The attentions within a module, without those within others."""
    if isinstance(module, nn.MultiheadAttention) or _layers(module):
        return [module]
    return [found for child in module.children() for found in _attentions(child)]


def _stages(module: nn.Module) -> Iterator[list[nn.Module]]:
    """The innermost lists of modules, in order, that all hold one attention each."""
    children = list(module.children())
    inner = [stage for child in children for stage in _stages(child)]
    if not inner and isinstance(module, (nn.ModuleList, nn.Sequential)) and children and all(
            len(_attentions(child)) == 1 for child in children):
        yield children
    yield from inner


def _norm_before(block: nn.Module, attention: nn.Module) -> nn.Module | None:
    """The norm before the attention of a block; vit-pytorch has it inside."""
    found = [norm for name in NORMS if (norm := getattr(block, name, None)) is not None]
    return found[0] if found else attention.norm if hasattr(attention, "to_qkv") else None


def _named(model: nn.Module, names: tuple[str, ...]) -> list[Tensor]:
    """All parameters and buffers, and weights of embeddings, with one of these names."""
    found = [getattr(module, name, None) for module in model.modules() for name in names]
    tensors = [layer.weight if isinstance(layer, nn.Embedding) else layer for layer in found]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.ndim >= 2]


def _grid(model: nn.Module, rows: int, prefix: int) -> tuple[int, int] | None:
    """The grid of a model with so many prefix tokens and rows of the position embedding.

    Where no attribute gives it, the patches are taken to form a square.
    """
    for module in model.modules():
        size = getattr(module, "grid_size", getattr(module, "grid", None))
        image, patch = getattr(module, "image_size", None), getattr(module, "patch_size", None)
        if size is None and image is not None and patch is not None:
            size = tuple(side // step for side, step in zip(_pair(image), _pair(patch)))
        if size is not None:
            return tuple(size) if 0 <= rows - size[0] * size[1] <= prefix else None
    squares = (rows - count for count in range(prefix, -1, -1))
    return next(((isqrt(cells),) * 2 for cells in squares if isqrt(cells)**2 == cells > 0), None)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _stem(outside: list[nn.Module], dim: int) -> nn.Module | None:
    """The last layer of the patch embedding: a convolution, or the norm after a linear layer."""
    for module in outside:
        if isinstance(module, nn.Conv2d) and module.out_channels == dim:
            return module
        if isinstance(module, nn.Sequential) and isinstance(module[-1], nn.LayerNorm) and any(
                isinstance(layer, nn.Linear) for layer in module):
            return module[-1]
    return None


def _image_shape(outside: list[nn.Module], grid: tuple[int, int]) -> tuple[int, int, int] | None:
    """(channels, height, width) of the images that a patch embedding cuts into this grid."""
    for module in outside:
        if isinstance(module, nn.Conv2d) and module.kernel_size == module.stride:
            return module.in_channels, *(side * step for side, step in zip(grid, module.stride))
    patch = next((module.patch_size for module in outside if hasattr(module, "patch_size")), None)
    pixels = next((module.in_features for module in outside if isinstance(module, nn.Linear)), 0)
    if patch is None:
        return None
    height, width = _pair(patch)
    return pixels // (height * width), grid[0] * height, grid[1] * width


def _mlp_end(block: nn.Module, dim: int) -> nn.Module | None:
    """The last linear layer of a block's MLP."""
    attention = {id(module) for module in _attentions(block)[0].modules()}
    ends = [module for module in block.modules() if isinstance(module, nn.Linear)
            and module.out_features == dim and id(module) not in attention]
    return ends[-1] if ends else None
