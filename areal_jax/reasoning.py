"""reasoning-gym's package, the one place that imports it.

Its logic puzzles name pycosat, which is published as source alone and needs a C compiler. Where pycosat is not installed an empty module
stands in for it: the arithmetic generators and scorers do not use it, and a logic puzzle would fail by name.
"""

from __future__ import annotations

import importlib.util
import sys
import types

from areal_jax.config import ConfigError

if importlib.util.find_spec("reasoning_gym") is None:
    raise ConfigError("the package reasoning-gym is missing; install it by: pip install --no-deps reasoning-gym==0.1.25")
if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
    sys.modules["pycosat"] = types.ModuleType("pycosat")

from reasoning_gym import create_dataset, get_score_answer_fn

__all__ = ["create_dataset", "get_score_answer_fn"]
