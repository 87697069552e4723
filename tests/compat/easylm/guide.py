"""The guide's three training commands, as in the guide except that names of files are shorter."""

from __future__ import annotations

import shlex

SFT = shlex.split(
    """--mesh_dim='1,-1,8' --dtype='bf16' --num_epochs=2 --log_freq=50 --save_model_freq=1000
    --save_milestone_freq=0 --load_llama_config='7b' --update_llama_config='' --load_dataset_state=''
    --load_checkpoint='params::G/llama2/7b' --tokenizer.vocab_file='G/llama/tokenizer.model'
    --optimizer.type='adamw' --optimizer.adamw_optimizer.weight_decay=0.0
    --optimizer.adamw_optimizer.lr=2e-5 --optimizer.adamw_optimizer.end_lr=0
    --optimizer.adamw_optimizer.warmup_ratio=0.03 --optimizer.accumulate_gradient_steps=4
    --train_dataset.type='tulu_json_torch'
    --train_dataset.json_torch_dataset.hf_name='allenai/tulu-v2-sft-mixture'
    --train_dataset.json_torch_dataset.hf_split='train'
    --train_dataset.json_torch_dataset.seq_length=8192
    --train_dataset.json_torch_dataset.batch_size=32
    --checkpointer.save_optimizer_state=False --logger.online=True --logger.entity=E
    --logger.project=P --logger.output_dir="G/out" """
)
DPO = shlex.split(
    """--mesh_dim='-1,16,16' --dtype='bf16' --num_epochs=3 --log_freq=50 --save_model_freq=1000
    --save_milestone_freq=0 --load_llama_config='7b' --update_llama_config='' --load_dataset_state=''
    --load_checkpoint='params::G/sft/streaming_params_20384'
    --tokenizer.vocab_file='G/llama/tokenizer.model'
    --optimizer.type='adamw' --optimizer.adamw_optimizer.weight_decay=0.0
    --optimizer.adamw_optimizer.lr=5e-7 --optimizer.adamw_optimizer.end_lr=0
    --optimizer.adamw_optimizer.warmup_ratio=0.1 --optimizer.accumulate_gradient_steps=4
    --train_dataset.type='preference_json_torch'
    --train_dataset.json_torch_dataset.hf_name='allenai/ultrafeedback_binarized_cleaned'
    --train_dataset.json_torch_dataset.hf_split='train_prefs'
    --train_dataset.json_torch_dataset.seq_length=6144
    --train_dataset.json_torch_dataset.batch_size=8
    --checkpointer.save_optimizer_state=False --logger.online=True --logger.entity=E
    --logger.project=P --logger.output_dir="G/out" """
)
PPO = shlex.split(
    """--mesh_dim='1,64,4' --load_llama_config_policy='13b' --load_llama_config_reward='13b'
    --load_checkpoint_policy='params::G/sft/streaming_params_20384'
    --load_checkpoint_reward='params::G/rm/streaming_params_1903'
    --tokenizer.vocab_file='G/tokenizer.model' --tokenizer.add_bos_token=True
    --train_dataset.type='tulu_prompt'
    --train_dataset.tulu_prompt_dataset.path='G/ultrafeedback_mean_aspects_cleaned.jsonl'
    --train_dataset.tulu_prompt_dataset.seq_length=1024 --max_continuation_len=1024
    --train_dataset.tulu_prompt_dataset.batch_size=512 --rollouts_per_prompt=1 --mini_batch_size=64
    --train_dataset.tulu_prompt_dataset.num_workers=16
    --train_dataset.tulu_prompt_dataset.remove_truncated_samples=True --optimizer.type='adamw'
    --optimizer.accumulate_gradient_steps=1 --optimizer.adamw_optimizer.weight_decay=0.0
    --warmup_epochs=0.1 --policy_freeze_epochs=0.0 --checkpointer.save_optimizer_state=False
    --logger.online=True --logger.entity=E --logger.project=P --logger.prefix=NAME
    --logger.prefix_to_id=True --logger.wandb_dir=DIR --logger.output_dir='G/out/' --use_tpu=True
    --ppo_epochs=1 --lr=1e-6 --kl_coef=0.05 --reward_gain=1.0 --reward_bias=0.0
    --save_milestone_freq=116 --num_epochs=1"""
)


def change(words: list[str], **values: object) -> list[str]:
    """Return the command with other values; `__` stands for a dot, and None removes a flag."""
    flags = {name.replace("__", "."): value for name, value in values.items()}
    kept = [word for word in words if word.partition("=")[0].removeprefix("--") not in flags]
    return [*kept, *(f"--{name}={value}" for name, value in flags.items() if value is not None)]
