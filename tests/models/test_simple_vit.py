"""SimpleViT against a transcription from its state dict, and its frozen queries and keys."""

from functools import partial

import pytest
import small_models
import torch
import torch.nn.functional as F
from small_models import drawn, redraw
from torch import Tensor

from vitinit.mixing import mixing_matrices
from vitinit.models import SimpleViT
from vitinit.models.layers import sincos_position_embedding
from vitinit.train.optim import parameter_groups

SIZES = dict(
    num_classes=7, image_size=(6, 15), patch_size=(2, 3), embed_dim=20, depth=2, mlp_ratio=1.15
)  # a grid of 3×5, 23 hidden channels
PLAIN = dict(num_heads=5)  # head_dim 4
READINGS = [
    dict(reads="content", alpha=0.3, input_pos_embed=True),
    dict(reads="content", input_pos_embed=False),
    dict(reads="mixed", alpha=0.3, input_pos_embed=False),
    dict(reads="position", input_pos_embed=False),
    dict(reads="free", input_pos_embed=False),
]
HEADS = [
    PLAIN,
    dict(num_heads=3, head_dim=7),
    dict(num_heads=3, head_dim=7, logit_scale=0.83),
    dict(num_heads=5, values=False, logit_scale=0.83),
]


def redrawn(**options) -> SimpleViT:
    """Large values for Q and K, so that no map is near uniform."""
    model = redraw(SimpleViT(**SIZES | options))
    for name, parameter in model.named_parameters():
        parameter.data *= 3 if name.endswith((".qk.weight", ".query", ".key")) else 1
    return model


def written_out(
    state: dict[str, Tensor],
    image: Tensor,
    *,
    num_heads: int,
    reads: str,
    input_pos_embed: bool,
    alpha: float = 0.5,
    values: bool = True,
    head_dim: int = 0,
    logit_scale: float = 0.0,
) -> tuple[Tensor, list[Tensor]]:
    """The logits of one image, (classes,), and the maps of each block, (h, N, N)."""
    norm = partial(small_models.normed, state, eps=1e-5)
    linear = partial(small_models.linear, state)
    patches = [
        [
            image[channel, 2 * row + down, 3 * column + right]
            for down in range(2)
            for right in range(3)
            for channel in range(3)
        ]
        for row in range(3)
        for column in range(5)
    ]
    x = torch.stack([torch.stack(patch) for patch in patches])  # (N, pixels)
    x = norm(linear(norm(x, "patch_embed.norm1"), "patch_embed.proj"), "patch_embed.norm2")
    positions = state["pos_embed"]
    if input_pos_embed:
        x = alpha * x + (1 - alpha) * positions
    size, maps = head_dim or 20 // num_heads, []
    scale = logit_scale or 1 / size**0.5
    for block in ("blocks.0", "blocks.1"):
        y = norm(x, f"{block}.norm1")
        z = {"content": y, "mixed": alpha * y + (1 - alpha) * positions}.get(reads, positions)
        mixed, softmaxes = [], []
        for head in range(num_heads):
            part = slice(head * size, (head + 1) * size)
            if reads == "free":
                q, k = state[f"{block}.attn.query"][head], state[f"{block}.attn.key"][head]
            else:
                weight = state[f"{block}.attn.qk.weight"]
                q, k = (
                    z @ weight[: len(weight) // 2][part].T,
                    z @ weight[len(weight) // 2 :][part].T,
                )
            v = y @ state[f"{block}.attn.value.weight"][part].T if values else y[:, part]
            exponentials = (scale * q @ k.T).exp()
            softmaxes.append(exponentials / exponentials.sum(1, keepdim=True))
            mixed.append(softmaxes[-1] @ v)
        x = x + torch.cat(mixed, dim=1) @ state[f"{block}.attn.proj.weight"].T
        hidden = F.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1"))
        x = x + linear(hidden, f"{block}.mlp.fc2")
        maps.append(torch.stack(softmaxes))
    return linear(norm(x, "norm").mean(0), "head"), maps


@pytest.mark.parametrize("reading, heads", [*zip(READINGS, [*HEADS, HEADS[1]], strict=True)])
def test_logits_gradients_and_mixing_matrices_equal_a_transcription(reading, heads, held_against):
    options = reading | heads
    model, images = redrawn(**options), drawn(2, 3, 6, 15)
    assert model.grid == (3, 5) and not model.learns_positions
    assert torch.equal(model.pos_embed.float(), sincos_position_embedding((3, 5), 20))
    parameters = dict(model.named_parameters())
    state = parameters | dict(model.named_buffers())
    logits = model(images)
    references = [written_out(state, image, **options) for image in images]
    expected = torch.stack([reference for reference, _ in references])
    assert (logits[0] - logits[1]).abs().max() > 0.01 and logits.shape == (2, 7)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-11)
    held_against(logits, expected, cases=2)
    ours = torch.autograd.grad(logits.square().sum(), parameters.values())
    theirs = torch.autograd.grad(expected.square().sum(), parameters.values())
    for name, gradient, reference in zip(parameters, ours, theirs, strict=True):
        assert gradient.abs().max() > 1e-4, name
        torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-9, msg=name)
    held_against(ours, theirs, cases=0)
    found = mixing_matrices(model, images)
    for block in (0, 1):
        expected = torch.stack([maps[block] for _, maps in references])
        torch.testing.assert_close(found[block], expected, rtol=0, atol=1e-11)
        held_against(found[block], expected, cases=0)
        assert found[block].max() > 2 / 15  # not uniform
    some = mixing_matrices(model, images, blocks=[1], heads=[2, 0])
    assert torch.equal(some[1], found[1][:, [2, 0]])


def test_frozen_queries_and_keys_alone_leave_the_optimiser():
    for reading, leaves in ((READINGS[0], ["qk.weight"]), (READINGS[4], ["query", "key"])):
        blocks = {f"blocks.{block}.attn.{leaf}" for block in range(2) for leaf in leaves}
        for train_qk in (True, False):
            model = redrawn(train_qk=train_qk, **reading | PLAIN)
            names = {id(p): name for name, p in model.named_parameters()}
            decayed, exempt = (
                {names[id(p)] for p in group["params"]} for group in parameter_groups(model, 0.3)
            )
            assert decayed | exempt == set(names.values()) - (set() if train_qk else blocks)
            assert not train_qk or blocks <= decayed  # as weight decay takes matrices
