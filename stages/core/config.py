"""The base class of every config: frozen, strict about unknown keys, one docstring per field.

An unknown key is refused with the nearest known name. A field that changes how fast or where the
work runs, but not its result, is annotated `Runtime[...]`. It is left out of the run key, so a
rerun with another batch size is still "already done".

Not of the spine: a config reads like any pydantic model.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

from quiver.schemas.errors import ConfigError, printable, reason
from quiver.schemas.plain import problem_of
from quiver.stages.core.files import read_file
from quiver.stages.core.names_elsewhere import KEYS
from quiver.stages.core.threads import parse_python

_RUNTIME = "runtime knob: not part of the run_key"
_SURE = 0.8
"""A misspelt key more similar than this to a key of the same section is taken for that key."""
_T = TypeVar("_T")
Runtime = Annotated[_T, _RUNTIME]


def _without_truth(schema: Any) -> Any:
    """Return a copy of a pydantic core schema in which no number accepts true or false."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_without_truth, schema))
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "function-before" and schema["function"]["function"] is _not_truth:
        return schema  # a section, whose schema was changed already
    if schema.get("type") in ("int", "float"):
        return core_schema.no_info_before_validator_function(_not_truth, schema)
    kept = ("default", "metadata", "serialization")
    return {name: part if name in kept else _without_truth(part) for name, part in schema.items()}


def _not_truth(number: Any) -> Any:
    if isinstance(number, bool):
        raise ValueError("a number is expected")
    return number


class Config(BaseModel):
    """A typed section of a recipe."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _is_plain(cls, fields: Any) -> Any:
        """Refuse values that cannot be stored.

        Free values, such as a function's arguments, are written to a manifest too, and whole
        numbers go to libraries that hold 64 bits of them.
        """
        problem = problem_of(fields, bits=64)
        if problem:
            raise ValueError(printable(problem))
        return fields

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        # pydantic accepts true as the number 1; its strict types would also refuse a list for a
        # tuple
        return _without_truth(handler(source))

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        # pydantic's use_attribute_docstrings would read the source of every imported class
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in descriptions(cls).items():
            if name in properties:
                properties[name]["description"] = text
        return schema

    def key(self) -> dict[str, Any]:
        """Return the resolved values that decide the result, as plain JSON, for the run key."""
        fields = type(self).model_fields.items()
        knobs = {name for name, field in fields if _RUNTIME in field.metadata}
        dumped = self.model_dump(mode="json", exclude=knobs)
        for name in dumped:
            value = getattr(self, name)
            if isinstance(value, Config):
                dumped[name] = value.key()
            elif isinstance(value, tuple):
                for index, member in enumerate(value):
                    if isinstance(member, Config):
                        dumped[name][index] = member.key()
        return dumped


@cache
def descriptions(cls: type[Config]) -> dict[str, str]:
    """Return the docstring under each field, by the field's name."""
    texts = {}
    for part in reversed(cls.__mro__):
        if not issubclass(part, Config) or part is Config:
            continue
        # not the source of the class: to find it, inspect parses the file in its own way
        module = parse_python(inspect.getsource(sys.modules[part.__module__]))
        (definition,) = (
            node
            for node in module.body
            if isinstance(node, ast.ClassDef) and node.name == part.__name__
        )
        for field, below in pairwise(definition.body):
            match field, below:
                case ast.AnnAssign(target), ast.Expr(ast.Constant(str(text))):
                    texts[target.id] = inspect.cleandoc(text)
    return texts


def without_folder(name: str) -> str:
    """Return a file name as the run key has it: without its folder, since the bytes are hashed.

    >>> without_folder("/srv/quiver/mine.py:score"), without_folder("rows.jsonl")
    ('mine.py:score', 'rows.jsonl')
    """
    return name.rpartition("/")[2]


class Key(NamedTuple):
    """One key of a config, or of a section below it."""

    path: str
    """`sampling.temperature`; for a list of tables, the key in one of them: `functions.use`."""
    field: FieldInfo
    owner: type[Config]
    """The class that has the field; `descriptions(owner)` holds its docstring."""
    section: type[Config] | None
    """The class of the keys below this key, if any."""

    @property
    def is_runtime(self) -> bool:
        """True if the key is left out of the run key."""
        return _RUNTIME in self.field.metadata


def keys_of(cls: type[Config], prefix: str = "") -> Iterator[Key]:
    """Yield every key of a config and its sections, in order, each path starting with `prefix`."""
    for name, field in cls.model_fields.items():
        section = _model_in(field.annotation)
        yield Key(prefix + name, field, cls, section)
        if section is not None:
            yield from keys_of(section, f"{prefix}{name}.")


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the sections of a recipe's TOML file. Raises ConfigError with the file or line."""
    try:
        return tomllib.loads(read_file(path).decode("utf-8-sig"))
    except FileNotFoundError:
        problem = "there is no such file"
    except (OSError, ValueError, RecursionError) as error:
        problem = reason(error)
    advice = "correct the file, or name another, e.g. deployments/recipes/demo.toml"
    raise ConfigError(f"recipe {path}", problem, next=advice)


def parse(
    cls: type[_T],
    data: dict[str, Any],
    name: str,
    *,
    is_section: bool = False,
    context: dict[str, Any] | None = None,
) -> _T:
    """Parse `data` as a `cls`.

    Args:
        name: the name for error messages, such as a recipe's section (`generate.options`).
        is_section: if true, `name` is a section, and keys are named with their full path.
        context: for the validators of `cls`.

    Raises:
        ConfigError: says which field is wrong, what was given, what is allowed, and what to do.
    """
    try:
        return cls.model_validate(data, context=context)
    except ValidationError as error:
        raise _explain(cls, error, name, name.split(".") if is_section else []) from None


_EXPECTED = {
    **dict.fromkeys(("model_type", "dict_type"), "expected a table of keys"),
    **dict.fromkeys(("tuple_type", "list_type"), "expected a list"),
}
"""Words for pydantic's types of errors whose own words name Python's types."""


def _explain(
    cls: type[BaseModel], error: ValidationError, name: str, prefix: list[str]
) -> ConfigError:
    problems = []
    keys_to_read: list[str] = []
    for entry in error.errors(include_url=False):
        place = _place(cls, entry["loc"], prefix)
        path = printable(place.path)
        cause = entry.get("ctx", {}).get("error")
        key = ".".join(place.names)
        if entry["type"] == "extra_forbidden":
            similar = _similar_keys(cls, place, str(entry["loc"][-1]), prefix)
            meant = " or ".join(
                f"{name} at the top of the recipe"
                if key and "." not in name
                else name.removeprefix(f"{key}.")
                for name in similar
            )
            problem = f"unknown key {path}" + (f"; did you mean {meant}?" if similar else "")
            key = similar[0] if similar else key
        elif entry["type"] == "missing":
            problem = f"{path} is missing"
        elif isinstance(cause, ConfigError) and not path:
            problem = cause.message  # it names its keys itself
            _, _, key = cause.next.partition("quiver keys ")
        else:
            expected = _EXPECTED.get(entry["type"], entry["msg"])
            message = cause.message if isinstance(cause, ConfigError) else expected
            problem = printable(message.removeprefix("Value error, "))
            is_table = entry["type"] in ("model_type", "dict_type")
            if entry["type"] in ("tuple_type", "list_type") and isinstance(entry["input"], dict):
                problem = f"is one table, expected a list of them: write [[{key}]]"
            elif is_table and path and isinstance(entry["input"], list):
                problem = "is a list, expected one table"
                problem += f": write [{key}]" if path == key else ""
            if not (is_table or place.section) and _is_flat(entry["input"]):
                problem += f", got {printable(repr(entry['input']))}"
            elif isinstance(entry["input"], str):
                problem += ", got a text"
            if path:  # the object of the error names the whole
                problem = f"{path}: {problem}"
        problems.append(problem)
        keys_to_read.append(key)
    next_step = "correct the key and run again"
    if keys_to_read[0] and (prefix or name.startswith("recipe ")):
        next_step = f"quiver keys {keys_to_read[0]}"
    return ConfigError(name, "; ".join(problems), next=next_step)


def _is_flat(given: Any) -> bool:
    """Return True if no table is in `given`: a table may hold a secret, which no message shows."""
    members = given if isinstance(given, list | tuple) else [given]
    return not any(isinstance(member, dict | list | tuple) for member in members)


class _Place(NamedTuple):
    """The position of a problem in a config."""

    path: str
    """Path as in the recipe, with the number of a table in a list: `reward.functions.0.use`."""
    names: list[str]
    """Names of the known keys on the way."""
    section: type[BaseModel] | None
    """The class of the keys below the last of them."""


def _place(cls: type[BaseModel], location: tuple[int | str, ...], prefix: list[str]) -> _Place:
    """Locate a pydantic `location`, leaving out the union types that it mentions on the way."""
    shown: list[str] = list(prefix)
    names = list(prefix)
    section: Any = cls
    is_table = False
    for part in location:
        fields = getattr(section, "model_fields", {})
        if part in fields:
            names.append(part)
            is_table = "dict[" in str(fields[part].annotation)
            section = _model_in(fields[part].annotation)
        elif not isinstance(part, int) and section is None and (not is_table or part == "[key]"):
            continue
        shown.append(str(part))
    return _Place(".".join(shown), names, section)


def _similar_keys(cls: type[BaseModel], place: _Place, key: str, prefix: list[str]) -> list[str]:
    """Return the paths that an unknown key may stand for.

    These are a key of the same section with a similar spelling, or keys of that name in other
    sections.
    """
    all_paths = [".".join([*prefix, entry.path]) for entry in keys_of(cls)]
    meant = KEYS.get(key, "")
    # the keys of an engine's options are known by the section alone
    if meant in all_paths or meant.rpartition(".")[0] in all_paths:
        return [meant]
    names = list(getattr(place.section, "model_fields", {}))
    leaves = [path.rpartition(".")[2] for path in all_paths]
    tries = ((1.0, leaves), (_SURE + 0.01, names), (_SURE, leaves), (0.5, names))
    for similarity, known in tries:
        near = difflib.get_close_matches(key, known, 1, similarity)
        if near and known is names:
            return [".".join([*place.names, *near])]
        if near:
            return [path for path in all_paths if path.rpartition(".")[2] in near][:3]
    return []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model in `annotation`, which may be a list, table or union of it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
