"""What a recipe says of an environment, whoever talks to it: [generate.turns] without the limits of
an episode."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from quiver.schemas.errors import ConfigError
from quiver.stages.common.config import Config, Runtime, without_folder
from quiver.stages.common.environments.adapters import OwnCode, check_source, code_hash, own_code


class EnvironmentConfig(Config):
    """Who answers the policy, and how long an answer may take."""

    environment: str = ""
    """A class of yours, `my_env.py:Guess`: its public methods are tools, or it has a method `step`;
    or `gymnasium:NAME`, or `openenv:URL`. Empty: `tools`."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call, `my_tools.py:search` each; `python`: the sandbox; `mcp:`
    and a command: the tools of that server."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """What the environment is made with, beside the row: its constructor's arguments."""
    step_seconds: Runtime[float] = Field(default=60.0, gt=0)
    """Longest time of one answer of the environment."""
    episode_seconds: Runtime[float] = Field(default=600.0, gt=0)
    """Longest time of all its answers in one episode; what the policy takes does not count."""
    processes: Runtime[int | None] = Field(default=None, ge=1)
    """Worker processes, each with many environments. None: one a core."""
    max_memory_gib: Runtime[float | None] = Field(default=None, gt=0)
    """Most private memory of a process. None: its share of the machine's."""
    fingerprint: str = ""
    """Filled in by the stage: hash of your code."""

    @model_validator(mode="after")
    def _names_one(self) -> EnvironmentConfig:
        if bool(self.environment) == bool(self.tools):
            raise ValueError("name an environment or tools, one of the two")
        if self.tools and self.arguments:
            raise ValueError("arguments are an environment's; tools take none")
        for source in self.sources:
            try:
                check_source(source, is_tool=not self.environment)
            except ConfigError as error:
                raise ValueError(error.message) from None
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """The environment, or the tools, as the recipe names them."""
        return (self.environment,) if self.environment else self.tools

    def own_code(self) -> list[OwnCode]:
        """The code of the user's that it names."""
        return own_code(self.environment, self.tools)

    def with_fingerprint(self) -> EnvironmentConfig:
        """With the hash of the code that it names, which is not run. ConfigError."""
        return self.model_copy(update={"fingerprint": code_hash(self.environment, self.tools)})

    def alone(self) -> EnvironmentConfig:
        """Without what a stage adds of its own."""
        names = EnvironmentConfig.model_fields
        return EnvironmentConfig(**{name: getattr(self, name) for name in names})

    def key(self) -> dict[str, Any]:
        """As the base has it; once the fingerprint is known, a file's folder does not count."""
        fields = super().key()
        if self.fingerprint:
            fields["environment"] = _without_folder(self.environment)
            fields["tools"] = [_without_folder(tool) for tool in self.tools]
        return fields


def _without_folder(source: str) -> str:
    """As `config.without_folder`, for names of code alone: a URL or a command stays whole."""
    is_code = source.rpartition(":")[0].endswith(".py") and not source.startswith("mcp:")
    return without_folder(source) if is_code else source
