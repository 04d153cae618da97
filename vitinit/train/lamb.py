"""LAMB: Adam whose steps are in proportion to the norm of the weight matrix that they change.

As Apex' FusedLAMB and timm's Lamb compute it (You et al., arXiv 1904.00962, without a bound on the
trust ratio). With it DeiT III (arXiv 2204.07118) was trained, whose command gives eps 1e-8 to it
and leaves betas, .9 and .999, and MAX_GRAD_NORM at Apex' defaults.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

MAX_GRAD_NORM = 1.0  # of all gradients together


class Lamb(torch.optim.AdamW):
    """LAMB with the settings and the state of fused AdamW.

    Let G be a gradient, divided by max(1, norm of all gradients), and A Adam's update by it,
    m / (√v + eps), with corrected moments. At learning rate η a weight W changes by

        U = A + weight_decay · W
        W ← W − η · (‖W‖ / ‖U‖) · U

    where the trust ratio ‖W‖ / ‖U‖ is 1 if a norm is 0, or the group's weight_decay is.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Do one update of all weights, and return what `closure` gave, which is called before it.
        If gradients overflowed in fp16, nothing changes.

        Around this call GradScaler sets `grad_scale`, by which gradients are to be divided, and
        `found_inf`, not 0 if they overflowed: scalars on the device, or None.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        every = [weight.grad for group in self.param_groups for weight in group["params"]]
        norm = torch.nn.utils.get_total_norm([each for each in every if each is not None]).float()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        least = torch.ones_like(norm) if scale is None else scale
        # Of scaled gradients the norm is scaled, too: one division undoes both.
        divisor = norm.maximum(MAX_GRAD_NORM * least)
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)  # AdamW's, which also makes the moments of step 0
            weights, gradients, averages, squares, unused, steps = lists
            if not weights:
                continue
            updates = list(torch._foreach_mul(weights, 0.0))
            adam(  # a step of −1 from zeros is the update; none after an overflow
                updates,
                gradients,
                averages,
                squares,
                unused,
                steps,
                fused=True,
                grad_scale=divisor,
                found_inf=found_inf,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=-1.0,
                weight_decay=0.0,
                eps=group["eps"],
                maximize=False,
            )
            if group["weight_decay"]:
                torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
                norms, lengths = (
                    torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, updates)
                )
                known = (norms > 0) & (lengths > 0)
                ratios = torch.where(known, norms / lengths, 1.0)  # one for each weight
                torch._foreach_mul_(updates, ratios.unbind())
            if found_inf is not None:  # nor is there a decay then
                torch._foreach_mul_(updates, found_inf == 0)
            torch._foreach_sub_(weights, updates, alpha=group["lr"])
        return loss
