"""How much of a text a pass reads compressed: of short documents little or nothing, for first and latest tokens are exact.

Shapes: B batch, T tokens of a block.
"""

import warnings
from collections.abc import Iterable

from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.utils.errors import UserError

from .data import Batch

_LITTLE = 0.2


def check_read_compressed(batches: Iterable[Batch], exact: ExactTokens, what: str, *, warns: bool = True) -> None:
    """Look at blocks of a text that is trained, or measured, on.

    Warns where its queries read little compressed.

    Args:
        batches: some of the text.
        exact: which tokens a query sees as they are.
        what: the text, for the message.
        warns: whether this process says it; an error is raised by all.

    Raises:
        UserError: they read nothing compressed, so that nothing could be learned, or told.
    """
    share = share_read_compressed(batches, exact)
    documents = f"of {what} queries read {share:.0%} of the tokens before them compressed"
    remedy = (
        "its documents, or `dataset.sequence_length`, are short: join them, raise the length, set "
        "`dataset.isolate_documents` to false, or keep fewer tokens exact (`compressor.exact_tokens`)"
    )
    if not share:
        raise UserError(f"{documents}, so that every cache would look like the uncompressed one; {remedy}")
    if share < _LITTLE and warns:
        warnings.warn(f"{documents}: what is measured says little of longer texts; {remedy}", stacklevel=2)


def share_read_compressed(batches: Iterable[Batch], exact: ExactTokens) -> float:
    """Of all tokens that queries may see, the share that they read compressed."""
    read = seen = 0
    for batch in batches:  # counted query by query: pairs of a long block would take gigabytes
        place_BT = batch.position_BT
        read += int((exact.end_of_compressed(place_BT) - exact.num_sink_tokens).clamp(min=0).sum())
        seen += int((place_BT + 1).sum())
    return read / seen
