"""Tasks by their names and settings, as a configuration lists them."""

from dataclasses import MISSING

from lowrank_kv.utils.config import configuration, option, require
from lowrank_kv.utils.drawing import check_seed, check_temperature
from lowrank_kv.utils.errors import nearest

from . import longbench, ruler
from .choices import CHOICE_TASKS
from .item import AGNOSTIC, AWARE, QUERIES

LOOKUP, BOXED, LONG = "lookup", "boxed", "long_decoding"
FAMILIES = {"ruler": tuple(ruler.OFFLINE), "longbench": longbench.NAMES}
NAMES = (*ruler.NAMES, *longbench.NAMES, *CHOICE_TASKS, LOOKUP, BOXED, LONG)
FROM_FILES = (*ruler.FROM_FILES, *longbench.NAMES, *CHOICE_TASKS, BOXED, LONG)
# Their prompts are short: what is compressed is what follows.
SHORT_PROMPTS = (BOXED, LONG)
WITH_LENGTH = (*ruler.NAMES, *longbench.NAMES, LONG)
COUNT = 100
"""Items of a task that is generated, by default."""
NEW_TOKENS = 2048
"""Of a problem's solution, by default."""
_NAME = "{task}"
READ_BY = {
    "chat": (*ruler.NAMES, *longbench.NAMES, BOXED, LONG),
    "file": FROM_FILES,
    "length": WITH_LENGTH,
    "essay": ruler.NEED_ESSAY,
    **dict.fromkeys(("labels", "shots"), CHOICE_TASKS),
    **dict.fromkeys(("facts", "questions"), (LOOKUP,)),
    "max_new_tokens": (*ruler.NAMES, *longbench.NAMES, BOXED),
    **dict.fromkeys(("temperature", "edges"), (LONG,)),
}
"""Keys that only some tasks read → these tasks."""


@configuration
class TaskConfig:
    """One or several tasks of equal settings."""

    task: list[str] = option(
        help=f"names: {', '.join(NAMES)}; or `ruler` for all that need no file, `longbench` for all of it"
    )
    items: int | None = option(
        None, help=f"how many; by default all of a file, {COUNT} of a task that is generated", unit="items"
    )
    seed: int = option(42, help="of what is drawn: samples, examples, texts")
    query: str | None = option(
        None,
        help="whether the question is asked behind the compressed prompt (agnostic) or is a part of it (aware); by default "
        f"agnostic, and aware for {' and '.join(SHORT_PROMPTS)}",
        choices=QUERIES,
    )
    chat: bool = option(False, help="put prompts into the tokenizer's chat template; not of multiple choice and lookup")
    file: str | None = option(
        None, help=f"local file of the published form, for tasks that read one; `{_NAME}` in it is the task's name"
    )
    together: str | None = option(
        None,
        help="name of a row with the mean over the items of all these tasks, beside a row of each; one for each `length`",
    )
    optional: bool = option(False, help="leave the task out, with a notice, where its file is not there")
    length: list[int] = option(
        [4096],
        help="of RULER: tokens of a prompt with its answer, one task each; of LongBench: beyond it a prompt's middle is "
        "left out; of long_decoding: tokens of the text",
        unit="tokens",
    )
    essay: str | None = option(None, help="file of prose in which RULER hides needles (.txt, or .jsonl with `text`)")
    labels: str | None = option(None, help="of multiple choice: file with an answer on each line, where rows have none")
    shots: int = option(16, help="of multiple choice: answered questions in front; they are what is compressed")
    facts: int = option(40, help="of lookup: in a prompt, each twice")
    questions: int = option(
        1, help="of lookup: asked about each list of facts, every one behind the same compressed prompt"
    )
    max_new_tokens: int | None = option(
        None,
        help=f"of a generated answer; by default the benchmark's own, and {NEW_TOKENS} of {BOXED}; not of {LOOKUP}, whose "
        "answers have a length",
        unit="tokens",
    )
    temperature: float = option(1.0, help=f"of {LONG}: at which the text is sampled; 0 is greedy")
    edges: list[int] | None = option(
        None,
        help=f"of {LONG}: where in the text a range of positions ends that has figures of its own; by default 512, 1024, …",
        unit="tokens",
    )

    def __post_init__(self):
        for name in self.task:
            known = (*NAMES, *FAMILIES)
            require(name in known, "task", name, f"a task that there is ({nearest(name, known, 'tasks')})")
        require(bool(self.names), "task", self.task, "at least one")
        for key, readers in READ_BY.items():
            field, value = self.__dataclass_fields__[key], getattr(self, key)
            is_given = value != (field.default if field.default_factory is MISSING else field.default_factory())
            told = f"left out of {', '.join(self.task)}, which {'does' if len(self.task) == 1 else 'do'} not read it"
            require(not is_given or bool({*self.names} & {*readers}), key, value, told)
        require(bool(self.length) and min(self.length) >= 1, "length", self.length, "at least 1 token")
        for key in ("items", "facts", "questions", "max_new_tokens"):
            value = getattr(self, key)
            require(value is None or value >= 1, key, value, "at least 1")
        check_seed(self.seed, "seed")
        if self.temperature:
            check_temperature(self.temperature, "temperature", greedy="0 takes the likeliest tokens")
        require(self.shots >= 0, "shots", self.shots, "zero or positive")
        if self.edges is not None:
            within = min(self.edges, default=0) > 0 and max(self.edges) < min(self.length)
            require(
                within and self.edges == sorted(set(self.edges)),
                "edges",
                self.edges,
                f"positions within the shortest text ({min(self.length)} tokens), each larger than the one before",
            )
        from_files = [name for name in self.names if name in FROM_FILES]
        require(not from_files or self.file is not None, "file", None, f"given for {', '.join(from_files)}")
        require(
            len(from_files) < 2 or _NAME in self.file,
            "file",
            self.file,
            f"a name with `{_NAME}` in it for several tasks",
        )
        in_essays = [name for name in self.names if name in ruler.NEED_ESSAY]
        require(not in_essays or self.essay is not None, "essay", None, f"given for {', '.join(in_essays)}")
        for name in self.names:
            query = self.query_of(name)
            require(query == AWARE or name not in SHORT_PROMPTS, "query", query, f"`{AWARE}` for `{name}`")
            is_bare = name in CHOICE_TASKS and query == AGNOSTIC
            require(not is_bare or self.shots >= 1, "shots", self.shots, f"at least 1 with `query: {AGNOSTIC}`")

    @property
    def names(self) -> list[str]:
        """Of single tasks."""
        return [name for each in self.task for name in FAMILIES.get(each, (each,))]

    def query_of(self, name: str) -> str:
        """Whether the compression knows the question of that task."""
        return self.query or default_query(name)

    def file_of(self, name: str) -> str | None:
        """The file of that task; None where it reads none."""
        return self.file.replace(_NAME, name) if self.file and name in FROM_FILES else None

    @property
    def files(self) -> set[str]:
        """All that these tasks read."""
        return {file for file in (self.essay, *map(self.file_of, self.names)) if file is not None}

    def label_of(self, name: str, length: int | None) -> str:
        """The task in results: its name, its length, and its `query` where it is not the task's own."""
        query = self.query_of(name)
        words = [name, length and str(length), query if query != default_query(name) else None]
        return " ".join(word for word in words if word)

    def together_of(self, length: int | None) -> str | None:
        """The row that holds the mean of the tasks of this length; None where there is none."""
        return self.together and " ".join([self.together, *([str(length)] if length else [])])


def default_query(name: str) -> str:
    """A prompt that is nothing but the question is compressed with it."""
    return AWARE if name in SHORT_PROMPTS else AGNOSTIC
