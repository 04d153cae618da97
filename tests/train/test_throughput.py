"""FLOPs equal the formulas; throughput is that of the median pass. No speed is asserted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vitinit.models import build_model
from vitinit.train import throughput as module
from vitinit.train.metrics import ProgressBar, training_flops

CPU = torch.device("cpu")


class Clocked(nn.Module):
    """A model with a clock by which pass n takes `seconds[n]`."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__()
        self.seconds, self.now, self.seen = iter(seconds), 0.0, []

    def forward(self, images):
        self.seen.append((tuple(images.shape), images.is_contiguous(), self.training,
                          torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        self.now += next(self.seconds)
        return images


@pytest.mark.parametrize("amp, channels_last", [("off", False), ("bf16", True)])
def test_it_is_the_median_of_the_timed_passes(monkeypatch, amp, channels_last):
    passes = [1000.0] * module.WARMUP_PASSES + [7.0] * (module.TIMED_PASSES // 2 - 1) \
        + [2.0, 4.0] + [0.5] * (module.TIMED_PASSES // 2 - 1)
    model = Clocked(passes)
    monkeypatch.setattr(module.time, "perf_counter", lambda: model.now)
    bar = ProgressBar("x", len(passes), shown=False)
    found = module.throughput(model, batch_size=5, size=(7, 11), device=CPU, amp=amp,
                            channels_last=channels_last, bar=bar)
    assert found.milliseconds == 3000.0 and found.images_per_second == pytest.approx(5 / 3)
    assert found.batch_size == 5 and found.peak_memory.endswith("GiB")
    assert bar.done == len(passes)
    assert model.seen == [((5, 3, 7, 11), not channels_last, False, False,
                           amp != "off")] * len(passes)


# ---------------------------------------------------------------------------------------------
# FLOPs
# ---------------------------------------------------------------------------------------------


def block_flops(tokens: int, width: int, hidden: int, keys: int) -> int:
    """FLOPs of a transformer block per image, in which each token attends to `keys` tokens."""
    return (2 * tokens * width * 3 * width           # qkv
            + 2 * 2 * tokens * keys * width          # Q Kᵀ and A V
            + 2 * tokens * width * width             # proj
            + 2 * 2 * tokens * width * hidden)       # MLP


def vit() -> tuple[nn.Module, int, int]:
    """A model, the side of its images in pixels, and the FLOPs per image by the formulas."""
    tokens, width = 25, 30
    model = build_model("vit_tiny", num_classes=7, image_size=20, patch_size=4, embed_dim=width,
                        depth=2, num_heads=3, pool="mean")
    return model, 20, (2 * tokens * 48 * width + 2 * block_flops(tokens, width, 4 * width, tokens)
                       + 2 * width * 7)


def simple_vit(reads: str = "content") -> tuple[nn.Module, int, int]:
    """Four heads of 5 channels each; the width of the residual stream is 28."""
    tokens, width, inner = 25, 28, 20
    model = build_model("simple_vit", num_classes=7, image_size=20, patch_size=4, embed_dim=width,
                        depth=2, num_heads=4, head_dim=5, mlp_ratio=1.0, reads=reads,
                        input_pos_embed=reads == "content")
    products = (2 * tokens * tokens * inner          # A V
                + 2 * 2 * tokens * width * inner     # values, proj
                + 2 * 2 * tokens * width * width)    # MLP
    if reads == "content":
        products += position_flops(tokens, width, inner)
    return model, 20, 2 * tokens * 48 * width + 2 * products + 2 * width * 7


def position_flops(tokens: int, width: int, inner: int) -> int:
    """FLOPs of Q, K and Q Kᵀ in one block of a SimpleViT."""
    return 2 * tokens * width * 2 * inner + 2 * tokens * tokens * inner


@pytest.mark.parametrize("family", [vit, simple_vit])
def test_forward_flops_are_those_of_the_products_that_the_formulas_name(family):
    model, side, expected = family()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert training_flops(model, 3, (side, side)) == 3 * expected     # thrice, for one image
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_a_batch_computes_once_is_shared_by_its_images():
    """Queries and keys that depend on positions alone are the same for all images."""
    model, side, expected = simple_vit("position")
    once = 2 * position_flops(25, 28, 20)
    assert training_flops(model, 5, (side, side)) == pytest.approx(3 * (expected + once / 5))
