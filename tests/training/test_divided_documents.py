"""Processes and workers that each read documents of their own."""

import collections
import itertools
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from training_blocks import LENGTH, first_batches, load
from training_runs import launch, losses, train_here

from dynakv.training_config import TrainConfig
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.text_data import hold_out
from training.data import TrainingBlocks
from training.document_order import Share, ShareOfDocuments
from training.stream_places import StreamPlaces

FILES, EACH = 4, 15


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Four files of documents of one data set, and one of another, every document told by its first word."""
    root = tmp_path_factory.mktemp("shared")
    for name, count in [*((f"a{i}", EACH) for i in range(FILES)), ("b", 24)]:
        lines = [json.dumps({"text": f"{name}-{i:02d} " + "word " * (i % 7)}) for i in range(count)]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return root


def sources(texts, streaming):
    return [load(texts / name, streaming=streaming) for name in ("a*.jsonl", "b.jsonl")]


def stream_of(texts, streaming, **shard):
    found = TrainingBlocks(
        sources(texts, streaming), [2, 1], byte_tokenizer(), LENGTH, seed=3, shuffle_buffer=8, by_documents=True
    )
    return found.shard(**shard)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_shares_are_disjoint_and_together_everything(texts, streaming, count):
    rows = load(texts / "a*.jsonl", streaming=streaming)
    for epoch in (0, 1):
        orders = [ShareOfDocuments(rows, 7, 8, Share(index, count)) for index in range(count)]
        read = [list(order.texts(epoch, 0)) for order in orders]
        everything = collections.Counter(itertools.chain(*read))
        assert everything == collections.Counter(row["text"] for row in rows)
        assert max(map(len, read)) - min(map(len, read)) <= EACH
        again = [list(order.texts(epoch, 0)) for order in orders]
        assert again == read, "the order depends on the seed alone"
    first, second = (list(ShareOfDocuments(rows, 7, 8, Share()).texts(epoch, 0)) for epoch in (0, 1))
    assert first != second


@pytest.mark.parametrize("streaming", [False, True])
def test_an_order_goes_on_from_any_document_and_reads_no_more_than_a_chunk_anew(texts, streaming):
    rows = load(texts / "a*.jsonl", streaming=streaming)
    share = Share(1, 3)
    whole = list(ShareOfDocuments(rows, 7, 4, share).texts(1, 0))
    for place in range(len(whole)):
        order = ShareOfDocuments(rows, 7, 4, share)
        texts_read = order.texts(1, 0)
        before = [next(texts_read) for _ in range(place + 1)]
        state = json.loads(json.dumps(order.state()))
        going_on = ShareOfDocuments(rows, 7, 4, share, state)
        assert before + list(going_on.texts(1, place + 1)) == whole
        if streaming:
            assert place + 1 - state["first"] <= 4


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_reader_goes_on_where_it_was(texts, streaming, workers):
    """In one process, each worker's stream by itself; epochs end on the way."""
    for rank in (0, 1):
        shard = {"batch": 2, "rank": rank, "world": 2, "workers": workers}
        stream = stream_of(texts, streaming, **shard)
        iterators = [stream._by_documents(worker) for worker in range(workers)]
        batches = [next(iterators[number % workers]) for number in range(24)]
        for done in (5, 12):
            places = [None] * workers
            for number in range(done):
                places[number % workers] = json.loads(json.dumps(batches[number].place))
            on = stream_of(texts, streaming, **shard, start=done * 2 * 2, places=places)
            later = [on._by_documents(worker) for worker in range(workers)]
            for number in range(done, 24):
                found = next(later[(number - done) % workers])
                assert torch.equal(found.ids_BT, batches[number].ids_BT)
                assert found.place["cursors"] == batches[number].place["cursors"]


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_loaders_workers_read_what_they_would_alone(texts, streaming):
    shard = {"batch": 2, "rank": 1, "world": 2, "workers": 2}
    stream = stream_of(texts, streaming, **shard)
    alone = [stream._by_documents(worker) for worker in range(2)]
    loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    for number, found in enumerate(first_batches(loader, 8)):
        expected = next(alone[number % 2])
        assert torch.equal(found.ids_BT, expected.ids_BT)
        assert found.place == expected.place


def test_nobody_tokenizes_what_another_reads(texts):
    tokenizer, counted = byte_tokenizer(), collections.Counter()

    class Counting:
        eos_token_id = tokenizer.eos_token_id

        def __call__(self, text, **options):
            counted[text] += 1
            return tokenizer(text, **options)

    rows = [load(texts / "a*.jsonl", streaming=True)]
    for rank in range(4):
        stream = TrainingBlocks(rows, [1], Counting(), LENGTH, seed=3, shuffle_buffer=8, by_documents=True)
        [reader] = stream._readers(Share(rank, 4), None)
        while reader.document < EACH:  # a share is a file here
            reader.next_block(1)
    assert len(counted) == FILES * EACH
    assert set(counted.values()) == {1}


def test_a_share_of_nothing_says_so(texts, tmp_path):
    rows = load(texts / "b.jsonl")
    stream = TrainingBlocks([rows], [1], byte_tokenizer(), LENGTH, seed=0, by_documents=True)
    with pytest.raises(UserError, match="fewer documents than there are processes and workers.*divided_by: blocks"):
        stream.shard(rank=29, world=30).first(1)
    with pytest.raises(UserError, match="the data set `.*b.jsonl`, of `dataset.name`, has no document to train on"):
        TrainingBlocks([hold_out(rows, 1.0)[0]], [1], byte_tokenizer(), 8, seed=0, by_documents=True).first(1)


def test_rounds_are_those_of_whoever_read_most():
    """One process has the short file, and says nothing of the other's."""
    config = build(TrainConfig, {"model": "m", "dataset": {"name": ["a", "b"], "divided_by": "documents"}})
    engine = SimpleNamespace(config=config, world=2, accelerator=SimpleNamespace(process_index=0))
    first, second = {"cursors": [(0, 5, 1), (0, 2, 9)]}, {"cursors": [(0, 3, 1), (6, 1, 0)]}
    places = StreamPlaces(engine, [[first], [second]])
    assert places.rounds() == [1, 1]
    assert places.rounds_of_all() == [1, 7]


def state_of(output):
    return load_file(output / "states/step-000008/optimizer.safetensors")


def test_a_run_resumes_exactly(training_values, tmp_path):
    changes = {"dataset": {"divided_by": "documents", "streaming": True, "shuffle_buffer": 5}}
    train_here(training_values, tmp_path / "whole", **changes)
    train_here(training_values, tmp_path / "parts", **changes)
    whole = losses(tmp_path / "whole")
    (tmp_path / "parts/states/step-000008/progress.json").write_text("damaged")  # it goes on from step 4
    shutil.rmtree(tmp_path / "parts/checkpoint")
    train_here(training_values, tmp_path / "parts", resume=True, **changes)
    assert losses(tmp_path / "parts") == whole
    found, expected = state_of(tmp_path / "parts"), state_of(tmp_path / "whole")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_two_processes_repeat_and_go_on_only_as_two(training_values, tmp_path):
    changes = {"dataset": {"divided_by": "documents"}, "optimizer": {"steps": 8, "batch_size": 1}}
    for name in ("one", "two"):
        launch("ddp", 2, training_values, tmp_path / name, **changes)
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    alone = {"dataset": {"divided_by": "documents"}, "optimizer": {"steps": 8, "batch_size": 2}}
    with pytest.raises(UserError, match="2 processes × 1 readers, and now it is 1 × 1"):
        train_here(training_values, tmp_path / "one", resume=True, **alone)


def test_what_a_worker_meets_is_told_in_one_paragraph(training_values, tmp_path):
    """With documents for the first of two readers alone. Torch would add the worker's traceback to the message."""
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"text": "word " * 500}) + "\n")
    dataset = {"name": str(path), "divided_by": "documents", "workers": 2}
    with pytest.raises(
        UserError, match="^the data set `.*one.jsonl`, of `dataset.name`, has no document to train"
    ) as told:
        train_here(training_values, tmp_path / "run", dataset=dataset, optimizer={"steps": 4})
    assert "Traceback" not in str(told.value)
