"""The baselines on which the other inits build: each draws every parameter of a model."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ..models.layers import Classifier

EMBED_STD = 0.02            # std of position embeddings and class tokens in ViT, DeiT and timm
CUT_NORMAL_STD = 0.87962566103423978    # std of a standard normal truncated at ± 2
EMBEDDINGS = {"pos_embed", "cls_token", "dist_token", "reg_token", "relative_position_bias_table",
              "query", "key"}
SAME = {"class_token": "cls_token", "distillation_token": "dist_token",      # in other libraries
        "register_tokens": "reg_token", "pos_embedding": "pos_embed",
        "position_embeddings": "pos_embed"}


@torch.no_grad()
def truncated_normal_(tensor: Tensor, *, std: float, cut: float,
                      generator: torch.Generator) -> None:
    """Fill a tensor with a normal of mean 0 truncated at ± `cut`: values beyond are drawn again.

    std: of the normal before the truncation.

    nn.init.trunc_normal_ of torch 2.15 does the same, but that of torch 2.11 draws differently;
    this function gives the same weights with both. Where less than 0.3 of the normal is within the
    cut, torch's own function is used, since drawing again would take long.
    """
    if math.erf(cut / (std * 2.0**0.5)) <= 0.3:
        nn.init.trunc_normal_(tensor, std=std, a=-cut, b=cut, generator=generator)
        return
    tensor.normal_(std=std, generator=generator)
    while (beyond := tensor.abs() > cut).any():
        again = torch.empty_like(tensor).normal_(std=std, generator=generator)
        tensor.copy_(torch.where(beyond, again, tensor))


@torch.no_grad()
def default(model: nn.Module, *, generator: torch.Generator) -> None:
    """Draw all weights as the paper of the model's family does.

    ViT as in DeiT (arXiv 2012.12877), and Swin (arXiv 2103.14030):

    | tensor                                      | value                                       |
    |---------------------------------------------|---------------------------------------------|
    | Linear weights                              | normal, std .02                             |
    | Linear biases                               | 0                                           |
    | pos_embed, cls_token, dist_token,           | normal, std .02                             |
    |   reg_token, relative_position_bias_table   |                                             |
    | patch_embed.proj                            | PyTorch's own: U(±1/√fan_in), weight, bias  |
    | LayerNorm                                   | weight 1, bias 0                            |

    Both papers' code calls trunc_normal_(std=.02), which truncates at an absolute ±2, that is, at
    100 standard deviations. In effect this is a normal distribution, so it is drawn as one here.

    MLP-Mixer as in its authors' code (arXiv 2105.01601) and timm:

    | tensor                                      | value                                       |
    |---------------------------------------------|---------------------------------------------|
    | MLP weights                                 | Xavier uniform                              |
    | MLP biases                                  | normal, std 1e-6                            |
    | stem.proj                                   | weight LeCun normal, cut at 2 std; bias 0   |
    | head                                        | 0                                           |
    | LayerNorm                                   | weight 1, bias 0                            |

    ConvMixer (arXiv 2201.09792) and SimpleViT (arXiv 2401.12511) use PyTorch's own init: `torch`.
    """
    family = getattr(model, "family", None)
    if family in ("conv_mixer", "simple_vit"):
        torch_default(model, generator=generator)
    elif family == "mlp_mixer":
        _mixer_default(model, generator)
    else:
        _vit_default(model, generator)


def _vit_default(model: nn.Module, generator: torch.Generator) -> None:
    for module in _modules_with_parameters(model):
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=0.02, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Conv2d):
            _uniform_by_fan_in(module, generator)
        elif isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
            module.reset_parameters()
        else:
            for parameter in _embeddings(module).values():
                parameter.normal_(std=EMBED_STD, generator=generator)


def _mixer_default(model: nn.Module, generator: torch.Generator) -> None:
    for module in _modules_with_parameters(model):
        if module is model.head:
            module.weight.zero_()
            module.bias.zero_()
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, generator=generator)
            module.bias.normal_(std=1e-6, generator=generator)
        elif isinstance(module, nn.Conv2d):
            # Truncation at ± 2 std leaves .8796 of the std; the result is to be 1/√fan_in.
            std = (1.0 / module.weight[0].numel()) ** 0.5 / CUT_NORMAL_STD
            truncated_normal_(module.weight, std=std, cut=2 * std, generator=generator)
            module.bias.zero_()
        else:
            module.reset_parameters()                # LayerNorm


@torch.no_grad()
def torch_default(model: nn.Module, *, generator: torch.Generator) -> None:
    """Draw all weights as PyTorch's own layers do.

    This is the baseline of the released code of arXiv 2505.19985, which builds timm's ViT with
    weight_init="skip".

    | tensor                                      | value                                       |
    |---------------------------------------------|---------------------------------------------|
    | Linear, Conv2d                              | U(±1/√fan_in), weight and bias              |
    | pos_embed, reg_token,                       | normal, std .02                             |
    |   relative_position_bias_table              |                                             |
    | cls_token, dist_token                       | 0                                           |
    | query, key of a SimpleViT, if free          | U(±1/√N)                                    |
    | LayerNorm, BatchNorm                        | weight 1, bias 0, running mean 0, variance 1 |
    """
    for module in _modules_with_parameters(model):
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            _uniform_by_fan_in(module, generator)
        elif isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
            module.reset_parameters()
        else:
            for name, parameter in _embeddings(module).items():
                if name in ("cls_token", "dist_token"):
                    parameter.zero_()
                elif name in ("query", "key"):
                    bound = parameter.shape[1] ** -0.5
                    parameter.uniform_(-bound, bound, generator=generator)
                else:
                    parameter.normal_(std=EMBED_STD, generator=generator)


@torch.no_grad()
def lecun(model: nn.Module, *, generator: torch.Generator) -> None:
    """Draw all weights so that each layer keeps the variance of its inputs.

    | tensor                                      | value                                       |
    |---------------------------------------------|---------------------------------------------|
    | Linear, Conv2d                              | weight normal, std 1/√fan_in; bias 0        |
    | everything else                             | as `torch`                                  |

    Source: LeCun, Bottou, Orr and Müller, "Efficient BackProp" (1998), §4.6. With independent
    inputs of variance 1, the outputs have variance 1, three times that of PyTorch's own init. In an
    MLP behind a LayerNorm, the GELU then receives values that are large enough to bend it.
    """
    torch_default(model, generator=generator)
    for layer in _modules_with_parameters(model):
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.weight.normal_(std=_fan_in(layer) ** -0.5, generator=generator)
            if layer.bias is not None:
                layer.bias.zero_()


BASES = {"default": default, "torch": torch_default, "lecun": lecun}
Base = Literal["default", "torch", "lecun"]         # what an init's option `base` may be


def draw_base(model: nn.Module, base: str | None, generator: torch.Generator) -> None:
    """Draw every parameter by the baseline named `base`; raises ValueError for an unknown name.

    None, which only `init_` of in_place.py gives, leaves the model as it is.
    """
    if base is None:
        return
    if base not in BASES:
        raise ValueError(f"base is {base!r}, expected one of {', '.join(BASES)}")
    BASES[base](model, generator=generator)


def _modules_with_parameters(model: nn.Module) -> list[nn.Module]:
    modules = [module for module in model.modules()
               if next(module.parameters(recurse=False), None) is not None]
    return [_packed_layer(module) if isinstance(module, nn.MultiheadAttention) else module
            for module in modules]


def _packed_layer(attention: nn.MultiheadAttention) -> nn.Linear:
    """A layer that shares the packed weights of Q, K and V, which nn.MultiheadAttention owns."""
    layer = nn.Linear(1, 1, device="meta")
    layer.weight, layer.bias = attention.in_proj_weight, attention.in_proj_bias
    return layer


def _embeddings(module: nn.Module) -> dict[str, Tensor]:
    """The embeddings that a module owns directly, by their names in this package.

    Raises ValueError for a parameter of one of our models that no rule here covers. Those of other
    libraries, such as LayerScale, are left out, and stay as they are.
    """
    if isinstance(module, nn.Embedding):
        return {"pos_embed": module.weight}
    own = {SAME.get(name, name): parameter
           for name, parameter in module.named_parameters(recurse=False)}
    unknown = own.keys() - EMBEDDINGS
    if unknown and isinstance(module, Classifier):
        raise ValueError(f"no rule for {', '.join(sorted(unknown))} of {type(module).__name__}")
    return {name: parameter for name, parameter in own.items() if name in EMBEDDINGS}


def _uniform_by_fan_in(layer: nn.Linear | nn.Conv2d,
                       generator: torch.Generator) -> None:
    """U(±1/√fan_in) for weight and bias, which PyTorch's reset_parameters amounts to."""
    bound = 1.0 / math.sqrt(_fan_in(layer))
    layer.weight.uniform_(-bound, bound, generator=generator)
    if layer.bias is not None:
        layer.bias.uniform_(-bound, bound, generator=generator)


def _fan_in(layer: nn.Linear | nn.Conv2d) -> int:
    """The number of inputs of which each output of a layer is a sum."""
    return layer.weight[0].numel()
