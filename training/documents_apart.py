"""Let documents of a block see nothing of one another, whatever compresses the model that reads them."""

import torch
from transformers import PreTrainedModel

from lowrank_kv.hf.document_isolation import isolate_documents
from lowrank_kv.utils.errors import UserError

from .distillation import uncompressed


def keep_apart(model: PreTrainedModel, device: torch.device, *, name: str, remedy: str) -> None:
    """Let documents of a block see nothing of one another; the model is tried as it is by itself. All processes that share
    its weights must call this.

    Args:
        model: with compressors.
        device: where its inputs go.
        name: what a user calls the model.
        remedy: what to do about a model that cannot.

    Raises:
        UserError: it cannot.
    """
    with uncompressed(model):
        objection = isolate_documents(model, device)
    if objection is not None:
        raise UserError(f"`model` is {name}, and {objection}; {remedy}")
