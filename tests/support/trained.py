"""The small model pair whose draft really predicts (tests/trained_pair)."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

from sglang_dynspec.testing.models import Models

HOME = Path(__file__).parent.parent / "trained_pair"
_TARGET, _EAGLE3 = HOME / "target", HOME / "eagle3"
PAIR = Models(target=_TARGET, eagle=_EAGLE3, eagle3=_EAGLE3, standalone=_EAGLE3)
"""A byte-level Llama, and its EAGLE-3 head (the others are not there)."""


def held_out_prompts(count: int, length: int) -> list[list[int]]:
    """So many prompts of so many bytes, from modules of the standard library that the pair has not
    been trained on."""
    home = Path(sysconfig.get_path("stdlib"))
    names = set(json.loads((HOME / "figures.json").read_text(encoding="utf-8"))["held_out"])
    files = sorted(path for path in home.rglob("*.py") if path.name in names)
    texts = [path.read_bytes() for path in files if "test" not in path.parts]
    long = [text for text in texts if len(text) > 3 * length]
    return [list(text[length : 2 * length]) for text in long[:count]]
