"""Checkpoints are written completely or not at all, and read without running code."""

import argparse
import json
import os
import pickle
import re
import resource
import shlex
import subprocess
import sys
import warnings
import zipfile
from collections import defaultdict
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from forks import Fork
from refused import refused
from same_run import assert_identical

from vitinit.base.files import CheckpointError, Damaged, FileError, write_text_atomically
from vitinit.runs import calibration, checkpoint as checkpoint_module
from vitinit.runs.checkpoint import (
    Unread,
    model_state,
    read_checkpoint,
    read_checkpoint_file as load,
    stored_tensors,
    without_prefix,
)
from vitinit.runs.folder import save_atomically


def test_a_file_that_outgrows_its_limit_is_one_line_and_leaves_nothing_behind(tmp_path):
    """The operating system's error comes while torch is writing, as it does on a full disk."""
    path = tmp_path / "a.pt"
    save_atomically({"step": 1}, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(FileError, match=r"a\.pt: cannot be written: File too large"):
            save_atomically({"weights": [torch.ones(5_003)] + [torch.ones(50_021)] * 3}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load(path) == {"step": 1} and os.listdir(tmp_path) == ["a.pt"]


def test_a_pipe_and_a_folder_whose_name_is_not_utf_8_are_written_to(tmp_path):
    """Also one without a name of its own, as /dev/stdout is in `eval.py --json /dev/stdout | …`."""
    reader, writer = os.pipe()
    os.symlink(f"/dev/fd/{writer}", tmp_path / "out")
    for place in (Path(f"/dev/fd/{writer}"), tmp_path / "out"):
        write_text_atomically("seven", place)
        assert os.read(reader, 100) == b"seven"
    os.close(reader), os.close(writer)
    assert os.listdir(tmp_path) == ["out"]
    path = tmp_path / os.fsdecode(b"caf\xe9") / "last.pt"
    path.parent.mkdir()
    save_atomically({"model": {"a": torch.arange(3)}}, path)
    for mmap in (False, True):
        assert load(path, mmap=mmap)["model"]["a"].tolist() == [0, 1, 2]


def test_of_two_programs_that_write_temperatures_at_once_none_loses_the_others(
    tmp_path, monkeypatch
):
    """One ends while the other computes its digest, and has to wait while it reads and writes; not
    so on Windows, which has no such locks."""
    first, second = ({"a": torch.full((3,), value)} for value in (1.0, 2.0))
    digest, read = calibration.weights_digest, calibration.read_rows

    def digest_meanwhile(tensors):
        if tensors is first:
            calibration.add_row({"temperature": 2.0}, second, tmp_path)
        return digest(tensors)

    def read_locked(folder):
        assert (folder / "calibration.lock").exists()
        return read(folder)

    monkeypatch.setattr(calibration, "weights_digest", digest_meanwhile)
    monkeypatch.setattr(calibration, "read_rows", read_locked)
    calibration.add_row({"temperature": 1.0}, first, tmp_path)
    assert [row["temperature"] for row in read(tmp_path).values()] == [2.0, 1.0]
    assert os.listdir(tmp_path) == ["calibration.json"]
    monkeypatch.setattr(calibration, "read_rows", read)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    calibration.add_row({"temperature": 3.0}, second, tmp_path)
    assert [row["temperature"] for row in read(tmp_path).values()] == [3.0, 1.0]


def test_whatever_byte_changes_the_checkpoint_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    save_atomically({"weights": torch.arange(1009.0), "names": ["alpha", "beta"]}, path)
    content = path.read_bytes()
    for place in (
        content.index(torch.arange(500.0, 520.0).numpy().tobytes()),
        content.index(b"alpha"),
        content.index(b"PK\x01\x02") + 17,
    ):  # the directory
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        line = refused(Damaged, load, path)
        assert line.startswith((f"{path}: damaged after", f"{path}: not a readable"))
        assert len(line) < len(str(path)) + 130


@pytest.mark.parametrize("mmap", [False, True])
def test_a_tensor_whose_bytes_are_fewer_or_more_than_its_shape_says_is_refused(mmap, tmp_path):
    """Checksums are right, as of an archive that was packed again; two tensors are equally long."""
    path, other = tmp_path / "a.pt", tmp_path / "b.pt"
    weights = {name: torch.full((6, 7), 1.5) for name in "ab"} | {"none": torch.zeros(0)}
    torch.save({"model": weights, "again": weights["a"][2:]}, path)
    assert load(path, mmap=mmap)["again"].shape == (4, 7)
    for change in (lambda content: content[:84], lambda content: content + bytes(84)):
        with zipfile.ZipFile(path) as sound, zipfile.ZipFile(other, "w") as packed:
            for part in sound.namelist():
                content = sound.read(part)
                packed.writestr(part, change(content) if part.endswith("data/0") else content)
        assert refused(Damaged, load, other, mmap=mmap).startswith(f"{other}: ")


def test_files_that_are_no_checkpoints_are_one_line_and_run_nothing(tmp_path, recwarn):
    path = tmp_path / "a.pt"
    for content, why in (
        (b"", "no pickle"),
        (b"not a checkpoint", "no pickle of tensors and plain values"),
        (b"PK\x03\x04 torn", "a damaged archive, or one cut"),
        (pickle.dumps({"a": 1}, protocol=4), "no pickle"),
        (None, "it asks for posixpath.join, and only tensors and plain values are read"),
    ):
        torch.save({"model": os.path.join}, path)
        if content is not None:
            path.write_bytes(content)
        assert refused(Damaged, load, path).startswith(f"{path}: not a readable checkpoint ({why}")
        assert not recwarn.list
    torch.save([1, 2], path)
    assert "holds a list, expected a dictionary" in refused(Damaged, load, path)
    torch.save({"a": json.loads(99 * "[" + 99 * "]")}, path)
    assert "its tables are nested too deeply" in refused(Damaged, load, path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:  # which may fill the memory
        packed.writestr("a/data.pkl", bytes(2**20))
    assert "holds 1,048,576 bytes in a file of fewer" in refused(Damaged, load, path)
    assert refused(CheckpointError, load, tmp_path / "b.pt").endswith("b.pt: no such checkpoint")


def test_safetensors_are_read_and_shards_from_the_indexs_own_folder_alone(tmp_path):
    from safetensors.torch import save_file

    folder = tmp_path / "theirs"
    folder.mkdir()
    for place in (folder / "1.safetensors", tmp_path / "out.safetensors"):
        save_file({"a": torch.arange(3.0), "not named": torch.ones(1)}, place)
        assert torch.equal(model_state(load(place), place)["a"], torch.arange(3.0))
    torch.save({"b": torch.arange(5.0)}, folder / "2.bin")
    index = folder / "model.safetensors.index.json"
    for files, problem in (
        ({"a": "1.safetensors", "b": "2.bin"}, ""),
        ({"a": "1.safetensors", "b": "3.bin"}, "3.bin: no such checkpoint"),
        ({"a": "1.safetensors", "b": "1.safetensors"}, "names b in 1.safetensors, which"),
        *(
            ({"a": file}, f"index.json: names {file}, expected a file of tensors in the same")
            for file in ("../out.safetensors", f"{tmp_path}/out.safetensors", index.name)
        ),
        ([], "index.json: not a readable checkpoint"),
    ):
        index.write_text(json.dumps({"weight_map": files}))
        if problem:
            assert problem in refused(CheckpointError, load, index)
        else:
            assert {name: len(value) for name, value in load(index).items()} == {"a": 3, "b": 5}


def test_a_model_is_found_under_every_name_and_the_average_is_not_the_model(tmp_path):
    """As DeiT's code, timm and wrappers write them, a Namespace beside; or a bare state dict."""
    model, average = {"blocks.0.w": torch.ones(2)}, {"blocks.0.w": torch.zeros(2)}
    for state in (
        {"model": model, "ema": {"model": average, "updates": 3}},
        {"state_dict": model, "state_dict_ema": average, "args": argparse.Namespace(lr=1)},
        {"model": model, "model_ema": average},
        model,
    ):
        torch.save(state, tmp_path / "a.pth")
        state = load(tmp_path / "a.pth")
        assert torch.equal(model_state(state, tmp_path)["blocks.0.w"], torch.ones(2))
        if state.keys() != model.keys():
            assert torch.equal(model_state(state, tmp_path, "ema")["blocks.0.w"], torch.zeros(2))
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(3, 2)).state_dict()
    for state in (
        *({key: averaged} for key in checkpoint_module.CONTAINERS),
        averaged,
        {"teacher": {"model": averaged}, "student": 0, "model": "vit", "module": 7},
    ):
        assert [*model_state(state, tmp_path)] == ["weight", "bias"]
    assert [*model_state({"ema": averaged}, tmp_path, "ema")] == ["weight", "bias"]


def test_of_several_networks_in_a_file_the_one_that_its_authors_evaluate_is_read(tmp_path):
    """I-JEPA's target encoder; and MoCo-v3's base encoder, without the layers of its projection."""
    target, other = torch.ones(2), torch.zeros(2)
    jepa = {"encoder": {"norm.bias": other}, "predictor": {"norm.bias": other}, "epoch": 7}
    moco = {
        f"module.{network}.{name}": target if network == "base_encoder" else other
        for network in ("momentum_encoder", "base_encoder", "predictor")
        for name in ("norm.bias", "head.0.weight")
    }
    for state in (
        {**jepa, "target_encoder": {"module.norm.bias": target}},
        {"state_dict": moco},
        {"weights": {"w": other}, "params": {"norm.bias": target}},
        {"params": {"norm.bias": other}, "net": {"norm.bias": target}},
        {"net": {"norm.bias": other}, "state_dict": {"norm.bias": target}},
    ):
        torch.save(state, tmp_path / "a.pt")
        tensors = model_state(load(tmp_path / "a.pt"), tmp_path)
        assert [*tensors] == ["norm.bias"] and torch.equal(tensors["norm.bias"], target)


def test_the_command_that_a_refused_folder_names_makes_it_readable(tmp_path):
    """torch's is run. DeepSpeed is not installed here; its files are recognised by their names."""
    folder, weights = tmp_path / "a run", {"norm.bias": torch.arange(3.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process, and no process group
        torch.distributed.checkpoint.save({"model": weights}, checkpoint_id=folder)
    line = refused(CheckpointError, read_checkpoint, folder)
    command = re.search("written by python (.*) \\(which may run code in what it reads", line)
    assert subprocess.run([sys.executable, *shlex.split(command[1])]).returncode == 0
    state, path = read_checkpoint(tmp_path / "a run.pt")
    assert_identical(model_state(state, path), weights)
    step = tmp_path / "deepspeed" / "step7"
    step.mkdir(parents=True)
    (step / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    for place, words in ((step.parent, ""), (step, " --tag step7")):
        line = refused(CheckpointError, read_checkpoint, place)
        whole = f"{step.parent} {place}-whole{words} (which may run"
        assert f"written by python -m deepspeed.utils.zero_to_fp32 {whole}" in line


@pytest.mark.parametrize("kind", ["beside", "in the model", "bare"])
def test_weights_beside_objects_are_refused_and_the_command_named_writes_them_alone(kind, tmp_path):
    """As Lightning writes settings of OmegaConf, and others a defaultdict."""
    path, weights = tmp_path / "it's one.ckpt", {"norm.bias": torch.arange(3.0)}
    settings = defaultdict(list, lr=[1.0])
    written = {
        "beside": {"state_dict": weights, "settings": settings},
        "in the model": {"model": defaultdict(list, weights), "epoch": 3},
        "bare": weights | {"settings": settings},
    }
    torch.save(written[kind], path)
    line = refused(Damaged, load, path)
    assert "it asks for collections.defaultdict, and only tensors and plain values are" in line
    command = re.search("written by python -c (.*) \\(which may run code in what it reads", line)
    code, *words = shlex.split(command[1])

    def as_main() -> None:  # what Python does with -c, where torch need not be imported anew
        sys.argv = ["-c", *words]
        exec(code, {"__name__": "__main__"})

    Fork(as_main, tmp_path / "fork").ended()
    alone = tmp_path / "it's one.weights.pt"
    assert_identical(stored_tensors(load(alone), alone, "model"), weights)


@pytest.mark.parametrize(
    "names, prefix, without",
    [
        ("module._orig_mod.module_.w", "module._orig_mod.", "module_.w"),
        ("model.net.norm.bias model.net.head.bias", "model.net.", "norm.bias head.bias"),
        ("encoder.encoder.ln.bias encoder.class_token", "encoder.", "encoder.ln.bias class_token"),
        ("encoder.layer.0.norm1.bias embeddings.cls_token", "", None),  # transformers'
        ("encoder.ln.bias class_token heads.head.bias", "", None),  # torchvision's
        ("model.norm.bias criterion.weight", "", None),
        ("head.bias", "", None),
        ("model.head.bias model.norm.bias head.bias", "", None),
    ],
)  # two would become one
def test_a_prefix_of_all_names_or_all_but_the_classifiers_is_taken_off(names, prefix, without):
    assert without_prefix(names.split()) == (prefix, (without or names).split())
    assert [*model_state(dict.fromkeys(names.split(), torch.ones(1)), Path("a.pt"))] == (
        without or names
    ).split()


def test_what_programs_keep_beside_weights_is_not_read_and_does_no_harm(tmp_path):
    beside = {
        "best": np.float64(0.5),
        "epoch": np.int32(3),
        "random": np.random.get_state(),
        "root": tmp_path,
        "other": PurePosixPath("a/b"),
        "kind": np.dtype("float32"),
        "args": argparse.Namespace(out=tmp_path, lr=np.float32(1)),
    }
    torch.save({"model": {"w": torch.ones(2)}} | beside, tmp_path / "a.pt")
    state = load(tmp_path / "a.pt")
    assert [*model_state(state, tmp_path)] == ["w"]
    assert {type(state[key]) for key in beside if key != "random"} == {Unread}


WEIGHT = torch.ones(3, 5)


@pytest.mark.parametrize(
    "value, fault",
    [
        (WEIGHT.to(torch.int8), "torch.int8"),
        (WEIGHT.long(), "torch.int64"),
        (WEIGHT.bool(), "torch.bool"),
        (WEIGHT.to(torch.complex64), "torch.complex64"),
        (WEIGHT.to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
        (WEIGHT.to("meta"), "meta"),
        (WEIGHT.to_sparse(), "sparse"),
        (torch.ones(1).expand(2**20, 2**20), "by its stride (0, 0)"),
        (torch.tensor([1.0, torch.inf]), "not finite"),
        (torch.tensor([1.0, torch.nan]), "not finite"),
    ],
)
def test_a_weight_that_is_none_is_refused_by_its_name_and_counters_are_read(value, fault, tmp_path):
    counters = {
        "bn.num_batches_tracked": torch.tensor(2**40),
        "position_ids": torch.arange(5),
        "attn.relative_position_index": torch.zeros(2, 3, dtype=torch.int32),
    }
    weights = {"b.num_batches_tracked": WEIGHT, "half": 60_000 * WEIGHT.half()}  # sum: infinite
    torch.save(counters | weights, tmp_path / "a.pt")
    assert len(model_state(load(tmp_path / "a.pt"), tmp_path / "a.pt")) == 5
    torch.save(counters | {"bn.w": value}, tmp_path / "a.pt")
    line = refused(CheckpointError, model_state, load(tmp_path / "a.pt"), tmp_path / "a.pt")
    assert line.startswith(f"{tmp_path}/a.pt: model 'bn.w' is ") and fault in line


def test_a_checkpoint_without_that_model_is_one_line(tmp_path):
    own = {"model": {"w": torch.ones(2)}}
    for state, name in (
        ({"step": 3}, "model"),
        (own | {"ema": None}, "ema"),
        (own | {"ema": {}}, "ema"),
        (own | {"ema": torch.ones(2)}, "ema"),
    ):
        line = refused(CheckpointError, model_state, state, tmp_path / "a.pt", name)
        assert "a.pt: no model in it; " in line and f" key '{name}'" in line
