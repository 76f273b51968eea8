"""Serve over HTTP with a policy of one's own.

python launch.py --model-path ... --speculative-...

Everything but the options of the policy goes to SGLang, as to `python -m sglang.launch_server`.
"""

import argparse
import os

# From a module of its own: the scheduler process makes the policy anew, and imports it for that.
from spare_room import SpareRoom

import sglang_dynspec


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve over HTTP with the policy SpareRoom.")
    parser.add_argument("--full", type=float, default=0.9)
    parser.add_argument("--roomy", type=float, default=0.8)
    parser.add_argument("--calm-steps", type=int, default=8)
    own, server_arguments = parser.parse_known_args()

    policy = SpareRoom(full=own.full, roomy=own.roomy, calm_steps=own.calm_steps)
    # Policies can be combined: `policy & BatchSize(off_at=64)` runs the fewer steps of both.
    sglang_dynspec.activate(policy=policy)

    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(server_arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


# SGLang starts its processes with "spawn", and each of them imports this file again.
if __name__ == "__main__":
    main()
