"""Train a DynaKV compressor for any stock causal language model.

    lowrank-kv train --model MODEL --dataset.name TEXT.jsonl --output runs/mine
    lowrank-kv train --config train.yaml --resume
    accelerate launch -m lowrank_kv_cli train --config train.yaml    # several processes: DDP, DeepSpeed ZeRO
    accelerate launch train_dynakv.py --config train.yaml            # the same, in a checkout
    lowrank-kv train --config train.yaml --plan --gpus 8             # memory of each engine; trains nothing

Every key of the YAML file can be given on the command line as ``--section.key value``. Writes OUTPUT/checkpoint, which
`lowrank-kv generate`, `compare` and `inspect` read.
"""

from dynakv.training_config import TrainConfig
from lowrank_kv.hf.loading import dtype_words
from lowrank_kv.utils.config import parse_config
from lowrank_kv.utils.errors import UserError

from .engine import end_process, is_first_process
from .loop import train
from .memory_plan import report


def main(argv: list[str]) -> None:
    resume = {"flag": "--resume", "action": "store_true", "help": "continue from the newest state under `output`"}
    plan = {
        "flag": "--plan",
        "action": "store_true",
        "help": "print what each engine needs of a GPU, and train nothing",
    }
    gpus = {"flag": "--gpus", "type": int, "metavar": "N", "help": "of a plan [default: 8]"}
    memory = {
        "flag": "--gpu_memory",
        "type": float,
        "metavar": "GB",
        "help": "of each GPU of a plan [default: 80]",
    }
    config, arguments = parse_config(TrainConfig, argv, description=__doc__, extra=[resume, plan, gpus, memory])
    of_plan = {key: value for key in ("gpus", "gpu_memory") if (value := getattr(arguments, key)) is not None}
    if arguments.plan:
        print(report(config, **{"gpus": 8, "gpu_memory": 80.0, **of_plan}))
        return
    if of_plan:
        raise UserError(
            f"`--{next(iter(of_plan))}` is of `--plan`, which trains nothing; to train on several GPUs: `lowrank-kv launch "
            f"--multi_gpu --num_processes 8 -m lowrank_kv_cli train …`"
        )
    checkpoint = train(config, resume=arguments.resume)
    if is_first_process():
        print(f"checkpoint: {checkpoint}")
        print(
            f"next: lowrank-kv generate --checkpoint {checkpoint}{dtype_words(config.dtype)} --prompt @LONG_PROMPT.txt"
        )
    end_process()
