"""The masked autoencoder equals its paper's code, and sees nothing of what is hidden."""

import pytest
import torch
from torch import Tensor

import vitinit
from vitinit.models.masked_autoencoder import MaskedAutoencoder
from vitinit.tasks.reconstruction import reconstruction

GRID, PATCH, SIZE = (3, 5), (2, 3), (6, 15)  # 15 patches of 6 pixels, 11 of them hidden


def autoencoder(**options: object) -> MaskedAutoencoder:
    """In float64, with random weights, a class token and a register."""
    torch.manual_seed(7)
    encoder = vitinit.build_model(
        "vit_tiny",
        num_classes=0,
        image_size=SIZE,
        patch_size=PATCH,
        embed_dim=24,
        depth=2,
        num_heads=3,
        **{"pool": "class", "num_registers": 1} | options,
    )
    model = MaskedAutoencoder(
        encoder, decoder_dim=20, decoder_depth=2, decoder_heads=5, mask_ratio=0.72
    )
    assert model.visible == 4
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double()


def drawn(count: int) -> tuple[Tensor, Tensor]:
    """Images, and the places of the patches of each in a random order."""
    order = torch.stack([torch.randperm(15) for _ in range(count)])
    return torch.randn(count, 3, *SIZE, dtype=torch.float64), order


def test_the_loss_is_that_of_the_papers_code(held_against):
    """A transcription of models_mae.py of arXiv 2111.06377: shuffle, mask tokens, unshuffle, the
    loss of all patches times the mask; its gradients, too."""
    model = autoencoder()
    encoder, decoder, (images, shuffle) = model.encoder, model.decoder, drawn(7)
    restore, keep = shuffle.argsort(1), shuffle[:, :4]

    def rows(x: Tensor, indices: Tensor) -> Tensor:
        return torch.stack([row[index] for row, index in zip(x, indices)])

    x = encoder.patch_embed(images) + encoder.pos_embed[:, 2:]
    prefix = torch.cat([encoder.cls_token, encoder.reg_token], 1) + encoder.pos_embed[:, :2]
    x = torch.cat([prefix.expand(7, -1, -1), rows(x, keep)], 1)
    for block in encoder.blocks:
        x = block(x)
    x = decoder.embed(encoder.norm(x))
    whole = torch.cat([x[:, 2:], decoder.mask_token.expand(7, 11, -1)], 1)
    x = torch.cat([x[:, :2], rows(whole, restore)], 1) + decoder.positions
    for block in decoder.blocks:
        x = block(x)
    predicted = decoder.pixels(decoder.norm(x))[:, 2:]
    target = torch.einsum(
        "nchpwq->nhwpqc", images.reshape(7, 3, GRID[0], PATCH[0], GRID[1], PATCH[1])
    ).reshape(7, 15, -1)
    mean, var = target.mean(-1, keepdim=True), target.var(-1, keepdim=True)
    plain, target = target, (target - mean) / (var + 1e-6) ** 0.5
    mask = rows(torch.cat([torch.zeros(7, 4), torch.ones(7, 11)], 1), restore)
    expected, of_pixels = (
        ((predicted - what) ** 2 * mask[..., None]).mean(-1).sum() / mask.sum()
        for what in (target, plain)
    )
    loss = reconstruction(model, images, (), keep.sort(1).values)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
    theirs = torch.autograd.grad(expected, [*model.parameters()])
    ours = torch.autograd.grad(loss, [*model.parameters()])
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    held_against(loss, expected, cases=7)
    held_against(ours, theirs, cases=0)
    dropped = reconstruction(model, images, (torch.zeros(4, 7),), keep.sort(1).values)
    assert abs(dropped / loss - 1) > 1e-3  # no block of the encoder adds anything
    model.normalise_targets = False
    torch.testing.assert_close(reconstruction(model, images, (), keep.sort(1).values), of_pixels)


@pytest.mark.parametrize("positions", ["learned", "rope", "learned+rope", "sincos"])
def test_tokens_keep_their_places_and_what_is_hidden_is_not_seen(positions):
    """All patches in any order are the ViT's own tokens in it; a hidden pixel changes no bit."""
    model, (images, order) = autoencoder(pos_embed=positions), drawn(5)
    last = model.encoder.features(images).last
    tokens = last.map.flatten(1, 2).gather(1, order[..., None].expand(-1, -1, 24))
    torch.testing.assert_close(model.encode(images, order), torch.cat([last.prefix, tokens], 1))
    visible = order[:, :4].sort(1).values
    hidden, predicted = model.reconstruct(images, visible)
    both = torch.cat([visible, hidden], 1).sort(1).values
    assert torch.equal(both, torch.arange(15).expand(5, -1))
    assert torch.equal(hidden, hidden.sort(1).values)
    other = images.clone()
    for image, places in zip(other, hidden):
        for place in places.tolist():
            top, left = place // 5 * 2, place % 5 * 3
            image[:, top : top + 2, left : left + 3] += 1.0
    assert torch.equal(model.reconstruct(other, visible)[1], predicted)


@pytest.mark.parametrize("options", [{}, {"pool": "mean", "fc_norm": True, "num_registers": 0}])
def test_every_weight_is_trained(options):
    """Adam's moments of one without a gradient would be missing from a checkpoint."""
    model, (images, order) = autoencoder(**options), drawn(3)
    reconstruction(model, images, (), order[:, :4].sort(1).values).backward()
    assert [name for name, value in model.named_parameters() if value.grad is None] == []


def test_an_encoder_that_moves_tokens_of_a_whole_grid_is_refused():
    options = dict(num_classes=0, image_size=SIZE, patch_size=PATCH, pool="mean", shift_blocks=1)
    with pytest.raises(ValueError, match="expected shift_blocks = 0"):
        MaskedAutoencoder(vitinit.build_model("vit_tiny", **options))


def test_a_share_that_hides_all_or_nothing_is_refused():
    encoder = vitinit.build_model("vit_tiny", num_classes=0, image_size=SIZE, patch_size=PATCH)
    for ratio in (0.0, 1.0, 0.97):
        with pytest.raises(ValueError, match="leaves none of 15 patches visible, or none hidden"):
            MaskedAutoencoder(encoder, mask_ratio=ratio)
    most = MaskedAutoencoder(encoder, mask_ratio=0.04, decoder_dim=20, decoder_heads=5)
    assert most.visible == 14  # int(15 · .96): one is hidden
