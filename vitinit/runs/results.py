"""Results as text: a table in Markdown, and what eval.py prints and writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..files import write_text_atomically
from ..messages import one_line
from ..train.engine import Evaluation
from .data import EvaluatedSet


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of cells; every column but the first is aligned to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
                     for line in lines)


class Finding(NamedTuple):
    """The results of one checkpoint on one data set."""

    checkpoint: str                         # its path
    recipe: str                             # name
    data_set: EvaluatedSet
    image_size: tuple[int, int]             # (height, width)
    model_classes: int                      # number of logits of the model
    classes: Sequence[str]                  # names of the data set's classes
    results: Mapping[str, Evaluation]       # by weights: "model", and "ema" if there are any

    def as_dict(self) -> dict[str, Any]:
        """The JSON object: checkpoint and data set, then the results under "model" and "ema"."""
        return {"checkpoint": self.checkpoint, "recipe": self.recipe, "data": self.data_set.name,
                "data_dir": self.data_set.root, "image_size": list(self.image_size),
                "classes": len(self.classes), "model_classes": self.model_classes} | {
            name: {"loss": result.loss, "top1": result.top1, "top5": result.top5,
                   "images": result.images, "per_class": [
                       {"class": label, "correct": correct, "total": total}
                       for label, correct, total in zip(self.classes, result.class_hits,
                                                        result.class_images)]}
            for name, result in self.results.items()}

    def by_class(self) -> str:
        """A Markdown table of all classes by their top-1 accuracy, lowest first."""
        by_class = zip(self.classes, self.results["model"].class_images,
                       *(result.class_hits for result in self.results.values()))
        return table(["class", "images", *(f"{name} top-1" for name in self.results)], [
            [one_line(label), f"{total:,}", *(f"{100.0 * correct / total:.2f}" for correct in hits)]
            for label, total, *hits in sorted(by_class, key=lambda row: row[2] / row[1])])


def print_results(findings: Sequence[Finding], *, per_class: bool, json_file: Path | None) -> None:
    """Print the findings, a single one as lines and several as a table; then their JSON.

    The JSON has one line per finding. It is printed, or written to `json_file`. per_class: also
    print a table of all classes per finding. Raises CheckpointError if the file cannot be written.
    """
    for finding in findings:
        if len(finding.classes) < finding.model_classes:
            print(f"{finding.data_set}: {len(finding.classes)} of the {finding.model_classes} "
                  f"classes of {finding.checkpoint}; the others are left out of ranking and loss")
    rows = [[finding.checkpoint, name, str(finding.data_set), f"{result.top1:.3f}",
             "–" if result.top5 is None else f"{result.top5:.3f}", f"{result.loss:.4f}",
             f"{result.images:,}"]
            for finding in findings for name, result in finding.results.items()]
    if len(findings) > 1:
        print(table(["checkpoint", "weights", "data", "top-1 %", "top-5 %", "loss", "images"],
                    rows))
    else:
        for _, name, _, top1, top5, loss, images in rows:
            print(f"{name:5}  top-1 {top1} %" + ("" if top5 == "–" else f"  top-5 {top5} %")
                  + f"  loss {loss}  over {images} images")
    for finding in findings if per_class else []:
        print(f"\n{finding.checkpoint} on {finding.data_set}, top-1 of every class in %:\n\n"
              f"{finding.by_class()}\n")
    text = "".join(json.dumps(finding.as_dict()) + "\n" for finding in findings)
    if json_file is None:
        print(text, end="", flush=True)
    else:
        write_text_atomically(text, json_file)
        print(f"wrote {json_file}", flush=True)
