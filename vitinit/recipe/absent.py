"""What a recipe, a record or a checkpoint means that lacks a key: it is older than the key.

One table. Records on disk stay as they are, and are compared by what they meant.
"""

from ..base.values import Table, flat, plain
from ..data.three_augment import NO_THREE_AUGMENT
from ..tasks import CROSS_ENTROPY
from ..train.optim import NO_TEACHER

# Recipes of version 12 may leave these out: sections as a whole, and keys that came later.
SECTIONS_LEFT_OUT: Table = {
    "three_augment": plain(NO_THREE_AUGMENT),
    "distill": NO_TEACHER,
    "task": {"name": "classify"},
    "loss": plain(CROSS_ENTROPY),
}
KEYS_LEFT_OUT: Table = {
    "data.sampling": "shuffled",
    "data.held_out": 0.0,
    "data.decode": "cpu",
    "augment.fit": "crop",
    "init.checkpoint_head": "keep",
    "init.checkpoint_classes": "",
    "init.checkpoint_positions": "antialiased",
    "distill.classes": "",
    "optim.train": "all",
    "optim.muon_dtype": "bf16_on_gpu",
    "engine.compile_mode": "default",
    "engine.recompute": False,
    "schedule.cosine_after_warmup": False,
    "schedule.shift_epochs": 0,
}
MEANT_IN_RECIPES = flat(SECTIONS_LEFT_OUT)
# Records lack these, too, which came after the first of them were made, or went after them.
MEANT = {
    "init.options.constant_share": 0.0,
    "init.options.calibrated": False,
    "init.options.constant_variance": 0.95,
    "init.options.patch_init": "base",
    "init.options.value_init": "base",  # of rotary inits; the others had it from the start
    "init.options.value_alpha": 0.4,
    "init.options.value_beta": 0.4,
    "model.options.norm_place": "after",
    "model.options.channel_residual": "mlp",
    "model.options.norm_eps": 1e-6,
    "model.options.rope_frequencies": "axial",
    "model.options.rope_base": 100.0,
    "model.options.rope_coordinates": "index",
    "model.options.qk_norm": False,
    "model.options.layer_scale": 0.0,
    "model.options.mlp": "gelu",
    "model.options.prefix_positions": True,
    "model.options.constant_drop_path": False,
    "model.options.shift_blocks": 0,
    "model.options.shift_kernel": 3,
    "data.apply_exif_orientation": True,
    "init.checkpoint_fit": "exact",
    "optim.name": "adamw",
    **MEANT_IN_RECIPES,
    **KEYS_LEFT_OUT,
}
