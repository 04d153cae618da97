"""The baselines, which draw every parameter of a model, and `whitened`, which whitens patches."""

import math
from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ..models import FAMILIES
from . import family_of, init_function

__all__ = ["Base", "draw_base"]

EMBED_STD = 0.02  # std of embeddings in ViT, DeiT and timm, and of DeiT's linear layers
CUT_NORMAL_STD = 0.87962566103423978  # std of a standard normal truncated at ± 2
FLOOR = 0.05  # added to each component's mean square, as a share of their mean
EMBEDDINGS = {
    "pos_embed",
    "cls_token",
    "dist_token",
    "reg_token",
    "mask_token",
    "relative_position_bias_table",
    "query",
    "key",
}
SAME = {
    "class_token": "cls_token",
    "class_embedding": "cls_token",  # in other libraries
    "distillation_token": "dist_token",
    "register_tokens": "reg_token",
    **dict.fromkeys(
        ("pos_embedding", "position_embedding", "position_embeddings", "positional_embedding"),
        "pos_embed",
    ),
}
# The words for what draws every parameter first.
Base = Literal["default", "torch", "lecun"]


def draw_base(model: nn.Module, base: Base | None, generator: Generator) -> None:
    """Draw every parameter by a baseline. Another library's model is a ViT.

    base: None draws nothing. generator: a CPU generator. Raises ValueError for a parameter that the model holds itself and
    whose name no baseline knows.
    """
    if base is None:
        return
    family = family_of(model)
    if family not in FAMILIES:  # of another library, or rotary
        family = "vit"
    init_function(base, family)(model, generator=generator)


def drawn_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """What an init draws, in the model's order: (kind, weight, bias). Norms are reset on the way.

    kind: "linear", "conv", or an embedding's name in this package. Factors of LayerScale and
    learned rotary frequencies stay as the model was built. So do parameters of other names, but
    one that a model of this package holds itself raises ValueError.
    """
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
            module.reset_parameters()
        elif isinstance(module, nn.MultiheadAttention):
            yield "linear", module.in_proj_weight, module.in_proj_bias
        elif isinstance(module, nn.Linear):
            yield "linear", module.weight, module.bias
        elif isinstance(module, nn.Conv2d):
            yield "conv", module.weight, module.bias
        elif isinstance(module, nn.Embedding):
            yield "pos_embed", module.weight, None
        else:
            for name, parameter in module.named_parameters(recurse=False):
                kind = SAME.get(name, name)
                if kind in EMBEDDINGS:
                    yield kind, parameter, None
                elif getattr(module, "family", None) in FAMILIES:
                    raise ValueError(f"no rule for {name} of {type(module).__name__}")


@torch.no_grad()
def truncated_normal_(tensor: Tensor, *, std: float, cut: float, generator: Generator) -> None:
    """Fill a tensor with a normal of mean 0 truncated at ± `cut`: values beyond are drawn again.

    std: of the normal before the truncation. nn.init.trunc_normal_ does the same in torch 2.15, but
    draws differently in torch 2.11. It is used where less than 0.3 of the normal is within ± cut,
    since drawing again would take long.
    """
    if math.erf(cut / (std * 2.0**0.5)) <= 0.3:
        nn.init.trunc_normal_(tensor, std=std, a=-cut, b=cut, generator=generator)
        return
    tensor.normal_(std=std, generator=generator)
    while (beyond := tensor.abs() > cut).any():
        again = torch.empty_like(tensor).normal_(std=std, generator=generator)
        tensor.copy_(torch.where(beyond, again, tensor))


@torch.no_grad()
def default(model: nn.Module, *, generator: Generator) -> None:
    """Draw the weights of a ViT as DeiT (arXiv 2012.12877), of a Swin as its paper (2103.14030).

    | tensor                                      | value                                       |
    |---------------------------------------------|---------------------------------------------|
    | Linear                                      | weight normal, std .02; bias 0              |
    | pos_embed, cls_token, dist_token,           | normal, std .02                             |
    |   reg_token, relative_position_bias_table   |                                             |
    | patch_embed.proj                            | PyTorch's own: U(±1/√fan_in), weight, bias  |
    | LayerNorm                                   | weight 1, bias 0                            |

    Both papers' code calls trunc_normal_(std=.02), which truncates at ±2: 100 standard deviations.

    ConvMixer (arXiv 2201.09792) and SimpleViT (arXiv 2401.12511) use PyTorch's own init, `torch`.
    """
    for kind, weight, bias in drawn_tensors(model):
        if kind == "conv":
            uniform_by_fan_in(weight, bias, generator)
        else:
            weight.normal_(std=EMBED_STD, generator=generator)
            if bias is not None:
                bias.zero_()


@torch.no_grad()
def mixer_default(model: nn.Module, *, generator: Generator) -> None:
    """Draw the weights of an MLP-Mixer as timm; its authors' code (arXiv 2105.01601) has LeCun normal
    MLPs without noise in their biases.

    | tensor                                      | value                                       |
    |---------------------------------------------|---------------------------------------------|
    | MLPs                                        | weight Xavier uniform; bias normal, std 1e-6 |
    | stem.proj                                   | weight LeCun normal, cut at 2 std; bias 0   |
    | head                                        | 0                                           |
    | LayerNorm                                   | weight 1, bias 0                            |
    """
    for kind, weight, bias in drawn_tensors(model):
        assert bias is not None  # all layers of a Mixer have one
        bias.zero_()
        if weight is getattr(model.head, "weight", None):  # no classes: an identity
            weight.zero_()
        elif kind == "linear":
            nn.init.xavier_uniform_(weight, generator=generator)
            bias.normal_(std=1e-6, generator=generator)
        else:
            # Truncation at ± 2 std leaves .8796 of the std; the result is to be 1/√fan_in.
            std = (1.0 / weight[0].numel()) ** 0.5 / CUT_NORMAL_STD
            truncated_normal_(weight, std=std, cut=2 * std, generator=generator)


@torch.no_grad()
def torch_default(model: nn.Module, *, generator: Generator) -> None:
    """Draw all weights as PyTorch's own layers do, the baseline of the released code of arXiv
    2505.19985, which builds timm's ViT with weight_init="skip".

    | tensor                                      | value                                       |
    |---------------------------------------------|---------------------------------------------|
    | Linear, Conv2d                              | U(±1/√fan_in), weight and bias              |
    | pos_embed, reg_token,                       | normal, std .02                             |
    |   relative_position_bias_table              |                                             |
    | cls_token, dist_token                       | 0                                           |
    | query, key of a SimpleViT, if free          | U(±1/√N)                                    |
    | LayerNorm, BatchNorm                        | weight 1, bias 0, running mean 0, variance 1 |
    """
    for kind, weight, bias in drawn_tensors(model):
        if kind in ("linear", "conv"):
            uniform_by_fan_in(weight, bias, generator)
        elif kind in ("cls_token", "dist_token"):
            weight.zero_()
        elif kind in ("query", "key"):
            bound = weight.shape[1] ** -0.5
            weight.uniform_(-bound, bound, generator=generator)
        else:
            weight.normal_(std=EMBED_STD, generator=generator)


@torch.no_grad()
def lecun(model: nn.Module, *, generator: Generator) -> None:
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
    for kind, weight, bias in drawn_tensors(model):
        if kind in ("linear", "conv"):
            weight.normal_(std=weight[0].numel() ** -0.5, generator=generator)
            if bias is not None:
                bias.zero_()


def uniform_by_fan_in(weight: Tensor, bias: Tensor | None, generator: Generator) -> None:
    """U(±1/√fan_in) for weight and bias, which PyTorch's reset_parameters amounts to."""
    bound = 1.0 / math.sqrt(weight[0].numel())
    weight.uniform_(-bound, bound, generator=generator)
    if bias is not None:
        bias.uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def whitened(
    model: nn.Module, *, generator: Generator, base: Base = "default", images: Tensor | None = None
) -> None:
    """Let the patch embedding, a convolution, whiten patches, so that no component drowns others.

    Neighbouring pixels are alike. In 4×4 patches of CIFAR-10 the brightness of the whole patch has
    35 times the mean square of a pixel, its slopes and its colour two to three times, and 21 of the
    48 components less than a thousandth. Random weights pass this on, and LayerNorm keeps it: a
    token is mostly the brightness of its patch. In fast convolutional networks the first layer
    whitens, and is frozen (Jordan, arXiv 2404.00498). See recipes/what_an_init_is_worth.md.

    | tensor                                 | value                                              |
    |----------------------------------------|----------------------------------------------------|
    | weight of the patch embedding          | a rotation of whitened patches (`whiten_patches`)  |
    | everything else                        | as `base` drew it                                  |

    images: (n, 3, H, W), normalised training images; without, white noise takes their place.
    """
    draw_base(model, base, generator)
    whiten_patches(model, images, generator)


def whiten_patches(model: nn.Module, images: Tensor | None, generator: Generator) -> None:
    """Write the weight of the model's first convolution, (D, C, p, q), the patch embedding.

    It becomes s R (M + f I)^(−1/2). M is the mean of p pᵀ over all patches p of `images`, f keeps
    small what is noise, R is random with orthogonal rows or columns, and s keeps the mean square of
    the outputs on the images. Raises ValueError if it cuts no patches: if its kernel is not its
    stride.
    """
    layer = None
    for module in model.modules():
        if not isinstance(module, nn.Conv2d):
            continue
        cuts = module.kernel_size == module.stride != (1, 1)
        if cuts or module.in_channels != module.out_channels:  # and so is no adapter of colours
            layer = module
            break
    if layer is None or layer.kernel_size != layer.stride or layer.groups > 1:
        raise ValueError("the patch embedding is not one convolution, and no other is whitened")
    weight = layer.weight.flatten(1)  # (D, P), P = C·p·q
    moments = torch.eye(weight.shape[1], dtype=weight.dtype)  # of white noise
    if images is not None:
        moments.zero_()
        for image in images.to(weight):
            patches = F.unfold(image, layer.kernel_size, stride=layer.stride)  # (P, N)
            moments.addmm_(patches, patches.T, alpha=1.0 / (len(images) * patches.shape[1]))
    values, vectors = torch.linalg.eigh(moments)
    scales = (values.clamp_min(0.0) + FLOOR * values.mean()).rsqrt()
    rotation = nn.init.orthogonal_(torch.empty_like(weight), generator=generator)
    white = rotation @ (vectors * scales) @ vectors.T
    before = torch.sum(weight @ moments * weight)  # the mean squares of all outputs, summed
    after = torch.sum(white @ moments * white)
    white = white * (before / after).sqrt()
    layer.weight.copy_(white.view_as(layer.weight))
