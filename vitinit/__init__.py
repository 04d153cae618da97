"""vitinit: vision transformers from scratch, whose attention can be initialised as a convolution.

    model = vitinit.build_model("vit_tiny", num_classes=10, image_size=32, patch_size=4)
    vitinit.init_weights(model, "impulse", generator=torch.Generator().manual_seed(0))   # in place

    trained = vitinit.load("runs/quickstart-impulse-s0")
    trained.predict("photo.jpg")                        # [(class, probability), …]

`build_model` makes a model of one of the families in `vitinit.models`, `init_weights` initialises
it by one of the methods in `vitinit.init`, and `load` reads what `train.py` has trained, as a
`Trained`.
"""

from .init import init_weights
from .models import build_model
from .runs.trained import Trained, load

__version__ = "0.1.0"
__all__ = ["Trained", "build_model", "init_weights", "load"]
