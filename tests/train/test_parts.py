"""Learning rates of parts of a model: each part trains as if it had its own optimiser."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitinit
from vitinit.models.attention import Attention
from vitinit.train.optim import adamw, parameter_groups
from vitinit.train.parts import PartRates, layer_numbers, part_of, rates_by_name, set_learning_rate

OPTIONS = dict(weight_decay=0.3, betas=(0.9, 0.97), eps=1e-6)
SMALL = {
    "vit": ("vit_tiny_distilled", dict(image_size=8, patch_size=4, embed_dim=21, depth=2,
                                       num_heads=3, num_registers=2)),
    "swin": ("swin_tiny", dict(image_size=8, patch_size=2, embed_dim=6, depths=(1, 2),
                               num_heads=(2, 3), window_size=2)),
    "mixer": ("mixer_s16", dict(image_size=8, patch_size=4, embed_dim=11, depth=2)),
    "conv_mixer": ("convmixer_256_8", dict(image_size=8, patch_size=4, embed_dim=11, depth=2)),
    "simple_vit": ("simple_vit", dict(image_size=8, patch_size=4, embed_dim=28, depth=2,
                                      num_heads=2)),
    "simple_vit, free": ("simple_vit", dict(image_size=8, patch_size=4, embed_dim=28, depth=2,
                                            num_heads=2, reads="free", input_pos_embed=False)),
}
families = pytest.mark.parametrize("family", SMALL)


def built(family: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    name, sizes = SMALL[family]
    model = vitinit.build_model(name, num_classes=5, **sizes).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model


def gradients(model: nn.Module, steps: int, seed: int = 1):
    """Give every parameter a random gradient, once per step; it does not depend on the weights."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        yield step


def lr_at(step: int) -> float:
    return 1e-3 * (1.0 + step % 7)


def trained(model: nn.Module, rates: PartRates, steps: int) -> dict[str, Tensor]:
    optimizer = adamw(model, **OPTIONS, rates=rates)
    for step in gradients(model, steps):
        set_learning_rate(optimizer, lr_at(step), step)
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def trained_alone(model: nn.Module, factor: float, hold_steps: int, steps: int, *,
                  fused: bool = False) -> dict[str, Tensor]:
    """The same with one learning rate for all parameters, by torch's own AdamW."""
    optimizer = torch.optim.AdamW([{key: group[key] for key in ("params", "weight_decay")}
                                   for group in parameter_groups(model, OPTIONS["weight_decay"])],
                                  betas=OPTIONS["betas"], eps=OPTIONS["eps"], lr=0.0, fused=fused)
    for step in gradients(model, steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step) * factor * (step >= hold_steps)
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def parts_by_name(model: nn.Module) -> dict[str, list[tuple[str | None, slice]]]:
    """Parameter name → its parts and their rows, written out from the names."""
    found = {}
    for name, parameter in model.named_parameters():
        if ".qkv." in name:
            queries_keys = len(parameter) // 3 * 2
            found[name] = [("qk", slice(0, queries_keys)), (None, slice(queries_keys, None))]
        else:
            part = ("qk" if ".attn.qk." in name or name.endswith((".query", ".key")) else
                    "pos_embed" if name.endswith(("pos_embed", "relative_position_bias_table")) else
                    "patch_embed" if name.startswith(("patch_embed", "stem")) else
                    "head" if name.startswith("head") else None)
            found[name] = [(part, slice(None))]
    return found


def assert_each_part_is_as_alone(family: str, rates: PartRates, steps: int, dtype: torch.dtype,
                                 **tolerance: float) -> None:
    ours = trained(built(family, dtype=dtype), rates, steps)
    alone = {part: trained_alone(built(family, dtype=dtype), *rates.of_part(part), steps)
             for part in ("qk", "pos_embed", "patch_embed", "head", None)}
    parts = parts_by_name(built(family))
    assert {part for found in parts.values() for part, _ in found} >= {"patch_embed", "head", None}
    for name, found in parts.items():
        for part, rows in found:
            torch.testing.assert_close(ours[name][rows], alone[part][name][rows], **tolerance)
    if "vit" in family:                              # the comparison can tell the parts apart
        name = next(name for name, found in parts.items() if found[0][0] == "qk")
        assert (alone["qk"][name] - alone[None][name]).abs().min() > 1e-6


@families
def test_every_part_trains_as_with_an_optimiser_of_its_own(family):
    """This includes rows of a packed parameter: in float64 they differ by rounding alone."""
    rates = PartRates({"qk": 0.3, "pos_embed": 1.7, "patch_embed": 0.01, "head": 3.0},
                      hold_steps={"head": 5})
    assert_each_part_is_as_alone(family, rates, 101, torch.float64, rtol=0, atol=1e-12)


@families
def test_held_parts_do_not_move_and_then_train_with_their_moments(family):
    rates = PartRates(hold_steps={"qk": 11, "pos_embed": 7})
    assert_each_part_is_as_alone(family, rates, 23, torch.float64, rtol=0, atol=1e-12)
    model = built(family)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    after = trained(model, rates, 7)
    for name, found in parts_by_name(model).items():
        for part, rows in found:
            assert torch.equal(after[name][rows], before[name][rows]) == (part in ("qk", "pos_embed"))


def test_in_float32_two_thousand_steps_are_near():
    def attention() -> Attention:
        torch.manual_seed(0)
        return Attention(7, num_heads=1)
    rates = PartRates({"qk": 0.3}, hold_steps={"qk": 100})
    ours = trained(attention(), rates, 2000)
    for part, rows in (("qk", slice(0, 14)), (None, slice(14, None))):
        alone = trained_alone(attention(), *rates.of_part(part), 2000, fused=True)
        for name in ("qkv.weight", "qkv.bias"):
            torch.testing.assert_close(ours[name][rows], alone[name][rows], rtol=1e-4, atol=1e-4)


@families
def test_even_rates_are_adamw_to_the_bit_in_two_groups(family):
    model = built(family)
    groups = parameter_groups(model, 0.3)
    assert [(group["weight_decay"], group["factor"], group["hold_steps"]) for group in groups] == [
        (0.3, 1.0, 0), (0.0, 1.0, 0)]
    ours = trained(built(family, dtype=torch.float32), PartRates(), 13)
    theirs = trained_alone(built(family, dtype=torch.float32), 1.0, 0, 13, fused=True)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@families
def test_layers_are_counted_by_blocks(family):
    model = built(family)
    names = [name for name, _ in model.named_parameters()]
    numbers = dict(zip(names, layer_numbers(names)))
    depth = sum(SMALL[family][1].get("depths", (SMALL[family][1].get("depth"),)))
    for name, number in numbers.items():
        if name.startswith(("patch_embed", "stem", "pos_embed", "cls_", "dist_", "reg_")):
            assert number == 0, name
        elif name.startswith(("norm", "head")):
            assert number == depth + 1, name
    blocks = [name for name in names if "blocks." in name]
    assert [numbers[name] for name in blocks] == sorted(numbers[name] for name in blocks)
    assert set(numbers[name] for name in blocks) == set(range(1, depth + 1))
    if family == "swin":                             # patch merging belongs to the block after it
        assert numbers["layers.1.downsample.reduction.weight"] == numbers[
            "layers.1.blocks.0.norm1.weight"] == 2
    # The factor is 1 for the head and falls towards the image; it multiplies the part's own.
    rates = rates_by_name(model, PartRates({"head": 5.0, "patch_embed": 2.0}, layer_decay=0.7))
    for name, (factor, _) in rates.items():
        own = {"head": 5.0, "patch_embed": 2.0}.get(part_of(name), 1.0)
        assert factor == pytest.approx(own * 0.7 ** (depth + 1 - numbers[name])), name


def test_layer_decay_and_the_rate_of_rows_multiply():
    rates = PartRates({"qk": 0.5}, layer_decay=0.8)
    ours = trained(built("vit"), rates, 17)
    for block, power in ((0, 2), (1, 1)):
        name = f"blocks.{block}.attn.qkv.weight"
        for factor, rows in ((0.5, slice(0, 42)), (1.0, slice(42, None))):
            alone = trained_alone(built("vit"), factor * 0.8 ** power, 0, 17)
            torch.testing.assert_close(ours[name][rows], alone[name][rows], rtol=0, atol=1e-12)


def test_rows_are_those_that_queries_and_keys_read():
    attention = Attention(21, num_heads=3)
    for parameter, rows in attention.query_key_parameters():
        with torch.no_grad():
            parameter.zero_()
            parameter[rows] = 1.0
    assert attention.q_weight.min() == attention.k_weight.min() == 1.0
    assert attention.q_bias.min() == attention.k_bias.min() == 1.0
    assert attention.v_weight.abs().max() == 0.0
    assert len(Attention(21, num_heads=3, qkv_bias=False).query_key_parameters()) == 1


def test_a_step_that_overflowed_moves_no_rows():
    """Fused AdamW leaves everything as it was where GradScaler found an overflow."""
    model = built("vit", dtype=torch.float32)
    optimizer = adamw(model, **OPTIONS, rates=PartRates({"qk": 0.3}))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in gradients(model, 1):
        set_learning_rate(optimizer, 0.1, step)
        optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_frozen_queries_and_keys_are_in_no_group():
    model = built("vit")
    model.blocks[0].attn.qkv.requires_grad_(False)
    ours = trained(model, PartRates({"qk": 0.3}), 3)
    assert torch.equal(ours["blocks.0.attn.qkv.weight"], built("vit").blocks[0].attn.qkv.weight)
    assert not torch.equal(ours["blocks.1.attn.qkv.weight"], built("vit").blocks[1].attn.qkv.weight)


def test_a_plain_optimiser_has_one_rate():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=7.0)
    set_learning_rate(optimizer, 0.25, 3)
    assert optimizer.param_groups[0]["lr"] == 0.25
