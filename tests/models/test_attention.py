"""The kernel against the weights, forward and backward, and the packed layout."""

from __future__ import annotations

import pytest
import torch
from redrawn import drawn, redraw

from vitinit.models.attention import Attention, attend, attention_weights

B, N, HEADS, HEAD_DIM = 2, 7, 3, 5
DIM = HEADS * HEAD_DIM


@pytest.mark.parametrize("dtype, apart", [(torch.float64, 1e-12), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize("bias_shape, scale", [(None, 0.83), ((HEADS, N, N), 0.3),
    *((shape, None) for shape in (None, (N, N), (1, HEADS, N, N), (B, 1, N, N)))])
def test_attend_is_weights_times_values_forward_and_backward(bias_shape, scale, dtype, apart):
    results = []
    for kind, way in ((dtype, attend), (torch.float64, lambda query, key, values, *more:
                                        attention_weights(query, key, *more) @ values)):
        given = [drawn(*shape, seed=seed).to(kind).requires_grad_() for seed, shape in enumerate(
            [(B, HEADS, N, HEAD_DIM)] * 3 + [bias_shape or (N, N)])]
        output = way(*given[:3], given[3] if bias_shape else None, scale)
        (output * drawn(*output.shape, seed=4)).sum().backward()
        results.append([output, *(part.grad for part in given if part.grad is not None)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=apart)


def test_attention_weights_are_the_formula():
    q, k, bias = drawn(HEADS, N, HEAD_DIM), drawn(HEADS, N, HEAD_DIM, seed=1), drawn(N, N, seed=2)
    head, row, weights = 2, 4, attention_weights(q, k, bias)
    logits = k[head] @ q[head, row] / HEAD_DIM**0.5 + bias[row]
    torch.testing.assert_close(weights[head, row], logits.exp() / logits.exp().sum())
    torch.testing.assert_close(weights.sum(-1), torch.ones(HEADS, N, dtype=torch.float64))


def test_the_named_views_are_the_layout_that_forward_uses():
    attention = redraw(Attention(DIM, num_heads=HEADS, qkv_bias=False))
    x = drawn(B, N, DIM, seed=1)
    for weight, part in zip((attention.q_weight, attention.k_weight, attention.v_weight),
                            attention.queries_keys_values(x)):
        for head in range(HEADS):
            torch.testing.assert_close(x @ weight[head].T, part[:, head])
    biased = redraw(Attention(DIM, num_heads=HEADS))
    query, _, _ = biased.queries_keys_values(torch.zeros_like(x))        # nothing else is left
    assert torch.equal(biased.q_bias[:, None].expand(B, -1, N, -1), query)
    # Head by head through proj_weight equals the projection of all heads together.
    weights, values = attention.mixing_weights(x), attention.queries_keys_values(x)[2]
    output = sum(weights[:, head] @ values[:, head] @ attention.proj_weight[:, head].T
                 for head in range(HEADS)) + attention.proj.bias
    torch.testing.assert_close(attention(x), output)


def test_writing_into_a_view_writes_the_parameter():
    attention = Attention(DIM, num_heads=HEADS)
    with torch.no_grad():
        attention.k_weight[1] = 3.0
    rows = slice(DIM + HEAD_DIM, DIM + 2 * HEAD_DIM)  # keys come second, head 1 second among them
    assert (attention.qkv.weight[rows] == 3.0).all()
    assert (attention.qkv.weight == 3.0).sum() == HEAD_DIM * DIM
