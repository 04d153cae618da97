"""LAMB: its update beside a transcription of timm's in float64, and what it launches."""

import pytest
import torch
from launches import launches_of
from optimisers import OF_ADAMW, built, lamb, put_gradients, vit_b_with_gradients
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vitinit.train.optim import decays, layer_numbers, set_learning_rate


class TimmsLamb:
    """timm's Lamb at its defaults, weight by weight, in float64: of weight W, its group's decay."""

    def __init__(self, weights: dict[str, Tensor], decay_of: dict[str, float], betas, eps) -> None:
        self.weights = {name: weight.detach().double() for name, weight in weights.items()}
        self.decay_of, self.betas, self.eps, self.made = decay_of, betas, eps, 0
        self.first = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    def step(self, gradients: dict[str, Tensor], rate_of: dict[str, float]) -> None:
        self.made += 1
        norm = sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
        beta1, beta2 = self.betas
        for name, weight in self.weights.items():
            gradient = gradients[name] / max(1.0, norm)
            self.first[name] = beta1 * self.first[name] + (1 - beta1) * gradient
            self.second[name] = beta2 * self.second[name] + (1 - beta2) * gradient**2
            root = (self.second[name] / (1 - beta2**self.made)).sqrt()
            update = self.first[name] / (1 - beta1**self.made) / (root + self.eps)
            decay = self.decay_of[name]
            if decay:
                update = update + decay * weight
                length, size = float(update.norm()), float(weight.norm())
                update = update * (size / length if size > 0 and length > 0 else 1.0)
            self.weights[name] = weight - rate_of[name] * update


@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", ["vit", "vit, rotary", "swin", "conv_mixer"])
def test_a_hundred_updates_are_timms_in_float64(family, dtype, scale, held_against):
    """With layer decay, and gradients whose norm is above or below 1. A matrix of zeros has a
    ratio of 1, and so has one without gradients; vectors, positions and tokens have none."""
    model = built(family, dtype)
    named = dict(model.named_parameters())
    first, second, *_ = (name for name in named if decays(name, named[name]))
    named[first].data.zero_()
    numbers = layer_numbers(named)
    undecayed = ("pos_embed", "_token", "_table", ".frequencies")
    decay_of = {
        name: 0.0 if weight.ndim == 1 or name.endswith(undecayed) else 0.3
        for name, weight in named.items()
    }
    how = dict(betas=(0.9, 0.97), eps=1e-6 * scale)
    optimizer = lamb(model, weight_decay=0.3, layer_decay=0.7, **how)
    theirs = TimmsLamb(named, decay_of, **how)
    for step in range(100):
        rate = 1e-3 * (step % 7)
        put_gradients(model, step)
        for name, weight in named.items():
            weight.grad *= 0.0 if name == second else scale
        gradients = {name: weight.grad.double() for name, weight in named.items()}
        set_learning_rate(optimizer, rate)
        optimizer.step()
        last = max(numbers.values())
        theirs.step(gradients, {name: rate * 0.7 ** (last - numbers[name]) for name in named})
    for name, expected in theirs.weights.items():
        apart = float((named[name].detach().double() - expected).norm() / expected.norm())
        assert apart < 1e-6, name
    held_against([*named.values()], [*theirs.weights.values()], cases=100)


def test_an_update_of_vit_b_launches_few_operations():
    """On fake CUDA tensors, with the skipping of fp16, for which the host waits nowhere."""
    with FakeTensorMode():
        model = vit_b_with_gradients()
        optimizer = lamb(model, **OF_ADAMW)
        set_learning_rate(optimizer, 1e-3)
        optimizer.grad_scale, optimizer.found_inf = torch.ones(2, device="cuda").unbind()
        optimizer.step()  # not counted: the state is made
        launches = launches_of(optimizer.step)
    assert launches.count <= 200 and (launches.waits, launches.downloads) == (0, 0)
