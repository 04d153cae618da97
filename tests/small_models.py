"""Small models of every family, and random values for their tensors. `SIZES` are for images of
20×28 pixels, for tests of inits."""

import math
from typing import Any

import torch
from equality import HeldAgainst
from torch import Tensor, nn

import vitinit
from vitinit.init import INITS, stated_family

SIMPLE = dict(patch_size=4, embed_dim=68, depth=2, num_heads=4)
# fmt: off
SIZES: dict[str, tuple[str, dict[str, Any]]] = {     # name in the table of models, sizes
    "vit": ("vit_tiny", dict(patch_size=4, embed_dim=54, depth=2, num_heads=3)),
    "rotary": ("vit_tiny", dict(patch_size=4, embed_dim=60, depth=2, num_heads=3,
                                pos_embed="rope", pool="mean", num_registers=2)),
    "swin": ("swin_tiny", dict(patch_size=2, embed_dim=22, depths=(1, 1), num_heads=(2, 11),
                               window_size=(5, 7))),
    "mixer": ("mixer_s16", dict(patch_size=4, embed_dim=142, depth=2)),
    "mixer, narrow": ("mixer_s16", dict(patch_size=4, embed_dim=74, depth=1)),
    "conv_mixer": ("convmixer_256_8", dict(patch_size=4, embed_dim=23, depth=2, kernel_size=3)),
    **{f"simple_vit, {reads}": ("simple_vit", SIMPLE | dict(
        reads=reads, input_pos_embed=reads == "content"))
       for reads in ("content", "position", "free")},
}
# fmt: on
# By names in that table, for images of 16×16 pixels or a multiple of them.
SMALL = {
    "vit_tiny": dict(patch_size=4, embed_dim=24, depth=2, num_heads=3, drop_path=0.3),
    "swin_tiny": dict(
        patch_size=2, embed_dim=12, depths=(2, 1), num_heads=(3, 3), window_size=4, drop_path=0.3
    ),
    "mixer_s16": dict(patch_size=4, embed_dim=24, depth=2, drop_path=0.3),
    "convmixer_256_8": dict(patch_size=2, embed_dim=24, depth=2, kernel_size=3),
    "simple_vit": dict(patch_size=4, embed_dim=24, depth=2, num_heads=3),
}
QUICK = {"impulse_gd": dict(steps=3)}  # it searches for a thousand steps by default


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def built(family: str, **sizes: Any) -> nn.Module:
    name, own = SIZES[family]
    return vitinit.build_model(name, **dict(num_classes=10, image_size=(20, 28)) | own | sizes)


def written(init: str, model: nn.Module, seed: int = 0, **options: Any) -> nn.Module:
    """The model, to which an init has written."""
    vitinit.init_weights(model, init, generator=seeded(seed), **options)
    return model


def inits_of(family: str) -> list[str]:
    """The names of the inits that are defined for this family."""
    return [init for init, families in INITS.items() if stated_family(*SIZES[family]) in families]


def after(
    init: str, model: nn.Module, seed: int = 0, fill: float = math.nan, **options: Any
) -> dict[str, Tensor]:
    """The state after an init, for which what constructors drew must not matter: it is `fill`."""
    for name, value in model.state_dict().items():
        if model.family != "simple_vit" or name != "pos_embed":  # which is fixed
            value.fill_(7 if name.endswith("num_batches_tracked") else fill)
    return state_of(written(init, model, seed, **QUICK.get(init, {}) | options))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def redraw(module: nn.Module, spread: float = 0.3, first: int = 0) -> nn.Module:
    """New values for all parameters and running statistics, in float64; first: of the seeds. The
    zeros and ones that layers start with would hide errors."""
    module.double()
    statistics = [(name, value) for name, value in module.named_buffers() if "running" in name]
    for seed, (name, value) in enumerate([*module.named_parameters(), *statistics], first):
        values = drawn(*value.shape, seed=seed) * spread + (value.ndim == 1) * 0.5
        value.data.copy_(values.abs() + 0.1 if name.endswith("running_var") else values)
    return module


def normed(state: dict[str, Tensor], x: Tensor, layer: str, eps: float) -> Tensor:
    """What the LayerNorm of this name in a state dict makes of x, written out."""
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return scaled * state[f"{layer}.weight"] + state[f"{layer}.bias"]


def linear(state: dict[str, Tensor], x: Tensor, layer: str) -> Tensor:
    """The same of a linear layer."""
    return x @ state[f"{layer}.weight"].T + state[f"{layer}.bias"]


def assert_same_function(
    model: nn.Module,
    logits: Tensor,
    expected: Tensor,
    parameters: dict[str, Tensor],
    held_against: HeldAgainst,
    atol: float = 1e-12,
) -> None:
    """Logits are the expected ones, of which `parameters` have the gradients of the model's."""
    assert logits.std() > 0.1  # not a comparison of zeros
    torch.testing.assert_close(logits, expected, rtol=0, atol=atol)
    logits.square().sum().backward()
    expected.square().sum().backward()
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        torch.testing.assert_close(
            parameter.grad, parameters[name].grad, rtol=1e-9, atol=1e-9, msg=name
        )
    held_against(logits, expected, cases=len(logits))
    gradients = [parameter.grad for parameter in named.values()]
    held_against(gradients, [parameters[name].grad for name in named], cases=0)
