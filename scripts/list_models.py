"""Find which decoder families a compressed cache serves, and write the list of docs/models.md.

    python -m scripts.list_models                    # try all families; write
    python -m scripts.list_models --only llama,mpt   # try these; print
    python -m scripts.list_models --check            # fail where a family of the installed transformers is not in the list

Of each causal language model that the installed transformers has a tiny random one is made. It is served if its logits with
full-rank caches of both methods equal those it computes by itself, and refused if it raises a UserError; there is no third.
Of those that are served the list also says which tell documents of one block apart, as training needs.
"""

import argparse
import dataclasses
import re
import sys
import textwrap
import traceback
from pathlib import Path

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedModel

import dynakv
from lowrank_kv.hf.document_isolation import isolate_documents, objection_to_packing
from lowrank_kv.hf.prepare import prepare, restore
from lowrank_kv.hf.self_check import check_by_itself
from lowrank_kv.utils import cli
from lowrank_kv.utils.atomic_write import write_text
from lowrank_kv.utils.errors import UserError
from ojakv import Calibration, OjaKVCache, OjaKVConfig
from scripts.tiny_families import NotBuiltError, families, tiny_configs, tiny_model

DOCUMENT = Path("docs/models.md")
WRITE = "`python -m scripts.list_models`"
OPEN, CLOSE = "<!-- models -->", "<!-- /models -->"
SERVED, REFUSED, UNTRIED, WRONG = "served", "refused", "not tried", "wrong"
# A prompt that outgrows the windows of the tiny models, tokens one by one, a few at once.
CALLS = (20, 1, 1, 1, 1, 4)
# How documents of one block are told apart.
BY_ITSELF, BY_MASKS, NOT_APART = "by itself", "by masks", "not"
ALLOWED = 1e-4  # of the root mean square of the logits
# What a family that was never meant to be tiny may fail with before this package sees it.
UNBUILT = (
    NotBuiltError,
    StrictDataclassError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What became of one family; of one that is served also how documents of a block are told apart."""

    family: str
    result: str
    because: str = ""
    documents: str = ""


def try_family(name: str) -> Finding:
    """Serve a tiny model of a family in every way, or find why not."""
    because = ""
    ids_BT = torch.randint(3, 90, (1, sum(CALLS)), generator=torch.Generator().manual_seed(0))
    try:
        for config in tiny_configs(families()[name]):
            try:
                model = tiny_model(config)
                refusal = _refused_as_it_stands(model)
                stock = logits(model, ids_BT) if refusal is None else None
            except (*UNBUILT, ValueError, OSError) as error:
                because = because or f"{type(error).__name__}: {_one_line(error)}"
            else:
                return _served(name, model, ids_BT, stock) if refusal is None else Finding(name, REFUSED, refusal)
    except NotBuiltError as error:
        because = because or _one_line(error)
    return Finding(name, UNTRIED, because)


def _refused_as_it_stands(model: PreTrainedModel) -> str | None:
    """Why a model is refused whatever it computes; None where it is not."""
    try:
        prepare(model)
    except UserError as error:
        return _one_line(error)
    restore(model)
    return None


def _served(name: str, model: PreTrainedModel, ids_BT: Tensor, stock: Tensor) -> Finding:
    try:
        for method, make_cache in caches(model).items():
            cache = make_cache()
            found = logits(model, ids_BT, cache)
            off = float((found - stock).abs().max() / stock.square().mean().sqrt())
            if not off <= ALLOWED:
                return Finding(name, WRONG, f"{method} is off by {off:.2g}")
            history = cache.history
            if history is not None and history.keeps_rows != history.rotary.is_length_dependent:
                return Finding(name, WRONG, f"{method} keeps other bytes of each token's rotation than budgets count")
            if method == "ojakv":
                check_by_itself(model)  # what is served must pass
        dynakv.detach(model)
        documents = _documents(model)
    except UserError as error:
        return Finding(name, REFUSED, _one_line(error))
    except (*UNBUILT, ValueError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Finding(name, WRONG, f"{type(error).__name__}: {_one_line(error)} ({where.filename}:{where.lineno})")
    return Finding(name, SERVED, documents=documents)


def _documents(model: PreTrainedModel) -> str:
    if objection_to_packing(model, model.device) is None:
        return BY_ITSELF
    return BY_MASKS if isolate_documents(model, model.device) is None else NOT_APART


@torch.no_grad()
def logits(model: PreTrainedModel, ids_BT: Tensor, cache: object = None) -> Tensor:
    """Of the calls one after another; with no cache given the model makes its own."""
    parts = []
    for part_BT in ids_BT.split(CALLS, dim=1):
        output = model(input_ids=part_BT, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, dim=1)


def caches(model: PreTrainedModel):
    """Method → a maker of its full-rank cache, in the order in which they must be used."""
    blocks_NT = torch.randint(3, 90, (4, 32), generator=torch.Generator().manual_seed(1))
    calibration = Calibration.from_text(model, blocks_NT, progress=False, self_check=False)
    config = OjaKVConfig.preset("ojakv-joint", rate=1.0, update_period=4, num_sink_tokens=1, recent_window=2)

    def learned() -> dynakv.DynaKVCache:
        dynakv.add_compressors(model, dynakv.DynaKVConfig())
        dynakv.initialize_from_moments(model, calibration.second_moments())
        dynakv.open_gates(model)
        dynakv.use_dynakv_cache(model)
        return dynakv.DynaKVCache.from_model(model)

    return {
        "ojakv": lambda: OjaKVCache.from_model(model, config, bases=calibration, self_check=False),
        "dynakv": learned,
    }


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def table(findings: list[Finding]) -> str:
    """The lists of docs/models.md."""
    served = [each.family for each in findings if each.result == SERVED]
    masked, not_apart = (
        [each.family for each in findings if each.documents == documents] for documents in (BY_MASKS, NOT_APART)
    )
    others = [each for each in findings if each.result != SERVED]
    counts = {result: sum(each.result == result for each in findings) for result in (SERVED, REFUSED, UNTRIED)}
    lines = [
        f"transformers `{transformers.__version__}`: "
        + ", ".join(f"{count} {result}" for result, count in counts.items()),
        "",
        *textwrap.wrap("Served: " + _names(served), 140),
        "",
        *textwrap.wrap("Training gives masks that keep documents of a block apart to: " + _names(masked), 140),
        "",
        *textwrap.wrap("Training refuses `dataset.isolate_documents` with: " + _names(not_apart), 140),
        "",
        "| family | result | why |",
        "|---|---|---|",
    ]
    lines += [f"| `{each.family}` | {each.result} | {_cell(each.because)} |" for each in others]
    return "\n".join(lines)


def _names(families: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in families) + "."


def _cell(text: str) -> str:
    short = text if len(text) <= 150 else text[:147].rsplit(" ", 1)[0] + " …"
    return short.replace("|", "\\|").replace("<", "&lt;")


def listed_version(document: str) -> str:
    """The version of transformers whose families a document lists."""
    version = re.search(r"^transformers `(\S+)`:", document, re.M)
    if version is None:
        raise UserError(f"{DOCUMENT} does not name a version of transformers; write its list anew: {WRITE}")
    return version.group(1)


def problems(document: str) -> list[str]:
    """What a document of the installed version lacks, in so far as it can be seen without trying the families again."""
    return [f"{DOCUMENT} says nothing of `{name}`" for name in families() if f"`{name}`" not in document]


def check(document: str) -> list[str]:
    """:func:`problems`, told on standard output."""
    listed, installed = listed_version(document), transformers.__version__
    if listed != installed:
        print(
            f"not compared: {DOCUMENT} lists the families of transformers {listed}, and {installed} is installed, which may "
            f"have others; install {listed}, or list those of {installed}: {WRITE}"
        )
        return []
    found = problems(document)
    print("\n".join(found) if found else "the list has every family")
    return found


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help="families to try, separated by commas; their result is printed")
    parser.add_argument("--check", action="store_true", help="change nothing, and fail where a family is missing")
    arguments = parser.parse_args(argv)
    if arguments.check:
        sys.exit(1 if check(DOCUMENT.read_text(encoding="utf-8")) else 0)
    names = arguments.only.split(",") if arguments.only else list(families())
    unknown = [name for name in names if name not in families()]
    if unknown:
        raise UserError(f"`--only` names {', '.join(unknown)}, which the installed transformers does not have")
    findings = []
    for name in names:
        findings.append(try_family(name))
        print(" ".join(filter(None, dataclasses.astuple(findings[-1]))), flush=True)
    wrong = [each for each in findings if each.result == WRONG]
    if not arguments.only and not wrong:
        before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(OPEN)
        write_text(DOCUMENT, f"{before}{OPEN}\n{table(findings)}\n{CLOSE}{rest.partition(CLOSE)[2]}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    cli.run(main)
