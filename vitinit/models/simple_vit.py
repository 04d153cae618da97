"""SimpleViT with the choices of arXiv 2401.12511 for what queries and keys are computed from.

    image → patches → blocks → norm → mean → head

Layers and norms follow that paper's code, which follows Beyer et al., "Better plain ViT baselines
for ImageNet-1k", arXiv 2205.01580. The shape legend is in attention.py; P is the position
embedding, (N, C).
"""

from collections.abc import Sequence
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from ..base.values import Count, NonNegative, Proportion
from .attention import attend, attention_logits
from .layers import (
    Classifier,
    Features,
    Mlp,
    Pair,
    Sides,
    head_width,
    hidden_width,
    make_head,
    module_list,
    patch_grid,
    patches_of,
    require_image_size,
    run_blocks,
    sincos_position_embedding,
    to_pair,
)

Reading = Literal["content", "mixed", "position", "free"]


class SimplePatchEmbed(nn.Module):
    """Patches as vectors, normalised, projected and normalised again: (B, 3, H, W) → (B, N, C)."""

    def __init__(self, patch_size: Sides, in_channels: int, embed_dim: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        pixels = in_channels * patch_size[0] * patch_size[1]
        self.norm1 = nn.LayerNorm(pixels)
        self.proj = nn.Linear(pixels, embed_dim)
        self.norm2 = nn.LayerNorm(embed_dim)

    def forward(self, images: Tensor) -> Tensor:
        patches = patches_of(images, self.patch_size)  # (B, N, p·q·3)
        return self.norm2(self.proj(self.norm1(patches)))


class SimpleAttention(nn.Module):
    """Attention with queries and keys from Z and values from X: (B, N, C) → (B, N, C); no biases.

    reads: what Z is. "content": X. "mixed": alpha · X + (1 − alpha) · P, the paper's Model I.
        "position": P, Model II. "free", Model III: there is no Z, and Q and K are themselves
        parameters, (h, N, d).
    values: whether the values are a linear projection of X. If not, each head mixes its own slice
        of X's channels, and num_heads · head_dim must equal embed_dim.
    logit_scale: factor on Q Kᵀ; 0 stands for head_dim^-½.
    """

    def __init__(
        self,
        dim: int,
        *,
        tokens: int,
        num_heads: int,
        head_dim: int,
        reads: Reading,
        alpha: float,
        values: bool,
        logit_scale: float,
    ) -> None:
        super().__init__()
        inner = num_heads * head_dim
        if not values and inner != dim:
            raise ValueError(
                f"without values, num_heads · head_dim = {inner} must be embed_dim = {dim}"
            )
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.reads = reads
        self.alpha = alpha
        self.logit_scale = logit_scale or head_dim**-0.5
        if reads == "free":
            self.query = nn.Parameter(torch.zeros(num_heads, tokens, head_dim))
            self.key = nn.Parameter(torch.zeros(num_heads, tokens, head_dim))
        else:
            self.qk = nn.Linear(dim, 2 * inner, bias=False)
        self.value = nn.Linear(dim, inner, bias=False) if values else nn.Identity()
        self.proj = nn.Linear(inner, dim, bias=False)

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Views of Q and K, (h, N, d), where these are free, else of their weights, (h, C, d)."""
        if self.reads == "free":
            return self.query, self.key
        query, key = self.qk.weight.unflatten(0, (2, self.num_heads, self.head_dim)).mT
        return query, key

    def queries_keys(self, x: Tensor, pos_embed: Tensor) -> tuple[Tensor, Tensor]:
        """Q and K, each (B, h, N, d), or (1, h, N, d) where they are the same for all images."""
        if self.reads == "free":
            return self.query[None], self.key[None]
        if self.reads == "content":
            z = x
        elif self.reads == "mixed":
            z = self.alpha * x + (1.0 - self.alpha) * pos_embed
        else:
            z = pos_embed[None]  # (1, N, C)
        query, key = rearrange(self.qk(z), "b n (two h d) -> two b h n d", two=2, h=self.num_heads)
        return query, key

    def mixing_logits(self, x: Tensor, pos_embed: Tensor) -> Tensor:
        """The logits of `mixing_weights`."""
        query, key = self.queries_keys(x, pos_embed)
        return attention_logits(query, key, scale=self.logit_scale)

    def mixing_weights(self, x: Tensor, pos_embed: Tensor) -> Tensor:
        """The attention matrices of `forward`: (B, h, N, N), or (1, h, N, N) as `queries_keys`."""
        return self.mixing_logits(x, pos_embed).softmax(dim=-1)

    def forward(self, x: Tensor, pos_embed: Tensor) -> Tensor:
        values = self.value(x)  # (B, N, h·d)
        if self.reads in ("position", "free"):  # one matrix per head for all images
            values = rearrange(values, "b n (h d) -> h n (b d)", h=self.num_heads)
            mixed = self.mixing_weights(x, pos_embed)[0] @ values  # (h, N, B·d)
            mixed = rearrange(mixed, "h n (b d) -> b n (h d)", b=x.shape[0])
            return self.proj(mixed)
        query, key = self.queries_keys(x, pos_embed)
        values = rearrange(values, "b n (h d) -> b h n d", h=self.num_heads)
        mixed = attend(query, key, values, scale=self.logit_scale)
        mixed = rearrange(mixed, "b h n d -> b n (h d)")
        return self.proj(mixed)


class SimpleBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, dim: int, attention: SimpleAttention, mlp_ratio: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, hidden_width(dim, mlp_ratio))

    def forward(self, x: Tensor, pos_embed: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), pos_embed)
        return x + self.mlp(self.norm2(x))


class SimpleViT(Classifier):
    """SimpleViT for images (B, 3, H, W) → logits (B, num_classes).

    What is not listed here, and the errors: see `Classifier`.

    reads, alpha, values, logit_scale: see SimpleAttention; "content" is the plain SimpleViT. The
        paper's code has the logit scale 0 but for its impulse init, with which it is 1 for "free"
        and 0.1 for the others, in training, too.
    input_pos_embed: whether the input of the first block is alpha · X + (1 − alpha) · P, as in the
        paper's code. Only for reads = "content"; otherwise P would enter twice.
    train_qk: False freezes Q and K, also for the optimiser (the paper's code only those of "free").
    head_dim: 0 stands for embed_dim / num_heads.

    P is the fixed 2-D sin-cos embedding with MoCo v3's frequencies, which the paper's code spaces
    slightly wider. There is no stochastic depth.
    """

    family = "simple_vit"
    pos_embed: Tensor  # P, a buffer

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
        head_dim: Count = 0,
        mlp_ratio: float = 1.0,
        reads: Reading = "content",
        alpha: Proportion = 0.5,
        input_pos_embed: bool = True,
        values: bool = True,
        train_qk: bool = True,
        logit_scale: NonNegative = 0.0,
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
        )
        if input_pos_embed and reads != "content":
            raise ValueError(
                f'reads = "{reads}" brings the position embedding into attention; '
                "expected input_pos_embed = false"
            )
        self.alpha = alpha
        self.input_pos_embed = input_pos_embed
        patch = to_pair(patch_size)
        self.image_size = to_pair(image_size)
        self.grid = patch_grid(self.image_size, patch)
        self.patch_embed = SimplePatchEmbed(patch, in_channels, embed_dim)
        self.register_buffer("pos_embed", sincos_position_embedding(self.grid, embed_dim))  # (N, C)
        blocks = []
        for _ in range(depth):
            attention = SimpleAttention(
                embed_dim,
                tokens=len(self.pos_embed),
                num_heads=num_heads,
                head_dim=head_dim or head_width(embed_dim, num_heads),
                reads=reads,
                alpha=alpha,
                values=values,
                logit_scale=logit_scale,
            )
            blocks.append(SimpleBlock(embed_dim, attention, mlp_ratio))
        self.blocks = module_list(blocks)
        self.norm = nn.LayerNorm(embed_dim)
        self.head = make_head(embed_dim, num_classes)
        if not train_qk:
            for name, weight in self.named_parameters():
                if name.endswith((".query", ".key", ".qk.weight")):
                    weight.requires_grad = False

    def features(self, images: Tensor, *, blocks: Sequence[int] = ()) -> Features:
        require_image_size(images, self.in_channels, self.image_size)
        x = self.patch_embed(images)  # (B, N, C)
        if self.input_pos_embed:
            x = self.alpha * x + (1.0 - self.alpha) * self.pos_embed
        x, after = run_blocks(self.blocks, x, blocks, [self.pos_embed] * len(self.blocks))
        x = self.norm(x)
        of_blocks = tuple(map(self.tokens, after))
        return Features(of_blocks, self.tokens(x), x.mean(dim=1))
