"""For people who cannot install a ``.pth`` file: put this folder on PYTHONPATH.

Python imports only the first ``sitecustomize`` it finds, so this one runs the one that it shadows.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))


def _start_dynspec() -> None:
    names = ("POLICY", "CONFIG", "CPU_ENGINE")
    if not any(os.environ.get(f"SGLANG_DYNSPEC_{name}") for name in names):
        return
    if importlib.util.find_spec("sglang_dynspec") is None:
        # Not installed: the package is the folder above.
        sys.path.append(os.path.dirname(os.path.dirname(_HERE)))
    from sglang_dynspec import _autoload

    _autoload.run()


def _is_ours(folder: str) -> bool:
    """Whether a folder is this one or another copy of it: two would run each other for ever."""
    ours = os.path.join("sglang_dynspec", "bootstrap")
    return os.path.realpath(folder or os.curdir).endswith(ours)


def _run_shadowed_sitecustomize() -> None:
    elsewhere = [folder for folder in sys.path if not _is_ours(folder)]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    # Under its own name, as it would be without us: others look it up there.
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    _start_dynspec()
finally:
    _run_shadowed_sitecustomize()
