"""Each key of how a recipe augments, trains and evaluates reaches the function that it is for."""

import dataclasses
from pathlib import Path

import torch
from same_run import checkpoint, rows_of

import vitinit.run
from vitinit.base.values import plain, to_toml
from vitinit.recipe import sections
from vitinit.runs import data, start
from vitinit.runs.folder import RunFolder
from vitinit.tasks import labels
from vitinit.train.loop import set_precision, tune_convolutions
from vitinit.train.metrics import Evaluation

# All values of one type are different, and none is the default of the function that takes it.
# fmt: off
WRITTEN = {
    "augment": dict(repeats=3, crop_scale=[0.37, 0.97], crop_ratio=[0.71, 1.31], crop_padding=2,
                    fit="crop", flip=0.11, interpolation="bilinear", erase_probability=0.13,
                    erase_area=[0.17, 0.19], erase_ratio=[0.23, 0.29], erase_fill="const",
                    erase_after_mix=True),
    "rand_augment": dict(layers=1, probability=0.41, magnitude=0.43, magnitude_std=0.47,
                         fill=[101, 103, 107], interpolation="random",
                         operations=["Invert", "Rotate"], rotate_degrees=0.53, shear_factor=0.59,
                         translate_share=0.61, enhance_factor=0.67, posterize_bits=5,
                         solarize_levels=109, solarize_add_levels=113),
    "three_augment": dict(probability=0.31, color_jitter=0.33),
    "mix": dict(group=6, mixup_alpha=0.73, cutmix_alpha=0.79, probability=0.83,
                switch_probability=0.89, label_smoothing=0.07),
    "optim": dict(train="all", global_batch=12, max_batch_per_process=2, base_lr=3e-3,
                  lr_scaling="linear", name="muon", weight_decay=0.07, betas=[0.83, 0.97],
                  eps=5e-5, clip_norm=0.61, layer_decay=0.89, muon_factor=1.7, muon_momentum=0.79,
                  muon_dtype="bf16_on_gpu"),
    "schedule": dict(shape="cosine", epochs=3, cooldown_epochs=2, warmup_epochs=1, warmup_lr=2e-5,
                     cosine_after_warmup=True, min_lr=1e-6, step_on="epoch", shift_epochs=2),
    "ema": dict(decay=0.71, warmup=True),
    "engine": dict(amp="bf16", compile=True, compile_mode="reduce-overhead", recompute=True,
                   channels_last=True, tf32=True),
    "eval": dict(crop_pct=0.77, interpolation="bilinear", batch_size=5, cache_gib=0.3,
                 every_epochs=3),
    "checkpoint": dict(every_epochs=2, every_steps=3, keep_epochs=[0, 4], best_by="val_loss"),
}
# fmt: on


def test_every_key_reaches_what_it_names(train_program, small_run, tmp_path, monkeypatch):
    seen: dict[str, list[tuple[tuple, dict]]] = {}  # the arguments of each call, by function
    for name in (
        "Augmentation",
        "TrainSampler",
        "ToDevice",
        "TrainToDevice",
        "EvalViews",
        "EvaluationBatches",
        "optimizer_for",
        "plan_batches",
        "LearningRate",
        "Ema",
        "set_precision",
        "train_epochs",
        "evaluate",
    ):
        place = next(place for place in (vitinit.run, start, data, labels) if hasattr(place, name))

        def recorded(*arguments, name=name, real=getattr(place, name), **options):
            seen.setdefault(name, []).append((arguments, options))
            return real(*arguments, **options)

        monkeypatch.setattr(place, name, recorded)
    compiled, written, save = [], [], RunFolder.save

    def saved(self, state: dict, path: Path) -> None:
        if path.name == "last.pt":
            written.append((state["progress"]["step"], state["progress"]["epochs"]))
        return save(self, state, path)

    monkeypatch.setattr(RunFolder, "save", saved)
    recomputed, modes, held = [], set(), []
    monkeypatch.setattr(start, "hold_to_shifts", lambda _, **options: held.append(options["held"]))
    monkeypatch.setattr(start, "recompute_blocks", recomputed.append)

    def compile_it(model, mode):
        compiled.append(model)
        modes.add(mode)
        return model

    monkeypatch.setattr(torch, "compile", compile_it)
    sets = {
        f"{title}__{key}": to_toml(value)
        for title, body in WRITTEN.items()
        for key, value in body.items()
    }
    sets["model__options__pool"] = "mean"
    assert train_program.main(small_run(tmp_path / "run", **sets)) == 0

    def options(name: str) -> dict:
        return seen[name][0][1]

    for title, body in WRITTEN.items():  # every key is here
        fields = {field.name for field in dataclasses.fields(sections.SECTIONS[title])}
        assert fields == set(body), title
    _, _, augment, rand_augment, mix, *_, three_augment = seen["Augmentation"][0][0]
    for part, title in (
        (augment, "augment"),
        (rand_augment, "rand_augment"),
        (mix, "mix"),
        (three_augment, "three_augment"),
    ):
        assert plain(part) == WRITTEN[title]
    assert options("TrainSampler")["repeats"] == 3
    schedule, evaluation = WRITTEN["schedule"], WRITTEN["eval"]
    optimizer = seen["optimizer_for"][0][0][1]
    assert optimizer.peak_lr == 3e-3 * 12 / 512
    assert plain(optimizer) == WRITTEN["optim"]
    assert seen["plan_batches"][0][0][:2] == (12, 2)
    (found, peak, steps_per_epoch), _ = seen["LearningRate"][0]
    assert (peak, steps_per_epoch) == (optimizer.peak_lr, 4) and plain(found) == schedule
    assert options("Ema") == dict(decay=0.71, warmup=True)
    assert seen["set_precision"][0][0] == (True,)
    assert options("ToDevice")["channels_last"] is options("TrainToDevice")["channels_last"] is True
    for found, keys in (
        (options("EvalViews")["view"].keywords, ["crop_pct", "interpolation"]),
        (options("EvaluationBatches"), ["batch_size", "cache_gib"]),
    ):
        assert {key: found[key] for key in keys} == {key: evaluation[key] for key in keys}
    training, *_ = seen["train_epochs"][0][0]
    assert recomputed == [training.state.model] and modes == {"reduce-overhead"}
    assert training.epochs == 5  # with the cool-down
    assert held == [True, False, *[True] * 2, *[False] * 3]  # tried before the first epoch
    assert (training.amp, training.clip_norm, training.save_every) == ("bf16", 0.61, 3)
    assert [keywords["amp"] for _, keywords in seen["evaluate"]] == ["bf16"] * 2
    # Evaluated after epochs 3 and 5, kept after 0 and 4, at min_lr from epoch 4 on.
    rows = rows_of(tmp_path / "run")
    assert [row["val_loss"] is not None for row in rows] == [False, False, True, False, True]
    assert [row["lr"] for row in rows[3:]] == [1e-6, 1e-6]
    assert {path.name for path in (tmp_path / "run").glob("epoch_*.pt")} == {
        "epoch_0000.pt",
        "epoch_0004.pt",
    }
    # At the start, every third step, the ends of the second and fourth epoch of four steps, and
    # before and after the last evaluation.
    assert written == [
        (0, 0),
        (3, 0),
        (6, 1),
        (8, 2),
        (9, 2),
        (12, 2),
        (15, 3),
        (16, 4),
        (18, 4),
        (20, 4),
        (20, 5),
    ]
    assert len(compiled) == 3  # the model to train, and model and average


def test_the_best_checkpoint_is_that_by_the_recipe(train_program, small_run, tmp_path, monkeypatch):
    """The loss and the EMA's top-1 are best at different epochs; one loss is NaN."""
    for best_by, epoch in (("val_loss", 3), ("ema_top1", 1)):
        found = iter([(float("nan"), 30.0, 60.0), (1.5, 50.0, 40.0), (1.2, 40.0, 50.0)])

        def scripted(*arguments, **options):
            loss, top1, ema_top1 = next(found)
            return [
                Evaluation(loss, top1, 90.0, 21, *[[7] * 3] * 3, None),
                Evaluation(1.0, ema_top1, 90.0, 21, *[[7] * 3] * 3, None),
            ]

        monkeypatch.setattr(labels, "evaluate", scripted)
        assert train_program.main(small_run(tmp_path / best_by, checkpoint__best_by=best_by)) == 0
        assert checkpoint(tmp_path / best_by, "best.pt")["progress"]["epochs"] == epoch


def test_switches_of_torch_are_set_where_the_recipe_says():
    """cuDNN times its kernels for convolutional models, unless bits matter."""
    before = (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
    )
    try:
        for wanted in (True, False):
            set_precision(wanted)
            assert torch.get_float32_matmul_precision() == ("high" if wanted else "highest")
            assert torch.backends.cudnn.allow_tf32 is wanted
        for name, tuned in (("vit_tiny", False), ("convmixer_256_8", True), ("swin_tiny", False)):
            model = vitinit.build_model(name, num_classes=3, image_size=224)
            for exact in (False, True):
                torch.use_deterministic_algorithms(exact)
                tune_convolutions(model)
                assert torch.backends.cudnn.benchmark is (tuned and not exact)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before[1:]
