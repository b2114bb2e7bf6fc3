"""What a user asks for: ``--additional-config '{"lowrank_kv": {"bases": DIR, "preset": "tokenwise-mixed"}}'``."""

from collections.abc import Mapping
from typing import Any

from lowrank_kv.utils.config import build, configuration, option, require

KEY = "lowrank_kv"  # in `--additional-config`
PRESETS = ("static-mixed", "tokenwise-mixed")


@configuration
class ServingConfig:
    """Which compressed cache vLLM serves: of a trained compressor, or of a calibration's bases and a preset."""

    checkpoint: str | None = option(None, help="directory of a DynaKV compressor with `rank_policy: plan`")
    bases: str | None = option(None, help="directory of a calibration with `read_gradients`")
    preset: str | None = option(
        None, help="with `bases`: how they are used [default: tokenwise-mixed]", choices=PRESETS
    )
    rate: float | None = option(
        None, help="with `bases`: bytes of a token over those in 16 bits [default: the preset's]"
    )
    num_sink_tokens: int = option(
        1, help="first tokens of a sequence that stay exact; each takes a share of every page", unit="tokens"
    )
    page_margin: float = option(
        0.05,
        help="where tokens have classes: room in a page beyond what they take on average; a full page codes its last tokens "
        "more coarsely",
    )

    def __post_init__(self):
        given = [name for name in ("checkpoint", "bases") if getattr(self, name) is not None]
        require(len(given) == 1, "checkpoint", self.checkpoint, "given, or else `bases`, and not both")
        for key in ("preset", "rate"):
            value = getattr(self, key)
            require(self.bases is not None or value is None, key, value, "left out with `checkpoint`, which says it")
        require(self.rate is None or 0 < self.rate <= 1, "rate", self.rate, "in (0, 1]; 0.1 keeps a tenth of the bytes")
        require(self.num_sink_tokens >= 0, "num_sink_tokens", self.num_sink_tokens, "zero or positive")
        require(
            self.page_margin >= 0, "page_margin", self.page_margin, "zero or positive; 0.05 leaves room for 5 % more"
        )


def settings_in(additional_config: Any) -> ServingConfig | None:
    """The settings in vLLM's `additional_config`; None where it has none.

    Raises:
        UserError: they are malformed.
    """
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return None
    return build(ServingConfig, additional_config[KEY], source=f"`{KEY}` of `--additional-config`")
