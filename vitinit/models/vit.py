"""Vision Transformer (Dosovitskiy et al., arXiv 2010.11929), as DeiT trains it (arXiv 2012.12877).

    image → patches → + class token, + registers, + position embedding → blocks → norm
    → class token or mean → head

Names in the state dict, parameter counts and outputs equal those of timm and of DeiT's checkpoints.
The shape legend is in attention.py.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..base.values import AtLeastOne, Count, NonNegative
from .attention import Attention
from .layers import (
    PREFIX_TOKENS,
    Classifier,
    Features,
    LayerScale,
    Mlp,
    Pair,
    PatchEmbed,
    Sides,
    SwiGlu,
    add_branch,
    drop_path_rates,
    head_width,
    hidden_width,
    make_head,
    module_list,
    run_blocks,
    scales_by_block,
    sincos_position_embedding,
)
from .rotary import Coordinates, Frequencies, Rotary, between_tokens, frequencies_of
from .shift import Shift

Pool = Literal["class", "mean"]
Positions = Literal["learned", "sincos", "rope", "learned+rope", "none"]
MlpKind = Literal["gelu", "swiglu"]
MLPS = {"gelu": Mlp, "swiglu": SwiGlu}


class VitBlock(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + MLP(norm(x)).

    layer_scale: the initial value of γ, which multiplies both branches; 0: there is no LayerScale.
    """

    def __init__(
        self,
        attention: Attention | Shift,
        dim: int,
        *,
        mlp: MlpKind = "gelu",
        mlp_ratio: float = 4.0,
        layer_scale: float = 0.0,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = MLPS[mlp](dim, hidden_width(dim, mlp_ratio))
        self.ls1 = LayerScale(dim, layer_scale) if layer_scale else nn.Identity()
        self.ls2 = LayerScale(dim, layer_scale) if layer_scale else nn.Identity()

    def forward(
        self,
        x: Tensor,
        drop_path: Sequence[Tensor | None] = (None, None),
        tokens: Tensor | None = None,
    ) -> Tensor:
        """x: (B, N, C); drop_path: the scales of the two branches, each (B,) or None. tokens: (B, N),
        the places of these tokens in the whole image, which rotary positions need where patches
        are hidden; None: all are here, in order.
        """
        mixed = self.attn(self.norm1(x), tokens)
        x = add_branch(x, self.ls1(mixed), drop_path[0])
        hidden = self.mlp(self.norm2(x))
        return add_branch(x, self.ls2(hidden), drop_path[1])


class Rope(NamedTuple):
    """Rotary positions; see rotary.py."""

    frequencies: Frequencies
    base: float
    coordinates: Coordinates


def new_mixer(
    grid: Sides,
    dim: int,
    num_heads: int,
    *,
    prefix_tokens: int,
    qkv_bias: bool,
    qk_norm_eps: float | None,
    rope: Rope | None,
    shift_kernel: int,
    first: int,
) -> Attention | Shift:
    """What mixes the tokens of a block: attention, rotary if there is `rope`; or, with a shift_kernel
    above 0, shifts of the offsets of this kernel, from number `first` on.
    """
    head_dim = head_width(dim, num_heads)
    if shift_kernel:
        omega = None
        if rope is not None:
            omega = frequencies_of(rope.frequencies, num_heads, head_dim, rope.base)
            omega = between_tokens(omega, rope.coordinates, grid)
        return Shift(
            dim,
            grid,
            num_heads=num_heads,
            kernel_size=shift_kernel,
            first=first,
            bias=qkv_bias,
            frequencies=omega,
        )
    rotary = None
    if rope is not None:
        rotary = Rotary(
            grid,
            prefix_tokens=prefix_tokens,
            heads=num_heads,
            head_dim=head_dim,
            kind=rope.frequencies,
            base=rope.base,
            coordinates=rope.coordinates,
        )
    return Attention(
        dim, num_heads=num_heads, qkv_bias=qkv_bias, qk_norm_eps=qk_norm_eps, rotary=rotary
    )


class VisionTransformer(Classifier):
    """ViT for images (B, 3, H, W) → logits (B, num_classes).

    What is not listed here, and the errors: see `Classifier`.

    image_size, patch_size: one integer or (height, width); the patches must tile the image.
    pool: "class": the head reads the class token. "mean": there is no class token, and the head
        reads the mean of the patch tokens.
    fc_norm: apply the last LayerNorm after mean pooling instead of before it, as in MAE's
        fine-tuned models (arXiv 2111.06377, appendix A.1). The name, also in the state dict, is
        timm's.
    num_registers: number of register tokens, which take part in attention and which the head does
        not read (Darcet et al., "Vision Transformers Need Registers", arXiv 2309.16588, §2.2);
        `reg_token` in the state dict. The unused class token of MAE's fine-tuned models is one.
    pos_embed: "learned"; "sincos", which is fixed (a buffer), with zeros for the prefix tokens;
        "rope", queries and keys that are turned by their places (rotary.py); "learned+rope"; or
        "none": a control that knows a patch's content, but not its place.
    rope_frequencies, rope_base, rope_coordinates: of "rope"; see rotary.py. "axial" with base 100
        is RoPE-ViT's ("mixed": base 10), with 10,000 and "scaled" EVA-02's, with 100 and "centred"
        DINOv3's.
    prefix_positions: whether the tokens before the patches have rows of a learned position embedding,
        too. DeiT III has none for them (arXiv 2204.07118; timm's no_embed_class).
    qk_norm: normalise each head's queries and keys. layer_scale: see `VitBlock`.
    mlp: "gelu", or "swiglu", whose hidden layer has mlp_ratio · embed_dim channels, too.
    distilled: add DeiT's distillation token and a second head, which reads it; the logits are the
        mean of both heads' logits, as in DeiT's code (the paper, arXiv 2012.12877, §4, adds their
        softmax outputs). `forward(…, apart=True)` returns them apart, for training with a teacher
        (tasks/distillation.py).
    norm_eps: added to the variance in every LayerNorm; 1e-6 in ViT's and DeiT's code and in timm,
        1e-12 in Hugging Face's.
    shift_blocks: how many blocks, from the first on, mix tokens by fixed shifts in place of attention
        (shift.py); pool "mean", and no registers. shift_kernel: the side of their offsets' kernel.
    drop_path: stochastic-depth rate of the last block; the rates rise linearly from 0 in the first,
        which is all there is with depth 1. constant_drop_path: of all blocks, as in DeiT III.
    """

    family = "vit"
    pos_embed: Tensor | None  # (1, N, C) or (1, patches, C); None if "rope" is all

    def __init__(
        self,
        *,
        num_classes: int,
        image_size: Pair,
        in_channels: int = 3,
        patch_size: Pair,
        embed_dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_path: float = 0.0,
        constant_drop_path: bool = False,
        pool: Pool = "class",
        pos_embed: Positions = "learned",
        prefix_positions: bool = True,
        rope_frequencies: Frequencies = "axial",
        rope_base: float = 100.0,
        rope_coordinates: Coordinates = "index",
        qk_norm: bool = False,
        layer_scale: NonNegative = 0.0,
        mlp: MlpKind = "gelu",
        distilled: bool = False,
        num_registers: Count = 0,
        shift_blocks: Count = 0,
        shift_kernel: AtLeastOne = 3,
        fc_norm: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(
            num_classes,
            in_channels,
            image_size=image_size,
            patch_size=patch_size,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            norm_eps=norm_eps,
        )
        if fc_norm and pool != "mean":
            raise ValueError('fc_norm stands after mean pooling; pool is "class", expected "mean"')
        first = drop_path if constant_drop_path else 0.0
        self.drop_path_rates = drop_path_rates(drop_path, depth, first)
        self.patch_embed = PatchEmbed(image_size, patch_size, embed_dim, in_channels=in_channels)
        self.grid = self.patch_embed.grid
        self.add_prefix_tokens(pool, distilled, num_registers, embed_dim)
        self.add_positions(pos_embed, embed_dim, prefix_positions)
        self.require_shifts_to_fit(shift_blocks, depth)
        rope = Rope(rope_frequencies, rope_base, rope_coordinates) if self.rotary else None
        blocks = []
        for number in range(depth):
            attention = new_mixer(
                self.grid,
                embed_dim,
                num_heads,
                prefix_tokens=self.num_prefix_tokens,
                qkv_bias=qkv_bias,
                qk_norm_eps=norm_eps if qk_norm else None,
                rope=rope,
                shift_kernel=shift_kernel if number < shift_blocks else 0,
                first=number * num_heads,
            )
            block = VitBlock(
                attention,
                embed_dim,
                mlp=mlp,
                mlp_ratio=mlp_ratio,
                layer_scale=layer_scale,
                norm_eps=norm_eps,
            )
            blocks.append(block)
        self.blocks = module_list(blocks)
        norm = nn.LayerNorm(embed_dim, eps=norm_eps)
        self.norm = nn.Identity() if fc_norm else norm
        self.fc_norm = norm if fc_norm else nn.Identity()
        self.head = make_head(embed_dim, num_classes)
        if distilled:
            self.head_dist = make_head(embed_dim, num_classes)

    def add_prefix_tokens(
        self, pool: Pool, distilled: bool, num_registers: int, embed_dim: int
    ) -> None:
        """Create the tokens before the patches, of which `pooled` reads some; count them."""
        if distilled and pool != "class":
            raise ValueError(
                'a distillation token stands beside a class token; pool is "mean", expected "class"'
            )
        self.pool = pool
        self.distilled = distilled
        if pool == "class":
            self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        if distilled:
            self.dist_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        if num_registers:
            self.reg_token = nn.Parameter(torch.zeros(1, num_registers, embed_dim))
        self.num_prefix_tokens = sum(token.shape[1] for token in self.prefix_tokens())

    def require_shifts_to_fit(self, shift_blocks: int, depth: int) -> None:
        """Raise ValueError for more blocks with shifts than blocks, and beside prefix tokens."""
        if shift_blocks > depth or shift_blocks and self.num_prefix_tokens:
            raise ValueError(
                f"shift_blocks is {shift_blocks}, expected at most {depth}, and no tokens but those of "
                'patches: pool = "mean", num_registers = 0'
            )

    def add_positions(self, pos_embed: Positions, embed_dim: int, prefix_positions: bool) -> None:
        """Create the position embedding; note whether positions are learned, and rotary."""
        self.learns_positions = pos_embed.startswith("learned")
        self.rotary = "rope" in pos_embed
        self.prefix_positions = prefix_positions
        prefix = self.num_prefix_tokens if prefix_positions else 0
        positions = torch.zeros(1, prefix + prod(self.grid), embed_dim)
        if pos_embed == "sincos":
            positions[0, prefix:] = sincos_position_embedding(self.grid, embed_dim)
        if self.learns_positions:
            self.pos_embed = nn.Parameter(positions)
        else:
            self.register_buffer("pos_embed", None if pos_embed == "rope" else positions)

    def prefix_tokens(self) -> list[Tensor]:
        """The class, distillation and register tokens, as far as there are any; (1, count, C)."""
        return [getattr(self, name) for name in PREFIX_TOKENS if hasattr(self, name)]

    def embed(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) → (B, N, C): prefix tokens and patches, plus the position embedding."""
        x = self.patch_embed(images)  # (B, patches, C)
        positions = self.pos_embed  # None if they are rotary alone
        if positions is not None and not self.prefix_positions:
            x = x + positions
        prefix = [token.expand(x.shape[0], -1, -1) for token in self.prefix_tokens()]
        x = torch.cat([*prefix, x], dim=1)  # (B, N, C)
        if positions is not None and self.prefix_positions:
            x = x + positions
        return x

    def features(
        self, images: Tensor, drop_path: Tensor | None = None, *, blocks: Sequence[int] = ()
    ) -> Features:
        """See `Classifier`; drop_path: (2·depth, B) or None."""
        x = self.embed(images)  # (B, N, C)
        scales = scales_by_block(drop_path, len(self.blocks))
        x, after = run_blocks(self.blocks, x, blocks, scales)
        x = self.norm(x)
        of_blocks = tuple(map(self.tokens, after))
        return Features(of_blocks, self.tokens(x), self.pooled(x))

    def pooled(self, x: Tensor) -> Tensor:
        """(B, N, C) → (B, C), the class token or the patches' mean; (B, 2·C) if distilled."""
        if self.distilled:
            return x[:, :2].flatten(1)  # the class token, and then the distillation token
        if self.pool == "class":
            return x[:, 0]
        patches = x[:, self.num_prefix_tokens :]  # (B, patches, C)
        return self.fc_norm(patches.mean(dim=1))

    def classify(self, features: Features) -> Tensor:
        if self.distilled and self.num_classes:
            of_class, of_distillation = self.classify_apart(features).unbind(1)
            return (of_class + of_distillation) / 2
        return self.head(features.pooled)

    def classify_apart(self, features: Features) -> Tensor:
        """The logits of both heads of a distilled model, (B, 2, num_classes)."""
        of_class, of_distillation = features.pooled.chunk(2, dim=1)  # each (B, C)
        return torch.stack([self.head(of_class), self.head_dist(of_distillation)], dim=1)

    def forward(
        self, images: Tensor, drop_path: Tensor | None = None, *, apart: bool = False
    ) -> Tensor:
        """See `Classifier`; with `apart` the logits of both heads, (B, 2, num_classes)."""
        features = self.features(images, drop_path)
        if apart:
            if not self.distilled:
                raise ValueError("apart is True, and one head is all; expected a distilled model")
            return self.classify_apart(features)
        return self.classify(features)
