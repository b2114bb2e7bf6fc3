"""Train a DynaKV compressor for any stock causal language model.

    lowrank-kv train --model MODEL --dataset.name TEXT --output runs/mine
    lowrank-kv train --config train.yaml --resume
    accelerate launch -m lowrank_kv_cli train --config train.yaml    # several processes: DDP, DeepSpeed ZeRO
    accelerate launch train_dynakv.py --config train.yaml            # the same, in a checkout

Every key of the YAML file can be given on the command line as ``--section.key value``. Writes OUTPUT/checkpoint, which
`lowrank-kv generate`, `compare` and `inspect` read.
"""

from accelerate import PartialState

from lowrank_kv.utils.config import parse_config

from .config import TrainConfig
from .loop import train


def main(argv: list[str]) -> None:
    resume = {"flag": "--resume", "action": "store_true", "help": "continue from the newest state under `output`"}
    config, arguments = parse_config(TrainConfig, argv, description=__doc__, extra=[resume])
    checkpoint = train(config, resume=arguments.resume)
    if PartialState().is_main_process:
        print(f"checkpoint: {checkpoint}")
