"""Measured speeds of this pod, and the one question they answer: is restoring worth it (R3)?

What must stay true: without a measurement nothing is predicted and nothing is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.3
"""Weight of the newest sample: three or four turns forget a cold start."""

_SLOWER_BY = 1.2
"""A restore is skipped only when it is predicted clearly slower than reading the prompt again."""


@dataclass(slots=True)
class Rate:
    """Exponentially weighted amount per second; 0 while nothing was measured."""

    per_second: float = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """Add one sample; samples too small to mean anything are ignored."""
        if amount <= 0 or seconds <= 1e-4:
            return
        sample = amount / seconds
        self.per_second = sample if not self.per_second else self.per_second + _WEIGHT * (sample - self.per_second)

    def seconds_for(self, amount: float) -> float | None:
        """Predicted seconds, or None without a measurement."""
        return amount / self.per_second if self.per_second else None


@dataclass(slots=True)
class Rates:
    """Speeds that decide between restoring and re-reading."""

    disk_read_bytes: Rate
    prompt_tokens: Rate

    @classmethod
    def unmeasured(cls) -> Rates:
        """No speed known yet."""
        return cls(Rate(), Rate())

    @property
    def measured(self) -> bool:
        """Whether both speeds are known, so that a prediction can be made at all."""
        return bool(self.disk_read_bytes.per_second and self.prompt_tokens.per_second)

    def restore_is_slower(self, *, disk_bytes: int, tokens: int) -> bool:
        """Whether reading ``disk_bytes`` is predicted clearly slower than re-reading ``tokens`` (R3)."""
        restore = self.disk_read_bytes.seconds_for(disk_bytes)
        reread = self.prompt_tokens.seconds_for(tokens)
        return restore is not None and reread is not None and restore > _SLOWER_BY * reread
