"""Configuration of an environment: [generate.turns] without the limits of an episode."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from quiver.schemas.errors import ConfigError
from quiver.stages.common.config import Config, Runtime, without_folder
from quiver.stages.common.environments.adapters import OwnCode, check_source, code_hash, own_code


class EnvironmentConfig(Config):
    """The environment or tools that answer the policy, and time limits of the answers."""

    environment: str = ""
    """A class of yours, `my_env.py:Guess`, with a method `step` or with public methods as tools; or
    `gymnasium:NAME`, or `openenv:URL`. If empty, `tools` are used."""
    tools: tuple[str, ...] = ()
    """Tools that the policy may call: a function of yours, `my_tools.py:search`; the sandbox,
    `python`; or the tools of an MCP server, `mcp:` and the command that starts it."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's constructor."""
    step_seconds: Runtime[float] = Field(default=60.0, gt=0)
    """Time limit of one answer of the environment."""
    episode_seconds: Runtime[float] = Field(default=600.0, gt=0)
    """Time limit of all its answers in one episode; the policy's own time does not count."""
    processes: Runtime[int | None] = Field(default=None, ge=1)
    """Worker processes, each with many environments. Default: one per core."""
    max_memory_gib: Runtime[float | None] = Field(default=None, gt=0)
    """Limit of a process's private memory. Default: its share of the machine's memory."""
    fingerprint: str = ""
    """Hash of your code, filled in by the stage."""

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
        """The environment, or the tools, as named in the recipe."""
        return (self.environment,) if self.environment else self.tools

    def own_code(self) -> list[OwnCode]:
        """Return the user's own code that this configuration names."""
        return own_code(self.environment, self.tools)

    def with_fingerprint(self) -> EnvironmentConfig:
        """Return a copy with the hash of the named code, which is not run. Raises ConfigError."""
        return self.model_copy(update={"fingerprint": code_hash(self.environment, self.tools)})

    def alone(self) -> EnvironmentConfig:
        """Return a copy with these fields only, without those that a stage's subclass adds."""
        names = EnvironmentConfig.model_fields
        return EnvironmentConfig(**{name: getattr(self, name) for name in names})

    def key(self) -> dict[str, Any]:
        """Return the fields of the run key. Once the fingerprint is known, folders do not count."""
        fields = super().key()
        if self.fingerprint:
            fields["environment"] = _without_folder(self.environment)
            fields["tools"] = [_without_folder(tool) for tool in self.tools]
        return fields


def _without_folder(source: str) -> str:
    """Apply `config.without_folder` to names of code only: a URL or a command stays whole."""
    is_code = source.rpartition(":")[0].endswith(".py") and not source.startswith("mcp:")
    return without_folder(source) if is_code else source
