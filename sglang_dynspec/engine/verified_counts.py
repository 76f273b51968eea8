"""SGLang's own accept length and accept rate, where plain steps mix with speculative ones.

SGLang counts every decode step of a speculative server as a verification, a plain one as a
verification that has accepted nothing: after 7 plain and 8 speculative steps its log, its metrics
and ``avg_spec_accept_length`` are of no mode at all. Plain steps are taken out of the counters that
all of these come from.
"""

from __future__ import annotations

from typing import Any


class VerifiedCounts:
    """SGLang's counters since it has last logged, and since the server started.

    Args:
        owner: what has them as attributes.
        tokens: how their names call the tokens, ``accept`` or ``accepted``.
    """

    def __init__(self, owner: Any, tokens: str) -> None:
        self._owner = owner
        self._tokens = f"spec_num_{tokens}_tokens"
        self._total_tokens = f"spec_total_num_{tokens}_tokens"
        self._kept = 0
        """Requests of a plain step that has been left in."""

    def before(self, *, plain: bool, requests: int) -> None:
        """Note that SGLang is about to count a step, and maybe to log right then.

        SGLang divides by the requests that it has counted (``metrics_reporter.py``). So of plain
        steps alone one is left in, as accept length 1, until a speculative step comes.
        """
        counted = self._owner.spec_num_forward_ct
        if not counted:
            self._logged()
        if not plain:
            self._take_out(self._kept)
            self._kept = 0
        elif counted:
            self._take_out(requests)
        else:
            self._kept = requests

    def _take_out(self, requests: int) -> None:
        """A plain step counts each request once, with one token."""
        owner = self._owner
        owner.spec_num_forward_ct -= requests
        setattr(owner, self._tokens, getattr(owner, self._tokens) - requests)

    def _logged(self) -> None:
        """SGLang has moved its counters to its totals, or has reset both."""
        owner, kept, self._kept = self._owner, self._kept, 0
        if owner.spec_total_num_forward_ct >= kept:
            owner.spec_total_num_forward_ct -= kept
            setattr(owner, self._total_tokens, getattr(owner, self._total_tokens) - kept)
