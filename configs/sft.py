"""Fine-tuning of a checkpoint on rows of your own.

  python launch/sft.py --config=configs/sft.py --config.model.path=DIRECTORY --config.sft.data=rows.jsonl
  python launch/sft.py --config=configs/sft.py:lora --config.model.path=DIRECTORY --config.sft.data=rows.parquet
  python launch/sft.py --config=configs/sft.py:dpo --config.model.path=DIRECTORY --config.sft.data=preferences.jsonl

Learning rates to start from: 1e-5 for a whole policy, 1e-6 with DPO, ten times as much for adapters. A step learns 16 rows of 2048 positions, four at a
time. The rate rises over 10 steps and falls linearly to a tenth. A twentieth of the rows is held out, unless sft.eval_data names others.
"""

from ml_collections import ConfigDict

from areal_jax.config import ConfigError, base_config

VARIANTS = ("", "lora", "dpo", "dpo-lora")


def get_config(variant: str = "") -> ConfigDict:
    if variant not in VARIANTS:
        raise ConfigError(f"configs/sft.py has no variant '{variant}'; it has {', '.join(filter(None, VARIANTS))}; leave it out for conversations")
    config = base_config()
    config.cluster.host_devices = 1
    config.trainer.update(remat="dots", micro_batch_rows=0)
    config.sft.update(rows=16, micro_batch_rows=4, row_tokens=2048)
    config.sft.update(learning_rate=1e-5, warmup_steps=10, decay_start=0.0, final_fraction=0.1, adam_b2=0.95, weight_decay=0.0)
    config.sft.update(eval_fraction=0.05, eval_every=50, checkpoint_every=100)
    if variant.startswith("dpo"):
        config.sft.update(objective="dpo", learning_rate=1e-6)
    if variant.endswith("lora"):
        config.model.lora_rank = 16
        config.sft.learning_rate *= 10
    return config
