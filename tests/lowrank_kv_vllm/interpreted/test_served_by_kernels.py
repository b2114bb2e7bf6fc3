"""Triton's kernels in vLLM, interpreted: the texts of `generate()`, which runs compiled code."""

import contextlib

import pytest
from methods import dynakv_model, tiny_model
from served_engines import BLOCK, Files, greedy, prompt_of, served, serving, texts, with_compressor

import dynakv
from dynakv import DynaKVCache
from lowrank_kv.ops.arena_append.triton import PageWriter
from lowrank_kv.ops.arena_attention.page_reader import PageReader
from lowrank_kv.ops.native.pages import Pages
from lowrank_kv.ops.triton.availability import SWITCH, has_kernels

# Few of all, for the interpreter is slow.
NEW, READ = 3, 32  # tokens of an answer, and those that a step reads
PROMPTS = [prompt_of(length, length) for length in (40, 3, 5)]  # the first in two steps, the others with its second


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    """A checkpoint with gates that says what they keep."""
    directory = tmp_path_factory.mktemp("gated") / "checkpoint"
    model = tiny_model(head_dim=32, vocab_size=257)
    dynakv_model(model, 0.4, granularity=4)
    rates = {side: [0.4] * model.config.num_hidden_layers for side in ("keys", "values")}
    dynakv.save_compressor(model, directory, summary={"heldout": {"text": {"layer_rates": rates}}})
    return directory


@pytest.fixture
def called(monkeypatch) -> set[str]:
    """Which kernels were called, while compiled pages cannot be made."""
    found = set()

    def note(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def noting(*arguments, **options):
            found.add(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, noting)

    note(PageWriter, "write")
    for name in ("attend", "rows", "sinks"):
        note(PageReader, name)
    monkeypatch.delattr(Pages, "__init__")
    return found


@contextlib.contextmanager
def no_kernels():
    """For `generate()`, whose caches would take those that are interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "0")
        has_kernels.cache_clear()
        yield
    has_kernels.cache_clear()


def generated(files: Files, settings: dict) -> list[list[int]]:
    if "checkpoint" not in settings:
        return [files.generated(prompt, NEW, chunk=READ, **settings) for prompt in PROMPTS]
    model = with_compressor(settings["checkpoint"])
    return [greedy(model, DynaKVCache.from_model(model), prompt, NEW, READ) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["classes", "plan", "gates"])
def test_chunks_batches_and_prefixes_say_what_generate_says(files, gated, called, kind):
    settings = {
        "classes": files.settings,
        "plan": {**files.settings, "preset": "static-mixed", "page_margin": None},
        "gates": {"checkpoint": str(gated), "page_margin": 5.0},
    }[kind]
    with no_kernels():
        expected = generated(files, settings)
    with serving(files, settings, max_num_batched_tokens=READ, max_num_seqs=4) as engine:
        assert texts(served(engine, PROMPTS, NEW)) == expected
        assert called == {"write", "attend", "rows"} | ({"sinks"} if kind != "gates" else set())  # gates keep none
        [again] = served(engine, PROMPTS[:1], NEW)
    assert again.num_cached_tokens == len(PROMPTS[0]) // BLOCK * BLOCK == READ
    assert texts([again]) == expected[:1]
