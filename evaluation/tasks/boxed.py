r"""Problems whose answer is an integer in ``\boxed{…}``, as those of AIME are, from local JSON lines.

The prompt is short and the answer is long: what is compressed is the reasoning. `keep_prompt_full_rank: true` among
a method's settings keeps the prompt as it is.
"""

from transformers import PreTrainedTokenizerBase

from .item import GenerationItem, prompt_pieces
from .jsonl import first_rows
from .matching import BoxedInteger

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def boxed_items(
    tokenizer: PreTrainedTokenizerBase, path: str, *, count: int | None, max_new_tokens: int, chat: bool
) -> list[GenerationItem]:
    """The first `count` rows, with `problem` (or `question`) and `answer`, an integer; None takes all.

    Raises:
        UserError: the file is missing or has fewer rows, or an answer is no integer.
    """
    items = []
    for row in first_rows(path, count):
        problem, answer = row.text("problem", "question"), str(row.get("answer"))
        try:
            int(answer)
        except ValueError as error:
            raise row.error(f"has the answer {answer!r}, and an integer is needed") from error
        context, question = prompt_pieces(tokenizer, problem, f"\n\n{INSTRUCTION}\n", chat=chat)
        items.append(
            GenerationItem(
                cluster=row.number,
                context=context,
                question=question,
                references=(answer,),
                max_new_tokens=max_new_tokens,
                metric=BoxedInteger(),
                tokenizer=tokenizer,
            )
        )
    return items
