"""The pace (token budget): how many tokens a step may hold while answers are being written.

Knows seconds and counts, never rows or requests.
"""

from __future__ import annotations

# A step may always hold this many prompt tokens, however long it takes. Smaller chunks make a CPU much slower per token: with 32
# tokens, half as fast.
LEAST = 128
LONG = 0.05  # seconds: after a step this long, the worker loses little time by waiting for its next plan
FRESH = 0.3  # the weight of the newest step in the estimated speed (a moving average)


class Pace:
    """Measures how long a prompt token takes, and cuts prompts into chunks so that a step takes about `seconds`.

    An answer's next token comes only at the end of its step, so a long prompt in the same step would delay it. Until the speed is
    known, no prompt is cut.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds  # 0: never cut
        self._per_token = 0.0
        self._answered_at = 0.0

    def learn(self, begun: float, now: float, tokens: int, prompt_tokens: int) -> None:
        """Learns from a step that was sent at `begun` and is answered now. It ran after the step before it had been answered."""
        spent, self._answered_at = now - max(begun, self._answered_at), now
        if prompt_tokens >= LEAST:
            fresh = spent / tokens
            self._per_token = fresh if not self._per_token else FRESH * fresh + (1 - FRESH) * self._per_token

    def prompt_tokens(self, answering: int, budget: int) -> int:
        """How many of the `budget` tokens prompts may use in a step that also computes one token for each of this many answers."""
        if not self.seconds or not answering or not self._per_token:
            return budget
        return min(budget, max(LEAST, int(self.seconds / self._per_token) - answering))

    def is_long(self, prompt_tokens: int) -> bool:
        """Whether a step with this many prompt tokens should be answered before the next one is planned. Requests that arrive
        meanwhile can then join the next step instead of the one after it."""
        return bool(self.seconds) and prompt_tokens * self._per_token > LONG
