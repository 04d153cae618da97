"""The README.md of a model that is handed on: a model card, from the records of its run.

Above the text stands a table in YAML, as model hubs read it. What no record says is left out, and
what only a person knows, such as the licence, is to be filled in.
"""

import json
from copy import deepcopy
from pathlib import Path

from ... import __version__
from ...base.messages import OneLineError, counted, one_line, times
from ...runs.folder import RunFolder
from ...runs.trained import Trained
from ...train.device import for_people, this_device
from ...watch.verdict import margin
from .evaluated import own_set, require_same_images
from .guesses import Guessed, guessed
from .records import RunRecord, read_run, without_folders
from .results import table

TO_FILL_IN = "TO BE FILLED IN"
RECEIPT = ("init ", "mass ", "start ", "head ")  # how lines of start.txt begin that say of weights


def card_of(trained: Trained, name: str, library: str) -> str:
    """The card of a model in a folder called `name` that `library` opens."""
    folder = trained.path.parent
    run = read_run(folder) if RunFolder(folder).recipe.exists() else None
    found, classes = None, [*map(one_line, trained.classes)]
    note = "There is no classifier: the model returns pooled features."
    if trained.threshold is not None:
        note = "Several labels may be right, and classes were not measured one by one."
    elif classes:
        try:
            found = judged(trained)
        except OneLineError:  # which names folders of this machine
            note = "Not measured by class, as the images were not at hand."
    parts = [front_matter(trained, name, library, found), about(trained, name, library, classes)]
    if found is not None or run is not None:
        parts.append("## How good it is\n\n" + "  \n".join(quality(trained, run, found)))
    parts.append(note if found is None else by_class(found, classes))
    if run is not None:
        parts.append(how_trained(run, folder))
    parts.append(limits(trained, run))
    return "\n\n".join(parts) + "\n"


def judged(trained: Trained) -> Guessed:
    """What the model takes the images for that its run validated on. Raises DataError if they are
    not at hand.
    """
    recipe, device = trained.recipe.with_data(image_size=trained.image_size), this_device()
    data_set = own_set(recipe.data)._replace(order=trained.classes)
    source = data_set.open().in_order(trained.classes)
    require_same_images(data_set, source, trained.path.parent)
    model = deepcopy(trained.model).to(device)  # the other stays where it is
    return guessed(model, recipe, source, device)


def front_matter(trained: Trained, name: str, library: str, found: Guessed | None) -> str:
    """The table in YAML, every value of which is written as JSON, which is YAML, too."""
    task = "image-classification" if trained.classes else "image-feature-extraction"
    tags = [task, "vitinit", library]
    lines = [
        f"license: other  # {TO_FILL_IN}",
        f"library_name: {library}",
        f"pipeline_tag: {task}",
        f"tags: {json.dumps(tags)}",
    ]
    if found is not None:
        data = Path(trained.recipe.data.root).name or trained.recipe.data.name
        result = {
            "task": {"type": "image-classification"},
            "dataset": {"name": data, "type": trained.recipe.data.name},
            "metrics": [{"type": "accuracy", "value": round(1 - found.errors, 4)}],
        }
        index = json.dumps([{"name": name, "results": [result]}], ensure_ascii=False)
        lines.append(f"model-index: {index}")
    return "\n".join(["---", *lines, "---"])


def about(trained: Trained, name: str, library: str, classes: list[str]) -> str:
    """What it is, and how it is opened."""
    recipe = trained.recipe
    weights = sum(parameter.numel() for parameter in trained.model.parameters())
    tells = f", which tells\n{counted(len(classes), 'class')} apart: {', '.join(classes)}"
    use = 'predict("photo.jpg")     # classes and their probabilities'
    kind, outputs, returned = "AutoModelForImageClassification", "logits", "logits"
    without_pooler = ""
    if not classes:
        tells, kind, outputs = "", "AutoModel", "features"
        use = 'features(trained.preprocess("photo.jpg"))     # pooled'
        returned = "last_hidden_state.mean(1)"
        if getattr(trained.model, "pool", "") == "class":
            without_pooler, returned = ", add_pooling_layer=False", "last_hidden_state[:, 0]"
    load = f"""model = timm.create_model("local-dir:{name}", pretrained=True).eval()
prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
{outputs} = model(prepare(Image.open("photo.jpg"))[None])"""
    if library == "transformers":
        load = f"""model = transformers.{kind}.from_pretrained("{name}"{without_pooler})
prepare = transformers.AutoImageProcessor.from_pretrained("{name}")
{outputs} = model(**prepare(Image.open("photo.jpg"), return_tensors="pt")).{returned}"""
    return f"""# {name}

A `{recipe.model.name}` of {weights:,} weights for images of {times(trained.image_size)} pixels{tells}.
Made by vitinit {__version__}.

```python
import vitinit
trained = vitinit.load("{name}")
trained.{use}
```

Without vitinit:

```python
import {library}
from PIL import Image
{load}
```"""


def quality(trained: Trained, run: RunRecord | None, found: Guessed | None) -> list[str]:
    """How good these weights are, or else what the record of their run says."""
    if found is not None:
        right, images = 100.0 * (1.0 - found.errors), len(found.labels)
        line = (
            f"{right:.1f} ± {margin(right, images):.1f} % of {counted(images, 'validation image')}"
        )
        if trained.path.name == RunFolder(trained.path.parent).best.name:
            line += "; as the epoch of these weights was chosen by them, a little too high"
        return [line + "."]
    assert run is not None
    return [
        f"These are the weights in {trained.path.name} of a run, whose record says:",
        *run.good(),
    ]


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
    seen, others = (
        f"{data[key]:,}" if key in data else "an unknown number of"
        for key in ("training images", "validation images")
    )
    seconds = sum(run.measured("seconds"))
    device = for_people(start.get("device", "a device"))
    found, checkpoint = run.changes(), run.keys["init.checkpoint"]
    changes = ["- not known, as the recipe is not at hand"]
    if not isinstance(found, str):
        changes = []
        for key, *values in found:
            before, after = map(without_folders, values)
            changes.append(f"- `{key}` = {after}, not {before}")
    try:
        lines = RunFolder(folder).start.read_text(encoding="utf-8").splitlines()
    except OSError:  # an older run, or one that was exported
        lines = []
    if checkpoint:
        lines = [line.replace(checkpoint, without_folders(checkpoint)) for line in lines]
    receipt = [f"- {line}" for line in lines if line.startswith(RECEIPT)]
    parts = [
        "## How it was trained",
        f"On {seen} images, judged by {others} others; "
        f"{counted(run.done, 'epoch')} in {seconds / 60:.1f} minutes on {device}, "
        f"torch {start.get('torch', 'of unknown version')}, seed {run.seed}.",
        f"The recipe is `{run.recipe}`, with these changes:",
        "\n".join(changes) or "- none",
        "Its first weights:",
        "\n".join(receipt) or f"- `{run.keys['init.name']}`",
    ]
    return "\n\n".join(parts)


def limits(trained: Trained, run: RunRecord | None) -> str:
    sure = "as the model gives them, not calibrated"
    if trained.temperature != 1.0:
        sure = f"calibrated, by a temperature of {trained.temperature:.3f}"
    of_classes = [
        "It was judged on images like those that it was trained on. Of others, and of images that "
        "show none of its classes, it names one of these classes all the same.",
        f"Probabilities are {sure}.",
    ]
    lines = [
        *(of_classes if trained.classes else []),
        f"For what it is meant, and for what not: {TO_FILL_IN}. Where the images are from, who is on "
        f"them, and under which licence this model is given: {TO_FILL_IN}.",
    ]
    return "## Limits\n\n" + "\n\n".join(lines)
