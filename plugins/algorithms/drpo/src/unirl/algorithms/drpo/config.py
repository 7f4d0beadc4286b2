"""Settings of DRPO, and of SPO, which has another default."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.kl import TokenKlConfig

__all__ = ["DrpoConfig", "SpoConfig"]


@dataclass
class DrpoConfig(TokenKlConfig):
    delta: float = 12.5
    """How far the policy may go: the pull back to the old one is divided by it. The gradient of a token is weighed by
    1 - |change of its probability| / delta where it moves with its advantage, by 1 + that where against it."""
    weighs_by_old: bool = True
    """Weigh the pull on a token by its old probability, so that rare tokens are free to become likelier (DRPO); False
    pulls all alike (SPO)."""
    aggregation: str = "seq-mean-token-sum-norm"
    """What a token weighs: `seq-mean-token-sum-norm`, the sum of each text over `horizon`; `seq-mean-token-sum`, the
    sum; `seq-mean-token-mean`, each text alike, whatever its length; `token-mean`, all tokens alike."""
    horizon: float = 8192.0
    """Constant that `seq-mean-token-sum-norm` divides by, in tokens; no other aggregation looks at it."""
    truncated: str = "keep"
    """Texts that a length limit stopped: `keep` trains on them, `mask` leaves them out of the loss. Their rewards
    count in the mean of their group either way."""


@dataclass
class SpoConfig(DrpoConfig):
    weighs_by_old: bool = False
    """All tokens are pulled alike, whatever their old probability."""
