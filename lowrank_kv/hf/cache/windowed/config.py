"""Which tokens a windowed cache keeps at full rank, which it forgets, and how attention reads it."""

from lowrank_kv.eviction import Eviction
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.utils.config import configuration, option, require, section

PREFILLS = ("exact", "reconstructed")
ATTENTION = ("low_rank", "reconstructed")


@configuration
class WindowedConfig:
    """The settings that all windowed caches share; a method's own configuration extends them."""

    # which tokens stay at full rank
    update_period: int = option(
        ExactTokens.update_period, help="T, how many tokens wait at full rank to be compressed", unit="tokens"
    )
    staggered: bool = option(
        True, help="layers compress the tokens that wait one after the other, not all in the call of the same token"
    )
    num_sink_tokens: int = option(
        ExactTokens.num_sink_tokens, help="first tokens kept at full rank (v1 of the paper)", unit="tokens"
    )
    recent_window: int = option(
        ExactTokens.recent_window, help="latest tokens kept at full rank (v1 of the paper)", unit="tokens"
    )
    full_rank_ratio: float = option(
        0.0,
        help="share of a prompt, or of each chunk of it, kept at full rank: its tokens of largest query-weighted residual "
        "(v2 of the paper)",
    )
    observation_window: int = option(32, help="w, last queries that weigh each token's residual", unit="tokens")
    score_pool: int = option(1, help="neighbouring scores averaged before the choice; 1 is none", unit="tokens")
    keep_prompt_full_rank: bool = option(
        False, help="keep all of a prompt at full rank, compress only what is generated"
    )
    min_length: int = option(
        0,
        help="a sequence shorter than this is not compressed, and of a prompt that was, nothing is evicted or kept at full "
        "rank later",
        unit="tokens",
    )

    # what each sequence has of its own
    own_directions: int = option(
        0,
        help="with a plan of bits: how many directions each sequence may have beside the shared basis for what the plan "
        "drops of its text, found when its prompt is compressed; it has those that pay for their bytes",
        unit="directions",
    )
    own_directions_from: int = option(
        128,
        help="fewest tokens, compressed together as a sequence's first, in which own directions are found; with fewer it "
        "keeps to the shared basis",
        unit="tokens",
    )

    # what layers share
    joint_layers: int = option(
        0,
        help="with a plan of bits: code a token's keys and values in so many consecutive layers as one row of what they "
        "have in common: less loss for the same bytes, more arithmetic for each token that is read; 0 codes a layer's keys, "
        "and its values, by themselves",
        unit="layers",
    )

    # which tokens are forgotten
    eviction: Eviction = section(Eviction)

    # how attention reads them
    prefill: str = option(
        "exact",
        help="the prompt's own attention sees exact keys and values (OjaKV-PF), or rebuilt ones",
        choices=PREFILLS,
    )
    attention: str = option(
        "low_rank", help="decode on coefficients, or rebuild keys and values for the model's backend", choices=ATTENTION
    )

    def __post_init__(self):
        for key in ("update_period", "observation_window", "score_pool", "own_directions_from"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        require(self.score_pool % 2 == 1, "score_pool", self.score_pool, "odd, so that it is centred on its token")
        for key in ("num_sink_tokens", "recent_window", "min_length", "own_directions", "joint_layers"):
            require(getattr(self, key) >= 0, key, getattr(self, key), "zero or positive")
        require(
            0 <= self.full_rank_ratio <= 1,
            "full_rank_ratio",
            self.full_rank_ratio,
            "in [0, 1]; 0.05 keeps 5 % of a prompt",
        )
        keeps_all = self.keep_prompt_full_rank or self.full_rank_ratio == 1
        require(
            not (keeps_all and self.eviction.is_on),
            "eviction.keep_ratio",
            self.eviction.keep_ratio,
            "1 where all of a prompt stays at full rank (`keep_prompt_full_rank`, `full_rank_ratio`): only coefficients are "
            "evicted",
        )

        require(
            not (self.joint_layers and self.full_rank_ratio),
            "full_rank_ratio",
            self.full_rank_ratio,
            "0 with `joint_layers`: keys and values that share a row stay at full rank together",
        )
        require(
            self.joint_layers <= 1 or not self.eviction.is_on,
            "eviction.keep_ratio",
            self.eviction.keep_ratio,
            f"1 with `joint_layers: {self.joint_layers}`: each layer would forget other tokens of the rows that they share",
        )
        require(
            self.joint_layers <= 1 or self.reads_prompts_exactly,
            "prefill",
            self.prefill,
            f"exact with `joint_layers: {self.joint_layers}`: a layer has no rows of a prompt before the last of them has "
            f"read it",
        )

    @property
    def reads_prompts_exactly(self) -> bool:
        """Whether the tokens of a prompt attend to one another's exact keys and values, before they are compressed."""
        return self.prefill == "exact"

    @property
    def chooses_by_last_queries(self) -> bool:
        """Whether the last queries of a prompt choose which of its tokens are kept, or kept at full rank."""
        return self.eviction.is_on or self.full_rank_ratio > 0

    @property
    def compresses_singly(self) -> bool:
        """Whether tokens are compressed one at a time, so that room is left behind their coefficients."""
        return self.update_period == 1

    @property
    def rotates(self) -> bool:
        """Whether keys are compressed before rotation; keys at full rank are always rotated."""
        return True

    @property
    def follows_text(self) -> bool:
        """Whether bases move with the text that is read."""
        return False
