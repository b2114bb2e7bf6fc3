"""lm-evaluation-harness through a cache: as an object, by its command, and beside what the model says in one pass."""

import itertools
import json
import types
from pathlib import Path

import lm_eval
import pytest
import torch
from byte_tokenizer import byte_tokenizer
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from methods import calibration_of, tiny_model
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from evaluation.lm_eval_harness.model import CompressedLM
from evaluation.reading import full_cache
from evaluation.tasks.reader import Reader
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig, make_plan

CONFIGS = Path(__file__).parents[2] / "configs/lm_eval"


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=257, max_position_embeddings=1024, eos_token_id=0)


def compressed(model, rate, **options):
    plan = make_plan(calibration_of(model), OjaKVConfig.preset("static-joint-pf", rate=rate))
    return CompressedLM(model=model, tokenizer=byte_tokenizer(), make_cache=lambda: OjaKVCache(model, plan), **options)


def uncompressed(model, **options):
    return CompressedLM(model=model, tokenizer=byte_tokenizer(), make_cache=lambda: full_cache(model), **options)


def requests(kind, *arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=i, metadata=("task", i, 1))
        for i, each in enumerate(arguments)
    ]


def in_one_pass(model, context, continuation):
    ids = byte_tokenizer()(context + continuation, return_tensors="pt").input_ids
    with torch.no_grad():
        log_TV = model(ids).logits[0].log_softmax(-1)
    begin = ids.shape[1] - len(continuation)
    chosen_T = log_TV[begin - 1 : -1].gather(-1, ids[0, begin:, None])
    return float(chosen_T.sum())


EXAMPLES = "Question: one?\nAnswer: two\n\nQuestion: three and four and five?\nAnswer: six\n\n"


@pytest.mark.parametrize("split", ["\n\n", None])
def test_log_likelihoods_are_those_of_one_pass_where_nothing_is_compressed(model, split):
    pairs = [(f"{EXAMPLES}Question: {i}?\nAnswer:", f" {word}") for i in range(2) for word in ("yes", "no, never")]
    pairs.append(("", "a beginning"))
    found = uncompressed(model, split=split).loglikelihood(requests("loglikelihood", *pairs))
    for (context, continuation), (value, _) in zip(pairs[:-1], found[:-1], strict=True):
        assert value == pytest.approx(in_one_pass(model, context, continuation), abs=2e-3)
    # Without a context a text begins after the token that ends texts.
    ids = torch.tensor([[0, *byte_tokenizer()("a beginning").input_ids]])
    with torch.no_grad():
        log_TV = model(ids).logits[0].log_softmax(-1)
    assert found[-1][0] == pytest.approx(float(log_TV[:-1].gather(-1, ids[0, 1:, None]).sum()), abs=2e-3)


def test_compression_is_seen_where_the_question_comes_after_it(model):
    pairs = [(f"{EXAMPLES * 2}Question: {i}?\nAnswer:", "x") for i in range(4)]
    expected = [in_one_pass(model, *pair) for pair in pairs]

    def error(rate, split):
        lm = compressed(model, rate, split=split)
        values = [value for value, _ in lm.loglikelihood(requests("loglikelihood", *pairs))]
        return max(abs(value - right) for value, right in zip(values, expected, strict=True)), lm.rate

    assert error(0.1, None)[0] < 2e-3  # a single token after an exact prompt
    few, all_ranks = error(0.1, "\n\n"), error(1.0, "\n\n")
    assert few[0] > 0.05
    assert all_ranks[0] < 2e-3
    assert few[1] < 0.6 < all_ranks[1]


@pytest.mark.parametrize(
    ("history", "options", "expected"),
    [
        (["one?"], {}, "<user>one?</><assistant>"),
        (
            ["one?", "two", "three?"],
            {"add_generation_prompt": True},
            "<user>one?</><assistant>two</><user>three?</><assistant>",
        ),
        # An answer that the task begins is not ended, nor begun a second time.
        (["one?", "It is"], {"add_generation_prompt": False}, "<user>one?</><assistant>It is"),
        (["It is?", "It is"], {"add_generation_prompt": False}, "<user>It is?</><assistant>It is"),
    ],
    ids=["answered", "answered again", "continued", "continued in equal words"],
)
def test_a_chat_is_answered_or_continued_as_the_harness_s_own_model_does(model, history, options, expected):
    lm = uncompressed(model)
    lm.tokenizer.chat_template = (
        "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    roles = itertools.cycle(["user", "assistant"])
    messages = [{"role": role, "content": text} for role, text in zip(roles, history, strict=False)]
    assert lm.apply_chat_template(messages, **options) == expected
    own = types.SimpleNamespace(tokenizer=lm.tokenizer, chat_template_args={})
    assert HFLM.apply_chat_template(own, messages, **options) == expected


def test_system_messages_that_a_template_refuses_are_left_out_as_the_harness_s_own_model_does(model, caplog):
    lm = uncompressed(model)
    lm.tokenizer.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "<{{ message['role'] }}>{{ message['content'] }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "one?"}
    own = types.SimpleNamespace(tokenizer=lm.tokenizer, chat_template_args={})
    for messages in ([system, user], [user], [system, user, {"role": "assistant", "content": "It is"}]):
        options = {"add_generation_prompt": messages[-1] is user}
        assert lm.apply_chat_template(messages, **options) == HFLM.apply_chat_template(own, messages, **options)
    [warning] = [record.message for record in caplog.records if record.name == "lowrank_kv"]
    assert "no system here" in warning
    assert "`system_instruction`" in warning
    for messages, roles in (([system], "system"), ([system, {"role": "tool", "content": "1"}], "tool")):
        with pytest.raises(
            UserError, match=f"refuses messages of {roles}: no .* here; leave out `apply_chat_template`"
        ):
            lm.apply_chat_template(messages)
    lm.tokenizer.chat_template = None
    with pytest.raises(UserError, match="needs a chat template"):
        lm.apply_chat_template([user])


CHAT = "<user>\n\n{}Question: {}?<turn><assistant>\n\n"  # a template that ends with the split, as Llama-3's does


def test_a_blank_line_that_ends_the_prompt_leaves_the_question_behind_it(model, monkeypatch, caplog):
    read, texts = Reader.read_prompt, []

    def read_prompt(self, ids):
        texts.append(byte_tokenizer().decode(ids))
        read(self, ids)

    monkeypatch.setattr(Reader, "read_prompt", read_prompt)
    lm = compressed(model, 0.1)
    for shots in ("", EXAMPLES):
        text = CHAT.format(shots, 1)
        lm.loglikelihood(requests("loglikelihood", (text, "x")))
        lm.generate_until(requests("generate_until", (text, {"until": [], "max_gen_toks": 2})))
        assert texts == [f"<user>\n\n{shots}"] * 2
        texts.clear()
    assert not caplog.records


@pytest.mark.parametrize(
    ("contexts", "tokens"),
    [(["Question: one?\nAnswer:", "Question: two?\nAnswer:"], 22), ([EXAMPLES * 20 + "?"], 1024)],
)
def test_a_prompt_that_hides_the_cache_is_warned_of_once(model, caplog, contexts, tokens):
    pairs = [(context, choice) for context in contexts for choice in "xy"]
    compressed(model, 0.1).loglikelihood(requests("loglikelihood", *pairs))
    [warning] = [record.message for record in caplog.records]
    assert f"all {tokens} tokens" in warning
    assert "`split`" in warning


def test_nothing_is_warned_of_where_all_is_as_asked(model, tmp_path, caplog):
    pairs = [("Question: one?\nAnswer:", "x"), ("", "a beginning")]
    for lm in (uncompressed(model), compressed(model, 0.1, split=None)):
        lm.loglikelihood(requests("loglikelihood", *pairs))
    lm = compressed(model, 0.1)
    lm.loglikelihood(requests("loglikelihood", pairs[1]))
    lm.loglikelihood_rolling(requests("loglikelihood_rolling", ("a text",)))
    directory, bases = tmp_path / "model", tmp_path / "bases"
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    calibration_of(model).save(bases, model="tiny", text=["random"])
    rebuilt = {"preset": "static-joint-pf", "rates": 0.5, "settings": {"prefill": "reconstructed"}, "bases": str(bases)}
    for keys in ({}, rebuilt):
        lm = CompressedLM(str(directory), dtype="float32", **keys)
        lm.loglikelihood(requests("loglikelihood", pairs[0]))
    assert not caplog.records


@pytest.mark.parametrize("tokens", [3, 1023, 1024, 1025, 1500, 2500])
def test_rolling_texts_are_those_of_the_harness_s_own_model(tokens):
    # A steep model: one token more of context changes its likelihoods by more than rounding does.
    model = tiny_model(vocab_size=257, max_position_embeddings=1024, eos_token_id=0)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    text = ("What is read here may be longer than the model has positions. " * 50)[:tokens]
    arguments = requests("loglikelihood_rolling", (text,))
    [found] = uncompressed(model).loglikelihood_rolling(arguments)
    [expected] = HFLM(pretrained=model, tokenizer=byte_tokenizer(), backend="causal").loglikelihood_rolling(arguments)
    assert found == pytest.approx(expected, rel=1e-5)


def test_text_is_generated_until_it_says_so(model):
    prompt = "Once upon a time"
    ids = byte_tokenizer()(prompt, return_tensors="pt").input_ids
    whole = byte_tokenizer().decode(model.generate(ids, max_new_tokens=10, do_sample=False)[0, ids.shape[1] :])
    lm = uncompressed(model)
    [answer] = lm.generate_until(requests("generate_until", (prompt, {"until": [], "max_gen_toks": 10})))
    assert answer == whole.replace("<end>", "")
    [cut] = lm.generate_until(requests("generate_until", (prompt, {"until": [answer[3]], "max_gen_toks": 10})))
    assert cut == answer.split(answer[3])[0]
    [uncut] = lm.generate_until(requests("generate_until", (prompt, {"until": ["", "\0"], "max_gen_toks": 10})))
    assert uncut == answer
    with pytest.raises(UserError, match="greedily.*`--gen_kwargs do_sample=False`"):
        lm.generate_until(requests("generate_until", (prompt, {"do_sample": True})))


def test_a_tokenizer_needs_a_token_that_ends_a_text(model, monkeypatch):
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    lm = CompressedLM(model=model, tokenizer=tokenizer, make_cache=lambda: full_cache(model))
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no token that ends a text.*give its tokenizer an `eos_token`"):
        lm.prefix_token_id  # noqa: B018
    tokenizer.eos_token = "<end>"
    assert lm.prefix_token_id == tokenizer.eos_token_id


def with_special_token(name, number):
    """The tokenizer with a special token in the place of a byte."""
    content = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary[name] = vocabulary.pop(byte_tokenizer().convert_ids_to_tokens(number))
    backend = Tokenizer.from_str(json.dumps(content))
    ends = {"eos_token": "<end>", "pad_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **ends, additional_special_tokens=[name])
    assert tokenizer.convert_tokens_to_ids(name) == number
    return tokenizer


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"until": [], "max_new_tokens": 3}, 3),
        ({"until": [], "max_tokens": 3}, 3),
        # The sixth token is one that texts do not show, such as one that ends a turn.
        ({"until": ["<turn>"], "max_gen_toks": 20}, 5),
        ({"until": [], "max_gen_toks": 3, "do_sample": False, "temperature": 0.7}, 3),
    ],
)
def test_settings_of_generation_mean_what_they_do_to_the_harness_s_own_model(model, tmp_path, options, tokens):
    prompt = "Once upon a time"
    ids = byte_tokenizer()(prompt, return_tensors="pt").input_ids
    said = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    tokenizer = with_special_token("<turn>", said[-1])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    theirs = get_model("hf")(pretrained=str(tmp_path), dtype="float32", device="cpu", batch_size=1)
    ours = CompressedLM(model=model, tokenizer=tokenizer, make_cache=lambda: full_cache(model))
    [expected] = theirs.generate_until(requests("generate_until", (prompt, options)))
    assert ours.generate_until(requests("generate_until", (prompt, options))) == [expected]
    assert expected == tokenizer.decode(said[:tokens])


def test_what_does_not_fit_the_model_s_positions_is_refused(model):
    lm = uncompressed(model)
    with pytest.raises(UserError, match="1024 new tokens.*`--gen_kwargs max_gen_toks=N`"):
        lm.generate_until(requests("generate_until", ("Once upon a time", {"until": [], "max_gen_toks": 1024})))
    with pytest.raises(UserError, match="continuation has 1025 tokens"):
        lm.loglikelihood(requests("loglikelihood", ("a", "b" * 1025)))
    assert len(lm.loglikelihood(requests("loglikelihood", ("a", "b" * 1024)))) == 1


def test_a_template_that_writes_the_first_token_gets_no_second_one(model):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<end>"})
    begin = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    tokenizer.backend_tokenizer.post_processor = begin
    lm = CompressedLM(model=model, tokenizer=tokenizer, make_cache=lambda: full_cache(model))
    assert lm.tok_encode("<end>Hello") == lm.tok_encode("Hello") == [0, *byte_tokenizer()("Hello").input_ids]
    assert lm.tok_encode("Hello", add_special_tokens=False) == byte_tokenizer()("Hello").input_ids


@pytest.fixture
def files(tmp_path):
    choices = {"text": ["so", "for fun", "it is"], "label": ["A", "B", "C"]}
    rows = {
        "arc_easy": [{"question": f"Why {i}?", "choices": choices, "answerKey": "ABC"[i % 3]} for i in range(6)],
        "winogrande": [
            {"sentence": f"He {i} saw _ and ran.", "option1": "it", "option2": "Ann", "answer": str(1 + i % 2)}
            for i in range(6)
        ],
        "hellaswag": [
            {
                "activity_label": "Run",
                "ctx_a": f"A man {i}.",
                "ctx_b": "he",
                "endings": ["a", "b", "c", "d"],
                "label": i % 4,
            }
            for i in range(6)
        ],
    }
    for name, each in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    return {name: str(tmp_path / f"{name}.jsonl") for name in rows}


@pytest.mark.parametrize("name", ["arc_easy", "winogrande", "hellaswag"])
def test_local_files_are_tasks_and_scores_those_of_the_harness_s_own_model(model, files, name, tmp_path):
    manager = TaskManager(include_path=str(CONFIGS), include_defaults=False, metadata={"rows": files[name]})
    options = {"tasks": [f"{name}_local"], "num_fewshot": 2, "bootstrap_iters": 0, "task_manager": manager}
    ours = lm_eval.simple_evaluate(model=uncompressed(model), log_samples=True, **options)
    directory = tmp_path / "model"
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    theirs = get_model("hf")(pretrained=str(directory), dtype="float32", device="cpu", batch_size=1)
    expected = lm_eval.simple_evaluate(model=theirs, log_samples=True, **options)
    assert ours["results"][f"{name}_local"]["acc,none"] == expected["results"][f"{name}_local"]["acc,none"]
    for one, other in zip(ours["samples"][f"{name}_local"], expected["samples"][f"{name}_local"], strict=True):
        assert one["arguments"] == other["arguments"]
        for (value, _), (right, _) in zip(one["filtered_resps"], other["filtered_resps"], strict=True):
            assert float(value) == pytest.approx(float(right), abs=5e-3)


def test_every_configuration_names_a_task_of_ours():
    from evaluation.tasks.choices import CHOICE_TASKS

    assert {path.stem for path in CONFIGS.glob("[!_]*.yaml")} == set(CHOICE_TASKS)


def test_the_command_knows_the_model(run, model, files, tmp_path):
    directory, bases = tmp_path / "model", tmp_path / "bases"
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    calibration_of(model).save(bases, model="tiny", text=["random"])
    arguments = f"pretrained={directory},preset=static-joint-pf,rates=0.5,bases={bases},dtype=float32"
    done = run(
        "-m",
        "lowrank_kv_cli",
        "lm-eval",
        "--model",
        "lowrank-kv",
        "--model_args",
        arguments,
        "--tasks",
        "arc_easy_local",
        "--include_path",
        CONFIGS,
        "--metadata",
        json.dumps({"rows": files["arc_easy"]}),
        "--num_fewshot",
        "2",
        "--limit",
        "3",
        "--output_path",
        tmp_path / "out",
    )
    assert "arc_easy_local" in done.stdout
    [path] = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(path.read_text())
    assert results["n-samples"]["arc_easy_local"]["effective"] == 3
    assert 0.5 <= results["config"]["bytes_held"] < 1, "some tokens are held at full rank"
    assert f"the caches held {results['config']['bytes_held']:.4f} of the bytes" in done.stdout + done.stderr
