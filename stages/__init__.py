"""The stages: one package each, which runs alone and knows no other stage (`turns` and `model` are
shared). Most know nothing of their process either; `core/run/stage.py` names the exceptions.

`core/run/stage.py` says what a stage is, and lists the places in which a new one is entered.

Not of the spine: `load_stage` imports a stage by this table.
"""

MODULES = {
    "policy": "quiver.stages.model.checkpoints",
    "prompt": "quiver.stages.prompt.stage",
    "generate": "quiver.stages.generate.stage",
    "branch": "quiver.stages.turns.branch",
    "imported_prompts": "quiver.stages.prompt.imported",
    "imported": "quiver.stages.generate.imported",
    "subset": "quiver.stages.generate.subset",
    "imported_rewards": "quiver.stages.reward.imported",
    "reward": "quiver.stages.reward.stage",
    "override": "quiver.stages.reward.override",
    "logprobs": "quiver.stages.logprobs.stage",
    "average": "quiver.stages.logprobs.average",
    "optimize": "quiver.stages.optimize.stage",
    "evaluate": "quiver.stages.evaluate.stage",
}
"""Module of each stage. Named, not imported: no stage knows another."""
CHAIN = ("prompt", "generate", "reward", "logprobs", "optimize", "evaluate")
"""The stages of an iteration, in order."""
