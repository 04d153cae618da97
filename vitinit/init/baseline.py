"""The two baselines that the other inits start from: each draws every parameter of a model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

EMBED_STD = 0.02        # of position codes and class tokens, in ViT, DeiT and timm


@torch.no_grad()
def default(model: nn.Module, *, generator: torch.Generator) -> None:
    """What the model's own paper uses; here ViT as DeiT (arXiv 2012.12877) draws it.

    | tensor                      | value                                                     |
    |-----------------------------|-----------------------------------------------------------|
    | Linear weights              | normal, std .02                                           |
    | Linear biases               | 0                                                         |
    | pos_embed, cls_token        | normal, std .02                                           |
    | patch_embed.proj            | PyTorch's own: U(±1/√fan_in), weight and bias             |
    | LayerNorm                   | weight 1, bias 0                                          |

    DeiT writes trunc_normal_(std=.02), whose cut at an absolute ±2 is 100 standard deviations out:
    in effect a normal distribution, and drawn as one here.
    """
    for module in _modules_with_parameters(model):
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=0.02, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Conv2d):
            _uniform_by_fan_in(module, generator)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        else:
            for parameter in _embeddings(module).values():
                parameter.normal_(std=EMBED_STD, generator=generator)


@torch.no_grad()
def torch_default(model: nn.Module, *, generator: torch.Generator) -> None:
    """PyTorch's own layer inits: the baseline of the released code of arXiv 2505.19985, which
    builds timm's ViT with weight_init="skip".

    | tensor                      | value                                                     |
    |-----------------------------|-----------------------------------------------------------|
    | Linear, Conv2d              | U(±1/√fan_in), weight and bias                            |
    | pos_embed                   | normal, std .02                                           |
    | cls_token                   | 0                                                         |
    | LayerNorm                   | weight 1, bias 0                                          |
    """
    for module in _modules_with_parameters(model):
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            _uniform_by_fan_in(module, generator)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        else:
            for name, parameter in _embeddings(module).items():
                if name == "cls_token":
                    parameter.zero_()
                else:
                    parameter.normal_(std=EMBED_STD, generator=generator)


BASES = {"default": default, "torch": torch_default}


def draw_base(model: nn.Module, base: str, generator: torch.Generator) -> None:
    """Draw every parameter by the baseline of that name; raises ValueError for another one."""
    if base not in BASES:
        raise ValueError(f"base is {base!r}, expected one of {', '.join(BASES)}")
    BASES[base](model, generator=generator)


def _modules_with_parameters(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules()
            if next(module.parameters(recurse=False), None) is not None]


def _embeddings(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that stand alone in a model; no parameter may escape unnoticed."""
    own = dict(module.named_parameters(recurse=False))
    unknown = own.keys() - {"pos_embed", "cls_token"}
    if unknown:
        raise ValueError(f"no rule for {', '.join(sorted(unknown))} of {type(module).__name__}")
    return own


def _uniform_by_fan_in(layer: nn.Linear | nn.Conv2d, generator: torch.Generator) -> None:
    """U(±1/√fan_in) for weight and bias, which is what PyTorch's reset_parameters amounts to."""
    bound = 1.0 / math.sqrt(layer.weight[0].numel())
    layer.weight.uniform_(-bound, bound, generator=generator)
    if layer.bias is not None:
        layer.bias.uniform_(-bound, bound, generator=generator)
