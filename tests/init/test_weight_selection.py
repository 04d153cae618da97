"""Weight selection against the paper's slicing, on every family, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitinit
from vitinit.init.weight_selection import evenly_spaced, select_weights

# name in the table, sizes of both, the small one's widths, the large one's
FAMILIES = {
    "vit": ("vit_tiny", dict(patch_size=4, image_size=20, num_heads=2),
            dict(embed_dim=6, depth=2), dict(embed_dim=18, depth=3)),
    "swin": ("swin_tiny", dict(patch_size=2, image_size=28, window_size=7),
             dict(embed_dim=6, depths=(1, 2), num_heads=(2, 3)),
             dict(embed_dim=12, depths=(2, 3), num_heads=(4, 6))),
    "mixer": ("mixer_s16", dict(patch_size=4, image_size=12),
              dict(embed_dim=10, depth=2), dict(embed_dim=30, depth=3)),
    "conv_mixer": ("convmixer_256_8", dict(patch_size=4, image_size=12, kernel_size=3),
                   dict(embed_dim=7, depth=2), dict(embed_dim=14, depth=5)),
    "simple_vit": ("simple_vit", dict(patch_size=4, image_size=12, reads="free", input_pos_embed=False),
                   dict(embed_dim=8, depth=1, num_heads=2), dict(embed_dim=32, depth=2, num_heads=4)),
}


def built(family: str, large: bool, classes: int = 3, **sizes) -> nn.Module:
    name, common, small_sizes, large_sizes = FAMILIES[family]
    model = vitinit.build_model(name, num_classes=classes,
                                **common | (large_sizes if large else small_sizes) | sizes)
    generator = torch.Generator().manual_seed(1 + large)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_(generator=generator)
    return model


def every_nth(value: Tensor, shape: torch.Size) -> Tensor:
    """The rule of the paper's code, where the smaller size divides the larger one."""
    for dim, (large, small) in enumerate(zip(value.shape, shape)):
        step, rest = divmod(large, small)
        assert rest == 0
        value = value.movedim(dim, 0)[torch.arange(small) * step].movedim(0, dim)
    return value


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_every_nth_element_of_the_large_models(family):
    small, large = built(family, False), built(family, True)
    selected = select_weights(small, large.state_dict())
    for name, value in small.state_dict().items():
        if not name.startswith("head"):
            assert torch.equal(selected[name], every_nth(large.state_dict()[name], value.shape)), name
    thinned = {name for name in selected if name in small.state_dict()
               and selected[name].shape != large.state_dict()[name].shape}
    assert len(thinned) > 0.8 * len(small.state_dict())
    assert not any(name.startswith("head") for name in selected)
    deeper = large.state_dict().keys() - small.state_dict().keys()
    assert deeper and all(torch.equal(selected[name], large.state_dict()[name]) for name in deeper)


def test_packed_thirds_stay_apart_for_widths_that_do_not_divide():
    """A third of even spacing over three thirds is even spacing over the third."""
    assert evenly_spaced(11, 5).tolist() == [0, 2, 4, 6, 8]
    for large, small in ((18, 12), (35, 21), (128, 96)):
        thirds = evenly_spaced(3 * large, 3 * small).view(3, small)
        assert torch.equal(thirds, evenly_spaced(large, small) + large * torch.arange(3)[:, None])


def test_tokens_relative_positions_and_pixels_are_never_thinned_out():
    large = built("vit", True)
    small = built("vit", False, image_size=12)        # 9 patches in place of 25
    assert select_weights(small, large.state_dict())["pos_embed"].shape == (1, 26, 6)
    small = built("vit", False, patch_size=2, image_size=10)
    assert select_weights(small, large.state_dict())["patch_embed.proj.weight"].shape == (6, 3, 4, 4)
    tokens = select_weights(built("mixer", False, image_size=8), built("mixer", True).state_dict())
    assert tokens["blocks.0.mlp_tokens.fc1.weight"].shape == (5, 9)
    assert tokens["blocks.0.mlp_tokens.fc2.bias"].shape == (9,)
    kernels = select_weights(built("conv_mixer", False, kernel_size=1),
                             built("conv_mixer", True).state_dict())
    assert kernels["blocks.0.0.fn.0.weight"].shape == (7, 1, 3, 3)
    windows = select_weights(built("swin", False, window_size=2, image_size=16),
                             built("swin", True).state_dict())
    assert windows["layers.0.blocks.0.attn.relative_position_bias_table"].shape == (169, 2)


def test_a_narrower_checkpoint_is_refused_with_its_names():
    small, large = built("vit", False), built("vit", True)
    with pytest.raises(ValueError, match=r"narrower than the model: .*cls_token \(1, 1, 6\) for "
                                         r"\(1, 1, 18\).* and \d+ more$") as caught:
        select_weights(large, small.state_dict())
    assert "\n" not in str(caught.value)
