"""How many images fit on a GPU, by the memory that the backward pass needs per image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..command_line import building
from ..models.layers import Classifier
from ..recipe.sections import Recipe
from ..runs.model import build, without_data
from ..train.engine import autocast
from ..train.optim import hidden_matrices
from .timing import Row

GIB, MIB = 2**30, 2**20
STATE_BYTES = 20                # per parameter: weight, gradient, AdamW's two moments, EMA; float32
MUON_BYTES = 16                 # the same with Muon's one moment
SHARE = 0.5                     # of the GPU's memory; augmentation, kernels and gaps need the rest


def saved_bytes(model: Classifier, images: Tensor, amp: str) -> int:
    """Bytes that a forward pass saves for the backward pass, without parameters and buffers.

    images: (B, 3, H, W). Tensors with a common storage count once.
    """
    def storage(tensor: Tensor) -> int:              # fake tensors have one, but no address
        return tensor.untyped_storage()._cdata

    stored = set(map(storage, (*model.parameters(), *model.buffers())))
    saved: dict[int, Tensor] = {}                    # keeps tensors alive, so that ids stay unique

    def save(tensor: Tensor) -> Tensor:
        if storage(tensor) not in stored:
            saved[storage(tensor)] = tensor
        return tensor
    drop_path = (torch.ones(len(model.drop_path_rates), len(images)),) if any(
        model.drop_path_rates) else ()
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), \
            autocast(images.device, amp):
        logits = model(images, *drop_path).float()
        F.cross_entropy(logits, torch.zeros_like(logits))
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def memory_row(recipe: Recipe, card_gib: float) -> Row:
    """How many images per micro-batch of a recipe fit into a share of `card_gib` GiB.

    Memory is counted with fake tensors, so nothing is computed; which tensors are saved is decided
    by the operations that PyTorch uses on a CPU.
    """
    height, width = recipe.data.image_size
    with building(f"recipe {recipe.name}", "model"), FakeTensorMode():
        model = build(without_data(recipe)).train()
        # In bf16 `attend` calls no fused kernel on a CPU; fp16 has as many bytes.
        amp = recipe.engine.amp.replace("bf16", "fp16")
        two, four = (saved_bytes(model, torch.zeros(count, 3, height, width), amp)
                     for count in (2, 4))
    image = (four - two) // 2                        # a part that does not grow with B cancels
    matrices = hidden_matrices(model) if recipe.optim.name == "muon" else ()
    state = sum((MUON_BYTES if name in matrices else STATE_BYTES) * p.numel()
                for name, p in model.named_parameters())
    available = SHARE * card_gib * GIB - state - (two - 2 * image)
    batch = recipe.optim.global_batch
    fits = max((size for size in range(2, batch + 1, 2)
                if batch % size == 0 and size * image <= available), default=0)
    return {"recipe": recipe.name, "amp": recipe.engine.amp, "MiB per image": image / MIB,
            "GiB of weights and optimiser": state / GIB, "global batch": batch,
            f"images that fit in half of {card_gib:g} GiB": fits}
