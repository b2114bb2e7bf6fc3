"""Strict configuration: frozen dataclasses, filled from one YAML file and command-line overrides.

A class made a :func:`configuration` is a frozen, keyword-only dataclass whose fields are made with :func:`option`; nested
ones are sections, and ``--section.key value`` overrides a key of the file. An unknown key is an error that names the
nearest valid one, and `--help` lists every key with its unit and default, because both are read from the same fields.
"""

import argparse
import contextlib
import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import expand

Config = TypeVar("Config")


class KeyedError(UserError):
    """A value that its key cannot have, by the key's name in the class that refuses it (see :func:`within`)."""

    def __init__(self, key: str, value: Any, remedy: str):
        super().__init__(key, value, remedy)
        self.key, self.value, self.remedy = key, value, remedy

    def __str__(self) -> str:
        return f"`{self.key}` must be {self.remedy}; got {self.value!r}"


@contextlib.contextmanager
def within(prefix: str) -> Iterator[None]:
    """Put `prefix`, such as ``rate.``, before the key of a value refused inside: a section does not know its own name."""
    try:
        yield
    except KeyedError as error:
        raise KeyedError(f"{prefix}{error.key}", error.value, error.remedy) from None


def option(default: Any = dataclasses.MISSING, *, help: str, unit: str = "", choices: Sequence[str] = ()) -> Any:
    """A documented configuration field; without a default the key is required."""
    metadata = {"help": help, "unit": unit, "choices": tuple(choices)}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type) -> Any:
    """A nested configuration class; one with required keys must be given."""
    return dataclasses.field(default_factory=cls, metadata={"section": True})


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, section))
def configuration(cls: type[Config]) -> type[Config]:
    """Make a class of options a frozen, keyword-only dataclass that checks itself, whoever builds it.

    Every field's type and choices are checked as :func:`build` does, then what ``__post_init__`` asks for with
    :func:`require`. A number given for a float becomes one, and a mapping given for a section that section.
    """
    check_values = getattr(cls, "__post_init__", None)

    def __post_init__(self: Config) -> None:  # noqa: N807
        _check_fields(self)
        if check_values is not None:
            check_values(self)

    cls.__post_init__ = __post_init__
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def require(condition: bool, key: str, value: Any, remedy: str) -> None:
    """Raise :class:`KeyedError`, a :class:`UserError` naming the key and its value, unless `condition` holds."""
    if not condition:
        raise KeyedError(key, value, remedy)


def check_entries(values: Mapping[str, Any], kinds: Mapping[str, Any], source: str | Path) -> None:
    """Check what a JSON file that the project wrote must hold: key → type. What may be None may be missing.

    Raises:
        UserError: an entry is missing or of another type.
    """
    for key, kind in kinds.items():
        if not isinstance(values.get(key), kind):
            what = f"its `{key}` is {values[key]!r}" if key in values else f"it has no `{key}`"
            raise UserError(f"{source} is damaged: {what}; restore the file, or make it again")


def nearest(name: str, valid: Sequence[str]) -> str:
    """A ' (did you mean …?)' hint, or the list of valid names when nothing is near."""
    near = difflib.get_close_matches(name, valid, n=1)
    return f"did you mean `{near[0]}`?" if near else f"valid keys: {', '.join(sorted(valid))}"


def build(cls: type[Config], values: Mapping[str, Any] | None, *, prefix: str = "", source: str = "config") -> Config:
    """An instance of `cls` from a nested mapping, with every key and type checked.

    Raises:
        UserError: unknown or missing key, or a value of the wrong type or out of range.
    """
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        raise UserError(f"`{prefix.rstrip('.') or source}` must be a section with keys, got {values!r} in {source}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in fields:
            raise UserError(f"unknown key `{prefix}{key}` in {source}; {nearest(str(key), list(fields))}")
    kwargs = {}
    for name, field in fields.items():
        if name in values:
            kwargs[name] = _checked(field, values[name], hints[name], f"{prefix}{name}", source)
        elif "section" in field.metadata:
            kwargs[name] = build(hints[name], {}, prefix=f"{prefix}{name}.", source=source)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"`{prefix}{name}` is missing from {source}; {field.metadata['help']}")
    with within(prefix):
        return cls(**kwargs)


def _check_fields(config: Any) -> None:
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = _checked(field, getattr(config, field.name), hints[field.name], field.name, type(config).__name__)
        object.__setattr__(config, field.name, value)


def _checked(field: dataclasses.Field, value: Any, hint: Any, key: str, source: str) -> Any:
    value = _coerce(value, hint, key, source)
    choices = field.metadata.get("choices")
    if choices and value is not None and value not in choices:
        raise UserError(f"`{key}` must be one of {', '.join(choices)}; got {value!r} in {source}")
    return value


def _coerce(value: Any, hint: Any, key: str, source: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint):
            return value
        return build(hint, value, prefix=f"{key}.", source=source)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        inner = [a for a in arguments if a is not type(None)]
        return _coerce(value, inner[0], key, source)
    if origin is list:
        items = value if isinstance(value, list) else [value]
        return [_coerce(item, arguments[0], f"{key}[{i}]", source) for i, item in enumerate(items)]
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads `3e-4` (no dot) as a string.
        try:
            return float(value)
        except ValueError as error:
            raise UserError(f"`{key}` must be a number, got {value!r} in {source}") from error
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, str):
        return expand(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise UserError(f"`{key}` must be of type {hint.__name__}, got {value!r} in {source}")
    return value


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; an unreadable or malformed one is a :class:`UserError`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the configuration `{path}`: {error.strerror}; check --config") from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"`{path}` is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"`{path}` must hold keys and values, got {type(values).__name__}")
    return values


def parse_config(cls: type[Config], argv: Sequence[str], *, description: str, extra: Sequence[dict] = ()) -> tuple:
    """Parse ``--config FILE`` plus one ``--key value`` per key of `cls`.

    `extra` holds keyword dictionaries for further arguments of the command itself, each with a ``flag``.

    Returns:
        (configuration, namespace of the extra arguments)
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file; every key below may stand in it")
    for argument in extra:
        argument = dict(argument)
        parser.add_argument(argument.pop("flag"), **argument)
    keys = dict(_leaves(cls))
    group = parser.add_argument_group("configuration keys, as in the YAML file")
    for key, (field, hint) in keys.items():
        group.add_argument(f"--{key}", metavar=_type_name(hint), default=argparse.SUPPRESS, help=_describe(field))
    namespace, unknown = parser.parse_known_args(list(argv))
    for word in unknown:
        raise UserError(f"unknown argument `{word}`; {nearest(word.lstrip('-'), list(keys))}")
    values = read_yaml(namespace.config) if namespace.config else {}
    for key in keys:
        if hasattr(namespace, key):
            _set(values, key.split("."), _parse_scalar(getattr(namespace, key), keys[key][1]))
    source = str(namespace.config) if namespace.config else "the command line"
    return build(cls, values, source=source), namespace


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as plain containers, ready for YAML or JSON."""
    return dataclasses.asdict(config)


def _leaves(cls: type, prefix: str = ""):
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _leaves(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", (field, hints[field.name])


def _describe(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        default = f"default {field.default}"
    elif field.default_factory is not dataclasses.MISSING:
        default = f"default {field.default_factory()}"
    else:
        default = "required"
    parts = [field.metadata["help"]]
    if field.metadata["choices"]:
        parts.append("one of " + ", ".join(field.metadata["choices"]))
    if field.metadata["unit"]:
        parts.append(f"in {field.metadata['unit']}")
    return f"{'; '.join(parts)} [{default}]".replace("%", "%%")


def _type_name(hint: Any) -> str:
    arguments = [a for a in typing.get_args(hint) if a is not type(None)]
    return (arguments[0] if arguments else hint).__name__.upper()


def _parse_scalar(text: str, hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if text.lower() in ("null", "none"):
            return None
        [hint] = [a for a in typing.get_args(hint) if a is not type(None)]
    if typing.get_origin(hint) is list:
        [item] = typing.get_args(hint)
        if not text:
            return []
        # Lists are written as in a configuration file, or, of plain values, separated by commas.
        if dataclasses.is_dataclass(item) or text.startswith("["):
            return _yaml(text)
        return [_parse_scalar(part, item) for part in text.split(",")]
    # A string key keeps its text as typed: `--model 7` names a directory, not a number.
    if hint is str:
        return text
    return _yaml(text)


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"`{text}` on the command line is not a value: {' '.join(str(error).split())}") from error


def _set(values: dict, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        # An empty section of a file is None.
        if values.get(name) is None:
            values[name] = {}
        values = values[name]
        if not isinstance(values, dict):
            raise UserError(f"`{name}` must be a section with keys, got {values!r}")
    values[path[-1]] = value
