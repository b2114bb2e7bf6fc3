"""The stream of training blocks: its order, its boundaries and what it never shows."""

import gzip
import itertools
import json
import lzma

import pytest
import torch
import zstandard
from byte_tokenizer import byte_tokenizer
from families import BY_NAME, FAMILIES
from methods import calibration_moments, spread_gates
from tokenizers import processors
from torch.utils.data import DataLoader
from training_blocks import LENGTH, first_batches, load

import dynakv
from dynakv import DynaKVConfig
from dynakv.training_config import TrainConfig
from evaluation.texts import TextConfig, read_texts
from lowrank_kv.utils import text_data
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.text_data import CalibrationText, blocks, document_blocks, hold_out, tokens_of
from training.data import Batch, TrainingBlocks
from training.data_sources import heldout_blocks, training_stream


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two data sets of 24 short documents each, every one told by its first word."""
    root = tmp_path_factory.mktemp("texts")
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name}{i:02d} " + "word " * (i % 7)}) for i in range(24)]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return root


def stream_of(texts, *, streaming=False, share=0.0, **options):
    sources = [load(texts / f"{name}.jsonl", streaming=streaming) for name in ("a", "b")]
    if share:
        sources = [hold_out(rows, share)[0] for rows in sources]
    return TrainingBlocks(sources, [1, 2], byte_tokenizer(), LENGTH, seed=3, shuffle_buffer=8, **options)


def first_ids(stream, count):
    return torch.cat([batch.ids_BT for batch in stream.first(count)])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_order_is_the_same_under_any_processes_and_workers(texts, streaming, workers):
    whole = first_ids(stream_of(texts, streaming=streaming), 48)
    # Starting workers takes seconds.
    for world in (1, 2, 3) if not workers else (2,):
        shards = [stream_of(texts, streaming=streaming).shard(batch=2, rank=rank, world=world) for rank in range(world)]
        count = 48 // world // 2
        context = "spawn" if workers else None
        loaders = [
            DataLoader(shard, batch_size=None, num_workers=workers, multiprocessing_context=context) for shard in shards
        ]
        batches = [first_batches(loader, count) for loader in loaders]
        # Step by step, the processes' sequences side by side are the next blocks of the stream.
        seen = [
            torch.stack([batches[rank][n].ids_BT for rank in range(world)], dim=1).flatten(0, 1) for n in range(count)
        ]
        assert torch.equal(torch.cat(seen), whole)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_cursor_goes_on_where_its_batch_ended(texts, streaming):
    stream = stream_of(texts, streaming=streaming)
    batches = first_batches(stream.shard(batch=2), 40)  # several epochs of the second data set
    assert batches[-1].place["cursors"][1][0] >= 1
    for place in (3, 25):
        on = first_batches(stream.shard(batch=2, start=2 * place, places=[batches[place - 1].place]), 5)
        for expected, found in zip(batches[place : place + 5], on, strict=True):
            assert torch.equal(found.ids_BT, expected.ids_BT)
            assert found.place == expected.place
        run_through = first_batches(stream.shard(batch=2, start=2 * place), 1)[0]
        assert torch.equal(run_through.ids_BT, batches[place].ids_BT)


def test_mixtures_follow_their_weights(texts):
    text = [byte_tokenizer().decode(ids) for ids in first_ids(stream_of(texts), 300)]
    of_b = sum("b" in block for block in text) / len(text)
    assert of_b == pytest.approx(2 / 3, abs=0.08)


def test_positions_restart_with_documents(texts):
    tokenizer = byte_tokenizer()
    [batch] = first_batches(stream_of(texts).shard(batch=8), 1)
    for ids, positions, targets in zip(batch.ids_BT, batch.position_BT, batch.targets, strict=True):
        starts = [0] + [t + 1 for t in range(LENGTH - 1) if ids[t] == tokenizer.eos_token_id]
        expected = [t - max(s for s in starts if s <= t) for t in range(LENGTH)]
        assert positions.tolist() == expected
        assert [t for t in range(LENGTH - 1) if targets[t] < 0] == [s - 1 for s in starts[1:]]
    [joined] = first_batches(stream_of(texts, isolate=False).shard(batch=8), 1)
    assert torch.equal(joined.position_BT, torch.arange(LENGTH).expand(8, -1))
    assert torch.equal(joined.targets, joined.ids_BT[:, 1:])


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])  # recurrent ones are refused
def test_a_document_in_a_packed_block_is_a_document_alone(name, backend):
    """With compressors attached, whose rotation must follow the restarted positions, too."""
    model = BY_NAME[name].model()
    if backend == "sdpa" and not model._supports_sdpa:
        pytest.skip("transformers runs this family on eager attention alone")
    model.set_attn_implementation(backend)
    moments = calibration_moments(model)
    dynakv.add_compressors(model, DynaKVConfig(granularity=1))
    dynakv.initialize_from_moments(model, moments)
    spread_gates(model)
    lengths = [7, 1, 12, 4]
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(1, model.config.vocab_size, (2, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    for mode in (False, True):
        model.train(mode)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        with torch.no_grad():
            together = model(input_ids=packed, position_ids=positions, use_cache=False).logits
            pieces = [model(input_ids=piece, use_cache=False).logits for piece in packed.split(lengths, dim=1)]
            leaking = model(input_ids=packed, use_cache=False).logits
        torch.testing.assert_close(together, torch.cat(pieces, dim=1), atol=2e-4, rtol=0)
        assert (leaking - together).abs().max() > 1e-2, "without positions the documents would mix"


def test_held_out_blocks_keep_documents_apart_as_training_does(texts):
    tokenizer = byte_tokenizer()
    ids_NT, starts_NT, _ = document_blocks(load(texts / "a.jsonl"), tokenizer, LENGTH, 8)
    batch = Batch.from_ids(ids_NT, starts_NT)
    for ids, positions in zip(ids_NT, batch.position_BT, strict=True):
        starts = [0] + [t + 1 for t in range(LENGTH - 1) if ids[t] == tokenizer.eos_token_id]
        assert positions.tolist() == [t - max(s for s in starts if s <= t) for t in range(LENGTH)]
    assert torch.equal(Batch.from_ids(ids_NT, None).position_BT, torch.arange(LENGTH).expand(len(ids_NT), -1))


def test_documents_begin_as_prompts_do():
    """With the tokenizer's first token where it adds one (Llama, Gemma, Mistral), and one end."""
    tokenizer = byte_tokenizer()
    plain = tokens_of("ab", tokenizer)
    assert plain[-1] == tokenizer.eos_token_id
    tokenizer.add_special_tokens({"bos_token": "<begin>"})
    begin = tokenizer.bos_token_id
    special = [("<begin>", begin)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<begin> $A", special_tokens=special)
    assert tokens_of("ab", tokenizer) == [begin, *plain]
    special.append(("<end>", tokenizer.eos_token_id))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<begin> $A <end>", special_tokens=special
    )
    assert tokens_of("ab", tokenizer) == [begin, *plain]


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_held_out_is_never_trained_on(texts, streaming):
    tokenizer = byte_tokenizer()
    rows = load(texts / "a.jsonl", streaming=streaming)
    kept, held = ({row["text"].split()[0] for row in side} for side in hold_out(rows, 0.3))
    assert kept | held == {f"a{i:02d}" for i in range(24)}
    assert not kept & held
    assert 2 <= len(held) <= 13
    stream = stream_of(texts, streaming=streaming, share=0.3)
    seen = "".join(tokenizer.decode(ids) for ids in first_ids(stream, 120))
    assert all(word in seen for word in kept)
    assert not any(word in seen for word in held)


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_measured_and_what_is_calibrated_on_share_no_document(texts, streaming):
    tokenizer, path = byte_tokenizer(), str(texts / "a.jsonl")
    kept, held = ({row["text"].split()[0] for row in side} for side in hold_out(load(texts / "a.jsonl"), 0.3))
    options = {"heldout_share": 0.3, "streaming": streaming}
    calibrated = CalibrationText(name=[path], tokens=100_000, length=16, **options).blocks(tokenizer)
    measured = read_texts([TextConfig(label="text", name=path, **options)], tokenizer, 16, 100_000)["text"].ids_NT
    for blocks_NT, inside, outside in ((calibrated, kept, held), (measured, held, kept)):
        seen = tokenizer.decode(blocks_NT.flatten().tolist())
        assert sum(word in seen for word in inside) >= len(inside) - 1, "all but what the last block's end cuts off"
        assert not any(word in seen for word in outside)


def test_streamed_calibration_takes_the_first_blocks(texts):
    tokenizer, options = byte_tokenizer(), {"name": [str(texts / "a.jsonl")], "tokens": 64, "length": 16}
    streamed = CalibrationText(**options, streaming=True).blocks(tokenizer)
    everything = CalibrationText(**options | {"tokens": 100_000}).blocks(tokenizer)
    assert torch.equal(streamed, everything[:4])
    assert not torch.equal(CalibrationText(**options).blocks(tokenizer), streamed), (
        "of the whole text, at even distances"
    )


def test_files_of_every_kind_are_read(tmp_path):
    lines = "".join(json.dumps({"body": text}) + "\n" for text in ("one", " ", "two"))
    (tmp_path / "plain.jsonl").write_text(lines)
    with gzip.open(tmp_path / "packed.jsonl.gz", "wt") as file:
        file.write(lines)
    with lzma.open(tmp_path / "packed.json.xz", "wt") as file:
        file.write(lines)
    (tmp_path / "packed.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    load(tmp_path / "plain.jsonl", text_field="body").rename_column("text", "body").to_parquet(
        tmp_path / "rows.parquet"
    )
    for name in ("plain.jsonl", "packed.jsonl.gz", "packed.json.xz", "packed.jsonl.zst", "rows.parquet"):
        for streaming in (False, True):
            assert [row["text"] for row in load(tmp_path / name, text_field="body", streaming=streaming)] == [
                "one",
                "two",
            ]
    (tmp_path / "book.txt").write_text("one\n\ntwo\n")
    assert [row["text"] for row in load(tmp_path / "book.txt")] == ["one\n\ntwo\n"]
    (tmp_path / "plain-2.jsonl").write_text(lines)
    assert len(load(tmp_path / "plain*.jsonl", text_field="body")) == 4


@pytest.mark.parametrize("streaming", [False, True])
def test_damaged_files_are_named(tmp_path, streaming):
    """Also those that are found to be so only when they are read on."""
    lines = "".join(json.dumps({"text": f"line {i} " * 40}) + "\n" for i in range(3000)).encode()
    damaged = {
        "short.jsonl.gz": gzip.compress(lines)[:-2000],
        "short.jsonl.xz": lzma.compress(lines)[:-300],
        "plain.jsonl.xz": lines,
        "plain.jsonl.zst": lines,
        "latin.jsonl": lines + '{"text": "caf\xe9"}\n'.encode("latin-1"),
        "open.jsonl": lines * 30 + b'{"text": "x"\n',
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"cannot (load|read) the data set `.*{name}`: .*; mend the file"):
            document_blocks(hold_out(load(tmp_path / name, streaming=streaming), 0.1)[1], byte_tokenizer(), 10**7, 1)


def test_settings_of_hub_data_sets_are_refused_with_files(texts, tmp_path):
    path = str(texts / "a.jsonl")
    for key, value in (("split", "validation"), ("subset", "en")):
        with pytest.raises(UserError, match=f"`texts.{key}` must be left out of files .*a.jsonl"):
            read_texts([TextConfig(label="a", name=path, **{key: value})], byte_tokenizer(), 16, 1)
        with pytest.raises(UserError, match=f"`{key}` must be left out of files"):
            CalibrationText(name=[path], tokens=16, **{key: value}).blocks(byte_tokenizer())
    config = build(TrainConfig, {"model": "m", "output": str(tmp_path), "dataset": {"name": path, "split": "test"}})
    with pytest.raises(UserError, match="`dataset.split` must be left out of files"):
        training_stream(config, byte_tokenizer())
    heldout = {"name": path, "heldout": path, "heldout_subset": "en"}
    with pytest.raises(UserError, match="`dataset.heldout_subset` must be left out of files"):
        heldout_blocks(
            build(TrainConfig, {"model": "m", "output": str(tmp_path), "dataset": heldout}), byte_tokenizer()
        )


def test_each_data_set_is_loaded_with_its_own_subset(texts, monkeypatch):
    rows, asked = load(texts / "a.jsonl"), []
    monkeypatch.setattr(
        "training.data_sources.load_documents",
        lambda name, **options: asked.append((name, options["subset"])) or rows,
    )
    dataset = {"name": ["org/a", "org/b"], "subset": [None, "en"], "sequence_length": 16}
    training_stream(build(TrainConfig, {"model": "m", "dataset": dataset}), byte_tokenizer())
    assert asked == [("org/a", None), ("org/b", "en")]


def test_an_optional_text_may_be_a_pattern(texts, capsys):
    found = [TextConfig(label="all", name=str(texts / "*.jsonl"), optional=True)]
    none = TextConfig(label="none", name=str(texts / "*.txt"), optional=True)
    assert list(read_texts([*found, none], byte_tokenizer(), 16, 1)) == ["all"]
    assert "leaving out `none`" in capsys.readouterr().out


def test_blocks_of_a_stream_are_its_first(texts):
    rows = load(texts / "a.jsonl", streaming=True)
    first = blocks(rows, byte_tokenizer(), 16, 3)
    assert torch.equal(first.flatten(), torch.tensor(list(itertools.islice(_tokens(rows), 48))))


def _tokens(rows):
    for row in rows:
        yield from byte_tokenizer()(row["text"])["input_ids"]
        yield 0


def test_a_share_that_leaves_nothing_is_an_error(texts, tmp_path):
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "only"}) + "\n")
    rows = hold_out(load(tmp_path / "one.jsonl"), 1.0)[0]
    with pytest.raises(UserError, match="no document to train on; lower `dataset.heldout_share`"):
        TrainingBlocks([rows], [1], byte_tokenizer(), 8, seed=0).first(1)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_of_a_long_text_only_what_is_needed_is_tokenized(texts, count, monkeypatch):
    rows = load(texts / "*.jsonl")
    tokenizer, read = byte_tokenizer(), []
    monkeypatch.setattr(text_data, "_TOKENIZED_WHOLE", 100)
    monkeypatch.setattr(text_data, "_TIMES_NEEDED", 0)
    monkeypatch.setattr(text_data, "tokens_of", lambda text, _: read.append(text) or tokens_of(text, tokenizer))
    ids_NT, starts_NT, _ = document_blocks(rows, tokenizer, 16, count)
    assert ids_NT.shape == starts_NT.shape == (count, 16)
    assert bool(starts_NT[:, 0].all()), "each block begins a document"
    assert len(read) == len(set(read)) < len(rows)
    for ids, starts in zip(ids_NT, starts_NT, strict=True):
        expected = [t for t in range(16) if t == 0 or ids[t - 1] == tokenizer.eos_token_id]
        assert starts.nonzero().flatten().tolist() == expected
    if count == 8:
        first_words = [tokenizer.decode(ids.tolist())[:1] for ids in ids_NT]
        assert first_words == sorted(first_words)
        assert set(first_words) == {"a", "b"}, "from all of the text"


def test_a_long_text_of_few_documents_gives_as_many_blocks_as_there_are(tmp_path, monkeypatch):
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"text": word * 30}) + "\n" for word in "ab"))
    monkeypatch.setattr(text_data, "_TOKENIZED_WHOLE", 10)
    monkeypatch.setattr(text_data, "_TIMES_NEEDED", 0)
    ids_NT = blocks(load(tmp_path / "long.jsonl"), byte_tokenizer(), 16, 3)
    assert ids_NT.shape == (3, 16), "documents that are longer than a block give several"
    with pytest.raises(UserError, match="too few for one block of 100; give more text, or ask for shorter blocks"):
        document_blocks(load(tmp_path / "long.jsonl"), byte_tokenizer(), 100, 1)
