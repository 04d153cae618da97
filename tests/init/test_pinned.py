"""Weights must not change unnoticed: every init on small models, and on the shapes of the recipes.
What is pinned can be reproduced on other machines. Weights are equal to the bit only with equal
kernels; with another number of threads single factors change sign, but the products Q·Kᵀ and V·proj
do not. So three things are pinned per model, each as a projection on fixed directions and a norm:
Q·Kᵀ of all heads, V·proj of all heads, and all other tensors. The tolerance is 1e-4 of the norm.
The largest difference between one thread and two is 1.7e-5 of it (Q·Kᵀ of ViT-B's impulse; V·proj
2.6e-6, the rest 1.1e-14; torch 2.15.0, two cores of a shared x86-64 server). Kernels without AVX
pass, too. `python tests/init/test_pinned.py` pins what is new and what has changed, which is right
only if an init's weights were meant to change; other pins stay as another machine found them."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitinit
from vitinit.init import INITS, init_function, stated_family
from vitinit.models import MODELS
from vitinit.models.attention import Attention
from vitinit.models.simple_vit import SimpleAttention
from vitinit.recipe.files import read_tables

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PINNED = Path(__file__).with_name("pinned_weights.json")
TOLERANCE = 1e-4

# fmt: off
SMALL = {           # name in the table of models, sizes for images of 20×28 pixels
    "vit": ("vit_tiny", dict(patch_size=4, embed_dim=57, depth=3, num_heads=3)),
    "vit, mean, no biases": ("vit_tiny", dict(patch_size=4, embed_dim=57, depth=2, num_heads=3,
                                              pool="mean", qkv_bias=False)),
    "distilled": ("vit_tiny_distilled", dict(patch_size=4, embed_dim=57, depth=2, num_heads=3)),
    "rotary": ("vit_tiny", dict(patch_size=4, embed_dim=60, depth=2, num_heads=3,
                                pos_embed="learned+rope", rope_coordinates="centred")),
    "swin": ("swin_tiny", dict(patch_size=2, embed_dim=22, depths=(2, 2), num_heads=(2, 11),
                               window_size=(5, 7))),
    "mixer, wide": ("mixer_s16", dict(patch_size=4, embed_dim=142, depth=3)),
    "mixer, narrow": ("mixer_s16", dict(patch_size=4, embed_dim=74, depth=3)),
    "conv_mixer": ("convmixer_256_8", dict(patch_size=4, embed_dim=23, depth=2, kernel_size=5)),
    **{f"simple_vit, {reads}": ("simple_vit", dict(
        patch_size=4, embed_dim=68, depth=2, num_heads=4, reads=reads,
        input_pos_embed=reads == "content")) for reads in ("content", "mixed", "position", "free")},
}
# fmt: on
VARIANTS = {  # options of inits beside their defaults, where the family's function has them
    "impulse": [
        dict(kernel_size=5, base="torch", value_beta=0.5),
        dict(offsets="random"),
        dict(value_init="base", rank=11, qk_norm=5.0, pos_embed_scale=9.0),
        dict(gain=0.5),
        dict(value_init="mimetic", value_alpha=0.3, value_beta=0.2),
    ],
    "deep_impulse": [
        dict(base="torch", kernel_size=5, target_mass=(0.6, 0.2)),
        dict(value_init="base"),
    ],
    "mimetic": [
        dict(base="torch", qk_alpha=0.2),
        dict(qk_init="base"),
        dict(value_init="base"),
        dict(value_init="untransposed"),
    ],
    "impulse_gd": [dict(share_blocks=False, renorm_every=2), dict(pseudo_input="pos_embed+normal")],
    "filters": [dict(kind=kind, base="default") for kind in ("box", "gaussian")],
}
QUICK = {"impulse_gd": dict(steps=5)}  # a thousand steps by default


def small_cases() -> Iterator[tuple[str, str, dict, str, dict]]:
    """Every init on every small model of its families, by default and with each variant."""
    for family, (name, sizes) in SMALL.items():
        for init in INITS:
            kind = stated_family(name, sizes)
            if kind not in INITS[init]:
                continue
            known = inspect.signature(init_function(init, kind)).parameters
            for options in [{}, *VARIANTS.get(init, [])]:
                if options.keys() <= set(known):
                    yield (
                        f"{family}: {init} {options or ''}".strip(),
                        name,
                        sizes | dict(image_size=(20, 28)),
                        init,
                        QUICK.get(init, {}) | options,
                    )


def recipe_cases() -> Iterator[tuple[str, str, dict, str, dict]]:
    """The models of all recipes, one block per stage, with the inits that write most to them."""
    seen = set()
    for path in sorted(RECIPES.glob("*.toml")):
        recipe, _ = read_tables(path)
        name, sizes = recipe["model"]["name"], recipe["model"]["options"]
        sizes.pop("drop_path", None)
        sizes.pop("shift_blocks", None)  # the one block that is left attends
        sizes["image_size"] = recipe["data"]["image_size"]
        cut = "depths" if "depths" in MODELS[name][1] else "depth"
        sizes[cut] = (1,) * len(MODELS[name][1][cut]) if cut == "depths" else 1
        if sizes.get("pos_embed") == "sincos":  # which these inits do not write
            continue
        own = recipe["init"].get("options", {})  # of the recipe's init, such as base = "torch"
        vit = MODELS[name][0] == "vit"
        # deep_impulse passes images through the model, which takes long for the larger ones.
        for init in ("impulse", "deep_impulse") if vit and "tiny" in name else ("impulse",):
            known = inspect.signature(init_function(init, stated_family(name, sizes))).parameters
            options = {key: value for key, value in own.items() if key in known}
            if init not in ("impulse", recipe["init"]["name"]) and own:
                continue
            label = f"{name} {sizes}: {init} {options or ''}".strip()
            if label not in seen:
                yield label, name, sizes, init, options
            seen.add(label)


CASES = {case[0]: case[1:] for case in (*small_cases(), *recipe_cases())}
PINNED_WEIGHTS = json.loads(PINNED.read_text(encoding="utf-8")) if PINNED.exists() else {}


@torch.no_grad()
def fingerprint(model: nn.Module) -> dict[str, list[float]]:
    """For each part its projection on fixed directions and its Frobenius norm: [value, norm]."""
    products: dict[str, list[Tensor]] = {"Q·Kᵀ": [], "V·proj": []}
    packed = set()
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            packed |= {f"{name}.qkv.weight", f"{name}.proj.weight"}
            products["Q·Kᵀ"] += [
                q.double().mT @ k.double() for q, k in zip(module.q_weight, module.k_weight)
            ]
            value = module.v_weight.double().flatten(0, 1)
            products["V·proj"].append(module.proj.weight.double() @ value)
        elif isinstance(module, SimpleAttention):
            packed |= {f"{name}.qk.weight", f"{name}.query", f"{name}.key"}
            products["Q·Kᵀ"] += [q.double() @ k.double().mT for q, k in zip(*module.factors)]
    rest = [
        value.double()
        for name, value in model.state_dict().items()
        if name not in packed and value.is_floating_point()
    ]
    return {
        part: projected(tensors) for part, tensors in (products | {"rest": rest}).items() if tensors
    }


def projected(tensors: list[Tensor]) -> list[float]:
    """[Σ tensor · direction, Frobenius norm of all]; each tensor has a direction of variance 1."""
    total = square = 0.0
    for number, tensor in enumerate(tensors, 1):
        indices = torch.arange(1, tensor.numel() + 1, dtype=torch.float64)
        direction = (indices * (number * 0.6180339887498949) % 1.0 - 0.5) * 12.0**0.5
        total += (tensor.flatten() @ direction).item()
        square += tensor.square().sum().item()
    return [total, square**0.5]


def found(
    model_name: str, sizes: dict[str, Any], init: str, options: dict[str, Any]
) -> dict[str, list[float]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = vitinit.build_model(model_name, num_classes=7, **sizes)
        vitinit.init_weights(model, init, generator=torch.Generator().manual_seed(0), **options)
        return fingerprint(model)
    finally:
        torch.set_num_threads(threads)


def other_parts(actual: dict[str, list[float]], pinned: dict[str, list[float]]) -> list[str]:
    """The parts that differ from what is pinned by more than the tolerance."""
    return [
        part
        for part in sorted(actual.keys() | pinned.keys())
        if part not in actual
        or part not in pinned
        or actual[part][1] != pytest.approx(pinned[part][1], rel=TOLERANCE, abs=1e-12)
        or actual[part][0]
        != pytest.approx(pinned[part][0], rel=0, abs=TOLERANCE * pinned[part][1] + 1e-12)
    ]


@pytest.mark.parametrize("model, init", {(case[0], case[2]): "" for case in CASES.values()})
def test_weights_are_those_that_were_pinned(model, init):
    for label, case in CASES.items():
        if (case[0], case[2]) != (model, init):
            continue
        actual = found(*case)
        assert other_parts(actual, PINNED_WEIGHTS[label]) == [], (label, actual)


def test_nothing_is_pinned_that_is_gone():
    assert PINNED_WEIGHTS.keys() == CASES.keys()


def pinned_or_found(label: str) -> dict[str, list[float]]:
    """What is pinned, where that holds; else what is found."""
    actual, pinned = found(*CASES[label]), PINNED_WEIGHTS.get(label, {})
    return actual if other_parts(actual, pinned) else pinned


if __name__ == "__main__":
    PINNED.write_text(
        "{\n"
        + ",\n".join(
            f"{json.dumps(label, ensure_ascii=False)}: "
            f"{json.dumps(pinned_or_found(label), ensure_ascii=False)}"
            for label in CASES
        )
        + "\n}\n",
        encoding="utf-8",
    )
