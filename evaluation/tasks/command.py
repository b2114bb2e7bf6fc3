"""Answer benchmarks of long prompts through compressed caches, every method and budget on every task.

    lowrank-kv tasks --config tasks.yaml --output runs/tasks

with, for example, in tasks.yaml:

    model: MODEL
    bases: bases/mine                                 # of `lowrank-kv calibrate --read_gradients true`
    tasks:
      - {task: lookup, items: 100, questions: 10}
      - {task: niah_single_1, length: [2048], items: 20}
    methods:
      - {preset: tokenwise-mixed, rates: [0.3, 0.2]}
      - {peer: rotated-int4}

RULER's tasks, LongBench, multiple choice with few shots, key-value lookup, problems with boxed answers, long
decoding. Each answer is kept in `cells.jsonl` of the output directory: a second start with the same output answers
only what is missing. The run's record goes into `quality/` of it, anew at least every minute, with 95 % intervals.
"""

from lowrank_kv.utils.config import parse_config

from ..output import output_argument, write_while_measuring
from .rows import markdown
from .run import TasksConfig, run_tasks


def main(argv: list[str]) -> None:
    config, arguments = parse_config(
        TasksConfig, argv, description=__doc__, extra=[output_argument("of the cells and the records")]
    )
    record, path = write_while_measuring(run_tasks(config, arguments.output), arguments.output)
    print(markdown(record))
    print(f"record: {path}")
