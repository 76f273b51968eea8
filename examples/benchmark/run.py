"""Measure an SGLang server with no, static, adaptive and dynamic speculation.

    python examples/benchmark/run.py --random 8b --simulate-accept-length 2.2 \\
        --attention-backend triton --configs no_spec static adaptive "dynspec:never@skip"

See README.md beside this file, and --help.
"""

from __future__ import annotations

import sys

from dynspec_benchmark.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
