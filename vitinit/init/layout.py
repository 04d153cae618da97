"""Where the ViT and the Swin of this package keep the tensors of their attention: `layout_of`.

Inits write to such a layout. Those of other libraries' models are found by their attributes, in
interop/in_place/foreign_layouts.py.
"""

import torch
from einops import rearrange
from torch import nn

from ..models.attention import Attention
from ..models.rotary import Rotary
from ..models.shift import Shift
from ..models.swin import SwinBlock, SwinTransformer
from ..models.vit import VisionTransformer, VitBlock
from .attentions import Attentions, Block, Layout, Rotation, ShiftBlock, SwinLayout, WindowBlock


def layout_of(model: nn.Module | Attentions) -> Attentions:
    """The attentions and positions of a ViT or a Swin of this package; a layout, as it is.

    Raises ValueError for another model, and if queries and keys are normalised.
    """
    if isinstance(model, (SwinTransformer, SwinLayout)):
        return swin_layout(model)
    return vit_layout(model)


def swin_layout(model: nn.Module | SwinLayout) -> SwinLayout:
    """The same of a Swin."""
    if isinstance(model, SwinLayout):
        return model
    blocks = [block for block in model.modules() if isinstance(block, SwinBlock)]
    return SwinLayout(model, tuple(map(window_block_of, blocks)))


def vit_layout(model: nn.Module | Attentions) -> Layout:
    """The same of a ViT."""
    if isinstance(model, Layout):
        return model
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            f"a {type(model).__name__} is no ViT or Swin of this package; models of "
            "other libraries are initialised by vitinit.init.init_"
        )
    patches = model.patch_embed.proj
    rows = patches.weight.new_empty(0, patches.out_channels)  # of rotary positions alone
    if model.pos_embed is not None:
        rows = model.pos_embed.detach().flatten(0, 1)  # (P + N, D)
    tokens = tuple(token.detach() for token in model.prefix_tokens())
    attending = [block for block in model.blocks if isinstance(block.attn, Attention)]
    shifts = [block.attn for block in model.blocks if isinstance(block.attn, Shift)]
    return Layout(
        model,
        tuple(map(block_of, attending)),
        rows,
        model.grid,
        model.learns_positions,
        tokens,
        image_shape=(patches.in_channels, *model.patch_embed.image_size),
        shifting=tuple(map(shift_block_of, shifts)),
    )


def shift_block_of(shift: Shift) -> ShiftBlock:
    """The views of a block's values and projection."""
    heads = shift.num_heads
    v = rearrange(shift.v.weight.detach(), "(h d) c -> h d c", h=heads)
    proj = rearrange(shift.proj.weight.detach(), "c (h d) -> c h d", h=heads)
    return ShiftBlock(v, proj)


def block_of(block: VitBlock | SwinBlock) -> Block:
    """The views of a block's attention. Raises ValueError for one with norms of Q and K."""
    attention = block.attn
    assert not isinstance(attention, Shift)
    if isinstance(attention.q_norm, nn.LayerNorm):
        raise ValueError(
            f"{type(attention).__name__} normalises queries and keys, which would "
            "undo what is written"
        )
    q, k, v = attention.by_head(attention.qkv.weight.detach())  # (h, d, D) each
    q_bias = k_bias = v_bias = None
    if attention.qkv.bias is not None:
        q_bias, k_bias, v_bias = attention.by_head(attention.qkv.bias.detach())
    proj = attention.proj_weight.detach()  # (D, h, d)
    proj_bias = attention.proj.bias.detach()
    return Block(
        q,
        k,
        v,
        proj,
        q_bias,
        k_bias,
        v_bias,
        proj_bias,
        block.norm1,
        attention,
        rotation_of(attention),
        around=block,
    )


def window_block_of(block: SwinBlock) -> WindowBlock:
    """The same of a Swin's block, with its relative position bias."""
    attention = block.attn
    return WindowBlock(
        **vars(block_of(block)),
        window=attention.window,
        bias_table=attention.relative_position_bias_table.detach(),
        bias_rows=attention.relative_position_index,
    )


def rotation_of(attention: nn.Module) -> Rotation | None:
    """How an attention of this package turns queries and keys, else None: a probe sees others'."""
    rotary = getattr(attention, "rotary", None)
    if not isinstance(rotary, Rotary):
        return None
    turns = rotary.turns().detach()  # (T, h, d / 2, 2)
    return Rotation(torch.arange(2 * turns.shape[2]).view(-1, 2), turns)
