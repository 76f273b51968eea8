"""The subcommand ``advise``: from measured throughput to a policy, and what it would gain."""

from sglang_dynspec.advise.advice import (
    CurveAdvice,
    ServerAdvice,
    TableAdvice,
    advise,
)

__all__ = ["CurveAdvice", "ServerAdvice", "TableAdvice", "advise"]
