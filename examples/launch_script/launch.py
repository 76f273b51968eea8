"""Serve over HTTP with dynspec, from a script of your own.

python launch.py --policy "batch_size(off_at=32, on_at=24)" --model-path ... --speculative-...

Everything but --policy goes to SGLang, as to `python -m sglang.launch_server`.
"""

import argparse
import os

import sglang_dynspec


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve over HTTP with dynspec.")
    parser.add_argument("--policy", default="batch_size(off_at=32, on_at=24)")
    own, server_arguments = parser.parse_known_args()

    # Before SGLang starts its processes: they find in the environment what this writes there.
    sglang_dynspec.activate(policy=own.policy)

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
