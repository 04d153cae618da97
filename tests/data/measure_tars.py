"""Measure ImageNet's tars beside the same images as files, with small images that are made here.

    python tests/data/measure_tars.py FOLDER IMAGES [--files]

In FOLDER, which has to be new, it makes a training tar of IMAGES in a thousand classes; with --files
also the same images in folders. It prints the seconds to make the index, to start with it, and to
list the folders; images read per second by one process, in random order; and memory. Files and tar
are in the system's cache, since they have just been written.
"""

import io
import resource
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from vitinit.data.datasets import imagenet_wnids, open_imagenet
from vitinit.data.sources import Source
from vitinit.data.tars import TARS

READ = 50_000  # images of which the time is taken


def jpegs(count: int) -> list[bytes]:
    """A few contents, which images share."""
    rng = np.random.default_rng(0)
    contents = []
    for _ in range(count):
        content = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(content, "JPEG")
        contents.append(content.getvalue())
    return contents


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def make(root: Path, images: int, files: bool) -> None:
    (root / "tars").mkdir(parents=True)
    contents = jpegs(17)
    with tarfile.open(root / "tars" / TARS["train"], "w") as outer:
        for number, wnid in enumerate(imagenet_wnids()):
            folder = root / "files" / "train" / wnid
            if files:
                folder.mkdir(parents=True)
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as tar:
                for image in range(number, images, 1000):
                    name, content = f"{wnid}_{image}.JPEG", contents[image % 17]
                    add(tar, name, content)
                    if files:
                        (folder / name).write_bytes(content)
            add(outer, f"{wnid}.tar", inner.getvalue())


def timed(what: str, function: Callable[[], Source | None]) -> Source | None:
    start = time.perf_counter()
    result = function()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{what:28} {seconds:8.2f} s, memory at most so far {peak:,.0f} MiB", flush=True)
    return result


def read(source: Source) -> None:
    for index in np.random.default_rng(1).permutation(len(source))[:READ].tolist():
        source.content(index)


def main(folder: str, images: str, *options: str) -> None:
    root, files = Path(folder), options == ("--files",)
    if not root.exists():
        timed("make them", lambda: make(root, int(images), files))
        return  # memory is measured anew
    sources = {}
    for kind in ["tars", "tars"] + ["files"] * files:
        sources[kind] = timed(f"open {kind}", lambda: open_imagenet(root / kind, "train"))
    for turn in range(3):
        for kind, source in sources.items():
            timed(f"read {READ:,} of {kind}", lambda: read(source))


if __name__ == "__main__":
    main(*sys.argv[1:])
