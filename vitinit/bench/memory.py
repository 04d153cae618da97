"""How many images fit on a card: what a recipe's model keeps of each for the backward pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..command_line import building
from ..models import build_model
from ..recipe.sections import Recipe
from ..train.engine import autocast

GIB, MIB = 2**30, 2**20
STATE_BYTES = 20                # per parameter: weight, gradient, AdamW's two moments, EMA; float32
SHARE = 0.5                     # of the card; the rest is for augmentation, kernels, fragmentation


def saved_bytes(model: nn.Module, images: Tensor, amp: str) -> int:
    """What one forward pass keeps for the backward pass beside the parameters, each storage once."""
    own = {id_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}                     # the tensors live on, so no two share an id

    def keep(tensor: Tensor) -> Tensor:
        if id_of(tensor) not in own:
            kept[id_of(tensor)] = tensor
        return tensor
    factors = (torch.ones(len(model.drop_path_rates), len(images)),) if any(
        model.drop_path_rates) else ()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), \
            autocast(images.device, amp):
        logits = model(images, *factors).float()
        F.cross_entropy(logits, torch.zeros_like(logits))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def id_of(tensor: Tensor) -> int:
    """Which memory it is in; fake tensors have no address."""
    return tensor.untyped_storage()._cdata


def bench_memory(recipe: Recipe, card_gib: float) -> None:
    """Counted on shapes alone, by the kernels of the CPU."""
    height, width = recipe.data.image_size
    with building(f"recipe {recipe.name}", "model"), FakeTensorMode():
        model = build_model(recipe.model.name, num_classes=recipe.data.num_classes,
                            image_size=recipe.data.image_size, **recipe.model.options).train()
        two, four = (saved_bytes(model, torch.zeros(count, 3, height, width), recipe.engine.amp)
                     for count in (2, 4))
    parameters = sum(p.numel() for p in model.parameters())
    image = (four - two) // 2                        # what does not grow with the batch cancels
    room = SHARE * card_gib * GIB - STATE_BYTES * parameters - (two - 2 * image)
    batch = recipe.optim.global_batch
    fits = max((size for size in range(2, batch + 1, 2)
                if batch % size == 0 and size * image <= room), default=0)
    print(f"{recipe.name:26} {image / MIB:7.1f} MiB per image at amp {recipe.engine.amp}, "
          f"{STATE_BYTES * parameters / GIB:.2f} GiB of weights and optimiser: of {batch} images at "
          f"most {fits} in half of {card_gib:g} GiB")
