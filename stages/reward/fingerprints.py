"""Which code, model or server scores: what enters the run_key, found by looking at files alone.

No process is started for it, no code of a user's runs, and torch is not imported.

    config, models = pinned(config)    # each scorer with its fingerprint; the manifest's models
"""

from __future__ import annotations

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.manifest import Model

from .config import Config
from .functions.config import fingerprint as function_fingerprint
from .models.config import fingerprint as model_fingerprint
from .models.config import model_entry
from .servers.config import fingerprint as server_fingerprint


def pinned(config: Config) -> tuple[Config, tuple[Model, ...]]:
    """`config` with the fingerprints of what scores, and the manifest's entries of all reward
    models. ConfigError where it asks for other code or another model than there is; SecurityError
    where a model is not whole."""
    models = tuple(map(model_entry, config.models))
    found = {
        "functions": map(function_fingerprint, config.functions),
        "models": map(model_fingerprint, models),
        "servers": map(server_fingerprint, config.servers),
    }
    pins = {}
    for kind, fingerprints in found.items():
        pins[kind] = ()
        for scorer, fingerprint in zip(getattr(config, kind), fingerprints, strict=True):
            if scorer.fingerprint not in ("", fingerprint):
                raise ConfigError(
                    f"reward {scorer.name}",
                    f"fingerprint expected {printable(scorer.fingerprint)}, found {fingerprint}",
                    next="restore what scored then, or take the fingerprint out of the recipe",
                )
            pins[kind] += (scorer.model_copy(update={"fingerprint": fingerprint}),)
    return config.model_copy(update=pins), models
