"""A model of one's own: a rotary ViT whose blocks compute attention and MLP beside each other."""

from torch import Tensor

from vitinit.init import INITS
from vitinit.models import FAMILIES, MODELS
from vitinit.models.layers import Pair, module_list
from vitinit.models.vit import VisionTransformer, VitBlock


class ParallelBlock(VitBlock):
    """x + attention(norm(x)) + MLP(norm(x)), as in ViT-22B (arXiv 2302.05442, §2.1)."""

    def forward(self, x: Tensor, drop_path=(None, None), tokens=None) -> Tensor:
        return x + self.attn(self.norm1(x), tokens) + self.mlp(self.norm2(x))


class ParallelViT(VisionTransformer):
    family = "parallel_vit"

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
    ) -> None:
        super().__init__(
            num_classes=num_classes,
            image_size=image_size,
            in_channels=in_channels,
            patch_size=patch_size,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            pool="mean",
            pos_embed="rope",
        )
        self.blocks = module_list(ParallelBlock(block.attn, embed_dim) for block in self.blocks)


FAMILIES["parallel_vit"] = ParallelViT
MODELS["parallel_tiny"] = ("parallel_vit", dict(patch_size=8, embed_dim=24, depth=2, num_heads=3))
for name in ("default", "lecun"):
    INITS[name]["parallel_vit"] = INITS[name]["rotary_vit"]
