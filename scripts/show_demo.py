"""The end of `make demo`: a page with what it measured, and one prompt continued from the full and the compressed cache.

    python scripts/show_demo.py --checkpoint runs/demo/checkpoint --comparison runs/demo/comparison \\
        --text ~/.cache/lowrank-kv/text/addresses-heldout.jsonl --output runs/demo
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, installed or not

import dynakv
from dynakv.checkpoint_files import read_config
from evaluation.page.demo import continuation, demo_page
from evaluation.wide_products import load_measured
from lowrank_kv.hf.loading import DTYPES, load_tokenizer
from lowrank_kv.utils import cli, paths, run_record
from lowrank_kv.utils.atomic_write import write_text
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.text_data import load_documents


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, type=paths.path_of, metavar="DIR", help="the compressor")
    parser.add_argument(
        "--comparison", required=True, type=paths.path_of, metavar="DIR", help="output of lowrank-kv compare"
    )
    parser.add_argument("--text", required=True, metavar="FILE", help="whose first document begins the prompt")
    parser.add_argument("--output", required=True, type=cli.output_directory, metavar="DIR", help="of the page")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the model [default %(default)s]")
    parser.add_argument("--prompt-tokens", type=int, default=1024, metavar="N", help="[default %(default)s]")
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="to write [default %(default)s]")
    arguments = parser.parse_args(argv)

    records = sorted((arguments.comparison / "quality").glob("*.json"))
    if not records:
        raise UserError(f"`--comparison` {arguments.comparison} holds no record; run `lowrank-kv compare` first")
    record = run_record.load(records[-1])
    name = read_config(arguments.checkpoint).base_model
    model, tokenizer = load_measured(name, dtype=arguments.dtype), load_tokenizer(name)
    rows = load_documents(paths.expand(arguments.text), subset=None, split="train", text_field="text")
    text = next(iter(rows))["text"]
    ids_1T = tokenizer(text, return_tensors="pt")["input_ids"][:, : arguments.prompt_tokens].to(model.device)
    full = continuation(model, tokenizer, ids_1T, label="full cache", tokens=arguments.tokens)
    dynakv.attach(model, arguments.checkpoint)
    ours = continuation(model, tokenizer, ids_1T, label="compressed cache", tokens=arguments.tokens)
    commands = [
        f"lowrank-kv generate --checkpoint {arguments.checkpoint} --prompt @README.md",
        f"lowrank-kv inspect {arguments.checkpoint}",
        "lowrank-kv train --config configs/smollm2-demo.yaml --output runs/mine --dataset.name YOUR_TEXT.jsonl "
        "--dataset.weights null",
    ]
    path, prompt = arguments.output / "index.html", tokenizer.decode(ids_1T[0])
    write_text(path, demo_page(record, prompt, [full, ours], commands))
    for each in (full, ours):
        print(
            f"\n{each.label}, {each.nbytes:,} bytes ({each.nbytes / full.nbytes:.1%}):\n  {' '.join(each.text.split())}"
        )
    print(f"\npage: {path}\n\nnext:")
    print("\n".join(f"  {command}" for command in commands))


if __name__ == "__main__":
    cli.run(main)
