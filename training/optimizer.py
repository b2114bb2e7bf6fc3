"""The trained parameters and their optimizer: the compressors, and optionally LoRA adapters or the backbone."""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import dynakv
from dynakv.training_config import FULL, LORA, LoraConfig, TrainConfig
from lowrank_kv.hf.geometry import attention_modules, attention_projections
from lowrank_kv.utils.errors import not_installed
from lowrank_kv.utils.flops import size_of

from .engine import Engine


def build_optimizer(model: PreTrainedModel, config: TrainConfig, lr_projection: float) -> torch.optim.Optimizer:
    """Freeze all other parameters and return AdamW over the trained ones, with a peak learning rate for each kind.

    The groups' learning rates are zero until the loop sets them. `lr_projection`, that of U, is an argument because a
    resumed run keeps its own.
    """
    backbone_of_text = reached_by_text(model) if config.trainable == FULL else []
    model.requires_grad_(False)
    for parameter in backbone_of_text:
        parameter.requires_grad_(True)
    groups: dict[str, list[nn.Parameter]] = {"projection": [], "gate": [], "gate_bias": []}
    for compressor in dynakv.token_compressors(model):
        compressor.requires_grad_(True)
        groups["projection"] += compressor.projection.parameters()
        for name, parameter in compressor.gate.named_parameters():
            groups["gate_bias" if name in ("bias", "theta") else "gate"].append(parameter)
    if config.trainable == LORA:
        _add_adapters(model, config.lora, config.seed)
    named = {id(parameter) for parameters in groups.values() for parameter in parameters}
    backbone = [value for value in model.parameters() if value.requires_grad and id(value) not in named]
    settings = config.optimizer
    peaks = {"projection": lr_projection, "gate": config.lr_gate, "gate_bias": settings.lr_gate_bias}
    decays = {"backbone": settings.weight_decay}
    if backbone:
        undecayed = _undecayed(model)
        groups["backbone"] = [each for each in backbone if id(each) not in undecayed]
        groups["backbone_vectors"] = [each for each in backbone if id(each) in undecayed]
        peaks |= dict.fromkeys(("backbone", "backbone_vectors"), settings.lr_backbone)
    return torch.optim.AdamW(
        [
            {"params": parameters, "lr": 0.0, "peak": peaks[name], "weight_decay": decays.get(name, 0.0)}
            for name, parameters in groups.items()
            if parameters
        ],
        betas=(0.9, 0.99),
    )


def _undecayed(model: PreTrainedModel) -> set[int]:
    """The identities of biases, and of the weights of norms, which mean something else where they are nearer to zero.

    Some have two dims: a row for each head, or for each expert.
    """
    return {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if size_of(parameter)[1] < 2 or name.endswith("bias") or type(module).__name__.endswith("Norm")
    }


def reached_by_text(model: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters to which a pass over text gives gradients: those of the text decoder, and of what turns its states into
    logits.

    Encoders of images and sounds are left out, with what joins them to the text. They stand beside the decoder, or in a part
    of it that holds a model of its own. Parameters that the family itself trains without gradients are left out, too, such
    as the biases of routers: a loaded model no longer says which these are, and one that was just made does.
    """
    decoder, attention = model.get_decoder(), set(attention_modules(model).values())
    others = _identities(model.base_model) - _identities(decoder)
    for part in decoder.children():
        modules = set(part.modules())
        if any(isinstance(module, PreTrainedModel) for module in modules) and not attention & modules:
            others |= _identities(part)
    with torch.device("meta"):
        made = type(model)(copy.deepcopy(model.config))
    without_gradients = {name for name, parameter in made.named_parameters() if not parameter.requires_grad}
    return [
        parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in others and name not in without_gradients
    ]


def _identities(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _add_adapters(model: PreTrainedModel, settings: LoraConfig, seed: int) -> None:
    """Put a float32 LoRA adapter on every projection of every attention module; they start as zero."""
    try:
        import peft
    except ImportError as error:
        raise not_installed("`trainable: lora`", "peft", extra="lora") from error
    projections = attention_projections(model)
    torch.manual_seed(seed)  # the same adapters on every process
    # GPT-2's projections are not nn.Linear, and hold their weights transposed.
    transposed = not all(isinstance(module, nn.Linear) for module in projections.values())
    config = peft.LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=list(projections), fan_in_fan_out=transposed
    )
    frozen = {id(parameter) for parameter in model.parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    peft.inject_adapter_in_model(config, model)
    # peft freezes everything but its adapters, including the compressors.
    for parameter in trained:
        parameter.requires_grad_(True)
    for parameter in model.parameters():
        if id(parameter) not in frozen:
            parameter.data = parameter.data.float()


def merged_state(engine: Engine) -> dict[str, Tensor]:
    """All tensors of the model under the names of a stock model with compressors, with adapters merged into its weights.

    Every process must call this; all but the first get an empty dictionary. Merged weights have the backbone's dtype.
    """
    model = engine.model
    adapters = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if any(name.startswith(f"{adapter}.lora_") for adapter in adapters):
            continue
        tensor = engine.full_tensor(parameter)
        owner, base, leaf = name.rpartition(".base_layer.")
        if base and owner in adapters:
            if leaf == "weight":
                with engine.gather_full([p for n, p in adapters[owner].named_parameters() if n.startswith("lora_")]):
                    delta = adapters[owner].get_delta_weight("default").detach()
                tensor = None if tensor is None else (tensor.float() + delta.float().cpu()).to(tensor.dtype)
            name = f"{owner}.{leaf}"
        if tensor is not None:
            state[name] = tensor
    if engine.main:
        persistent = model.state_dict().keys()
        state |= {name: buffer.cpu() for name, buffer in model.named_buffers() if name in persistent}
    return state
