"""Runs come out of an archive as they went in, and nothing else does."""

from __future__ import annotations

import io
import json
import lzma
import os
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from vitinit.runs import archive
from vitinit.runs.archive import FILES, Place, opened, write_archive
from vitinit.runs.folder import RunFolder
from vitinit.runs.groups import finished_groups, read_at
from vitinit.train.checkpoint import CheckpointError


def places(*folders: Path) -> list[Place]:
    return [Place(folder, folder) for folder in folders]


def chosen(*paths: Path) -> list[str]:
    """The paths of the runs, as a user knows them, without the folder that all tests share."""
    with opened(paths) as found:
        return ["/".join(place.path.parts[-2:]) for place in found]


@pytest.fixture
def packed(written_run, tmp_path) -> Path:
    """An archive of the runs `b-s10`, `a-s2` and `a-s1`, written in this order."""
    runs = [written_run("b-s10", [3.0], seed=10, init="impulse"), written_run("a-s2", [2.0], seed=2),
            written_run("a-s1", [1.0], seed=1)]
    write_archive(places(*runs), tmp_path / "runs.tar.xz")
    return tmp_path / "runs.tar.xz"


def test_paths_of_the_machine_stay_out(written_run, tmp_path, monkeypatch):
    """Those of the data and of the program. What else the run records of both is packed."""
    monkeypatch.setattr(sys, "argv", ["/home/somebody/train.py", "--seed", "1"])
    run = written_run("a-s1", [1.0])
    images = {"training images": 3, "root": r'/home/somebody/"my" images'}
    RunFolder(run).record_start(tmp_path, processes=1, device="CPU", data=images)
    write_archive(places(run), tmp_path / "runs.tar.xz")
    with opened([tmp_path / "runs.tar.xz"]) as [place]:
        starts = RunFolder(place.folder).starts()
    expected = RunFolder(run).starts()
    assert expected[-1]["data"].pop("root") == images["root"]
    assert expected[-1]["command"].pop(0) == "/home/somebody/train.py"
    assert starts[-1]["command"].pop(0) == "train.py" and starts == expected
    strange = b'[{"command": [3], "data": null}]'    # of another program: no error, and no change but 3
    assert json.loads(archive.without_paths(strange)) == [{"command": ["3"], "data": None}]


def test_the_files_of_a_run_are_the_same_in_the_archive(packed, tmp_path):
    (tmp_path / "a-s1" / "last.pt").write_bytes(b"weights")
    write_archive(places(tmp_path / "a-s1"), packed)
    with opened([packed]) as found:
        (folder, path), = found
        assert path == packed / "a-s1" and sorted(os.listdir(folder)) == list(FILES)
        for name in FILES:
            assert (folder / name).read_bytes() == (tmp_path / "a-s1" / name).read_bytes()
    assert not folder.exists()


def test_a_run_without_metrics_is_packed_without_them(packed, tmp_path):
    (tmp_path / "a-s1" / "metrics.jsonl").unlink()
    write_archive(places(tmp_path / "a-s1"), packed)
    with opened([packed]) as ((folder, _),):
        assert sorted(os.listdir(folder)) == ["recipe.toml", "run.json"]


def test_the_same_runs_give_the_same_bytes(packed, tmp_path):
    """In another order, at another time, with other permissions, and from an archive."""
    again = tmp_path / "again.tar.xz"
    for name in FILES:
        os.utime(tmp_path / "a-s1" / name, (7, 7))
        os.chmod(tmp_path / "a-s2" / name, 0o600)
    write_archive(places(*(tmp_path / name for name in ("a-s1", "b-s10", "a-s2"))), again)
    assert again.read_bytes() == packed.read_bytes()
    with opened([packed]) as found:
        write_archive(found, again)
    assert again.read_bytes() == packed.read_bytes()
    with tarfile.open(packed) as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == [f"{run}/{file}" for run in
                                                   ("a-s1", "a-s2", "b-s10") for file in FILES]
    assert {(one.mtime, one.uid, one.gid, one.uname, one.gname, one.mode) for one in members} == {
        (0, 0, 0, "", "", 0o644)}


def test_a_path_is_a_folder_an_archive_or_an_archive_with_a_pattern(packed, tmp_path, monkeypatch):
    all_runs = ["runs.tar.xz/a-s1", "runs.tar.xz/a-s2", "runs.tar.xz/b-s10"]
    assert chosen(packed) == all_runs
    assert chosen(packed / "b-*", packed / "a-s2") == [all_runs[2], all_runs[1]]
    assert chosen(packed / "*-s[12]") == all_runs[:2]
    outside, = places(tmp_path / "a-s1")
    with opened([outside.path, packed / "*-s1"]) as found:
        assert found[0] == outside and found[1].path == packed / "a-s1"
    monkeypatch.chdir(tmp_path)
    assert chosen(Path("runs.tar.xz/a-s1")) == all_runs[:1]


def test_a_name_that_looks_like_a_pattern_is_a_name(written_run, tmp_path):
    out = tmp_path / "runs.tar.xz"
    write_archive(places(written_run("a[1]", [1.0]), written_run("a1", [1.0], seed=1)), out)
    assert chosen(out / "a[1]") == ["runs.tar.xz/a[1]"] and chosen(out / "?1") == ["runs.tar.xz/a1"]


def test_groups_of_an_archive_are_those_of_the_folders(packed, tmp_path, written_run):
    cut = written_run("cut", [1.0], epochs=2, seed=3)
    write_archive(places(*(tmp_path / name for name in ("a-s1", "a-s2", "b-s10")), cut), packed)
    groups, unfinished = finished_groups([packed])
    expected, _ = finished_groups([tmp_path / name for name in ("a-s1", "a-s2", "b-s10")])
    assert [(group.label, list(group.runs)) for group in groups] == [("default", [1, 2]),
                                                                    ("impulse", [10])]
    for ours, theirs in zip(groups, expected):
        for seed, run in ours.runs.items():
            other = theirs.runs[seed]
            assert (run.keys, run.rows, run.starts) == (other.keys, other.rows, other.starts)
            assert run.path == packed / other.path.name
    assert unfinished == [f"left out, not finished: {packed / 'cut'}, 1 of 2 epochs"]


def test_an_error_in_a_run_names_the_archive(packed, tmp_path):
    (tmp_path / "a-s1" / "metrics.jsonl").write_text("{}\n")
    write_archive(places(tmp_path / "a-s1"), packed)
    with pytest.raises(CheckpointError) as caught, opened([packed]) as (place,):
        read_at(place)
    assert str(caught.value).startswith(f"{packed}/a-s1/metrics.jsonl: line 1 names no epoch")


# ---------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------


def refused(*paths: Path) -> str:
    """The one line by which reading these paths is refused; nothing stays in temporary folders."""
    before = os.listdir(tempfile.gettempdir())
    with pytest.raises(CheckpointError) as caught, opened(paths):
        pass
    assert os.listdir(tempfile.gettempdir()) == before
    message = str(caught.value)
    assert message.startswith(str(paths[-1])) and "\n" not in message
    return message.removeprefix(f"{paths[-1]}: ")


@pytest.fixture
def private_temporary_folder(tmp_path, monkeypatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def written(path: Path, *members: tarfile.TarInfo) -> Path:
    """An .xz file with these members; each regular file contains zeros."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    path.write_bytes(lzma.compress(content.getvalue()))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, **values: object) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type = kind
    for key, value in values.items():
        setattr(found, key, value)
    return found


@pytest.mark.parametrize("stranger", [
    member("../recipe.toml"), member("./recipe.toml"), member("/recipe.toml"), member("recipe.toml"),
    member("a/last.pt"), member("a/b/recipe.toml"), member("a/../../recipe.toml"), member("a/"),
    member("a", tarfile.DIRTYPE), member("a/run.json", tarfile.SYMTYPE, linkname="/etc/passwd"),
    member("b/run.json", tarfile.LNKTYPE, linkname="a/recipe.toml"),
    member("a/run.json", tarfile.FIFOTYPE), member("a/run.json", tarfile.CHRTYPE),
    # A sparse file: few bytes here, a gigabyte once it is read.
    member("a/run.json", pax_headers={"GNU.sparse.map": "0,0", "GNU.sparse.size": "1000000000"})],
    ids=lambda one: f"{one.name}-{one.type.decode()}{'-sparse' * bool(one.pax_headers)}")
def test_anything_but_the_files_of_runs_is_refused(tmp_path, private_temporary_folder, stranger):
    path = written(tmp_path / "a.tar.xz", member("a/recipe.toml", size=3), stranger)
    assert refused(path) == (f"contains {stranger.name}, expected nothing but "
                             "<run>/metrics.jsonl, <run>/recipe.toml, <run>/run.json")


def test_what_is_no_archive_is_refused(tmp_path, private_temporary_folder, packed, monkeypatch):
    path, content = tmp_path / "x.tar.xz", packed.read_bytes()
    for wrong, message in (
            (b"seed = 1\n", "neither a run's folder nor an archive of runs"),
            (b"", "neither a run's folder nor an archive of runs"),
            (content[:-50], "a damaged archive, it is cut short"),
            (content + b"more", "a damaged archive, it goes on after its end"),
            (content[:300] + bytes([content[300] ^ 1]) + content[301:],
             "a damaged archive (Corrupt input data)"),
            (lzma.compress(b"x" * 2000), "not an archive of runs (invalid header"),
            (lzma.compress(lzma.decompress(content)[:700]), "not an archive of runs (unexpected end"),
            (lzma.compress(bytes(10240)), "an archive without a run in it")):
        path.write_bytes(wrong)
        assert refused(path).startswith(message), wrong[:20]
    written(path, member("a/run.json"), member("a/run.json"))
    assert refused(path) == "contains a/run.json twice"
    written(path, member(f"{'a' * 300}/run.json"))
    assert refused(path).startswith("cannot be unpacked: [Errno 36] File name too long")
    monkeypatch.setattr(archive, "LARGEST", 2**20)
    written(path, member("a/run.json", size=2**20 + 1))
    assert path.stat().st_size < 2**12
    assert refused(path) == "more than 1,048,576 bytes when unpacked, so it is no archive of runs"
    monkeypatch.setattr(archive, "MOST_RUNS", 2)     # each takes a folder, which costs time
    written(path, *(member(f"{run}/run.json", size=0) for run in "abc"))
    assert refused(path) == "more than 2 runs, expected several smaller archives"


def test_an_archive_that_needs_much_memory_is_refused(tmp_path, private_temporary_folder, packed,
                                                      monkeypatch):
    monkeypatch.setattr(archive, "DECODER_MEMORY", 2**20)
    assert "emory usage limit" in refused(packed)


def test_a_pattern_that_fits_no_run_is_refused(packed, tmp_path, private_temporary_folder):
    assert refused(tmp_path / "a-s1", packed / "c-*") == (
        "none of the 3 run(s) in the archive has such a name; it holds a-s1, a-s2, b-s10")


def test_what_cannot_be_packed_is_refused(packed, tmp_path, written_run, monkeypatch):
    before = packed.read_bytes()
    (tmp_path / "other").mkdir()
    twin = written_run("other/a-s1", [1.0])
    large = ("3 runs take 20,480 bytes before compression, and an archive holds 999 bytes and 5,000 "
             "runs; expected fewer")
    many = large.replace("999", "1,000,000").replace("5,000", "2")
    for runs, out, message in (
            (["a-s1", "other/a-s1"], packed, f"{twin}: called a-s1 like {tmp_path / 'a-s1'}; in an "),
            (["a-s1"], tmp_path / "a-s2", f"{tmp_path / 'a-s2'}: not the name of an archive"),
            (["a-s1"], tmp_path / "no" / "a.tar.xz", "no/a.tar.xz: cannot be written: No such file"),
            (["a-s1", "a-s2", "b-s10"], packed, large), (["a-s1", "a-s2", "b-s10"], packed, many)):
        monkeypatch.setattr(archive, "LARGEST", 999 if message is large else 10**6)
        monkeypatch.setattr(archive, "MOST_RUNS", 2 if message is many else 5_000)
        with pytest.raises(CheckpointError) as caught:
            write_archive(places(*(tmp_path / name for name in runs)), out)
        assert message in str(caught.value)
    assert packed.read_bytes() == before and (tmp_path / "a-s2" / "recipe.toml").exists()
