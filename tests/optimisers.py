"""The optimisers of a recipe, with few settings of a test's own, and what they train."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from vitinit import models
from vitinit.recipe.files import RECIPES, load_recipe
from vitinit.train.metrics import Progress
from vitinit.train.optim import optimizer_for
from vitinit.train.state import Ema, TrainState

# Small models of every family, and of both kinds of positions.
# fmt: off
SMALL = {
    "vit": ("vit_tiny_distilled", dict(image_size=8, patch_size=4, embed_dim=21, depth=2,
                                       num_heads=3, num_registers=2)),
    "vit, rotary": ("vit_tiny", dict(
        image_size=8, patch_size=4, embed_dim=24, depth=2, num_heads=3, pos_embed="rope",
        rope_frequencies="mixed", qk_norm=True, layer_scale=0.1, mlp="swiglu")),
    "swin": ("swin_tiny", dict(image_size=8, patch_size=2, embed_dim=6, depths=(1, 2),
                               num_heads=(2, 3), window_size=2)),
    "mixer": ("mixer_s16", dict(image_size=8, patch_size=4, embed_dim=11, depth=2)),
    "conv_mixer": ("convmixer_256_8", dict(image_size=8, patch_size=1, embed_dim=11, depth=2)),
    "simple_vit": ("simple_vit", dict(image_size=8, patch_size=4, embed_dim=28, depth=2,
                                      num_heads=2)),
    "simple_vit, free": ("simple_vit", dict(image_size=8, patch_size=4, embed_dim=28, depth=2,
                                            num_heads=2, reads="free", input_pos_embed=False)),
}
# fmt: on
OPTIM = load_recipe(RECIPES / "quickstart.toml").optim


def vit_b_with_gradients() -> nn.Module:
    """ViT-B on fake CUDA tensors, with gradients of zeros; called in a FakeTensorMode."""
    family, sizes = models.MODELS["vit_base"]
    with torch.device("cuda"):
        model = models.model_class(family)(num_classes=1000, image_size=224, **sizes)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    """AdamW for all parameters. settings: fields of `Optim`."""
    return optimizer_for(model, replace(OPTIM, name="adamw", **settings))


def muon(
    model: nn.Module, *, factor: float, momentum: float, **settings: Any
) -> torch.optim.Optimizer:
    """Muon for the matrices of the blocks, and AdamW for all other parameters."""
    settings = {"muon_dtype": "float32", **settings}
    return optimizer_for(
        model, replace(OPTIM, name="muon", muon_factor=factor, muon_momentum=momentum, **settings)
    )


def lamb(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    """LAMB for all parameters. settings: fields of `Optim`."""
    return optimizer_for(model, replace(OPTIM, name="lamb", **settings))


OF_ADAMW = dict(weight_decay=0.05, betas=(0.9, 0.99), eps=1e-8)
OPTIMISERS = {
    "adamw": partial(adamw, **OF_ADAMW),
    "lamb": partial(lamb, **OF_ADAMW),
    "muon": partial(muon, factor=1.3, momentum=0.95, **OF_ADAMW),
}


def built(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    name, sizes = SMALL[family]
    family, defaults = models.MODELS[name]
    model = models.model_class(family)(num_classes=5, **defaults | sizes).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model


def put_gradients(model: nn.Module, seed: int) -> None:
    """Random gradients, which do not depend on the weights."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def state_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    ema: Ema | None = None,
    scaler: torch.amp.GradScaler | None = None,
    progress: Progress | None = None,
) -> TrainState:
    """A training state, by default at step 0, without loss scaling and moving average."""
    device = next(model.parameters()).device
    return TrainState(
        model,
        optimizer,
        scaler or torch.amp.GradScaler(device.type, enabled=False),
        ema,
        progress or Progress(),
    )
