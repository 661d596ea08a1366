"""The base of every config: frozen, refuses unknown keys (naming the nearest), a docstring under
each field.

A field that changes how fast or where the work runs, but not what comes out, is annotated
`Runtime[...]`; it is left out of the run_key, so a rerun with another batch size is still "already
done".

A field that comes to a config of which stores hold versions already is annotated `Added[...]`; it
is left out of the run_key while it has its default, so what was made before it came stays found. A
field that goes is still read from old manifests: `parse_saved`.

Not of the spine: a config reads like any pydantic model.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.plugins import ROOMS, did_you_mean

_RUNTIME = "runtime knob: not part of the run_key"
_ADDED = "came later: not part of the run_key while it has its default"
_T = TypeVar("_T")
Runtime = Annotated[_T, _RUNTIME]
Added = Annotated[_T, _ADDED]


class Config(BaseModel):
    """A typed section of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        # pydantic's use_attribute_docstrings reads the source of each class that is imported
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in descriptions(cls).items():
            if name in properties:
                properties[name]["description"] = text
        return schema

    def key(self) -> dict[str, Any]:
        """The resolved values that decide the outcome, as plain JSON: what enters the run_key."""
        fields = type(self).model_fields
        left_out = {
            name
            for name, field in fields.items()
            if _RUNTIME in field.metadata
            or (name in added(type(self)) and getattr(self, name) == field.get_default())
        }
        dumped = self.model_dump(mode="json", exclude=left_out)
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
def added(cls: type[Config]) -> frozenset[str]:
    """The fields of `cls` that are annotated `Added[...]`."""
    return frozenset(name for name, field in cls.model_fields.items() if _ADDED in field.metadata)


@cache
def descriptions(cls: type[Config]) -> dict[str, str]:
    """The docstring under each field, by the field's name."""
    texts = {}
    for part in reversed(cls.__mro__):
        if not issubclass(part, Config) or part is Config:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0].body
        for field, below in pairwise(body):
            match field, below:
                case ast.AnnAssign(target), ast.Expr(ast.Constant(str(text))):
                    texts[target.id] = inspect.cleandoc(text)
    return texts


def without_folder(name: str) -> str:
    """What a key says of a file, of `file.py:function` or of `package.module:function` beside the
    hash of its bytes.

    It leaves out the folder, and of our own modules the `quiver.` that older names lack.

    >>> without_folder("/srv/quiver/mine.py:score"), without_folder("rows.jsonl")
    ('mine.py:score', 'rows.jsonl')
    >>> without_folder("quiver.deployments.recipes.larger:rows")
    'deployments.recipes.larger:rows'
    """
    name = name.rpartition("/")[2]
    is_ours = name.startswith(tuple(f"quiver.{room}." for room in ROOMS))
    return name.removeprefix("quiver.") if is_ours else name


def parse(cls: type[_T], data: dict[str, Any], name: str) -> _T:
    """`data` as a `cls`; ConfigError says which field of `name` is wrong, what came, what is
    allowed and what to do."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise _explain(cls, error, name) from None


def parse_saved(cls: type[_T], data: dict[str, Any], name: str) -> tuple[_T, dict[str, Any]]:
    """`data` of a manifest as a `cls`, and what it says under keys that have gone since, by path.
    ConfigError."""
    gone: dict[str, Any] = {}
    data = copy.deepcopy(data)
    try:
        return cls.model_validate(data), gone
    except ValidationError as error:
        for entry in error.errors(include_url=False):
            if entry["type"] == "extra_forbidden":
                *path, key = entry["loc"]
                section = data
                for part in path:  # names the chosen class of a union too, which the data do not
                    if isinstance(part, int) or part in section:
                        section = section[part]
                gone[".".join(map(str, entry["loc"]))] = section.pop(key)
    return parse(cls, data, name), gone


def _explain(cls: type[BaseModel], error: ValidationError, name: str) -> ConfigError:
    problems = []
    for entry in error.errors(include_url=False):
        path = ".".join(map(str, entry["loc"]))
        if entry["type"] == "extra_forbidden":
            *parents, key = entry["loc"]
            problem = f"unknown key {printable(path)}{_hint(str(key), _fields(cls, parents))}"
        elif entry["type"] == "missing":
            problem = f"{path} is missing"
        else:
            problem = printable(entry["msg"].removeprefix("Value error, "))
            if entry["type"] != "value_error" or not isinstance(entry["input"], dict):
                problem += f", got {printable(repr(entry['input']))}"
            if path:  # the whole is named by the error itself
                problem = f"{path}: {problem}"
        problems.append(problem)
    return ConfigError(name, "; ".join(problems), next="correct the key and run again")


def _hint(key: str, names: list[str]) -> str:
    """Tells the name whose initials `key` is (lr: learning_rate), or one that is spelled like
    it."""
    for name in names:
        if "_" in name and key.lower() == "".join(word[:1] for word in name.split("_")):
            return f"; did you mean {name}?"
    return did_you_mean(key, names)


def _fields(cls: Any, parents: list[Any]) -> list[str]:
    for part in parents:
        if isinstance(part, int) or not hasattr(cls, "model_fields"):
            continue
        field = cls.model_fields.get(part)
        cls = _model_in(field.annotation) if field else None
    return list(getattr(cls, "model_fields", {}))


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """`annotation` itself, or what it is a list, a table or a choice of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
