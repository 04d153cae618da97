"""Small ViTs with the attribute layouts of other libraries. Each attention keeps its last map."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitinit.interop.in_place.receipt import Report
from vitinit.mixing import target_mass

DIM, HEADS, GRID, CLASSES = 66, 3, (5, 7), 7  # patches of 4 × 4 pixels
LAYERS = {  # by kind: layers of Q, K, V or one of all, proj, number of heads, norms of a block
    "timm": (["qkv"], "proj", "num_heads", ("norm1", "norm2")),
    "eva": (["qkv"], "proj", "num_heads", ("norm1", "norm2")),  # its biases lie apart
    "timm, separate": (["q_proj", "k_proj", "v_proj"], "proj", "num_heads", ("norm1", "norm2")),
    "vit-pytorch": (["to_qkv"], "to_out.0", "heads", ("norm", "norm2")),
    "transformers 5": (
        ["q_proj", "k_proj", "v_proj"],
        "o_proj",
        "num_attention_heads",
        ("layernorm_before", "layernorm_after"),
    ),
    "transformers 4": (
        ["attention.query", "attention.key", "attention.value"],
        "output.dense",
        "attention.num_attention_heads",
        ("layernorm_before", "layernorm_after"),
    ),
    "siglip": (
        ["k_proj", "v_proj", "q_proj"],
        "out_proj",
        "num_heads",
        ("layer_norm1", "layer_norm2"),
    ),
}


def put(module: nn.Module, path: str, value: object) -> None:
    *parents, last = path.split(".")
    for name in parents:
        if not hasattr(module, name):
            setattr(module, name, nn.Module())
        module = getattr(module, name)
    if isinstance(value, nn.Module):
        module.add_module(last, value)  # also under a number, as in an nn.Sequential
    else:
        setattr(module, last, value)


class OtherAttention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        names, proj, heads, norms = LAYERS[kind]
        for name in names:
            put(
                self,
                name,
                nn.Linear(
                    DIM,
                    DIM * (3 if len(names) == 1 else 1),
                    bias=kind not in ("transformers 5", "vit-pytorch", "eva"),
                ),
            )
        put(self, proj, nn.Linear(DIM, DIM))
        put(self, heads, HEADS)
        self.norm = nn.LayerNorm(DIM) if kind == "vit-pytorch" else nn.Identity()
        self.names, self.last, self.scale = names, proj, (DIM // HEADS) ** -0.5
        self.turn = lambda x: x  # of queries and of keys
        if kind == "eva":
            self.q_bias, self.v_bias = (nn.Parameter(torch.randn(DIM)) for _ in "qv")
            self.register_buffer("k_bias", torch.zeros(DIM), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        x = self.norm(x)
        found = {name: self.get_submodule(name)(x) for name in self.names}
        if hasattr(self, "k_bias"):
            found["qkv"] = found["qkv"] + torch.cat([self.q_bias, self.k_bias, self.v_bias])
        if len(found) == 1:
            parts = next(iter(found.values())).chunk(3, -1)
        else:
            parts = [
                next(value for name, value in found.items() if name.split(".")[-1][0] == letter)
                for letter in "qkv"
            ]
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        q, k = self.turn(q), self.turn(k)
        self.seen = (torch.einsum("nhqd, nhkd -> nhqk", q, k) * self.scale).softmax(-1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.get_submodule(self.last)(mixed.transpose(1, 2).flatten(2)), None


def turning(kind: str, seed: int) -> Callable[[Tensor], Tensor]:
    """A rotation of the last tokens of x, (n, h, T, 22): of neighbours or "halves" by one angle for
    rows or for columns; or "mixed", by one of its own for each head, and for each block's seed."""
    rng = torch.Generator().manual_seed(seed)
    omega = torch.rand(HEADS, 11, 2, generator=rng) * 2 - 1
    if kind != "mixed":
        omega = torch.stack([torch.arange(11) % 2, 1 - torch.arange(11) % 2], 1) / (
            1 + torch.arange(11)[:, None] / 3
        )
    places = torch.cartesian_prod(*map(torch.arange, GRID)) + (kind == "halves") * 0.5
    angles = (places[:, None, None] * omega).sum(-1).transpose(0, 1).double()  # (h, N, 11)

    def turn(x: Tensor) -> Tensor:
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        first, last = x[..., : -GRID[0] * GRID[1], :], x[..., -GRID[0] * GRID[1] :, :]
        a, b = last.chunk(2, -1) if kind == "halves" else (last[..., ::2], last[..., 1::2])
        parts = [a * cos - b * sin, a * sin + b * cos]
        last = torch.cat(parts, -1) if kind == "halves" else torch.stack(parts, -1).flatten(-2)
        return torch.cat([first, last], -2)

    return turn


class Scale(nn.Module):
    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((DIM,), gamma))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class OtherBlock(nn.Module):
    def __init__(self, kind: str, post_norm: bool, gamma: float | None) -> None:
        super().__init__()
        self.norms, self.post_norm = LAYERS[kind][3], post_norm
        outside = kind != "vit-pytorch"  # whose norm is in the attention
        self.add_module(self.norms[0], nn.LayerNorm(DIM) if outside else nn.Identity())
        self.attn = OtherAttention(kind)
        self.ls1 = nn.Identity() if gamma is None else Scale(gamma)
        self.add_module(self.norms[1], nn.LayerNorm(DIM))
        self.mlp = nn.Module()
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(DIM, 31), nn.Linear(31, DIM)

    def forward(self, x: Tensor) -> Tensor:
        norm = getattr(self, self.norms[0])
        if self.post_norm:
            return norm(x + self.attn(x)[0])
        x = x + self.ls1(self.attn(norm(x))[0])
        return x + self.mlp.fc2(nn.functional.gelu(self.mlp.fc1(getattr(self, self.norms[1])(x))))


class OtherViT(nn.Module):
    """no_embed_class: prefix tokens have no positions; "registers": only the class token has.
    rope: a kind of `turning`; positions: whether others are learned."""

    def __init__(
        self,
        kind: str,
        depth: int = 3,
        *,
        class_token: bool = True,
        registers: int = 0,
        no_embed_class: bool | str = False,
        gamma: float | None = None,
        post_norm: bool = False,
        rope: str = "",
        positions: bool = True,
    ) -> None:
        super().__init__()
        self.kind, self.bare = kind, no_embed_class
        hugging = kind.startswith("transformers")
        if class_token:
            self.cls_token = nn.Parameter(torch.randn(1, 1, DIM))
        if registers:
            self.register_parameter(
                "register_tokens" if hugging else "reg_token",
                nn.Parameter(torch.randn(1, registers, DIM)),
            )
        rows = (
            GRID[0] * GRID[1]
            + {False: class_token + registers, True: 0, "registers": 1}[no_embed_class]
        )
        places = torch.randn(1, rows, DIM) * 0.02
        if kind == "siglip":
            self.position_embedding = nn.Embedding(rows, DIM)
        elif positions:
            self.register_parameter(
                "position_embeddings" if hugging else "pos_embed", nn.Parameter(places)
            )
        self.patch_embed = nn.Module()
        self.patch_embed.proj, self.patch_embed.grid_size = nn.Conv2d(3, DIM, 4, 4), GRID
        self.blocks = nn.ModuleList(OtherBlock(kind, post_norm, gamma) for _ in range(depth))
        for number, block in enumerate(self.blocks if rope else []):
            block.attn.turn = turning(rope, number)
        self.norm = nn.LayerNorm(DIM)
        if kind == "siglip":  # pools, in no list of blocks
            self.pool = nn.MultiheadAttention(DIM, HEADS)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed.proj(images).flatten(2).mT
        own = dict((*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)))
        before = [token.expand(len(x), -1, -1) for name, token in own.items() if "token" in name]
        positions = (
            self.position_embedding.weight[None]
            if self.kind == "siglip"
            else next((own[name] for name in own if name.startswith("pos")), 0.0)
        )
        if self.bare == "registers":
            x = torch.cat([before[0], x], 1) + positions
            x = torch.cat([x[:, :1], before[1], x[:, 1:]], 1)
        else:
            x = (
                torch.cat([*before, x + positions], 1)
                if self.bare
                else torch.cat([*before, x], 1) + positions
            )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def assert_masses(report: Report, maps: list[Tensor]) -> None:
    """A receipt's masses are those of attention maps (B, h, N, N) that a model computed itself."""
    for weights, targets, masses in zip(maps, report.targets, report.mass_on_images, strict=True):
        found = torch.stack([target_mass(each, list(targets), report.grid) for each in weights])
        assert torch.allclose(found.mean(0), torch.tensor(masses), atol=1e-5, rtol=0)
