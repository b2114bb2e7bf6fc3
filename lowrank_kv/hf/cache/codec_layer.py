"""The part that all cache layers with a codec share: from states to coefficients and back.

Shapes: B batch, G KV heads, D head dim, C = G·D, Q new tokens, T cached tokens.
"""

import abc
from collections.abc import Sequence

from torch import Tensor

from lowrank_kv.codec import Encoded, LayerCodec, prefix_mask
from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES, CallContext, CompressedLayer, join_heads, split_heads
from lowrank_kv.hf.rope import Rope, rotated, unrotated
from lowrank_kv.ops import native
from lowrank_kv.ops.decoders import Decoders


class CodecLayer(CompressedLayer):
    """Stores a codec's coefficients of keys (before rotation) and values, each token at its own rank. Decoders and gates are
    computed when the first tokens arrive."""

    rotates = True
    shared = "codec", "_decoders", "_encoder"

    def __init__(self, codec: LayerCodec):
        super().__init__()
        self.codec = codec
        self._prompt: tuple[Tensor, Tensor] | None = None  # states for a prompt's own attention, until it has run
        self._decoders: Decoders | None = None
        self._encoder: native.Encoder | None = None  # a faster way for a few new tokens

    def start(self) -> None:
        codecs = self.codec.key, self.codec.value
        self._decoders = Decoders(*(codec.decoder(self.dtype, self.device) for codec in codecs))
        self._encoder = None
        # Asked first: the gates' weights in fp32 are for compiled code only.
        if native.encodes(self.dtype, self.device):
            self._encoder = native.encoder_of(*(codec.token_gate(self.dtype) for codec in codecs), self.dtype)

    @abc.abstractmethod
    def store(self, key: Encoded, value: Encoded) -> None:
        """Append the coefficients of new tokens."""

    @abc.abstractmethod
    def dense(self) -> tuple[Tensor, Tensor]:
        """Coefficients of the keys and of the values of all tokens, (B, T, C) each, zero beyond their ranks."""

    def begin_call(self, context: CallContext) -> None:
        super().begin_call(context)
        self._prompt = None  # of a call that was cut short before its attention

    def append(self, key_BGQD: Tensor, value_BGQD: Tensor, context: CallContext) -> None:
        is_prompt = not self.get_seq_length()
        if is_prompt and self.codec.exact_prefill:
            self._prompt = (key_BGQD, value_BGQD)
        key, value = self._encoded(key_BGQD, value_BGQD, context.rope)
        self.store(key, value)
        # Only the store has the rounded coefficients.
        if is_prompt and self._prompt is None and self.codec.quantization is None:
            kept = (coef_BTC * prefix_mask(rank_BT, coef_BTC.shape[2]) for coef_BTC, rank_BT in (key, value))
            self._prompt = self._states(*kept, context.rope)

    def is_decoding(self, query: Tensor) -> bool:
        """Whether these (B, H, Q, D) queries are few and follow others. A prompt is attended as a prompt however short it
        is: its mask may be missing, which a model's own attention reads as causal."""
        queries = query.shape[2]
        return self._prompt is None and (queries == 1 or MAX_DECODE_QUERIES >= queries < self.get_seq_length())

    @property
    def reads_prompts_exactly(self) -> bool:
        return self.codec.exact_prefill

    @property
    def attends_exactly(self) -> bool:
        """Whether the running call attends to the very states that its module computed. Only these keep their graph: rebuilt
        ones come from a store, or from compiled code."""
        return self._prompt is not None and self.codec.exact_prefill

    def truncate(self, length: int) -> None:
        self._prompt = None

    def clear(self) -> None:
        self._prompt = None

    def _encoded(self, key_BGTD: Tensor, value_BGTD: Tensor, rope: Rope | None) -> tuple[Encoded, Encoded]:
        """Coefficients and ranks of new tokens' keys, and of their values, in the dtype of the store."""
        new = self._encode_compiled(key_BGTD, value_BGTD, rope)
        if new is not None:
            return tuple(zip(new.coef_SBTC.to(self.dtype), new.rank_SBT, strict=True))
        key_coef, key_rank = self.codec.key.encode(join_heads(unrotated(key_BGTD, rope)))
        value_coef, value_rank = self.codec.value.encode(join_heads(value_BGTD))
        return (key_coef.to(self.dtype), key_rank), (value_coef.to(self.dtype), value_rank)

    def _encode_compiled(
        self, key_BGTD: Tensor, value_BGTD: Tensor, rope: Rope | None, targets: Sequence[native.AppendTarget] = ()
    ) -> native.EncodedTokens | None:
        """See :meth:`native.Encoder.encode`; None where there is no faster way for these tokens."""
        if self._encoder is None:
            return None
        rotary = None if rope is None else rope.packed
        if rope is not None and rotary is None:
            return None
        return self._encoder.encode(key_BGTD, value_BGTD, rotary, targets)

    def _states(self, key_coef: Tensor, value_coef: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor]:
        """Rotated keys and values from coefficients (B, T, C), (B, G, T, D) each."""
        return self._keys(key_coef, rope), split_heads(value_coef @ self._decoders.value_CC, self.head_dim)

    def _keys(self, coef_BTC: Tensor, rope: Rope | None) -> Tensor:
        """Rotated keys from coefficients, (B, G, T, D)."""
        key_BGTD = split_heads(coef_BTC @ self._decoders.key_CC, self.head_dim)
        return rotated(key_BGTD, rope)

    def _rebuild(self) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of all tokens, (B, G, T, D) each; for a prompt's own attention the states kept for it."""
        if self._prompt is not None:
            states, self._prompt = self._prompt, None
            return states
        return self._states(*self.dense(), None if self.history is None else self.history.rope())
