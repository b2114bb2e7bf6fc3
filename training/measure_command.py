"""Measure on a text how much a compressor keeps of its tokens, which is what a server's pages are made for.

    lowrank-kv measure --checkpoint runs/mine/checkpoint --dtype bfloat16 --name TEXT.jsonl

Training measures it on the text that it held out. This command writes another text's numbers into the checkpoint, in front
of those: the retain rates of gates, the shares of classes of tokens. Predictions do not change.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import dynakv
from dynakv.checkpoint import save_again
from dynakv.checkpoint_files import ISOLATED, WEIGHTS, read_config
from dynakv.measured_rates import measured_rates
from lowrank_kv.hf.loading import DEVICE_HELP, DTYPES, check_length, load_model, load_tokenizer
from lowrank_kv.utils.atomic_write import check_directory, check_replaceable
from lowrank_kv.utils.config import configuration, option, parse_config
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import name_of, path_of
from lowrank_kv.utils.progress import progress_bar
from lowrank_kv.utils.text_data import NAME_HELP, CalibrationText

from .class_shares import has_classes, measure_class_shares
from .data import Batch
from .documents_apart import keep_apart
from .validation import measure


@configuration
class MeasureConfig(CalibrationText):
    """One measurement."""

    checkpoint: str = option(help="directory of a DynaKV compressor; its measurements are replaced")
    name: list[str] = option(help=NAME_HELP)
    model: str | None = option(None, help="hub id or directory; by default the one it was trained on")
    dtype: str = option("float32", help="of the model", choices=DTYPES)
    isolate_documents: bool | None = option(
        None, help="let documents of a block see nothing of one another; by default as in training"
    )
    device: str | None = option(None, help=DEVICE_HELP)


def main(argv: list[str]) -> None:
    config, _ = parse_config(MeasureConfig, argv, description=__doc__)
    saved, directory = read_config(config.checkpoint), path_of(config.checkpoint).resolve()
    check_replaceable(directory, WEIGHTS)  # now, not when all is measured
    check_directory(directory.parent)
    name = config.model or saved.base_model
    model = dynakv.attach(load_model(name, dtype=config.dtype, device=config.device), config.checkpoint)
    dynakv.set_exact_tokens(model, saved.compressor.seen_exactly)
    check_length(model, config.block_length, "length")
    isolates = config.isolate_documents
    if isolates is None:
        isolates = saved.summary.get(ISOLATED, True)  # older checkpoints do not say, and were trained so by default
    if isolates:
        keep_apart(model, model.device, name=name, remedy="set `isolate_documents` to false, as in training")
    blocks = config.read(load_tokenizer(name))
    text = ", ".join(name_of(each) for each in config.name)
    batches = Batch.of_each(blocks, isolate=isolates)
    summary = measure_again(model, progress_bar(batches, unit="block", desc="measuring"), text, saved.summary)
    save_again(model, directory, summary)
    rates = measured_rates(config.checkpoint, read_config(config.checkpoint))
    kept = "of a token's bytes in 16 bits" if rates.of_bytes else "of its coefficients"
    print(f"{Path(config.checkpoint)}: keeps {rates.mean:.3f} {kept}, on {blocks.ids_NT.numel():,} tokens of {text}")


def measure_again(
    model: PreTrainedModel, batches: Iterable[Batch], text: str, summary: dict[str, Any]
) -> dict[str, Any]:
    """The summary of a checkpoint with what `model` keeps of a text's tokens in front; shares of classes are put into the
    compressors themselves.

    Raises:
        UserError: the compressors keep equally much of every token.
    """
    compressors = dynakv.token_compressors(model)
    settings = compressors[0].config
    if settings.has_gates:
        others = {label: found for label, found in (summary.get("heldout") or {}).items() if label != text}
        return {**summary, "heldout": {text: measure(model, batches), **others}}
    if not any(map(has_classes, compressors)):
        raise UserError(
            f"the compressor has `rank_policy: {settings.rank_policy}` and one class of tokens, so that all take equally "
            f"many bytes; there is nothing to measure"
        )
    return {**summary, "measured_classes": measure_class_shares(model, batches, text)}
