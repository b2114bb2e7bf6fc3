"""Write a trained compressor again in few bytes, to be shared.

    lowrank-kv export --checkpoint runs/mine/checkpoint --output shared/mine
    hf upload NAME shared/mine

A model that was trained from a directory is named by the last part of its path, or as `--base-model` says. Projections are
rounded to eight bits, a scale for each direction. Everything that loads a checkpoint loads the result, which takes a tenth
of the bytes with a plan of bits. A gate's own weights stay as they are, which leaves five eighths.
"""

from dynakv.checkpoint_files import WEIGHTS
from dynakv.export import export_compressor
from lowrank_kv.utils.arguments import ArgumentParser
from lowrank_kv.utils.paths import path_of


def main(argv: list[str]) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "--checkpoint", required=True, type=path_of, metavar="DIR", help="compressor, as training wrote it"
    )
    parser.add_argument(
        "--output", required=True, type=path_of, metavar="DIR", help="to write; an earlier checkpoint there is replaced"
    )
    parser.add_argument(
        "--base-model",
        metavar="HUB_ID",
        help="of the model that the compressor is for [default: the name in the checkpoint, without a path]",
    )
    arguments = parser.parse_args(argv)
    export_compressor(arguments.checkpoint, arguments.output, base_model=arguments.base_model)
    before, after = ((each / WEIGHTS).stat().st_size for each in (arguments.checkpoint, arguments.output))
    print(f"{arguments.output}: {after:,} bytes of {before:,}")
