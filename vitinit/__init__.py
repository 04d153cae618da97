"""vitinit: vision transformers from scratch, whose attention can start out as a convolution."""

from .init import init_weights
from .models import build_model
from .runs.trained import Trained, load

__version__ = "0.1.0"
__all__ = ["Trained", "build_model", "init_weights", "load"]
