"""lm-evaluation-harness's own command, `lm-eval`, that knows the model `lowrank-kv`; all its other options are the same.

    lowrank-kv lm-eval --model lowrank-kv --tasks arc_easy_local --include_path configs/lm_eval --num_fewshot 16 \\
        --model_args pretrained=MODEL,preset=tokenwise-mixed,rates=0.1,bases=runs/demo-bases
"""

import importlib
import sys

from lowrank_kv.utils.errors import UserError


def main(argv: list[str]) -> None:
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise UserError("this needs lm-eval; pip install -c constraints.txt 'lowrank-kv[lm-eval]'") from error

    importlib.import_module(".model", __package__)  # it enters itself into the harness's registry
    sys.argv = ["lm-eval", *argv]
    cli_evaluate()
