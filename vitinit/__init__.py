"""vitinit: vision transformers from scratch, whose attention can be initialised as a convolution.

    model = vitinit.build_model("vit_tiny", num_classes=10, image_size=32, patch_size=4)
    vitinit.init_weights(model, "impulse", generator=torch.Generator().manual_seed(0))   # in place

    vitinit.Run("quickstart", init="impulse", out_dir="runs/mine").train()
    trained = vitinit.load("runs/mine")
    trained.predict("photo.jpg")                        # [(class, probability), …]

`build_model` makes a model of one of the families in `vitinit.models`, `init_weights` initialises
it by one of the methods in `vitinit.init`, a `Run` trains one as a recipe describes, as `train.py`
does, and `load` reads what was trained, as a `Trained`.
"""

from typing import Any

from .base.table import attribute

__version__ = "0.1.0"
__all__ = ["Run", "Trained", "build_model", "init_weights", "load"]

# Where each name is from. They are imported when they are first asked for: `import vitinit.init`
# in another project's trainer then needs neither torchvision nor the data pipeline.
HOMES = {
    "Run": ".run:Run",
    "Trained": ".runs.trained:Trained",
    "build_model": ".models:build_model",
    "init_weights": ".init:init_weights",
    "load": ".runs.trained:load",
}


def __getattr__(name: str) -> Any:
    globals()[name] = value = attribute(__name__, name, HOMES)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
