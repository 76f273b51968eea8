"""A process of the benchmark that runs one server. Started by ``run.py``, not by hand."""

from __future__ import annotations

import sys

from dynspec_benchmark.worker import main

# SGLang spawns its processes, and each of them imports this file again.
if __name__ == "__main__":
    main(sys.argv[1:])
