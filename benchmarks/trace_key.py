"""Print the project's files that one decoded token's keys and values enter, in order, with the functions called in each.

    python -m benchmarks.trace_key
    python -m benchmarks.trace_key --method ojakv-joint

The model is a small random one: which functions are called does not depend on its size. Compiled code is not followed.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import dynakv
from benchmarks.random_models import add_compressors, calibration, random_ids
from lowrank_kv.utils import cli
from ojakv import PRESETS, OjaKVCache, OjaKVConfig

ROOT = Path(__file__).parents[1]
PROMPT, DECODED = 60, 6  # tokens before the one that is traced
DYNAKV = "dynakv"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=[DYNAKV, *PRESETS], default=DYNAKV, help="[default %(default)s]")
    entered = files_entered(parser.parse_args(argv).method)
    for path, functions in entered.items():
        print(f"{path}: {', '.join(functions)}")
    print(f"{len(entered)} files")


@torch.no_grad()
def files_entered(method: str) -> dict[str, list[str]]:
    """File, relative to the checkout → the functions called in it, both in the order of their first call.

    Args:
        method: ``dynakv``, or an OjaKV preset.
    """
    model = _model()
    if method == DYNAKV:
        add_compressors(model, calibration(model), (0.3, 0.5), granularity=4)
        cache = dynakv.DynaKVCache.from_model(model)
    else:
        config = OjaKVConfig.preset(method)
        is_planned = config.has_plan
        if not is_planned:  # whose plan says how many coefficients there are
            config = dataclasses.replace(config, rank_multiple=4)
        cache = OjaKVCache.from_model(model, config, bases=calibration(model, read=is_planned))
    ids = random_ids(model, PROMPT + DECODED + 1)
    for step in (ids[:, :PROMPT], *ids[:, PROMPT:-1].split(1, dim=1)):
        model(step, past_key_values=cache)
    entered: dict[str, list[str]] = {}

    def record(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if (
            event == "call"
            and ROOT in path.parents
            and not path.parts[len(ROOT.parts)].startswith((".venv", "benchmarks"))
        ):
            functions = entered.setdefault(str(path.relative_to(ROOT)), [])
            if (name := frame.f_code.co_name) not in functions and not name.startswith("<"):
                functions.append(name)

    sys.setprofile(record)
    try:
        model(ids[:, -1:], past_key_values=cache)
    finally:
        sys.setprofile(None)
    return entered


def _model() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, initializer_range=0.15, **sizes)).eval()


if __name__ == "__main__":
    cli.run(main)
