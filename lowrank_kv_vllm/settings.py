"""What a user asks for: ``--additional-config '{"lowrank_kv": {"bases": DIR, "preset": "tokenwise-mixed"}}'``."""

from collections.abc import Mapping
from typing import Any

from lowrank_kv.hf.cache.windowed.config import PREFILLS
from lowrank_kv.stores.quantization import CACHE_DTYPES, GROUP_SIZE_HELP, REBUILD_COST_HELP
from lowrank_kv.utils.config import build, configuration, option, require

KEY = "lowrank_kv"  # in `--additional-config`
# Bases that all sequences share. The others' follow each text, and a server keeps nothing of a sequence but its pages, which
# others may share.
PRESETS = ("static-joint-pf", "static-mixed", "tokenwise-mixed")
_WITHOUT_PLAN = PRESETS[0]
_NUM_SINK_TOKENS, _PAGE_MARGIN = 1, 0.03  # where they are left out


@configuration
class ServingConfig:
    """Which compressed cache vLLM serves: of a trained compressor, or of a calibration's bases and a preset."""

    checkpoint: str | None = option(None, help="directory of a DynaKV compressor")
    bases: str | None = option(
        None, help="directory of a calibration, for the mixed presets with `read_gradients` or `read_energy`"
    )
    preset: str | None = option(
        None, help=f"with `bases`: how they are used, one of {', '.join(PRESETS)} [default: {PRESETS[-1]}]"
    )
    rate: float | None = option(
        None,
        help="with `bases`: bytes of a token over those in 16 bits, or with static-joint-pf the share of coefficients "
        "[default: the preset's]",
    )
    cache_dtype: str | None = option(
        None,
        help=f"with gates, or {_WITHOUT_PLAN}: how coefficients are stored [default: the checkpoint's or the preset's]",
        choices=tuple(CACHE_DTYPES),
    )
    group_size: int | None = option(None, help=GROUP_SIZE_HELP)
    rebuild_cost: float | None = option(
        None, help=f"with `bases` and a mixed preset: {REBUILD_COST_HELP} [default: the preset's]", unit="bits"
    )
    prefill: str | None = option(
        None,
        help="what a prompt's tokens see of each other: exact states where one step reads them, or always rebuilt ones, "
        "with which a text depends on nothing but its tokens and the rounding of sums [default: the checkpoint's or the "
        "preset's]",
        choices=PREFILLS,
    )
    num_sink_tokens: int | None = option(
        None,
        help="with `bases`, or a checkpoint with a plan: first tokens of a sequence that stay exact, each of which takes a "
        f"share of every page [default: {_NUM_SINK_TOKENS}]",
        unit="tokens",
    )
    page_margin: float | None = option(
        None,
        help="where tokens differ in size: room in a page beyond what they take on average; a full page codes its last "
        f"tokens more coarsely, or keeps fewer of their coefficients [default: {_PAGE_MARGIN}]",
    )
    untested_gpu: bool = option(
        False,
        help="serve on an NVIDIA GPU, which this plugin has never done; compare texts with those of `generate()`",
    )

    def __post_init__(self):
        given = [name for name in ("checkpoint", "bases") if getattr(self, name) is not None]
        require(len(given) == 1, "checkpoint", self.checkpoint, "given, or else `bases`, and not both")
        for key in ("preset", "rate", "rebuild_cost"):
            value = getattr(self, key)
            require(self.bases is not None or value is None, key, value, "left out with `checkpoint`, which says it")
        require(
            self.preset is None or self.preset in PRESETS,
            "preset",
            self.preset,
            f"one of {', '.join(PRESETS)}: those have nothing of a sequence's own, and sequences share pages",
        )
        require(self.rate is None or 0 < self.rate <= 1, "rate", self.rate, "in (0, 1]; 0.1 keeps a tenth of the bytes")
        require(
            self.bases is None or self.cache_dtype is None or self.preset_name == _WITHOUT_PLAN,
            "cache_dtype",
            self.cache_dtype,
            f"left out with `preset: {self.preset_name}`, whose plan says how coefficients are stored; serve "
            f"`{_WITHOUT_PLAN}`, whose coefficients have one width, for another",
        )
        require((self.num_sink_tokens or 0) >= 0, "num_sink_tokens", self.num_sink_tokens, "zero or positive")
        require(
            (self.page_margin or 0) >= 0,
            "page_margin",
            self.page_margin,
            "zero or positive; 0.03 leaves room for 3 % more",
        )

    @property
    def preset_name(self) -> str:
        """How `bases` are used."""
        return self.preset or PRESETS[-1]

    @property
    def num_sinks(self) -> int:
        """First tokens of a sequence that stay exact, where what is served has any."""
        return _NUM_SINK_TOKENS if self.num_sink_tokens is None else self.num_sink_tokens

    @property
    def margin(self) -> float:
        """Room in a page beyond the mean size of its rows, as a share of that, where rows differ."""
        return _PAGE_MARGIN if self.page_margin is None else self.page_margin

    def overrides(self) -> dict[str, Any]:
        """What replaces settings of the checkpoint or the preset."""
        keys = ("cache_dtype", "group_size", "prefill", "rebuild_cost")
        return {key: getattr(self, key) for key in keys if getattr(self, key) is not None}


def is_asked_for(additional_config: Any) -> bool:
    """Whether vLLM's `additional_config` has settings, without reading them, which every step would pay for."""
    return isinstance(additional_config, Mapping) and KEY in additional_config


def settings_in(additional_config: Any) -> ServingConfig | None:
    """The settings in vLLM's `additional_config`; None where it has none.

    Raises:
        UserError: they are malformed.
    """
    if not is_asked_for(additional_config):
        return None
    return build(ServingConfig, additional_config[KEY], source=f"`{KEY}` of `--additional-config`")
