"""Distributed backends: one process, DDP, or DeepSpeed ZeRO-1/2/3, as `accelerate` was configured.

The loop is the same on all of them. This file holds the differences: how a step is taken, and how sharded parameters and
optimizer moments are read and written as full tensors.
"""

import contextlib
import dataclasses
import datetime
import os
import sys
from collections.abc import Iterable, Iterator

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType, broadcast
from torch import Tensor
from transformers import PreTrainedModel

from dynakv.layer_compressor import JointLayerCompressor, LayerCompressor, SingleLayerCompressor
from dynakv.training_config import FULL, TrainConfig
from lowrank_kv.hf.loading import dtype_for, shard_while_loading
from lowrank_kv.utils.build_locks import await_builds, torch_folders
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError

MOMENTS = ("exp_avg", "exp_avg_sq")


def is_first_process() -> bool:
    """Whether this is the first process of a launch, which is known before the processes have found each other."""
    return int(os.environ.get("RANK", "0")) == 0


def end_process() -> None:
    """End one of several DeepSpeed processes whose work is done, without the interpreter's own end.

    Everything is written, and the process group is gone. Threads that torch and DeepSpeed leave now and then abort a process
    while the interpreter ends ("terminate called without an active exception"; two of twelve runs of ZeRO-3 on a CPU), and
    the launcher then reports a finished training as failed.
    """
    if _uses_deepspeed() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _uses_deepspeed() -> bool:
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


class Engine:
    """The processes of a run and, after :meth:`prepare`, its model and optimizer.

    Attributes:
        accelerator: of the whole run.
        config: of the run, with the dtype that `auto` is on its device.
        model: the stock model with its compressors, unwrapped.
        wrapped: the same model as forward passes call it.
        optimizer: AdamW; DeepSpeed's flat partitions stand in its groups where ZeRO shards it.

    Raises:
        UserError: `accelerate` was configured for a backend, a precision or a ZeRO stage that training does not run on, or
            did not join the processes.
    """

    def __init__(self, config: TrainConfig):
        self.deepspeed = _uses_deepspeed()
        # Writing an 8 B model to slow storage takes long, and the other processes wait.
        process_group = {"timeout": datetime.timedelta(hours=2)}
        if self.deepspeed and not torch.cuda.is_available():
            process_group["backend"] = "gloo"
            _never_build_shared_memory()
        if self.deepspeed:
            await_builds(torch_folders())
        self.accelerator = Accelerator(
            gradient_accumulation_steps=config.optimizer.gradient_accumulation_steps,
            kwargs_handlers=[
                InitProcessGroupKwargs(**process_group),
                # Buffers, a plan's bases among them, are equal on all processes, and larger than all gradients of a step.
                DistributedDataParallelKwargs(broadcast_buffers=False),
            ],
        )
        kind = self.accelerator.distributed_type
        kinds = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.DEEPSPEED)
        if kind not in kinds:
            raise UserError(
                f"accelerate is configured for `distributed_type: {kind.value}`; training runs on one process, DDP "
                f"(MULTI_GPU, MULTI_CPU) or DEEPSPEED, see configs/accelerate/ of a checkout"
            )
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if self.accelerator.num_processes != started:
            raise UserError(
                f"{started} processes were started, which accelerate did not join: each would train alone, into the same "
                f"`output`; start no more than there are GPUs, or set ACCELERATE_USE_CPU=true to train on CPUs"
            )
        if self.accelerator.mixed_precision != "no":
            raise UserError(
                f"accelerate is configured with `mixed_precision: {self.accelerator.mixed_precision}`; set it to `no` and "
                f"give the precision as `dtype`: the compressor stays in float32 whatever the model computes in"
            )
        self.config = dataclasses.replace(config, dtype=dtype_for(config.dtype, self.device))
        self.stage = self._configure_deepspeed() if self.deepspeed else 0
        if self.device.type == "cpu":
            torch.set_num_threads(config.threads or _threads(self.world))

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def world(self) -> int:
        return self.accelerator.num_processes

    @property
    def blocks_per_step(self) -> int:
        """Sequences of an optimizer step over all processes."""
        settings = self.config.optimizer
        return settings.batch_size * settings.gradient_accumulation_steps * self.world

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def loading_dtype(self) -> str:
        """dtype of the backbone's weights: float32 if they are trained, otherwise the one the model computes in."""
        return "float32" if self.config.trainable == FULL else self.config.dtype

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        """dtype that a float32 backbone computes in, if that is another."""
        return None if self.loading_dtype == self.config.dtype else getattr(torch, self.config.dtype)

    def computing(self) -> contextlib.AbstractContextManager:
        """The context of forward passes."""
        dtype = self._autocast_dtype
        return torch.autocast(self.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)

    def _configure_deepspeed(self) -> int:
        """Copy the run's own settings into DeepSpeed's configuration; returns the ZeRO stage."""
        plugin, settings = self.accelerator.state.deepspeed_plugin, self.config.optimizer
        deepspeed = plugin.deepspeed_config
        for section in ("optimizer", "scheduler"):
            if section in deepspeed:
                raise UserError(
                    f"the DeepSpeed configuration has a section `{section}`; remove it: the run's `optimizer` section sets "
                    f"both"
                )
        deepspeed["train_micro_batch_size_per_gpu"] = settings.batch_size
        deepspeed["gradient_accumulation_steps"] = settings.gradient_accumulation_steps
        deepspeed["train_batch_size"] = self.blocks_per_step
        deepspeed["gradient_clipping"] = settings.max_grad_norm
        # The same AdamW on every engine, offloaded or not, so that they differ only by rounding.
        deepspeed["zero_force_ds_cpu_optimizer"] = False
        if self._autocast_dtype is not None:
            deepspeed["torch_autocast"] = {"enabled": True, "dtype": str(self._autocast_dtype).removeprefix("torch.")}
        if plugin.zero_stage == 0:
            raise UserError(
                "accelerate is configured for DeepSpeed with `zero_stage: 0`, which shards nothing; set it to 1, 2 or 3, or "
                "use DDP, see configs/accelerate/ of a checkout"
            )
        self._loading = shard_while_loading(deepspeed, dtype=self.loading_dtype)
        return plugin.zero_stage

    def prepare(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
        """Hand model and optimizer to the engine."""
        if self.stage == 3:
            from deepspeed.utils import set_z3_leaf_modules

            # A projection's parent reads its parameters without calling it, so a layer's compressor is gathered as one.
            require(
                not any(isinstance(module, JointLayerCompressor) for module in model.modules()),
                "compressor.joint_layers",
                self.config.compressor.joint_layers,
                "0 with ZeRO-3, which gathers a layer's compressor when that layer runs; train with DDP or ZeRO-2, which "
                "hold a compressor easily",
            )
            set_z3_leaf_modules(model, [SingleLayerCompressor])
            # DeepSpeed reduces the gradients of a module gathered as one when those of its inputs arrive, and too early if
            # no input requires any, as after a frozen embedding.
            model.enable_input_require_grads()
        self.wrapped, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.model = self.accelerator.unwrap_model(self.wrapped)
        self.parameters = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        if self.deepspeed:
            self._start_moments()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add a pass's gradients; the `last` pass of a step reduces them over processes."""
        if self.deepspeed:
            self.wrapped.set_gradient_accumulation_boundary(last)
            self.wrapped.backward(loss)
        else:
            self.accelerator.backward(loss)

    def one_pass(self, *, last: bool) -> contextlib.AbstractContextManager:
        """The context of a pass: before the last of a step, gradients are not reduced."""
        return contextlib.nullcontext() if last or self.deepspeed else self.accelerator.no_sync(self.wrapped)

    def step(self) -> None:
        """Clip the gradients and take the optimizer's step."""
        if self.deepspeed:
            self.wrapped.step()
            # DeepSpeed changes parameters unseen by autograd; whatever is cached from them compares versions.
            for parameter in self.parameters.values():
                torch.autograd.graph.increment_version(parameter)
            return
        if self.config.trainable == FULL and not self.optimizer.state:  # before the first step
            self._check_all_reached()
        if self.config.optimizer.max_grad_norm:
            self.accelerator.clip_grad_norm_(self.parameters.values(), self.config.optimizer.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _check_all_reached(self) -> None:
        """Raise :class:`UserError` where the passes of a step gave some trained parameter no gradient, for which AdamW would
        keep no state, and DDP would wait in vain."""
        missing = [name for name, parameter in self.parameters.items() if parameter.grad is None]
        if missing:
            raise UserError(
                f"`trainable` is {FULL}, and text gives no gradient to {len(missing)} of the model's parameters, such as "
                f"`{missing[0]}`; set `trainable` to compressor or lora, or use a model of another family"
            )

    @contextlib.contextmanager
    def gather_full(self, parameters: Iterable[torch.nn.Parameter], *, write: bool = False) -> Iterator[None]:
        """Context in which sharded parameters are full tensors on every process.

        Args:
            write: keep what the context writes into them, which must be the same on every process.
        """
        if self.stage == 3:
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0 if write else None):
                yield
        else:
            yield
        if write and self.deepspeed:
            # The optimizer works on a copy of its own.
            self.optimizer.optimizer.refresh_fp32_params()

    def broadcast_compressors(self) -> None:
        """Give every process the first one's compressors: parameters, which must be gathered, and buffers.

        Every process computed its own, but a GPU's sums have no fixed order, and rounding can swap two eigenvectors.
        """
        if self.world > 1:
            for module in self.model.modules():
                if isinstance(module, LayerCompressor):
                    for tensor in module.state_dict().values():
                        broadcast(tensor, from_process=0)

    def broadcast_value(self, value: float) -> float:
        """The first process's value, for the same reason as :meth:`broadcast_compressors`."""
        return float(broadcast(torch.tensor(value, dtype=torch.float32, device=self.device), from_process=0))

    def compressor_parameters(self) -> list[torch.nn.Parameter]:
        layers = [module for module in self.model.modules() if isinstance(module, LayerCompressor)]
        return [parameter for layer in layers for parameter in layer.parameters()]

    def full_tensor(self, parameter: torch.nn.Parameter) -> Tensor | None:
        """A full copy of a parameter on the CPU of the first process, None on all others. Every process must call this."""
        with self.gather_full([parameter]):
            return parameter.detach().to("cpu", copy=True).contiguous() if self.main else None

    def moments(self, name: str) -> dict[str, Tensor] | None:
        """Full copies of AdamW's moments of a trained parameter, as :meth:`full_tensor` makes them."""
        parameter = self.parameters[name]
        if self.deepspeed:
            from deepspeed.utils import safe_get_full_optimizer_state

            found = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
        else:
            found = {key: self.optimizer.state[parameter][key] for key in MOMENTS}
        return (
            {key: value.detach().to("cpu", copy=True).contiguous() for key, value in found.items()}
            if self.main
            else None
        )

    def set_moments(self, moments: dict[str, dict[str, Tensor]], step: int) -> None:
        """Fill AdamW's state.

        Args:
            moments: of every trained parameter, as full tensors, the same on every process.
            step: optimizer steps done.
        """
        if not self.deepspeed:
            for name, parameter in self.parameters.items():
                state = {key: value.to(parameter.device) for key, value in moments[name].items()}
                self.optimizer.state[parameter] = {"step": torch.tensor(float(step)), **state}
            return
        from deepspeed.utils import safe_set_full_optimizer_state

        for partition in self._partitions():
            self.optimizer.optimizer.optimizer.state[partition]["step"].fill_(step)
        for name, parameter in self.parameters.items():
            for key, value in moments[name].items():
                safe_set_full_optimizer_state(parameter, value.to(self.device), key)

    def _partitions(self) -> list[Tensor]:
        """The flat tensors that AdamW works on under ZeRO."""
        zero = self.optimizer.optimizer
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups

    def _start_moments(self) -> None:
        """Make AdamW's state under ZeRO before the first step: stages 1 and 2 link it to the parameters once, in the step
        of the first of several groups, when the others' does not exist yet."""
        zero = self.optimizer.optimizer
        for partition in self._partitions():
            zero.optimizer.state[partition] = {
                "step": torch.zeros(()),
                **{key: torch.zeros_like(partition) for key in MOMENTS},
            }
        if self.stage != 3:
            zero._lazy_init_hp_params_optimizer_state()


def _threads(world: int) -> int:
    """One process's share of the cores, unless OMP_NUM_THREADS is set to more than the 1 that `accelerate launch` sets by
    default."""
    if os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return torch.get_num_threads()
    cores = os.cpu_count() or 1
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if not hasattr(os, "sched_getaffinity"):
        return max(1, cores // local_world)
    own = os.sched_getaffinity(0)
    # A launcher that binds each process to some cores has divided them already; a container's cores are shared.
    return len(own) if own != os.sched_getaffinity(os.getppid()) else max(1, len(own) // local_world)


def _never_build_shared_memory() -> None:
    """Without a GPU, DeepSpeed would first compile a faster collective for one machine, for minutes; gloo does the work."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
