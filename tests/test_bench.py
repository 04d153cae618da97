"""The measurements run and count what they claim to; how fast anything is, is not tested."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import vitinit
from vitinit.bench import __main__ as bench
from vitinit.bench import corrupt
from vitinit.bench.launches import launches_of
from vitinit.bench.listing import grow_tree, scan
from vitinit.bench.pixels import decibels
from vitinit.bench.memory import saved_bytes
from vitinit.data.datasets import ImageFolder
from vitinit.data.images import DataError
from vitinit.filters import ordered_offsets
from vitinit.init.impulse import normalised_positions
from vitinit.mixing import target_mass
from vitinit.models.attention import attention_weights


@pytest.fixture(autouse=True)
def threads():
    """Restore torch's number of threads, which the loader's measurement sets to 1."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(capsys, *arguments: object) -> str:
    assert bench.main(list(map(str, arguments))) == 0
    return capsys.readouterr().out


def refusal(capsys, *arguments: object) -> str:
    assert bench.main(list(map(str, arguments))) == 2
    line, = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("amp, wide", [("off", 4), ("bf16", 2)])
def test_saved_bytes_are_those_that_each_layer_needs_for_the_backward_pass(amp, wide):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 5 * 7, 11),
                                torch.nn.GELU(), torch.nn.Linear(11, 13))
    model.drop_path_rates = ()
    # The inputs of both products and of GELU; log-softmax and targets, which stay in float32.
    expected = wide * (105 + 11 + 11) + 4 * (13 + 13)
    copy = 2 * 11 * 13 if amp == "bf16" else 0       # bf16 copy of the second weight only
    for count in (2, 3):
        assert saved_bytes(model, torch.zeros(count, 3, 5, 7), amp) == count * expected + copy


def test_memory_says_how_many_images_of_a_recipe_fit(capsys):
    half, tenth = (run(capsys, "memory", "--recipe", "quickstart", "--card-gib", gib)
                   for gib in (1, 0.1))
    assert re.search(r"quickstart +1\.5 MiB per image at amp off, 0\.01 GiB .* of 50 images at most "
                     r"50 in half of 1 GiB", half)
    # 50 images need more than the 42 MiB that are left; 10 is the next even divisor of 50.
    assert "at most 10 in half of 0.1 GiB" in tenth
    assert "MiB per image" in run(capsys, "memory", "--recipe", "photos")   # of any number of classes
    assert re.search("^vitinit.bench: .*no-such-recipe",
                     refusal(capsys, "memory", "--recipe", "no-such-recipe"))


def test_of_a_weight_that_muon_trains_one_moment_is_counted_and_not_two(capsys, repository, tmp_path):
    """ViT-B's blocks have 12 · 12 · 768² weights in matrices, of 4 bytes per moment."""
    text = (repository / "recipes" / "deit_base.toml").read_text(encoding="utf-8")
    gib = []
    for name in ("adamw", "muon"):
        recipe = tmp_path / f"{name}.toml"
        recipe.write_text(text.replace('name = "adamw"', f'name = "{name}"'), encoding="utf-8")
        printed = run(capsys, "memory", "--recipe", recipe, "--card-gib", 100)
        gib.append(float(re.search(r"([\d.]+) GiB of weights", printed)[1]))
    assert gib[0] - gib[1] == pytest.approx(4 * 12 * 12 * 768**2 / 2**30, abs=0.011)


def test_the_loader_is_measured_beside_torchvisions_pipeline(capsys, image_tree):
    printed = run(capsys, "loader", "--data-dir", image_tree, "--image-size", 8)
    assert "72 images to 8 px" in printed           # 3 × (17 + 7)
    assert re.search(r"workers' part.* % of decoding alone, \d+\.\d\d × torchvision's", printed)
    assert re.search(r"µs per image between processes", printed)
    assert re.search(r"torchvision's whole pipeline on Pillow +\d+$", printed.strip())


def test_a_folder_without_images_is_refused_in_one_line(capsys, tmp_path):
    assert "no images in" in refusal(capsys, "loader", "--data-dir", tmp_path)


def test_the_devices_part_of_augmentation_is_measured(capsys):
    printed = run(capsys, "augment", "--batch", 3, "--image-size", 16)
    for part in ("RandAugment", "normalise", "erase", "mixup", "all, as in training"):
        assert re.search(rf"^{part} +\d+\.\d\d$", printed, flags=re.MULTILINE)


def test_operations_except_views_are_counted_and_copies_by_their_direction():
    with FakeTensorMode():
        host = torch.zeros(3, 5)

        def action() -> None:
            there = host.to("cuda:0").view(5, 3)[1:].t()             # one copy, three views
            there += 1
            there.copy_(torch.ones(3, 4))                            # a constant and a copy
            (there * 2).cpu()
        launches = launches_of(action)
    assert launches.by_name == {"aten::_to_copy": 2, "aten::add_.Tensor": 1, "aten::copy_": 1,
                                "aten::ones": 1, "aten::mul.Tensor": 1}
    assert (launches.count, launches.uploads, launches.downloads) == (6, 2, 1)


def test_a_step_is_measured(capsys):
    printed = run(capsys, "step", "--model", "vit_tiny", "--batch", 2, "--image-size",
                  32, "--amp", "off")
    assert re.search(r"\d images/s, .* ms per step, peak memory \d", printed)


def test_a_step_fed_from_files_is_compared_with_the_synthetic_one(monkeypatch, capsys,
                                                                  image_tree):
    printed = run(capsys, "step", "--model", "vit_tiny", "--batch", 2, "--image-size",
                  32, "--amp", "off", "--data-dir", image_tree, "--workers", 1)
    assert re.search(r"from 72 files with 1 workers: .* [+-]\d+\.\d % of the synthetic", printed)


def test_inits_are_measured_against_the_transcription(capsys):
    printed = run(capsys, "init", "--model", "vit_tiny")
    assert "the same transcribed (D×D SVDs), once" in printed and "times as long" in printed


def test_what_the_init_bench_measures_works():
    """The timed call really initialises the model: its heads attend to their offsets."""
    model = vitinit.build_model("vit_tiny", num_classes=7, image_size=32, patch_size=4, depth=1)
    vitinit.init_weights(model, "impulse", generator=torch.Generator().manual_seed(0),
                         value_init="base")
    positions, attention = normalised_positions(model), model.blocks[0].attn
    weights = attention_weights(positions @ attention.q_weight.mT, positions @ attention.k_weight.mT)
    assert target_mass(weights, ordered_offsets(3)[:3], model.grid).min() > 0.9


def test_operations_are_measured_beside_pillows(capsys, image_tree):
    printed = run(capsys, "pixels", "--data-dir", image_tree, "--image-size", 23,
                  "--count", 5, "--rounds", 1)
    assert "5 photographs at 23 px, 1 draws each" in printed
    assert re.search(r"^one of the ten on colours +100\.0 % +inf dB +0$", printed, flags=re.MULTILINE)
    assert len(re.findall(r"^(?:one|two) of.*|^one geometric.* dB +[01]$", printed, re.MULTILINE)) == 5


def test_decibels_are_those_of_the_mean_square():
    one, two = torch.zeros(3, 7, 5, dtype=torch.uint8), torch.full((3, 7, 5), 255, dtype=torch.uint8)
    assert decibels(one, two) == 0 and decibels(one, one) == float("inf")
    assert decibels(one, one + 1) == pytest.approx(48.1308, abs=1e-4)       # 20 log10(255)


def test_broken_files_are_counted_by_format(capsys):
    printed = run(capsys, "corrupt", "--count", 272, "--workers", 2)
    counts = [int(count) for count in printed.splitlines()[-1].split()[1:]]
    assert "272 broken files, seed 0" in printed and sum(counts[:2]) == 272
    assert counts[2:5] == [0, 0, 0]


def test_files_that_crash_or_hang_the_process_are_detected(monkeypatch, tmp_path):
    def decode(path: str) -> None:
        match int(path):
            case 3:
                os.kill(os.getpid(), signal.SIGKILL)
            case 5:
                time.sleep(600)
            case 7:
                raise DataError("another.jpg: broken")
            case 8:
                raise KeyError("no DataError")
            case 9:
                os.write(2, b"libimage: warning\n")
            case even if even % 2 == 0:
                raise DataError(f"{path}: broken")
    monkeypatch.setattr(corrupt, "PATIENCE", 1.0)
    found = corrupt.outcomes(decode, [str(number) for number in range(12)], workers=1)
    assert [result.kind for result in found] == [
        "refused", "decoded", "refused", "signal", "refused", "hung", "refused", "traceback",
        "traceback", "decoded", "refused", "decoded"]
    assert found[9].printed == "libimage: warning\n" and not found[11].printed
    assert "-9" in found[3].words


def test_a_listing_is_measured_beside_scandir_and_torchvisions(capsys):
    printed = run(capsys, "listing", "--files", 23, "--folders", 5)
    assert "23 files in 5 folders" in printed
    assert re.findall(r"^(scandir|ours|torchvision)", printed, re.MULTILINE) == [
        "scandir", "ours", "torchvision"]


def test_the_tree_that_is_listed_has_as_many_files_as_asked_for(tmp_path):
    grow_tree(tmp_path, files=23, folders=5)
    assert len(ImageFolder(tmp_path)) == scan(str(tmp_path)) == 23
