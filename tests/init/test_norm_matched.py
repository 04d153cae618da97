"""The control: the norms are the structured init's, the directions the base's, per head."""

from __future__ import annotations

import pytest
import torch

import vitinit


def drawn(*inits: str, seed: int = 5, **sizes):
    """A small ViT after the inits, one after the other, from one generator."""
    model = vitinit.build_model("vit_tiny", num_classes=3, image_size=28, patch_size=4,
                                embed_dim=66, depth=2, num_heads=3, **sizes)
    generator = torch.Generator().manual_seed(seed)
    for init in inits:
        name, _, like = init.partition(" like ")
        vitinit.init_weights(model, name, generator=generator, **({"like": like} if like else {}))
    return model


def parts(model) -> dict[str, torch.Tensor]:
    """What the structured inits write, as rows whose norms are to be matched, in float64."""
    rows = {"pos_embed": model.pos_embed.flatten()[None]}
    for number, block in enumerate(model.blocks):
        for name in ("q_weight", "k_weight", "v_weight"):
            rows[f"{number} {name}"] = getattr(block.attn, name).flatten(1)
        rows[f"{number} proj"] = block.attn.proj.weight.flatten()[None]
    return {name: value.detach().double() for name, value in rows.items()}


@pytest.mark.parametrize("like", ["impulse", "mimetic"])
def test_the_norms_are_the_structured_inits_and_all_else_is_the_base(like):
    matched, structured, base = drawn(f"norm_matched like {like}"), drawn(like), drawn(like, "default")
    for (name, ours), theirs, plain in zip(parts(matched).items(), parts(structured).values(),
                                           parts(base).values()):
        torch.testing.assert_close(ours.norm(dim=1), theirs.norm(dim=1), rtol=1e-5, atol=0,
                                   msg=lambda text: f"{name}: {text}")
        torch.testing.assert_close(torch.nn.functional.normalize(ours),
                                   torch.nn.functional.normalize(plain), rtol=0, atol=1e-6)
    written = ("pos_embed", "attn.qkv.weight", "attn.proj.weight")
    for (name, ours), plain in zip(matched.state_dict().items(), base.state_dict().values()):
        assert name.endswith(written) or torch.equal(ours, plain), name


def test_without_positions_there_is_nothing_to_scale():
    model = drawn("norm_matched like mimetic", pos_embed="none", pool="mean")
    assert not model.pos_embed.any() and model.blocks[0].attn.q_weight.isfinite().all()
