"""Every method once: how to make a model of it with and without truncation. Contracts run over all rows.

Adding a method to the project adds a row here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from remembered import remembered
from transformers import Cache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import dynakv
from lowrank_kv.calibration.activation_moments import KEY, VALUE, calibrate
from lowrank_kv.calibration.bit_plans import coded_bases
from lowrank_kv.hf.cache.windowed.plan import InitialBasis
from ojakv import PRESETS, Calibration, OjaKVCache, OjaKVConfig, Plan, make_plan

MakeCache = Callable[[], Cache]
_FEW_WORDS = 6


@dataclasses.dataclass(frozen=True)
class Method:
    """One row. `build(model, rate)` prepares the model and returns a maker of caches; rate 1 truncates nothing.

    With `follows_text` what a token is stored as depends on the tokens around it, so that a text read in pieces is not
    compressed as one read at once. `preset` and `settings` (of a rate) are those of a row that needs no compressor, and
    `reads` says that its calibration is to say what is read of a compressed cache, `words` how little it has seen at rates
    below 1, so that texts have directions of their own (:func:`calibration_of`).
    """

    name: str
    build: Callable[[PreTrainedModel, float], MakeCache]
    follows_text: bool = False
    preset: str | None = None
    settings: Callable[[float], dict[str, Any]] | None = None
    reads: bool = False
    words: int | None = None

    def calibration(self, model: PreTrainedModel, rate: float) -> Calibration:
        """What the bases of a row with a preset are made of."""
        return calibration_of(model, read=self.reads, words=self.words if rate < 1 else None)


def tiny_model(seed: int = 0, **overrides) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).eval()


def calibration_moments(model: PreTrainedModel):
    ids = torch.randint(1, model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(1))
    return remembered(model, "moments", lambda twin: calibrate(twin, ids, sides=(KEY, VALUE), progress=False))


def calibration_of(
    model: PreTrainedModel, blocks: int = 4, *, read: bool = False, joint_layers: int = 3, words: int | None = None
) -> Calibration:
    """With `read` it says what is read of a compressed cache, for which longer blocks are read; with `words` it has seen
    only so many tokens of the vocabulary."""

    def make(twin: PreTrainedModel) -> Calibration:
        return _calibrated(twin, blocks, read, joint_layers, words)

    return remembered(model, ("calibration", blocks, read, joint_layers, words), make)


def _calibrated(model: PreTrainedModel, blocks: int, read: bool, joint_layers: int, words: int | None) -> Calibration:
    generator = torch.Generator().manual_seed(1)
    end = model.config.vocab_size if words is None else words + 1
    ids = torch.randint(1, end, (blocks, 32), generator=generator)
    calibration = Calibration.from_text(model, ids, progress=False)
    if not read:
        return calibration
    longer = torch.randint(1, end, (2, 160), generator=generator)
    longer = Calibration.from_text(model, longer, read_gradients=True, joint_layers=joint_layers, progress=False)
    return dataclasses.replace(calibration, read=longer.read, joint_layers=joint_layers)


def spread_gates(model: PreTrainedModel, seed: int = 2) -> None:
    """Random gates whose ranks differ from token to token."""
    generator = torch.Generator().manual_seed(seed)
    for layer in dynakv.compressors(model).values():
        for compressor in (layer.key, layer.value):
            gate = compressor.gate
            gate.weight.data.copy_(torch.randn(gate.weight.shape, generator=generator))
            gate.bias.data.copy_(torch.randn(gate.bias.shape, generator=generator))


def dynakv_model(model: PreTrainedModel, rate: float, **settings) -> MakeCache:
    moments = calibration_moments(model)
    dynakv.add_compressors(model, dynakv.DynaKVConfig(**{"granularity": 1, **settings}))
    dynakv.initialize_from_moments(model, moments)
    if rate == 1:
        dynakv.open_gates(model)
    else:
        spread_gates(model)
    dynakv.use_dynakv_cache(model)
    return lambda: dynakv.DynaKVCache.from_model(model)


def planned_model(
    model: PreTrainedModel,
    rate: float,
    *,
    num_sink_tokens: int = 2,
    token_classes: int = 1,
    words: int = _FEW_WORDS,
    **more,
) -> MakeCache:
    """A compressor with a plan of bits, whose projection has moved away from its start. Where sequences are to have
    directions of their own, its calibration saw only so many `words`."""
    settings = dynakv.DynaKVConfig(
        rank_policy="plan",
        prefill="exact",
        token_classes=token_classes,
        exact_tokens={"num_sink_tokens": num_sink_tokens, "recent_window": 3, "update_period": 4},
        **{"staggered": False, **more},  # as a pass without a cache
    )
    seen = words if settings.own_directions and rate < 1 else None
    joint = {"joint_layers": settings.joint_layers} if settings.joint_layers else {}

    def make_coders(twin: PreTrainedModel):
        calibration = calibration_of(twin, read=True, words=seen, **joint)
        return coded_bases(calibration, rate, token_classes=token_classes, **joint)

    coders = remembered(model, ("coders", seen, rate, token_classes, settings.joint_layers), make_coders)
    dynakv.add_compressors(model, settings)
    dynakv.initialize_from_coders(model, coders)
    generator = torch.Generator().manual_seed(2)
    for compressor in dynakv.token_compressors(model):
        weight = compressor.projection.weight
        moved = 0.05 * torch.randn(weight.shape, generator=generator)
        if rate == 1:
            # A plan leaves out what no state has, or what the loss does not see, such as a part that all keys share. It does
            # not matter as long as what is kept moves within itself.
            kept = compressor.gate.plan.num_coefficients
            moved[kept:] = moved[:, kept:] = 0
        weight.data.copy_(moved)
    dynakv.use_dynakv_cache(model)

    def make_cache() -> Cache:
        cache = dynakv.DynaKVCache.from_model(model)
        if rate == 1:
            for layer in cache.compressed_layers():
                layer.plan = unpacked(layer.plan)
        return cache

    return make_cache


def _preset(name: str, **overrides) -> Method:
    def settings_at(rate: float) -> dict[str, Any]:
        # Short periods and few tokens at full rank, so that of a few dozen some are compressed and see updates.
        short = {} if settings.update_period == 1 else {"update_period": 4}
        if settings.rank_multiple > 4:  # heads have 16 dims here
            short |= {"rank_multiple": 4}
        if settings.recent_window:
            short |= {"num_sink_tokens": 2, "recent_window": 3}
        if settings.own_directions:
            short |= {"own_directions_from": 8}
        return {"rate": rate, **short, **overrides}

    def build(model: PreTrainedModel, rate: float) -> MakeCache:
        config = OjaKVConfig.preset(name, **settings_at(rate))
        plan = remembered(model, (label, rate), lambda twin: make_plan(method.calibration(twin, rate), config))
        if config.cache_dtype == "mixed" and rate == 1:
            plan = unpacked(plan)
        return lambda: OjaKVCache(model, plan)

    settings = OjaKVConfig.preset(name, **overrides)
    follows = bool(settings.tracker != "fixed" or settings.full_rank_ratio or settings.reads_prompts_exactly)
    label = "-".join([name, *(str(value) for value in overrides.values())])
    method = Method(
        label,
        build,
        follows_text=follows,
        preset=name,
        settings=settings_at,
        reads=settings.cache_dtype == "mixed",
        words=_FEW_WORDS if settings.own_directions else None,
    )
    return method


def unpacked(plan: Plan) -> Plan:
    """A plan's bases without its bits, of which no number is as exact as fp32."""

    def bare(initial: InitialBasis) -> InitialBasis:
        # A sequence's own directions are found in all coefficients.
        read = slice(initial.rank if initial.shared is None else None)
        return dataclasses.replace(
            initial,
            vectors_PWR=initial.vectors_PWR[:, :, read],
            energy_PR=initial.energy_PR[:, read],
            quantization=None,
        )

    return dataclasses.replace(plan, layers={index: tuple(map(bare, kv)) for index, kv in plan.layers.items()})


METHODS = [
    *(_preset(name) for name in PRESETS),
    _preset("ojakv-joint", prefill="reconstructed"),
    _preset("ojakv-pf", full_rank_ratio=0.1, num_sink_tokens=2, recent_window=3),
    _preset("ojakv-pf", attention="reconstructed"),
    Method("dynakv", dynakv_model),
    Method("dynakv-rounded", lambda model, rate: dynakv_model(model, rate, granularity=8)),
    Method("dynakv-soft-prefix", lambda model, rate: dynakv_model(model, rate, mask="soft_prefix")),
    Method("dynakv-plan", planned_model, follows_text=True),
    Method("dynakv-tokenwise-plan", lambda model, rate: planned_model(model, rate, token_classes=4), follows_text=True),
    Method(
        "dynakv-adaptive-plan",
        lambda model, rate: planned_model(model, rate, token_classes=4, own_directions=2, own_directions_from=8),
        follows_text=True,
    ),
    Method(
        "dynakv-joint-plan",
        lambda model, rate: planned_model(model, rate, token_classes=4, joint_layers=2),
        follows_text=True,
    ),
    Method("dynakv-orthogonal", lambda model, rate: dynakv_model(model, rate, decoder="orthogonal")),
]


def picked(*names: str) -> list[Method]:
    """Some rows, in this order."""
    rows = {method.name: method for method in METHODS}
    return [rows[name] for name in names]


# The ways to code by a plan of bits: with directions of a text's own, layers together, and learned. `tokenwise-mixed` is the
# first of them without these directions.
PLANNED = picked("adaptive-mixed", "joint-mixed", "dynakv-tokenwise-plan")
[TOKENWISE] = picked("tokenwise-mixed")
