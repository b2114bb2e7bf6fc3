"""Train a DynaKV compressor for any stock causal language model.

    lowrank-kv train --model MODEL --dtype auto --dataset.name TEXT.jsonl --output runs/mine
    lowrank-kv train --config train.yaml --resume
    accelerate launch -m lowrank_kv_cli train --config train.yaml    # several processes: DDP, DeepSpeed ZeRO
    accelerate launch train_dynakv.py --config train.yaml            # the same, in a checkout
    lowrank-kv train --config train.yaml --plan --gpus 8             # memory of each engine; trains nothing

Every key of the YAML file can be given on the command line as ``--section.key value``. Writes OUTPUT/checkpoint, which
`lowrank-kv generate`, `compare` and `inspect` read.
"""

from dynakv.training_config import TrainConfig
from lowrank_kv.utils.config import parse_config

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
    gpus = {"flag": "--gpus", "type": int, "default": 8, "metavar": "N", "help": "of a plan [default: 8]"}
    memory = {
        "flag": "--gpu_memory",
        "type": float,
        "default": 80.0,
        "metavar": "GB",
        "help": "of each GPU of a plan [default: 80]",
    }
    config, arguments = parse_config(TrainConfig, argv, description=__doc__, extra=[resume, plan, gpus, memory])
    if arguments.plan:
        print(report(config, gpus=arguments.gpus, gpu_memory=arguments.gpu_memory))
        return
    checkpoint = train(config, resume=arguments.resume)
    if is_first_process():
        print(f"checkpoint: {checkpoint}")
        print(f"next: lowrank-kv generate --checkpoint {checkpoint} --dtype {config.dtype} --prompt @LONG_PROMPT.txt")
    end_process()
