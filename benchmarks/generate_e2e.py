"""Milliseconds per decoded token, end to end, of DynaKV against the uncompressed cache at one context length.

    python -m benchmarks.generate_e2e --checkpoint runs/demo/checkpoint --context 2048 --json out.json

The text is random tokens: only speed is measured. Before timing, a compressed step is checked against the uncached pass.
"""

import argparse
import copy

import torch
from transformers import DynamicCache

import dynakv
from benchmarks.harness import interleaved_ms, write_results
from dynakv.checkpoint import read_config
from lowrank import cli
from lowrank.hf.loading import check_length, load_model


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="compressor checkpoint")
    parser.add_argument("--context", type=int, default=2048, help="cached tokens [default %(default)s]")
    parser.add_argument("--tokens", type=int, default=8, help="decoded tokens timed [default %(default)s]")
    parser.add_argument("--device", default="cpu", help="[default %(default)s]")
    parser.add_argument("--json", metavar="FILE", help="where to write the rows")
    arguments = parser.parse_args(argv)

    name = read_config(arguments.checkpoint).base_model
    model = load_model(name, device=arguments.device)
    check_length(model, arguments.context + arguments.tokens, "context plus tokens")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size, (1, arguments.context), generator=generator).to(model.device)
    steps = {"dynamic_cache": stepper(model, prefilled(model, ids, DynamicCache(config=model.config)))}
    compressed = dynakv.attach(copy.deepcopy(model), arguments.checkpoint)
    cache = prefilled(compressed, ids, dynakv.DynaKVCache.from_model(compressed))
    check(compressed, ids)
    rate = cache.rate
    steps["dynakv"] = stepper(compressed, cache)
    ms = interleaved_ms(steps, repeats=arguments.tokens, warmup=2)
    rows = [
        {
            "method": method,
            "context": arguments.context,
            "ms_per_token": ms[method],
            "ratio_to_dynamic_cache": ms[method] / ms["dynamic_cache"],
            "rate": rate if method == "dynakv" else 1.0,
        }
        for method in ms
    ]
    line = "{method:>14}  {ms_per_token:8.1f} ms/token  {ratio_to_dynamic_cache:.2f}× dynamic cache  rate {rate:.3f}"
    for row in rows:
        print(line.format(**row))
    if arguments.json:
        write_results(arguments.json, "generate_e2e", vars(arguments), rows)


@torch.no_grad()
def prefilled(model, ids, cache):
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def stepper(model, cache):
    token = torch.tensor([[11]], device=model.device)

    @torch.no_grad()
    def step():
        model(token, past_key_values=cache, logits_to_keep=1)

    return step


@torch.no_grad()
def check(model, ids) -> None:
    """A decoded step equals the uncached pass with the hard mask."""
    short = ids[:, :65]
    cache = prefilled(model, short[:, :64], dynakv.DynaKVCache.from_model(model))
    decoded = model(short[:, 64:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(decoded, model(short, use_cache=False).logits[:, -1], atol=1e-3, rtol=0)


if __name__ == "__main__":
    cli.run(main)
