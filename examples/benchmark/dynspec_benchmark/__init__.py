"""Throughput by concurrency and context length: no, static, adaptive and dynamic speculation."""
