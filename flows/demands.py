"""Checks that a recipe's servers, hosts and GPUs are there, before anything runs.

They use the recipe, the environment and this host's devices, so that a missing device is not found
after hours of sampling.

    check_demands(recipe)      # ConfigError says which stage could not begin

Not of the spine: the results of a recipe do not depend on these checks.
"""

from __future__ import annotations

from quiver.schemas.errors import ConfigError
from quiver.stages.common.models.devices import engine_gpus
from quiver.stages.common.runtime.call import Call
from quiver.stages.common.servers import secret
from quiver.stages.generate.engine import engine_options
from quiver.stages.generate.options import VllmServerOptions

from .recipe import Recipe
from .slots import require_gpus


def check_demands(recipe: Recipe) -> None:
    """Raise ConfigError if a stage that runs here could not begin. Stages in pools are checked
    there."""
    elsewhere = recipe.placement.pools
    lora = recipe.optimize.lora
    if "generate" not in elsewhere:
        for evaluation in {False, recipe.data.held_out is not None}:
            config = recipe.generate_config(1, evaluation=evaluation)
            options = engine_options(config.engine, config.options)
            if isinstance(options, VllmServerOptions):
                section = "evaluate.generate" if evaluation else "generate"
                secret(options.token, f"{section}.options.token")
                num_policies = 2 if evaluation else recipe.iterations
                is_adapter = lora is not None and lora.save == "adapter"
                advice = 'set generate.engine = "vllm"'
                problem = ""
                if recipe.data.images:
                    problem = "prompts with pictures (data.images) are not sent to servers"
                elif is_adapter and num_policies > 1:
                    problem = (
                        "a policy that is an adapter alone has no weights that a server could load"
                    )
                    advice = 'set optimize.lora.save = "merged"'
                elif num_policies > 1 and not options.wait_seconds:
                    problem = (
                        f"{num_policies} policies need servers one after another, and it waits for "
                        "none"
                    )
                    advice = (
                        f"set {section}.options.wait_seconds to as long as a server takes to start"
                    )
                if problem:
                    raise ConfigError(f"{section}.engine vllm-server", problem, next=advice)
            devices = recipe.placement.devices
            needed = engine_gpus(config.options)
            if isinstance(devices, int) and config.engine == "vllm" and devices < needed:
                raise ConfigError(
                    "placement.devices",
                    f"{devices} GPUs are fewer than one engine of generate.options takes, {needed}",
                    next=f"set placement.devices to {needed} or a multiple of it",
                )
            require_gpus(Call("generate", config.model_dump(mode="json"), recipe.store))
    if "optimize" not in elsewhere:
        config = recipe.optimize_config().model_dump(mode="json")
        require_gpus(Call("optimize", config, recipe.store))
