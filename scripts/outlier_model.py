"""Write a model that says what another says, whose keys and values have channels far larger than all others.

    python -m scripts.outlier_model MODEL OUTPUT [--scale 30]

Large models have such channels, and a coder that spends its bits by energy, or that measures a loss by it, is blind to all
others beside them. In every KV head one channel of the values becomes `--scale` times as large, and what reads it that much
smaller; likewise one channel of the keys, and the one that it rotates with, by the queries. So attention computes the same,
but for the rounding of sums. The model must have plain projections `q_proj`, `k_proj`, `v_proj` and `o_proj`, and no norm of
keys or queries behind them, as Llama's have.
"""

import argparse
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from lowrank_kv.hf.geometry import attention_modules, geometry_of
from lowrank_kv.hf.loading import load_model, load_tokenizer
from lowrank_kv.utils import cli
from lowrank_kv.utils.atomic_write import new_directory
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError

_CHECKED = 64  # tokens that both models read
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id or local directory")
    parser.add_argument("output", type=cli.output_directory, help="a directory for the other model")
    parser.add_argument("--scale", type=float, default=30.0, help="how many times as large (default: 30)")
    arguments = parser.parse_args(argv)
    model = load_model(arguments.model)
    add_outliers(model, arguments.scale)
    with new_directory(arguments.output, "config.json") as partial:
        model.save_pretrained(partial)
        load_tokenizer(arguments.model).save_pretrained(partial)


@torch.no_grad()
def add_outliers(model: PreTrainedModel, scale: float, seed: int = 0) -> None:
    """Make one channel of each KV head's values, and a pair of its keys', `scale` times as large, in place.

    Raises:
        UserError: attention has other parts than the four projections, or `scale` is not positive; or, the model having been
            changed, it says something else.
    """
    require(scale > 0, "scale", scale, "positive")
    ids = torch.arange(_CHECKED, device=model.device)[None] % model.config.vocab_size
    before = model(ids, use_cache=False).logits
    _add_outliers(model, scale, seed)
    after = model(ids, use_cache=False).logits
    if not (after - before).abs().max() <= 1e-3 * before.std():  # of infinite numbers nothing is less
        raise UserError(
            f"the model says something else with channels {scale:g} times as large: it may clip keys or values, rotate "
            f"other dims together than the halves of a head, or not hold such numbers; use one such as Llama, or a smaller "
            f"`scale`"
        )


def _add_outliers(model: PreTrainedModel, scale: float, seed: int) -> None:
    shape, generator = geometry_of(model), torch.Generator().manual_seed(seed)
    for name, module in attention_modules(model).items():
        found = {each for each, child in module.named_children() if next(child.parameters(), None) is not None}
        if found != set(_PROJECTIONS):
            raise UserError(
                f"attention of layer {name} has {', '.join(sorted(found))}; use a model whose attention has "
                f"{', '.join(_PROJECTIONS)} and nothing else"
            )
        queries_of_each = module.o_proj.in_features // (shape.num_kv_heads * shape.head_dim)
        for head in range(shape.num_kv_heads):
            value, key = torch.randint(shape.head_dim // 2, (2,), generator=generator).tolist()
            pair = (key, key + shape.head_dim // 2)  # the two dims that rotate together
            for i in range(queries_of_each):
                query_head = (head * queries_of_each + i) * shape.head_dim
                module.o_proj.weight[:, query_head + value] /= scale
                _multiply_rows(module.q_proj, [query_head + dim for dim in pair], 1 / scale)
            _multiply_rows(module.v_proj, [head * shape.head_dim + value], scale)
            _multiply_rows(module.k_proj, [head * shape.head_dim + dim for dim in pair], scale)


def _multiply_rows(projection: torch.nn.Linear, rows: list[int], factor: float) -> None:
    projection.weight[rows] *= factor
    if projection.bias is not None:
        projection.bias[rows] *= factor


if __name__ == "__main__":
    cli.run(main)
