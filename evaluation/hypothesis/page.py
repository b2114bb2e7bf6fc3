"""A finished run of the suite as Markdown."""

from collections.abc import Mapping
from typing import Any

from lowrank_kv.utils.intervals import with_interval

from ..scores import extent
from .ranks import STATE_NAMES
from .suite import ALL_TEXTS


def markdown(record: Mapping[str, Any]) -> str:
    """The verdicts, the perplexities on all texts together, and the ranks that heads need."""
    lines = [f"# Is the KV cache of {record['config']['model']} of low rank?", ""]
    for verdict in record["summary"]["verdicts"].values():
        lines += [
            f"- **{verdict['verdict']}**: {verdict['claim']}",
            f"  - rule: {verdict['rule']}",
            f"  - {verdict['because']}",
        ]
    rows = [row for row in record["rows"] if row["what"] == "perplexity"]
    last = rows[-1]["dataset"]  # all texts, or the only one
    lines += [
        "",
        f"## Perplexity ratio, {last if last == ALL_TEXTS else f'`{last}`'} ({extent(rows[-1])})",
        "",
        "| setting | keys r / d | values r / d | bytes | perplexity ratio | KL, nats |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in (row for row in rows if row["dataset"] == last):
        ratio = with_interval(row, "perplexity_ratio", ".3f")
        shares = f"{row['key_share']:.2f} | {row['value_share']:.2f}"
        lines.append(f"| {row['method']} | {shares} | {row['rate']:.3f} | {ratio} | {row['kl']:.4f} |")
    lines += ["", "## Ranks that hold a share of the energy, least / mean / most over heads", ""]
    heads = [row for row in record["rows"] if row["what"] == "head"]
    thresholds = [key for key in heads[0] if key.startswith("rank_")]
    lines += [
        "| states | " + " | ".join(f"{key.removeprefix('rank_')} %" for key in thresholds) + " |",
        "|---|" + "--:|" * len(thresholds),
    ]
    for (side, rope), name in STATE_NAMES.items():
        chosen = [row for row in heads if (row["side"], row["rope"]) == (side, rope)]
        cells = []
        for key in thresholds:
            ranks = [row[key] for row in chosen]
            cells.append(f"{min(ranks)} / {sum(ranks) / len(ranks):.1f} / {max(ranks)}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])
