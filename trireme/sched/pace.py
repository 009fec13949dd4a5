"""The pace (token budget): how many tokens a step may hold while answers are being written.

Knows seconds and counts, never rows or requests.
"""

from __future__ import annotations

# Tokens of prompts that a step may always hold, however long it takes. With fewer a CPU computes each far more slowly: with 32, at
# half the speed.
LEAST = 128
LONG = 0.05  # seconds. A worker that waits for its next plan after such a step loses little by it.
FRESH = 0.3  # the weight of the newest step in what is believed of the speed


class Pace:
    """Learns from the steps with prompts how long a token takes, and cuts prompts so that a step takes about `seconds`.

    Whoever reads an answer waits for the whole step that computes its next token, so a long prompt beside it is cut into pieces.
    Until a speed is known nothing is cut.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds  # 0: never cut
        self._per_token = 0.0
        self._answered_at = 0.0

    def learn(self, begun: float, now: float, tokens: int, prompt_tokens: int) -> None:
        """Takes in a step that was handed out at `begun` and answered now. It ran when the step before it had been answered."""
        spent, self._answered_at = now - max(begun, self._answered_at), now
        if prompt_tokens >= LEAST:
            fresh = spent / tokens
            self._per_token = fresh if not self._per_token else FRESH * fresh + (1 - FRESH) * self._per_token

    def prompt_tokens(self, answering: int, budget: int) -> int:
        """Of `budget`, what prompts may have in a step that also holds one token each for this many answers."""
        if not self.seconds or not answering or not self._per_token:
            return budget
        return min(budget, max(LEAST, int(self.seconds / self._per_token) - answering))

    def is_long(self, prompt_tokens: int) -> bool:
        """Whether a step with so many tokens of prompts is better answered before the next is planned: whoever comes meanwhile
        takes part in that one, instead of the one after it."""
        return bool(self.seconds) and prompt_tokens * self._per_token > LONG
