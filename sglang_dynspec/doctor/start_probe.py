"""What the start of an interpreter has done about dynspec.

The source of this module is run in interpreters in which nothing of ours may have been imported
yet, so it imports the standard library only.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def look(job: dict[str, Any]) -> dict[str, Any]:
    """Say what is there in this process, importing nothing."""
    package = sys.modules.get("sglang_dynspec")
    return {
        "armed": any(type(f).__module__ == "sglang_dynspec._autoload" for f in sys.meta_path),
        "package": getattr(package, "__file__", None),
        "sitecustomize": _sitecustomize_files(),
    }


def _sitecustomize_files() -> list[str]:
    # In the order in which Python looks; "" came to the path after it had looked.
    paths = [os.path.join(folder, "sitecustomize.py") for folder in sys.path if folder]
    return list(dict.fromkeys(path for path in paths if os.path.isfile(path)))
