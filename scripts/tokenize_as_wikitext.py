"""Write documents as WikiText-2 has them: words apart, rare words gone.

    python scripts/tokenize_as_wikitext.py --name articles.jsonl --output articles-wikitext.jsonl

To a model that has read running text, WikiText-2 looks foreign. Moses' tokenizer has split its words (`1 @,@ 500`,
`well @-@ kept`, `he 's`), headings stand between equals signs, and a word seen less than three times is `<unk>`, which is
every sixteenth (Merity et al. 2016, "Pointer Sentinel Mixture Models", section 4.3). A compressor that is to be
measured on such text may train on some of it: one more entry of `dataset.name`.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, installed or not

from lowrank_kv.utils import cli
from lowrank_kv.utils.atomic_write import write_text
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.text_data import load_documents

UNKNOWN = "<unk>"
WITHIN_A_NUMBER = re.compile(r"(?<=\d)([.,])(?=\d)")
LONGEST_HEADING = 8  # words
ENDS_NO_HEADING = tuple(".,;:!?\"')")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--name", required=True, help="what to convert: a hub id or a .txt, .json, .jsonl or .parquet file"
    )
    parser.add_argument(
        "--output", required=True, type=cli.output_file, metavar="FILE", help="a .jsonl, a document a line"
    )
    parser.add_argument("--text-field", default="text", help="column of the text [default %(default)s]")
    parser.add_argument(
        "--seen", type=int, default=3, help="words seen less often become <unk>; 1 keeps all [default %(default)s]"
    )
    arguments = parser.parse_args(argv)
    try:
        from sacremoses import MosesTokenizer
    except ImportError as error:
        raise UserError(
            "tokenizing as WikiText does needs `sacremoses`; install it with: pip install -c constraints.txt -e '.[demo]'"
        ) from error
    moses = MosesTokenizer(lang="en")

    def split(line: str) -> str:
        return moses.tokenize(line, aggressive_dash_splits=True, return_str=True, escape=False)

    rows = load_documents(arguments.name, subset=None, split="train", text_field=arguments.text_field)
    documents = without_rare_words([as_wikitext(row["text"], split) for row in rows], arguments.seen)
    write_text(arguments.output, "".join(json.dumps({"text": text}) + "\n" for text in documents))
    words = " ".join(documents).split()
    share = words.count(UNKNOWN) / len(words)
    print(f"{arguments.output}: {len(documents):,} documents, {len(words):,} words, {share:.1%} of them {UNKNOWN}")


def as_wikitext(text: str, split: Callable[[str], str]) -> str:
    """A document's lines with their words apart, headings between equals signs."""
    lines = []
    for line in filter(None, map(str.strip, text.splitlines())):
        words = WITHIN_A_NUMBER.sub(r" @\1@ ", split(line))
        lines.append(f" \n = = {words} = = \n \n" if is_heading(line) else f" {words} \n")
    return "".join(lines)


def is_heading(line: str) -> bool:
    """A guess: the marks of headings are gone from a plain text, but they are short and no sentences."""
    return len(line.split()) <= LONGEST_HEADING and line[0].isupper() and not line.endswith(ENDS_NO_HEADING)


def without_rare_words(documents: Iterable[str], seen: int) -> list[str]:
    """The documents, with ``<unk>`` for words that all of them together have less than ``seen`` times."""
    documents = list(documents)
    counts = Counter(word for document in documents for word in document.split())
    return [
        re.sub(r"\S+", lambda found: found[0] if counts[found[0]] >= seen else UNKNOWN, document)
        for document in documents
    ]


if __name__ == "__main__":
    cli.run(main)
