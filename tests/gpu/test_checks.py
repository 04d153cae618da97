"""The checks of `bench all` on a GPU; without one they are skipped, and the skip names them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vitinit.bench.item import Conditions, Item, Skipped
from vitinit.bench.items import CHECKS

if not torch.cuda.is_available():
    pytest.skip("no GPU here; on one: " + ", ".join(item.name for item in CHECKS),
                allow_module_level=True)


@pytest.mark.parametrize("item", CHECKS, ids=lambda item: item.name)
def test_it_is_right_on_the_gpu(item: Item, tmp_path: Path):
    try:
        assert item.function(Conditions("cuda", tmp_path))
    except Skipped as reason:
        pytest.skip(str(reason))
