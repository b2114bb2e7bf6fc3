"""Bytes of compressed caches against uncompressed ones: by their own count, by the allocator's, and how many sequences fit.

    python -m benchmarks.memory --checkpoint runs/demo/checkpoint --bases bases/demo --context 2048 --results results

Three things of each cache after a prompt of --context tokens: the bytes it counts itself and those the allocator has given
out for it; the most that a decoded token needs beside them for a moment; and the largest batch whose cache and decoded token
fit into the memory that --sequences sequences of a preallocated cache take up, tried out with batches of copies of the
prompt (which have no room to grow: the decoded token makes some). Ideal would be 1/rate times as many as of the preallocated
cache.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, PreTrainedModel, StaticCache

from benchmarks.caches import PAGED, PREALLOCATED, Candidate, argument_parser, candidates, context_ids, prefill
from benchmarks.harness import count, write_results
from benchmarks.peak_memory import allocations
from benchmarks.roofline import cache_bytes
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.utils import cli

TOKEN = 11


def main(argv: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--context", type=count, default=2048, help="cached tokens, one of them decoded [default %(default)s]"
    )
    parser.add_argument(
        "--sequences",
        type=count,
        default=8,
        help="of a preallocated cache, whose memory is shared [default %(default)s]",
    )
    arguments = parser.parse_args(argv)

    found = candidates(arguments, arguments.context)
    if found.pop(PAGED, None):
        print(f"{PAGED} is left out: it takes the memory that it is told to take")
    ids = context_ids(arguments, found[PREALLOCATED][0], arguments.context - 1)
    preallocated = Prompted(found[PREALLOCATED], ids)
    budget = preallocated.needed(arguments.sequences)
    print(f"{arguments.sequences} sequences of a preallocated cache and their next token: {budget / 2**20:.1f} MiB")
    rows = [row(name, Prompted(candidate, ids), arguments.context, budget) for name, candidate in found.items()]
    [most] = [each["largest_batch"] for each in rows if each["method"] == PREALLOCATED]
    line = (
        "{method:>14}  {counted_bytes:13,} B counted  {allocated_over_counted:.4f} of it allocated  {step_bytes:12,} B for "
        "a token  rate {rate:.3f}  largest batch {largest_batch}, {share_of_ideal:.2f} of the ideal"
    )
    for each in rows:
        each["share_of_ideal"] = each["largest_batch"] / most * each["rate"]
        print(line.format(**each))
    if arguments.results:
        write_results(
            arguments.results, "memory", vars(arguments) | {"budget_bytes": budget}, rows, model=found[PREALLOCATED][0]
        )


class Prompted:
    """A model whose cache has read a prompt, of which batches of copies are made."""

    def __init__(self, candidate: Candidate, ids: torch.Tensor):
        self.model, self.make_cache = candidate
        self.ids = ids
        self.cache = self.fresh()

    def fresh(self) -> Cache:
        return prefill(self.model, self.ids, self.make_cache())

    def allocated(self, make: Callable[[], Cache], batch: int) -> tuple[int, int]:
        """Bytes given out for a cache, and the most beside them for a token more of each of its `batch` sequences."""
        return allocations(make, lambda cache: decode(self.model, cache, batch), self.ids.device)

    def needed(self, batch: int) -> int:
        """Bytes for `batch` sequences of the prompt and a token more of each."""
        return sum(self.allocated(lambda: repeated(self.cache, batch), batch))

    def largest_batch(self, budget: int) -> int:
        """The most sequences whose needs are within `budget` bytes; 0 where not even one's are."""
        batch, fits = max(1, budget // self.needed(1)), {0: True}
        while batch not in fits:
            fits[batch] = self.needed(batch) <= budget
            batch += 1 if fits[batch] else -1
        return max(size for size, is_within in fits.items() if is_within)


def row(name: str, prompted: Prompted, context: int, budget: int) -> dict[str, Any]:
    allocated, step = prompted.allocated(prompted.fresh, 1)
    counted = cache_bytes(prompted.cache)
    full = prompted.cache.full_nbytes if isinstance(prompted.cache, LowRankCache) else counted
    return {
        "method": name,
        "context": context,
        "counted_bytes": counted,
        "allocated_bytes": allocated,
        "allocated_over_counted": allocated / counted,
        "step_bytes": step,
        "rate": counted / full,
        "largest_batch": prompted.largest_batch(budget),
    }


def repeated(cache: Cache, batch: int) -> Cache:
    """`batch` sequences for each of a cache's, with memory of their own."""
    twin = copy.deepcopy(cache)
    if not isinstance(cache, StaticCache):
        twin.batch_repeat_interleave(batch)
        return twin
    for layer in twin.layers:
        layer.keys, layer.values = (states.repeat_interleave(batch, dim=0) for states in (layer.keys, layer.values))
    return twin


@torch.no_grad()
def decode(model: PreTrainedModel, cache: Cache, batch: int) -> None:
    """One token more of each sequence."""
    model(torch.full((batch, 1), TOKEN, device=model.device), past_key_values=cache, logits_to_keep=1)


if __name__ == "__main__":
    cli.run(main)
