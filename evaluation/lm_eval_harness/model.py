"""A model for lm-evaluation-harness that reads every prompt into a compressed cache.

Log-likelihoods are those of the text read through the cache, and text is generated from it. As an object:

    model = CompressedLM(model=llama, tokenizer=tokenizer, make_cache=lambda: OjaKVCache(llama, plan))
    lm_eval.simple_evaluate(model=model, tasks=["arc_easy"], num_fewshot=16)
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import lm_eval.models  # noqa: F401 the harness enters its own models only where there are none yet
import torch
from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES
from lowrank_kv.hf.loading import load_model, load_tokenizer, position_limit
from lowrank_kv.utils.config import build, require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.progress import progress_bar
from ojakv import Calibration

from ..methods import FULL, Method, MethodConfig, methods_of, uncompressed
from ..peers.peer import TextLength
from ..tasks.reader import Reader, end_tokens

NAME = "lowrank-kv"
_DEFAULT_DEVICE = "cuda:0"  # of the harness's command
_NEW_TOKENS = 256
_UNBOUNDED = 1 << 20  # tokens, of a model that does not say how many positions it has

_logger = logging.getLogger("lowrank_kv")

TokenRequest = tuple[tuple[str, str], list[int], list[int]]


@register_model(NAME)
class CompressedLM(TemplateLM):
    """See the module; one request at a time.

    Attributes:
        held, full: bytes of all caches after their requests, and those of uncompressed ones.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        make_cache: Callable[[], Cache] | None = None,
        dtype: str = "bfloat16",
        device: str | None = None,
        bases: str | None = None,
        prompt: int = 1024,
        tokens: int = 1152,
        split: str | None = "\n\n",
        step: int = MAX_DECODE_QUERIES,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **method: Any,
    ):
        """
        Args:
            pretrained: hub id or directory; with the keys below it takes the place of the next three.
            model, tokenizer, make_cache: the model, and what makes fresh caches for it.
            dtype, device: of the model.
            bases: directory written by `lowrank-kv calibrate`.
            prompt, tokens: of a prompt, and with what follows it, at the end of which a share of bytes is met.
            split: only what stands before its last occurrence in a prompt is read at once and compressed, the rest
                through the cache as decoding reads it: of a few-shot prompt the examples. White space that ends a prompt
                is passed over, such as that behind the header with which chat templates begin an answer. An empty
                one, or None, reads all at once; the first token of an answer then never depends on the cache of a
                method that reads prompts exactly. A warning says where a prompt has no such place.
            step: tokens read at a time behind the prompt.
            batch_size: 1.
            max_batch_size: left out.
            method: keys of :class:`evaluation.methods.MethodConfig`, with one budget, such as `preset`, `rates`,
                `settings`; the uncompressed cache where there are none.

        Raises:
            UserError: settings that do not fit one another.
        """
        super().__init__()
        require(str(batch_size) in ("1", "auto"), "batch_size", batch_size, "1: each request has a cache of its own")
        require(max_batch_size is None, "max_batch_size", max_batch_size, "left out")
        require("bytes_of" not in method, "bytes_of", method.get("bytes_of"), "left out: nothing is scored beside")
        if (pretrained is None) == (model is None or tokenizer is None or make_cache is None):
            raise UserError("give `pretrained`, or `model`, `tokenizer` and `make_cache`")
        if pretrained is not None:
            if device == _DEFAULT_DEVICE and not torch.cuda.is_available():
                _logger.warning("%s is the harness's default, and there is no GPU: the model is on the CPU", device)
                device = None
            model, tokenizer = load_model(pretrained, dtype=dtype, device=device), load_tokenizer(pretrained)
            used = _method(method, model, bases, TextLength(int(prompt), int(tokens)))
            make_cache, reads_exactly = used.maker(None), used.reads_exactly
        elif method or bases is not None:
            key = next(iter(method), "bases")
            raise UserError(f"`{key}` is a key beside `pretrained` only; `make_cache` says what it would")
        else:
            reads_exactly = True  # as far as is known
        self.model, self.tokenizer, self.make_cache = model, tokenizer, make_cache
        self.split, self.step = split, int(step)
        self.held = self.full = 0
        self._device = model.device
        self._warns = bool(split) and reads_exactly
        self._warns_of_system = True

    @property
    def eot_token_id(self) -> int:
        ends = sorted(end_tokens(self.model, self.tokenizer))
        if not ends:
            raise UserError(
                "this model has no token that ends a text, with which a text without context begins here; give its "
                "tokenizer an `eos_token`"
            )
        return ends[0] if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its answer."""
        return position_limit(self.model) or _UNBOUNDED

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    @property
    def rate(self) -> float:
        """Bytes held over those of uncompressed caches, all requests together."""
        return self.held / self.full

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results beside the scores, when all requests are done; printed, too, since its
        table has no room for it."""
        if not self.full:
            return {}
        print(f"the caches held {self.rate:.4f} of the bytes of uncompressed ones, all requests together")
        return {"bytes_held": self.rate}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        begin = self.tokenizer.bos_token
        if add_special_tokens is None and begin and string.startswith(begin):
            add_special_tokens = False  # a chat template has written it
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer(string, **options).input_ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat in the model's template. Where that refuses system messages they are left out, as the harness's own model
        does; a warning says so once.

        Raises:
            UserError: there is no template, or it refuses the other messages, too.
        """
        name = self.tokenizer.name_or_path
        if self.tokenizer.chat_template is None:
            raise UserError(f"`apply_chat_template` needs a chat template, which `{name}` has not; leave it out")
        try:
            return self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except TemplateError as error:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) in (0, len(chat_history)):
                roles = ", ".join(message["role"] for message in chat_history)
                raise UserError(
                    f"the chat template of `{name}` refuses messages of {roles}: {error}; leave out `apply_chat_template`, "
                    f"or set `fewshot_as_multiturn` otherwise"
                ) from error
            text = self.apply_chat_template(others, add_generation_prompt)
            if self._warns_of_system:
                self._warns_of_system = False
                _logger.warning(
                    "the chat template of `%s` refuses system messages (%s): `system_instruction` and the descriptions of "
                    "tasks are left out, as the harness's own model does (said once)", name, error,
                )  # fmt: skip
            return text

    def _loglikelihood_tokens(self, requests: Sequence[TokenRequest], **kwargs: Any) -> list[tuple[float, bool]]:
        """Requests of equal context, the choices of a question, share the reading of it."""
        answers: list[tuple[float, bool] | None] = [None] * len(requests)
        reader, read = None, None
        bar = progress_bar(
            total=len(requests), unit="request", desc="log-likelihoods", disable=kwargs.get("disable_tqdm", False)
        )
        for index in sorted(range(len(requests)), key=lambda index: requests[index][1]):
            (text, _), context, continuation = requests[index]
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation has {len(continuation)} tokens, and the model {self.max_length} positions; leave its "
                    f"task out, or take a model of more"
                )
            context = context[-max(1, self.max_length - len(continuation) + 1) :]
            if context != read:
                reader, read = self._read(text, context), context
            own = reader.copy()
            answers[index] = own.log_likelihood(continuation)
            self._count(own)
            bar.update()
        bar.close()
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        answers = []
        for request in progress_bar(requests, unit="text", desc="reading", disable=disable_tqdm):
            [text] = request.args
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            pairs = [make_disjoint_window(window) for window in windows]
            found = self._loglikelihood_tokens([(("", ""), *pair) for pair in pairs], disable_tqdm=True)
            answers.append(sum(value for value, _ in found))
        return answers

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        answers = []
        for request in progress_bar(requests, unit="request", desc="generating", disable=disable_tqdm):
            text, options = request.args
            options = normalize_gen_kwargs(options, _NEW_TOKENS)
            if options["do_sample"]:
                raise UserError(
                    f"text is generated greedily here, and the task asks for sampling: {options}; give `--gen_kwargs "
                    f"do_sample=False`, or leave the task out"
                )
            ends, count = [end for end in options["until"] if end], options["max_gen_toks"]
            if count >= self.max_length:
                raise UserError(
                    f"the task asks for {count} new tokens, which leave no room for its prompt in the model's "
                    f"{self.max_length} positions; give fewer with `--gen_kwargs max_gen_toks=N`"
                )
            context = self.tok_encode(text)[count - self.max_length :] or [self.prefix_token_id]
            reader = self._read(text, context)
            answer = reader.generate(
                self.tokenizer,
                count,
                is_done=lambda so_far, ends=ends: any(end in so_far for end in ends),
                ends=self._special_tokens(ends),
            )
            self._count(reader)
            for end in ends:
                answer = answer.split(end)[0]
            answers.append(answer)
        return answers

    def _special_tokens(self, texts: Sequence[str]) -> list[int]:
        """Those of the texts that are special tokens, which a generated text does not show."""
        special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        return [special[text] for text in texts if text in special]

    def _read(self, text: str, context: list[int]) -> Reader:
        """A fresh cache that has read a context."""
        reader, prompt = Reader(self.model, self.make_cache(), step=self.step), self._num_in_prompt(text, context)
        reader.read_prompt(context[:prompt])
        if prompt < len(context):
            reader.read(context[prompt:])
        elif text and self._warns and type(reader.cache) is not DynamicCache:
            self._warns = False
            _logger.warning(
                "a context has no %r with text behind it, or was cut to the model's positions: all %d tokens of it are read "
                "in one call, and where a method reads prompts exactly, the first token of an answer does not depend on "
                "the cache; name a `split` that stands before the question (said once)", self.split, prompt,
            )  # fmt: skip
        return reader

    def _num_in_prompt(self, text: str, context: list[int]) -> int:
        """How many tokens of a context are read at once."""
        place = text.rstrip().rfind(self.split) if self.split else -1
        if place < 0:
            return len(context)
        before = self.tok_encode(text[: place + len(self.split)])
        common = _num_common(before, context)
        # The last tokens may join with what follows. A context that was cut begins otherwise, and is not split.
        return common if common >= max(1, len(before) - _JOINED) else len(context)

    def _count(self, reader: Reader) -> None:
        self.held += reader.cache_bytes
        self.full += reader.full_bytes


def _method(keys: dict[str, Any], model: PreTrainedModel, bases: str | None, text: TextLength) -> Method:
    """The method that these keys describe."""
    if not keys:
        require(
            bases is None, "bases", bases, "given with a `preset` or a `peer`: without one the cache is uncompressed"
        )
        return uncompressed(model)
    config = build(MethodConfig, keys, source="model_args")
    calibration = None if bases is None else Calibration.load(bases).for_model(model)
    require(calibration is not None or not config.needs, "bases", bases, f"given: `{config.name}` is calibrated")
    found = methods_of([config], model, calibration, text)
    own = [each for each in found if each.label != FULL]
    require(len(own) == 1, "rates", [each.label for each in own], "one, or one of `bytes`: a model has one cache")
    return own[0]


_JOINED = 2  # tokens before a split that may be others with the text behind it


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
