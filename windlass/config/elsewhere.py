"""Names of keys elsewhere: in transformers, TRL, PEFT, Megatron, torchtitan, PyTorch/XLA guides.

The reference names them beside ours, and the error for one of them in a recipe names ours.
"""

import re
from collections.abc import Collection
from typing import Any

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "model.hub": ("model_name_or_path", "pretrained_model_name_or_path", "base_model"),
    "model.family": ("model_type", "architecture"),
    "model.vocab": ("vocab_size", "padded_vocab_size"),
    "model.embed": ("hidden_size", "n_embd", "d_model", "dim", "emb_dim"),
    "model.mlp": ("intermediate_size", "ffn_hidden_size", "n_inner", "d_ff", "mlp_dim"),
    "model.layers": ("num_hidden_layers", "num_layers", "n_layers", "n_layer"),
    "model.heads": ("num_attention_heads", "num_heads", "n_heads", "n_head"),
    "model.kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_query_groups"),
    "model.head_dim": ("head_size", "kv_channels"),
    "model.theta": ("rope_theta", "rotary_base", "rope_base"),
    "model.local_theta": ("rope_local_base_freq",),
    "model.scaling": ("rope_scaling",),
    "model.window": ("sliding_window",),
    "model.global_every": ("sliding_window_pattern",),
    "model.no_rope_every": ("no_rope_layer_interval",),
    "model.rotary_share": ("partial_rotary_factor", "rotary_percent"),
    "model.query_width": ("query_pre_attn_scalar",),
    "model.base": ("load_in_4bit", "bnb_4bit_quant_type"),
    "model.eps": ("rms_norm_eps", "layer_norm_eps", "norm_eps"),
    "model.tied": ("tie_word_embeddings", "weight_tying"),
    "model.h_cycles": ("H_cycles",),
    "model.l_cycles": ("L_cycles",),
    "model.passes": ("halt_max_steps",),
    "model.refinement": ("post_refinement_steps",),
    "adapter.rank": ("r", "lora_r", "lora_rank", "recovery_r"),
    "adapter.alpha": ("lora_alpha",),
    "adapter.dropout": ("lora_dropout",),
    "adapter.targets": ("target_modules", "lora_target_modules"),
    "adapter.dora": ("use_dora",),
    "adapter.scaling": ("use_rslora",),
    "adapter.groups": ("rank_pattern", "alpha_pattern"),
    "adapter.layers": ("layers_to_transform",),
    "adapter.exclude": ("exclude_modules",),
    "adapter.whole": ("modules_to_save",),
    "adapter.tokens": ("trainable_token_indices",),
    "tokenizer.eos": ("eos_token",),
    "data.length": (
        *("max_seq_length", "max_length", "cutoff_len", "sequence_len"),
        *("seq_length", "seq_len", "block_size"),
    ),
    "data.source.stream": ("streaming",),
    "data.workers": ("dataloader_num_workers", "num_workers"),
    "data.prefetch": ("dataloader_prefetch_factor", "prefetch_factor", "worker_buffer_size"),
    "data.validation": ("val_size", "val_set_size", "validation_split"),
    "data.mixture": ("datasets", "dataset_mixer"),
    "data.format.template": ("chat_template",),
    "data.teacher": ("kd_cache_dir",),
    "objective.label_smoothing": ("label_smoothing_factor",),
    "objective.beta": ("dpo_beta", "pref_beta"),
    "objective.exploration": ("halt_exploration_prob",),
    "objective.minimum": ("force_min_steps",),
    "optim.kind": ("optimizer_type", "optimizer_name"),
    "optim.learning_rate": ("lr", "max_lr", "peak_lr"),
    "optim.weight_decay": ("wd",),
    "optim.clip_norm": (
        *("max_grad_norm", "grad_clip", "gradient_clip_val"),
        *("gradient_clipping", "grad_clip_norm"),
    ),
    "optim.beta1": ("adam_beta1",),
    "optim.beta2": ("adam_beta2",),
    "optim.eps": ("adam_epsilon", "adam_eps"),
    "optim.schedule.shape": ("lr_scheduler_type", "lr_scheduler", "lr_decay_style"),
    "optim.schedule.warmup_steps": ("lr_warmup_iters", "warmup_iters", "lr_warmup_steps"),
    "optim.schedule.warmup_share": ("warmup_ratio", "lr_warmup_fraction"),
    "optim.schedule.floor": ("min_lr_ratio", "min_lr_rate", "lr_min_ratio"),
    "train.steps": ("max_steps", "train_iters", "max_iters", "num_steps", "total_steps"),
    "train.epochs": ("num_train_epochs", "num_epochs", "n_epochs", "max_epochs", "train_epochs"),
    "train.batch": ("global_batch_size", "train_batch_size", "batch_size"),
    "train.batch_per_device": (
        *("per_device_train_batch_size", "per_device_batch_size"),
        *("micro_batch_size", "train_micro_batch_size_per_gpu"),
    ),
    "train.accumulation": ("gradient_accumulation_steps", "grad_accum_steps", "accumulation_steps"),
    "train.microbatch": ("auto_find_batch_size",),
    "train.remat": (
        *("gradient_checkpointing", "activation_checkpointing"),
        *("use_gradient_checkpointing", "recompute_granularity"),
    ),
    "train.evaluate_every": ("eval_steps", "eval_interval", "eval_strategy"),
    "train.patience": ("early_stopping_patience",),
    "train.ema": ("ema_decay", "ema_rate"),
    "train.deterministic": ("full_determinism", "deterministic_mode"),
    "train.sample": ("sample_prompt",),
    "checkpoint.every": (
        *("save_steps", "save_interval", "save_every"),
        *("save_strategy", "checkpoint_interval"),
    ),
    "checkpoint.keep": ("save_total_limit",),
    "telemetry.every": ("logging_steps", "log_interval", "log_every_n_steps", "log_freq"),
    "telemetry.trackers": ("report_to", "log_with"),
    "telemetry.project": ("wandb_project", "trackio_project", "project_name"),
    "precision.compute": (
        *("mixed_precision", "torch_dtype", "dtype"),
        *("bf16", "fp16", "forward_dtype"),
    ),
    "mesh.data": ("data_parallel_size", "data_parallel_replicate_degree", "mesh_data"),
    "mesh.fsdp": ("fsdp_size", "data_parallel_shard_degree", "mesh_fsdp"),
    "mesh.expert": ("expert_parallel_size", "expert_model_parallel_size", "expert_parallel_degree"),
    "mesh.tensor": (
        *("tensor_parallel_size", "tensor_model_parallel_size"),
        *("tensor_parallel_degree", "mesh_tp", "mesh_tensor"),
    ),
    "device.kind": ("device_type", "accelerator"),
    "device.count": ("num_chips", "num_cores", "nprocs"),
    "run.dir": ("output_dir", "save_dir", "out_dir", "checkpoint_dir", "checkpoint_path"),
}
OURS = {name: key for key, names in ELSEWHERE.items() for name in names}

# Options of other programs that are no keys here, and what does the same.
_RESUMES = "the same command again resumes the run where it was interrupted"
_QUIETER = "telemetry.every=100 reports every 100 steps, and > FILE takes the output"
_LOUDER = "telemetry.every=1 reports every step, and metrics.jsonl in the run's folder has them all"
_DEBUG = f"{_LOUDER}; windlass train --debug-compile logs compilations"
_RECIPE = "the recipe is the word behind the command, as in windlass train mine.yaml"
_DEVICES = "all devices are used; device.count=N takes N of them"
_DEVICE = "device={} requests one, and device=auto takes the best that is present"
_DATA = "data.source names the data, as {kind: jsonl, path: FILE} or {kind: hub, name: OWNER/NAME}"
_WEIGHTS = "model.run, model.path or model.hub names the weights to start from"
_GROUPS = "optim.groups has rates and decays of their own for some weights"
INSTEAD = {
    **dict.fromkeys(("resume", "resume_from_checkpoint", "continue", "r"), _RESUMES),
    **dict.fromkeys(("quiet", "silent", "q"), _QUIETER),
    **dict.fromkeys(("verbose", "v", "vv"), _LOUDER),
    "debug": _DEBUG,
    **dict.fromkeys(("config", "config_file", "recipe", "c", "f"), _RECIPE),
    **dict.fromkeys(("gpus", "num_gpus", "n_gpus", "nproc_per_node", "num_devices"), _DEVICES),
    **dict.fromkeys(("tpu", "use_tpu"), _DEVICE.format("tpu")),
    **dict.fromkeys(("cuda", "use_cuda", "gpu", "use_gpu"), _DEVICE.format("gpu")),
    **dict.fromkeys(("cpu", "use_cpu", "no_cuda"), _DEVICE.format("cpu")),
    **dict.fromkeys(("dataset", "data_path", "data_paths"), _DATA),
    "dataset_name": "data.source.configuration names a configuration of a data set of the hub",
    **dict.fromkeys(("load_checkpoint", "init_from", "checkpoint_file"), _WEIGHTS),
    "cache_dir": "data.teacher names the cache of a teacher, and data.cache that of tokens",
    "from_scratch": "model.family makes a new model, and model.hub, path or run take one",
    "use_small_model": "model has the sizes, and nash-mhc-small is the small recipe of that model",
    "no_shard": "device.count=1 takes one device, and mesh has the axes of several",
    "arch": "the sections of an architecture are model and residual",
    "preload": "rows are mapped into memory and read ahead, by data.prefetch batches",
    "freeze_weights": "train.trainable has patterns of the weights that are trained",
    **dict.fromkeys(("puzzle_emb_lr", "puzzle_emb_weight_decay"), _GROUPS),
    "run_training": "windlass doctor --smoke trains a reduced model and checks each part",
    "output": "run.dir names the folder of the run",
    "o": "run.dir names the folder of the run",
}

# Values that have another name elsewhere, by full key.
VALUES = {
    "device.kind": {"cuda": "gpu", "nvidia": "gpu", "rocm": "gpu", "xla": "tpu"},
    "precision.compute": {
        **dict.fromkeys(("bf16", "torch.bfloat16"), "bfloat16"),
        **dict.fromkeys(("fp16", "half", "torch.float16"), "float16"),
        **dict.fromkeys(("fp32", "no", "torch.float32"), "float32"),
    },
}


def ours(name: str, sections: Collection[str], known: Collection[str]) -> str | None:
    """The full key of a name from elsewhere; None where it has none.

    `sections` are those that a recipe may have, and `known` the full keys of those it does: a name
    that the family or the kind in the recipe does not have is no help.
    """
    key = OURS.get(_plain(name), OURS.get(_plain(name).lower()))
    if key is None or key.partition(".")[0] not in sections:
        return None
    siblings = f"{key.rpartition('.')[0]}."
    is_met = any(full.startswith(siblings) for full in known)
    return key if key in known or not is_met else None


def is_known(name: str) -> bool:
    """Return True if a key has this name elsewhere."""
    return _plain(name) in OURS or _plain(name).lower() in OURS


def instead(name: str) -> str | None:
    """Advice for an option of other programs that is no key here; None where there is none."""
    return INSTEAD.get(_plain(name).lower())


def value(key: str, written: Any) -> str | None:
    """Advice for a value of a full key that means something elsewhere; None where it does not."""
    if key == "checkpoint" and isinstance(written, str):
        return f"it must be a section with every and keep; {_WEIGHTS}"
    known = VALUES.get(key, {})
    here = known.get(str(written).lower().partition(":")[0])
    return None if here is None else f"here it is {here}"


def _plain(name: str) -> str:
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")


def also(key: str) -> str:
    """The names of a full key elsewhere, to stand behind its meaning; empty where it has none."""
    names = ELSEWHERE.get(re.sub(r"\.(N|\d+)(?=\.)", "", key), ())  # of any item of a list
    return f"elsewhere {', '.join(names)}" if names else ""
