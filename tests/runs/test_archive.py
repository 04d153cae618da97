"""Runs come out of an archive as they went in, and nothing else does."""

from __future__ import annotations

import io
import lzma
import os
import sys
import tarfile
from pathlib import Path

import pytest

from vitinit.runs.folder import RunFolder
from vitinit.runs.records import FILES, LARGEST, read_runs, write_archive
from vitinit.train.checkpoint import CheckpointError


def chosen(*paths: Path) -> list[str]:
    """The paths of the runs, as a user knows them, without the folder that all tests share."""
    return ["/".join(run.path.parts[-2:]) for run in read_runs(paths)]


@pytest.fixture
def packed(written_run, tmp_path) -> Path:
    """An archive of the runs `b-s10`, `a-s2` and `a-s1`, written in this order."""
    write_archive(read_runs([written_run("b-s10", [3.0], seed=10, init="impulse"),
                             written_run("a-s2", [2.0], seed=2),
                             written_run("a-s1", [1.0], seed=1)]),
                  tmp_path / "runs.tar.xz")
    return tmp_path / "runs.tar.xz"


def test_paths_of_the_machine_stay_out(written_run, tmp_path, monkeypatch):
    """Those of the data and of the program. What else the run records of both is packed."""
    monkeypatch.setattr(sys, "argv", ["/home/somebody/train.py", "--set", "data.root=/home/data"])
    run = written_run("a-s1", [1.0])
    images = {"training images": 3, "root": r'/home/somebody/"my" images'}
    RunFolder(run).record_start(tmp_path, processes=1, device="CPU", data=images)
    write_archive(read_runs([run]), tmp_path / "runs.tar.xz")
    found, = read_runs([tmp_path / "runs.tar.xz"])
    expected = RunFolder(run).starts()
    assert expected[-1]["data"].pop("root") == images["root"]
    expected[-1]["command"] = ["train.py", "--set", "data.root=data"]
    assert found.starts == expected


def test_the_same_runs_give_the_same_bytes_and_what_is_in_their_folders(packed, tmp_path):
    """In another order, at another time, with other permissions, and from an archive."""
    again = tmp_path / "again.tar.xz"
    for name in FILES:
        os.utime(tmp_path / "a-s1" / name, (7, 7))
        os.chmod(tmp_path / "a-s2" / name, 0o600)
    (tmp_path / "a-s1" / "last.pt").write_bytes(b"weights")
    folders = [tmp_path / name for name in ("a-s1", "b-s10", "a-s2")]
    for runs in (folders, [packed]):
        write_archive(read_runs(runs), again)
        assert again.read_bytes() == packed.read_bytes()
    for found, run in zip(read_runs([packed]), read_runs(sorted(folders)), strict=True):
        assert (found.keys, found.rows, found.starts) == (run.keys, run.rows, run.starts)
        assert found.path == packed / run.path.name
    with tarfile.open(packed) as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == [f"{run}/{file}" for run in
                                                   ("a-s1", "a-s2", "b-s10") for file in FILES]
    assert {(one.mtime, one.uid, one.gid, one.uname, one.gname, one.mode) for one in members} == {
        (0, 0, 0, "", "", 0o644)}


def test_a_path_is_a_folder_an_archive_or_an_archive_with_a_pattern(packed, tmp_path, monkeypatch,
                                                                    written_run):
    all_runs = ["runs.tar.xz/a-s1", "runs.tar.xz/a-s2", "runs.tar.xz/b-s10"]
    assert chosen(packed) == all_runs
    assert chosen(packed / "b-*", packed / "a-s2") == [all_runs[2], all_runs[1]]
    assert chosen(packed / "*-s[12]", tmp_path / "a-s1")[:2] == all_runs[:2]
    monkeypatch.chdir(tmp_path)
    assert chosen(Path("runs.tar.xz/a-s1")) == all_runs[:1]
    # A name that looks like a pattern is a name.
    out = tmp_path / "odd.tar.xz"
    write_archive(read_runs([written_run("a[1]", [1.0]), written_run("a1", [1.0], seed=1)]), out)
    assert chosen(out / "a[1]") == ["odd.tar.xz/a[1]"] and chosen(out / "?1") == ["odd.tar.xz/a1"]


# ---------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------


def refused(*paths: Path) -> str:
    """The one line by which reading these paths is refused."""
    with pytest.raises(CheckpointError) as caught:
        read_runs(paths)
    message = str(caught.value)
    assert message.startswith(str(paths[-1])) and "\n" not in message
    return message.removeprefix(f"{paths[-1]}").lstrip(": ")


def written(path: Path, *members: tarfile.TarInfo) -> Path:
    """An .xz file with these members; each regular file contains zeros."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for one in members:
            tar.addfile(one, io.BytesIO(bytes(one.size)))
    path.write_bytes(lzma.compress(content.getvalue()))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, **values: object) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type = kind
    for key, value in values.items():
        setattr(found, key, value)
    return found


def test_anything_but_the_files_of_runs_is_refused(tmp_path):
    for stranger in (
            member("recipe.toml"), member("a/last.pt"), member("a/b/recipe.toml"),
            member("a", tarfile.DIRTYPE), member("a/run.json", tarfile.SYMTYPE,
                                                 linkname="/etc/passwd"),
            member("b/run.json", tarfile.LNKTYPE, linkname="a/recipe.toml"),
            member("a/run.json", tarfile.FIFOTYPE), member("a/run.json", size=LARGEST + 1),
            # A sparse file: few bytes here, a gigabyte once it is read.
            member("a/run.json", pax_headers={"GNU.sparse.map": "0,0",
                                              "GNU.sparse.size": "1000000000"})):
        path = written(tmp_path / "a.tar.xz", member("a/recipe.toml", size=3), stranger)
        assert refused(path) == (f"contains {stranger.name}, expected nothing but "
                                 "<run>/metrics.jsonl, <run>/recipe.toml, <run>/run.json, of at "
                                 "most 16,777,216 bytes")


def test_what_is_no_archive_is_refused(tmp_path, packed):
    path, content = tmp_path / "x.tar.xz", packed.read_bytes()
    for wrong in (b"seed = 1\n", b"", content[:-50], lzma.compress(b"x" * 2000),
                  content[:300] + bytes([content[300] ^ 1]) + content[301:],
                  lzma.compress(lzma.decompress(content)[:700])):
        path.write_bytes(wrong)
        assert refused(path).startswith("not an archive of runs (")
    written(path, member("a/recipe.toml"), member("a/metrics.jsonl", size=3))
    assert refused(path).startswith("/a/recipe.toml: run.seed is None")
    assert refused(tmp_path / "a-s1", packed / "c-*") == (
        "none of the 3 run(s) in the archive has such a name; it holds a-s1, a-s2, b-s10")


def test_what_cannot_be_packed_is_refused(packed, tmp_path, written_run):
    before = packed.read_bytes()
    (tmp_path / "other").mkdir()
    twin = written_run("other/a-s1", [1.0])
    for runs, out, message in (
            (["a-s1", "other/a-s1"], packed,
             f"{twin}: called a-s1 like {tmp_path / 'a-s1'}; in an "),
            (["a-s1"], tmp_path / "a-s2", f"{tmp_path / 'a-s2'}: not the name of an archive"),
            (["a-s1"], tmp_path / "no" / "a.tar.xz",
             "no/a.tar.xz: cannot be written: No such file")):
        with pytest.raises(CheckpointError) as caught:
            write_archive(read_runs([tmp_path / name for name in runs]), out)
        assert message in str(caught.value)
    assert packed.read_bytes() == before and (tmp_path / "a-s2" / "recipe.toml").exists()
