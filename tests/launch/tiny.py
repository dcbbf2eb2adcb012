"""The smallest run that has every part: for the tests of the programs.

python launch/train.py --config=tests/launch/tiny.py --workdir=/tmp/tiny
"""

from ml_collections import ConfigDict

from areal_jax.config import base_config


def get_config() -> ConfigDict:
    config = base_config()
    config.model.update(layers=1, hidden_size=32, heads=2, kv_heads=1, head_dim=16, mlp_size=64)
    config.task.train_problems = 400
    config.sft.update(steps=12, rows=4, warmup_steps=2, checkpoint_every=4)
    config.rollout.update(group_size=2, max_new_tokens=24, slots=8, steps_per_dispatch=4, wait_timeout_s=60.0)
    config.trainer.update(steps=6, groups_per_step=4, minibatches=2, micro_batch_rows=4, warmup_steps=1)
    config.eval.update(every_steps=2, problems=16, periodic_problems=8)
    config.checkpoint.every_steps = 2
    config.telemetry.live = "off"
    return config
