"""Swin against torchvision's, where windows shift both ways, one way or not at all."""

import pytest
from small_models import assert_same_function, drawn, redraw
from torchvision.models import SwinTransformer as TorchvisionSwin

import vitinit
from vitinit.interop.weights.names import native_tensors


@pytest.mark.parametrize(
    "image_size, patch, window, depths",
    [
        ((24, 60), (2, 3), (3, 5), (2, 3, 2)),  # grids 12×20, 6×10 and 3×5: shifts, and then none
        ((12, 48), (2, 2), (3, 3), (2, 2)),  # grids 6×24 and 3×12: at last one side alone shifts
        ((24, 24), (3, 1), (4, 2), (3, 2)),  # grids 8×24 and 4×12: windows of even sides
        ((20, 20), (4, 4), (5, 5), (2,)),  # one window, and no merge
    ],
)
def test_outputs_and_gradients_equal_torchvisions(image_size, patch, window, depths, held_against):
    heads = (3, 2, 4)[: len(depths)]
    theirs = redraw(
        TorchvisionSwin(
            patch_size=list(patch),
            embed_dim=6,
            depths=list(depths),
            num_heads=list(heads),
            window_size=list(window),
            stochastic_depth_prob=0.0,
            num_classes=11,
        )
    )
    ours = vitinit.build_model(
        "swin_tiny",
        num_classes=11,
        image_size=image_size,
        embed_dim=6,
        patch_size=patch,
        depths=depths,
        num_heads=heads,
        window_size=window,
    ).double()
    ours.load_state_dict(native_tensors(theirs.state_dict()))
    images = drawn(2, 3, *image_size)
    assert_same_function(
        ours,
        ours(images),
        theirs(images),
        native_tensors(dict(theirs.named_parameters())),
        held_against,
        atol=1e-9,
    )


def test_the_window_is_at_most_the_grid_and_does_not_shift_along_a_side_that_it_fills():
    model = vitinit.build_model(
        "swin_tiny",
        num_classes=5,
        image_size=(28, 8),
        patch_size=2,
        embed_dim=6,
        depths=(2, 2),
        num_heads=(3, 3),
        window_size=7,
    )
    assert model.grid == (14, 4)
    seen = [
        (block.grid, block.window, block.shift, block.mask is None)
        for stage in model.layers
        for block in stage.blocks
    ]
    assert seen == [
        ((14, 4), (7, 4), (0, 0), True),
        ((14, 4), (7, 4), (3, 0), False),
        ((7, 2), (7, 2), (0, 0), True),
        ((7, 2), (7, 2), (0, 0), True),
    ]
    assert model.layers[0].blocks[1].attn.relative_position_bias_table.shape == (13 * 7, 3)
