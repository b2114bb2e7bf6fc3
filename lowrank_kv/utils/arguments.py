"""The parser of every command: a mistake is a :class:`UserError`, and `-` and `_` within a name mean the same."""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from lowrank_kv.utils.errors import UserError, nearest


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Descriptions stay as they are written, and lines do not end within a name such as `tokenwise-mixed`."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class ArgumentParser(argparse.ArgumentParser):
    """`argparse`'s, without its usage in front of an error, which is longer than a screen for commands with many keys.

    Keys of a configuration have `_`, as in its YAML, and arguments of a command have `-`, as is usual: nobody should need to
    remember which is which, so ``--read-gradients`` is ``--read_gradients`` and ``--cache_dtype`` is ``--cache-dtype``.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"formatter_class": HelpFormatter, **kwargs})

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """As `argparse`'s.

        Raises:
            UserError: an argument that is not known, or what :meth:`error` is told of.
        """
        found, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            valid = [name for name in self._option_string_actions if name.startswith("--")]
            raise UserError(f"unknown argument `{word}`; {nearest(word.partition('=')[0], valid, 'arguments')}")
        return found

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As `argparse`'s; names it does not know stay as they were typed."""
        words = [self._as_declared(word) for word in (sys.argv[1:] if args is None else args)]
        self._check_once(words)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise a :class:`UserError` with what `argparse` found wrong."""
        raise UserError(f"{message}; see `{self.prog} --help`")

    def _check_once(self, words: Sequence[str]) -> None:
        """Refuse an option that is given twice, of which `argparse` would take the last and lose the first."""
        given: set[str] = set()
        for word in words:
            option = word.partition("=")[0]
            action = self._option_string_actions.get(option)
            if action is None or isinstance(action, argparse._AppendAction):
                continue
            if action.nargs == argparse.REMAINDER:
                return
            if action.dest in given:
                raise UserError(f"`{option}` is given twice; give it once (a list is one value, such as A,B)")
            given.add(action.dest)

    def _as_declared(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            return word
        declared = {each.replace("_", "-"): each for each in self._option_string_actions}
        return declared.get(name.replace("_", "-"), name) + equals + value
