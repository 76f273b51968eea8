"""Patches that run right after SGLang imports the module that they are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Patch = Callable[[Any], None]


class Patches:
    """A list of patches by module name, filled by decorators and registered all at once."""

    def __init__(self) -> None:
        self._patches: list[tuple[str, Patch]] = []

    def after_import(self, module_name: str) -> Callable[[Patch], Patch]:
        """Decorator: call the function with the module as soon as that one is imported."""

        def add(patch: Patch) -> Patch:
            self._patches.append((module_name, patch))
            return patch

        return add

    def register(self) -> None:
        """Hand all patches to wrapt; for modules already imported they run now."""
        from wrapt import register_post_import_hook

        for module_name, patch in self._patches:
            register_post_import_hook(patch, module_name)
