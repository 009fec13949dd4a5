"""How long an answer took, as clients of llama.cpp's server read it. Knows moments and counts, nothing of engines."""

from __future__ import annotations

from trireme.api.openai.protocol import Timings
from trireme.api.service import Flight

LEAST = 1e-6  # seconds, so that nothing is divided by zero


def timings_of(*flights: Flight) -> Timings:
    """The figures so far. Several flights began together: the time runs until the last of them."""
    cached = sum(flight.answer.cached_tokens for flight in flights)
    prompt = sum(len(flight.answer.tokens) for flight in flights) - cached
    made = sum(len(completion.token_ids) for flight in flights for completion in flight.answer.completions)
    reading = max(min(flight.first for flight in flights) - flights[0].opened, LEAST)
    writing = max(max(flight.last for flight in flights) - min(flight.first for flight in flights), LEAST)
    return Timings(
        cache_n=cached,
        prompt_n=prompt,
        prompt_ms=reading * 1e3,
        prompt_per_token_ms=reading * 1e3 / max(prompt, 1),
        prompt_per_second=prompt / reading,
        predicted_n=made,
        predicted_ms=writing * 1e3,
        predicted_per_token_ms=writing * 1e3 / max(made, 1),
        predicted_per_second=max(made - 1, 0) / writing,
    )
