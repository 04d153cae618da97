"""Published weights by name: fetched once, checked by their hash, and refused in one line."""

import errno
import hashlib
import os
from io import FileIO
from pathlib import Path

import pytest
import torch
from same_run import checkpoint

from vitinit.base.files import CheckpointError, NoCheckpoint
from vitinit.models import build_model
from vitinit.runs import load
from vitinit.runs.load import Weights, by_name, fetch_published, kept_file

OPTIONS = dict(pool="mean", patch_size=4, embed_dim=12, depth=2, num_heads=3)


class OnFullDisk(FileIO):
    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def weights(tmp_path, monkeypatch) -> Weights:
    """Small weights in a folder that stands for DeiT's address; torch.hub's folder is empty."""
    model = build_model("vit_tiny", num_classes=7, image_size=8, **OPTIONS)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(3))
    torch.save({"model": model.state_dict()}, tmp_path / "made.pth")
    digest = hashlib.sha256((tmp_path / "made.pth").read_bytes()).hexdigest()
    offered = Weights(f"small-{digest[:8]}.pth", "vit_tiny")
    (tmp_path / "web").mkdir()
    (tmp_path / "made.pth").rename(tmp_path / "web" / offered.file)
    monkeypatch.setattr(load, "ADDRESS", (tmp_path / "web").as_uri() + "/")
    monkeypatch.setitem(load.PUBLISHED, "deit_tiny", offered)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    return offered


def test_a_run_fetches_them_once_and_starts_from_them(
    train_program, small_run, weights, tmp_path, monkeypatch, capsys
):
    changes = dict(
        init__checkpoint="deit_tiny",
        schedule__epochs="1",
        schedule__warmup_epochs="0",
        checkpoint__keep_epochs="[0]",
    )

    def run(name: str, **more: str) -> list[str]:
        return small_run(tmp_path / name, init="default", **changes | more)

    assert train_program.main([*run("dry"), "--dry-run"]) == 2  # which fetches nothing
    kept = kept_file(weights)
    assert f"expected its weights at {kept}" in capsys.readouterr().err and not kept.exists()
    assert train_program.main(run("first")) == 0
    assert f"fetch   {load.ADDRESS}{weights.file} → {kept}" in capsys.readouterr().out
    started = checkpoint(tmp_path / "first", "epoch_0000.pt")["model"]
    for name, value in torch.load(kept)["model"].items():
        assert torch.equal(started[name], value) == (not name.startswith("head")), name
    monkeypatch.setattr(load, "ADDRESS", "file:///gone/")  # from now on it is there
    assert by_name(kept.relative_to(kept.parent).with_name("deit_tiny")) == kept
    assert train_program.main(run("second")) == 0
    assert train_program.main(run("other", model__name="vit_small")) == 2
    assert "of a vit_tiny, with model.name = vit_small" in capsys.readouterr().err
    (tmp_path / "deit_tiny").mkdir()  # a path goes first
    monkeypatch.chdir(tmp_path)
    assert train_program.main(run("path")) == 2
    assert "deit_tiny: holds no checkpoint" in capsys.readouterr().err


def test_only_a_mere_name_at_which_nothing_exists_is_a_models(weights, tmp_path, monkeypatch):
    kept = kept_file(weights)
    kept.parent.mkdir(parents=True)
    kept.touch()
    monkeypatch.chdir(tmp_path)
    boxed = next(folder.name for folder in load.BOXED.iterdir() if folder.is_dir())
    for name, model in (("deit_tiny", kept), (boxed, load.BOXED / boxed), ("mine", Path("mine"))):
        assert by_name(Path(name)) == model
        assert by_name(Path("runs", name)) == Path("runs", name)
        Path(name).mkdir()
        assert by_name(Path(name)) == Path(name)


@pytest.mark.parametrize(
    "trouble, reason",
    [
        ("wrong hash", "invalid hash value"),
        ("full disk", "No space left on device"),
        ("no network", "Connection refused"),
        ("no file", "No such file"),
    ],
)
def test_what_cannot_be_fetched_is_one_line_and_leaves_no_file(
    trouble, reason, weights, tmp_path, monkeypatch
):
    if trouble == "wrong hash":
        (tmp_path / "web" / weights.file).write_bytes(b"a page that says: not found")
    elif trouble == "full disk":
        monkeypatch.setattr(torch.hub, "open", OnFullDisk, raising=False)
    else:
        monkeypatch.setattr(
            load,
            "ADDRESS",
            "http://127.0.0.1:9/"
            if trouble == "no network"
            else (tmp_path / "nowhere").as_uri() + "/",
        )
    with pytest.raises(CheckpointError) as caught:
        fetch_published(weights)
    message, kept = str(caught.value), kept_file(weights)
    assert reason in message and f"put the file at {kept}, or give the path of one" in message
    assert "\n" not in message and not list(kept.parent.glob("*"))
    with pytest.raises(NoCheckpoint):
        by_name(kept.relative_to(kept.parent).with_name("deit_tiny"))
