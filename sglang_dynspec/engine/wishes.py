"""What requests ask for: ``custom_params={"dynspec": "never"}`` or ``"always"``.

SGLang hands ``custom_params`` on from every API of its, in the sampling parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger("sglang_dynspec")

KEY = "dynspec"
NEVER, ALWAYS = "never", "always"


class Wishes:
    """Counts them; costs nothing until a request has asked for something."""

    def __init__(self) -> None:
        self._seen = False
        self._said = False

    def look_at(self, reqs: Iterable[Any]) -> None:
        """Note requests that are being prefilled."""
        for req in reqs:
            wish = _wish(req)
            if wish in (NEVER, ALWAYS):
                self._seen = True
            elif wish is not None and not self._said:
                self._said = True
                logger.warning(
                    "sglang_dynspec: a request has %r in custom_params[%r], which is neither %r "
                    "nor %r; it counts as one that has asked for nothing. Said once.",
                    wish,
                    KEY,
                    NEVER,
                    ALWAYS,
                )

    def count(self, reqs: Iterable[Any]) -> dict[str, int]:
        """How many requests have asked for what, as fields of BatchView."""
        if not self._seen:
            return {}
        wishes = [_wish(req) for req in reqs]
        return {"asked_never": wishes.count(NEVER), "asked_always": wishes.count(ALWAYS)}


def _wish(req: Any) -> Any:
    params = req.sampling_params.custom_params
    return params.get(KEY) if isinstance(params, dict) else None
