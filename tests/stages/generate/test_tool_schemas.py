"""Functions and methods as JSON schemas, and what is said where one lacks something."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, NotRequired, Optional, TypedDict

import pytest
from pydantic import BaseModel
from transformers.utils.chat_template_utils import get_json_schema

from quiver.schemas.errors import ConfigError
from quiver.stages.common.environments.tool_schemas import (
    run_tool,
    schema_of,
    tool_methods,
)


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
    function = schema["function"]
    assert function["parameters"]["properties"]["most"].pop("default") == 3
    assert schema == get_json_schema(look_up)
    assert function["name"] == "look_up" and function["description"] == "Say what a word means."
    parameters = function["parameters"]
    assert parameters["required"] == ["word"]
    assert parameters["properties"]["most"] == {
        "type": "integer",
        "description": "How many meanings.",
    }


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
    properties = parameters["properties"]
    assert properties["place"] == {
        "type": "object",
        "properties": {"city": {"type": "string"}, "zip": {"type": "string"}},
        "required": ["city"],
        "description": "Where.",
    }
    assert properties["area"]["properties"] == {
        "title": {"type": "string"},
        "corners": {"type": "array", "items": POINT},
    }
    shown = {"description": "Of the answer.", "enum": ["c", "f"], "type": "string", "default": "c"}
    assert properties["unit"] == shown
    assert (
        properties["mode"]["enum"] == ["fast", "slow"] and properties["mode"]["default"] == "fast"
    )
    assert properties["note"] == {"type": "string", "nullable": True, "description": "Anything."}
    assert (
        properties["size"]["type"] == ["integer", "string"] and properties["size"]["default"] == 3
    )
    items = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert properties["filters"]["items"] == items and properties["filters"]["nullable"] is True
    assert properties["tree"]["nullable"] is True and properties["tree"]["required"] == [
        "name",
        "children",
    ]
    assert properties["pair"]["prefixItems"] == [{"type": "integer"}, {"type": "string"}]
    assert properties["order"]["enum"] == ["up", "down"]


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


def test_what_a_tool_raises_is_its_own():
    def fail(a: int) -> int:
        raise ValueError(f"not {a}")

    with pytest.raises(ValueError, match=r"^not 1$"):
        run_tool(fail, {"a": 1})


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


@pytest.mark.parametrize("schema", [OWN, {"type": "function", "function": OWN}])
def test_a_tool_may_carry_its_own_schema(schema):
    def anything(**arguments):
        return arguments

    anything.schema = schema
    assert schema_of(anything, "my_tools.py:x") == {"type": "function", "function": OWN}
    assert run_tool(anything, {"city": "Rome", "days": 2}) == {"city": "Rome", "days": 2}
    for arguments, why in [
        ({}, "'city' is a required property"),
        ({"city": 3}, "city: 3 is not of type 'string'"),
        ({"city": "Rome", "days": 0}, "days: 0 is less than the minimum of 1"),
        ({"city": "Rome", "unit": "c"}, "'unit' was unexpected"),
    ]:
        with pytest.raises(TypeError, match=why):
            run_tool(anything, arguments)


@pytest.mark.parametrize(
    "schema, why",
    [
        ("city", "name in its schema"),
        ({"name": "find"}, 'no object "parameters"'),
        ({"name": "find", "parameters": {"type": "town"}}, "'town' is not valid"),
    ],
)
def test_a_schema_that_is_none_is_refused(schema, why):
    def anything(**arguments):
        return arguments

    anything.schema = schema
    with pytest.raises(ConfigError, match=why) as refusal:
        schema_of(anything, "my_tools.py:x")
    assert "anything of my_tools.py:x" in refusal.value.object


def test_a_type_that_json_has_no_word_for_is_named():
    def show(picture: Exception) -> str:
        """Show.

        Args:
            picture: It.
        """

    with pytest.raises(ConfigError, match="Exception"):
        schema_of(show, "my_tools.py:show")


def without_docstring(word: str) -> str:
    return word


def without_type(word) -> str:
    """Say it.

    Args:
        word: The word.
    """
    return word


def without_description(word: str) -> str:
    """Say it."""
    return word


@pytest.mark.parametrize(
    "function, why",
    [
        (without_docstring, "no docstring"),
        (without_type, "parameter word has no type"),
        (without_description, "'word'"),
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
        self.bought = []

    def price(self, thing: str) -> int:
        """What a thing costs.

        Args:
            thing: Its name.
        """
        return len(thing)

    def buy(self, thing: str) -> str:
        """Buy a thing.

        Args:
            thing: Its name.
        """
        return f"bought {thing}"

    @property
    def total(self) -> int:
        raise AssertionError("a property is no tool, and is not read")

    def get_reward(self) -> float:
        return 1.0

    def close(self) -> None:
        pass

    def _secret(self) -> None:
        pass


def test_public_methods_are_tools_and_the_protocol_is_none():
    methods = tool_methods(Shop())
    assert list(methods) == ["buy", "price"]
    schema = schema_of(methods["price"], "shop.py:Shop")["function"]
    assert list(schema["parameters"]["properties"]) == ["thing"]


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
