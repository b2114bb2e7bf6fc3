"""How much of a text training reads compressed, and texts of which it reads nothing so."""

import json

import pytest
import torch
from training_runs import PLANNED, merged, train_here

from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.utils.errors import UserError
from training.data import Batch
from training.read_share import check_read_compressed, share_read_compressed


def block(*lengths: int) -> Batch:
    """A block of documents of these lengths."""
    starts_1T = torch.zeros(1, sum(lengths), dtype=torch.bool)
    starts_1T[0, [sum(lengths[:i]) for i in range(len(lengths))]] = True
    return Batch.from_ids(torch.zeros(1, sum(lengths), dtype=torch.int64), starts_1T)


@pytest.mark.parametrize("lengths", [(20,), (9, 1, 14), (3, 30)])
def test_it_is_the_share_of_pairs(lengths):
    exact = ExactTokens(num_sink_tokens=2, recent_window=3, update_period=4)
    read = seen = 0
    for length in lengths:
        for query in range(length):
            for token in range(query + 1):
                waits_from = (query - 1) // 4 * 4 - 3
                read += 2 <= token < waits_from
                seen += 1
    assert share_read_compressed([block(*lengths), block(*lengths)], exact) == read / seen > 0


def test_short_documents_are_warned_of_and_shorter_ones_refused(recwarn):
    check_read_compressed([block(1024)], ExactTokens(), "it")
    assert not recwarn.list
    with pytest.warns(UserWarning, match="of it queries read 18% of the tokens before them compressed"):
        check_read_compressed([block(60, 60)], ExactTokens(), "it")
    with pytest.raises(
        UserError, match="so that every cache would look like the uncompressed one; .*isolate_documents"
    ):
        check_read_compressed([block(33, 12)], ExactTokens(), "it")


def test_a_run_on_documents_that_it_would_read_exactly_is_refused(training_values, tmp_path):
    path = tmp_path / "turns.jsonl"
    path.write_text("".join(json.dumps({"text": f"a turn of a chat, {i}"}) + "\n" for i in range(400)))
    changes = merged(PLANNED, {"dataset": {"name": str(path)}, "compressor": {"exact_tokens": {"recent_window": 30}}})
    with pytest.raises(UserError, match="of the training text queries read 0%"):
        train_here(training_values, tmp_path / "run", **changes)
    assert not (tmp_path / "run" / "checkpoint").exists()
