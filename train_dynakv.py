"""Train a DynaKV compressor for any stock causal language model.

    accelerate launch train_dynakv.py --config configs/smollm2-demo.yaml
    accelerate launch train_dynakv.py --config configs/smollm2-demo.yaml --resume

Every key of the YAML file can be given on the command line as ``--section.key value``.
"""

from accelerate import PartialState

from lowrank_kv.utils import cli
from lowrank_kv.utils.config import parse_config
from training.config import TrainConfig
from training.loop import train


def main(argv: list[str]) -> None:
    resume = {"flag": "--resume", "action": "store_true", "help": "continue from the newest state under `output`"}
    config, arguments = parse_config(TrainConfig, argv, description=__doc__, extra=[resume])
    checkpoint = train(config, resume=arguments.resume)
    if PartialState().is_main_process:
        print(f"checkpoint: {checkpoint}")


if __name__ == "__main__":
    cli.run(main)
