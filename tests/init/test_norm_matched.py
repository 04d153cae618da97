"""The control: the norms are those of impulse, the directions the base's, per head."""

import torch
from small_models import built, seeded

import vitinit


def drawn(*inits: str):
    """A small ViT after the inits, one after the other, from one generator."""
    model, generator = built("vit"), seeded(5)
    for init in inits:
        vitinit.init_weights(model, init, generator=generator)
    return model


def parts(model) -> dict[str, torch.Tensor]:
    """What impulse writes, as rows whose norms are to be matched, in float64."""
    rows = {"pos_embed": model.pos_embed.flatten()[None]}
    for number, block in enumerate(model.blocks):
        for name in ("q_weight", "k_weight", "v_weight"):
            rows[f"{number} {name}"] = getattr(block.attn, name).flatten(1)
        rows[f"{number} proj"] = block.attn.proj.weight.flatten()[None]
    return {name: value.detach().double() for name, value in rows.items()}


def test_the_norms_are_those_of_impulse_and_all_else_is_the_base():
    matched, structured, base = drawn("norm_matched"), drawn("impulse"), drawn("impulse", "default")
    for (name, ours), theirs, plain in zip(
        parts(matched).items(), parts(structured).values(), parts(base).values()
    ):
        torch.testing.assert_close(
            ours.norm(dim=1),
            theirs.norm(dim=1),
            rtol=1e-5,
            atol=0,
            msg=lambda text: f"{name}: {text}",
        )
        torch.testing.assert_close(
            torch.nn.functional.normalize(ours),
            torch.nn.functional.normalize(plain),
            rtol=0,
            atol=1e-6,
        )
    written = ("pos_embed", "attn.qkv.weight", "attn.proj.weight")
    for (name, ours), plain in zip(matched.state_dict().items(), base.state_dict().values()):
        assert name.endswith(written) or torch.equal(ours, plain), name
