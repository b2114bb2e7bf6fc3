"""Which texts a run's compressor comes from, for its checkpoint: whoever measures it is warned of them."""

from typing import Any

from dynakv.checkpoint_files import read_config
from dynakv.known_texts import texts_read
from dynakv.training_config import TrainConfig
from lowrank_kv.calibration import calibration_files


def texts_of_run(config: TrainConfig) -> list[dict[str, Any]]:
    """Records (:attr:`lowrank_kv.calibration.known_text.KnownText.record`) of the texts that a beginning run trains on, and
    of those that its bases or its checkpoint have read.

    Raises:
        UserError: its bases or its checkpoint are none.
    """
    records = config.dataset.records()
    if config.initial_checkpoint is not None:
        return records + texts_read(read_config(config.initial_checkpoint).summary)
    if config.calibration.bases is not None:
        read = calibration_files.read_config(config.calibration.bases).record
        records.append({key: read.get(key) for key in records[0]})
    return records
