"""A package ``sgl_kernel`` for machines without a GPU.

SGLang imports many names from ``sgl_kernel`` at module level and calls few of them on a CPU. Here
every name imports; those in :mod:`.kernels` work, all others raise NotImplementedError when called.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from sglang_dynspec.errors import UnsupportedError

_PACKAGE = "sgl_kernel"


class MissingKernel:
    """Something of sgl_kernel that has no implementation here: imports, but cannot be called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{self.__name__} has no implementation in the sglang_dynspec CPU engine"
        )

    def __getattr__(self, name: str) -> MissingKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingKernel(f"{self.__name__}.{name}")

    def __repr__(self) -> str:
        return f"<MissingKernel {self.__name__}>"


class _StubFinder(MetaPathFinder, Loader):
    """Finds sgl_kernel and everything below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _PACKAGE or fullname.startswith(_PACKAGE + "."):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        package = module.__name__

        def __getattr__(name: str) -> Any:  # noqa: N807 - PEP 562
            if name.startswith("__"):
                raise AttributeError(name)
            from sglang_dynspec.testing._cpu import kernels

            return getattr(kernels, name, None) or MissingKernel(f"{package}.{name}")

        module.__getattr__ = __getattr__  # type: ignore[method-assign]


def install() -> None:
    """Let ``import sgl_kernel`` find the stand-in.

    Its finder goes last: whatever else can find sgl_kernel is asked before it.

    Raises:
        UnsupportedError: a real sgl_kernel is installed.
    """
    if any(isinstance(finder, _StubFinder) for finder in sys.meta_path):
        return
    real = importlib.util.find_spec(_PACKAGE)
    if real is not None:
        raise UnsupportedError(
            f"the CPU engine brings its own stand-in for {_PACKAGE}, but a real one is installed "
            f"at {real.origin}; use an environment without it (pip uninstall sgl-kernel), or unset "
            "SGLANG_DYNSPEC_CPU_ENGINE"
        )
    sys.meta_path.append(_StubFinder())
