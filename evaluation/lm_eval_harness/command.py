"""lm-evaluation-harness's own command, `lm-eval`, that knows the model `lowrank-kv`; all its other options are the same.

    lowrank-kv lm-eval --model lowrank-kv --tasks arc_easy --num_fewshot 16 \\
        --model_args pretrained=MODEL,preset=tokenwise-mixed,rates=0.1,bases=bases/mine

In --model_args, `preset` with `rates` or `bytes` and `bases`, or `checkpoint`, or `peer` name the cache, as an entry of
`methods` does in `lowrank-kv compare --help`; `dtype` and `device` are the model's. The harness fetches its tasks from the
hub. A checkout has some that read local files: --tasks arc_easy_local --include_path configs/lm_eval.
"""

import importlib
import sys
import traceback

from lowrank_kv.utils.errors import UserError, not_installed

# Of the harness, what reads the arguments it is given. What its other modules raise is of a task, or a defect.
_READ_ARGUMENTS = ("lm_eval._cli", "lm_eval.config.evaluate_config", "lm_eval.evaluator", "lm_eval.api.registry")


def main(argv: list[str]) -> None:
    if not {"-h", "--help"}.isdisjoint(argv):
        print(__doc__)  # the harness describes its own options, and not this model's
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise not_installed("this command", "lm-eval", extra="lm-eval") from error
    importlib.import_module(".model", __package__)  # it enters itself into the harness's registry
    sys.argv = ["lm-eval", *argv]
    try:
        cli_evaluate()
    except (ValueError, FileNotFoundError) as error:
        if not _is_of_arguments(error):
            raise
        raise UserError(
            f"lm-evaluation-harness refuses its arguments: {str(error).rstrip('.')}; `lowrank-kv lm-eval run --help` lists "
            f"them, and `lowrank-kv lm-eval ls tasks` the tasks, to which `--include_path DIR` adds yours"
        ) from error


def _is_of_arguments(error: Exception) -> bool:
    """Whether the harness raised this itself where it reads arguments."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return innermost.f_globals["__name__"].startswith(_READ_ARGUMENTS)
