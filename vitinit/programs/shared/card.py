"""The README.md of a model that is handed on: a model card, from the records of its run.

Above the text stands a table in YAML, as model hubs read it. What no record says is left out, and
what only a person knows, such as the licence, is to be filled in.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from ... import __version__
from ...base.messages import OneLineError, counted, times
from ...runs.evaluated import own_set, require_same_images
from ...runs.folder import RunFolder
from ...runs.trained import Trained
from ...train.device import this_device
from ...watch.verdict import margin
from .guesses import Guessed, guessed
from .records import RunRecord, read_run, without_folders
from .results import table

TO_FILL_IN = "TO BE FILLED IN"
RECEIPT = ("init ", "mass ", "start ", "head ")  # how lines of start.txt begin that say of weights


def card_of(trained: Trained, name: str, library: str) -> str:
    """The card of a model in a folder called `name` that `library` opens."""
    folder = trained.path.parent
    run = read_run(folder) if RunFolder(folder).recipe.exists() else None
    found, classes = None, list(trained.classes)
    note = "There is no classifier: the model returns pooled features."
    if trained.threshold is not None:
        note = "Several labels may be right, and classes were not measured one by one."
    elif classes:
        try:
            found = judged(trained)
        except OneLineError:  # which names folders of this machine
            note = "Not measured by class, as the images were not at hand."
    parts = [front_matter(trained, name, library, found), about(trained, name, library)]
    if run is not None:
        parts.append("## How good it is\n\n" + "  \n".join(run.good()))
    parts.append(note if found is None else by_class(found, classes))
    if run is not None:
        parts.append(how_trained(run, folder))
    parts.append(limits(trained, run))
    return "\n\n".join(parts) + "\n"


def judged(trained: Trained) -> Guessed:
    """What the model takes the images for that its run validated on. Raises DataError if they are
    not at hand.
    """
    recipe, device = trained.recipe, this_device()
    data_set = own_set(recipe.data)._replace(order=trained.classes)
    source = data_set.open().in_order(trained.classes)
    require_same_images(data_set, source, trained.path.parent)
    return guessed(trained.model.to(device), recipe, source, device)


def front_matter(trained: Trained, name: str, library: str, found: Guessed | None) -> str:
    """The table in YAML, every value of which is written as JSON, which is YAML, too."""
    tags = ["image-classification", "vitinit", library]
    lines = [
        f"license: other  # {TO_FILL_IN}",
        f"library_name: {library}",
        "pipeline_tag: "
        + ("image-classification" if trained.classes else "image-feature-extraction"),
        f"tags: {json.dumps(tags)}",
    ]
    if found is not None:
        data = Path(trained.recipe.data.root).name or trained.recipe.data.name
        result = {
            "task": {"type": "image-classification"},
            "dataset": {"name": data, "type": trained.recipe.data.name},
            "metrics": [{"type": "accuracy", "value": round(1 - found.errors, 4)}],
        }
        lines.append(f"model-index: {json.dumps([{'name': name, 'results': [result]}])}")
    return "\n".join(["---", *lines, "---"])


def about(trained: Trained, name: str, library: str) -> str:
    """What it is, and how it is opened."""
    recipe = trained.recipe
    weights = sum(parameter.numel() for parameter in trained.model.parameters())
    load = f'model = timm.create_model("local-dir:{name}", pretrained=True)'
    if library == "transformers":
        load = f'model = transformers.AutoModelForImageClassification.from_pretrained("{name}")'
    return f"""# {name}

A `{recipe.model.name}` of {weights:,} weights for images of {times(trained.image_size)} pixels, which tells
{counted(len(trained.classes), "class")} apart: {", ".join(trained.classes) or "none"}. Made by vitinit {__version__}.

```python
import {library}
{load}

import vitinit
vitinit.load("{name}").predict("photo.jpg")
```"""


def by_class(found: Guessed, classes: list[str]) -> str:
    """A table of classes, with the 95 % interval of each, and what is confused."""
    rows = []
    for number, name in enumerate(classes):
        own = found.labels == number
        images = int(own.sum())
        if images:
            right = 100.0 * (found.guesses[own] == number).float().mean().item()
            rows.append([name, f"{images:,}", f"{right:.1f} ± {margin(right, images):.1f}"])
    text = table(["class", "images", "right, %"], rows)
    return f"{text}\n\nMost often confused: {found.confusions(classes)}."


def how_trained(run: RunRecord, folder: Path) -> str:
    """The data, the recipe with what differs from its base, hardware, time, and first weights."""
    data, start = run.began.get("data", {}), run.starts[-1] if run.starts else {}
    seconds = sum(run.measured("seconds"))
    changes = [f"- `{key}` = {after}, not {before}" for key, before, after in changes_in(run)]
    try:
        lines = RunFolder(folder).start.read_text(encoding="utf-8").splitlines()
    except OSError:  # an older run, or one that was exported
        lines = []
    receipt = [f"- {line}" for line in lines if line.startswith(RECEIPT)]
    return "\n".join(
        [
            "## How it was trained",
            "",
            f"On {data.get('training images', 'an unknown number of')} images, "
            f"judged by {data.get('validation images', 'an unknown number of')} others; "
            f"{run.done} epochs in {seconds / 60:.1f} minutes on {start.get('device', 'a device')}, "
            f"torch {start.get('torch', 'of unknown version')}, seed {run.seed}.",
            "",
            f"The recipe is `{run.recipe}`, with these changes:",
            "",
            *(changes or ["- none"]),
            "",
            "Its first weights:",
            "",
            *(receipt or [f"- `{run.keys['init.name']}`"]),
        ]
    )


def changes_in(run: RunRecord) -> Iterator[list[str]]:
    """The keys in which a run differs from its recipe, without folders of this machine."""
    found = run.changes()
    if isinstance(found, str):  # the recipe is not at hand
        return
    for key, before, after in found:
        yield [key, *map(without_folders, (before, after))]


def limits(trained: Trained, run: RunRecord | None) -> str:
    sure = "as the model gives them, not calibrated"
    if trained.temperature != 1.0:
        sure = f"calibrated, by a temperature of {trained.temperature:.3f}"
    lines = [
        "It was judged on images like those that it was trained on. Of others, and of images that "
        "show none of its classes, it names one of these classes all the same.",
        f"Probabilities are {sure}.",
        f"For what it is meant, and for what not: {TO_FILL_IN}. Where the images are from, who is on "
        f"them, and under which licence this model is given: {TO_FILL_IN}.",
    ]
    return "## Limits\n\n" + "\n\n".join(lines)
