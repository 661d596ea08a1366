"""Which code, model or server scores: what enters the run_key, found by looking at files alone.

No process is started for it, no code of a user's runs, and torch is not imported.

    models = model_entries(config)             # of the manifest
    config = pinned(config, models)            # each scorer with its fingerprint
"""

from __future__ import annotations

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.manifest import Model

from .config import Config
from .functions.config import fingerprint as function_fingerprint
from .models.config import fingerprint as model_fingerprint
from .models.config import model_entry
from .servers.config import fingerprint as server_fingerprint


def model_entries(config: Config, *, remembered: bool = True) -> tuple[Model, ...]:
    """The manifest's entries of all reward models, in their order. ConfigError, SecurityError: one
    is not there, or not whole."""
    return tuple(model_entry(model, remembered=remembered) for model in config.models)


def require_planned(config: Config) -> None:
    """Every byte of what scores is read: its hash goes into a new manifest. ConfigError where it is
    not what the `pinned` config says."""
    pinned(config, model_entries(config, remembered=False), remembered=False)


def pinned(config: Config, models: tuple[Model, ...], *, remembered: bool = True) -> Config:
    """`config` with the fingerprints of what scores; `models`: the `model_entries`. ConfigError
    where it asks for other code or another model than there is."""
    function_fingerprints = [
        function_fingerprint(function, remembered=remembered) for function in config.functions
    ]
    found = {
        "functions": function_fingerprints,
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
                    next="restore what scored then, or run again without that fingerprint",
                )
            pins[kind] += (scorer.model_copy(update={"fingerprint": fingerprint}),)
    return config.model_copy(update=pins)
