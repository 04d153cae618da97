"""ViTs of other projects, written out from the forward pass of their papers or repositories.

A layout says to which tokens positions are added ("all", "class and patches" or "patches"), how
LayerScale and registers are named, if there are any, and what the classifiers read: the class token
("class"), this and the distillation token ("both"), the mean of the patches before a norm of its
own ("mean"), or after the last norm ("mean of norm").
"""

from functools import partial

import small_models
import torch
import torch.nn.functional as F
from torch import Tensor

WIDTH, HEADS, DEPTH, CLASSES, REGISTERS = 21, 3, 2, 7, 5
HIDDEN = 4 * WIDTH
PATCH = (2, 3)


def drawn_tensors(
    *,
    positions: str,
    read: str,
    grid: tuple[int, int],
    scale: str = "",
    registers: str = "",
    class_token: bool = True,
    distilled: bool = False,
    head: bool = True,
    patch: tuple[int, int] = PATCH,
    hidden: int = HIDDEN,
) -> dict[str, Tensor]:
    """A checkpoint of a layout, with random tensors in float64."""
    generator = torch.Generator().manual_seed(3)
    entries = {
        "all": class_token + distilled + REGISTERS * bool(registers),
        "class and patches": 1,
        "patches": 0,
    }[positions]
    shapes = {"cls_token": (1, 1, WIDTH)} if class_token else {}
    shapes |= {"dist_token": (1, 1, WIDTH)} if distilled else {}
    shapes |= {
        "pos_embed": (1, entries + grid[0] * grid[1], WIDTH),
        "patch_embed.proj.weight": (WIDTH, 3, *patch),
        "patch_embed.proj.bias": (WIDTH,),
    }
    shapes |= {registers: (1, REGISTERS, WIDTH)} if registers else {}
    for block in range(DEPTH):
        layers = {
            "norm1": (WIDTH,),
            "attn.qkv": (3 * WIDTH, WIDTH),
            "attn.proj": (WIDTH, WIDTH),
            "norm2": (WIDTH,),
            "mlp.fc1": (hidden, WIDTH),
            "mlp.fc2": (WIDTH, hidden),
        }
        for layer, shape in layers.items():
            shapes[f"blocks.{block}.{layer}.weight"] = shape
            shapes[f"blocks.{block}.{layer}.bias"] = shape[:1]
        shapes |= {f"blocks.{block}.{scale.format(branch)}": (WIDTH,) for branch in "12" if scale}
    norm = "fc_norm" if read == "mean" else "norm"
    shapes |= {f"{norm}.weight": (WIDTH,), f"{norm}.bias": (WIDTH,)}
    for classifier in ["head"] * head + ["head_dist"] * (read == "both"):
        shapes |= {f"{classifier}.weight": (CLASSES, WIDTH), f"{classifier}.bias": (CLASSES,)}
    return {
        key: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4
        for key, shape in shapes.items()
    }


def written_out(
    tensors: dict[str, Tensor],
    images: Tensor,
    *,
    positions: str,
    read: str,
    scale: str = "",
    registers: str = "",
    class_token: bool = True,
    distilled: bool = False,
    head: bool = True,
    eps: float = 1e-6,
    after_blocks: list[Tensor] | None = None,
) -> Tensor:
    """The original model's logits, or, without a classifier, what one would read.
    after_blocks: a list to which the tokens (B, N, C) after each block are appended."""
    norm = partial(small_models.normed, tensors, eps=eps)
    linear = partial(small_models.linear, tensors)
    filters = tensors["patch_embed.proj.weight"]
    patches = (
        F.conv2d(images, filters, tensors["patch_embed.proj.bias"], stride=filters.shape[2:])
        .flatten(2)
        .mT
    )
    one = [tensors["cls_token"].repeat(2, 1, 1)] if class_token else []
    one += [tensors["dist_token"].repeat(2, 1, 1)] if distilled else []
    some = [tensors[registers].repeat(2, 1, 1)] if registers else []
    if positions == "patches":  # DeiT-III, timm's no_embed_class
        x = torch.cat([*one, *some, patches + tensors["pos_embed"]], dim=1)
    elif positions == "class and patches":  # DINOv2: registers are inserted afterwards
        x = torch.cat([*one, patches], dim=1) + tensors["pos_embed"]
        x = torch.cat([x[:, :1], *some, x[:, 1:]], dim=1)
    else:
        x = torch.cat([*one, *some, patches], dim=1) + tensors["pos_embed"]
    for block in (f"blocks.{index}" for index in range(DEPTH)):
        gammas = [tensors[f"{block}.{scale.format(branch)}"] if scale else 1.0 for branch in "12"]
        q, k, v = linear(norm(x, f"{block}.norm1"), f"{block}.attn.qkv").split(WIDTH, dim=-1)
        mixed = []
        for part in torch.arange(WIDTH).chunk(HEADS):
            logits = q[..., part] @ k[..., part].mT / len(part) ** 0.5
            mixed.append(logits.softmax(-1) @ v[..., part])
        x = x + gammas[0] * linear(torch.cat(mixed, dim=-1), f"{block}.attn.proj")
        hidden = linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1")
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
        x = x + gammas[1] * linear(hidden, f"{block}.mlp.fc2")
        if after_blocks is not None:
            after_blocks.append(x)
    before = x.shape[1] - patches.shape[1]  # these tokens are not averaged
    if read == "mean":
        x = norm(x[:, before:].mean(1), "fc_norm")
    else:
        x = norm(x, "norm")
        if read == "both":
            return (linear(x[:, 0], "head") + linear(x[:, 1], "head_dist")) / 2
        x = x[:, 0] if read == "class" else x[:, before:].mean(1)
    return linear(x, "head") if head else x
