"""Generate with SGLang's Engine and dynspec, without a server.

python offline.py --prompt "Why is the sky blue?" --model-path ... --speculative-...

Everything but --policy, --prompt and --tokens goes to SGLang, as to
`python -m sglang.launch_server`.
"""

import argparse

import sglang_dynspec


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate with SGLang's Engine and dynspec.")
    parser.add_argument("--policy", default="batch_size(off_at=32, on_at=24)")
    parser.add_argument("--prompt", action="append", required=True, help="may be given repeatedly")
    parser.add_argument("--tokens", type=int, default=64)
    own, server_arguments = parser.parse_known_args()

    # Before the Engine starts its processes: they find in the environment what this writes there.
    sglang_dynspec.activate(policy=own.policy)

    from sglang import Engine
    from sglang.srt.server_args import prepare_server_args

    engine = Engine(server_args=prepare_server_args(server_arguments))
    try:
        sampling = {"temperature": 0, "max_new_tokens": own.tokens}
        for prompt, output in zip(own.prompt, engine.generate(own.prompt, sampling), strict=True):
            print(f"{prompt!r} -> {output['text']!r}")
        status = engine.get_server_info()["internal_states"][0]["dynspec"]
        print(f"dynspec: {status['state']}, steps by num_steps: {status.get('by_num_steps')}")
    finally:
        engine.shutdown()


# SGLang starts its processes with "spawn", and each of them imports this file again.
if __name__ == "__main__":
    main()
