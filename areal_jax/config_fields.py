"""Every configuration key, once: its default, its type, its rule and what it means.

Invariant: a key that is not here does not exist; ``configs/*.py`` change defaults, the command line overrides them.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Field:
    """One key. ``kind`` is the type of the default unless the default is None; bounds are inclusive unless ``above``; tuples have an ``example``."""

    default: Any
    doc: str
    kind: type | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple | None = None
    optional: bool = False
    example: tuple = ()

    @property
    def type(self) -> type:
        return self.kind or type(self.default)


F = Field

LORA_TARGETS = ("query", "key", "value", "output", "gate", "up", "down")

FIELDS: dict[str, Any] = {
    "seed": F(0, "seed of everything random in the run", minimum=0, maximum=2**32 - 1),
    "model": {
        "path": F("", "directory of a Hugging Face checkpoint; empty: a new policy of the sizes below"),
        "repository": F("", "Hugging Face repository whose download `path` is to be; named where the directory is not there"),
        "family": F("qwen2", "architecture of a new policy", choices=("qwen2", "qwen3", "llama", "qwen3_moe")),
        "vocab_size": F(0, "vocabulary of a new policy; 0: the tokenizer's", minimum=0),
        "layers": F(3, "decoder blocks", minimum=1),
        "hidden_size": F(96, "width of the residual stream", minimum=2),
        "heads": F(4, "query heads", minimum=1),
        "kv_heads": F(2, "key/value heads (grouped-query attention)", minimum=1),
        "head_dim": F(24, "width of a head; even", minimum=2),
        "mlp_size": F(256, "width of the SwiGLU", minimum=1),
        "experts": F(8, "experts a block, family qwen3_moe", minimum=1),
        "experts_per_token": F(2, "experts that a token goes through", minimum=1),
        "expert_mlp_size": F(64, "width of an expert's SwiGLU", minimum=1),
        "rope_theta": F(1000.0, "base of the rotary frequencies", above=0.0),
        "norm_epsilon": F(1e-6, "epsilon of RMSNorm", above=0.0),
        "tie_embeddings": F(False, "share the embedding and the LM head"),
        "dtype": F("float32", "compute type", choices=("float32", "bfloat16")),
        "param_dtype": F(
            "float32", "type of the trainer's parameters; with adapters of the frozen ones, adapters are float32", choices=("float32", "bfloat16")
        ),
        "attention": F(
            "auto",
            "attention over packed rows: auto takes the backend's kernel, else plain for short rows and blockwise (memory linear in length) for long ones",
            choices=("auto", "plain", "blockwise", "kernel"),
        ),
        "scan_layers": F(None, "run the blocks as one scanned block in training: compiles once; None: from 8 layers on", kind=bool, optional=True),
        "lora_rank": F(0, "rank of low-rank adapters of the checkpoint; only they are trained and pushed; 0: the whole policy is", minimum=0),
        "lora_alpha": F(16.0, "scale of the adapters: alpha / rank", above=0.0),
        "lora_targets": F(LORA_TARGETS, "linear layers of each block that have adapters", kind=tuple, example=("query", "value")),
        "sampler_dtype": F("float32", "type of the sampler's parameters; the cast is part of the weight push", choices=("float32", "bfloat16")),
    },
    "task": {
        "name": F(
            "arithmetic",
            "a built-in procedural task (sums: one-digit sums for few-shot prompts), or rows of your own file",
            choices=("arithmetic", "sums", "jsonl"),
        ),
        "path": F("", "JSONL file of training rows (question and answer, GSM8K's layout included); sets name to jsonl"),
        "eval_path": F("", "JSONL file of held-out rows; empty: a part of `path` is held out"),
        "question_key": F("", "key of the question; empty: recognised"),
        "answer_key": F("", "key of the answer; empty: recognised"),
        "prompt_template": F("{question}", "prompt text; holds {question}"),
        "chat": F(
            "auto",
            "the prompt is the user's turn of the checkpoint's chat template: auto where it has one (many base models have, too)",
            choices=("auto", "on", "off"),
        ),
        "system_prompt": F("", "system turn of the chat, where a row has none of its own; empty: what the template does without one"),
        "enable_thinking": F(None, "passed to a chat template that reads it (Qwen3); None: the template's default", kind=bool, optional=True),
        "max_prompt_tokens": F(0, "longer prompts are dropped by name; 0: as long as the task's longest", minimum=0),
        "train_problems": F(30000, "size of the procedural training pool", minimum=1),
        "holdout_fraction": F(0.1, "share of canonical forms (or of rows) that is held out", above=0.0, maximum=0.9),
        "on_bad_row": F("skip", "a broken row is skipped and counted, or ends the run", choices=("skip", "error")),
    },
    "sft": {
        "steps": F(
            None,
            "steps of supervised learning; 0: none; None: 1600 for a new policy, 0 for a checkpoint; with `data`: as `epochs` says",
            kind=int,
            minimum=0,
            optional=True,
        ),
        "data": F("", "launch/sft.py: a .jsonl or .parquet file of conversations or preferences, or a directory of them; empty: the task's demonstrations"),
        "objective": F(
            "sft", "what is learnt of `data`: assistant turns of conversations (sft), or which of two answers is preferred (dpo)", choices=("sft", "dpo")
        ),
        "epochs": F(None, "passes over `data`, instead of `steps`; None: 1 where `steps` is None too", kind=int, minimum=1, optional=True),
        "learn_turns": F("all", "assistant turns of `messages` that are learnt", choices=("all", "last")),
        "on_bad_row": F("error", "a row of `data` that is refused ends the run, or is skipped and counted", choices=("error", "skip")),
        "on_long_row": F(
            "refuse",
            "a row longer than `row_tokens`, or than the policy was made for, ends the run, is dropped and counted, or is cut at its end and counted",
            choices=("refuse", "drop", "truncate"),
        ),
        "eval_data": F("", "held-out rows, as `data`; empty: see eval_fraction"),
        "eval_fraction": F(0.0, "share of `data` that is held out, by a hash of the prompt, where `eval_data` is empty; 0: none", minimum=0.0, maximum=0.9),
        "eval_every": F(0, "steps between two evaluations of the held-out loss; 0: only before and after", minimum=0),
        "beta": F(0.1, "DPO's β: how strongly the policy is held to the one it starts from", above=0.0),
        "label_smoothing": F(0.0, "DPO: assumed share of pairs labelled the wrong way round", minimum=0.0, maximum=0.49999),
        "rows": F(16, "packed rows a step", minimum=1),
        "micro_batch_rows": F(0, "rows computed together, over all data-parallel shards; 0: all of a step", minimum=0),
        "row_tokens": F(0, "length of a packed row; 0: as the longest example needs it, for demonstrations at least 144", minimum=0),
        "learning_rate": F(2e-3, "peak learning rate", above=0.0),
        "warmup_steps": F(50, "linear warm-up", minimum=0),
        "decay_start": F(0.6, "share of the steps after which the rate falls linearly", minimum=0.0, maximum=1.0),
        "final_fraction": F(0.05, "last learning rate as a share of the peak", minimum=0.0, maximum=1.0),
        "adam_b1": F(0.9, "Adam's first decay", minimum=0.0, maximum=0.99999),
        "adam_b2": F(0.98, "Adam's second decay", minimum=0.0, maximum=0.99999),
        "weight_decay": F(0.01, "AdamW's weight decay", minimum=0.0),
        "grad_clip": F(1.0, "global norm at which gradients are clipped", above=0.0),
        "careless_fraction": F(0.72, "share of demonstrations written by the careless teacher", minimum=0.0, maximum=1.0),
        "checkpoint_every": F(400, "steps between checkpoints of supervised learning", minimum=1),
        "path": F("", "a finished warm-up to start from (the `warmup` directory of another run)"),
    },
    "rollout": {
        "max_staleness": F(4, "η: no token is trained more than so many versions old; 0: synchronous; None: unbounded", minimum=0, optional=True),
        "on_overdue": F("wait", "due groups that are unfinished: wait for them, drop them, or keep them past η", choices=("wait", "drop", "keep")),
        "group_size": F(8, "samples of a prompt", minimum=1),
        "max_new_tokens": F(112, "length limit of a response", minimum=1),
        "stop": F(
            (),
            "texts of one token each; that token (not one that only holds the text) ends a response, and stays in it",
            kind=tuple,
            example=("\n",),
        ),
        "temperature": F(1.0, "sampling temperature", above=0.0),
        "exact_logprobs": F(
            False,
            "π_behav from the trainer's program under each token's version: engine gap 0; keeps η copies of what is trained, also in checkpoints",
        ),
        "top_p": F(
            1.0,
            "nucleus; the trainer scores the whole distribution: π_prox/π_behav corrects for the cut, the engine gap shows it",
            above=0.0,
            maximum=1.0,
        ),
        "top_k": F(0, "keep the k likeliest tokens; 0: all", minimum=0),
        "slots": F(64, "sequences decoded together", minimum=1),
        "steps_per_dispatch": F(8, "decode steps between two looks at the host", minimum=1),
        "interruptible": F(True, "take new weights in the middle of generations; False: wait for the running ones"),
        "kv_on_update": F("recompute", "KV cache of unfinished sequences at a weight update", choices=("recompute", "keep")),
        "max_concurrent_groups": F(None, "most groups being generated at once; None: as many as η admits", kind=int, minimum=1, optional=True),
        "page_size": F(32, "tokens of a page of the KV cache", minimum=1),
        "kv_pages": F(0, "pages of a sampler's KV cache; 0: so many that all slots hold the longest sequence; fewer: what runs out is preempted", minimum=0),
        "prefill_chunk": F(512, "most tokens that are prefilled between two dispatches, a multiple of 64", minimum=64),
        "wait_timeout_s": F(600.0, "longest wait for a batch or an evaluation before the run stops and says what it waited for", above=0.0),
    },
    "trainer": {
        "steps": F(80, "training steps (versions)", minimum=0),
        "groups_per_step": F(32, "B: groups in a training step", minimum=1),
        "minibatches": F(2, "sequential updates in a step", minimum=1),
        "micro_batch_tokens": F(0, "C: capacity of one packed row (Algorithm 1); 0: 192, or more where the longest sequence needs it", minimum=0),
        "micro_batch_rows": F(4, "packed rows computed together, over all data-parallel shards; 0: one a shard", minimum=0),
        "packing": F(
            "algorithm1",
            "how sequences are given to rows: the paper's Algorithm 1, or balanced: few rows of equal work, attention counted",
            choices=("algorithm1", "balanced"),
        ),
        "remat": F(
            "none", "what the backward pass recomputes: nothing, all but products and attention (dots), blocks (full)", choices=("none", "dots", "full")
        ),
        "logprob_chunk": F(1024, "tokens a device whose logits over the vocabulary exist at once", minimum=1),
        "learning_rate": F(3e-4, "learning rate", above=0.0),
        "optimizer": F("adamw", "AdamW, or Muon for the blocks' matrices with AdamW for the rest; moments are float32", choices=("adamw", "muon")),
        "muon_beta": F(0.95, "Muon's decay of the momentum", minimum=0.0, maximum=0.99999),
        "schedule": F("cosine", "learning-rate schedule after the warm-up; cosine and linear fall to 0", choices=("constant", "cosine", "linear")),
        "warmup_steps": F(5, "linear warm-up, in training steps", minimum=0),
        "adam_b1": F(0.9, "Adam's first decay", minimum=0.0, maximum=0.99999),
        "adam_b2": F(0.95, "Adam's second decay", minimum=0.0, maximum=0.99999),
        "adam_epsilon": F(1e-5, "Adam's epsilon", above=0.0),
        "weight_decay": F(0.05, "weight decay of either optimizer", minimum=0.0),
        "grad_clip": F(1.0, "global norm at which gradients are clipped", above=0.0),
        "max_nonfinite_updates": F(3, "so many skipped updates in a row end the run", minimum=1),
    },
    "algorithm": {
        "loss": F("decoupled_ppo", "policy loss", choices=("decoupled_ppo", "ppo", "gspo", "cispo", "sapo", "m2po", "reinforce")),
        "decoupled": F(False, "gspo, cispo, sapo, reinforce: around π_prox and times π_prox/π_behav, as decoupled_ppo always is"),
        "allow_uncorrected_staleness": F(False, "allow a loss that does not correct for π_behav with rollout.max_staleness above 0"),
        "proximal": F(
            "recompute",
            "π_prox: the policy before the step scores the tokens (one minibatch: by its own pass), or an approximation between π_behav and π",
            choices=("recompute", "log_linear"),
        ),
        "aggregation": F(
            "token",
            "mean over all tokens, over samples of their means, over prompts of their means; or the sum over samples x rollout.max_new_tokens",
            choices=("token", "sequence", "prompt", "constant"),
        ),
        "advantage": F(
            "lite_ppo",
            "advantage estimate",
            choices=("batch", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "lite_ppo"),
        ),
        "clip_epsilon": F(0.2, "ε of the clipped ratio", above=0.0, maximum=1.0),
        "clip_epsilon_high": F(None, "upper ε; None: the same", kind=float, above=0.0, optional=True),
        "dual_clip": F(None, "bound c > 1 on the loss where the advantage is negative; None: off", kind=float, above=1.0, optional=True),
        "importance_weight_cap": F(None, "cap of π_prox/π_behav; None: applied uncapped", kind=float, above=0.0, optional=True),
        "importance_weight_floor": F(None, "floor of π_prox/π_behav; None: none", kind=float, above=0.0, optional=True),
        "importance_weight_level": F(
            "token", "a token's own weight, the product over its sequence, or their geometric mean", choices=("token", "sequence", "geometric")
        ),
        "importance_weight_mode": F("truncate", "what cap and floor do: truncate the weight or mask the token", choices=("truncate", "mask")),
        "sapo_tau_positive": F(1.0, "SAPO's temperature where the advantage is positive", above=0.0),
        "sapo_tau_negative": F(1.05, "SAPO's temperature where it is not", above=0.0),
        "m2_threshold": F(0.04, "M2PO's bound of the mean of (log π_prox/π_behav)²", above=0.0),
        "kl_coefficient": F(0.0, "weight of the KL to the policy that the run starts from; 0: no reference policy is kept", minimum=0.0),
        "kl_estimator": F("k3", "its estimator from one token", choices=("k1", "k2", "k3")),
        "kl_in": F("loss", "where it enters: the loss, or each token's reward", choices=("loss", "reward")),
        "entropy_coefficient": F(0.0, "weight of the entropy bonus", minimum=0.0),
        "overlong_penalty": F(0.0, "most that a long response loses of its raw reward; 0: off", minimum=0.0),
        "overlong_buffer": F(0, "tokens before rollout.max_new_tokens over which that penalty rises; 0: only truncated responses have it", minimum=0),
        "dynamic_sampling": F(False, "groups whose raw rewards are all equal are dropped (drop/zero_std) and others generated in their place"),
        "dynamic_sampling_refills": F(10, "most groups dropped so for a step, in steps' worth; beyond it they are trained as they are", minimum=1),
        "gamma": F(1.0, "discount", minimum=0.0, maximum=1.0),
        "gae_lambda": F(1.0, "λ of GAE", minimum=0.0, maximum=1.0),
        "reward_scale": F(10.0, "reward = clip((raw + bias)·scale)", above=0.0),
        "reward_bias": F(-0.5, "added to the raw 0/1 reward; with scale 10 gives ±5"),
        "reward_clip": F(20.0, "bound of the scaled reward", above=0.0),
        "skip_zero_advantage": F(True, "do not compute samples whose advantage is 0: they have no gradient, and still count in the mean"),
        "shuffle_rewards": F(False, "control experiment: permute the rewards within each batch"),
    },
    "reward": {
        "workers": F(1, "verifier processes", minimum=1),
        "timeout_s": F(5.0, "hard limit of one check; the process is killed", above=0.0),
        "verifier": F("areal_jax.rewards.verify:verify", "package.module:function that checks an answer"),
        "on_failure": F("zero", "a check that raises, hangs or dies: reward 0, or the group is dropped", choices=("zero", "drop")),
        "max_consecutive_failures": F(50, "so many failures in a row end the run with the last one's cause", minimum=1),
    },
    "eval": {
        "every_steps": F(25, "training steps between evaluations; 0: only before and after", minimum=0),
        "problems": F(512, "held-out problems at the start and the end", minimum=1),
        "periodic_problems": F(128, "held-out problems of the evaluations in between", minimum=1),
        "samples": F(1, "samples a problem", minimum=1),
        "temperature": F(1.0, "sampling temperature; 0: greedy", minimum=0.0),
    },
    "serve": {
        "host": F("127.0.0.1", "address that launch/serve.py listens at; 0.0.0.0: every one of this machine"),
        "port": F(8000, "port of the OpenAI-compatible HTTP endpoint; 0: a free one", minimum=0, maximum=65535),
        "grpc_port": F(9000, "port of JetStream's gRPC protocol; 0: a free one; None: not served", kind=int, minimum=0, maximum=65535, optional=True),
        "name": F("", "the policy's name in requests; empty: the last part of model.path"),
        "max_length": F(0, "longest sequence, prompt and answer, in tokens; 0: what the policy was made for, at most 2048", minimum=0),
        "max_waiting": F(256, "samples that may wait for a slot; requests beyond them are refused", minimum=0),
        "request_timeout_s": F(600.0, "longest life of a request", above=0.0),
        "drain_s": F(30.0, "how long running requests may go on once the server is told to stop", minimum=0.0),
    },
    "checkpoint": {
        "every_steps": F(20, "training steps between checkpoints; 0: only at the end", minimum=0),
        "keep": F(2, "checkpoints kept", minimum=1),
        "export_dtype": F("parameters", "type of the exported policy: the trainer's parameters' own, or this", choices=("parameters", "float32", "bfloat16")),
    },
    "cluster": {
        "host_devices": F(2, "devices that a CPU host gives itself; no meaning on GPU or TPU", minimum=1),
        "sampler_devices": F(0, "devices of the sampler; 0: what the trainer leaves, or `sampler_share` of them", minimum=0),
        "trainer_devices": F(0, "devices of the trainer; 0: the rest", minimum=0),
        "sampler_share": F(0.5, "share of the devices for the sampler, where neither number is given", above=0.0, maximum=0.99),
        "mesh": {
            "trainer": F("", "axes of the trainer's mesh, such as fsdp=2,context=2,tensor=2; data takes what is left"),
            "sampler": F("", "axes of the sampler's mesh, such as tensor=2; data takes what is left"),
        },
        "compilation_cache": F("", "directory of JAX's persistent compilation cache; empty: none"),
    },
    "telemetry": {
        "live": F("auto", "live terminal view", choices=("auto", "on", "off")),
        "tensorboard": F(True, "write TensorBoard event files"),
        "trace": F(True, "write trace.json for Perfetto"),
    },
}
