"""Images that cannot be read: fit goes on without them, by lists of all others."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ...base.files import written_atomically
from ...base.messages import counted, say, shortened
from ...data.images import DataError
from ...data.lists import LISTS, as_csv, open_list
from ...data.sources import Source
from ...runs.data import problems

TO_TRAIN_ON = next(iter(LISTS))  # train.csv, which val.csv follows


def unreadable_in(sources: Sequence[Source], in_time: Callable[[], bool]) -> set[str]:
    """Decode the images as long as there is time; the paths of those that cannot be."""
    images = [(source, index) for source in sources for index in range(len(source))]
    read, found = 0, []
    for line in problems(images, torch.get_num_threads()):
        source, index = images[read]
        read += 1
        if line:
            found.append(source.path(index))
        if not in_time():
            break
    if read < len(images):
        say(
            f"note    {read:,} of {len(images):,} images were read, as there was time; another one "
            "that cannot be read would stop the run, and the same command goes on once it is mended"
        )
    if found:
        say(
            f"warning {counted(len(found), 'image')} of {read:,} left out, as unreadable: "
            f"{shortened(found)}"
        )
    return {*found}


def list_others(sources: Sequence[Source], unreadable: set[str], folder: Path) -> None:
    """Write lists of the readable images, to train on and perhaps to validate on, into a folder.
    Raises DataError for a class of which no image to train on is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in zip(LISTS, sources):
        rows = [["path", "label"]]
        for index, label in enumerate(source.labels):
            path = source.path(index)
            if path not in unreadable:
                rows.append([os.path.abspath(path), source.classes[label]])
        lost = {*source.classes} - {label for _, label in rows}
        if lost and name == TO_TRAIN_ON:
            raise DataError(f"class '{min(lost)}': none of its images can be read")
        with written_atomically(folder / name) as file:
            file.write(as_csv(rows))


def lists_images_of(folder: Path, root: Path) -> bool:
    """Whether the lists in a folder, if there are any, are of images in `root`."""
    if not (folder / TO_TRAIN_ON).is_file():
        return False
    first = Path(open_list(folder, "train").path(0))
    return first.is_relative_to(os.path.abspath(root))
