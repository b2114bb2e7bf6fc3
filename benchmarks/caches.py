"""The caches that speed is compared over: uncompressed ones, DynaKV's and OjaKV's, each ready to read a prompt."""

import argparse
import copy
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

import dynakv
from benchmarks import random_models
from benchmarks.harness import check_close, count, forget_tuning, use_device
from benchmarks.random_models import random_ids
from dynakv.checkpoint_files import read_config
from dynakv.model_compressors import settings_of
from lowrank_kv.eviction import Eviction
from lowrank_kv.hf.cache.windowed.config import ATTENTION
from lowrank_kv.hf.cache.windowed.layer import WindowedLayer, layers_of
from lowrank_kv.hf.cache.windowed.plan import Plan
from lowrank_kv.hf.loading import DTYPES, check_length, load_model, load_tokenizer
from lowrank_kv.stores.page_pool import MIN_GRANULE
from lowrank_kv.utils import cli
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import demo_model
from lowrank_kv.utils.progress import progress_bar
from lowrank_kv.utils.text_data import blocks, load_documents
from ojakv import Calibration, OjaKVCache, OjaKVConfig, make_plan

DYNAMIC, PREALLOCATED = "dynamic_cache", "preallocated"
DYNAKV, PAGED = "dynakv", "dynakv-paged"
CHECKED_TOKENS = 84  # the 83 cached are no dimension of a model, which torch.compile would take them for
DEFAULT_SHARES = (0.16, 0.44)  # about what training to 0.3 keeps of keys and of values

Candidate = tuple[PreTrainedModel, Callable[[], Cache]]  # a model and a maker of fresh caches
Candidates = dict[str, Candidate]


def argument_parser(description: str) -> argparse.ArgumentParser:
    """A parser of the arguments :func:`candidates` reads, for a benchmark to add its own to."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", metavar="ID", help="hub id or directory [default: the checkpoint's base model, or the demo's]"
    )
    parser.add_argument(
        "--checkpoint", metavar="DIR",
        help="DynaKV compressor checkpoint [default: without --bases, too, a compressor and bases of random tokens]",
    )  # fmt: skip
    parser.add_argument(
        "--made-up", metavar="KEYS,VALUES", type=_rates,
        help="random weights of the model's shape, for which only its configuration is read, a compressor that keeps these "
        "shares of keys and values, e.g. 0.12,0.48, and bases of random tokens",
    )  # fmt: skip
    parser.add_argument(
        "--shares", metavar="KEYS,VALUES", type=_rates,
        help="time a compressor of the same bases that keeps these shares of keys and values, in place of --checkpoint",
    )  # fmt: skip
    parser.add_argument(
        "--granularity", type=count, metavar="N", help="its ranks in multiples of this [default: as it was trained]"
    )
    parser.add_argument(
        "--bases", metavar="DIR", help="written by `lowrank-kv calibrate`; with it OjaKV presets are timed"
    )
    parser.add_argument(
        "--presets", default="ojakv-pf,ojakv-joint", metavar="NAME[@RATE][+KEY=VALUE],…", type=_presets,
        help="OjaKV presets, each at --rate or at a rate of its own, and with settings of its own, e.g. "
        "tokenwise-mixed@0.1+rebuild_cost=2 [default %(default)s]",
    )  # fmt: skip
    parser.add_argument("--rate", type=float, default=0.5, help="of the presets [default %(default)s]")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="[default %(default)s]")
    parser.add_argument("--device", default="cpu", help="[default %(default)s]")
    parser.add_argument(
        "--columns", action="store_true",
        help="lay all models' weights out by columns, which a CPU's BLAS may multiply with one token faster",
    )  # fmt: skip
    parser.add_argument(
        "--caches", help="compressed caches to take of those, e.g. dynakv-paged,ojakv-pf [default: all]"
    )
    parser.add_argument(
        "--page-rate", type=float, default=0.5, metavar="SHARE",
        help="share of all coefficients that dynakv-paged, on a GPU, has room for [default %(default)s]",
    )  # fmt: skip
    parser.add_argument("--text", metavar="FILE", help="what the context is filled with [default: random tokens]")
    parser.add_argument(
        "--results", type=cli.output_directory, metavar="DIR", help="where to write the run record, e.g. results"
    )
    return parser


def candidates(arguments: argparse.Namespace, length: int) -> Candidates:
    """The uncompressed caches and whatever the arguments ask for, each checked before it may be timed.

    Args:
        length: the most tokens a cache will hold.
    """
    source = os.path.expanduser(arguments.model or "") or _default_model(arguments.checkpoint)
    use_device(arguments.device)
    load = random_models.load_model if arguments.made_up else load_model
    plain = load(source, dtype=arguments.dtype, device=arguments.device)
    check_length(plain, length, "the context")
    if arguments.columns:
        lay_out_by_columns(plain)
    found: Candidates = {
        DYNAMIC: (plain, lambda: DynamicCache(config=plain.config)),
        PREALLOCATED: (plain, lambda: StaticCache(config=plain.config, max_cache_len=max(length, CHECKED_TOKENS))),
    }
    shares = _shares(arguments)
    calibration = _calibration(plain, arguments, shares)
    chosen = _chosen(plain, arguments, calibration, shares)
    with progress_bar(total=len(chosen), unit="cache", desc="checking caches") as bar:
        for name in (DYNAKV, PAGED):
            if name in chosen:
                learned = _learned(plain, arguments, calibration, shares, paged=name == PAGED)
                make = functools.partial(_paged_cache, rate=arguments.page_rate) if name == PAGED else _ragged_cache
                found[name] = (learned, functools.partial(make, learned, length))
                _check_learned(name, learned, functools.partial(make, length=length))
                bar.update()
        if calibration is not None:
            online = twin(plain)
            for name, preset, settings in arguments.presets:
                if name not in chosen:
                    continue
                config = OjaKVConfig.preset(preset, **{"rate": arguments.rate, **settings})
                plan = make_plan(calibration.for_model(online), config)
                found[name] = (online, lambda plan=plan: OjaKVCache(online, plan))
                _check_online(name, plain, online, calibration, config)
                _check_attention(name, online, plan, OjaKVCache)
                bar.update()
    forget_tuning(plain.device)  # it was for a few tokens
    return found


def _shares(arguments: argparse.Namespace) -> tuple[float, float] | None:
    """What a made-up compressor is to keep of keys and of values; None where all compressed caches are named."""
    if arguments.shares:
        given = arguments.checkpoint or arguments.made_up
        require(not given, "--shares", arguments.shares, "left out with --checkpoint and --made-up")
        return arguments.shares
    if arguments.made_up or arguments.checkpoint or arguments.bases:
        return arguments.made_up
    print(
        "neither --checkpoint nor --bases: random tokens give the bases of all compressed caches, and dynakv keeps "
        "{} of the keys and {} of the values of every token".format(*DEFAULT_SHARES)
    )
    return DEFAULT_SHARES


def _chosen(
    plain: PreTrainedModel,
    arguments: argparse.Namespace,
    calibration: Calibration | None,
    shares: tuple[float, float] | None,
) -> list[str]:
    """The compressed caches that the arguments can give and ask for."""
    there = []
    if arguments.checkpoint or shares:
        has_plan = bool(arguments.checkpoint) and read_config(arguments.checkpoint).compressor.has_plan
        there += [DYNAKV, PAGED] if plain.device.type == "cuda" and not has_plan else [DYNAKV]
    if calibration is not None:
        there += [name for name, _, _ in arguments.presets]
    asked = there if arguments.caches is None else arguments.caches.split(",")
    unknown = sorted(set(asked) - set(there))
    require(not unknown, "--caches", ",".join(unknown), f"among what is there with these arguments: {', '.join(there)}")
    return asked


def lay_out_by_columns(model: PreTrainedModel) -> None:
    """The same weights, each input's beside one another in memory and no longer each output's."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.T.contiguous().T


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A model of its own on the same weights: what it serves decides how its attention is prepared."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def context_ids(arguments: argparse.Namespace, model: PreTrainedModel, length: int) -> Tensor:
    """A prompt's token ids, (1, T) int64. A learned compressor keeps more of random tokens than of text."""
    require(length >= 1, "--context", arguments.context, "more than what is decoded after the prompt")
    if not arguments.text:
        return random_ids(model, length)
    documents = load_documents(arguments.text, subset=None, split="test", text_field="text")
    ids_NT = blocks(documents, load_tokenizer(model.config._name_or_path), length, 1)
    return ids_NT.to(model.device)


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: Tensor, cache: Cache) -> Cache:
    """Read a prompt up to its first prediction."""
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


@torch.no_grad()
def decoded(model: PreTrainedModel, ids: Tensor, cache: Cache) -> Tensor:
    """The prediction after all of `ids`, the last of which is decoded."""
    prefill(model, ids[:, :-1], cache)
    token = ids[:, -1:].clone(memory_format=torch.contiguous_format)  # a graph of a view serves views alone
    return model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1]


def _default_model(checkpoint: str | None) -> str:
    if checkpoint:
        return read_config(checkpoint).base_model
    demo = demo_model()
    if not demo.is_dir():
        raise UserError(
            f"`--model` or `--checkpoint` must say what to run; the demo's model is not at {demo} (`make assets`)"
        )
    return str(demo)


def _presets(text: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Of each preset its name in the table, its own, and the settings that it asks for."""
    found = []
    for name in text.split(","):
        words, *pairs = name.split("+")
        preset, _, rate = words.partition("@")
        settings = dict(pair.partition("=")[::2] for pair in pairs)
        if rate:
            settings["rate"] = rate
        try:
            settings = {key: yaml.safe_load(value) for key, value in settings.items()}
            OjaKVConfig.preset(preset, **settings)  # before a model is loaded
        except (yaml.YAMLError, UserError) as error:
            raise argparse.ArgumentTypeError(f"{name}: {error}") from error
        found.append((name, preset, settings))
    return found


def _rates(text: str) -> tuple[float, float]:
    """Two shares, of keys and of values."""
    try:
        key, value = map(float, text.split(","))
        if 0 < key <= 1 and 0 < value <= 1:
            return key, value
    except ValueError:
        pass  # said below, as of what is out of range
    raise argparse.ArgumentTypeError(
        f"must be two shares in (0, 1], of keys and of values, e.g. 0.12,0.48; got {text!r}"
    )


def _calibration(
    plain: PreTrainedModel, arguments: argparse.Namespace, shares: tuple[float, float] | None
) -> Calibration | None:
    if arguments.bases:
        return Calibration.load(arguments.bases)
    return random_models.calibration(twin(plain)) if shares else None


def _learned(
    plain: PreTrainedModel,
    arguments: argparse.Namespace,
    calibration: Calibration | None,
    shares: tuple[float, float] | None,
    *,
    paged: bool,
) -> PreTrainedModel:
    """A model with a compressor, for a paged cache with ranks of whole granules of its pages."""
    granularity = arguments.granularity
    if granularity is None:
        trained = arguments.checkpoint and read_config(arguments.checkpoint).compressor.granularity
        granularity = trained or random_models.granularity_of(plain)
    if paged:
        granularity = -(-granularity // MIN_GRANULE) * MIN_GRANULE
    model = twin(plain)
    if not shares:
        return dynakv.attach(model, arguments.checkpoint, granularity=granularity)
    random_models.add_compressors(model, calibration, shares, granularity)
    return model


def _ragged_cache(model: PreTrainedModel, length: int) -> Cache:
    return dynakv.DynaKVCache.from_model(model)


def _paged_cache(model: PreTrainedModel, length: int, *, rate: float) -> Cache:
    # Only here: the rest of the benchmarks runs without Triton.
    from dynakv.paged_cache import PagedDynaKVCache

    return PagedDynaKVCache.from_model(model, max_length=max(length, CHECKED_TOKENS), rate=rate)


@torch.no_grad()
def _check_learned(name: str, model: PreTrainedModel, make_cache: Callable[[PreTrainedModel], Cache]) -> None:
    """A decoded step equals the uncached pass with the hard mask, which rebuilds a prompt, too. A plan of bits, beside which
    tokens are exact, is checked as a preset's is."""
    settings = settings_of(model)
    if settings.has_plan:
        plan = make_cache(model).compressed_layers()[0].plan
        _check_attention(
            name, model, plan, lambda model, plan: dynakv.DynaKVCache(model, layers_of(plan, WindowedLayer))
        )
        return
    if settings.reads_prompts_exactly:
        model = dynakv.configure(twin(model), prefill="reconstructed")
    ids = random_ids(model, CHECKED_TOKENS)
    uncached = model(ids, use_cache=False).logits[:, -1]

    def in_fp32() -> Tensor:
        return copy.deepcopy(model).float()(ids, use_cache=False).logits[:, -1]

    check_close(name, decoded(model, ids, make_cache(model)), uncached, in_fp32)


def _check_online(
    name: str, plain: PreTrainedModel, online: PreTrainedModel, calibration: Calibration, config: OjaKVConfig
) -> None:
    """At full rank, or at all the bytes, a decoded step equals the uncompressed model's. Settings that lose something there,
    too, are left out: :func:`_check_attention` checks them."""
    lossless = {"rate": 1.0, "rebuild_cost": 0.0, "eviction": Eviction()}
    if not config.has_plan:
        lossless |= {"ranks": "fraction", "cache_dtype": "model", "group_size": None}
    plan = make_plan(calibration, dataclasses.replace(config, **lossless))

    def check(ids: Tensor) -> None:
        def in_fp32() -> Tensor:
            return decoded(copy.deepcopy(plain).float(), ids, DynamicCache(config=plain.config))

        expected = decoded(plain, ids, DynamicCache(config=plain.config))
        # A plan counts its bytes from 16 bits a coefficient.
        check_close(
            name, decoded(online, ids, OjaKVCache(online, plan)), expected, in_fp32, stored_in_half=config.has_plan
        )

    _on_prompts(plain, check)


def _check_attention(
    name: str, model: PreTrainedModel, plan: Plan, make_cache: Callable[[PreTrainedModel, Plan], Cache]
) -> None:
    """With the settings that are timed a decoded step is the same whether it attends to coefficients or to keys and values
    that are rebuilt from them."""
    [other] = set(ATTENTION) - {plan.config.attention}
    # Bases of its own, so that nothing is kept with those that are timed which they would not have made by themselves.
    layers = {index: tuple(map(dataclasses.replace, kv)) for index, kv in plan.layers.items()}
    twin_plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, attention=other), layers=layers)

    def check(ids: Tensor) -> None:
        def in_fp32() -> Tensor:
            in_full = copy.deepcopy(model).float()
            return decoded(in_full, ids, make_cache(in_full, twin_plan))

        expected = decoded(model, ids, make_cache(model, twin_plan))
        check_close(name, decoded(model, ids, make_cache(model, plan)), expected, in_fp32)

    _on_prompts(model, check)


def _on_prompts(model: PreTrainedModel, check: Callable[[Tensor], None]) -> None:
    """Check a step on a prompt, and in half precision, where that fails, on two others instead: a number that is rounded to
    another code takes a right step two or three times as far from that in fp32 as it is on other prompts."""
    try:
        check(random_ids(model, CHECKED_TOKENS))
    except AssertionError:
        if model.dtype == torch.float32:
            raise
        for seed in (1, 2):
            check(random_ids(model, CHECKED_TOKENS, seed))
