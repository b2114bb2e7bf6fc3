"""vLLM with compressed pages: the texts of `generate()`, and a clear error for what cannot be served (`make test-vllm`)."""

import os

import pytest
import torch
from methods import calibration_of, tiny_model

from lowrank_kv.utils.errors import UserError
from ojakv import Calibration, OjaKVCache, OjaKVConfig, make_plan

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

BLOCK, BATCHED, NEW = 32, 128, 24


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, and bases of it, on disk."""
    directory = tmp_path_factory.mktemp("served")
    model = tiny_model()
    model.save_pretrained(directory / "model")
    calibration_of(model, read=True).save(directory / "bases", model="tiny", text=["random"])
    return model, directory


def arguments(directory, **settings):
    served = {"bases": str(directory / "bases"), "preset": "tokenwise-mixed", "rate": 0.3, "page_margin": 5.0}
    return {
        "model": str(directory / "model"),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": BATCHED,
        "block_size": BLOCK,
        "additional_config": {"lowrank_kv": {**served, **settings}},
    }


@pytest.fixture(scope="module")
def engine(files):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        from vllm import LLM

        yield LLM(**arguments(files[1]))


def served(engine, prompts):
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=NEW, detokenize=False, ignore_eos=True)
    return engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(1, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def generated(files, prompt: list[int], *, chunk: int = BATCHED) -> list[int]:
    """What transformers says greedily, through a cache that reads the prompt in chunks."""
    from lowrank_kv_vllm.plans import retention
    from lowrank_kv_vllm.settings import ServingConfig

    model, directory = files
    kept = retention(ServingConfig(bases=str(directory / "bases")))
    config = OjaKVConfig.preset("tokenwise-mixed", rate=0.3, **kept)
    calibration = Calibration.load(directory / "bases").for_model(model)
    cache, found = OjaKVCache(model, make_plan(calibration, config)), []
    for part in torch.tensor([prompt]).split(chunk, dim=1):
        logits = model(input_ids=part, past_key_values=cache).logits
    for _ in range(NEW):
        found.append(int(logits[0, -1].argmax()))
        logits = model(input_ids=torch.tensor([found[-1:]]), past_key_values=cache).logits
    return found


def test_a_batch_says_what_generate_says(engine, files):
    prompts = [prompt_of(length, length) for length in (3, 17, 33, 70)]
    for prompt, output in zip(prompts, served(engine, prompts), strict=True):
        assert list(output.outputs[0].token_ids) == generated(files, prompt)


def test_a_chunked_prompt_and_a_prefix_hit_read_earlier_tokens_from_pages(engine, files):
    prompt = prompt_of(150, 1)
    expected = generated(files, prompt)
    [first] = served(engine, [prompt])
    [again] = served(engine, [prompt])
    assert not first.num_cached_tokens
    assert again.num_cached_tokens == 150 // BLOCK * BLOCK == BATCHED  # so that both read the same tokens anew
    assert list(first.outputs[0].token_ids) == expected
    assert list(again.outputs[0].token_ids) == expected


def test_the_scheduler_counts_the_bytes_of_pages(engine):
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
    attentions = [module.impl for module in model.modules() if hasattr(module, "impl")]
    page_bytes = sum(attention.layout(BLOCK).page_bytes for attention in attentions)
    config = engine.llm_engine.vllm_config.cache_config
    assert config.num_gpu_blocks == (1 << 30) // page_bytes


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bases": "/nowhere"}, "no calibration"),
        ({"checkpoint": "/nowhere"}, "checkpoint"),
        ({"rate": 2.0}, "rate"),
        ({"rat": 0.1}, "did you mean `rate`"),
        ({"preset": "ojakv"}, "preset"),
    ],
)
def test_malformed_settings_are_one_clear_error(files, changed, message):
    with pytest.raises(UserError, match=message):
        configured(files[1], {}, changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"dtype": "float16"}, "float16"),
        ({"enable_lora": True}, "LoRA"),
    ],
)
def test_what_cannot_be_served_is_refused(files, changed, message):
    with pytest.raises(UserError, match=message):
        configured(files[1], changed, {})


def test_another_models_bases_are_refused(files, tmp_path):
    other = tiny_model(num_hidden_layers=2)
    calibration_of(other, read=True).save(tmp_path / "bases", model="other", text=["random"])
    with pytest.raises(UserError, match="made for"):
        configured(files[1], {}, {"bases": str(tmp_path / "bases")})


def configured(directory, engine_settings, settings):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    os.environ["HF_HUB_OFFLINE"] = "1"
    load_general_plugins()
    return EngineArgs(**{**arguments(directory, **settings), **engine_settings}).create_engine_config()
