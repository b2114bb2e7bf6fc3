"""Put any method on a stock model by a preset's name or by a directory, and take it off again."""

import functools
import os
import warnings
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import dynakv
from dynakv import checkpoint_files
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.default_cache import set_default_cache
from lowrank_kv.hf.geometry import check_model
from lowrank_kv.hf.prepare import prepare
from lowrank_kv.hf.self_check import check_by_itself
from lowrank_kv.utils.budget import Budget
from lowrank_kv.utils.errors import UserError, nearest
from lowrank_kv.utils.paths import path_of
from lowrank_kv.utils.values import check_type
from ojakv import PRESETS, OjaKVCache, OjaKVConfig
from ojakv.model_plan import plan_for_model

# The preset of a calibration that is given without one: the best that it has the moments for.
PRESET, PRESET_WITHOUT_READ = "adaptive-mixed", "ojakv-joint"


def compress(
    model: PreTrainedModel,
    source: str | Path | Calibration,
    *,
    rate: float | None = None,
    bases: str | Path | Calibration | None = None,
    budget: str | Budget | None = None,
    self_check: bool = True,
    **settings: Any,
) -> PreTrainedModel:
    """Compress the key-value cache of `model` from now on: `generate()` and plain calls fill a compressed cache.

    A model that is compressed already changes to the new method. :func:`uncompress` takes it off.

    ``lowrank_kv.compress(model, "tokenwise-mixed", rate=0.1, bases="bases/demo")``

    Args:
        model: a stock causal language model, changed in place.
        source: what says how to compress, one of

            - the name of a preset (:data:`ojakv.PRESETS`), which also needs `bases`;
            - a directory that `lowrank-kv calibrate` wrote: its `adaptive-mixed`, or its `ojakv-joint` where it was made
              without ``read_gradients`` and ``read_energy``; or such a calibration in memory;
            - a directory of a trained compressor, which knows its own rate.
        rate: of a preset: the share of a token's bytes, or of its coefficients (docs/bytes.md); None takes the preset's own.
        bases: of a preset: the directory that `lowrank-kv calibrate` wrote, or a calibration in memory.
        budget: of a preset, in place of `rate`: the bytes that a cache may take, such as ``2 GiB/131072 tokens`` or
            ``4096 B/token`` (:meth:`lowrank_kv.utils.budget.Budget.parse`).
        self_check: first compare the model with a full-rank compressed cache to the model by itself, once for each model
            (:func:`lowrank_kv.hf.self_check.check_by_itself`).
        settings: keys of :class:`ojakv.OjaKVConfig`, or of :class:`dynakv.DynaKVConfig` for a compressor, that differ from
            what the source says, such as ``eviction={"keep_ratio": 0.3}``.

    Returns:
        The same model.

    Raises:
        UserError: the model wraps another, nothing has this name, an argument does not fit the source, a calibration or a
            compressor is damaged or of another model shape; the model is then as it was. Or the model does not pass the
            check; it is then stock.

    Warns where a calibration has neither of these and no preset was named, where bases of each sequence's own take more
    bytes than they save at 1,024 tokens, and where the model is set to fill no cache.
    """
    check_model(model)
    _warn_of_no_cache(model)
    check_type("source", source, str | os.PathLike | Calibration, "a preset's name, a directory, or a calibration")
    if "preset" in settings:
        raise UserError(
            f"`preset` is no setting: name it first, and the calibration as `bases`: "
            f"compress(model, {settings['preset']!r}, bases={str(source)!r})"
        )
    if budget is not None:
        _refuse("rate", rate, "`budget` says how large a cache may be")
    with_preset = functools.partial(
        _with_preset, model, rate=rate, budget=budget, settings=settings, self_check=self_check
    )
    if isinstance(source, Calibration):
        _refuse("bases", bases, "the calibration is given already; give a preset's name in its place")
        return with_preset(preset_for(source), bases=source)
    # Nothing but a preset has bases beside it.
    directory, name = path_of(source), os.fspath(source)
    if name in PRESETS or (bases is not None and not directory.is_dir()):
        return with_preset(name, bases=bases)
    if Calibration.is_in(directory):
        _refuse("bases", bases, f"`{source}` is a calibration itself; give a preset's name in its place")
        found = Calibration.load(directory)
        return with_preset(preset_for(found), bases=found)
    if (directory / checkpoint_files.WEIGHTS).is_file():
        for key, value in (("rate", rate), ("budget", budget)):
            _refuse(key, value, f"the compressor `{source}` was trained for its own; train another, or name a preset")
        _refuse("bases", bases, f"the compressor `{source}` holds its own")
        return dynakv.attach(model, directory, self_check=self_check, replace=True, **settings)
    raise UserError(f"`{source}` is no preset, no calibration and no compressor; {_remedy(name, directory)}")


def uncompress(model: PreTrainedModel) -> PreTrainedModel:
    """Make `model` the stock one it was before :func:`compress`; caches that it filled cannot be continued.

    A model that is not compressed stays as it is. A wrapper that was put around the model since (of peft, `torch.compile`,
    `nn.DataParallel`) serves as well. Returns what it was given.
    """
    return dynakv.detach(model)


def preset_for(calibration: Calibration) -> str:
    """The preset that a calibration is compressed by where none is named. Warns where it is not the best one."""
    if calibration.read is not None:
        return PRESET
    warnings.warn(
        f"this calibration does not say what is read of a cache, which `{PRESET}` needs, so that `{PRESET_WITHOUT_READ}` is "
        f"taken in its place: it diverges more from the full cache and keeps bases of each sequence's own; calibrate with "
        f"`--read_gradients true`, or with `--read_energy true` where a backward pass does not fit, or name the preset",
        stacklevel=3,
    )
    return PRESET_WITHOUT_READ


def _with_preset(
    model: PreTrainedModel,
    preset: str,
    *,
    bases: str | Path | Calibration | None,
    rate: float | None,
    budget: str | Budget | None,
    settings: dict[str, Any],
    self_check: bool,
) -> PreTrainedModel:
    config = OjaKVConfig.preset(preset, rate=rate, **settings)
    if bases is None:
        name = model.config._name_or_path or "MODEL"
        read = " --read_gradients true" if config.needs_read else ""
        raise UserError(
            f"the preset `{preset}` needs bases of this model; run `lowrank-kv calibrate --model {name} --output bases/mine "
            f"--name TEXT{read}` once, and give `bases='bases/mine'`"
        )
    plan = plan_for_model(model, config, bases, budget=budget, stacklevel=4)
    uncompress(model)
    if self_check:
        check_by_itself(model)
    return set_default_cache(prepare(model), OjaKVCache, functools.partial(OjaKVCache, plan=plan))


def _warn_of_no_cache(model: PreTrainedModel) -> None:
    configs = {
        "config": model.config.get_text_config(decoder=True),
        "generation_config": getattr(model, "generation_config", None),  # a base model has none
    }
    off = [name for name, config in configs.items() if getattr(config, "use_cache", True) is False]
    if off:
        settings = " and ".join(f"`model.{name}.use_cache`" for name in off)
        warnings.warn(
            f"{settings} is False, so that nothing fills a cache, compressed or not; set it to True, or pass "
            f"`use_cache=True` to each call",
            stacklevel=3,
        )


def _refuse(name: str, value: Any, why: str) -> None:
    if value is not None:
        raise UserError(f"`{name}` must be left out, got {value!r}: {why}")


def _remedy(source: str, directory: Path) -> str:
    if (directory / checkpoint_files.CONFIG).is_file():
        return "a full checkpoint loads with `import dynakv` and `AutoModelForCausalLM.from_pretrained(DIRECTORY)`"
    if (directory / "checkpoint" / checkpoint_files.WEIGHTS).is_file():
        return f"did you mean `{directory / 'checkpoint'}`?"
    if directory.is_dir():
        return "such a directory was written by `lowrank-kv calibrate` or `lowrank-kv train`"
    if directory.name != source:  # a path
        return (
            f"there is no `{directory.resolve()}`; `lowrank-kv calibrate` and `lowrank-kv train` write such directories"
        )
    return f"there is no such directory, and no preset of this name: {nearest(source, PRESETS, 'presets')}"
