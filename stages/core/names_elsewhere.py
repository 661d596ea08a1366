"""Names from other trainers: their words for recipe keys, and the data columns that they read.

Helps users who type keys of TRL, verl or peft, or bring rows made for these.

Not of the spine: only errors, warnings and `quiver keys` use it.
"""

KEYS = {
    "adv_estimator": "optimize.algorithm",
    "apply_chat_template_kwargs": "prompt.template_arguments",
    "beta": "optimize.kl_coef",
    "chat_template_kwargs": "prompt.template_arguments",
    "clip_ratio_c": "optimize.dual_clip",
    "clip_ratio_high": "optimize.clip_high",
    "clip_ratio_low": "optimize.clip_low",
    "custom_reward_function": "reward.functions",
    "enable_gradient_checkpointing": "optimize.activation_checkpointing",
    "epsilon": "optimize.clip_low",
    "epsilon_high": "optimize.clip_high",
    "eval_dataset": "data.held_out",
    "eval_steps": "evaluate.every",
    "filter_groups": "data.refill",
    "gradient_accumulation_steps": "optimize.minibatches",
    "gradient_checkpointing": "optimize.activation_checkpointing",
    "importance_sampling_level": "optimize.algorithm",
    "kl_ctrl": "optimize.kl_target",
    "kl_loss_coef": "optimize.kl_coef",
    "load_in_4bit": "optimize.lora.base",
    "lora_alpha": "optimize.lora.alpha",
    "lora_rank": "optimize.lora.rank",
    "loss_agg_mode": "optimize.aggregation",
    "loss_mode": "optimize.algorithm",
    "loss_type": "optimize.algorithm",
    "lr": "optimize.learning_rate",
    "lr_scheduler_type": "optimize.schedule",
    "mask_truncated_completions": "optimize.on_length",
    "max_completion_length": "generate.sampling.max_tokens",
    "max_grad_norm": "optimize.grad_clip",
    "max_prompt_length": "prompt.max_prompt_tokens",
    "max_response_length": "generate.sampling.max_tokens",
    "max_steps": "iterations",
    "n": "generate.samples_per_prompt",
    "n_gpus_per_node": "optimize.processes",
    "norm_adv_by_std_in_grpo": "optimize.advantage",
    "num_generations": "generate.samples_per_prompt",
    "num_iterations": "optimize.epochs",
    "num_processes": "optimize.processes",
    "peft_config": "optimize.lora",
    "per_device_train_batch_size": "optimize.token_budget",
    "ppo_epochs": "optimize.epochs",
    "ppo_max_token_len_per_gpu": "optimize.token_budget",
    "ppo_mini_batch_size": "optimize.minibatches",
    "r": "optimize.lora.rank",
    "ref_model_mixup_alpha": "reference.rate",
    "ref_model_sync_steps": "reference.iterations",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.functions.weight",
    "rollout_is": "optimize.correction",
    "scale_rewards": "optimize.advantage",
    "steps_per_generation": "optimize.minibatches",
    "sync_ref_model": "reference.rule",
    "tensor_model_parallel_size": "generate.options.tensor_parallel_size",
    "test_freq": "evaluate.every",
    "total_epochs": "iterations",
    "train_batch_size": "data.limit",
    "train_dataset": "data.source",
    "train_files": "data.source",
    "use_kl_in_reward": "optimize.kl_in_reward",
    "use_kl_loss": "optimize.kl_coef",
    "use_vllm": "generate.engine",
    "val_files": "data.held_out",
    "vllm_importance_sampling_correction": "logprobs.prox",
    "vllm_tensor_parallel_size": "generate.options.tensor_parallel_size",
}
"""Recipe keys by their names elsewhere.

Same as the table in deployments/docs/coming-from.md, without names that are recipe keys themselves.
"""
IN_SECTIONS = {
    "critic.model.path": "optimize.critic_from",
    "model.path": "policy.model",
    "rollout.name": "generate.engine",
    "rollout.temperature": "generate.sampling.temperature",
    "rollout.top_k": "generate.sampling.top_k",
    "rollout.top_p": "generate.sampling.top_p",
}
"""The same for names that mean something else without verl's section."""

COLUMNS = {
    "messages": 'set data.messages = "messages" instead',
    "prompt": 'set data.prompt = "prompt" instead',
    "image": 'set data.images = "image" if the policy sees pictures',
    "images": 'set data.images = "images" if the policy sees pictures',
    "video": "take it out of the source: no policy is shown videos here",
    "videos": "take it out of the source: no policy is shown videos here",
    "audio": 'set data.audio = "audio" if the policy hears clips',
    "audios": 'set data.audio = "audios" if the policy hears clips',
    "tools": 'set data.tools = "tools" to show it in chats, or take it out if [generate.turns] or '
    "prompt.template_arguments define the tools",
    "chat_template_kwargs": "only chats without [generate.turns] are rendered with it: set "
    "prompt.template_arguments for all rows, and take the column out",
    "documents": "write them into the chats, or set documents in prompt.template_arguments for "
    "all rows",
    "agent_name": "set [generate.turns] for rows that are more than one turn",
    "completion": "answers are sampled, so prompts do not show it; a reward may read it",
    "chosen": "answers are sampled, so prompts do not show it; a reward may read it",
    "rejected": "answers are sampled, so prompts do not show it; a reward may read it",
}
"""Advice for columns that other trainers read, if a recipe does not use them."""
