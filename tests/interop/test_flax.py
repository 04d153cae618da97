"""Arrays that Flax wrote (.npz): the same function here, as Flax's own layers compute it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from refused import refused
from torch import Tensor

import vitinit
from vitinit.base.files import CheckpointError

WIDTH, HEADS, HIDDEN, TOKENS_HIDDEN, CLASSES, PATCH, SIDE = 22, 2, 17, 13, 7, 5, 15
PATCHES = (SIDE // PATCH) ** 2
# Of Google's first code, and of big_vision: parts of a block, and where positions stand.
PARTS = {
    "google": ("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"),
    "big_vision": ("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0"),
}
POSITIONS = {"google": "Transformer/posembed_input/pos_embedding", "big_vision": "pos_embedding"}


def norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}/scale": (WIDTH,), f"{name}/bias": (WIDTH,)}


def layer(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> dict:
    return {f"{name}/kernel": (*inputs, *outputs), f"{name}/bias": outputs}


def shapes_of_vit(code: str, class_token: bool = True) -> dict[str, tuple[int, ...]]:
    attention, second, mlp = PARTS[code]
    shapes = layer("embedding", (PATCH, PATCH, 3), (WIDTH,)) | layer("head", (WIDTH,), (CLASSES,))
    shapes |= norm("Transformer/encoder_norm")
    shapes[POSITIONS[code]] = (1, class_token + PATCHES, WIDTH)
    if class_token:
        shapes["cls"] = (1, 1, WIDTH)
    for block in ("Transformer/encoderblock_0", "Transformer/encoderblock_1"):
        shapes |= norm(f"{block}/LayerNorm_0") | norm(f"{block}/{second}")
        for part in ("query", "key", "value"):
            shapes |= layer(f"{block}/{attention}/{part}", (WIDTH,), (HEADS, WIDTH // HEADS))
        shapes |= layer(f"{block}/{attention}/out", (HEADS, WIDTH // HEADS), (WIDTH,))
        shapes |= layer(f"{block}/{mlp}/Dense_0", (WIDTH,), (HIDDEN,))
        shapes |= layer(f"{block}/{mlp}/Dense_1", (HIDDEN,), (WIDTH,))
    return shapes


def shapes_of_mixer() -> dict[str, tuple[int, ...]]:
    shapes = layer("stem", (PATCH, PATCH, 3), (WIDTH,)) | layer("head", (WIDTH,), (CLASSES,))
    shapes |= norm("pre_head_layer_norm")
    for block in ("MixerBlock_0", "MixerBlock_1"):
        shapes |= norm(f"{block}/LayerNorm_0") | norm(f"{block}/LayerNorm_1")
        for mixing, width, hidden in (
            ("token_mixing", PATCHES, TOKENS_HIDDEN),
            ("channel_mixing", WIDTH, HIDDEN),
        ):
            shapes |= layer(f"{block}/{mixing}/Dense_0", (width,), (hidden,))
            shapes |= layer(f"{block}/{mixing}/Dense_1", (hidden,), (width,))
    return shapes


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    return {
        name: generator.normal(size=shape).astype(np.float32) * 0.4
        for name, shape in shapes.items()
    }


class Flax:
    """The layers of Flax: inputs before outputs, channels last, an axis for the heads."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = {name: torch.from_numpy(a).double() for name, a in arrays.items()}

    def dense(self, x: Tensor, name: str) -> Tensor:
        return x @ self.arrays[f"{name}/kernel"] + self.arrays[f"{name}/bias"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return scaled * self.arrays[f"{name}/scale"] + self.arrays[f"{name}/bias"]

    def mlp(self, x: Tensor, name: str) -> Tensor:
        hidden = self.dense(x, f"{name}/Dense_0")
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
        return self.dense(hidden, f"{name}/Dense_1")

    def patches(self, images: Tensor, name: str) -> Tensor:
        """Images with channels last, (B, H, W, 3) → (B, N, C)."""
        count, side = len(images), SIDE // PATCH
        pixels = images.view(count, side, PATCH, side, PATCH, 3)
        x = torch.einsum("nabcde,bdef->nacf", pixels, self.arrays[f"{name}/kernel"])
        return (x + self.arrays[f"{name}/bias"]).flatten(1, 2)

    def attention(self, x: Tensor, name: str) -> Tensor:
        q, k, v = (
            torch.einsum("nti,ihd->nthd", x, self.arrays[f"{name}/{part}/kernel"])
            + self.arrays[f"{name}/{part}/bias"]
            for part in ("query", "key", "value")
        )
        logits = torch.einsum("nthd,nshd->nhts", q, k) / (WIDTH // HEADS) ** 0.5
        mixed = torch.einsum("nhts,nshd->nthd", logits.softmax(-1), v)
        out = torch.einsum("nthd,hdo->nto", mixed, self.arrays[f"{name}/out/kernel"])
        return out + self.arrays[f"{name}/out/bias"]

    def vit(self, images: Tensor, code: str) -> Tensor:
        attention, second, mlp = PARTS[code]
        x = self.patches(images, "embedding")
        if "cls" in self.arrays:
            x = torch.cat([self.arrays["cls"].expand(len(x), -1, -1), x], dim=1)
        x = x + self.arrays[POSITIONS[code]]
        for block in ("Transformer/encoderblock_0", "Transformer/encoderblock_1"):
            x = x + self.attention(self.norm(x, f"{block}/LayerNorm_0"), f"{block}/{attention}")
            x = x + self.mlp(self.norm(x, f"{block}/{second}"), f"{block}/{mlp}")
        x = self.norm(x, "Transformer/encoder_norm")
        return self.dense(x[:, 0] if "cls" in self.arrays else x.mean(1), "head")

    def mixer(self, images: Tensor) -> Tensor:
        x = self.patches(images, "stem")
        for block in ("MixerBlock_0", "MixerBlock_1"):
            columns = self.norm(x, f"{block}/LayerNorm_0").transpose(1, 2)
            x = x + self.mlp(columns, f"{block}/token_mixing").transpose(1, 2)
            x = x + self.mlp(self.norm(x, f"{block}/LayerNorm_1"), f"{block}/channel_mixing")
        return self.dense(self.norm(x, "pre_head_layer_norm").mean(1), "head")


COMMON = {
    "data.image_size": SIDE,
    "data.num_classes": CLASSES,
    "model.options.patch_size": PATCH,
    "model.options.embed_dim": WIDTH,
    "model.options.depth": 2,
}
OF_VIT = {**COMMON, "model.options.mlp_ratio": (HIDDEN + 0.5) / WIDTH}
OF_MIXER = {
    **COMMON,
    "model.options.tokens_ratio": (TOKENS_HIDDEN + 0.5) / WIDTH,
    "model.options.channels_ratio": (HIDDEN + 0.5) / WIDTH,
}


def same_function(
    path: Path, recipe: str, overrides: dict, expected: Tensor, images: Tensor, held_against
):
    trained = vitinit.load(path, recipe=recipe, overrides=overrides)
    assert expected.std() > 0.1
    logits = trained.model.double()(images.permute(0, 3, 1, 2))
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-6)
    held_against(logits, expected, cases=len(images))
    return trained


@pytest.fixture
def images() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(3, SIDE, SIDE, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    "code, before, scanned, class_token",
    [
        ("google", "", False, True),
        ("google", "opt/target/", False, True),
        ("big_vision", "params/", False, True),
        ("big_vision", "params/", True, False),
    ],
)
def test_a_vit_of_flax_is_its_function_here_and_its_heads_are_read(
    code, before, scanned, class_token, images, tmp_path, capsys, held_against
):
    """Of deit_tiny, which has three heads. timm 1.0.31 loaded twenty such files, of five sizes, as the
    same tensors, with the same logits to the bit in float32."""
    arrays, path = drawn(shapes_of_vit(code, class_token)), tmp_path / "a.npz"
    stored = dict(arrays)
    if scanned:
        for name in arrays:
            if "encoderblock_0" in name:
                parts = [stored.pop(name.replace("block_0", f"block_{i}")) for i in (0, 1)]
                stored[name.replace("block_0", "block")] = np.stack(parts)
    others = {"opt/state/step": np.int32(7), "extra": np.int64(3)} if before else {}
    np.savez(path, **{before + name: array for name, array in stored.items()}, **others)
    pool = {"model.options.pool": "class" if class_token else "mean"}
    expected = Flax(arrays).vit(images, code)
    trained = same_function(path, "deit_tiny", OF_VIT | pool, expected, images, held_against)
    assert trained.recipe.model.options["num_heads"] == HEADS
    assert f"num_heads {HEADS}" in capsys.readouterr().err


def test_a_mixer_of_flax_is_its_function_here(images, tmp_path, held_against):
    arrays = drawn(shapes_of_mixer())
    np.savez(tmp_path / "a.npz", **arrays)
    expected = Flax(arrays).mixer(images)
    same_function(tmp_path / "a.npz", "mixer_b16", OF_MIXER, expected, images, held_against)


def test_other_arrays_are_refused_and_a_pickle_among_them_is_not_read(tmp_path):
    arrays, path = drawn(shapes_of_vit("google")), tmp_path / "a.npz"

    def line(**others: np.ndarray) -> str:
        np.savez(path, **arrays, **others)
        return refused(CheckpointError, vitinit.load, path, recipe="deit_tiny", overrides=OF_VIT)

    pickled = np.array([path], dtype=object)
    assert "Object arrays cannot be loaded" in line(other=pickled)
    layer_before_the_head = np.ones((WIDTH, WIDTH), np.float32)
    said = line(**{"pre_logits/kernel": layer_before_the_head})
    assert "does not fit the model; surplus: pre_logits.weight" in said
    assert "'step' is torch.int64" in line(step=np.int64(1))
    for shape in ((1001, 1), (2, 0)):  # one entry for each block, however few bytes they have
        said = line(**{"Transformer/encoderblock/LayerNorm_0/scale": np.zeros(shape)})
        assert f"scale is {shape}, expected numbers of at most 1000 blocks" in said
