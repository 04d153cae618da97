"""The start of a run: the main process's weights on all processes, and what is printed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from vitinit.init.mass import mass_on_images
from vitinit.messages import OneLineError
from vitinit.recipe.files import load_recipe, parse_override
from vitinit.runs import data, start
from vitinit.train.distributed import Processes

REPOSITORY = Path(__file__).resolve().parent.parent


def started(processes: Processes) -> dict:
    """What one of two processes starts with. On rank 1 the init draws other weights."""
    sys.path.insert(0, str(REPOSITORY))
    import train

    drawn = {}

    def init_weights(model, name, *, generator, **options):
        generator.manual_seed(100 + processes.rank)
        own_init(model, name, generator=generator, **options)
        drawn.update({key: value.clone() for key, value in model.state_dict().items()})
    own_init, start.init_weights = start.init_weights, init_weights
    recipe, fewer = (load_recipe("quickstart", [*map(parse_override, (
        "model.options.depth=1", "model.options.embed_dim=24", "ema.decay=0.9", "init.name=impulse",
        "data.name=image_folder", "data.num_classes=3", f"data.root={os.environ['IMAGES']}",
        "optim.global_batch=12", "data.workers=0", f"data.images_per_class={count}"))])
        for count in (0, 1))
    with pytest.raises(OneLineError) as refused:     # rank 1 has fewer images than a batch
        data.open_data((recipe, fewer)[processes.rank], processes, dry_run=True)
    _, images = data.open_training_set(recipe.data)
    state, notes = train.initial_state(recipe, processes, None, Path("none"), images)
    return {"drawn": drawn, "model": dict(state.model.state_dict()), "notes": notes,
            "ema": dict(state.ema.model.state_dict()), "refused": str(refused.value)}


def test_all_processes_and_their_moving_averages_start_with_the_main_ones_weights(
        in_two_processes, image_tree, monkeypatch):
    """Even if their inits drew other weights, as may happen on another kind of CPU."""
    monkeypatch.setenv("IMAGES", str(image_tree))
    main, other = in_two_processes(started)
    assert not torch.equal(main["drawn"]["head.weight"], other["drawn"]["head.weight"])
    for key, value in main["drawn"].items():
        for found in (main["model"], main["ema"], other["model"], other["ema"]):
            assert torch.equal(found[key], value), key
    assert main["notes"][0].startswith("mass    ")
    assert other["notes"] == []                      # only the main process prints
    assert main["refused"] == other["refused"]       # and it is to print an error of the other's
    assert "has 3 images" in main["refused"]


def test_the_mass_on_the_targets_in_training_images_stands_below_the_init(
        train_program, small_run, tmp_path, monkeypatch, capsys):
    """Baselines, and runs that start from a checkpoint, have no such line."""
    found = []

    def measured(model, name, options, images):
        found.append((mass_on_images(model, name, options, images), images))
        return found[-1][0]
    monkeypatch.setattr(start, "mass_on_images", measured)
    arguments = small_run(tmp_path / "run", "--dry-run", init="deep_impulse",
                          model__options__patch_size="2", model__options__embed_dim="48")
    assert train_program.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    init = next(number for number, line in enumerate(lines) if line.startswith("init "))
    (mass, images), = found
    assert lines[init + 1] == f"mass    {mass}, on {len(images)} training images"
    assert lines[init + 2].startswith("batch ") and images.shape == (51, 3, 8, 8)    # all there are

    assert train_program.main(small_run(tmp_path / "run", init="default",
                                        schedule__epochs="1")) == 0
    assert train_program.main(small_run(tmp_path / "tuned", "--dry-run", "--set",
                                        f"init.checkpoint={tmp_path / 'run'}", init="mimetic")) == 0
    printed = capsys.readouterr().out
    assert "\nstart   " in printed and "mass  " not in printed
