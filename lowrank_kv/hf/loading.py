"""From a hub id or directory to a model and its tokenizer, with errors a user can act on."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError

DTYPES = ("float32", "bfloat16", "float16")
AUTO = "auto"
DTYPE_HELP = f"of the model; {AUTO} is bfloat16 where this machine multiplies that in hardware, else float32"
DEVICE_HELP = "where to run, e.g. cuda or cpu; by default a GPU where there is one"


def device_of(name: str | torch.device | None = None) -> torch.device:
    """Where to run: a GPU where there is one, unless `name` says otherwise.

    Raises:
        UserError: torch knows no such device, or cannot use it here, or it is `meta`, which has no numbers.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    must_be = f"`device` must be one that torch can use here, such as cpu; got {str(name)!r}"
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise UserError(f"{must_be}: {why}") from error
    if device.type == "meta":
        raise UserError(f"{must_be}, which has shapes and no numbers")
    return device


def multiplies_slowly(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch multiplies matrices of `dtype` in a plain loop here: bf16 on x86 without AVX-512, where a prompt takes
    several times as long as in fp32 (docs/speed.md)."""
    return dtype == torch.bfloat16 and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"


def dtype_for(name: str, device: torch.device) -> str:
    """One of :data:`DTYPES`: `name`, or what :data:`AUTO` is on this device. Warns where `name` is a slow one."""
    if name == AUTO:
        has_none = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
        return "float32" if has_none or multiplies_slowly(torch.bfloat16, device) else "bfloat16"
    if multiplies_slowly(getattr(torch, name), device):
        warnings.warn(
            f"`dtype` is {name}, which this processor has no instructions for: torch multiplies it several times slower "
            f"than float32; give `{AUTO}`, or float32",
            stacklevel=2,
        )
    return name


def dtype_words(name: str) -> str:
    """What a command line needs, behind a word, to take the same dtype: nothing for the default."""
    return "" if name == AUTO else f" --dtype {name}"


def load_model(name: str, *, dtype: str = "float32", device: str | torch.device | None = None) -> PreTrainedModel:
    """A stock causal language model in eval mode.

    Args:
        name: hub id or local directory.
        dtype: one of :data:`DTYPES`.
        device: where to put it, see :func:`device_of`.
    """
    device = device_of(device)
    if dtype not in DTYPES:
        raise UserError(f"`dtype` must be one of {', '.join(DTYPES)}; got {dtype!r}")
    model = _pretrained(AutoModelForCausalLM, name, dtype=getattr(torch, dtype))
    return model.to(device).eval()


def load_shape(name: str) -> PreTrainedModel:
    """A model whose parameters have shapes and no numbers (device ``meta``), made from its configuration file only.

    Raises:
        UserError: nothing there, or no causal language model.
    """
    config = _pretrained(AutoConfig, name)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise UserError(f"`{name}` is no causal language model: {' '.join(str(error).split())}") from error


def shard_while_loading(deepspeed: dict[str, Any], *, dtype: str) -> object:
    """Let transformers spread a ZeRO-3 model over processes while loading it.

    Args:
        deepspeed: DeepSpeed's configuration.
        dtype: what the model is loaded in; transformers reads it from the same configuration.

    Returns:
        What must be kept alive for as long as this is to hold; transformers keeps a weak reference.
    """
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig({**deepspeed, "bf16": {"enabled": dtype == "bfloat16"}})


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer that stands beside a model."""
    return _pretrained(AutoTokenizer, name)


def position_limit(model: PreTrainedModel) -> int | None:
    """How many positions a model has; None where it does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def check_length(model: PreTrainedModel, length: int, key: str) -> None:
    """Raise :class:`UserError` unless sequences of `length` tokens are some, and fit the model's positions."""
    require(length >= 1, key, length, "at least 1 token")
    limit = position_limit(model)
    if limit is not None and length > limit:
        raise UserError(f"`{key}` is {length} tokens, but this model has {limit} positions; use at most {limit}")


def recompute_activations(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass instead of keeping them.

    Only the non-reentrant form keeps the graph of tensors that leave a decoder layer otherwise than as its output, as the
    retain rates of a compressor do.
    """
    # Renamed between 5.17 and 5.23; the old name warns in the newer one.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def hub_id_or_directory(name: str) -> str:
    """`name`, a leading ``~`` replaced.

    Raises:
        UserError: it is a path by its looks, and there is no such directory.
    """
    name = os.path.expanduser(name)
    looks_local = name.startswith((".", os.sep)) or name.count("/") > 1
    if looks_local and not Path(name).is_dir():
        raise UserError(
            f"the model directory `{name}` does not exist; for the demo model run `make assets` in a checkout, or pass "
            f"`--model` with a hub id or another directory"
        )
    return name


def _pretrained(factory: Any, name: str, **kwargs: Any) -> Any:
    name = hub_id_or_directory(name)
    try:
        # Code that a model brings along would run as yours: without this, transformers asks on standard input.
        return factory.from_pretrained(name, trust_remote_code=False, **kwargs)
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, UserError):
            raise
        why = " ".join(str(error).split())
        if not Path(name).is_dir():
            why = (
                f"there is no such directory here, and as a hub id: {why}; `--model` takes another hub id or directory"
            )
        raise UserError(f"cannot load `{name}`: {why}") from error
