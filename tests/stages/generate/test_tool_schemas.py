"""Functions and methods as JSON schemas, and what is said where one lacks something."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from quiver.schemas.errors import ConfigError
from quiver.stages.common.environments.tool_schemas import schema_of, tool_methods


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
    assert schema == get_json_schema(look_up)
    function = schema["function"]
    assert function["name"] == "look_up" and function["description"] == "Say what a word means."
    parameters = function["parameters"]
    assert parameters["required"] == ["word"]
    assert parameters["properties"]["most"] == {
        "type": "integer",
        "description": "How many meanings.",
    }


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
