"""Muon: momentum whose matrices are orthogonalised before each update; AdamW for all other weights.

A step of Muon (Jordan et al., kellerjordan.github.io/posts/muon) takes the momentum of a weight
matrix, M = U S Vᵀ, and replaces its singular values by ones, so that all directions of the matrix
learn at the same speed. U Vᵀ is approximated by a Newton–Schulz iteration, which consists of matrix
products alone. Matrices of one shape are iterated together, as a batch (matrices, rows, columns).
"""

import math
from typing import Any

import torch
from torch import Tensor

# The quintic polynomial of the iteration, p(s) = a s + b s³ + c s⁵, has a large slope at 0, so that
# small singular values grow fast. Large ones end between .7 and 1.2 and not at 1 (Jordan et al.).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
TINIEST_NORM = 1e-7  # a matrix with a smaller norm, such as zeros, is divided by this
ADAMW_RMS = 0.2  # of AdamW's updates, which Muon's match (arXiv 2502.16982, §2.2)
Matrix = tuple[Tensor, Tensor, float]  # a weight, its gradient and learning rate


def orthogonalised(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Make all singular values of each matrix about 1: (B, rows, columns); products in `dtype`."""
    a, b, c = COEFFICIENTS
    norms = matrices.norm(dim=(1, 2), keepdim=True).clamp(min=TINIEST_NORM)
    x = (matrices / norms).to(dtype)  # no singular value exceeds 1
    tall = x.shape[1] > x.shape[2]  # the products below are on the smaller side
    for _ in range(ITERATIONS):
        squares = x.mT @ x if tall else x @ x.mT  # (B, side, side)
        factor = torch.baddbmm(squares, squares, squares, beta=b, alpha=c)
        x = torch.baddbmm(x, x, factor, beta=a) if tall else torch.baddbmm(x, factor, x, beta=a)
    return x.to(matrices.dtype)


class MuonWithAdamW(torch.optim.AdamW):
    """Muon for the parameter groups with "muon": True, fused AdamW for the others.

    The update of a weight matrix W with gradient G at learning rate η is

        M ← μ M + (1 − μ) G
        W ← (1 − η · weight_decay) W − .2 √max(rows, columns) · factor · η · NS((1 − μ) G + μ M)

    with Nesterov's momentum in the argument of NS, the iteration `orthogonalised`. If all singular
    values become 1, the root mean square of the update is .2 · factor · η, as that of AdamW about
    is at factor 1 (Liu et al., arXiv 2502.16982, §2.2). Weights of 1×1 convolutions, (rows,
    columns, 1, 1), count as matrices.

    factor, momentum: of Muon. dtype: of the products in its iteration; None: bfloat16 on a GPU that
    computes it, else float32. lr: of both. betas, eps: of AdamW. This is one optimiser and not two,
    so that GradScaler finds an overflow in the gradients of either kind and skips both.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        factor: float,
        momentum: float,
        dtype: torch.dtype | None,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self.factor, self.momentum, self.dtype = factor, momentum, dtype

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a loaded state; AdamW's own method expects its moments in all of it."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Do one update of all weights, and return what `closure` gave, which is called before it.
        If gradients overflowed in fp16, nothing changes.

        Around this call GradScaler sets two scalars on the device: `grad_scale`, by which gradients
        are to be divided, and `found_inf`, not 0 if they overflowed.
        """
        groups = self.param_groups
        try:  # AdamW's step is of its own groups alone
            self.param_groups = [group for group in groups if not group["muon"]]
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        found_inf = getattr(self, "found_inf", None)
        skipped = None if found_inf is None else found_inf != 0
        shapes: dict[torch.Size, list[Matrix]] = {}
        for group in groups:
            if group["muon"]:
                trained = [weight for weight in group["params"] if weight.grad is not None]
                decay(trained, group["lr"] * group["weight_decay"], skipped)
                for weight in trained:
                    matrix = weight, weight.grad, group["lr"]
                    shapes.setdefault(weight.shape, []).append(matrix)
                    if not self.state[weight]:
                        self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        for matrices in shapes.values():
            self._step_matrices(matrices, getattr(self, "grad_scale", None), skipped)
        return loss

    def _step_matrices(
        self, matrices: list[Matrix], scale: Tensor | None, skipped: Tensor | None
    ) -> None:
        """Muon's update of the matrices of one shape.

        skipped: a boolean on the device: gradients hold infinities; None without loss scaling.
        """
        buffers = [self.state[weight]["momentum_buffer"] for weight, *_ in matrices]
        momenta = [buffer.flatten(1) for buffer in buffers]  # views
        gradients = torch.stack([gradient.flatten(1) for _, gradient, _ in matrices])
        if scale is not None:
            gradients /= scale  # (B, rows, columns)
        if skipped is not None:  # with this gradient the momentum stays
            gradients = torch.where(skipped, torch.stack(momenta), gradients)
        directions = gradients.unbind()  # views
        torch._foreach_lerp_(momenta, directions, 1.0 - self.momentum)
        torch._foreach_lerp_(directions, momenta, self.momentum)  # Nesterov's
        dtype = self.dtype
        if dtype is None:
            half = gradients.is_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
            dtype = torch.bfloat16 if half else torch.float32
        updates = orthogonalised(gradients, dtype)
        if skipped is not None:
            updates = torch.where(skipped, 0.0, updates)
        size = self.factor * ADAMW_RMS * math.sqrt(max(updates.shape[1:]))
        torch._foreach_mul_(updates.unbind(), [-size * lr for *_, lr in matrices])
        torch._foreach_add_([weight.flatten(1) for weight, *_ in matrices], updates.unbind())


def decay(weights: list[Tensor], share: float, skipped: Tensor | None) -> None:
    """Take a share off each weight, in one call for all; nothing if `skipped`."""
    if weights:
        factor: float | Tensor = 1.0 - share
        if skipped is not None:
            factor = (1.0 - share * (~skipped).double()).to(weights[0].dtype)
        torch._foreach_mul_(weights, factor)
