"""What a run records of its attention is what the weights say, and recording changes no weight."""

import pytest
import torch
from same_run import assert_identical, assert_same_run, checkpoint, family_run, rows_of
from small_models import built, written

from vitinit.mixing.filters import ordered_offsets
from vitinit.recipe.files import load_recipe, overrides
from vitinit.watch.attention import BY_BLOCK, AttentionWatcher

WATCH = ("--log", "attention")


def measured(model, init: str, images, *sets: str) -> dict:
    """What the watcher adds to a row, by a recipe with this init and these values."""
    watcher, row = AttentionWatcher(), {"step": 7}
    watcher.images = images
    changes = overrides(init=init, sets=["engine.amp=off", *sets])
    watcher.measured(row, model, load_recipe("quickstart", changes), None)
    assert row.pop("step") == 7 and len(row) == 3 * len(model.blocks)
    return {key: [row[f"{key}/{block}"] for block in range(len(model.blocks))] for key in BY_BLOCK}


def by_hand(logits, first_offset: int) -> tuple[float, float, float]:
    """The three values of the logits of a block, (B, 3, N, N) float64, whose last 35 tokens are
    patches, and whose heads have the offsets of a 3×3 kernel from this number on."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    entropy = -(weights * weights.log()).sum(-1).mean()
    on_targets = []
    patches = weights[..., -35:, -35:]
    patches = patches / patches.sum(-1, keepdim=True)
    for head in range(3):
        down, right = ordered_offsets(3)[first_offset + head]
        inside = [
            patches[:, head, 7 * row + column, 7 * (row + down) + column + right]
            for row in range(5)
            for column in range(7)
            if 0 <= row + down < 5 and 0 <= column + right < 7
        ]
        on_targets.append(torch.stack(inside).mean())
    return logits.abs().max().item(), entropy.item(), torch.stack(on_targets).mean().item()


def inputs_of(modules, model, images) -> list:
    """The first input of each module in a forward pass in float64."""
    inputs = []
    for module in modules:
        module.register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
    model.double().eval()(images.double())
    return inputs


def images_of(count: int = 3):
    return torch.randn(count, 3, 20, 28, generator=torch.Generator().manual_seed(5))


def test_the_values_of_a_vit_are_those_of_its_queries_and_keys():
    """With a class token, which has logits and entropy, and no share of the mass; each block begins
    with the first offset."""
    model, images = written("impulse", built("vit", depth=3)), images_of()
    found = measured(model, "impulse", images)
    inputs = inputs_of([block.attn for block in model.blocks], model, images)
    for number, (block, x) in enumerate(zip(model.blocks, inputs)):
        packed = x @ block.attn.qkv.weight.T + block.attn.qkv.bias  # (B, N, 3·54)
        q, k = (packed[..., start : start + 54].unflatten(-1, (3, 18)) for start in (0, 54))
        logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / 18**0.5
        expected = by_hand(logits, 0)
        values = [found[key][number] for key in ("logits", "entropy", "mass")]
        assert values == pytest.approx(expected, rel=1e-4), number
    assert max(found["logits"]) > 10 and len(found["mass"]) == 3


def test_a_rotary_model_has_nothing_where_blocks_are_shifts_and_offsets_go_on_after_them():
    sizes = dict(depth=3, num_registers=0)
    images, shifted = images_of(), built("rotary", shift_blocks=1, **sizes)
    found = measured(written("impulse", shifted), "impulse", images, "model.options.pos_embed=rope")
    assert [values[0] for values in found.values()] == [None] * 3
    inputs = inputs_of([block.attn for block in shifted.blocks], shifted, images)
    for number in (1, 2):
        q, k, _ = shifted.blocks[number].attn.queries_keys_values(inputs[number])
        expected = by_hand(q @ k.mT / 20**0.5, 3 * number)
        values = [found[key][number] for key in ("logits", "entropy", "mass")]
        assert values == pytest.approx(expected, rel=1e-4), number
        assert values[2] > 0.5


def test_a_simple_vit_without_targets_has_its_scale_and_no_mass():
    model, images = written("default", built("simple_vit, position", logit_scale=0.7)), images_of()
    found = measured(model, "default", images)
    assert found["mass"] == [None, None]
    for number, block in enumerate(model.blocks):
        packed = (model.pos_embed @ block.attn.qk.weight.T).double()
        q, k = (packed[:, start : start + 68].unflatten(-1, (4, 17)) for start in (0, 68))
        logits = 0.7 * torch.einsum("qhd,khd->hqk", q, k)
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        values = found["logits"][number], found["entropy"][number]
        expected = logits.abs().max().item(), entropy.item()
        assert values == pytest.approx(expected, rel=1e-4), number


def test_logits_are_those_of_the_precision_of_the_run_and_measuring_leaves_model_and_draws_alone():
    model, images = written("impulse", built("vit")), images_of()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    exact = measured(model.train(), "impulse", images)
    rounded = measured(model, "impulse", images, "engine.amp=bf16")
    assert exact["logits"] != rounded["logits"]
    for value in rounded["logits"]:
        assert value == torch.tensor(value).bfloat16().item()
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert_identical(before, dict(model.state_dict()))
    assert not any(module._forward_hooks for module in model.modules())


def unwatched(folder) -> list[dict]:
    """The rows of steps.jsonl without what was watched, which each of them has."""
    rows, watched = (
        rows_of(folder, "steps"),
        {f"{key}/{block}" for key in BY_BLOCK for block in (0, 1)},
    )
    assert rows and all(row.keys() >= watched for row in rows)
    return [{key: row[key] for key in row.keys() - watched} for row in rows]


def test_a_watched_run_has_the_weights_of_one_that_is_not_and_so_if_resumed_in_bf16_too(
    train_program, small_run, straight, stop_before, tmp_path, monkeypatch
):
    in_bf16 = {"engine__amp": "bf16", "rand_augment__layers": "0", "eval__every_epochs": "3"}
    uncut, whole, cut = straight(**in_bf16), tmp_path / "whole", tmp_path / "cut"
    assert train_program.main(small_run(whole, *WATCH, **in_bf16)) == 0
    with monkeypatch.context() as patch:
        patch.setattr("vitinit.run.StopRequest", stop_before(6))
        assert train_program.main(small_run(cut, *WATCH, **in_bf16)) == 128 + 15
    assert train_program.main(["--resume", str(cut), *WATCH]) == 0
    assert_same_run(whole, cut)  # what was watched, too
    assert_identical(checkpoint(uncut), checkpoint(whole))
    assert_identical(rows_of(uncut), rows_of(whole))
    assert_identical(rows_of(uncut, "steps"), unwatched(whole))


@pytest.mark.parametrize("what", ["a Mixer", "shifts alone"])
def test_a_model_without_attention_is_refused_in_one_line_before_anything_is_written(
    what, train_program, small_run, image_tree, tmp_path, capsys
):
    folder = tmp_path / "run"
    if what == "a Mixer":
        command, model = family_run("cifar10_mixer", image_tree, folder), "MlpMixer"
    else:
        shifts = {"model__options__shift_blocks": "2", "model__options__pool": "mean"}
        command, model = small_run(folder, init="default", **shifts), "VisionTransformer"
    assert train_program.main([*command, *WATCH]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert f"--log attention: this {model} has no attention" in message
    assert not folder.exists()
