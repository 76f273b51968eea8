"""``python -m sglang_dynspec ctl``: show and change what a running server does."""
