"""Runs come out of an archive as they went in."""

import io
import lzma
import os
import tarfile
from pathlib import Path

import pytest

from vitinit.base.files import CheckpointError, FileError
from vitinit.programs.shared import records
from vitinit.programs.shared.records import FILES, read_runs, write_archive
from vitinit.runs.folder import RunFolder


def chosen(*paths: Path) -> list[str]:
    """The paths of the runs, as a user knows them, without the folder that all tests share."""
    return ["/".join(run.path.parts[-2:]) for run in read_runs(paths)]


@pytest.fixture
def packed(written_run, tmp_path) -> Path:
    """An archive of the runs `b-s10`, `a-s2` and `a-s1`, written in this order."""
    write_archive(
        read_runs(
            [
                written_run("b-s10", [3.0], seed=10, init="impulse"),
                written_run("a-s2", [2.0], seed=2),
                written_run("a-s1", [1.0], seed=1),
            ]
        ),
        tmp_path / "runs.tar.xz",
    )
    return tmp_path / "runs.tar.xz"


def test_paths_of_the_machine_stay_out(written_run, tmp_path):
    start = {
        "command": ["/home/somebody/train.py", "--set", 'data.root="/home/data"'],
        "arguments": {"recipe": "/home/mine.toml", "changes": {"data.root": r"C:\my\data"}},
        "data": {"training images": 3, "root": r'/home/somebody/"my" images'},
    }
    run = written_run("a-s1", [1.0], start=start)
    write_archive(read_runs([run]), tmp_path / "runs.tar.xz")
    (packed,) = read_runs([tmp_path / "runs.tar.xz"])
    assert packed.starts == [
        RunFolder(run).starts()[0]
        | {
            "command": ["train.py", "--set", "data.root=data"],
            "data": {"training images": 3},
            "arguments": {"recipe": "mine.toml", "changes": {"data.root": "data"}},
        }
    ]


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
        assert tar.getnames() == [
            f"{run}/{file}" for run in ("a-s1", "a-s2", "b-s10") for file in FILES
        ]
        for member in tar:  # of a second writing in the same second, too
            assert (member.mtime, member.mode) == (0, 0o644)
            assert (member.uid, member.gid, member.uname, member.gname) == (0, 0, "", "")


def test_no_archive_is_written_that_is_too_large_to_be_read(packed, tmp_path, monkeypatch):
    """However full the last record of the file is, which zeros fill."""
    size = len(lzma.decompress(packed.read_bytes()))
    for largest in range(size - tarfile.RECORDSIZE, size + tarfile.RECORDSIZE + 1, 1024):
        monkeypatch.setattr(records, "LARGEST_ARCHIVE", largest)
        out = tmp_path / f"{largest}.tar.xz"
        try:
            write_archive(read_runs(sorted(tmp_path.glob("[ab]-s*"))), out)
        except CheckpointError as error:
            assert f"over {largest:,} bytes before they are packed" in str(error)
            assert not out.exists()
        else:
            assert len(lzma.decompress(out.read_bytes())) <= largest
    assert out.exists()


def packed_by_hand(packed: Path, folders: dict[str, str]) -> Path:
    """An archive of some runs of another one, each by its name there, in other folders."""
    path = packed.with_name("by_hand.tar.xz")
    with tarfile.open(packed) as runs, tarfile.open(path, "w:xz") as by_hand:
        for folder, run in folders.items():
            for file in FILES:
                member = tarfile.TarInfo(f"{folder}{file}")
                content = runs.extractfile(f"{run}/{file}").read()
                member.size = len(content)
                by_hand.addfile(member, io.BytesIO(content))
    return path


def test_runs_that_were_packed_by_hand_may_lie_in_folders(packed):
    """`tar cJf runs.tar.xz ./a-s1 runs/a-s2 …`; two of one name, or one without a name, may not."""
    by_hand = packed_by_hand(
        packed, {"./b-s10/": "b-s10", "runs/a-s2/": "a-s2", "./of/mine//a-s1/": "a-s1"}
    )
    for found, run in zip(read_runs([by_hand]), read_runs([packed]), strict=True):
        assert found.path.name == run.path.name
        assert (found.keys, found.rows) == (run.keys, run.rows)
    assert chosen(by_hand / "a-s*") == ["by_hand.tar.xz/a-s1", "by_hand.tar.xz/a-s2"]
    for folders, found in (
        ({"one/a/": "a-s1", "two/a/": "a-s2"}, "'one/a/recipe.toml', 'two/a/recipe.toml'"),
        ({"./": "a-s1"}, "'recipe.toml'"),
        ({}, ""),
    ):
        with pytest.raises(CheckpointError) as caught:
            read_runs([packed_by_hand(packed, folders) / "*"])
        assert str(caught.value).endswith(f"each run with a name of its own, not [{found}])")


def test_a_path_is_a_folder_or_an_archive_with_a_pattern(packed, tmp_path, monkeypatch, capsys):
    """Others, which a pattern such as runs/* finds after a sweep with --jobs, are left out."""
    all_runs = ["runs.tar.xz/a-s1", "runs.tar.xz/a-s2", "runs.tar.xz/b-s10"]
    assert chosen(packed) == all_runs
    assert chosen(packed / "b-*", packed / "a-s2") == [all_runs[2], all_runs[1]]
    assert chosen(packed / "*-s[12]", tmp_path / "a-s1")[:2] == all_runs[:2]
    monkeypatch.chdir(tmp_path)
    Path("logs").mkdir()
    Path("a-s1.log").write_text("epoch 1/2\n")
    assert chosen(Path("logs"), Path("runs.tar.xz/a-s1"), Path("a-s1.log")) == all_runs[:1]
    assert capsys.readouterr().err == "warning left out, no run: logs, a-s1.log\n"


def archive_of_holes() -> bytes:
    """A few hundred bytes that stand for a recipe of 2²⁴ zeros, and could for thousands of them."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("a/recipe.toml")
        member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(2**24)}
        archive.addfile(member)
    return lzma.compress(content.getvalue())


def test_what_cannot_be_read_or_packed_is_one_line(tmp_path, packed, written_run):
    """Nor what is packed twice, of which each layer may hold a thousand times as much."""
    path, content = tmp_path / "x.tar.xz", packed.read_bytes()
    for wrong in (
        b"seed = 1\n",
        b"",
        content[:-50],
        lzma.compress(b"x" * 2000),
        lzma.compress(content),
        archive_of_holes(),
        lzma.compress(bytes(2**26 + 1)),
        content[:300] + bytes([content[300] ^ 1]) + content[301:],
    ):
        path.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=r"x\.tar\.xz: not an archive of runs \("):
            read_runs([path])
    with pytest.raises(
        CheckpointError,
        match=r"none of the 3 runs in the archive has such a na"
        "me; it holds a-s1, a-s2, b-s10",
    ):
        read_runs([tmp_path / "a-s1", packed / "c-*"])
    (tmp_path / "other").mkdir()
    twin = written_run("other/a-s1", [1.0])
    for runs, out, message in (
        (["a-s1", "other/a-s1"], packed, f"{twin}: called a-s1 like {tmp_path / 'a-s1'}; in an "),
        (["a-s1"], tmp_path / "no" / "a.tar.xz", "no/a.tar.xz: cannot be written: No such file"),
    ):
        with pytest.raises(FileError) as caught:
            write_archive(read_runs([tmp_path / name for name in runs]), out)
        assert message in str(caught.value)
    assert packed.read_bytes() == content and (tmp_path / "a-s2" / "recipe.toml").exists()
