"""The model card that lies beside a trained checkpoint as `README.md`, as the Hugging Face hub shows it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dynakv.training_config import FULL, TrainConfig
from lowrank_kv.utils.atomic_write import write_text
from lowrank_kv.utils.intervals import with_interval
from lowrank_kv.utils.paths import name_of
from lowrank_kv.utils.text_data import is_hub_id

CARD = "README.md"
_TAGS = ["lowrank-kv", "dynakv", "kv-cache", "compression"]


def write_card(
    directory: Path, config: TrainConfig, record: Mapping[str, Any], summary: Mapping[str, Any], *, is_compressor: bool
) -> None:
    """Write the card of a checkpoint; an earlier one is replaced.

    Args:
        directory: of the checkpoint.
        config: of the run.
        record: of the run, for its id, commit and machine.
        summary: what the run measured at its end.
        is_compressor: whether the checkpoint is a compressor, not a whole model with one.
    """
    write_text(directory / CARD, model_card(config, record, summary, is_compressor=is_compressor))


def model_card(
    config: TrainConfig, record: Mapping[str, Any], summary: Mapping[str, Any], *, is_compressor: bool
) -> str:
    """The card as Markdown with YAML metadata; machine paths are left out."""
    base, texts = name_of(config.model), [name_of(name) for name in config.dataset.name]
    of_hub = [name for name in config.dataset.name if is_hub_id(name)]
    metadata = {
        "base_model": base,
        "library_name": "transformers",
        "tags": _TAGS,
        **({"datasets": of_hub} if of_hub else {}),
    }
    kind = "compressor of the key-value cache" if is_compressor else "model with a compressor of its key-value cache"
    return "\n".join(
        [
            "---",
            yaml.safe_dump(metadata, sort_keys=False).strip(),
            "---",
            "",
            f"# A {kind} of {base}",
            "",
            f"The Python package lowrank-kv holds keys and values of `{base}` in fewer bytes with it.",
            "It fits this model only, and was made for generation with transformers.",
            "",
            "```python",
            *_usage(base, is_compressor),
            "```",
            "",
            "## Figures",
            "",
            *_figures(config, summary),
            "",
            "## How it was made",
            "",
            *_making(config, record, summary, texts),
            "",
            "## Limits",
            "",
            "Text unlike the training text may lose more than the figures say. The first and the latest tokens of a",
            "sequence may be kept whole, so short texts are hardly compressed.",
            "",
        ]
    )


def _usage(base: str, is_compressor: bool) -> list[str]:
    if not is_compressor:
        return [
            "import dynakv  # lets from_pretrained load it",
            "from transformers import AutoModelForCausalLM",
            "",
            'model = AutoModelForCausalLM.from_pretrained("THIS_REPOSITORY")',
        ]
    return [
        "import lowrank_kv",
        "from huggingface_hub import snapshot_download",
        "from transformers import AutoModelForCausalLM",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{base}")',
        'lowrank_kv.compress(model, snapshot_download("THIS_REPOSITORY"))',
    ]


def _figures(config: TrainConfig, summary: Mapping[str, Any]) -> list[str]:
    heldout = summary.get("heldout") or {}
    if not heldout:
        return ["The run measured no held-out text."]
    kept = "bytes of a token kept" if config.compressor.has_plan else "coefficients kept"
    full = "the trained model without its compressor" if config.trainable == FULL else "the uncompressed model"
    return [
        f"| held-out text | {kept} | perplexity | KL to {full}, nats | scored tokens |",
        "|---|--:|--:|--:|--:|",
        *(
            f"| {name} | {found['hard_rate']:.1%} | {with_interval(found, 'perplexity', '.3f')} | "
            f"{with_interval(found, 'kl', '.4f')} | {found['scored']:,} |"
            for name, found in heldout.items()
        ),
        "",
        "In brackets 95 % intervals: of other documents where a text has eight or more, else of other passages of these.",
    ]


def _making(config: TrainConfig, record: Mapping[str, Any], summary: Mapping[str, Any], texts: list[str]) -> list[str]:
    target = config.rate.target_retain_rate
    every, steps = config.heldout_every, f"{summary['tokens']:,} in {summary['steps']:,} steps"
    averaged = summary.get("averaged_steps", [])
    if averaged:
        selected = f"; this is the mean of what steps {', '.join(f'{step:,}' for step in averaged)} left"
    else:
        selected = f"; this is what step {summary['selected_step']:,} left" if every else ""
    facts = {
        "texts": ", ".join(f"`{text}`" for text in texts),
        "tokens": f"{steps}{selected}",
        "read more than once": ", ".join(name for name, rounds in summary["rounds"].items() if rounds > 1) or "none",
        "target rate": "none" if target is None else f"{target:g}",
        "ranks": f"`rank_policy: {config.compressor.rank_policy}`",
        "precision of the model": config.dtype,
        "run": f"`{record['run_id']}`",
        "code": f"lowrank-kv {record['code']['version']}, commit `{record['code']['commit']}`",
    }
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
