"""``python -m sglang_dynspec demo``: an unmodified SGLang server under a load that rises and falls,
with the policy's decisions shown, and its outputs compared to those without speculation."""
