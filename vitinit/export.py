"""Export a trained model: as one file that can be read without vitinit, or as a small run folder.

    python -m vitinit.export runs/base --to safetensors --out base.safetensors
    python -m vitinit.export runs/base --to torch --out base.pt2 --normalise
    python -m vitinit.export runs/base --to transformers --out folder
    python -m vitinit.export runs/base --to run --out small

safetensors: the weights under timm's names (needs the extra `safetensors`). The file's metadata
state the class names, how an image becomes the model's input, the recipe, and which model of timm
takes these weights.
torch: a program of torch.export, images → logits, for any batch size. With --normalise it takes
uint8 images and normalises them itself. The same metadata are in the archive as vitinit.json.
transformers: a folder from which Hugging Face's AutoModelForImageClassification and
AutoImageProcessor load the model, if it is a ViT, a distilled DeiT or a Swin.
run: a run folder with one checkpoint, which contains only the weights, in half precision, and with
copies of the run's recipe, record and metrics. It can be loaded, evaluated and plotted like any
run, but not resumed.

No export contains an image, or an absolute path of this machine, of which the last part stays.

Before the command ends, it reads back what it has written and compares it with the model; programs
and runs are compared on images.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import __version__
from .command_line import Parser, run_program
from .data.augment import normalise
from .data.datasets import LooseImages, Source, open_split
from .data.images import DataError
from .models import MODELS
from .models.convert import transformers_names
from .recipe.files import dump_recipe, from_dict
from .recipe.sections import Recipe
from .runs.folder import RunFolder
from .runs.foreign import preprocessor_config, transformers_config
from .runs.records import portable, without_paths
from .runs.trained import Trained, add_run, as_input, load, load_run
from .train.checkpoint import (CheckpointError, load as load_checkpoint, save_atomically,
                               sync_folder, write_text_atomically, written_atomically)

BATCHES = (1, 3, 7)             # batch sizes at which a program is compared with its model
NEAR = 1e-4                     # largest difference of logits, relative to the largest logit
NEAR_IN_HALF = 0.02             # the same, with weights in half precision


# ---------------------------------------------------------------------------------------------
# What goes with the weights
# ---------------------------------------------------------------------------------------------


def metadata(trained: Trained) -> dict[str, Any]:
    """Everything that is needed beside the weights to use the model, as plain values."""
    recipe = trained.recipe
    return {"made_by": f"vitinit {__version__}", "classes": list(trained.classes),
            "image_size": list(trained.image_size), "mean": list(recipe.data.mean),
            "std": list(recipe.data.std), "crop_pct": recipe.eval.crop_pct,
            "interpolation": recipe.eval.interpolation, "model": recipe.model.name,
            "timm": timm_model(recipe, trained.image_size),
            "recipe": dump_recipe(without_folders(recipe))}


def without_folders(recipe: Recipe) -> Recipe:
    """The recipe with the last parts of its absolute paths: nobody else has the folders above."""
    data, init = recipe.data, recipe.init
    return replace(recipe, data=replace(data, root=portable(data.root)),
                   init=replace(init, checkpoint=portable(init.checkpoint)))


def timm_model(recipe: Recipe, image_size: tuple[int, int]) -> dict[str, Any] | None:
    """The timm (1.0) model that takes the weights: a class or function, by name, and its arguments.

    None if timm has no such model.
    """
    options, family = recipe.model.options, MODELS[recipe.model.name][0]
    found = {"img_size": list(image_size)}
    same = ["patch_size", "embed_dim"]               # options that timm calls the same
    if family == "vit" and not options["distilled"]:
        name = "vision_transformer.VisionTransformer"
        same += ["depth", "num_heads", "mlp_ratio", "qkv_bias", "fc_norm"]
        found |= {"class_token": options["pool"] == "class", "reg_tokens": options["num_registers"],
                  "global_pool": {"class": "token", "mean": "avg"}[options["pool"]]}
    elif family == "vit" and not options["num_registers"]:
        name = "deit.VisionTransformerDistilled"
        same += ["depth", "num_heads", "mlp_ratio", "qkv_bias"]
    elif family == "swin":
        name = "swin_transformer.SwinTransformer"
        same += ["depths", "num_heads", "window_size", "mlp_ratio", "qkv_bias"]
    elif family == "mlp_mixer":
        name = "mlp_mixer.MlpMixer"
        found |= {"num_blocks": options["depth"],
                  "mlp_ratio": [options["tokens_ratio"], options["channels_ratio"]]}
    elif family == "conv_mixer" and not options["num_filters"]:
        name, same = "convmixer.ConvMixer", ["depth", "kernel_size", "patch_size"]
        found = {"dim": options["embed_dim"]}
    else:
        return None
    if options.get("norm_eps", 1e-6) != 1e-6:
        return None
    found |= {key: options[key] for key in same}
    if options.get("activation", "gelu") != "gelu":
        # timm takes the activation as a class, which JSON cannot express. The one ConvMixer with
        # ReLU that timm defines has a function of its own.
        if found != {"dim": 768, "depth": 32, "kernel_size": 7, "patch_size": 7}:
            return None
        name, found = "convmixer.convmixer_768_32", {}
    return {"class": f"timm.models.{name}",
            "arguments": found | {"num_classes": recipe.data.num_classes}}


# ---------------------------------------------------------------------------------------------
# The exports: what is written is read back and compared before it takes its place
# ---------------------------------------------------------------------------------------------


def export_safetensors(trained: Trained, out: Path) -> str:
    """Write the weights to the file `out`; return what was checked, in words.

    Raises CheckpointError if the file cannot be written or differs from the weights when read back.
    """
    weights = trained.model.state_dict()
    notes = {key: value if isinstance(value, str) else json.dumps(value)
             for key, value in metadata(trained).items()}
    with written_atomically(out) as file:
        file.write(as_safetensors(weights, notes, out))
    return f"{len(weights)} tensors read back, equal to the bit"


def export_transformers(trained: Trained, out: Path) -> str:
    """Write a folder `out` of transformers; return what was checked.

    It is read back as any folder of transformers is, and must give the same weights to the bit.
    Raises CheckpointError, and leaves no folder, if it does not, or if transformers has no such
    model.
    """
    config, names, prefix = transformers_config(trained.recipe, trained.classes, trained.image_size)
    weights = trained.model.state_dict()
    with folder_at(out) as folder:
        folder.mkdir()
        for name, table in (("config.json", config), ("preprocessor_config.json",
                            preprocessor_config(trained.recipe, trained.image_size))):
            write_text_atomically(json.dumps(table, indent=2) + "\n", folder / name)
        with written_atomically(folder / "model.safetensors") as file:
            theirs = transformers_names(weights, names, prefix)
            file.write(as_safetensors(theirs, {"format": "pt"}, out))
        with redirect_stderr(io.StringIO()):         # what is assumed was just written
            require_equal(load(folder).model.state_dict(), weights, out)
    return f"{len(weights)} tensors read back under our names, equal to the bit"


def as_safetensors(tensors: dict[str, Tensor], notes: dict[str, str], out: Path) -> bytes:
    """The contents of a file of safetensors with these metadata, read back and compared."""
    try:
        from safetensors.torch import load, save
    except ImportError:
        raise CheckpointError(f"{out}: writing it needs the extra 'safetensors': pip install "
                              "'vitinit[safetensors]'") from None
    content = save({name: value.contiguous() for name, value in tensors.items()}, metadata=notes)
    require_equal(load(content), tensors, out)
    return content


class Normalised(nn.Module):
    """A model with normalisation in front: images (B, 3, H, W) uint8 → logits."""

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.model, self.mean, self.std = model, tuple(mean), tuple(std)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(normalise(images, self.mean, self.std))


@torch.no_grad()
def export_program(trained: Trained, out: Path, views: Tensor, *, inside: bool) -> str:
    """Write a program images → logits to the file `out`; return its difference from the model.

    The file contains neither the images nor a path of this machine.

    views: (B, 3, H, W) uint8 images to compare on, B ≥ 7. inside: whether the program normalises
    its input itself. Raises CheckpointError, and leaves no file, if its logits differ from the
    model's by more than `NEAR`.
    """
    data = trained.recipe.data
    model = Normalised(trained.model, data.mean, data.std) if inside else trained.model
    images = views if inside else as_input(views, trained.recipe)
    program = torch.export.export(model, (images[:3],), strict=False,
                                  dynamic_shapes={"images": {0: torch.export.Dim("batch")}})
    program.example_inputs = None                    # torch would store these images in the file,
    for node in program.graph.nodes:                 # and with each operation the path of its code
        node.meta.pop("stack_trace", None)
    archive = io.BytesIO()
    torch.export.save(program, archive,
                      extra_files={"vitinit.json": json.dumps(metadata(trained), indent=2)})
    archive.seek(0)
    run = torch.export.load(archive).module()
    batches = [images[:batch] for batch in BATCHES]
    difference = compare(torch.cat([run(batch) for batch in batches]),
                         torch.cat([model(batch) for batch in batches]), NEAR,
                         f"{out}: the exported program's")
    with written_atomically(out) as file:
        file.write(archive.getvalue())
    return f"read back and run in batches of {', '.join(map(str, BATCHES))}: {difference}"


@torch.no_grad()
def export_run(trained: Trained, out: Path, views: Tensor) -> str:
    """Write a run folder `out` for using the model, not for training; return what was checked.

    Its last.pt contains the plain values of the checkpoint, and the weights in float16 under
    "model". The run's text files are copied without absolute paths; if the checkpoint is not from a
    run, there is only recipe.toml. Raises CheckpointError, and leaves no folder, if a weight is too
    large for float16, or if rounding changes the logits by more than `NEAR_IN_HALF`.

    views: (B, 3, H, W) uint8 images to compare on.
    """
    stored, source = load_checkpoint(trained.path, mmap=True), RunFolder(trained.path.parent)
    of_run = "recipe" in stored
    recipe = from_dict(stored["recipe"], str(trained.path)) if of_run else trained.recipe
    source.starts()                                  # a damaged run.json is an error of one line
    rounded = {name: value.half() if value.is_floating_point() else value
               for name, value in trained.model.state_dict().items()}
    for name, value in rounded.items():
        if not value.isfinite().all():
            raise CheckpointError(f"{out}: '{name}' is beyond half precision, which ends at 65504; "
                                  "nothing was written")
    state = {name: stored[name] for name in ("grid", "step", "progress", "micro_batch")
             if name in stored}
    state |= {"model": rounded, "ema": None, "classes": list(trained.classes),
              "recipe": without_folders(trained.recipe).as_dict()}
    with folder_at(out) as place:
        folder = RunFolder(place)
        folder.make()
        for path in (source.info, source.metrics.path, source.steps.path) if of_run else ():
            if path.exists():
                with written_atomically(place / path.name) as file:
                    file.write(without_paths(path.read_bytes()) if path == source.info else
                               path.read_bytes())
        folder.record_recipe(dump_recipe(without_folders(recipe)))
        save_atomically(state, folder.last)
        inputs = as_input(views, trained.recipe)
        difference = compare(load(place).model(inputs), trained.model(inputs), NEAR_IN_HALF,
                             f"{out}: with weights in half precision,")
    return f"read back and run on {len(views)} images: {difference}"


@contextmanager
def folder_at(out: Path) -> Iterator[Path]:
    """A context that yields the path of a folder to make, which in the end becomes `out`."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as parent:
        folder = Path(parent) / out.name
        yield folder
        folder.rename(out)
        sync_folder(out.parent)


def require_equal(read: dict[str, Tensor], weights: dict[str, Tensor], out: Path) -> None:
    """Raise CheckpointError unless what was read from `out` is, to the bit, what was written."""
    if read.keys() != weights.keys() or not all(torch.equal(read[name], value)
                                                for name, value in weights.items()):
        raise CheckpointError(f"{out}: holds other weights than were written")


def compare(found: Tensor, logits: Tensor, near: float, whose: str) -> str:
    """How far `found` is from a model's logits, in words.

    Raises CheckpointError, which begins with `whose`, if that is more than `near` of the largest.
    """
    far, largest = (found - logits).abs().max().item(), logits.abs().max().item()
    if not far <= near * max(largest, 1.0):
        raise CheckpointError(f"{whose} logits are up to {far:.1e} from the model's, which are up "
                              f"to {largest:.1f}; nothing was written")
    return f"largest difference {far:.1e}, of logits up to {largest:.1f}"


def views_to_check(trained: Trained, folder: Path | None) -> tuple[Tensor, str]:
    """Seven evaluation views (7, 3, H, W) uint8, evenly chosen, and where they are from, in words.

    The images are from `folder` if it is given, otherwise from the recipe's validation set, or from
    the embedded set `shapes` if that cannot be opened. Of fewer than seven some are repeated.
    Raises DataError for a folder without images.
    """
    data, count = trained.recipe.data, max(BATCHES)
    source: Source
    if folder is not None:
        source, name = LooseImages(folder, count), str(folder)
    else:
        source, name = open_split("shapes", "", "val", 10), "the embedded set 'shapes'"
        with suppress(DataError):
            source = open_split(data.name, data.root, "val", data.num_classes)
            name = f"the validation set of {data.name}"
    return torch.stack([trained.view(source.image(number * len(source) // count))
                        for number in range(count)]), name


# ---------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------


def require_fitting(args: argparse.Namespace, parser: Parser) -> None:
    """Raise an error of one line if options do not fit the kind of export, or --out is unusable."""
    if args.to in ("safetensors", "transformers") and (args.normalise or args.images):
        parser.error("--normalise and --images are for --to torch; a file of weights has no "
                     "program to normalise in, or to run")
    if args.to == "run" and (args.normalise or args.image_size):
        parser.error("--normalise and --image-size are for the other exports; a run folder's "
                     "images are those of its recipe, which normalises them")
    folder, there = args.to in ("run", "transformers"), args.out.parent.is_dir()
    if folder and (not there or args.out.exists()):
        parser.error(f"--out {args.out}: expected a folder that does not exist yet, in one that "
                     "does")
    if not there or args.out.is_dir():
        parser.error(f"--out {args.out}: expected a file in a folder that exists")


def main(arguments: list[str] | None = None) -> int:
    """Run the program with these arguments (default: the command line); return the exit status."""
    parser = Parser(prog="python -m vitinit.export", description=__doc__)
    add_run(parser)
    parser.add_argument("--to", required=True,
                        choices=("safetensors", "torch", "transformers", "run"))
    parser.add_argument("--out", type=Path, required=True, metavar="FILE",
                        help="the file to write; with --to run or transformers, a folder that does "
                             "not exist yet")
    parser.add_argument("--normalise", action="store_true",
                        help="the program takes uint8 images and normalises them (--to torch)")
    parser.add_argument("--images", type=Path, metavar="FOLDER",
                        help="images to compare on (--to torch and run); by default the recipe's "
                             "validation set, or the embedded one")

    def program() -> None:
        args = parser.parse_args(arguments)
        require_fitting(args, parser)
        trained = load_run(args)
        if args.to == "safetensors":
            found = export_safetensors(trained, args.out)
        elif args.to == "transformers":
            found = export_transformers(trained, args.out)
        else:
            views, name = views_to_check(trained, args.images)
            found = (export_run(trained, args.out, views) if args.to == "run" else
                     export_program(trained, args.out, views, inside=args.normalise))
            found += f"; images of {name}"
        height, width = trained.image_size
        written = sum(path.stat().st_size for path in [args.out, *args.out.glob("*")]
                      if path.is_file())
        print(f"wrote   {args.out}, {written / 1e6:.1f} MB: {trained.recipe.model.name}"
              f", images (B, 3, {height}, {width}) {'uint8' if args.normalise else 'normalised'} → "
              f"logits (B, {len(trained.classes)})\nchecked {found}")
    return run_program("vitinit.export", program)


if __name__ == "__main__":
    sys.exit(main())
