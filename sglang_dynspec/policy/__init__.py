"""Policies: what decides, before every decode step, how many draft steps to run.

Pure Python, without torch or SGLang, so that a policy can be written and tested anywhere.
"""

from sglang_dynspec.policy.accept_rate import AcceptRate
from sglang_dynspec.policy.base import BatchView, Policy, StepOutcome, StepTiming
from sglang_dynspec.policy.batch_size import BatchSize
from sglang_dynspec.policy.combine import Hysteresis, MinDwell, Smaller
from sglang_dynspec.policy.fixed import Always, Fixed, Never
from sglang_dynspec.policy.goodput import Goodput
from sglang_dynspec.policy.text import parse_policy, policy_text
from sglang_dynspec.policy.token_budget import TokenBudget

__all__ = [
    "AcceptRate",
    "Always",
    "BatchSize",
    "BatchView",
    "Fixed",
    "Goodput",
    "Hysteresis",
    "MinDwell",
    "Never",
    "Policy",
    "Smaller",
    "StepOutcome",
    "StepTiming",
    "TokenBudget",
    "parse_policy",
    "policy_text",
]
