"""Strict configuration: frozen dataclasses, filled from one YAML file and command-line overrides.

A class made a :func:`configuration` is a frozen, keyword-only dataclass whose fields are made with :func:`option`; nested
ones are sections, and ``--section.key value`` overrides a key of the file. An unknown key is an error that names the
nearest valid one, and `--help` lists every key with its unit and default, because both are read from the same fields.
"""

import argparse
import contextlib
import copy
import dataclasses
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lowrank_kv.utils.arguments import ArgumentParser
from lowrank_kv.utils.errors import UserError, nearest
from lowrank_kv.utils.paths import expand, path_of
from lowrank_kv.utils.values import unboxed

Config = TypeVar("Config")


# Where the values being checked stand: what comes before their keys, and what holds them.
_PLACE: ContextVar[tuple[str, str]] = ContextVar("place", default=("", ""))


@contextlib.contextmanager
def within(prefix: str = "", source: str = "") -> Iterator[None]:
    """Put `prefix`, such as ``rate.``, before keys refused inside, and name the outermost `source`, such as a file, after
    them: a section knows neither."""
    outer_prefix, outer_source = _PLACE.get()
    token = _PLACE.set((outer_prefix + prefix, outer_source or source))
    try:
        yield
    finally:
        _PLACE.reset(token)


def _refusal(key: str, told: str) -> UserError:
    prefix, source = _PLACE.get()
    return UserError(f"`{prefix}{key}` {told}" + (f" in {source}" if source else ""))


def option(default: Any = dataclasses.MISSING, *, help: str, unit: str = "", choices: Sequence[str] = ()) -> Any:
    """A documented configuration field; without a default the key is required."""
    metadata = {"help": help, "unit": unit, "choices": tuple(choices)}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, **defaults: Any) -> Any:
    """A nested configuration class; one with required keys must be given. `defaults` stand for the class's own here."""
    metadata = {"section": cls, "defaults": defaults}
    return dataclasses.field(default_factory=lambda: cls(**defaults), metadata=metadata)


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, section))
def configuration(cls: type[Config]) -> type[Config]:
    """Make a class of options a frozen, keyword-only dataclass that checks itself, whoever builds it.

    Every field's type and choices are checked, and that numbers are finite, then what ``__post_init__`` asks for with
    :func:`require`. A number given for a float becomes one, and a mapping given for a section that section.
    """
    check_values = getattr(cls, "__post_init__", None)

    def __post_init__(self: Config) -> None:  # noqa: N807
        with within(source=type(self).__name__):
            hints = typing.get_type_hints(type(self))
            for field in dataclasses.fields(self):
                object.__setattr__(self, field.name, _checked(field, getattr(self, field.name), hints[field.name]))
            if check_values is not None:
                check_values(self)

    cls.__post_init__ = __post_init__
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def require(condition: bool, key: str, value: Any, remedy: str) -> None:
    """Raise a :class:`UserError` that names the key, its value and the remedy, unless `condition` holds."""
    if not condition:
        raise _refusal(key, f"must be {remedy}; got {value!r}")


def check_entries(values: Mapping[str, Any], kinds: Mapping[str, Any], source: str | Path) -> None:
    """Check what a JSON file that the project wrote must hold: key → type. What may be None may be missing.

    Raises:
        UserError: an entry is missing or of another type.
    """
    for key, kind in kinds.items():
        if not isinstance(values.get(key), kind):
            what = f"its `{key}` is {values[key]!r}" if key in values else f"it has no `{key}`"
            raise UserError(f"{source} is damaged: {what}; restore the file, or make it again")


def _names(cls: type) -> list[str]:
    """Its keys, and those of its sections with a dot."""
    found = []
    for field in dataclasses.fields(cls):
        of = field.metadata.get("section")
        found += [field.name, *(f"{field.name}.{name}" for name in (_names(of) if of else ()))]
    return found


def build(cls: type[Config], values: Mapping[str, Any] | None, *, source: str = "config") -> Config:
    """An instance of `cls` from a nested mapping; the class checks the values, this the keys.

    Raises:
        UserError: unknown or missing key, or a value of the wrong type or out of range.
    """
    values = {} if values is None else values
    with within(source=source):
        prefix, source = _PLACE.get()
        if not isinstance(values, Mapping):
            place, keys = prefix.rstrip(".") or source, ", ".join(field.name for field in dataclasses.fields(cls))
            raise UserError(f"`{place}` must be a section with keys, got {values!r} in {source}; its keys are {keys}")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for key in values:
            if key not in fields:
                raise UserError(f"unknown key `{prefix}{key}` in {source}; {nearest(str(key), _names(cls))}")
        # A section that is left out may have keys that must be given.
        values = {name: {} for name, field in fields.items() if "section" in field.metadata} | dict(values)
        for name, field in fields.items():
            if name not in values and _is_required(field):
                raise UserError(f"`{prefix}{name}` is missing from {source}; {field.metadata['help']}")
        return cls(**values)


def _checked(field: dataclasses.Field, value: Any, hint: Any) -> Any:
    if "section" in field.metadata and (value is None or isinstance(value, Mapping)):  # None of an empty one in a file
        value = {**field.metadata["defaults"], **(value or {})}
    value = _coerce(value, hint, field.name)
    numbers = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, float)]
    if not all(map(math.isfinite, numbers)):
        # The help says what stands for no limit, where there may be none.
        require(False, field.name, value, f"finite ({field.metadata['help']})")
    choices = field.metadata.get("choices")
    if choices and value is not None:
        require(value in choices, field.name, value, f"one of {', '.join(choices)}")
    return value


def _coerce(value: Any, hint: Any, key: str) -> Any:
    hint, optional = _plain(hint)
    value = unboxed(value)
    if value is None and optional:
        return None
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint):
            return value
        with within(f"{key}."):
            return build(hint, value)
    if typing.get_origin(hint) is list:
        [item_hint] = typing.get_args(hint)
        items = value if isinstance(value, list) else [value]
        return [_coerce(item, item_hint, f"{key}[{i}]") for i, item in enumerate(items)]
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        # YAML 1.1 reads `3e-4` (no dot) as a string.
        try:
            return float(value)
        except ValueError as error:
            raise _refusal(key, f"must be a number, got {value!r}") from error
        except OverflowError:  # of an integer; a string of its digits is infinite
            return math.inf
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise _refusal(key, f"must be of type {hint.__name__}, got {value!r}")
    return expand(value) if hint is str else value


def _plain(hint: Any) -> tuple[Any, bool]:
    """A type without its None, and whether it had one."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    [hint] = [a for a in typing.get_args(hint) if a is not type(None)]
    return hint, True


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; an unreadable or malformed one is a :class:`UserError`."""
    try:
        text = path_of(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the configuration `{path}`: {error.strerror}; check --config") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the configuration `{path}` is not UTF-8 text: {error.reason}; convert it") from error
    values = _yaml(text, f"`{path}` is not valid YAML")
    if not isinstance(values, dict):
        raise UserError(f"`{path}` must hold keys and values, got {type(values).__name__}")
    return values


def parse_config(cls: type[Config], argv: Sequence[str], *, description: str, extra: Sequence[dict] = ()) -> tuple:
    """Parse ``--config FILE`` plus one ``--key value`` per key of `cls`.

    `extra` holds keyword dictionaries for further arguments of the command itself, each with a ``flag``.

    Returns:
        (configuration, namespace of the extra arguments)
    """
    # Written out, the usage of some commands is longer than a screen.
    needed = "".join(f" {argument['flag']} {argument['metavar']}" for argument in extra if argument.get("required"))
    parser = ArgumentParser(
        usage=f"%(prog)s [--config FILE]{needed} [--KEY VALUE ...]",
        description=description,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file; every key below may stand in it")
    for argument in extra:
        argument = dict(argument)
        parser.add_argument(argument.pop("flag"), **argument)
    keys = dict(_leaves(cls))
    group = parser.add_argument_group("configuration keys, as in the YAML file")
    for key, (field, hint) in keys.items():
        # `--streaming` alone is `--streaming true`.
        alone = {"nargs": "?", "const": "true"} if _plain(hint)[0] is bool else {}
        group.add_argument(
            f"--{key}", metavar=_type_name(hint), default=argparse.SUPPRESS, help=_describe(field, hint), **alone
        )
    for key, (_, hint) in keys.items():
        item, is_list = _item(hint)
        if dataclasses.is_dataclass(item):
            whose = "each entry of " * is_list
            parser.add_argument_group(f"keys of {whose}`{key}`, in the YAML file", _keys_of(item))
    namespace = parser.parse_args(list(argv))
    values = read_yaml(namespace.config) if namespace.config else {}
    typed = {key: getattr(namespace, key) for key in keys if hasattr(namespace, key)}
    for key, text in typed.items():
        _set(values, key.split("."), _parse_scalar(text, keys[key][1]))
    sources = [namespace.config] * bool(namespace.config) + ["the command line"] * bool(typed or not namespace.config)
    return build(cls, values, source=" and ".join(sources)), namespace


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as plain containers, ready for YAML or JSON."""
    return dataclasses.asdict(config)


def _leaves(cls: type, prefix: str = "", defaults: Mapping[str, Any] | None = None):
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _leaves(hints[field.name], f"{prefix}{field.name}.", field.metadata["defaults"])
            continue
        if defaults and field.name in defaults:
            field = copy.copy(field)
            field.default = defaults[field.name]
        yield f"{prefix}{field.name}", (field, hints[field.name])


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _describe(field: dataclasses.Field, hint: Any) -> str:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    parts = [field.metadata["help"]]
    item, is_list = _item(hint)
    if dataclasses.is_dataclass(item):
        parts.append(f"the keys{' of each entry' * is_list} stand below")
    if field.metadata["choices"]:
        parts.append("one of " + ", ".join(field.metadata["choices"]))
    if field.metadata["unit"]:
        parts.append(f"in {field.metadata['unit']}")
    if _is_required(field):
        parts[-1] += " [required]"
    elif default not in (None, [], {}):
        parts[-1] += f" [default {_typed(default)}]"
    return "; ".join(parts).replace("%", "%%")


def _typed(value: Any) -> str:
    """A default as it would be typed on the command line."""
    if isinstance(value, list):
        return ",".join(map(_typed, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _keys_of(cls: type) -> str:
    """The keys of a class that stands only in a file, a paragraph each, for `--help`."""
    indent, lines = " " * 22, []
    for field, hint in dict(_leaves(cls)).values():
        # The help's own `%` is doubled for argparse, which does not format descriptions.
        told = textwrap.wrap(_describe(field, hint).replace("%%", "%"), 78 - len(indent), break_on_hyphens=False)
        head = f"{field.name} {_type_name(hint)}"
        if len(head) > len(indent) - 2:
            lines.append(head)
            head = ""
        lines += [f"{head:<{len(indent)}}{told[0]}", *(indent + line for line in told[1:])]
    return "\n".join(lines)


def _item(hint: Any) -> tuple[Any, bool]:
    """The type of a list's items, or of what is no list, and whether it is one."""
    hint, _ = _plain(hint)
    items = typing.get_args(hint)
    return (_plain(items[0])[0], True) if items else (hint, False)


def _type_name(hint: Any) -> str:
    item, is_list = _item(hint)
    if dataclasses.is_dataclass(item):
        return "LIST" if is_list else "SECTION"
    return item.__name__.upper()


def _parse_scalar(text: str, hint: Any) -> Any:
    hint, optional = _plain(hint)
    if optional and text.lower() in ("null", "none"):
        return None
    if typing.get_origin(hint) is list:
        [item] = typing.get_args(hint)
        if not text:
            return []
        # Lists are written as in a configuration file, or, of plain values, separated by commas.
        if not dataclasses.is_dataclass(item) and not text.startswith("["):
            return [_parse_scalar(part, item) for part in text.split(",")]
    # A string key keeps its text as typed: `--model 7` names a directory, not a number.
    return text if hint is str else _yaml(text, f"`{text}` on the command line is not a value")


class _Loader(yaml.SafeLoader):
    """YAML's own loader takes the last of equal keys, and says nothing of the others; 0100 is 64 to it, and 1:30 is 90."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"`{key.value}` stands there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def decimal(self, node: yaml.ScalarNode) -> int | float:
        if _NOT_DECIMAL.fullmatch(node.value):
            raise yaml.constructor.ConstructorError(None, None, f"`{node.value}` is no decimal number", node.start_mark)
        return super().construct_yaml_int(node) if node.tag.endswith(":int") else super().construct_yaml_float(node)


_NOT_DECIMAL = re.compile(r"[-+]?0[0-7_]+|.*:.*")
for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.decimal)


def _yaml(text: str, complaint: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    # Dates that there are none of, tags that do not fit and nesting without end are no errors of YAML's own.
    except (yaml.YAMLError, ValueError, KeyError, RecursionError) as error:
        raise UserError(f"{complaint}: {' '.join(str(error).split())}") from error


def _set(values: dict, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        # An empty section of a file is None; one that is no section is refused when all is built.
        if values.get(name) is None:
            values[name] = {}
        values = values[name]
        if not isinstance(values, dict):
            return
    values[path[-1]] = value
