"""Which code, model or server scores: what enters the run_key, found by looking at files alone.

No process is started for it, no code of a user's runs, and torch is not imported.

    models = model_entries(config)             # of the manifest
    config = pinned(config, models)            # each scorer with its fingerprint
"""

from __future__ import annotations

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.manifest import Model

from .config import SCORERS, Config
from .functions.config import fingerprint as function_fingerprint
from .models.config import fingerprint as model_fingerprint
from .models.config import model_entry
from .servers.config import fingerprint as server_fingerprint


def model_entries(config: Config) -> tuple[Model, ...]:
    """The manifest's entries of all reward models, in their order. ConfigError, SecurityError: one
    is not there, or not whole."""
    return tuple(model_entry(model) for model in config.models)


def fingerprints(config: Config, models: tuple[Model, ...]) -> dict[str, str]:
    """The fingerprint of each scorer, by its name; `models`: the `model_entries`. ConfigError."""
    return {
        **{function.name: function_fingerprint(function) for function in config.functions},
        **{
            model.name: model_fingerprint(entry)
            for model, entry in zip(config.models, models, strict=True)
        },
        **{server.name: server_fingerprint(server) for server in config.servers},
    }


def pinned(config: Config, models: tuple[Model, ...]) -> Config:
    """`config` with the fingerprints of what scores. ConfigError where it asks for other code or
    another model than there is."""
    by_name = fingerprints(config, models)
    for scorer in config.scorers:
        if scorer.fingerprint not in ("", by_name[scorer.name]):
            raise ConfigError(
                f"reward {scorer.name}",
                f"fingerprint expected {printable(scorer.fingerprint)}, found "
                f"{by_name[scorer.name]}",
                next="restore what scored then, or take the fingerprint out of the recipe",
            )
    return config.model_copy(
        update={
            kind: tuple(
                scorer.model_copy(update={"fingerprint": by_name[scorer.name]})
                for scorer in getattr(config, kind)
            )
            for kind in SCORERS
        }
    )
