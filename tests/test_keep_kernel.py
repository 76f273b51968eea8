"""The kernel that keeps what the draft misses does what the PyTorch code does."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

CODE = """
import os
import random

random.seed(0)
os.environ["TRITON_INTERPRET"] = "1"  # on any device, and slowly
import torch
from sglang_dynspec.engine.catch_up import _keep_in_torch
from sglang_dynspec.engine.keep_kernel import keep

torch.manual_seed(0)
for size in (0, 64, 3000, 4096):
    rings = [
        (torch.zeros(9, 7, dtype=torch.int32), torch.zeros(9, 7, size)) for _ in range(2)
    ]
    for _ in range(3):
        pool, positions = torch.randperm(9)[:5], torch.randint(0, 1000, (5,))
        ids = torch.randint(0, 500, (10,), dtype=random.choice([torch.int32, torch.int64]))[::2]
        hidden = torch.randn(5, size + 8)[:, :size] if size else None
        if hidden is not None and random.random() < 0.5:
            hidden = hidden.t().contiguous().t().to(torch.bfloat16)
        for write, ring in zip((keep, _keep_in_torch), rings):
            write(*ring, pool, positions, ids, hidden)
    for ours, theirs in zip(*rings):
        assert torch.equal(ours, theirs)
    assert bool(rings[0][0].any())
print("equal")
"""


def test_the_kernel_and_pytorch_write_the_same():
    pytest.importorskip("triton")
    command = [sys.executable, "-P", "-c", textwrap.dedent(CODE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.endswith("equal\n"), done.stderr
