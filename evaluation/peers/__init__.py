"""The strongest peers of the field, one file each, behind one interface.

`PEERS[name].maker(model, calibration, share, text)` gives a function that makes fresh caches, which hold `share` of the
uncompressed bytes at the end of `text`. A cache counts its own tensors (`cache_bytes` in `evaluation/reading.py`).
"""

import functools

from lowrank_kv.calibration.calibration import JOINT_LAYERS

from .eigen_attention import eigen_maker
from .expected_attention import expected_attention_maker
from .keydiff import keydiff_maker
from .kivi import GROUP, KIVI, kivi_maker
from .kq_svd import kq_svd_maker
from .kvtc import kvtc_maker
from .palu import GROUPED_HEADS, palu_maker
from .peer import CALIBRATION, EVICTION, LOW_RANK, QUANTIZATION, READ, Peer, TextLength
from .puzzle_kv import puzzle_maker
from .quantized_cache import QUANTIZED, quantized_maker
from .rotated import ROTATED, rotated_maker
from .snapkv import snapkv_maker
from .streaming_llm import streaming_maker
from .think import think_maker

__all__ = ["PEERS", "TextLength"]


def _rotated(name: str) -> Peer:
    bits = ROTATED[name]
    return Peer(
        what=f"each head rotated at random, {bits} bits for each number",
        source="TurboQuant, arXiv 2504.19874, section 3",
        simplified="its scale has 8 bits for each head; no sketch of what rounding leaves of keys",
        family=QUANTIZATION,
        build=lambda model, *_: rotated_maker(model, name),
        shares=(bits / 16, bits / 16),
    )


def _quantized(name: str) -> Peer:
    backend, bits, _, package = QUANTIZED[name]
    return Peer(
        what=f"transformers' QuantizedCache with {backend}, {bits} bits in groups of 64",
        source=package,
        simplified="nothing",
        family=QUANTIZATION,
        build=lambda model, *_: quantized_maker(model, name),
        shares=(bits / 16, bits / 16),
        libraries=("transformers", package),
    )


def _kivi(name: str) -> Peer:
    bits = KIVI[name]
    return Peer(
        what=f"keys by channel and values by token, {bits} bits in groups of {GROUP}",
        source="KIVI, arXiv 2402.02750, section 3",
        simplified="first 4 and latest 16 tokens whole, instead of the latest 128; a prompt's last group may be shorter",
        family=QUANTIZATION,
        build=lambda model, *_: kivi_maker(model, name),
        shares=((bits + 32 / GROUP) / 16, (bits + 32 / GROUP) / 16),
    )


def _palu(what: str, simplified: str, *, prefill: str = "reconstructed", **settings: int | None) -> Peer:
    return Peer(
        what=what,
        source="Palu, arXiv 2407.21118, section 3",
        simplified=f"{simplified}ranks in multiples of 4 for each group, by an estimate of the Fisher information",
        family=LOW_RANK,
        build=functools.partial(palu_maker, prefill=prefill, **settings),
        needs=frozenset({CALIBRATION, READ}),
        reads_exactly=prefill == "exact",
    )


_CHOSEN_AGAIN = "the choice is made again after every 32 decoded tokens, or a quarter of those held where that is less"

# Name → peer.
PEERS: dict[str, Peer] = {
    **{name: _rotated(name) for name in ROTATED},
    **{name: _kivi(name) for name in KIVI},
    **{name: _quantized(name) for name in QUANTIZED},
    "kvtc": Peer(
        what="principal components of un-rotated keys and of values, bits by their energy",
        source="KVTC, arXiv 2511.01815, section 3",
        simplified="components of one layer, not centred, energies over their sum; fitted levels, not integers; the latest "
        "16 tokens whole instead of 128; no DEFLATE",
        family=LOW_RANK,
        build=kvtc_maker,
        needs=frozenset({READ}),
    ),
    "kvtc-128": Peer(
        what="the same with the paper's window",
        source="KVTC, arXiv 2511.01815, section 3",
        simplified="components of one layer, not centred, energies over their sum; fitted levels, not integers; no DEFLATE",
        family=LOW_RANK,
        build=functools.partial(kvtc_maker, recent_window=128),
        needs=frozenset({READ}),
    ),
    "kvtc-joint": Peer(
        what="the same of rows of keys and values in three layers",
        source="KVTC, arXiv 2511.01815, section 3",
        simplified="components of three layers, not centred, energies over their sum; fitted levels, not integers; the "
        "latest 16 tokens whole instead of 128; no DEFLATE",
        family=LOW_RANK,
        build=functools.partial(kvtc_maker, joint_layers=JOINT_LAYERS),
        needs=frozenset({READ}),
    ),
    "kq-svd": Peer(
        what="bases of each head's rotated keys for the least error of scores, of values for that of outputs",
        source="KQ-SVD, arXiv 2512.05916",
        simplified="ranks by water-filling; first 4 and latest 16 tokens whole",
        family=LOW_RANK,
        build=kq_svd_maker,
        needs=frozenset({CALIBRATION}),
    ),
    "eigen-attention": Peer(
        what="a basis of each head's keys before rotation, rotated as they are rebuilt, and one of its values",
        source="EigenAttention, arXiv 2408.05646, with the authors' code for models that rotate",
        simplified="one share of the dims for all layers instead of a threshold for each",
        family=LOW_RANK,
        build=eigen_maker,
        needs=frozenset({CALIBRATION}),
        reads_exactly=False,
        edition=2,
    ),
    "palu-j": _palu("whitened factors of key and value projections, all heads of a layer together", ""),
    "palu-j-exact": _palu("`palu-j` with a prompt that attends to its own exact states", "", prefill="exact"),
    "palu-g": _palu(
        f"the same in groups of up to {GROUPED_HEADS} heads",
        "groups divide the heads evenly; ",
        grouped_heads=GROUPED_HEADS,
    ),
    "palu-m": _palu("the same for each head", "", grouped_heads=1),
    "palu-j-int4": _palu("`palu-j` with latents in 4 bits", "no Hadamard rotation of latents; ", bits=4),
    "puzzle-kv": Peer(
        what="a singular value decomposition for each page of 32 tokens",
        source="PuzzleKV, arXiv 2608.23843",
        simplified="one rank for all pages of a layer; first 4 and latest 16 tokens whole",
        family=LOW_RANK,
        build=puzzle_maker,
    ),
    "think": Peer(
        what="each head keeps the key channels that queries use, values stay whole",
        source="ThinK, arXiv 2407.21018, section 3",
        simplified="channels are chosen once, by the first prompt",
        family=EVICTION,
        build=think_maker,
        shares=(0.5, 1.0),
        edition=2,
    ),
    "snapkv": Peer(
        what="each head keeps the tokens that the latest queries look at",
        source="SnapKV, arXiv 2404.14469, section 4",
        simplified=f"{_CHOSEN_AGAIN}, by their queries; a score of each token and head is held, and its bytes counted",
        family=EVICTION,
        build=snapkv_maker,
        edition=2,
    ),
    "expected-attention": Peer(
        what="each head keeps the tokens that the mean and covariance of its queries foretell to matter",
        source="Expected Attention, arXiv 2510.00636, section 3, with kvpress's settings",
        simplified=f"{_CHOSEN_AGAIN}, the latest of which stay; statistics of queries are held, and their bytes not counted",
        family=EVICTION,
        build=expected_attention_maker,
        edition=2,
    ),
    "keydiff": Peer(
        what="each head keeps the tokens whose keys are least like its mean key",
        source="KeyDiff, arXiv 2504.15364, section 3",
        simplified=f"{_CHOSEN_AGAIN}, the latest of which stay",
        family=EVICTION,
        build=keydiff_maker,
        edition=2,
    ),
    "streaming-llm": Peer(
        what="the first 4 and the latest tokens",
        source="StreamingLLM, arXiv 2309.17453, section 3",
        simplified="keys keep their rotations; the window grows with the text",
        family=EVICTION,
        build=streaming_maker,
    ),
}
