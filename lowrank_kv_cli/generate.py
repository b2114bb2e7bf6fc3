"""Generate text from a compressed cache and report how many bytes the cache took.

    lowrank-kv generate --model MODEL --bases bases/mine --rate 0.1 --prompt @LONG_PROMPT.txt
    lowrank-kv generate --checkpoint runs/mine/checkpoint --prompt @LONG_PROMPT.txt

`lowrank-kv calibrate` writes bases, which need no training. The checkpoint is a compressor directory written by
`lowrank-kv train`, or a full checkpoint directory. Short prompts are hardly compressed: give one of a thousand tokens.
"""

import argparse
from typing import Any

import torch
from transformers import TextStreamer

import dynakv
import lowrank_kv
from dynakv.checkpoint_files import CONFIG, WEIGHTS, read_config
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.loading import (
    AUTO,
    DEVICE_HELP,
    DTYPE_HELP,
    DTYPES,
    check_length,
    device_of,
    dtype_for,
    hub_id_or_directory,
    load_model,
    load_tokenizer,
)
from lowrank_kv.stores.memory_report import BUFFERS, FULL_RANK
from lowrank_kv.stores.quantization import CACHE_DTYPES
from lowrank_kv.utils.arguments import ArgumentParser
from lowrank_kv.utils.drawing import check_seed, check_temperature
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import path_of
from lowrank_kv_auto.compression import preset_for
from ojakv import PRESETS, OjaKVConfig

TEMPERATURE = 0.8


def main(argv: list[str]) -> None:
    arguments = _parser().parse_args(argv)
    if arguments.max_new_tokens < 1:
        raise UserError(f"`--max-new-tokens` must be at least 1, got {arguments.max_new_tokens}")
    sampling = _sampling(arguments)
    prompt = read_prompt(arguments.prompt)  # before the model, which may take minutes to load
    model, tokenizer, method = load(arguments)
    inputs = encode(tokenizer, prompt, chat=arguments.chat).to(model.device)
    if not inputs["input_ids"].numel():
        raise UserError(f"`--prompt` is {arguments.prompt!r}, which has no tokens; give some text to continue")
    check_length(model, inputs["input_ids"].shape[1] + arguments.max_new_tokens, "prompt plus --max-new-tokens")
    torch.manual_seed(arguments.seed or 0)
    output = model.generate(
        **inputs,
        **sampling,
        max_new_tokens=arguments.max_new_tokens,
        use_cache=True,  # a model's own generation settings may say otherwise, and may ask for beams, which do not stream
        num_beams=1,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        return_dict_in_generate=True,
        pad_token_id=tokenizer.eos_token_id,
    )
    print(_report(output.past_key_values, method))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__)
    method = parser.add_mutually_exclusive_group(required=True)
    method.add_argument("--checkpoint", type=path_of, metavar="DIR", help="compressor or full checkpoint")
    method.add_argument(
        "--bases", type=path_of, metavar="DIR", help="written by `lowrank-kv calibrate`; needs `--model`"
    )
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help=f"of the bases, one of {', '.join(PRESETS)} [default: the best they were calibrated for]",
    )
    parser.add_argument("--rate", type=float, metavar="R", help="of the preset [default: the preset's own]")
    parser.add_argument("--prompt", required=True, help="text to continue; @FILE reads it from a file")
    parser.add_argument("--model", metavar="ID", help="base model [default: the one a compressor was trained on]")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="[default %(default)s]")
    parser.add_argument("--sample", action="store_true", help="sample instead of taking the likeliest token")
    parser.add_argument("--temperature", type=float, metavar="T", help=f"of sampling [default {TEMPERATURE}]")
    parser.add_argument("--seed", type=int, metavar="N", help="of sampling [default 0]")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    parser.add_argument("--cache-dtype", choices=CACHE_DTYPES, help="of coefficients [default: the method's own]")
    parser.add_argument(
        "--evict", type=float, metavar="SHARE", help="of a prompt's tokens to keep [default: the method's own]"
    )
    parser.add_argument("--dtype", choices=(*DTYPES, AUTO), default=AUTO, help=f"{DTYPE_HELP} [default %(default)s]")
    parser.add_argument("--device", help=DEVICE_HELP)
    return parser


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `generate()` is told of sampling. Raises :class:`UserError` for arguments that do not go together."""
    for name in ("temperature", "seed"):
        if getattr(arguments, name) is not None and not arguments.sample:
            raise UserError(
                f"`--{name}` is of sampling: give `--sample`, too, or leave it out for the likeliest tokens"
            )
    temperature = TEMPERATURE if arguments.temperature is None else arguments.temperature
    check_temperature(temperature, "--temperature", greedy="leave out `--sample` for the likeliest tokens")
    check_seed(arguments.seed or 0, "--seed")
    return {"do_sample": True, "temperature": temperature} if arguments.sample else {"do_sample": False}


def _report(cache: LowRankCache, method: str) -> str:
    """What compressed, the bytes of the cache, and why it gains less than half of them where the text is short."""
    memory = cache.memory()
    lines = [
        f"\n{method}",
        f"{memory}",
        "(bases are a sequence's own; what all caches of the model share is not counted)",
    ]
    exact = memory.kinds[FULL_RANK] + memory.kinds[BUFFERS]
    if memory.rate >= 1 or (memory.rate > 0.5 and 2 * exact > memory.total):
        gain = "nothing" if memory.rate >= 1 else "little"
        lines.append(
            f"a text this short gains {gain}: its first and latest tokens stay exact; give a longer `--prompt`"
        )
    tokens, rate = cache.get_seq_length(), f"rate {memory.rate:.3f} (uncompressed: {memory.full:,} bytes)"
    if cache.compressed_layers()[0].dtype == torch.float32:
        rate += f", in float32; {2 * memory.rate:.3f} of what 16 bits would take"
    return "\n".join([*lines, f"cache: {memory.total:,} bytes for {tokens:,} tokens, {rate}"])


def load(arguments: argparse.Namespace):
    """The compressed model that the arguments ask for, its tokenizer, and the method in words."""
    given = {
        "cache_dtype": arguments.cache_dtype,
        "eviction": None if arguments.evict is None else {"keep_ratio": arguments.evict},
    }
    settings = {key: value for key, value in given.items() if value is not None}
    device = device_of(arguments.device)
    loading = {"dtype": dtype_for(arguments.dtype, device), "device": device}
    if arguments.bases is not None:
        if arguments.model is None:
            raise UserError("`--bases` needs `--model`, the hub id or directory of the model they were calibrated on")
        if not Calibration.is_in(arguments.bases):
            raise UserError(
                f"`--bases` must be a directory that `lowrank-kv calibrate` wrote, got `{arguments.bases}`; a trained "
                f"compressor is given as `--checkpoint`"
            )
        # Mistakes are found before minutes of loading, and those in words before the files are read.
        preset = arguments.preset
        if preset is not None:
            OjaKVConfig.preset(preset, rate=arguments.rate, **settings)
        name, bases = hub_id_or_directory(arguments.model), Calibration.load(arguments.bases)
        preset = preset or preset_for(bases)
        config = OjaKVConfig.preset(preset, rate=arguments.rate, **settings)
        model = load_model(name, **loading)
        for own in (model.config.get_text_config(decoder=True), model.generation_config):
            own.use_cache = True  # whatever the model's own settings say: `generate()` is told so, too
        lowrank_kv.compress(model, preset, bases=bases, rate=arguments.rate, **settings)
        of = "a token's bytes in 16 bits" if config.has_plan else "the coefficients"
        kept = f"energy {config.energy:g}" if config.ranks == "energy" else f"rate {config.rate:g} of {of}"
        return model, load_tokenizer(name), f"preset {preset}, {kept}"
    for name in ("preset", "rate"):
        if getattr(arguments, name) is not None:
            raise UserError(f"`--{name}` is of bases: give `--bases` in place of `--checkpoint`, or leave it out")
    directory = arguments.checkpoint
    if not directory.is_dir():
        raise UserError(f"the checkpoint directory `{directory}` does not exist; train one with `lowrank-kv train`")
    if Calibration.is_in(directory):
        raise UserError(f"`--checkpoint` must be a compressor, got the calibration `{directory}`; give it as `--bases`")
    if (directory / WEIGHTS).exists() or not (directory / CONFIG).exists():
        name = arguments.model or read_config(directory).base_model
        model = dynakv.attach(load_model(name, **loading), directory, **settings)
    else:
        if arguments.model is not None:
            raise UserError(
                f"`--model` is of a compressor alone, and the checkpoint `{directory}` has a whole model; leave it out"
            )
        name = str(directory)
        # A checkpoint of an uncompressed model is an error there, not a silent full cache.
        model = dynakv.configure(load_model(name, **loading), **settings)
    return model, load_tokenizer(name), f"the compressor {directory}"


def read_prompt(prompt: str) -> str:
    """The text of a prompt, or of the file that `@FILE` names."""
    if not prompt.startswith("@"):
        return prompt
    try:
        return path_of(prompt[1:]).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read the prompt file `{prompt[1:]}`: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt file `{prompt[1:]}` is not UTF-8 text: {error.reason}; convert it") from error


def encode(tokenizer, prompt: str, *, chat: bool):
    if chat:
        if tokenizer.chat_template is None:
            raise UserError(f"`--chat` needs a chat template, which `{tokenizer.name_or_path}` has not; leave it out")
        messages = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    return tokenizer(prompt, return_tensors="pt")
