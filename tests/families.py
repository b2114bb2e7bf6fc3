"""One tiny random model of every family the package serves. Families with two kinds of layers have both."""

import dataclasses
from collections.abc import Callable

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    # Tied random embeddings would repeat the last token for ever.
    "tie_word_embeddings": False,
}
# Sequences of the tests outgrow the window.
TWO_KINDS = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "query_pre_attn_scalar": 16,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One row: how to make a random model of it."""

    name: str
    model_class: type[PreTrainedModel]
    config_class: Callable
    settings: dict = dataclasses.field(default_factory=dict)

    def model(self, seed: int = 0, **overrides) -> PreTrainedModel:
        torch.manual_seed(seed)
        model = self.model_class(self.config_class(**{**SIZES, **self.settings, **overrides})).eval()
        # Norms that start at zero or one would hide what is not rotated or scaled as it should be.
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        return model


FAMILIES = [
    Family("llama", LlamaForCausalLM, LlamaConfig),
    Family("mistral", MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    Family("qwen2", Qwen2ForCausalLM, Qwen2Config),
    Family("qwen3", Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    Family("phi3", Phi3ForCausalLM, Phi3Config),
    # A cap small enough to matter: scores of these models reach several times as much.
    Family("gemma2", Gemma2ForCausalLM, Gemma2Config, {**TWO_KINDS, "attn_logit_softcapping": 1.0}),
    Family(
        "gemma3",
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            **TWO_KINDS,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            },
        },
    ),
    # Without grouped KV heads; unknown settings would become attributes of the configuration.
    Family("gpt_neox", GPTNeoXForCausalLM, GPTNeoXConfig, {"num_key_value_heads": None}),
    Family("gpt2", GPT2LMHeadModel, GPT2Config, {"num_key_value_heads": None}),
]
# Most of their layers keep one state for all tokens: convolutions, and recurrences beside them.
RECURRENT = [
    Family(
        "lfm2",
        Lfm2ForCausalLM,
        Lfm2Config,
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    Family(
        "granitemoehybrid",
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "position_embedding_type": "rope",
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 96,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
        },
    ),
]
BY_NAME = {family.name: family for family in FAMILIES + RECURRENT}


def tiny_opt(**settings) -> OPTForCausalLM:
    """Learned positions, and masks that its own code makes without looking at them."""
    sizes = {
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return OPTForCausalLM(OPTConfig(**sizes, max_position_embeddings=256, **settings))
