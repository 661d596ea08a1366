"""Functions and methods as JSON schemas, and what is said where one lacks something."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property, partialmethod
from typing import Literal, NotRequired, Optional, TypedDict

import pytest
from pydantic import BaseModel
from transformers.utils.chat_template_utils import get_json_schema

from quiver.schemas.errors import ConfigError
from quiver.stages.turns.tool_schemas import run_tool, schema_of, tool_methods


def look_up(word: str, most: int = 3) -> str:
    """Say what a word means.

    Args:
        word: The word.
        most: How many meanings.

    Returns:
        One line a meaning.
    """
    return word * most


def test_a_function_is_what_its_docstring_and_signature_say():
    schema = schema_of(look_up, "my_tools.py:look_up")
    assert schema["function"]["parameters"]["properties"]["most"].pop("default") == 3
    assert schema == get_json_schema(look_up)


class Unit(enum.Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


@dataclass
class Point:
    x: float
    y: float = 0.0


class Area(BaseModel):
    title: str
    corners: list[Point]


class Place(TypedDict):
    city: str
    zip: NotRequired[str]


class Tree(TypedDict):
    name: str
    children: list[Tree]


def find(
    place: Place,
    days: list[int],
    area: Area,
    unit: Unit = Unit.CELSIUS,
    mode: Literal["fast", "slow"] = "fast",
    note: Optional[str] = None,  # noqa: UP045
    size: int | str = 3,
    filters: list[dict[str, int]] | None = None,
    tree: Tree | None = None,
    pair: tuple[int, str] = (1, "a"),
    order: str = "up",
) -> str:
    """Find it.

    Args:
        place: Where.
        days: Which days.
        area: Within what.
        unit: Of the answer.
        mode: How.
        note: Anything.
        size: How large.
        filters: Beside.
        tree: A tree.
        pair: A pair.
        order: Of the answer (choices: ["up", "down"])
    """
    return f"{place['city']} {days} {area.corners[0].y} {unit.name} {pair}"


POINT = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "y": {"type": "number", "default": 0.0}},
    "required": ["x"],
}
TREE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
    },
    "required": ["name", "children"],
}


def test_nested_types_are_described():
    parameters = schema_of(find, "my_tools.py:find")["function"]["parameters"]
    assert parameters["required"] == ["place", "days", "area"]
    assert parameters["$defs"] == {"Tree": TREE}
    shown = parameters["properties"]
    expected = {
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["city"],
            "description": "Where.",
        },
        "unit": {"description": "Of the answer.", "enum": ["c", "f"], "type": "string", "default": "c"},
        "note": {"type": "string", "nullable": True, "description": "Anything."},
        "size": {"type": ["integer", "string"], "default": 3, "description": "How large."},
        "filters": {
            "type": "array",
            "items": {"type": "object", "additionalProperties": {"type": "integer"}},
            "nullable": True,
            "description": "Beside.",
        },
        "tree": {**TREE, "nullable": True, "description": "A tree."},
    }  # fmt: skip
    assert {name: shown[name] for name in expected} == expected
    corners = {"type": "array", "items": POINT}
    assert shown["area"]["properties"] == {"title": {"type": "string"}, "corners": corners}
    assert shown["pair"]["prefixItems"] == [{"type": "integer"}, {"type": "string"}]
    enums = {"mode": ["fast", "slow"], "order": ["up", "down"]}
    assert {name: shown[name]["enum"] for name in enums} == enums


GOOD = {
    "place": {"city": "Rome"},
    "days": [1, 2],
    "area": {"title": "a", "corners": [{"x": 1}]},
}


def test_a_function_gets_what_its_types_say():
    assert run_tool(find, GOOD) == "Rome [1, 2] 0.0 CELSIUS (1, 'a')"
    assert run_tool(find, {**GOOD, "unit": "f", "pair": [2, "b"]}).endswith("FAHRENHEIT (2, 'b')")


@pytest.mark.parametrize(
    "changed, why",
    [
        ({"place": {}}, "place.city: Field required"),
        ({"place": "Rome"}, "place: Input should be an object"),
        ({"days": ["1"]}, "days.0: Input should be a valid integer"),
        ({"days": [True]}, "days.0: Input should be a valid integer"),
        ({"unit": "k"}, "unit: Input should be 'c' or 'f'"),
        ({"mode": "quick"}, "mode: Input should be 'fast' or 'slow'"),
        ({"area": {"title": "a", "corners": [{}]}}, "area.corners.0.x: Field required"),
        ({"where": 1}, "where: Unexpected keyword argument"),
    ],
)
def test_a_call_that_does_not_fit_is_not_made(changed, why):
    with pytest.raises(TypeError, match=why):
        run_tool(find, {**GOOD, **changed})


OWN = {
    "name": "find",
    "description": "Find it.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def own(schema):
    def anything(**arguments):
        return arguments

    anything.schema = schema
    return anything


@pytest.mark.parametrize("schema", [OWN, {"type": "function", "function": OWN}])
def test_a_tool_may_carry_its_own_schema(schema):
    tool = own(schema)
    assert schema_of(tool, "my_tools.py:x") == {"type": "function", "function": OWN}
    assert run_tool(tool, {"city": "Rome", "days": 2}) == {"city": "Rome", "days": 2}
    for arguments, why in [
        ({}, "'city' is a required property"),
        ({"city": 3}, "city: 3 is not of type 'string'"),
        ({"city": "Rome", "days": 0}, "days: 0 is less than the minimum of 1"),
        ({"city": "Rome", "unit": "c"}, "'unit' was unexpected"),
    ]:
        with pytest.raises(TypeError, match=why):
            run_tool(tool, arguments)


def without_docstring(word: str) -> str:
    return word


def without_type(word) -> str:
    """Say it.

    Args:
        word: The word.
    """


def without_description(word: str) -> str:
    """Say it."""


def of_no_json(word: Exception) -> str:
    """Say it.

    Args:
        word: The word.
    """


def without_name(word: str, /) -> str:
    """Say it.

    Args:
        word: The word.
    """


@pytest.mark.parametrize(
    "function, why",
    [
        (without_docstring, "no docstring"),
        (without_type, "parameter word has no type"),
        (without_description, "'word'"),
        (of_no_json, "Exception"),
        (without_name, "parameter word cannot be given by its name"),
        (own("city"), "name in its schema"),
        (own({"name": "find"}), 'no object "parameters"'),
        (own({"name": "find", "parameters": {"type": "town"}}), "'town' is not valid"),
    ],
)
def test_what_is_missing_is_named_with_file_and_function(function, why):
    with pytest.raises(ConfigError, match=why) as refusal:
        schema_of(function, "my_tools.py:Mine")
    assert function.__name__ in refusal.value.object and "my_tools.py:Mine" in refusal.value.object
    assert "Args:" in refusal.value.next


class Shop:
    """An environment whose tools are its public methods."""

    def reset(self, **columns) -> None:
        """Begin."""

    def price(self, thing: str) -> int:
        """What a thing costs.

        Args:
            thing: Its name.
        """
        raise ValueError(f"no {thing} here")

    @property
    def total(self) -> int:
        raise AssertionError("a property is no tool, and is not read")

    @cached_property
    def shelves(self) -> list:
        raise AssertionError("nor is one that is kept")

    @staticmethod
    def greet() -> str:
        """Say hello."""

    @classmethod
    def name(cls) -> str:
        """The shop's name."""

    price_of_bread = partialmethod(price, thing="bread")

    def get_reward(self) -> float:
        """The reward."""

    def close(self) -> None:
        """End."""

    def _secret(self) -> None:
        """Not for others."""


def test_public_methods_are_tools_and_the_protocol_is_none():
    tools = tool_methods(Shop())
    assert [*tools] == ["greet", "name", "price", "price_of_bread"]
    price = tools["price"]
    schema = schema_of(price, "shop.py:Shop")["function"]
    assert list(schema["parameters"]["properties"]) == ["thing"]
    with pytest.raises(ValueError, match=r"^no bread here$"):
        run_tool(price, {"thing": "bread"})


class Titled(TypedDict):
    city: str
    title: str


def test_parameters_may_have_names_of_the_schema_language():
    def find(default: Titled, enum: list[Titled], required: bool, title: str) -> str:
        """Find.

        Args:
            default: The first.
            enum: The others.
            required: Whether.
            title: A name.
        """

    parameters = schema_of(find, "shop.py:find")["function"]["parameters"]
    place = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "title": {"type": "string"}},
        "required": ["city", "title"],
    }
    assert parameters["properties"] == {
        "default": {**place, "description": "The first."},
        "enum": {"type": "array", "items": place, "description": "The others."},
        "required": {"type": "boolean", "description": "Whether."},
        "title": {"type": "string", "description": "A name."},
    }
    assert "$defs" not in parameters
