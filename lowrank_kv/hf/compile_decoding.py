"""Compile how a model decodes tokens: each token runs as one graph, with any kind of cache.

The time of a decoded token goes into reading weights. A CPU's BLAS, made for many rows, reads them at a fraction of the
memory's rate. Products written as sums become loops of inductor's, which read at the full rate, from the weights in place:
nothing is packed or stored twice. (GPT-2 stores weights by inputs; a BLAS reads those faster, and keeps them.)

Shapes: K inputs and N outputs of a product.
"""

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import lookup_backend
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._inductor import config as inductor
from torch._inductor.inductor_prims import force_stride_order
from torch.fx import GraphModule, Node
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.cache_argument import cache_name
from lowrank_kv.hf.default_cache import note_read
from lowrank_kv.hf.geometry import check_model
from lowrank_kv.hf.recurrent_layers import WholeCalls
from lowrank_kv.utils.errors import UserError

_SUMMED = (torch.float32, torch.bfloat16, torch.float16)  # in fp32, too little for fp64


def compile_decoding(model: PreTrainedModel) -> PreTrainedModel:
    """Compile how a decoder decodes a token, in `generate()` and in plain calls, with any cache given as `past_key_values`.

    Only single tokens after a prompt, without gradients, run compiled; prompts, drafts of several tokens and training run as
    before. A graph is compiled when a kind of cache is first used, in a minute or less. The model keeps it for every length
    and every later cache of that kind; one sequence, several, and those with padding have a graph each. Graphs have no
    weights of their own. Copies of the model, pickled ones included, are not compiled. Predictions differ by rounding.

    `torch.compile` needs a C++ compiler on a CPU. A token that cannot be one graph raises torch's own error, which says
    where the graph breaks.

    Raises:
        UserError: the model wraps another, which `generate()` would call instead, or has an encoder.
    """
    check_model(model)
    if model.config.is_encoder_decoder:
        raise UserError(f"`model` must be a decoder, got a {type(model).__name__}, which has an encoder, too")
    model._compiled_call_impl = _Decoding(model._call_impl)
    return model


class _Decoding:
    """A model's call, `call`, whose single tokens run compiled."""

    def __init__(self, call: Callable):
        self.call = call
        self.graphs: dict[Hashable, Callable] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tokens = args[0] if args else kwargs.get("input_ids")
        if tokens is None:
            tokens = kwargs.get("inputs_embeds")
        cache = kwargs.get(cache_name(kwargs))
        is_decoded = tokens is not None and tokens.shape[1] == 1 and cache is not None and cache.get_seq_length() > 0
        if torch.is_grad_enabled() or not is_decoded:
            return self.call(*args, **kwargs)
        note_read(self.call.__self__)
        if isinstance(cache, LowRankCache):
            cache.check_even()  # in a graph layers do not look at one another
        kind = type(cache), frozenset(kwargs)  # calls that differ in these never share a graph
        if kind not in self.graphs:
            self.graphs[kind] = _compiled(self.call)
        with cache.whole_call() if isinstance(cache, WholeCalls) else contextlib.nullcontext():
            try:
                return self.graphs[kind](*args, **kwargs)
            except FailOnRecompileLimitHit:  # before anything was run
                self.graphs[kind] = _compiled(self.call)
                return self.graphs[kind](*args, **kwargs)


def _compiled(call: Callable) -> Callable:
    """A compiled call with graphs of its own."""

    def decode(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    # Torch keeps graphs with the code they are made of, and no more than eight of it, of whichever model they are.
    decode.__code__ = decode.__code__.replace()
    return torch.compile(decode, backend=_backend, fullgraph=True, dynamic=True)


def _backend(graph: GraphModule, inputs: list[Tensor]) -> Callable:
    """Inductor, on a graph whose products of one row are sums."""
    for node in graph.graph.find_nodes(op="call_function", target=functional.linear):
        if len(node.args) > 1 and _is_read_once(*node.args[:2]):
            node.target = _one_row
            node.kwargs = {**node.kwargs, "dtype": node.meta["example_value"].dtype}  # under autocast not the row's
    graph.recompile()
    with inductor.patch(freezing=False):  # it would put copies of the weights into the graph
        return lookup_backend("inductor")(graph, inputs)


def _is_read_once(rows: Node, weight: Node) -> bool:
    """Whether a product reads a plain weight for one row, on a CPU; a quantized weight is multiplied its own way."""
    rows, weight = rows.meta["example_value"], weight.meta["example_value"]
    is_plain = weight.dtype in _SUMMED and not is_traceable_wrapper_subclass(weight)
    return rows.device.type == "cpu" and is_plain and all(size == 1 for size in rows.shape[:-1])


def _one_row(row: Tensor, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype) -> Tensor:
    """`torch.nn.functional.linear` of (…, K) → (…, N), all but the last 1, summed in fp32 and given as `dtype`."""
    # Written to memory before the loop over N; otherwise inductor would compute it inside that loop, N times.
    inputs_K = force_stride_order(row.reshape(-1), (1,))
    outputs_N = (weight.float() * inputs_K.float()).sum(-1)
    if bias is not None:
        outputs_N = outputs_N + bias.float()
    return outputs_N.to(dtype).reshape(*row.shape[:-1], -1)
