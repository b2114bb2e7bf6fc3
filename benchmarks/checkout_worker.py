"""One checkout's half of :mod:`benchmarks.compare_checkouts`: it holds a model and caches, and times what it is told to.

It runs in a process of its own with the checkout first on its path, and uses nothing but the packages' public names, so that
an older checkout can answer as well. It reads a JSON request a line and answers with a JSON line.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache

import dynakv
from ojakv import OjaKVCache, OjaKVConfig


def main(arguments: dict) -> None:
    torch.set_num_threads(arguments["threads"])
    stock = AutoModelForCausalLM.from_pretrained(arguments["model"], dtype=torch.float32).eval()
    learned = AutoModelForCausalLM.from_pretrained(arguments["model"], dtype=torch.float32).eval()
    dynakv.attach(learned, arguments["checkpoint"])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, stock.config.vocab_size, (1, arguments["context"]), generator=generator)
    makers = {
        "dynamic_cache": (stock, DynamicCache),
        "dynakv": (learned, lambda: dynakv.DynaKVCache.from_model(learned)),
    }
    for preset in arguments["presets"]:
        config = OjaKVConfig.preset(preset, rate=arguments["rate"])
        # Ready-made, so that a prefill is timed without reading the bases.
        first = OjaKVCache.from_model(stock, config, bases=arguments["bases"])
        plan = first.compressed_layers()[0].plan
        makers[preset] = (stock, lambda plan=plan: OjaKVCache(stock, plan))
    caches: dict = {}
    answer({"methods": list(makers)})
    with torch.no_grad():
        for line in sys.stdin:
            request = json.loads(line)
            model, make = makers[request["method"]]
            start = time.perf_counter()
            if request["do"] == "prefill":
                caches.clear()  # one at a time: both checkouts' caches share the memory
                caches[request["method"]] = make()
                model(ids, past_key_values=caches[request["method"]], logits_to_keep=1)
            else:
                for _ in range(request["tokens"]):
                    model(ids[:, :1], past_key_values=caches[request["method"]], logits_to_keep=1)
            answer({"seconds": time.perf_counter() - start})


def answer(found: dict) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
