"""Where a transformer keeps the tensors of its attention: the one door through which inits write.

A `Layout` names, block by block, views of Q, K, V and proj with their biases and the norm before
the attention, and the position embedding. `layout_of` finds them by their attributes, in the models
of this package and in those of other libraries, of which it imports none:

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

Shapes: D channels of the residual stream, h heads, d channels per head, N patch tokens, n tokens of
a window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..filters import Offset, neighbours

LAYERS = (                      # the layers of Q, K and V, one where they are packed, and proj
    ("qkv", "proj"),
    ("q_proj", "k_proj", "v_proj", "proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("attention.query", "attention.key", "attention.value", "output.dense"),
    ("to_qkv", "to_out.0"))
HEADS = ("num_heads", "num_attention_heads", "heads")
NORMS = ("norm", "norm1", "layernorm_before", "layer_norm1", "ln_1")         # before the attention
POSITIONS = ("pos_embed", "pos_embedding", "position_embeddings", "position_embedding",
             "positional_embedding")
PREFIX_TOKENS = ("cls_token", "class_token", "class_embedding", "dist_token", "distillation_token",
                 "reg_token", "register_tokens")


@dataclass(frozen=True)
class Block:
    """The attention of one block, as views: writing to them writes to the model's parameters.

    Head i adds softmax(Qᵢ Kᵢᵀ / √d) Vᵢ @ proj[:, i].T to the stream, with Qᵢ = x @ q[i].T +
    q_bias[i], where x is the output of `norm`. In a Swin, attention is within windows, and
    bias_table[bias_rows] is added to the logits.
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
    window: tuple[int, int] | None = None        # of a Swin: tokens down and across
    bias_table: Tensor | None = None             # (relative positions, h)
    bias_rows: Tensor | None = None              # (n, n), by query and key

    def bias_row(self, offset: Offset) -> int:
        """The row of `bias_table` for the keys at this offset from their query.

        Raises ValueError if the table does not have one row for it.
        """
        rows = self.bias_rows[neighbours(offset, self.window)].unique()
        if len(rows) != 1:
            raise ValueError(f"the relative position bias has {len(rows)} rows for the offset "
                             f"{offset}, expected one")
        return int(rows)

    def mixing_weights(self, y: Tensor) -> Tensor:
        """softmax(Q Kᵀ / √d + bias) of the norm's output y, (n, T, D): (n, h, T, T).

        In a Swin, y is of whole windows, row by row.
        """
        query, key = projected(y, self.q, self.q_bias), projected(y, self.k, self.k_bias)
        logits = query @ key.mT * self.q.shape[1] ** -0.5
        if self.bias_table is not None:
            logits = logits + self.bias_table[self.bias_rows].movedim(2, 0)      # (h, n, n)
        return logits.softmax(-1)

    def output(self, y: Tensor) -> Tensor:
        """What the attention makes of the norm's output: (n, T, D) → (n, T, D)."""
        mixed = self.mixing_weights(y) @ projected(y, self.v, self.v_bias)       # (n, h, T, d)
        output = torch.einsum("bhtd, chd -> btc", mixed, self.proj)
        return output if self.proj_bias is None else output + self.proj_bias


def projected(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Queries, keys or values of each head: y (n, T, D), weight (h, d, D) → (n, h, T, d)."""
    return y[:, None] @ weight.mT + (0.0 if bias is None else bias[:, None])


@dataclass(frozen=True)
class Layout:
    """Where a ViT keeps what inits write.

    pos_embed: (rows, D), a view; its last N rows are those of the patch tokens, row by row of the
        grid, and those before them of prefix tokens. None: there is none.
    learned: whether pos_embed is a parameter, and no frozen one of sines and cosines.
    grid: the patch tokens down and across; None if the blocks have several grids, or where the
        model does not state it.
    missing: where there is no pos_embed, why.
    image_shape: (channels, height, width); None where it is not known.
    tokens: the prefix tokens, (…, D).

    A forward pass shows the rest (`probe.py`): the number of prefix tokens; sequence_first, whether
    the blocks read (T, n, D) in place of (n, T, D); entry, a norm between the sum of patches and
    positions and the first block (CLIP's), if there is one; and in words, what was checked.
    """

    model: nn.Module
    blocks: tuple[Block, ...]
    pos_embed: Tensor | None
    grid: tuple[int, int] | None
    learned: bool = True
    missing: str = "the layout has no position embedding"
    image_shape: tuple[int, int, int] | None = None
    tokens: tuple[Tensor, ...] = ()
    prefix: int = 0
    sequence_first: bool = False
    entry: nn.Module | None = None
    checked: str = ""

    @property
    def positions(self) -> Tensor:
        """The position embedding of the patch tokens, (N, D), a view."""
        return self.pos_embed[-self.grid[0] * self.grid[1]:]

    def batch_first(self, x: Tensor) -> Tensor:
        """What a block reads as (n, T, D), a view."""
        return x.transpose(0, 1) if self.sequence_first and x.ndim == 3 else x

    @property
    def in_windows(self) -> bool:
        """Whether the model is a Swin, whose heads find their target by a relative bias."""
        return self.blocks[0].bias_table is not None

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
    modules, paths, lists, blocks = dict(model.named_modules()), block_paths(model), set(), []
    for path, block in paths.items():
        lists.add(block.rpartition(".")[0])
        attention, owner = modules[path], path
        own = getattr(attention, "norm", None) if hasattr(attention, "to_qkv") else None
        norm = own if isinstance(own, nn.LayerNorm) else None            # of vit-pytorch
        while norm is None and len(owner) > len(block):
            owner = owner.rpartition(".")[0]         # outwards
            for name in NORMS:
                norm = getattr(modules[owner], name, norm)
        blocks.append(block_of(attention, norm))

    dim, positions, tokens = blocks[0].proj.shape[0], [], []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        name = name.removesuffix(".weight").rpartition(".")[2]           # .weight: nn.Embedding
        if tensor.ndim > 1 and tensor.shape[-1] == dim and name in POSITIONS:
            positions.append(tensor)
        elif tensor.ndim and tensor.shape[-1] == dim and name in PREFIX_TOKENS:
            tokens.append(tensor.detach())
    layout = Layout(model, tuple(blocks), None, None, tokens=tuple(tokens))
    if len(lists) > 1:
        return replace(layout, missing=f"the model has {len(lists)} lists of blocks: several grids "
                                       "of tokens, parallel blocks, or an encoder and a decoder")
    if len(positions) != 1:
        return replace(layout, missing=(
            f"the model has {len(positions) or 'no'} learned position embedding"
            f"{'s' * (len(positions) > 1)}, expected one, by which heads find their target"))
    rows = positions[0].detach().flatten(0, -2)
    # All rows but those of 0 may be sines and cosines, whose squares add up to 1 by pairs.
    squares = rows.square().sum(1)
    waves = torch.isclose(squares[squares > 0], squares.new_tensor(dim / 2), rtol=1e-3).all()
    return replace(layout, pos_embed=rows, grid=_grid(modules.values(), len(rows)), learned=(
        isinstance(positions[0], nn.Parameter) and (positions[0].requires_grad or not waves)))


def block_paths(model: nn.Module) -> dict[str, str]:
    """The path of each attention in the model, and of the block around it.

    A block is the largest module that holds one attention alone and lies in a list, an
    nn.ModuleList or nn.Sequential. Attentions outside lists, such as those that pool, are left out.
    Raises ValueError if there are no others, or if their list holds blocks without one.
    """
    modules, around, held = dict(model.named_modules()), {}, Counter()
    for path, module in modules.items():
        if isinstance(module, nn.MultiheadAttention) or _layers(module):
            around[path] = list(accumulate(path.split("."), "{}.{}".format))      # inwards
            held.update(around[path])
    blocks = {}
    for path, owners in around.items():
        for owner in owners:
            if held[owner] == 1 and isinstance(modules[owner.rpartition(".")[0]],
                                               (nn.ModuleList, nn.Sequential)):
                blocks[path] = owner
                break
    if not blocks:
        raise ValueError(f"a {type(model).__name__} has no list of blocks with one attention each, "
                         "of a layout known here")
    for owner in {path.rpartition(".")[0] for path in blocks.values()}:
        children = {f"{owner}.{name}".lstrip("."): child
                    for name, child in modules[owner].named_children()}
        kinds = {type(children[path]) for path in blocks.values() if path in children}
        for path, child in children.items():
            alike = isinstance(modules[owner], nn.ModuleList) or type(child) in kinds
            if alike and not held[path] and any(True for _ in child.parameters()):
                raise ValueError(f"{path}, a {type(child).__name__}, has no attention of a layout "
                                 "known here, as others of its list have")
    return blocks


def block_of(attention: nn.Module, norm: nn.Module) -> Block:
    """The views of one attention with one of the layouts above; norm: the LayerNorm before it.

    Raises ValueError for another layout, and for layers that are not nn.Linear.
    """
    if isinstance(attention, nn.MultiheadAttention):
        if attention.in_proj_weight is None or attention.bias_k is not None:
            raise ValueError("an nn.MultiheadAttention with kdim, vdim or add_bias_kv is not "
                             "covered")
        proj, weights, biases = (attention.out_proj, [attention.in_proj_weight],
                                 [attention.in_proj_bias])
    else:
        *layers, proj = _layers(attention) or [attention]
        for layer in (*layers, proj):
            if not isinstance(layer, nn.Linear):     # LoRA's, or quantised
                library = type(layer).__module__.partition(".")[0]
                raise ValueError(f"{type(attention).__name__} has a {type(layer).__name__}"
                                 f"{f' of {library}' * (library != 'torch')} where nn.Linear is "
                                 "expected for Q, K, V or proj")
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    inner = getattr(attention, "attention", None)    # where transformers 4 keeps the number
    heads = next((getattr(owner, name) for owner in (attention, inner) for name in HEADS
                  if hasattr(owner, name)), None)
    if heads is None:
        raise ValueError(f"{type(attention).__name__} does not say how many heads it has, by "
                         f"{' or '.join(HEADS)}")
    rows, inner = sum(map(len, weights)), proj.weight.shape[1]
    if rows != 3 * inner or inner % heads:           # shared keys, or keys and values alone
        raise ValueError(f"{type(attention).__name__} has {rows} rows of Q, K and V for {heads} "
                         f"heads of {inner} channels, expected {3 * inner}")
    if len(weights) == 1:                            # Q, K and V in one
        weights = weights[0].chunk(3)
        biases = [None] * 3 if biases[0] is None else biases[0].chunk(3)
    views = [None if tensor is None else tensor.detach().unflatten(0, (heads, -1))
             for tensor in (*weights, *biases)]
    table = getattr(attention, "relative_position_bias_table", None)
    return Block(*views[:3], proj.weight.detach().unflatten(1, (heads, -1)), *views[3:],
                 None if proj.bias is None else proj.bias.detach(), norm, attention,
                 **(_window_bias(attention, table) if isinstance(table, nn.Parameter) else {}))


def _window_bias(attention: nn.Module, table: nn.Parameter) -> dict[str, Any]:
    """The fields of a Swin's block: empty where the table is not of the size of its windows."""
    window = stated(attention, "window_size", "window")
    rows = getattr(attention, "relative_position_index", None)
    if rows is None or window is None or rows.numel() != (window[0] * window[1])**2 or (
            len(table) != (2 * window[0] - 1) * (2 * window[1] - 1)):
        return {}                                    # BEiT's has rows for the class token, too
    return dict(window=window, bias_table=table.detach(),
                bias_rows=rows.view(window[0] * window[1], -1))


def _layers(attention: nn.Module) -> list[nn.Module]:
    """The layers of Q, K, V, and proj last; empty if the module has no known layout."""
    for names in LAYERS:
        try:
            return list(map(attention.get_submodule, names))
        except AttributeError:
            continue
    return []


def _grid(modules: Iterable[nn.Module], rows: int) -> tuple[int, int] | None:
    """The grid that a model states, for so many rows of the position embedding."""
    for module in modules:
        grid = stated(module, "grid_size", "grid")
        image, patch = stated(module, "image_size"), stated(module, "patch_size")
        if grid is None and image and patch:
            grid = image[0] // patch[0], image[1] // patch[1]
        if grid is not None:
            return grid if grid[0] * grid[1] <= rows else None
    return None


def stated(module: nn.Module, *names: str) -> tuple[int, int] | None:
    """Down and across, the first attribute of these names that is one number for both, or two."""
    for value in (getattr(module, name, None) for name in names):
        sides = (value, value) if isinstance(value, int) else value
        if isinstance(sides, (tuple, list)) and list(map(type, sides)) == [int, int]:
            return tuple(sides)
    return None
