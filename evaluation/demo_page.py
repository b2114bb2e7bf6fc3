"""The page that `make demo` ends with: what it measured as a picture, and the text of the full and the compressed cache."""

import base64
import dataclasses
import difflib
import html
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .report import figures

_INTEGERS = "integers"  # of a few bits, beside which ours stand
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; height: auto; }
.texts { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: 1rem; }
.text { border: 1px solid #8884; border-radius: 8px; padding: 0 1rem; }
.end { opacity: 0.6; } mark { background: #f5c24266; color: inherit; }
pre { overflow-x: auto; border: 1px solid #8884; border-radius: 8px; padding: 0.6rem 1rem; }
table { border-collapse: collapse; }
td, th { padding: 0.2rem 0.8rem; text-align: right; }
td:first-child, th:first-child { text-align: left; }
.wide { overflow-x: auto; }
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuation:
    """What a model wrote after a prompt.

    Attributes:
        label: of its cache.
        text: without the prompt.
        nbytes: that the cache holds at the end.
        seconds: that it took, the prompt included.
    """

    label: str
    text: str
    nbytes: int
    seconds: float


@torch.no_grad()
def continuation(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids_1T: Tensor, *, label: str, tokens: int
) -> Continuation:
    """Let `model`, as it is, continue a prompt greedily.

    Args:
        ids_1T: of the prompt.
        tokens: to write, whatever they are.
    """
    start = time.perf_counter()
    output = model.generate(
        ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        do_sample=False,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        return_dict_in_generate=True,
        pad_token_id=tokenizer.eos_token_id,
    )
    cache = output.past_key_values
    if hasattr(cache, "memory"):
        nbytes = cache.nbytes
    else:
        nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return Continuation(
        label=label,
        text=tokenizer.decode(output.sequences[0, ids_1T.shape[1] :], skip_special_tokens=True),
        nbytes=nbytes,
        seconds=time.perf_counter() - start,
    )


def picture(record: Mapping[str, Any]) -> dict[str, bytes]:
    """Divergence against bytes, a panel for each text of a comparison's record; see :func:`figures.pictures`."""
    rows = [row for row in record["rows"] if row["method"] != "full"]
    panels = []
    for text in dict.fromkeys(row["dataset"] for row in rows):
        families: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["dataset"] == text:
                families.setdefault(_family(row["method"]), []).append((row["rate"], row["kl"]))
        lines = [
            {"label": name, "points": sorted(points), **({} if name == _INTEGERS else {"ours": True})}
            for name, points in families.items()
        ]
        panels.append({"title": text, "lines": lines})
    return figures.pictures(
        {
            "x": {"label": "bytes held / full cache"},
            "y": {"label": "KL to the full cache, nats", "scale": "log"},
            "panels": panels,
            "width": 6 if len(panels) == 1 else 5,
            "dark": True,
        }
    )


def page(
    record: Mapping[str, Any],
    pictures: Mapping[str, bytes],
    prompt: str,
    texts: Sequence[Continuation],
    commands: Sequence[str],
) -> str:
    """The page as one file of HTML that loads nothing.

    Args:
        record: of the comparison.
        pictures: of :func:`picture`.
        prompt: whose end is shown.
        texts: of the full cache, then of the compressed one.
        commands: to go on with.
    """
    model = html.escape(str(record["config"]["model"]))
    light, dark = (_data(pictures[ending]) for ending in (".svg", f"{figures.DARK}.svg"))
    shown = "\n".join(
        f'<div class="text"><h3>{html.escape(each.label)}</h3><p>{body}</p>'
        f"<p>{each.nbytes:,} bytes, {each.nbytes / texts[0].nbytes:.1%} of the full cache</p></div>"
        for each, body in zip(texts, _marked(*(each.text for each in texts)), strict=True)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>lowrank-kv: what the demo made</title><style>{_STYLE}</style></head><body>
<h1>What the demo made</h1>
<p>The compressor in <code>runs/demo/checkpoint</code> holds the key-value cache of {model} in few bytes.
Lower and further to the left is better.</p>
<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">
<img alt="Divergence from the full cache against bytes held" src="{light}"></picture>
<h2>The same prompt, two caches</h2>
<p class="end">… {html.escape(prompt[-400:])}</p>
<div class="texts">
{shown}
</div>
<h2>Figures</h2>
<div class="wide"><table><tr><th>cache</th><th>text</th><th>bytes held</th><th>KL, nats</th><th>perplexity ratio</th></tr>
{_rows(record)}
</table></div>
<h2>Next</h2>
<pre>{html.escape(chr(10).join(commands))}</pre>
</body></html>
"""


def _family(method: str) -> str:
    """A method without its budget: the line that it is a point of."""
    return _INTEGERS if "int" in method else re.sub(r" [\d.]+$", "", method)


def _rows(record: Mapping[str, Any]) -> str:
    return "\n".join(
        f"<tr><td>{html.escape(row['method'])}</td><td>{html.escape(row['dataset'])}</td><td>{row['rate']:.1%}</td>"
        f"<td>{row['kl']:.4f}</td><td>{row['perplexity_ratio']:.3f}</td></tr>"
        for row in record["rows"]
    )


def _marked(first: str, second: str) -> tuple[str, str]:
    """Both texts as HTML, the words marked in which they differ."""
    words = [text.split() for text in (first, second)]
    shown: tuple[list[str], list[str]] = ([], [])
    for tag, *places in difflib.SequenceMatcher(a=words[0], b=words[1], autojunk=False).get_opcodes():
        for side, (start, end) in enumerate((places[:2], places[2:])):
            part = html.escape(" ".join(words[side][start:end]))
            if part:
                shown[side].append(part if tag == "equal" else f"<mark>{part}</mark>")
    return " ".join(shown[0]), " ".join(shown[1])


def _data(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")
