"""A tiny random model of every decoder family that the installed transformers has, from its own configuration class.

Names of settings are shared by most families, so that one table of sizes makes nearly all of them small.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

MOST_PARAMETERS = 120_000_000
# Settings that are left as a family has them, in one attempt after another.
_KEPT = (
    "",
    ".*(key_value|kv)_?heads?.*",
    ".*head_dim.*|.*(key_value|kv)_?heads?.*",
    "(?!num_(hidden_)?layers|.*vocab).*",
)
# The first pattern that a setting's whole name matches gives its value; None leaves it as it is.
_SIZES: list[tuple[str, Any]] = [
    (r".*(token_id|token_index|_idx)", None),
    (r"(padded_)?vocab_size(_per_layer_input)?|extra_vocab_size|entity_vocab_size", 97),
    (r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_decoder_layers", 4),
    (r"(num_global_|swa_num_|num_)key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num", 2),
    (r"(num|n|encoder|decoder|swa_num|num_decoder)_(attention_)?heads?|num_encoder_attention_heads", 4),
    (r"head_dim|d_kv|global_head_dim|attention_head_dim|kv_channels|swa_head_dim|v_head_dim|qk_nope_head_dim", 16),
    (r"swa_v_head_dim|mamba_d_head|mamba_head_dim|linear_(key|value)_head_dim|ssm_head_dim", 16),
    (r"qk_rope_head_dim|index_head_dim|rotary_dim", 8),
    (r"(q|kv)_lora_rank|lora_rank|o_lora_rank", 16),
    (r"(moe_|shared_expert_|moe_shared_expert_|expert_|shared_)?intermediate_size(_mlp)?|(de|en)coder_ffn_dim", 96),
    (
        r"ffn_(hidden|dim|hidden_size)|d_ff|n_inner|d_inner|moe_ffn_hidden_size|expert_ffn_hidden_size|ffn_dim|dim_ff",
        96,
    ),
    (r"hidden_size|d_model|n_embd|emb_dim|embedding_size|attention_hidden_size|lru_width|hidden_dim", 64),
    (r"hidden_size_per_layer_input", 16),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions|context_length|seq_length)", 256),
    (r"(sliding_window|attention_window|window_size|attention_chunk_size|local_window|sliding_window_size)", 8),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts|n_experts|num_experts_per_layer", 4),
    (r"num_experts_per_(tok|token)|moe_(k|topk|top_k)|top_k_experts|num_selected_experts|experts_per_token", 2),
    (r"n_group|topk_group|n_shared_experts|num_shared_experts|num_zero_experts|zero_expert_num", 1),
    (r"mamba_(n|num)_heads|mamba_num_heads", 8),
    (r"(linear_)?num_(key|value)_heads|linear_num_(key|value)_heads", 4),
    (r"mamba_d_state|ssm_state_size|state_size|mamba_d_ssm", 16),
    (r"mamba_n_groups|n_groups|mamba_dt_rank", 2),
    (r"index_n_heads|index_topk", 4),
    (r"initializer_range|init_std", 0.1),
    (r"tie_word_embeddings", False),
]
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# What the shared names do not say.
_SETTINGS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_hidden_layers": 8},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 97},
    "deepseek_v2": {
        "head_dim": 8,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "topk_method": "greedy",
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 5},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"num_hidden_layers": 8},
    "zamba2": {"layer_types": ["mamba", "hybrid", "mamba", "hybrid"]},
    "nemotron": {"num_key_value_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "gemma3_text": {"num_hidden_layers": 6},
    "kolibri1": {"num_hidden_layers": 6},
    "ministral": {
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "mistral": {"sliding_window": None},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
}


class NotBuiltError(Exception):
    """No tiny model of a family could be made."""


def families() -> dict[str, type[PreTrainedConfig]]:
    """model_type → configuration class, of all causal language models, in alphabetical order."""
    found = {each.model_type: each for each in AutoModelForCausalLM._model_mapping}
    return dict(sorted(found.items()))


def tiny_configs(config_class: type[PreTrainedConfig]) -> Iterator[PreTrainedConfig]:
    """Configurations of a few thousand parameters, from the smallest to those that leave more as the family has it: some
    families tie sizes to one another in ways that no table knows.

    Raises:
        NotBuiltError: the family's class takes none of them.
    """
    error: Exception | None = None
    for kept in _KEPT:
        try:
            yield _tiny_config(config_class, kept)
        except (TypeError, ValueError, AttributeError, KeyError, StrictDataclassError) as failed:
            error = failed
    if error is not None:
        raise NotBuiltError(f"{type(error).__name__}: {error}")


def _tiny_config(config_class: type[PreTrainedConfig], kept: str) -> PreTrainedConfig:
    values = {**_shrunk(config_class(), kept), **_IDS, **_SETTINGS.get(config_class.model_type, {})}
    for name, part in config_class.sub_configs.items():
        if isinstance(part, type) and part is not PreTrainedConfig and getattr(part, "model_type", ""):
            inner = {**_shrunk(part(), kept), **_SETTINGS.get(part.model_type, {})}
            values[name] = {**inner, **_IDS} if name == "text_config" else inner
    return config_class(**values)


def _shrunk(config: PreTrainedConfig, kept: str) -> dict[str, Any]:
    """Setting → a small value, of those settings that the configuration has and a pattern knows, `kept` ones aside."""
    found = {}
    for name, value in config.to_dict().items():
        if isinstance(value, bool) != (name == "tie_word_embeddings") or not isinstance(value, int | float):
            continue
        if re.fullmatch(kept, name):
            continue
        small = next((small for pattern, small in _SIZES if re.fullmatch(pattern, name)), None)
        if small is not None:
            found[name] = small
    if "qk_rope_head_dim" in found and "head_dim" in found:
        found["head_dim"] = found["qk_rope_head_dim"]  # of what is rotated
    if "is_decoder" in config.to_dict():
        found["is_decoder"] = True
    return found


def tiny_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random model in eval mode, on the attention that transformers chooses.

    Raises:
        NotBuiltError: it would not be tiny.
    """
    with torch.device("meta"):
        size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise NotBuiltError(f"{size:,} parameters: some size has another name in this family")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in model.named_parameters():
        # What starts at zero or one would hide that it is left out.
        if parameter.dim() == 1 and parameter.is_floating_point():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model
