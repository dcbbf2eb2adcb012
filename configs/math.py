"""The main job: asynchronous RL on maths.

  python launch/train.py --config=configs/math.py

The default is the embedded job: a new small policy and generated problems, nothing to download. Every key and its
meaning stands in areal_jax/config_fields.py.
"""

from ml_collections import ConfigDict

from areal_jax.config import ConfigError, base_config


def get_config(variant: str = "") -> ConfigDict:
    config = base_config()
    if variant:
        raise ConfigError(f"configs/math.py has no variant '{variant}'; leave it out for the embedded job")
    return config
