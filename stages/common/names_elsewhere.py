"""Keys of a recipe by what TRL and verl call them, for `did you mean`; and the columns that their
trainers read, for rows that were made for them.

Not of the spine: only errors and warnings ask.
"""

KEYS = {
    "beta": "optimize.kl_coef",
    "clip_ratio_c": "optimize.dual_clip",
    "clip_ratio_high": "optimize.clip_high",
    "clip_ratio_low": "optimize.clip_low",
    "epsilon": "optimize.clip_low",
    "epsilon_high": "optimize.clip_high",
    "eval_steps": "evaluate.every",
    "gradient_checkpointing": "optimize.activation_checkpointing",
    "importance_sampling_level": "optimize.algorithm",
    "kl_loss_coef": "optimize.kl_coef",
    "loss_agg_mode": "optimize.aggregation",
    "loss_type": "optimize.algorithm",
    "lr_scheduler_type": "optimize.schedule",
    "mask_truncated_completions": "optimize.on_length",
    "max_completion_length": "generate.sampling.max_tokens",
    "max_prompt_length": "prompt.max_prompt_tokens",
    "max_response_length": "generate.sampling.max_tokens",
    "max_steps": "iterations",
    "n_gpus_per_node": "optimize.processes",
    "num_generations": "generate.samples_per_prompt",
    "num_iterations": "optimize.epochs",
    "per_device_train_batch_size": "optimize.token_budget",
    "ppo_epochs": "optimize.epochs",
    "scale_rewards": "optimize.advantage",
    "steps_per_generation": "optimize.minibatches",
    "test_freq": "evaluate.every",
    "total_epochs": "iterations",
    "train_batch_size": "data.limit",
    "train_dataset": "data.source",
}
"""As the table in deployments/docs/coming-from.md has them, those whose name says nothing here."""

COLUMNS = {
    "messages": 'set data.messages = "messages" instead',
    "prompt": 'set data.prompt = "prompt" instead',
    "image": 'set data.images = "image" if the policy sees pictures',
    "images": 'set data.images = "images" if the policy sees pictures',
    "video": "take it out of the source: no policy is shown videos here",
    "videos": "take it out of the source: no policy is shown videos here",
    "audio": "take it out of the source: no policy is given sounds here",
    "audios": "take it out of the source: no policy is given sounds here",
    "tools": 'set data.tools = "tools", for rows that the chat template renders',
    "chat_template_kwargs": "give rows that the chat template renders, or set "
    "prompt.template_arguments for all of them",
    "agent_name": "set [generate.turns] for rows that are more than one turn",
    "completion": "take it out of the source: answers are sampled, not read",
    "chosen": "take it out of the source: answers are sampled, not read",
    "rejected": "take it out of the source: answers are sampled, not read",
}
"""Columns that prompts are made of elsewhere: what to do about each if it is not used here."""
