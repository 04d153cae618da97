"""The fused attention against the pure one, forward and backward, and the packed layout."""

from __future__ import annotations

import pytest
import torch
from einops import rearrange
from redrawn import drawn, redraw

from vitinit.models.attention import Attention, attention_weights

B, N, HEADS, HEAD_DIM = 2, 7, 3, 5
DIM = HEADS * HEAD_DIM


def written_out(attention: Attention, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Attention through `mixing_weights`, head by head."""
    weights = attention.mixing_weights(x, bias)                          # (B, h, N, N)
    values = attention.queries_keys_values(x)[2]
    return attention.proj(rearrange(weights @ values, "b h n d -> b n (h d)"))


@pytest.mark.parametrize("bias_shape", [None, (N, N), (HEADS, N, N), (1, HEADS, N, N),
                                        (B, 1, N, N)])
def test_the_fused_path_equals_the_pure_one_forward_and_backward(bias_shape):
    attention = redraw(Attention(DIM, num_heads=HEADS))
    results = []
    for path in (attention.__call__, lambda x, bias: written_out(attention, x, bias)):
        x = drawn(B, N, DIM, seed=1).requires_grad_()
        bias = None if bias_shape is None else drawn(*bias_shape, seed=2).requires_grad_()
        attention.zero_grad()
        output = path(x, bias)
        (output * drawn(B, N, DIM, seed=3)).sum().backward()
        results.append([output, x.grad, *(p.grad.clone() for p in attention.parameters()),
                        *([] if bias is None else [bias.grad])])
    for fused, pure in zip(*results):
        torch.testing.assert_close(fused, pure, rtol=0, atol=1e-12)


def test_attention_weights_are_the_formula():
    q, k, bias = drawn(HEADS, N, HEAD_DIM), drawn(HEADS, N, HEAD_DIM, seed=1), drawn(N, N, seed=2)
    weights = attention_weights(q, k, bias)
    head, row = 2, 4
    logits = torch.stack([(q[head, row] * k[head, j]).sum() / HEAD_DIM**0.5 + bias[row, j]
                          for j in range(N)])
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
