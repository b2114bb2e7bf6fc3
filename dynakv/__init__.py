"""DynaKV: learned, token-wise ranks for the key–value cache.

Importing this package lets ``AutoModelForCausalLM.from_pretrained`` load full DynaKV checkpoints.
"""

from dynakv.attaching import add_compressors, configure, detach, open_gates, set_exact_tokens, use_dynakv_cache
from dynakv.cache import DynaKVCache
from dynakv.checkpoint import attach, initialize_from_checkpoint, save_compressor
from dynakv.config import DECODERS, DynaKVConfig
from dynakv.export import export_compressor
from dynakv.full_checkpoint import save_full
from dynakv.initialization import initialize_from_coders, initialize_from_gradients, initialize_from_moments
from dynakv.model_compressors import compressors, is_attached, settings_of, token_compressors
from lowrank_kv.hf.compile_decoding import compile_decoding

__all__ = [
    "DECODERS",
    "DynaKVCache",
    "DynaKVConfig",
    "add_compressors",
    "attach",
    "compile_decoding",
    "compressors",
    "configure",
    "detach",
    "export_compressor",
    "initialize_from_checkpoint",
    "initialize_from_coders",
    "initialize_from_gradients",
    "initialize_from_moments",
    "is_attached",
    "open_gates",
    "save_compressor",
    "save_full",
    "set_exact_tokens",
    "settings_of",
    "token_compressors",
    "use_dynakv_cache",
]
