"""``python -m sglang_dynspec``."""

from sglang_dynspec.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
