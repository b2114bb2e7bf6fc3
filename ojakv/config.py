"""Settings of an OjaKV cache (OjaKV, Algorithm 1)."""

import dataclasses

from lowrank.basis import LAYOUTS, ROPE_SIDES
from lowrank.config import option, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class OjaKVConfig:
    """Where the bases live, how large they are and how fast they follow the text."""

    layout: str = option("per_head", help="one basis for each KV head, or one for all of a layer", choices=LAYOUTS)
    rope: str = option("post", help="compress keys before or after rotation", choices=ROPE_SIDES)
    rate: float = option(0.6, help="share of coefficients kept of each compressed token")
    learning_rate: float = option(0.1, help="η of the Oja step")
    update_period: int = option(32, help="T, how often the bases are updated while decoding", unit="tokens")
    observation_window: int = option(32, help="w, last queries that weigh each token's residual", unit="tokens")

    def __post_init__(self):
        require(0 < self.rate <= 1, "rate", self.rate, "in (0, 1]; 0.6 keeps 60 % of the coefficients")
        require(self.learning_rate >= 0, "learning_rate", self.learning_rate, "zero or positive")
        require(self.update_period >= 1, "update_period", self.update_period, "at least 1")
        require(self.observation_window >= 1, "observation_window", self.observation_window, "at least 1")
