"""LongBench's data sets: prompt, new tokens, metric, as `datasets.yaml` has them."""

from pathlib import Path

from lowrank_kv.utils.config import build, configuration, option, read_yaml, require, within

from .metrics import SCORES


@configuration
class Dataset:
    """One data set."""

    prompt: str = option(help="with places for {context} and, but for summaries, {input}")
    max_new_tokens: int = option(help="of an answer", unit="tokens")
    metric: str = option(help="how an answer is scored", choices=tuple(SCORES))
    chat: bool = option(True, help="a chat model reads the prompt as a user's turn")
    first_line: bool = option(False, help="only the answer's first line counts")

    def __post_init__(self):
        require(self.prompt.count("{context}") == 1, "prompt", self.prompt, "with one {context}")


def _read() -> dict[str, Dataset]:
    path = Path(__file__).with_name("datasets.yaml")
    found = {}
    for name, values in read_yaml(path).items():
        with within(f"{name}."):
            found[name] = build(Dataset, values, source=path.name)
    return found


DATASETS: dict[str, Dataset] = _read()
