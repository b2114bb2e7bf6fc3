"""Start a command of this project in several processes, as `accelerate launch` does, with errors and ends of one line.

    lowrank-kv launch --multi_gpu --num_processes 8 -m lowrank_kv_cli train --config train.yaml
    lowrank-kv launch --config_file accelerate.yaml -m lowrank_kv_cli train --config train.yaml

`accelerate config --config_file accelerate.yaml` asks and writes such a file; a checkout has some in configs/accelerate/.
On CPUs, ACCELERATE_USE_CPU=true in front of the first command joins its processes.
The arguments are those of `accelerate launch`. A mistake in the command, or Ctrl-C, shows what the command says of it and
no traceback of the launcher.
"""

import argparse
import logging
import subprocess
import sys

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from lowrank_kv.utils.cli import INTERRUPTED, MISTAKE
from lowrank_kv.utils.errors import UserError


def main(argv: list[str]) -> None:
    parser = launch_command_parser()
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    # Written out, it is longer than a screen, and stands in front of every error.
    parser.usage = "%(prog)s [--config_file FILE] [--KEY VALUE ...] -m lowrank_kv_cli COMMAND ..."
    parser.prog, parser.description = sys.argv[0], __doc__
    arguments = parser.parse_args(argv)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # says what is said below, at length
    try:
        launch_command(arguments)
    except subprocess.CalledProcessError as error:  # of one process
        _end(error.returncode)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != MISTAKE:
            print(
                f"process {rank} ended with status {failure.exitcode}, and the launcher ended the others",
                file=sys.stderr,
            )
        _end(failure.exitcode)
    except SignalException as error:
        _end(-error.sigval)
    except (FileNotFoundError, ValueError) as error:  # of the launcher itself: commands are other processes
        raise UserError(f"accelerate cannot launch so: {' '.join(str(error).split())}") from error
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)  # and the command has said that it was interrupted


def _end(status: int) -> None:
    """End as a process did that has said what is wrong; a signal's number is negative."""
    sys.exit(status if status > 0 else 128 - status)
