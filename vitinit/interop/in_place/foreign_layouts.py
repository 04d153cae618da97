"""Where a model keeps the tensors of its attention, as its attributes say: `foreign_layout_of`.

It knows these libraries, of which it imports none, and models of this package within others:

| library                    | layers of one attention                          | norm             |
|----------------------------|--------------------------------------------------|------------------|
| vitinit, timm, DeiT, Swin  | qkv, proj; in timm also q_proj, k_proj, v_proj   | norm1            |
| transformers 5             | q_proj, k_proj, v_proj, o_proj; SigLIP: out_proj | layernorm_before,|
| transformers 4             | attention.query, .key, .value, output.dense      |   norm1, …       |
| torchvision, torch.nn      | nn.MultiheadAttention                            | ln_1, norm1      |
| vit-pytorch                | to_qkv, to_out[0]                                | norm in, around  |
| Swin of timm, torchvision  | qkv, proj, relative_position_bias_table          | norm1            |

Any other model is described by hand: a function of the model that returns a `Layout`, whose blocks
`block_of` makes of an attention with one of these layouts, or `Block` of views.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from ...init.attentions import Attentions, Block, Layout, SwinLayout, WindowBlock
from ...init.baseline import SAME
from ...init.layout import rotation_of
from ...mixing.filters import Grid
from ...models.layers import PREFIX_TOKENS

__all__ = ["block_of", "foreign_layout_of"]

LAYERS = (  # the layers of Q, K and V, one where they are packed, and proj
    ("qkv", "proj"),
    ("q_proj", "k_proj", "v_proj", "proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("attention.query", "attention.key", "attention.value", "output.dense"),
    ("to_qkv", "to_out.0"),
)
HEADS = ("num_heads", "num_attention_heads", "heads")
NORMS = ("norm", "norm1", "layernorm_before", "layer_norm1", "ln_1")  # before the attention


def foreign_layout_of(model: nn.Module) -> Attentions:
    """The attentions and positions of a model of this package or of another library, by attributes.

    Raises ValueError without blocks of one attention each, and for several position embeddings.
    """
    modules, paths = dict(model.named_modules()), block_paths(model)
    blocks = []
    for attention, around in paths.items():
        block = block_of(modules[attention], norm_before(attention, around, modules))
        blocks.append(replace(block, around=modules[around]))
    windows = tuple(block for block in blocks if isinstance(block, WindowBlock))
    if len(windows) == len(blocks):
        return SwinLayout(model, windows)

    lists = {parent(path) for path in paths.values()}
    if len(lists) > 1:
        raise ValueError(
            f"the model has {len(lists)} lists of blocks: several grids of tokens, "
            "parallel blocks, or an encoder and a decoder"
        )
    dim = blocks[0].proj.shape[0]
    positions, tokens = embeddings(model, dim)
    if len(positions) > 1:
        raise ValueError(
            f"the model has {len(positions)} learned position embeddings, expected "
            "one, by which heads find their target"
        )
    grid = stated_grid(modules.values())
    rows, learned = blocks[0].proj.new_empty(0, dim), True
    if positions:  # else rotary alone, as a probe will see
        rows, learned = positions[0].detach().flatten(0, -2), _is_learned(positions[0])
        if math.prod(grid) > len(rows):
            grid = 0, 0
    return Layout(model, tuple(blocks), rows, grid, learned, tokens)


def embeddings(model: nn.Module, dim: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """The position embeddings of `dim` channels in a model, and its prefix tokens."""
    positions, tokens = [], []
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        name = path.removesuffix(".weight").rpartition(".")[2]  # .weight: nn.Embedding
        kind = SAME.get(name, name)
        if tensor.shape[-1:] != (dim,):
            continue
        if kind == "pos_embed" and tensor.ndim > 1:
            positions.append(tensor)
        elif kind in PREFIX_TOKENS:
            tokens.append(tensor.detach())
    return positions, tuple(tokens)


def _is_learned(positions: Tensor) -> bool:
    """Whether a position embedding is a parameter, and no frozen sines and cosines."""
    if not isinstance(positions, nn.Parameter):
        return False
    if positions.requires_grad:
        return True
    # All rows but those of 0 may be sines and cosines, whose squares add up to 1 by pairs.
    squares = positions.square().sum(-1)
    half = squares.new_tensor(positions.shape[-1] / 2)
    return not torch.isclose(squares[squares > 0], half, rtol=1e-3).all()


def parent(path: str) -> str:
    """The path of the module that holds the one at `path`."""
    return path.rpartition(".")[0]


def norm_before(attention: str, block: str, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """The norm before an attention: its own (vit-pytorch), else the innermost up to the block."""
    norm = getattr(modules[attention], "norm", None)
    if hasattr(modules[attention], "to_qkv") and isinstance(norm, nn.LayerNorm):
        return norm
    norm, owner = None, attention
    while norm is None and len(owner) > len(block):
        owner = parent(owner)
        for name in NORMS:
            norm = getattr(modules[owner], name, norm)
    return norm


def block_paths(model: nn.Module) -> dict[str, str]:
    """The path of each attention in the model, and of the block around it.

    A block is the largest module that holds one attention alone and lies in an nn.ModuleList or
    nn.Sequential. Attentions outside, such as those that pool, are left out. Raises ValueError if
    there are no others, or if their list holds blocks without one.
    """
    modules = dict(model.named_modules())
    around = {}  # of each attention, what holds it, inwards
    held: Counter[str] = Counter()  # attentions, by the path of what holds them
    for path, module in modules.items():
        if isinstance(module, nn.MultiheadAttention) or _layers(module):
            around[path] = list(accumulate(path.split("."), "{}.{}".format))
            held.update(around[path])
    blocks = {}
    for path, owners in around.items():
        for owner in owners:
            in_list = isinstance(modules[parent(owner)], (nn.ModuleList, nn.Sequential))
            if in_list and held[owner] == 1:
                blocks[path] = owner
                break
    if not blocks:
        raise ValueError(
            f"a {type(model).__name__} has no list of blocks with one attention each, "
            "of a layout known here"
        )
    for path in {parent(block) for block in blocks.values()}:
        require_blocks(path, modules[path], held)
    return blocks


def require_blocks(path: str, blocks: nn.Module, held: Mapping[str, int]) -> None:
    """Raise ValueError if a list of blocks holds one without an attention, beside others.

    In an nn.Sequential something else may come before and after the blocks.
    """
    children = {f"{path}.{name}".lstrip("."): child for name, child in blocks.named_children()}
    kinds = {type(child) for name, child in children.items() if held[name] == 1}
    below = False  # whether a block came before
    for name, child in children.items():
        if held[name]:
            below = True
            continue
        alike = isinstance(blocks, nn.ModuleList) or type(child) in kinds
        if (alike or below and _is_branch(child)) and list(child.parameters()):
            raise ValueError(
                f"{name}, a {type(child).__name__}, has no attention of a layout "
                "known here, as others of its list have"
            )


def _is_branch(module: nn.Module) -> bool:
    """Whether a module may be a block: it holds a LayerNorm, and a layer of as many outputs."""
    widths, outputs = set(), set()
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            widths.add(part.normalized_shape)
        elif isinstance(part, nn.Linear):
            outputs.add((part.out_features,))
    return not widths.isdisjoint(outputs)


def block_of(attention: nn.Module, norm: nn.Module | None) -> Block:
    """The views of one attention with one of the layouts above; norm: the LayerNorm before it.

    Raises ValueError for another layout or norm, and for layers that are not nn.Linear.
    """
    if not isinstance(norm, nn.LayerNorm):
        raise ValueError(
            "a block has no LayerNorm before its attention (post-norm, or another norm)"
        )
    for name in ("q_norm", "k_norm"):
        if not isinstance(getattr(attention, name, None), nn.Identity | None):
            kind = type(attention).__name__
            raise ValueError(
                f"{kind} normalises queries and keys, which would undo what is written"
            )
    weights, biases, proj = _parameters(attention)
    heads = _number_of_heads(attention)
    rows, inner = sum(map(len, weights)), proj.in_features
    if rows != 3 * inner or inner % heads:  # shared keys, or keys and values alone
        raise ValueError(
            f"{type(attention).__name__} has {rows} rows of Q, K and V for {heads} heads of {inner} "
            f"channels, expected {3 * inner}"
        )
    if len(weights) == 1:  # Q, K and V in one
        weights = list(weights[0].chunk(3))
        if biases[0] is not None:
            biases = list(biases[0].chunk(3))
        else:
            of_q, of_v = (getattr(attention, name, None) for name in ("q_bias", "v_bias"))
            biases = [of_q, None, of_v]  # of EVA
    q, k, v = (weight.detach().unflatten(0, (heads, -1)) for weight in weights)
    q_bias, k_bias, v_bias = (
        None if bias is None else bias.detach().unflatten(0, (heads, -1)) for bias in biases
    )
    block = Block(
        q,
        k,
        v,
        proj.weight.detach().unflatten(1, (heads, -1)),
        q_bias,
        k_bias,
        v_bias,
        None if proj.bias is None else proj.bias.detach(),
        norm,
        attention,
        rotation_of(attention),
    )
    return _in_windows(block)


def _parameters(attention: nn.Module) -> tuple[list[Tensor], list[Tensor | None], nn.Linear]:
    """The weights and the biases of Q, K and V, one where they are packed, and proj."""
    if isinstance(attention, nn.MultiheadAttention):
        if attention.in_proj_weight is None or attention.bias_k is not None:
            raise ValueError(
                "an nn.MultiheadAttention with kdim, vdim or add_bias_kv is not covered"
            )
        proj = as_linear(attention.out_proj, attention)
        return [attention.in_proj_weight], [attention.in_proj_bias], proj
    *layers, proj = [as_linear(layer, attention) for layer in _layers(attention) or [attention]]
    return [layer.weight for layer in layers], [layer.bias for layer in layers], proj


def _number_of_heads(attention: nn.Module) -> int:
    for owner in (attention, getattr(attention, "attention", None)):  # the second: transformers 4
        for name in HEADS:
            if hasattr(owner, name):
                return getattr(owner, name)
    raise ValueError(
        f"{type(attention).__name__} does not say how many heads it has, by {' or '.join(HEADS)}"
    )


def _in_windows(block: Block) -> Block:
    """The block of a Swin with its relative position bias; any other as it is."""
    table = getattr(block.attention, "relative_position_bias_table", None)
    index = getattr(block.attention, "relative_position_index", None)
    window = stated([block.attention], "window_size", "window")
    if not isinstance(table, nn.Parameter) or index is None or window is None:
        return block
    tokens = math.prod(window)
    offsets = (2 * window[0] - 1) * (2 * window[1] - 1)
    if index.numel() != tokens**2 or len(table) != offsets:  # BEiT's have the class token, too
        return block
    rows = index.view(tokens, -1)
    return WindowBlock(**vars(block), window=window, bias_table=table.detach(), bias_rows=rows)


def as_linear(layer: nn.Module, attention: nn.Module) -> nn.Linear:
    """The layer itself; raises ValueError for one of LoRA, or a quantised one."""
    if not isinstance(layer, nn.Linear):
        library = type(layer).__module__.partition(".")[0]
        origin = "" if library == "torch" else f" of {library}"
        raise ValueError(
            f"{type(attention).__name__} has a {type(layer).__name__}{origin} where nn.Linear is "
            "expected for Q, K, V or proj"
        )
    return layer


def _layers(attention: nn.Module) -> list[nn.Module]:
    """The layers of Q, K, V, and proj last; empty if the module has no known layout."""
    for names in LAYERS:
        with suppress(AttributeError):
            return list(map(attention.get_submodule, names))
    return []


def stated_grid(modules: Collection[nn.Module]) -> Grid:
    """The grid that a model states, else (0, 0)."""
    grid = stated(modules, "grid_size", "grid")
    image, patch = stated(modules, "image_size"), stated(modules, "patch_size")
    if grid is None and image and patch:
        return image[0] // patch[0], image[1] // patch[1]
    return grid or (0, 0)


def stated(owners: Iterable[object], *names: str) -> Grid | None:
    """Down and across: the first attribute of these names that is one number for both, or two."""
    for owner in owners:
        for name in names:
            value = getattr(owner, name, None)
            sides = (value, value) if isinstance(value, int) else value
            if isinstance(sides, (tuple, list)) and list(map(type, sides)) == [int, int]:
                return sides[0], sides[1]
    return None


def image_shape_of(layout: Attentions) -> tuple[int, int, int] | None:
    """(channels, height, width) of the images, as far as the model states their size.

    That is an attribute, or follows from the grid and the size of its patches. Where a Swin, which
    takes images of any size, states none, it is that of one window in the last stage.
    """
    if layout.image_shape:
        return layout.image_shape
    modules, blocks = list(layout.model.modules()), layout.blocks
    convolution = next((module for module in modules if isinstance(module, nn.Conv2d)), None)
    if convolution is None:  # a linear layer does not say how many channels a patch has
        return None
    owners = [*modules, *(getattr(module, "config", None) for module in modules)]
    size = stated(owners, "image_size", "img_size")
    patch = stated(owners, "patch_size")
    if patch is None and convolution.out_channels == blocks[0].proj.shape[0]:
        patch = convolution.stride[0], convolution.stride[1]
    grid = layout.grids[-1]
    if size is None and patch and all(grid):
        # A Swin's channels double by stage, as tokens merge.
        merged = blocks[-1].q.shape[-1] // blocks[0].q.shape[-1]
        size = merged * grid[0] * patch[0], merged * grid[1] * patch[1]
    if size is None:
        return None
    return convolution.in_channels, *size
