"""What a training needs of each GPU, on every engine, worked out from the model's configuration alone: `train --plan`.

Shapes: E hidden size, I width of the feed-forward layer, Q = heads · dims of the queries, C joint width of keys or values,
V vocabulary, L layers; N GPUs.
"""

import dataclasses

import torch
from transformers import PreTrainedModel

import dynakv
from dynakv.training_config import COMPRESSOR, FULL, TrainConfig
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.hf.loading import AUTO, load_shape
from lowrank_kv.utils.config import require

from .optimizer import build_optimizer

GB = 1e9
FP32 = 4
# DeepSpeed's defaults, which configs/accelerate/ leaves as they are: numbers in a bucket of gradients, and of parameters
# that ZeRO-3 keeps gathered.
_BUCKET, _LIVE = 5e8, 1e9
# What the CUDA context and the allocator's gaps take, in bytes and as a share of all else.
_CONTEXT, _GAPS = 1.2 * GB, 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """What a run holds, one process on one GPU before anything is spread; in bytes but for numbers of weights.

    Attributes:
        frozen: numbers that are not trained.
        itemsize: bytes that each of these takes.
        trained: numbers that are trained, each held in fp32.
        buffers: bytes of what compressors hold beside these, which no engine spreads.
        activations: kept for the backward pass of one forward pass.
        output: the logits of that forward pass.
        logits: these, with their gradient.
        layer: what one layer keeps while it is recomputed; 0 without recomputation.
        copies: of trained weights in the dtype that the model computes in, as a forward pass ends.
        kept_copies: those of them that the backward pass holds at a time.
        passes: forward and backward passes of an optimizer step.
        forwards: of weights in each pass, that of recomputation and of an uncompressed teacher included.
        state: bytes of a state on the disk, which the first process gathers in its machine's memory; 0 where none is.
    """

    frozen: float
    itemsize: int
    trained: float
    buffers: float
    activations: float
    output: float
    logits: float
    layer: float
    copies: float
    kept_copies: float
    passes: int
    forwards: int
    state: float

    @property
    def of_text(self) -> float:
        """All that grows with the tokens of a pass."""
        return self.activations + self.logits + self.layer

    @property
    def of_pass(self) -> float:
        """All that a pass holds at its peak: as its forward pass ends, or in its backward pass."""
        return max(self.activations + self.output + self.copies, self.of_text + self.kept_copies)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """One engine's share.

    Attributes:
        name: of the file in configs/accelerate/.
        gpu: bytes of each GPU at the peak of a step.
        host: bytes of the machine's memory that N processes take beside loading.
        sent: bytes that each GPU sends in an optimizer step.
    """

    name: str
    gpu: float
    host: float
    sent: float


def size_of_run(config: TrainConfig, model: PreTrainedModel | None = None) -> Size:
    """What a run holds.

    Args:
        config: of the run; its model is made without numbers.
        model: such a model, where it is known already.
    """
    model = load_shape(config.model) if model is None else model
    dynakv.add_compressors(model, config.compressor)
    build_optimizer(model, config, 0.0)
    itemsize = getattr(torch, "bfloat16" if config.dtype == AUTO else config.dtype).itemsize  # of a GPU
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    frozen = sum(each.numel() for each in model.parameters() if not each.requires_grad)
    held = (each for compressor in dynakv.token_compressors(model) for each in compressor.buffers())
    tokens = config.optimizer.batch_size * config.dataset.sequence_length
    layer, layers, width = _layer_bytes(model, config, itemsize), *_depth_and_width(model)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    copies, kept_copies = _copies(model, config, itemsize)
    # Between layers numbers are as norms leave them: of the weights' dtype, which is fp32 under autocast.
    between = FP32 if _casts(config, itemsize) else itemsize
    teacher = bool(config.loss.distillation)
    return Size(
        frozen=float(frozen),
        itemsize=FP32 if config.trainable == FULL else itemsize,
        trained=float(trained),
        buffers=float(sum(each.numel() * each.itemsize for each in held)),
        activations=float(tokens * layers * (between * width if config.gradient_checkpointing else layer)),
        output=float(tokens * vocabulary * itemsize),
        # In the model's dtype, in fp32, their softmax and its gradient; a teacher's stand beside them.
        logits=float(tokens * vocabulary * (itemsize + 3 * FP32 + (itemsize if teacher else 0))),
        layer=float(tokens * layer) if config.gradient_checkpointing else 0.0,
        copies=copies,
        kept_copies=kept_copies,
        passes=config.optimizer.gradient_accumulation_steps,
        forwards=2 + config.gradient_checkpointing + teacher,
        state=3.0 * FP32 * trained if config.checkpoint_every else 0.0,  # AdamW has two moments
    )


def _casts(config: TrainConfig, itemsize: int) -> bool:
    """Whether the model computes in another dtype than the fp32 that a trained backbone is held in."""
    return config.trainable == FULL and itemsize != FP32


def _copies(model: PreTrainedModel, config: TrainConfig, itemsize: int) -> tuple[float, float]:
    """Bytes of the copies of weights that autocast makes: of all that are multiplied with, which it keeps until the forward
    pass ends; and of those that the backward pass holds at a time, which are all, or those of the logits and of the layer
    that is recomputed.
    """
    if not _casts(config, itemsize):
        return 0.0, 0.0
    numbers = {id(each): each.numel() for each in model.parameters() if each.requires_grad}
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    of_output = numbers[id(output)]
    if embedding is not output:  # it is looked up
        del numbers[id(embedding)]
    everything = itemsize * sum(numbers.values())
    if not config.gradient_checkpointing:
        return float(everything), float(everything)
    layers, _ = _depth_and_width(model)
    return float(everything), itemsize * of_output + (everything - itemsize * of_output) / layers


def _depth_and_width(model: PreTrainedModel) -> tuple[int, int]:
    config = model.config.get_text_config(decoder=True)
    return config.num_hidden_layers, config.hidden_size


def _layer_bytes(model: PreTrainedModel, config: TrainConfig, itemsize: int) -> float:
    """Bytes that one layer keeps of each token for the backward pass.

    They are those that autograd saves, as counted on a small model (tests/training/test_memory_plan.py): the two norms in
    fp32, three numbers of the feed-forward layer, queries and outputs of attention, eight numbers of each compressed key and
    value; the inputs of projections, too, where these are trained. Under autocast norms and some numbers of keys and values
    are fp32, and each projection has a copy of its input.
    """
    text, geometry = model.config.get_text_config(decoder=True), geometry_of(model)
    width = text.hidden_size
    inner = _active_width(text)
    queries = text.num_attention_heads * geometry.head_dim
    if _casts(config, itemsize):
        return FP32 * (4 * width + 3 * geometry.width) + itemsize * (
            5 * width + 4 * inner + 2 * queries + 5 * geometry.width
        )
    kept = 2 * FP32 * width + itemsize * (3 * inner + 2 * queries + 8 * geometry.width)
    if config.trainable != COMPRESSOR:
        kept += itemsize * (4 * width + (inner if config.trainable == FULL else 0))
    return kept


def _active_width(text: object) -> int:
    """I, of all experts that a token goes through."""
    experts = getattr(text, "num_experts_per_tok", None)
    width = getattr(text, "moe_intermediate_size", None) if experts else None
    inner = width or getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return inner * (experts or 1)


def plans(size: Size, gpus: int) -> list[EnginePlan]:
    """Every engine's share, in the order in which they are to be preferred: those that send less first."""
    weights, trained = size.frozen * size.itemsize + FP32 * size.trained, size.trained
    gradients, moments, bucket = FP32 * trained, 2 * FP32 * trained, FP32 * _BUCKET
    master = FP32 * trained  # DeepSpeed's optimizers work on a copy of their own
    share = 1 / gpus
    reduced = 2 * gradients * (1 - share)
    live = weights * min(1.0, _LIVE / (size.frozen + trained))
    gathered = size.passes * (size.forwards * weights + gradients) * (1 - share)

    # ZeRO-3 multiplies by a function of its own, which leaves no copies of weights.
    without_copies = dataclasses.replace(size, copies=0.0, kept_copies=0.0)

    def plan(name: str, held: float, sent: float, host: float = 0.0) -> EnginePlan:
        of_pass = (without_copies if name.startswith("zero3") else size).of_pass
        gpu = (held + size.buffers + of_pass) * (1 + _GAPS) + _CONTEXT
        return EnginePlan(name=name, gpu=gpu, host=host * (1 + _GAPS) + size.state, sent=sent)

    if gpus == 1:
        return [plan("single", weights + gradients + moments, 0.0)]
    # DDP copies gradients into its buckets.
    return [
        plan("ddp", weights + 2 * gradients + moments, reduced),
        plan("zero1", weights + gradients + bucket + (master + moments) * share, reduced),
        plan("zero2", weights + bucket + (gradients + master + moments) * share, reduced),
        plan("zero2-offload", weights + bucket, reduced, gradients + master + moments),
        plan("zero3", live + bucket + (weights + gradients + master + moments) * share, gathered),
        plan("zero3-offload", live + bucket, gathered, weights + gradients + master + moments),
    ]


def advised(found: list[EnginePlan], gpu_memory: float) -> EnginePlan | None:
    """The first engine that fits `gpu_memory` bytes; None where none does."""
    return next((each for each in found if each.gpu <= gpu_memory), None)


def report(config: TrainConfig, *, gpus: int, gpu_memory: float, model: PreTrainedModel | None = None) -> str:
    """A table of all engines and the one to use.

    Args:
        gpus: N. gpu_memory: of each, in GB.

    Raises:
        UserError: there is no such model, or no GPU.
    """
    require(gpus >= 1, "--gpus", gpus, "at least 1")
    require(gpu_memory > 0, "--gpu_memory", gpu_memory, "positive")
    size = size_of_run(config, model)
    found = plans(size, gpus)
    if config.compressor.joint_layers:  # ZeRO-3 gathers a layer's compressor when that layer runs, and refuses these
        found = [each for each in found if not each.name.startswith("zero3")]
    best = advised(found, gpu_memory * GB)
    frozen = size.frozen * size.itemsize / GB
    lines = [
        f"{size.trained / 1e6:,.0f} M numbers are trained beside {frozen:,.1f} GB of frozen weights; a pass of "
        f"{config.optimizer.batch_size} × {config.dataset.sequence_length:,} tokens keeps {size.of_text / GB:,.1f} GB",
        "",
        *table(found, best),
        "",
    ]
    if config.compressor.has_plan:
        lines.append(
            "a pass is counted as one of gates: with a plan of bits it keeps up to two and a half times as much, "
            "coefficients in fp32 and each class's rows, and with `joint_layers` the rows of all layers, recomputed or not"
        )
    if best is None:
        lines.append(
            f"none fits {gpu_memory:g} GB: shorten `dataset.sequence_length`, set `gradient_checkpointing: true`, or use "
            f"more GPUs"
        )
    else:
        lines.append(
            f"use configs/accelerate/{best.name}.yaml of a checkout: of those that fit {gpu_memory:g} GB it sends the least"
        )
    return "\n".join(lines)


def table(found: list[EnginePlan], best: EnginePlan | None) -> list[str]:
    """Lines of Markdown, in whole GB."""
    head = ["| engine | each GPU, GB | machine's memory, GB | sent by each GPU in a step, GB |", "|---|--:|--:|--:|"]
    rows = []
    for each in found:
        name = f"**{each.name}**" if best is not None and each.name == best.name else each.name
        rows.append(f"| {name} | {each.gpu / GB:,.0f} | {each.host / GB:,.0f} | {each.sent / GB:,.0f} |")
    return head + rows
