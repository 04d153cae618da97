"""The parts of models: attention against its weights, stochastic depth, position embeddings."""

import math
import re

import numpy as np
import pytest
import torch
from small_models import drawn, redraw
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vitinit.models.attention import Attention, attend, attention_weights
from vitinit.models.layers import PatchEmbed, add_branch, draw_drop_path, sincos_position_embedding

B, N, HEADS, HEAD_DIM = 2, 7, 3, 5
DIM = HEADS * HEAD_DIM


@pytest.mark.parametrize("dtype, apart", [(torch.float64, 1e-12), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize(
    "bias_shape, scale",
    [
        (None, 0.83),
        ((HEADS, N, N), 0.3),
        *((shape, None) for shape in (None, (N, N), (1, HEADS, N, N), (B, 1, N, N))),
    ],
)
def test_attend_is_weights_times_values_forward_and_backward(bias_shape, scale, dtype, apart):
    results = []
    for kind, way in (
        (dtype, attend),
        (
            torch.float64,
            lambda query, key, values, *more: attention_weights(query, key, *more) @ values,
        ),
    ):
        given = [
            drawn(*shape, seed=seed).to(kind).requires_grad_()
            for seed, shape in enumerate([(B, HEADS, N, HEAD_DIM)] * 3 + [bias_shape or (N, N)])
        ]
        output = way(*given[:3], given[3] if bias_shape else None, scale)
        (output * drawn(*output.shape, seed=4)).sum().backward()
        results.append([output, *(part.grad for part in given if part.grad is not None)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=apart)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("device, beside_bias", [("cpu", True), ("cuda", False)])
def test_cudnns_attention_is_off_on_a_gpu_where_there_is_a_bias_and_nowhere_else(
    compiled, device, beside_bias
):
    """Seen from PyTorch's operations, as they run; on a GPU that is not there, with fake tensors.
    The switch is one of the whole process, in which threads on a CPU have no use for it.
    """
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            if re.search("attention|softmax", function.name()):
                seen.append(torch.backends.cuda.cudnn_sdp_enabled())
            return function(*arguments, **keywords or {})

    def run(graph, _):
        def forward(*given):
            with Seen():
                return graph(*given)

        return forward

    q, bias = drawn(B, HEADS, N, HEAD_DIM, seed=0), drawn(N, N, seed=1)
    for given, expected in ((None, True), (bias, beside_bias), (None, True)):
        torch._dynamo.reset()
        function = run(attend, None)
        if compiled:
            function = torch.compile(attend, fullgraph=True, backend=run)
        if device == "cpu":
            found = function(q, q, q, given)
            torch.testing.assert_close(found, attention_weights(q, q, given) @ q)
        else:
            with FakeTensorMode():
                fake = torch.zeros(q.shape, device=device)
                function(fake, fake, fake, given if given is None else fake.new_zeros(N, N))
        assert seen.pop() is expected and not seen


def test_the_named_views_are_the_layout_that_forward_uses():
    attention = redraw(Attention(DIM, num_heads=HEADS, qkv_bias=False))
    x = drawn(B, N, DIM, seed=1)
    for weight, part in zip(
        (attention.q_weight, attention.k_weight, attention.v_weight),
        attention.queries_keys_values(x),
    ):
        assert weight._base is attention.qkv.weight  # so that writing to it writes the parameter
        for head in range(HEADS):
            torch.testing.assert_close(x @ weight[head].T, part[:, head])
    biased = redraw(Attention(DIM, num_heads=HEADS))
    query, _, _ = biased.queries_keys_values(torch.zeros_like(x))  # nothing else is left
    assert torch.equal(biased.q_bias[:, None].expand(B, -1, N, -1), query)
    # Head by head through proj_weight equals the projection of all heads together.
    weights, values = attention.mixing_weights(x), attention.queries_keys_values(x)[2]
    output = (
        sum(
            weights[:, head] @ values[:, head] @ attention.proj_weight[:, head].T
            for head in range(HEADS)
        )
        + attention.proj.bias
    )
    torch.testing.assert_close(attention(x), output)


def test_drop_path_scales_are_zero_or_the_inverse_survival_rate_and_keep_the_precision():
    drop_path = draw_drop_path([0.0, 0.2, 0.5], 20_011, np.random.default_rng(0))
    assert drop_path.shape == (3, 20_011) and drop_path.dtype == torch.float32
    assert (drop_path[0] == 1).all()
    assert set(drop_path[1].unique().tolist()) == {0.0, 1.25}
    assert (drop_path == 0).double().mean(1).tolist() == pytest.approx([0, 0.2, 0.5], abs=0.01)
    assert drop_path.mean(1).tolist() == pytest.approx([1, 1, 1], abs=0.02)
    x = torch.ones(3, 2, 5, dtype=torch.bfloat16)
    assert add_branch(x, x, torch.tensor([0.0, 1.0, 1.25])).dtype == torch.bfloat16


def test_sincos_position_embeddings_are_the_formula():
    positions = sincos_position_embedding((3, 5), dim=28)
    assert positions.shape == (15, 28)
    row, column, channel = 2, 4, 3
    frequency = 10_000 ** (-channel / 7)
    token = positions[row * 5 + column]
    for quarter, value in enumerate(
        (
            math.sin(column * frequency),
            math.cos(column * frequency),
            math.sin(row * frequency),
            math.cos(row * frequency),
        )
    ):
        assert token[7 * quarter + channel].item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("in_channels", [3, 5])
def test_the_product_of_patches_is_the_convolution_and_so_are_its_gradients(in_channels):
    """In float64. On a CPU, where runs go on to the bit, the convolution is computed."""
    torch.manual_seed(0)
    embed = PatchEmbed((14, 15), (7, 5), 11, in_channels=in_channels).double()
    images = torch.randn(2, in_channels, 14, 15, dtype=torch.float64, requires_grad=True)
    results = []
    for way in (embed.product, embed):
        found = way(images)
        results.append(
            [found, *torch.autograd.grad(found.square().sum(), [images, *embed.parameters()])]
        )
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert torch.equal(embed(images), embed.proj(images).flatten(2).mT)
