"""The example of how to add an init runs, and does what the page says."""

from __future__ import annotations

from pathlib import Path

import torch

import vitinit
from vitinit.init import INITS

PAGE = Path(vitinit.__file__).parent / "init" / "README.md"


def test_the_example_of_an_init_of_ones_own_starts_every_block_as_the_identity(monkeypatch):
    monkeypatch.setattr("vitinit.init.INITS", dict(INITS))
    code = PAGE.read_text(encoding="utf-8").partition("## How to add an init")[2]
    code = code.partition("```python\n")[2].partition("```")[0]
    names: dict = {}
    exec(code, names)
    model, x = names["model"], torch.randn(2, 7, 192, generator=torch.Generator().manual_seed(1))
    assert all(torch.equal(block(x), x) for block in model.blocks)
    other = vitinit.build_model("vit_tiny", num_classes=10, image_size=32, patch_size=4)
    vitinit.init_weights(other, "lecun", generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.blocks[0].attn.qkv.weight, other.blocks[0].attn.qkv.weight)
