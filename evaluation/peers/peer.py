"""What a peer is: a way to make caches at a wanted share of the bytes, and what has to be known of it."""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from transformers import Cache, PreTrainedModel

from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.cache.windowed.planned_sequence import planned_layers
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.hf.rope import RopeHistory
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVConfig

MakeCache = Callable[[], Cache]

# Families of peers.
QUANTIZATION, LOW_RANK, EVICTION = "quantization", "low rank", "fewer tokens or channels"

# What a peer may need besides the model.
CALIBRATION = "calibration"  # second moments of the model's states
READ = "read moments"  # what is read of a compressed cache (a calibration with `read_gradients: true`)
NEEDS = (CALIBRATION, READ)


class TextLength(NamedTuple):
    """The text at whose end a cache is to take its share of the bytes.

    Attributes:
        prompt: tokens read at once at the start.
        tokens: all tokens, `prompt` included.
    """

    prompt: int
    tokens: int


class Build(Protocol):
    """How a peer makes caches; see :meth:`Peer.maker`."""

    def __call__(
        self, model: PreTrainedModel, calibration: Calibration | None, share: float | None, text: TextLength | None
    ) -> MakeCache: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """One method to measure against.

    Attributes:
        what: what it does, in a few words.
        source: the paper and its section, or the package.
        simplified: what is done otherwise than there.
        family: :data:`QUANTIZATION`, :data:`LOW_RANK` or :data:`EVICTION`.
        build: makes the maker of caches.
        needs: some of :data:`NEEDS`; none where it takes no calibration.
        shares: the least and the largest share of a token's bytes at which it can hold one; equal where its bytes are fixed
            by its bits, and cannot be asked for.
        reads_exactly: whether a prompt attends to its own exact keys and values, not to what is kept of them.
        libraries: whose own code it is: what other versions of them measured is measured again.
        edition: counts what changed in what it computes, so that what an earlier edition measured is measured again.
    """

    what: str
    source: str
    simplified: str
    family: str
    build: Build
    needs: frozenset[str] = frozenset()
    shares: tuple[float, float] = (0.0, 1.0)
    reads_exactly: bool = True
    libraries: tuple[str, ...] = ()
    edition: int = 1

    @property
    def is_fixed(self) -> bool:
        """Whether its bytes cannot be chosen."""
        return self.shares[0] == self.shares[1]

    def maker(
        self,
        model: PreTrainedModel,
        calibration: Calibration | None,
        share: float | None,
        text: TextLength | None = None,
    ) -> MakeCache:
        """A function that makes fresh caches of this peer for `model`.

        Args:
            model: the model to serve.
            calibration: made on it; None where the peer needs none.
            share: of the uncompressed bytes, all that a cache holds at the end of `text`; None where :attr:`is_fixed`.
            text: None to count a compressed token alone, without those at full rank and without positions.

        Raises:
            UserError: the calibration is missing or does not fit, or the share is not one that the peer can serve.
        """
        if self.is_fixed:
            require(
                share is None, "share", share, f"none: this peer always takes {self.shares[0]:g} of a token's bytes"
            )
        else:
            is_served = share is not None and self.shares[0] < share <= self.shares[1]
            require(is_served, "share", share, f"above {self.shares[0]:g} and at most {self.shares[1]:g}")
        if self.needs:
            require(calibration is not None, "calibration", None, "given: this peer's bases come from one")
            calibration = calibration.for_model(model)
        return self.build(model, calibration, share, text)


def fixed_config(**settings: Any) -> OjaKVConfig:
    """The settings of a cache whose bases, ranks and bytes the peer works out for itself, and which stay as they are.

    Args:
        settings: other keys of :class:`OjaKVConfig`, such as `layout` and `rope`.
    """
    return OjaKVConfig(tracker="fixed", ranks="fraction", rate=1.0, **settings)


def token_share(config: OjaKVConfig, model: PreTrainedModel, share: float, text: TextLength | None) -> float:
    """The share of an uncompressed token's bytes that a compressed one may take, so that the cache takes `share` in all.

    Args:
        config: says which tokens stay at full rank.
        share, text: as for :meth:`Peer.maker`.

    Raises:
        UserError: the tokens at full rank take all of the share, or all of the text.
    """
    if text is None:
        return share
    geometry = geometry_of(model)
    layers = planned_layers(config, len(geometry.layers), prompt=text.prompt, tokens=text.tokens)
    token_bytes = geometry.full_nbytes(1, model.dtype.itemsize)
    full_rank = statistics.fmean(layer.full_rank_capacity for layer in layers)
    low_rank = statistics.fmean(layer.low_rank_capacity for layer in layers)
    if not low_rank:
        raise UserError(
            f"of {text.tokens} tokens behind a prompt of {text.prompt} none is compressed, so that no `share` can be "
            f"met; take a longer text"
        )
    held = full_rank * token_bytes + sum(layer.position_bytes(1) for layer in layers)
    if config.rotates:
        held += RopeHistory.token_nbytes(model) * text.tokens
    found = (share * text.tokens * token_bytes - held) / (low_rank * token_bytes)
    if found <= 0:
        raise UserError(
            f"`share` {share:g} leaves no byte for a compressed token: of {text.tokens} tokens "
            f"{full_rank:.0f} are held at full rank; take a larger share or a longer text"
        )
    return found
