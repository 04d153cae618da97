"""Every extra that README, recipe cards, messages and comments name exists in setup.cfg."""

from __future__ import annotations

import configparser
import re


def test_every_extra_that_is_named_exists(repository):
    setup = configparser.ConfigParser()
    setup.read(repository / "setup.cfg")
    extras = set(setup["options.extras_require"])
    texts = [repository / name for name in ("README.md", "train.py", "eval.py", "setup.cfg")]
    for pattern in ("vitinit/**/*.py", "vitinit/**/*.md", "recipes/*.toml", "recipes/*.md",
                    "tests/**/*.py"):
        texts += repository.glob(pattern)
    named = {}
    for path in texts:
        # .[test] in a checkout, vitinit[test] for an installed package; commas separate several.
        text = path.read_text("utf-8")
        for words in re.findall(r"(?:install[^\n]*?[ '\"]\.|vitinit)\[([\w, -]+)\]", text):
            for word in re.split(r",\s*", words):
                named.setdefault(word, path.name)
    assert extras >= {"figures", "safetensors", "datasets", "test"}
    assert {name: path for name, path in named.items() if name not in extras} == {}
    assert set(named) >= {"test", "datasets", "figures", "safetensors"}
