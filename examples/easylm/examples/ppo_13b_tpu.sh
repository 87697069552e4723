#!/bin/sh
# The guide's PPO of Tulu 2 13B on a v3-256. Every host of the pod runs it: see docs/tpu.md. Set BUCKET, NAME, ENTITY and
# PROJECT; further flags, or --dry-run, may follow.
set -eu
bucket=${BUCKET:-gs://BUCKET}
export LIBTPU_INIT_ARGS='--xla_jf_spmd_threshold_for_windowed_einsum_mib=0 --xla_tpu_spmd_threshold_for_allgather_cse=10000 --xla_tpu_spmd_rewrite_einsum_with_reshape=true --xla_tpu_enable_latency_hiding_scheduler=true TPU_MEGACORE=MEGACORE_DENSE'
exec python3 -m EasyLM.models.llama.llama_train_ppo \
    --mesh_dim='1,64,4' \
    --load_llama_config_policy='13b' \
    --load_llama_config_reward='13b' \
    --load_checkpoint_policy="params::$bucket/sft/streaming_params_20384" \
    --load_checkpoint_reward="params::$bucket/rm/streaming_params_1903" \
    --tokenizer.vocab_file="$bucket/tokenizer.model" \
    --tokenizer.add_bos_token=True \
    --train_dataset.type='tulu_prompt' \
    --train_dataset.tulu_prompt_dataset.path="$bucket/ultrafeedback_mean_aspects_cleaned.jsonl" \
    --train_dataset.tulu_prompt_dataset.seq_length=1024 \
    --max_continuation_len=1024 \
    --train_dataset.tulu_prompt_dataset.batch_size=512 \
    --rollouts_per_prompt=1 \
    --mini_batch_size=64 \
    --train_dataset.tulu_prompt_dataset.num_workers=16 \
    --train_dataset.tulu_prompt_dataset.remove_truncated_samples=True \
    --optimizer.type='adamw' \
    --optimizer.accumulate_gradient_steps=1 \
    --optimizer.adamw_optimizer.weight_decay=0.0 \
    --warmup_epochs=0.1 \
    --policy_freeze_epochs=0.0 \
    --checkpointer.save_optimizer_state=False \
    --logger.online=True \
    --logger.entity="${ENTITY:-ENTITY}" \
    --logger.project="${PROJECT:-tulu-ppo}" \
    --logger.prefix="${NAME:-ppo-13b}" \
    --logger.prefix_to_id=True \
    --logger.wandb_dir="${WANDB_DIR:-wandb}" \
    --logger.output_dir="$bucket/out/" \
    --use_tpu=True \
    --ppo_epochs=1 \
    --lr=1e-6 \
    --kl_coef=0.05 \
    --reward_gain=1.0 --reward_bias=0.0 \
    --save_milestone_freq=116 \
    --num_epochs=1 \
    "$@"
