"""Export a trained model: as files that can be read without vitinit, or as a small run folder.

    vitinit export runs/base --to folder --out model
    vitinit export runs/base --to safetensors --out base.safetensors
    vitinit export runs/base --to safetensors --names torchvision --out base.safetensors
    vitinit export runs/base --to folder --names transformers --out model
    vitinit export runs/base --to torch --out base.pt2 --normalise
    vitinit export runs/base --to onnx --out base.onnx
    vitinit export runs/base --to run --out small

folder: a model to hand on: weights, labels, preprocessing, the temperature if one was fitted, and a
model card, README.md. timm's create_model("local-dir:model", pretrained=True) opens it, and so do
transformers' Auto classes, without timm if the names are transformers'; vitinit.load reads it, too.
safetensors: the weights alone under timm's names, or those of --names (both need the extra
`safetensors`). timm's are our own, but for LayerScale and mixed frequencies of rotary models; an
--out without the ending of a file is a folder as above. The metadata of a file state the class
names, how an image becomes the model's input, the temperature by which to divide logits (1 if none
was fitted), the recipe, and which model of the library takes these weights.
torch: a program of torch.export, images → logits, for any batch size. With --normalise it takes
uint8 images. The same metadata are in the archive as vitinit.json.
onnx: such a program as ONNX, uint8 images → logits, with the metadata (needs the extra `onnx`).
Of a model without a classifier, as a masked autoencoder's encoder is, both give the features: to
timm with num_classes=0, to transformers as its class without a head.
run: a run folder that holds only the weights, in half precision, with copies of the run's recipe
(with the changes of --set), record and metrics, and the temperature if one was fitted. It can be
loaded, evaluated and plotted like any run, but not resumed.

Of a run's folder the weights are those of the best epoch, unless --weights says otherwise.

No export contains a photograph, and of an absolute path of this machine only the last part stays.
Each is compared with the model before the command ends: safetensors to the bit, programs and runs
by their outputs on images of noise, two of which a program keeps as an example.
"""

import io
import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import __version__
from ..base.files import CheckpointError, read_bytes, write_text_atomically, written_atomically
from ..data.augment import normalise
from ..interop.weights.libraries import counterpart
from ..interop.weights.names import Names, foreign_names, native_tensors
from ..interop.weights.readers import FITS, preprocessor_config
from ..models import MODELS
from ..recipe.files import RecipeError, building, from_dict
from ..recipe.sections import Recipe
from ..runs import calibration
from ..runs.checkpoint import read_checkpoint_file
from ..runs.data import as_input
from ..runs.folder import RunFolder, save_atomically
from ..runs.load import Saved, open_file
from ..runs.trained import VIEW_KEYS, Trained, load
from .shared.card import card_of
from .shared.command_line import Output, Parser, add_run, main_of, run_arguments
from .shared.outputs import require_replaceable
from .shared.records import Json, without_folders, without_paths

NEAR = 1e-4  # largest difference of outputs, relative to the largest
NEAR_IN_ONNX = 1e-5
NEAR_IN_HALF = 0.02  # the same, with weights in half precision
LARGEST_HALF = torch.finfo(torch.float16).max
SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt2", "onnx": ".onnx"}  # of files
OF_FILES = (*SUFFIXES.values(), ".pt")  # ends of names that no folder gets


def metadata(trained: Trained) -> Json:
    """Everything that is needed beside the weights to use the model, as plain values."""
    recipe = trained.recipe.with_data(image_size=trained.image_size)
    return {
        "made_by": f"vitinit {__version__}",
        "classes": known_classes(trained),
        "threshold": trained.threshold,
        "temperature": trained.temperature,
        "image_size": trained.image_size,
        "mean": recipe.data.mean,
        "std": recipe.data.std,
        "crop_pct": recipe.eval.crop_pct,
        "interpolation": recipe.eval.interpolation,
        "fit": recipe.augment.fit,
        "model": recipe.model.name,
        "recipe": for_others(recipe).as_toml(),
    }


def known_classes(trained: Trained) -> list[str] | None:
    """The names of a model's classes; None if there are none, and numbers stand in for them."""
    numbers = tuple(map(str, range(len(trained.classes))))
    return list(trained.classes) if trained.named or trained.classes != numbers else None


def fitted_row(trained: Trained) -> Json:
    """The row of calibration.json of the weights as they are stored, which have another digest than
    those of the model if these are resized, or were in half precision; {} if there is none, or one
    of other views than the model's.
    """
    path, state, reader = open_file(trained.path)
    stored = Saved(path, state, trained.recipe, trained.recipe.data.image_size, reader)
    row = calibration.row_of(stored.tensors(trained.weights), path.parent) or {}
    views = row.get("view", stored.view)  # which older rows lack
    return row if views == stored._replace(size=trained.image_size).view else {}


def for_others(recipe: Recipe) -> Recipe:
    """The recipe with the last parts of its absolute paths: nobody else has the folders above."""
    return from_dict(without_folders(recipe.as_dict()), recipe.name)


def taken_by(library: str, trained: Trained) -> tuple[str, Json, Names]:
    """`counterpart` of the model in a library; RecipeError if there is none."""
    recipe = trained.recipe
    with building(f"recipe {recipe.name}", "model"):
        return counterpart(
            library,
            MODELS[recipe.model.name][0],
            image_size=trained.image_size,
            in_channels=recipe.data.channels,
            **recipe.model.options,
        )


def export_weights(trained: Trained, out: Path, library: str | None) -> str:
    """Write the weights to the file `out`, under the names of `library`; return what was checked.

    None: under timm's, or ours if it has no such model; the file says which takes them, or null.
    """
    notes = metadata(trained) | {"timm": None}
    names: Names = {}  # ours
    arguments: Json = {}
    if library == "torchvision":  # whose models all have one
        trained.require_classifier()
    try:
        name, arguments, names = taken_by(library or "timm", trained)
        notes[library or "timm"] = {
            "class": name,
            "arguments": arguments | {"num_classes": len(trained.classes)},
        }
    except RecipeError:
        if library:
            raise
    tensors = with_biases(trained.model, arguments)
    if library == "torchvision":  # its Swin's files hold these, which are fixed
        for name, index in trained.model.named_buffers():
            if name.endswith("relative_position_index"):
                tensors[name] = index.flatten()
    return write_weights(trained, foreign_names(tensors, names), notes, out)


def export_folder(trained: Trained, out: Path, library: str, row: Json) -> str:
    """Write a folder `out` that timm or transformers loads; return what was checked. row: of
    `fitted_row`.
    """
    full_name, arguments, names = taken_by(library.replace("timm", "timm.create_model"), trained)
    name = full_name.rpartition(".")[2]
    notes = metadata(trained)
    files = {}
    prefix = ""
    if library == "transformers":
        labels: Sequence[str] = trained.classes
        if known_classes(trained) is None:
            labels = [f"LABEL_{number}" for number in labels]  # their stand-in for a name
        if labels:
            prefix = f"{arguments['model_type']}."
            arguments["id2label"] = dict(enumerate(labels))
            arguments["label2id"] = {label: index for index, label in enumerate(labels)}
            if trained.threshold is not None:
                arguments["problem_type"] = "multi_label_classification"
        else:
            name = name.partition("For")[0] + "Model"  # ViTForImageClassification without a head
        files["config.json"] = arguments | {"architectures": [name]}
        files["preprocessor_config.json"] = preprocessor_config(trained.recipe, trained.image_size)
    else:
        heads = []
        for layer, module in trained.model.named_modules():
            if layer.startswith("head") and isinstance(module, nn.Linear):
                heads.append(layer)
        views = {key: notes[key] for key in ("mean", "std", "crop_pct", "interpolation")}
        (crop_mode,) = (mode for mode, fit in FITS.items() if fit == notes["fit"])
        files["config.json"] = {
            "architecture": name,
            "num_classes": len(trained.classes),
            "label_names": known_classes(trained),
            "model_args": arguments,
            "pretrained_cfg": {
                "input_size": [trained.recipe.data.channels, *trained.image_size],
                "fixed_input_size": "img_size" in arguments,
                "classifier": heads,
                "crop_mode": crop_mode,
                **views,
            },
        }
    with new_folder(out):
        for file, table in files.items():
            write_text_atomically(json.dumps(table, indent=2) + "\n", out / file)
        write_text_atomically(card_of(trained, out.name, library), out / "README.md")
        if row:
            calibration.add_row(row, trained.model.state_dict(), out)
        tensors = foreign_names(with_biases(trained.model, arguments), names, prefix)
        return write_weights(trained, tensors, {"format": "pt"} | notes, out / "model.safetensors")


def with_biases(model: nn.Module, arguments: Json) -> dict[str, Tensor]:
    """The weights, with zeros as biases of Q, K and V where only the library's model has them."""
    tensors = model.state_dict()
    if arguments.get("qkv_bias"):
        for name, value in model.state_dict().items():
            if name.endswith("qkv.weight"):
                tensors.setdefault(name.replace("weight", "bias"), value.new_zeros(len(value)))
    return tensors


def write_weights(trained: Trained, tensors: dict[str, Tensor], notes: Json, out: Path) -> str:
    """Write a file of safetensors with these notes, as texts; return what was checked.

    Raises CheckpointError, and writes none, if it would hold other weights than the model's.
    """
    try:
        from safetensors.torch import load, save
    except ImportError:
        raise CheckpointError(
            f"{out}: writing it needs the extra 'safetensors': pip install 'vitinit[safetensors]'"
        ) from None
    texts = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in notes.items()
    }
    content = in_order(save({name: value.contiguous() for name, value in tensors.items()}, texts))
    read = native_tensors(load(content), trained.recipe.model.options)
    weights = trained.model.state_dict()
    same = read.keys() == weights.keys() and all(
        torch.equal(read[name], value) for name, value in weights.items()
    )
    if not same:
        raise CheckpointError(f"{out}: would hold other weights than the model's")
    with written_atomically(out) as file:
        file.write(content)
    return f"{len(tensors)} tensors read back, equal to the bit"


def in_order(content: bytes) -> bytes:
    """A file of safetensors whose header is sorted: the library writes it in another order each
    time. The header is JSON, after eight bytes that say its length, and ends in spaces.
    """
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + size]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)  # tensors begin at multiples of eight
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


class Normalised(nn.Module):
    """A model with normalisation in front: images (B, 3, H, W) uint8 → logits."""

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.model, self.mean, self.std = model, mean, std

    def forward(self, images: Tensor) -> Tensor:
        return self.model(normalise(images, self.mean, self.std))


@torch.no_grad()
def export_program(trained: Trained, out: Path, *, inside: bool) -> str:
    """Write a program images → logits to the file `out`; return its difference from the model.

    inside: whether the program normalises its input itself. Raises CheckpointError, and leaves no
    file, if its outputs differ from the model's by more than `NEAR`.
    """
    model, images = given(trained, inside=inside)
    program = program_of(model, images)
    archive = io.BytesIO()
    notes = json.dumps(metadata(trained), indent=2)
    torch.export.save(program, archive, extra_files={"vitinit.json": notes})
    archive.seek(0)
    run = torch.export.load(archive).module()
    checked = require_same_outputs(run, model, images, NEAR, f"{out}: the exported program's")
    with written_atomically(out) as file:
        file.write(archive.getvalue())
    return checked


def given(trained: Trained, *, inside: bool) -> tuple[nn.Module, Tensor]:
    """The model of a program, and images of noise for it. inside: it normalises them itself."""
    data, images = trained.recipe.data, noise(trained)
    if inside:
        return Normalised(trained.model, data.mean, data.std), images
    return trained.model, as_input(images, trained.recipe)


def program_of(model: nn.Module, images: Tensor) -> torch.export.ExportedProgram:
    """The program of a model, images → logits, which keeps two of these as an example."""
    example = images[:2].clone()
    shapes = {"images": {0: torch.export.Dim("batch")}}
    program = torch.export.export(model, (example,), strict=False, dynamic_shapes=shapes)
    for node in [*program.graph.nodes]:
        node.meta.pop("stack_trace", None)  # it has the path of the code
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            program.graph.erase_node(node)  # it would refuse the dtypes of autocast
    return program


@torch.no_grad()
def export_onnx(trained: Trained, out: Path) -> str:
    """Write a program as ONNX, images (B, 3, H, W) uint8 → logits, with `metadata`; return what was
    checked. Raises CheckpointError, and leaves no file, if onnxruntime's outputs
    differ from the model's by more than NEAR_IN_ONNX.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - torch needs it
    except ImportError:
        raise CheckpointError(
            f"{out}: writing it needs the extra 'onnx': pip install 'vitinit[onnx]'"
        ) from None
    model, images = given(trained, inside=True)
    outputs = "logits" if trained.classes else "features"
    written = torch.onnx.export(
        program_of(model, images),
        input_names=["images"],
        output_names=[outputs],
        dynamo=True,
        verbose=False,
    )
    assert written is not None
    graph = written.model_proto
    for key, value in metadata(trained).items():
        text = value if isinstance(value, str) else json.dumps(value)
        graph.metadata_props.add(key=key, value=text)
    content = graph.SerializeToString(deterministic=True)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        (found,) = session.run([outputs], {"images": images.numpy()})
        return torch.from_numpy(found)

    checked = require_same_outputs(run, model, images, NEAR_IN_ONNX, f"{out}: onnxruntime's")
    with written_atomically(out) as file:
        file.write(content)
    return f"by onnxruntime: {checked}"


@torch.no_grad()
def export_run(trained: Trained, out: Path, row: Json) -> str:
    """Write a run folder `out` for using the model, not for training; return what was checked. row:
    of `fitted_row`.

    The run's steps.jsonl stays behind; of a checkpoint of no run there is only recipe.toml. Raises
    CheckpointError, and leaves no folder, if half precision changes outputs by over NEAR_IN_HALF, or
    cannot hold a weight.
    """
    stored = read_checkpoint_file(trained.path, mmap=True)
    source = RunFolder(trained.path.parent)
    of_run = "recipe" in stored
    recipe = trained.recipe
    if of_run:  # whose folder of images may have been stated relative to another
        recipe = recipe.with_data(root=stored["recipe"]["data"]["root"])
    recipe = for_others(recipe)
    weights = {}
    for name, value in trained.model.state_dict().items():
        weights[name] = value.half() if value.is_floating_point() else value
        if not weights[name].isfinite().all():
            raise CheckpointError(
                f"{out}: '{name}' has values up to {value.abs().max():,.0f}, and a run is exported "
                f"in half precision, which ends at {LARGEST_HALF:,.0f}; expected --to safetensors, "
                "which keeps them as they are"
            )
    classes = known_classes(trained)
    state = {"model": weights, "ema": None, "classes": classes, "recipe": recipe.as_dict()}
    state |= {name: stored[name] for name in ("grid", "step", "progress") if name in stored}
    with new_folder(out):
        folder = RunFolder(out)
        if of_run and source.starts():  # a damaged run.json is an error of one line
            write_text_atomically(without_paths(read_bytes(source.info)).decode(), folder.info)
        metrics = source.metrics.path
        if of_run and metrics.exists():
            write_text_atomically(read_bytes(metrics).decode(), folder.metrics.path)
        write_text_atomically(recipe.as_toml(), folder.recipe)
        save_atomically(state, folder.last)
        if row:
            calibration.add_row(row, weights, out)
        images = as_input(noise(trained), trained.recipe)
        whose = f"{out}: with weights in half precision,"
        return require_same_outputs(load(out).model, trained.model, images, NEAR_IN_HALF, whose)


@contextmanager
def new_folder(out: Path) -> Iterator[None]:
    """A context that makes a folder, and removes it if an error ends the context."""
    out.mkdir()
    try:
        yield
    except BaseException:
        shutil.rmtree(out)
        raise


def require_same_outputs(
    export: Callable[[Tensor], Tensor], model: nn.Module, images: Tensor, near: float, whose: str
) -> str:
    """How far two models' outputs are apart, in words; an error if over `near` of the largest."""
    outputs = model(images)
    far = (export(images) - outputs).abs().max().item()
    largest = outputs.abs().max().item()
    if not far <= near * max(largest, 1.0):
        raise CheckpointError(
            f"{whose} outputs are up to {far:.1e} from the model's, which are up "
            f"to {largest:.1f}; nothing was written"
        )
    return (
        f"read back and run on {len(images)} images: largest difference {far:.1e}, of "
        f"outputs up to {largest:.1f}"
    )


def noise(trained: Trained) -> Tensor:
    """Images on which an export is compared with the model: (7, 3, H, W) uint8."""
    rng = torch.Generator().manual_seed(0)
    shape = 7, trained.recipe.data.channels, *trained.image_size
    return torch.randint(256, shape, dtype=torch.uint8, generator=rng)


def parse_arguments(arguments: list[str]) -> Namespace:
    parser = Parser(prog="vitinit export", description=__doc__)
    add_run(parser, VIEW_KEYS)
    parser.add_argument(
        "--to", required=True, choices=("folder", "safetensors", "torch", "onnx", "run")
    )
    parser.add_argument(
        "--names",
        choices=("timm", "torchvision", "transformers"),
        help="the library that is to load the weights (--to safetensors)",
    )
    parser.add_argument(
        "--out",
        type=Output(),
        required=True,
        metavar="FILE",
        help="file to write, or a new folder (see above)",
    )
    parser.add_argument(
        "--normalise",
        action="store_true",
        help="the program takes uint8 images and normalises them (--to torch)",
    )
    args = parser.parse_args(arguments)
    if args.normalise and args.to != "torch":
        parser.error(f"--normalise does not go with --to {args.to}")
    if args.names and args.to not in ("safetensors", "folder"):
        parser.error(f"--names does not go with --to {args.to}")
    if args.image_size and args.to == "run":
        parser.error("--image-size does not go with --to run")
    args.folder = args.to == "run"
    if args.to == "folder":
        if args.names == "torchvision":
            parser.error("--names torchvision: it opens no folders; expected timm or transformers")
        args.to, args.folder = "safetensors", True
    elif args.to == "safetensors":
        file = args.names == "torchvision" or args.out.suffix in OF_FILES
        args.folder = args.names == "transformers" or not file
    if not args.folder:
        require_replaceable(args.out, SUFFIXES[args.to])
    elif args.out.suffix in OF_FILES:
        what = "a run is" if args.to == "run" else f"{args.names or 'timm'} opens"
        parser.error(f"--out {args.out}: {what} a folder; expected no {args.out.suffix} at the end")
    elif args.out.exists() or not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: expected a new folder in a folder that exists")
    return args


def export(args: Namespace) -> None:
    trained = load(**run_arguments(args))
    out, row = args.out, fitted_row(trained)
    trained = replace(trained, temperature=row.get("temperature", 1.0))
    if args.to == "run":
        trained.require_classifier()
        checked = export_run(trained, out, row)
    elif args.to == "torch":
        checked = export_program(trained, out, inside=args.normalise)
    elif args.to == "onnx":
        checked = export_onnx(trained, out)
    elif args.folder:
        checked = export_folder(trained, out, args.names or "timm", row)
    else:
        checked = export_weights(trained, out, args.names)
    height, width = trained.image_size
    kind = "uint8" if args.normalise or args.to == "onnx" else "normalised"
    written = sum(path.stat().st_size for path in [out, *out.glob("*")] if path.is_file())
    outputs = f"logits (B, {len(trained.classes)})" if trained.classes else "pooled features"
    print(
        f"wrote   {out}, {written / 1e6:.1f} MB: {trained.recipe.model.name}, images (B, "
        f"{trained.recipe.data.channels}, {height}, {width}) {kind} → {outputs}\nchecked {checked}"
    )
    if args.folder and args.to == "safetensors" and height != width:
        print(
            "note    for a size that is not square timm rounds the side to which it resizes, which "
            "is rounded down here: images may be a row larger there"
        )


main = main_of("vitinit export", parse_arguments, export)
