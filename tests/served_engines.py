"""Tiny models, what serves them, and what transformers says of them (`make test-vllm`)."""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from methods import calibration_of, tiny_model
from transformers import CohereConfig, CohereForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

import dynakv
from ojakv import Calibration, OjaKVCache, make_plan

BLOCK, BATCHED, NEW = 32, 128, 24
MEMORY = 64 << 20
_SHAPE = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 257, "max_position_embeddings": 256},
}


class Files:
    """A model with a tokenizer of bytes, and bases of it, in a directory."""

    def __init__(self, directory: Path):
        self.directory, self.model = directory, tiny_model(head_dim=32, vocab_size=257)
        _save(self.model, directory / "model")
        calibration_of(self.model, read=True).save(directory / "bases", model="tiny", text=["random"])
        self.settings = {
            "bases": str(directory / "bases"),
            "preset": "tokenwise-mixed",
            "rate": 0.3,
            "page_margin": 5.0,
        }

    def cache(self, model: PreTrainedModel | None = None, **settings: Any) -> OjaKVCache:
        """What keeps tokens as a server with these settings does, for the model or a twin in another dtype."""
        from lowrank_kv_vllm.plans import preset_of
        from lowrank_kv_vllm.settings import ServingConfig

        model, settings = model or self.model, ServingConfig(**{**self.settings, **settings})
        return OjaKVCache(model, make_plan(Calibration.load(settings.bases).for_model(model), preset_of(settings)))

    def generated(
        self, prompt: list[int], new: int = NEW, *, chunk: int | list[int] = BATCHED, **settings: Any
    ) -> list[int]:
        """What transformers says greedily, through a cache that reads the prompt in chunks of this length, or of these."""
        return greedy(self.model, self.cache(**settings), prompt, new, chunk)


@torch.no_grad()
def greedy(model, cache, prompt: list[int], new: int = NEW, chunk: int | list[int] = BATCHED) -> list[int]:
    """The most likely tokens, through a cache that reads the prompt in chunks of this length, or of these."""
    found = []
    for part in torch.tensor([prompt]).split(chunk, dim=1):
        logits = model(input_ids=part, past_key_values=cache).logits
    for _ in range(new):
        found.append(int(logits[0, -1].argmax()))
        logits = model(input_ids=torch.tensor([found[-1:]]), past_key_values=cache).logits
    return found


def with_compressor(directory: Path, **overrides: Any) -> PreTrainedModel:
    """A twin of the model with a checkpoint's compressors."""
    model = tiny_model(head_dim=32, vocab_size=257)
    return dynakv.attach(model, directory, **overrides)


def cohere(directory: Path) -> None:
    """A model of the same shape whose keys are rotated in pairs of neighbouring dims, and a tokenizer."""
    _save(CohereForCausalLM(CohereConfig(**_SHAPE, eos_token_id=0)), directory)


def windowed(directory: Path, sliding_window: int = 64) -> None:
    """A model of the same shape with sliding windows, and a tokenizer."""
    _save(MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=sliding_window)), directory)


def _save(model: PreTrainedModel, directory: Path) -> None:
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)


def arguments(files: Files, settings: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    """Of an engine; `settings` of ours, None for stock vLLM."""
    own = {"additional_config": {"lowrank_kv": settings}} if settings else {}
    return {
        "model": str(files.directory / "model"),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": BATCHED,
        "block_size": BLOCK,
        "kv_cache_memory_bytes": MEMORY,
        "disable_log_stats": False,
        **own,
        **changed,
    }


@contextlib.contextmanager
def serving(files: Files, settings: dict[str, Any] | None, **changed: Any) -> Iterator[Any]:
    """An engine in this process, which may have only one at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("HF_HUB_OFFLINE", "1")
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.model_executor.layers import rotary_embedding

        rotary_embedding._ROPE_DICT.clear()
        engine = LLM(**arguments(files, settings, **changed))
        try:
            yield engine
        finally:
            engine.llm_engine.engine_core.shutdown()
            del engine
            gc.collect()
            cleanup_dist_env_and_memory()


def served(engine, prompts: list[list[int]], new: int = NEW, **sampling: Any) -> list[Any]:
    """What the engine answers greedily."""
    from vllm import SamplingParams

    options = {"temperature": 0, "max_tokens": new, "detokenize": False, "ignore_eos": True, **sampling}
    return engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(**options), use_tqdm=False
    )


def attentions(engine) -> list[Any]:
    """The model's attention layers, as vLLM has them."""
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
    return [module for module in model.modules() if hasattr(module, "impl")]


def texts(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def metric(engine, name: str) -> float:
    return sum(each.value for each in engine.get_metrics() if each.name == name)


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(1, 257, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def configured(files: Files, settings: dict, **changed: Any):
    """vLLM's configuration of an engine with these settings of ours; what they refuse is raised."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return EngineArgs(**arguments(files, settings, **changed)).create_engine_config()
