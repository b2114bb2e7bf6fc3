"""Which texts a compressor has read, as its checkpoint says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynakv.checkpoint_files import read_config
from lowrank_kv.calibration.known_text import KnownText

# The entry of a checkpoint's summary: a list of records as :attr:`KnownText.record` is one. Older checkpoints have none.
TEXTS_READ = "texts_read"


def known_texts(directory: str | Path) -> list[KnownText]:
    """The texts of a checkpoint's training, of the bases it began from, and of the checkpoint that it went on from.

    Raises:
        UserError: `directory` is no checkpoint.
    """
    return [
        KnownText(
            reader=f"the checkpoint `{directory}`", record=record, make="train", share_option="--dataset.heldout_share"
        )
        for record in texts_read(read_config(directory).summary)
    ]


def texts_read(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of texts in a checkpoint's summary."""
    return summary.get(TEXTS_READ) or []
