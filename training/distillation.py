"""Knowledge distillation from the uncompressed model, which is the trained one with its compressors taken off.

Shapes: B batch, T tokens, V vocabulary, N predicted tokens.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

import dynakv
from dynakv.joint_rows import rebuilt_states, states_of_pass
from lowrank_kv.hf.attention import REBUILT, TRANSFORM
from lowrank_kv.hf.geometry import attention_modules
from lowrank_kv.utils.eval_mode import evaluating

_TOKENS = 128  # rows of logits computed at once


@contextlib.contextmanager
def without_compressors(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model has no compressors. Nothing is copied."""
    modules = attention_modules(model).values()
    taken = {module: module._modules.pop(TRANSFORM) for module in modules if TRANSFORM in module._modules}
    try:
        yield
    finally:
        for module, compressor in taken.items():
            module._modules[TRANSFORM] = compressor


@contextlib.contextmanager
def uncompressed(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model is the stock one, without compressors and LoRA adapters. Nothing is copied."""
    adapted = _adapted(model)
    with without_compressors(model):
        for module in adapted:
            module.enable_adapters(False)
        try:
            yield
        finally:
            for module in adapted:
                module.enable_adapters(True)


def _adapted(model: PreTrainedModel) -> list[nn.Module]:
    """The modules with LoRA adapters."""
    return [module for module in model.modules() if hasattr(module, "get_delta_weight")]


@torch.no_grad()
def teacher_logits(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Tensor:
    """Logits of the uncompressed model for the inputs of a pass, (B, T, V), without dropout."""
    # Compressors are taken off first, and so keep their mode.
    with uncompressed(model), evaluating(model):
        return model(**inputs, use_cache=False).logits


def read_by_teacher(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], *, logits: bool
) -> tuple[Tensor | None, dict[str, Any]]:
    """What a pass of the uncompressed model gives one of the compressed model without a cache.

    Args:
        model: with compressors.
        inputs: of the pass.
        logits: whether :func:`teacher_logits` are asked for.

    Returns:
        the logits, or None; and the arguments that the compressed pass needs besides `inputs`: where layers are coded
        together what is rebuilt of their rows, with gradients, else none.
    """
    if not dynakv.settings_of(model).joint_layers:
        return (teacher_logits(model, inputs) if logits else None), {}
    if logits and not _adapted(model):
        with states_of_pass(model) as states:
            teacher = teacher_logits(model, inputs)
    else:  # what is compressed are the states of the model with its adapters, from which nothing is learned
        with states_of_pass(model) as states, without_compressors(model), evaluating(model), torch.no_grad():
            model.base_model(**inputs, use_cache=False)
        teacher = teacher_logits(model, inputs) if logits else None
    return teacher, {REBUILT: rebuilt_states(model, states, inputs.get("position_ids"))}


def summed_kl(logits_BTV: Tensor, teacher_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Σ KL(teacher ‖ student) over the predicted tokens, in nats, at temperature 1; carries the student's gradients.

    Args:
        logits_BTV, teacher_BTV: for T tokens, of which the last predicts nothing here.
        targets_BT: (B, T − 1); tokens with a negative target are left out.
    """
    predicted = targets_BT.flatten() >= 0
    student_NV = logits_BTV[:, :-1].flatten(0, 1)[predicted]
    teacher_NV = teacher_BTV[:, :-1].flatten(0, 1)[predicted]
    # In chunks, because each fp32 temporary of all rows would be as large as the logits of the batch.
    chunks = zip(student_NV.split(_TOKENS), teacher_NV.split(_TOKENS), strict=True)
    kl = student_NV.new_zeros((), dtype=torch.float32)
    for student, teacher in chunks:
        kl = kl + F.kl_div(
            student.float().log_softmax(-1), teacher.float().log_softmax(-1), reduction="sum", log_target=True
        )
    return kl
