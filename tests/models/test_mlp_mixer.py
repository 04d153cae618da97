"""MLP-Mixer against a transcription of its equations."""

from functools import partial

import torch
import torch.nn.functional as F
from small_models import assert_same_function, drawn, linear, normed, redraw
from torch import Tensor

import vitinit


def written_out(state: dict[str, Tensor], images: Tensor, depth: int) -> Tensor:
    """The logits by the paper's equation 1, from the state dict alone, tokens as (n, c)."""
    norm = partial(normed, state, eps=1e-6)

    def mlp(x, name):
        return linear(state, F.gelu(linear(state, x, f"{name}.fc1")), f"{name}.fc2")

    kernel = state["stem.proj.weight"]
    x = F.conv2d(images, kernel, state["stem.proj.bias"], stride=kernel.shape[2:])
    x = torch.einsum("bchw->bhwc", x).flatten(1, 2)
    for block in (f"blocks.{index}" for index in range(depth)):
        channels = torch.einsum("bnc->bcn", norm(x, f"{block}.norm1"))
        x = x + torch.einsum("bcn->bnc", mlp(channels, f"{block}.mlp_tokens"))
        x = x + mlp(norm(x, f"{block}.norm2"), f"{block}.mlp_channels")
    return linear(state, norm(x, "norm").mean(dim=1), "head")


def test_outputs_and_gradients_equal_the_equations_written_out(held_against):
    """A grid of 3×5 = 15 tokens; hidden widths 7 · .5 → 3 and 7 · 3 = 21."""
    model = redraw(
        vitinit.build_model(
            "mixer_s16",
            num_classes=11,
            image_size=(6, 20),
            patch_size=(2, 4),
            embed_dim=7,
            depth=2,
            channels_ratio=3.0,
        )
    )
    assert model.grid == (3, 5)
    images = drawn(3, 3, 6, 20)
    state = {name: value.clone().requires_grad_() for name, value in model.state_dict().items()}
    assert_same_function(
        model, model(images), written_out(state, images, depth=2), state, held_against
    )
