"""Methods to compare, as a configuration names them, and the caches they make."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import Cache, PreTrainedModel

import dynakv
from dynakv.checkpoint_files import read_config
from lowrank_kv.utils.config import configuration, option, require, to_dict, within
from lowrank_kv.utils.errors import UserError, nearest
from lowrank_kv.utils.provenance import path_input, version_of
from ojakv import PRESETS, Calibration, OjaKVCache, OjaKVConfig, make_plan, plan_for_bytes

from .peers import PEERS, TextLength
from .peers.peer import CALIBRATION, READ
from .reading import full_cache

FULL = "full"
# What is measured without a calibration stays as it is when there is another one.
_WITHOUT_BASES = {"bases": []}


@configuration
class MethodConfig:
    """A preset of OjaKV, a compressor checkpoint, or a peer; at one or several budgets, with any setting changed.

    Exactly one of `preset`, `checkpoint` and `peer` is given.
    """

    preset: str | None = option(None, help=f"OjaKV preset, one of {', '.join(PRESETS)}")
    checkpoint: str | None = option(None, help="directory of a DynaKV compressor checkpoint of the model")
    peer: str | None = option(None, help=f"one of {', '.join(PEERS)}")
    label: str | None = option(None, help="name in the results; by default that of the method and its settings")
    rates: list[float] = option([], help="of a preset: its own `rate`, one row each")
    bytes: list[float] = option(
        [], help="of a preset or peer: shares of an uncompressed cache's bytes at the end of a window, one row each"
    )
    bytes_of: str | None = option(
        None, help="of a preset or peer: a row at the bytes that the method of this label takes on the same text"
    )
    optional: bool = option(False, help="leave the method out, with a notice, where its checkpoint does not exist")
    settings: dict = option(
        {}, help="what to change, e.g. {cache_dtype: int4, prefill: exact}: keys of OjaKVConfig, or of dynakv.attach"
    )

    def __post_init__(self):
        given = [key for key in ("preset", "checkpoint", "peer") if getattr(self, key) is not None]
        require(len(given) == 1, "preset", given, "given alone, or `checkpoint`, or `peer`")
        for key, valid in (("preset", PRESETS), ("peer", PEERS)):
            name = getattr(self, key)
            hint = nearest(str(name), list(valid), key + "s")
            require(name is None or name in valid, key, name, f"a {key} that there is ({hint})")
        for key in ("rates", "bytes"):
            values = getattr(self, key)
            require(all(0 < value <= 1 for value in values), key, values, "numbers in (0, 1]")
        of_presets = (
            "left out without a `preset`; a peer takes `bytes: [0.3]`, or nothing where it has bytes of its own"
        )
        require(not self.rates or self.preset is not None, "rates", self.rates, of_presets)
        require(
            not self.rates or self.has_budget, "rates", self.rates, "left out with `ranks: energy`, which has no rate"
        )
        budget = self.bytes or self.bytes_of
        require(not budget or self.has_budget, "bytes", budget, "left out where the method has bytes of its own")
        key, others = ("bytes", "`bytes_of`") if self.peer is not None else ("rates", "`bytes`, or `bytes_of`")
        given = f"given of `{self.name}`, or {others}"
        require(bool(self.rates or budget) or not self.has_budget, key, getattr(self, key), given)
        require(not self.optional or self.checkpoint is not None, "optional", True, "left out without a `checkpoint`")
        require(not self.settings or self.peer is None, "settings", self.settings, "left out of a peer")
        if self.preset is not None:
            given = self.settings.get("rate")
            require(given is None, "settings.rate", given, "left out: `rates` or `bytes` say the budgets of the rows")
            with within("settings."):
                self.ojakv_config()

    @property
    def has_budget(self) -> bool:
        """Whether its bytes can be chosen."""
        if self.preset is not None:
            return self.settings.get("ranks", OjaKVConfig.preset(self.preset).ranks) != "energy"
        return self.peer is not None and not PEERS[self.peer].is_fixed

    def ojakv_config(self, **changed: Any) -> OjaKVConfig:
        """The preset with these settings."""
        return OjaKVConfig.preset(self.preset, **self.settings, **changed)

    @property
    def name(self) -> str:
        """Its label, or the method's own name and its settings."""
        return method_name(self.label, self.preset or self.peer, self.settings)

    @property
    def name_at_bytes_of(self) -> str:
        """The label of its row at another's bytes."""
        return f"{self.name} at the bytes of {self.bytes_of}"

    def name_at_rate(self, rate: float) -> str:
        """The label of its row at a `rate` of its own."""
        return f"{self.name} {rate:g}"

    def name_at_bytes(self, share: float) -> str:
        """The label of its row at a share of an uncompressed cache's bytes."""
        return f"{self.name} at {share:g}"

    @property
    def labels(self) -> list[str]:
        """Of all its rows."""
        return [
            *([] if self.has_budget else [self.name]),
            *map(self.name_at_rate, self.rates),
            *map(self.name_at_bytes, self.bytes),
            *([] if self.bytes_of is None else [self.name_at_bytes_of]),
        ]

    @property
    def depends_on_text(self) -> bool:
        """Whether one of its rows depends on how long a text is, to meet a share of the bytes at its end."""
        return bool(self.bytes) or self.bytes_of is not None

    def without_bytes(self) -> "MethodConfig":
        """The rows that do not depend on a text."""
        return dataclasses.replace(self, bytes=[], bytes_of=None) if self.depends_on_text else self

    @property
    def needs(self) -> frozenset[str]:
        """What of :data:`evaluation.peers.peer.NEEDS` it needs."""
        if self.peer is not None:
            return PEERS[self.peer].needs
        if self.checkpoint is not None:
            return frozenset()
        return frozenset({CALIBRATION, READ} if self.ojakv_config().needs_read else {CALIBRATION})

    @property
    def reads_exactly(self) -> bool:
        """Whether a prompt's own attention is exact, so that in one pass nothing compressed would be read."""
        if self.preset is not None:
            return self.ojakv_config().reads_prompts_exactly
        if self.checkpoint is not None:
            if "prefill" in self.settings:
                return self.settings["prefill"] == "exact"
            is_left_out = self.optional and not Path(self.checkpoint).exists()
            return not is_left_out and read_config(self.checkpoint).compressor.reads_prompts_exactly
        return PEERS[self.peer].reads_exactly


def method_name(label: str | None, own: str | None, settings: Mapping[str, Any]) -> str:
    """What a method is called in the results: its label, or its own name and its settings.

    Args:
        own: name of its preset or peer; None of a checkpoint.
    """
    if label is not None:
        return label
    return " ".join([own or "dynakv", *(f"{key}={value}" for key, value in settings.items())])


def check_labels(configs: list[MethodConfig]) -> None:
    """Raise :class:`UserError` where two rows have one label, or a row takes the bytes of none, or of one that takes
    another's: both are measured together."""
    labels = [FULL, *(label for config in configs for label in config.labels)]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"two methods are called `{label}`; give one a `label` of its own")
    following = {config.name_at_bytes_of: config.bytes_of for config in configs if config.bytes_of is not None}
    for config in configs:
        if config.bytes_of in following:
            raise UserError(
                f"`bytes_of` must be a row whose bytes are its own; got {config.bytes_of!r}, which takes those of another: "
                f"give {following[config.bytes_of]!r}"
            )
        if config.bytes_of is not None and config.bytes_of not in labels:
            hint = nearest(config.bytes_of, labels, "labels")
            raise UserError(f"`bytes_of` must be a method's label; got {config.bytes_of!r}; {hint}")


def available_methods(configs: list[MethodConfig]) -> list[MethodConfig]:
    """Those without the optional checkpoints that do not exist.

    Raises:
        UserError: none is left.
    """
    missing = [config for config in configs if config.optional and not Path(config.checkpoint).exists()]
    left_out, found = {config.name for config in missing}, []
    for config in configs:
        if config in missing:
            print(f"leaving out `{config.name}`: {config.checkpoint} is not there")
        elif config.bytes_of in left_out and not (config.rates or config.bytes):
            print(f"leaving out `{config.name}`: it takes the bytes of `{config.bytes_of}`")
        else:
            found.append(dataclasses.replace(config, bytes_of=None) if config.bytes_of in left_out else config)
    if not found:
        checkpoints = ", ".join(each.checkpoint for each in configs if each.checkpoint is not None)
        raise UserError(
            f"none of the checkpoints is there: {checkpoints}; train one of them, or give others as `methods`"
        )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One row of a comparison on every text.

    Attributes:
        label: name in the results.
        of: what distinguishes it, as JSON; two methods of equal `of` make equal caches.
        bytes_of: the label of the method whose bytes it takes on each text; None where its budget is known.
        reads_exactly: whether a prompt attends to its own exact keys and values.
        make: a maker of caches, from the share of bytes where that is asked for, else from None; each is made once.
    """

    label: str
    of: dict[str, Any]
    bytes_of: str | None
    reads_exactly: bool
    make: Callable[[float | None], Callable[[], Cache]]

    def maker(self, share: float | None) -> Callable[[], Cache]:
        """:attr:`make`, whose errors name the method, such as of bytes that no rate comes down to."""
        try:
            return self.make(share)
        except UserError as error:
            raise UserError(f"`{self.label}`: {error}") from error


def methods_of(
    configs: list[MethodConfig],
    model: PreTrainedModel,
    calibration: Calibration | None,
    text: TextLength | None = None,
) -> list[Method]:
    """Every method at every budget, the uncompressed cache first.

    Args:
        calibration: of the model; needed by presets.
        text: to meet a share of the bytes at its end; None where no row asks for that.

    Raises:
        UserError: a plan cannot be made, or a checkpoint does not fit.
    """
    found = [uncompressed(model)]
    for config in configs:
        if config.checkpoint is not None:
            found.append(learned(config, model))
        elif config.preset is not None:
            found += _preset(config, model, calibration, text)
        else:
            found += _peer(config, model, calibration, text)
    return found


def _method(
    config: MethodConfig,
    label: str,
    of: dict[str, Any],
    make: Callable[[float | None], Callable[[], Cache]],
    bytes_of: str | None = None,
) -> Method:
    of = of if config.needs else of | _WITHOUT_BASES
    return Method(label=label, of=of, bytes_of=bytes_of, reads_exactly=config.reads_exactly, make=make)


def uncompressed(model: PreTrainedModel) -> Method:
    """The stock cache, beside which all others are measured."""
    of = {"method": FULL} | _WITHOUT_BASES
    return Method(label=FULL, of=of, bytes_of=None, reads_exactly=True, make=lambda _: lambda: full_cache(model))


def learned(config: MethodConfig, model: PreTrainedModel) -> Method:
    """The caches of a checkpoint. Raises :class:`UserError` where it does not fit."""
    dynakv.attach(model, config.checkpoint, **config.settings)
    maker = dynakv.DynaKVCache.maker(model)
    dynakv.detach(model)
    of = {"checkpoint": path_input("checkpoint", config.checkpoint)["sha256"], "settings": config.settings}
    return _method(config, config.name, of, make=lambda _: maker)


def _at_budgets(
    config: MethodConfig, of: dict[str, Any], at: Callable[[float], Callable[[], Cache]]
) -> Iterator[Method]:
    """The method at each budget in bytes.

    Args:
        of: what distinguishes it from other methods.
        at: share of bytes → a maker of caches.
    """
    for share in config.bytes:
        yield _method(config, config.name_at_bytes(share), of | {"bytes": share}, make=lambda _, share=share: at(share))
    if config.bytes_of is not None:
        yield _method(
            config,
            config.name_at_bytes_of,
            of | {"bytes": None},
            make=lambda share: at(min(share, 1.0)),  # the other may hold more than an uncompressed cache
            bytes_of=config.bytes_of,
        )


def _preset(
    config: MethodConfig, model: PreTrainedModel, calibration: Calibration, text: TextLength | None
) -> Iterator[Method]:
    # With every setting, so that a cell which was measured with another default is not taken for this one.
    of = {"preset": config.preset, "settings": to_dict(config.ojakv_config())}
    if not config.has_budget:
        plan = make_plan(calibration, config.ojakv_config())
        yield _method(config, config.name, of, make=lambda _: lambda: OjaKVCache(model, plan))
    for rate in config.rates:
        plan = make_plan(calibration, config.ojakv_config(rate=rate))
        yield _method(
            config,
            config.name_at_rate(rate),
            of | {"rate": rate},
            make=lambda _, plan=plan: lambda: OjaKVCache(model, plan),
        )

    @functools.cache  # working out the plan of a share takes far longer than reading a window
    def at(share: float) -> Callable[[], Cache]:
        size = text._asdict() | {"itemsize": model.dtype.itemsize}
        plan = plan_for_bytes(calibration, config.ojakv_config(), share, **size)
        return lambda: OjaKVCache(model, plan)

    yield from _at_budgets(config, of, at)


def _peer(
    config: MethodConfig, model: PreTrainedModel, calibration: Calibration | None, text: TextLength | None
) -> Iterator[Method]:
    peer = PEERS[config.peer]
    of = {"peer": config.peer} | ({"edition": peer.edition} if peer.edition > 1 else {})
    of |= {"versions": {name: version_of(name) for name in peer.libraries}} if peer.libraries else {}
    if peer.is_fixed:
        maker = peer.maker(model, calibration, None)
        yield _method(config, config.name, of, make=lambda _: maker)
    at = functools.cache(lambda share: peer.maker(model, calibration, share, text))
    yield from _at_budgets(config, of, at)
