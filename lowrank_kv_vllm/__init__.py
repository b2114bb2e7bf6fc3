"""Compressed caches in vLLM, whose scheduler then fits several times the tokens into its memory.

vLLM finds the plugin by an entry point and loads it in each of its processes. Without `lowrank_kv` in `--additional-config`
it does nothing.

- `settings`: what a user asks for. `plans`: the bases and plans of bits that are served, from a calibration or a checkpoint;
  `sides`: what one layer's keys, or values, become by them.
- `plugin`: what vLLM calls; where it is asked for, it gives attention layers the backend and pages of fewer bytes.
- `refusals`: what cannot be served, each with the reason, before the engine starts.
- `rotation`: the model's rotation of keys, read from its own table.
- `statistics`: what a worker counts. `step`: what one step of the engine is about, once for all layers.
- `layer`: what a layer's attention asks of its pages (`lowrank_kv/stores/arena.py`). `compiled_pages`: by compiled C on a
  CPU, with `prompts`, attention of many new tokens. `kernel_pages`: by Triton's kernels on a GPU.
- `backend`: a layer's attention, whichever of them reads and writes its pages.

Only `settings`, `plans` and `sides` may be imported where vLLM is not installed.
"""
