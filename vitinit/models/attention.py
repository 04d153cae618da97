"""Multi-head self-attention, shared by the transformer models of this package.

Shape legend for this package:

    B images, N tokens, C channels (embed_dim), h heads, d channels per head (head_dim = C / h)

Attention is a spatial mixer: for each head, output token i is Σ_j A[i, j] · value j, where each row
of A sums to 1. `attention_weights` computes A itself; `attend`, which models use, calls PyTorch's
fused kernel, which never stores A, wherever it is the faster one. Tests check that both give the
same result and gradients.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .layers import Classifier, head_width
from .rotary import Rotary
from .shift import moved

# Kernels for attention with a bias: not cuDNN's, whose gradients have been NaN on Hopper with such
# a bias where N % 128 is 64 (pytorch issue 196678). Without a bias PyTorch prefers cuDNN's there.
FOR_BIAS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
PACKED = ["qkv.weight", "qkv.bias", "proj.weight", "proj.bias"]  # an attention's own parameters
LEAST_MASS = 0.5  # of a shift, by the biases of queries and keys


def attention_logits(
    query: Tensor, key: Tensor, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Q Kᵀ · scale + bias, of which the softmax is attention, (..., N, N).

    query, key: (..., N, d). bias: broadcastable to (..., N, N), added to the logits (a relative
    position bias, a shift mask). scale: 1 / √d if None.
    """
    if scale is None:
        scale = query.shape[-1] ** -0.5
    logits = query @ key.transpose(-2, -1) * scale  # (..., N, N)
    if bias is not None:
        logits = logits + bias
    return logits


def attention_weights(
    query: Tensor, key: Tensor, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """The softmax of `attention_logits`, the spatial mixing ("Attention Is All You Need", §3.2.1):
    (..., N, N), rows summing to 1.
    """
    return attention_logits(query, key, bias, scale).softmax(dim=-1)


def attend(
    query: Tensor,
    key: Tensor,
    values: Tensor,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`attention_weights` @ values, each (B, h, N, d), by the fastest way on the device."""
    if query.device.type == "cpu" and query.dtype == torch.bfloat16:
        # Here the fused kernel takes 2 to 7 times as long, with backward (torch 2.14, N 64 to 784).
        return attention_weights(query, key, bias, scale) @ values
    if bias is None or not query.is_cuda:
        return F.scaled_dot_product_attention(query, key, values, attn_mask=bias, scale=scale)
    with sdpa_kernel(FOR_BIAS):  # flags of the whole process: threads that meet here mix them up
        return F.scaled_dot_product_attention(query, key, values, attn_mask=bias, scale=scale)


class Attention(nn.Module):
    """Multi-head self-attention: (B, N, C) → (B, N, C).

    The parameters are packed as in timm and DeiT: qkv.weight is (3·C, C), with the queries of all
    heads first, then the keys, then the values. `q_weight`, `k_weight`, `v_weight`, (h, d, C), and
    `proj_weight` are views of the parts: writing to them writes to the parameters.

    qk_norm_eps: a LayerNorm of each head's queries and one of its keys, with this eps (arXiv
        2302.05442, §2.1); None: none. rotary: turns them by their places; None: nothing does.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        qkv_bias: bool = True,
        qk_norm_eps: float | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_width(dim, num_heads)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.q_norm = self.new_norm(qk_norm_eps)
        self.k_norm = self.new_norm(qk_norm_eps)
        self.rotary = rotary
        # (h, N), in training the one token whose value each token gets; see `hold_to_shifts`.
        self.held_to: Tensor | None = None

    def new_norm(self, eps: float | None) -> nn.Module:
        """A norm of each head's queries, or of its keys; the identity if eps is None."""
        if eps is None:
            return nn.Identity()
        return nn.LayerNorm(self.head_dim, eps=eps)

    def by_head(self, packed: Tensor) -> Tensor:
        """What is packed, (3·C, …), as a view of queries, keys and values: (3, h, d, …)."""
        return packed.unflatten(0, (3, self.num_heads, self.head_dim))

    @property
    def q_weight(self) -> Tensor:
        """The queries of head i are x @ q_weight[i].T, plus their bias."""
        return self.by_head(self.qkv.weight)[0]

    @property
    def k_weight(self) -> Tensor:
        return self.by_head(self.qkv.weight)[1]

    @property
    def v_weight(self) -> Tensor:
        return self.by_head(self.qkv.weight)[2]

    @property
    def q_bias(self) -> Tensor | None:
        """(h, d), or None without qkv_bias"""
        return None if self.qkv.bias is None else self.by_head(self.qkv.bias)[0]

    @property
    def proj_weight(self) -> Tensor:
        """(C, h, d): head i adds values_i @ proj_weight[:, i].T to the output."""
        return self.proj.weight.unflatten(1, (self.num_heads, self.head_dim))

    def queries_keys_values(
        self, x: Tensor, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N, C) → Q, K and V, each (B, h, N, d): Q and K after qk_norm and rotary, if any.
        tokens: (B, N), which of the image's tokens these are; None: all of them, in order.
        """
        packed = self.qkv(x)  # (B, N, 3·C)
        # Each (B, N, h, d).
        q, k, v = rearrange(packed, "b n (three h d) -> three b n h d", three=3, h=self.num_heads)
        if isinstance(self.q_norm, nn.LayerNorm):  # whose results are float32 under autocast
            q = self.q_norm(q).to(v.dtype)
            k = self.k_norm(k).to(v.dtype)
        if self.rotary is not None:
            q, k = self.rotary(q, k, tokens)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def mixing_logits(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The logits of `mixing_weights`."""
        q, k, _ = self.queries_keys_values(x, tokens)
        return attention_logits(q, k)

    def mixing_weights(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The attention matrices that `forward` applies to the values: (B, N, C) → (B, h, N, N)."""
        return self.mixing_logits(x, tokens).softmax(dim=-1)

    def chosen_by_biases(self) -> Tensor:
        """The token that each attends to by the biases of Q and K, thus by place alone: (h, N).
        Raises ValueError where these do not decide: not rotary, other parameters, too little mass.
        """
        others = {name for name, _ in self.named_parameters()} - set(PACKED)
        if self.rotary is None or others:
            raise ValueError(
                "biases do not decide where attention looks; expected rotary positions with fixed "
                "frequencies, and no qk_norm"
            )
        without_content = self.qkv.weight.new_zeros(1, len(self.rotary.fixed), self.qkv.in_features)
        masses, chosen = self.mixing_weights(without_content)[0].max(-1)  # (h, N) each
        mass = masses.mean(1).min().item()
        if mass < LEAST_MASS:
            raise ValueError(
                f"attention has a mass of {mass:.2g} on one token by place alone; expected at least "
                f"{LEAST_MASS}, as a rotary impulse has with qkv_bias"
            )
        return chosen

    def values(self, x: Tensor) -> Tensor:
        """V alone, of all heads: (B, N, C)."""
        bias = None if self.qkv.bias is None else self.qkv.bias.chunk(3)[2]
        return F.linear(x, self.qkv.weight.chunk(3)[2], bias)

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        if self.held_to is not None and self.training:
            return self.proj(moved(self.values(x), self.held_to, tokens))
        q, k, v = self.queries_keys_values(x, tokens)
        x = attend(q, k, v)  # (B, h, N, d)
        x = rearrange(x, "b h n d -> b n (h d)")  # (B, N, C)
        return self.proj(x)


@torch.no_grad()
def hold_to_shifts(model: Classifier, *, held: bool) -> None:
    """Let each attention of a model be in training the shift that the biases of its queries and
    keys make of it; or, if not `held`, be attention again.

    Held, it moves values alone, the gradients of queries and keys are 0, and a token whose target
    is off the grid gets the one that it attends to most. Evaluation is by attention at all times.
    Raises ValueError, and changes nothing, for a model with prefix tokens, and for attention that is
    not rotary, has further parameters, or whose biases choose no token.
    """
    if held and model.num_prefix_tokens:
        raise ValueError(
            "a class token or register has no place from which to look; expected 0, or "
            'pool = "mean" and num_registers = 0'
        )
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    if held and not attentions:
        raise ValueError(f"a {type(model).__name__} has no such attention")
    chosen = [attention.chosen_by_biases() if held else None for attention in attentions]
    for attention, index in zip(attentions, chosen):
        attention.held_to = index
