"""Rotary positions (RoPE): the table of angles for each kind of scaling. Knows positions and frequencies; the rotation is an op."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trireme.errors import BadCheckpoint, UnsupportedModel
from trireme.layers.batch import Batch
from trireme.layers.env import Env


class Rope:
    """A table [positions, 2r]: cosines, then sines, of r frequencies. `at` gives the row that each token of a step uses."""

    def __init__(self, env: Env, head_dim: int, settings: dict[str, Any], max_positions: int):
        """`settings` as in a checkpoint's rope parameters: rope_theta, rope_type, factor, ..."""
        self.kind = settings.get("rope_type") or settings.get("type") or "default"
        if self.kind not in FREQUENCIES:
            raise UnsupportedModel(f"Rope scaling {self.kind!r} is not known.", f"known are: {', '.join(FREQUENCIES)}")
        self.settings, self.max_positions = settings, max_positions
        self.width = int(head_dim * settings.get("partial_rotary_factor", 1.0))
        if not 0 <= self.width <= head_dim:
            raise BadCheckpoint(
                f"config.json: rope turns {self.width} of a head's {head_dim} values.", "check partial_rotary_factor"
            )
        self.env = env
        frequencies, factor = FREQUENCIES[self.kind](settings, self.width, max_positions, max_positions)
        self.table = angles(torch.arange(env.max_len), frequencies, factor).to(env.device)

    @property
    def length_dependent(self) -> bool:
        """Whether a key's angle depends on the length of its prompt. If so, its KV must not be shared with other prompts."""
        return self.kind == "dynamic" and self.env.max_len > self.max_positions

    def at(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(table, index): token i is rotated by the angles table[index[i]]."""
        if not self.length_dependent:
            return self.table, batch.positions
        # Everything is computed on the device, because a captured step is replayed with other lengths.
        frequencies = _grown(self.settings, self.width, self.max_positions, batch.reach)
        turn = batch.positions.unsqueeze(1) * frequencies
        return torch.cat([turn.cos(), turn.sin()], -1), torch.arange(len(turn), device=turn.device)


def angles(positions: Tensor, frequencies: Tensor, factor: float) -> Tensor:
    """[positions, 2r]: factor * cos and factor * sin of position * frequency."""
    turn = torch.outer(positions.float(), frequencies.float())
    return torch.cat([turn.cos(), turn.sin()], -1) * factor


def _default(settings: dict[str, Any], width: int, trained: int, length: int) -> tuple[Tensor, float]:
    """theta^(-2i / width)"""
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    return 1.0 / (float(settings.get("rope_theta", 10000.0)) ** exponents), 1.0


def _linear(settings: dict[str, Any], width: int, trained: int, length: int) -> tuple[Tensor, float]:
    """Positions are divided by a factor."""
    frequencies, _ = _default(settings, width, trained, length)
    return frequencies / float(settings["factor"]), 1.0


def _dynamic(settings: dict[str, Any], width: int, trained: int, length: int) -> tuple[Tensor, float]:
    """The base grows with the sequence once it is longer than the model was trained for."""
    return _grown(settings, width, trained, torch.tensor([length]))[0], 1.0


def _grown(settings: dict[str, Any], width: int, trained: int, lengths: Tensor) -> Tensor:
    """Frequencies [lengths, width / 2] of the grown base: theta (factor length / trained - factor + 1)^(width / (width - 2))"""
    factor, theta = float(settings["factor"]), float(settings.get("rope_theta", 10000.0))
    trained = int(settings.get("original_max_position_embeddings") or trained)
    growth = factor * lengths.clamp_min(trained).double() / trained - (factor - 1)
    base = theta * growth ** (width / (width - 2))
    exponents = torch.arange(0, width, 2, device=lengths.device).double() / width
    return (base.unsqueeze(1) ** -exponents).float()


def _llama3(settings: dict[str, Any], width: int, trained: int, length: int) -> tuple[Tensor, float]:
    """Llama 3: low frequencies are divided by a factor, high ones are kept, with a smooth passage between."""
    frequencies, _ = _default(settings, width, trained, length)
    factor, original = float(settings["factor"]), int(settings["original_max_position_embeddings"])
    low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
    wavelength = 2 * math.pi / frequencies
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies, 1.0


def _yarn(settings: dict[str, Any], width: int, trained: int, length: int) -> tuple[Tensor, float]:
    """YaRN: high frequencies are kept, low ones divided, with a ramp between; cos and sin are multiplied by a factor."""
    original = int(settings.get("original_max_position_embeddings") or trained)
    factor, theta = float(settings["factor"]), float(settings.get("rope_theta", 10000.0))
    frequencies, _ = _default(settings, width, trained, length)

    def dimension(turns: float) -> float:
        """The dimension that makes this many turns over the original length."""
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(settings.get("beta_fast") or 32.0))
    high = dimension(float(settings.get("beta_slow") or 1.0))
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = ((torch.arange(width // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp), _yarn_factor(settings, factor)


def _yarn_factor(settings: dict[str, Any], factor: float) -> float:
    def warmth(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return warmth(float(settings["mscale"])) / warmth(float(settings["mscale_all_dim"]))
    return warmth(1.0)


FREQUENCIES = {"default": _default, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "llama3": _llama3}
