"""Configuration: files, command-line overrides and the check that comes before any device is touched.

Invariants:
* Nothing here imports JAX: a bad configuration ends the program before a device exists.
* Every refusal is a ``ConfigError`` whose text names the rule, the value and the remedy (or the nearest key).
* A configuration that passed ``validate`` has every key of ``config_fields.FIELDS`` and no other.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import itertools
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from ml_collections import ConfigDict

from areal_jax.config_algorithm import algorithm_rules
from areal_jax.config_fields import FIELDS, LORA_TARGETS, Field
from areal_jax.config_presence import presence_rules
from areal_jax.config_sft import sft_rules

WARMUP_STEPS = 1600
"""Of a new policy, when the configuration does not say."""

Config: TypeAlias = Any
"""An ``ml_collections.ConfigDict``; its keys are known at run time only, and checked there."""


class ConfigError(ValueError):
    """A configuration that must not run; the text is meant for the user."""


def fields(tree: dict[str, Any] = FIELDS, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """All keys as ('section.key', Field), in order."""
    for name, value in tree.items():
        if isinstance(value, Field):
            yield prefix + name, value
        else:
            yield from fields(value, f"{prefix}{name}.")


def base_config() -> Config:
    """The defaults, for ``configs/*.py`` to change. Keys are fixed; an unknown one raises."""

    def build(tree: dict[str, Any]) -> dict[str, Any]:
        return {k: v.default if isinstance(v, Field) else build(v) for k, v in tree.items()}

    config = ConfigDict(build(FIELDS), type_safe=False)
    config.lock()
    return config


def unknown_key(key: str) -> ConfigError:
    """The error for a key that does not exist, with the nearest ones that do."""
    known = [name for name, _ in fields()]
    sections = {name.rsplit(".", 1)[0] for name in known if "." in name}
    if key in sections:
        return ConfigError(f"'{key}' is a section, not a key: set one of {', '.join(k for k in known if k.startswith(key + '.'))}")
    leaf = key.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(key, known, n=2, cutoff=0.6)
    moved = [name for name in known if name.rsplit(".", 1)[-1] == leaf]
    leaves = {name.rsplit(".", 1)[-1]: name for name in known}
    near_leaf = [leaves[m] for m in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)]
    best = list(dict.fromkeys(moved + near + near_leaf))[:3]
    hint = f"did you mean {' or '.join(repr(b) for b in best)}?" if best else f"sections are {', '.join(FIELDS)}"
    return ConfigError(f"unknown configuration key '{key}'; {hint}")


def _type_name(field: Field) -> str:
    example = f", as in {field.example!r}" if field.type is tuple else ""
    return f"{field.type.__name__}{' or None' if field.optional else ''}{example}"


def parse_value(key: str, field: Field, text: str) -> Any:
    """The value of an override, in the key's type."""
    if field.optional and text.lower() in ("none", "null", ""):
        return None
    if field.type is str:
        return text
    if field.type is bool:
        if text.lower() in ("true", "1", "yes", "on"):
            return True
        if text.lower() in ("false", "0", "no", "off"):
            return False
        raise ConfigError(f"'{key}' must be true or false; got '{text}'")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ConfigError(f"'{key}' must be of type {_type_name(field)}; got '{text}'") from error
    if field.type is tuple and isinstance(value, int):
        return (value,)
    return value


def _check_field(key: str, field: Field, value: Any) -> Any:
    if value is None:
        if field.optional:
            return None
        raise ConfigError(f"'{key}' must be of type {field.type.__name__}; got None")
    if field.type is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if field.type is tuple and isinstance(value, list):
        value = tuple(value)
    if not isinstance(value, field.type) or (field.type is int and isinstance(value, bool)):
        raise ConfigError(f"'{key}' must be of type {_type_name(field)}; got {value!r} ({type(value).__name__})")
    if field.choices and value not in field.choices:
        near = difflib.get_close_matches(str(value), field.choices, n=1)
        raise ConfigError(f"'{key}' must be one of {', '.join(field.choices)}; got '{value}'" + (f"; did you mean '{near[0]}'?" if near else ""))
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"'{key}' must be finite; got {value}")
    for bad, rule in (
        (field.minimum is not None and value < field.minimum, f"at least {field.minimum}"),
        (field.maximum is not None and value > field.maximum, f"at most {field.maximum}"),
        (field.above is not None and value <= field.above, f"greater than {field.above}"),
    ):
        if bad:
            raise ConfigError(f"'{key}' must be {rule}; got {value} ({field.doc})")
    return value


def get(config: Config, key: str) -> Any:
    """The value at 'section.key'."""
    for part in key.split("."):
        config = config[part]
    return config


def put(config: Config, key: str, value: Any) -> None:
    """Sets the value at 'section.key'."""
    *sections, leaf = key.split(".")
    for part in sections:
        config = config[part]
    with config.unlocked(), config.ignore_type():
        config[leaf] = value


def _rules(c: Config) -> Iterator[tuple[bool, str]]:
    """(broken, message) of every rule that joins several keys."""
    r, t, m = c.rollout, c.trainer, c.model
    yield m.heads % m.kv_heads != 0, f"'model.heads' must be a multiple of 'model.kv_heads'; got {m.heads} and {m.kv_heads}"
    yield (
        m.family == "qwen3_moe" and m.experts_per_token > m.experts,
        f"'model.experts_per_token' must be at most 'model.experts' = {m.experts}; got {m.experts_per_token}",
    )
    yield (
        not m.path and m.lora_rank > 0,
        f"'model.lora_rank' = {m.lora_rank} adapts a checkpoint, and 'model.path' is empty; set it (launch/sft.py exports a policy), or model.lora_rank=0",
    )
    unknown = [name for name in m.lora_targets if name not in LORA_TARGETS]
    yield (
        bool(unknown) or not m.lora_targets or len(set(m.lora_targets)) < len(m.lora_targets),
        f"'model.lora_targets' must be one or more of {', '.join(LORA_TARGETS)}, each once; got {', '.join(map(str, m.lora_targets)) or 'none'}",
    )
    yield m.head_dim % 2 != 0, f"'model.head_dim' must be even (rotary pairs); got {m.head_dim}"
    yield (
        t.groups_per_step % t.minibatches != 0,
        f"'trainer.groups_per_step' must be a multiple of 'trainer.minibatches' (groups stay whole); got {t.groups_per_step} and {t.minibatches}",
    )
    yield r.prefill_chunk % 64 != 0, f"'rollout.prefill_chunk' must be a multiple of 64; got {r.prefill_chunk}; take {-(-r.prefill_chunk // 64) * 64}"
    yield (
        any(not isinstance(text, str) or not text for text in r.stop) or len(set(r.stop)) != len(r.stop),
        f"'rollout.stop' must be different texts of at least one character, as in ('\\n',), or (); got {r.stop!r}",
    )
    longest = c.task.max_prompt_tokens + r.max_new_tokens
    yield (
        bool(c.task.max_prompt_tokens) and 0 < t.micro_batch_tokens < longest,
        f"'trainer.micro_batch_tokens' must hold the longest sequence, 'task.max_prompt_tokens' + 'rollout.max_new_tokens' = {longest}; "
        f"got {t.micro_batch_tokens}",
    )
    yield (
        0 < t.micro_batch_tokens <= r.max_new_tokens,
        f"'trainer.micro_batch_tokens' must exceed 'rollout.max_new_tokens' = {r.max_new_tokens} by the prompt's length; got {t.micro_batch_tokens}",
    )
    yield (
        r.max_concurrent_groups is not None and r.max_staleness == 0 and r.max_concurrent_groups < t.groups_per_step,
        f"'rollout.max_concurrent_groups' must be at least 'trainer.groups_per_step' = {t.groups_per_step} when 'rollout.max_staleness' is 0; "
        f"got {r.max_concurrent_groups}",
    )
    yield (
        r.max_staleness is None and r.on_overdue != "wait",
        f"'rollout.on_overdue={r.on_overdue}' needs a bound, but 'rollout.max_staleness' is None; set a bound or 'rollout.on_overdue=wait'",
    )
    for key, fits, wanted in (
        ("max_staleness", r.max_staleness is not None, "a number, as the parameters of so many versions are kept"),
        ("on_overdue", r.on_overdue != "keep", "wait or drop, as versions older than 'rollout.max_staleness' are not kept"),
        ("kv_on_update", r.kv_on_update == "recompute", "recompute, as a token sampled from a cache of older versions is of no one version"),
        ("top_k", r.top_k == 0, "0, as the whole distribution is scored"),
        ("top_p", r.top_p == 1.0, "1.0, as the whole distribution is scored"),
    ):
        yield (
            r.exact_logprobs and not fits,
            f"'rollout.exact_logprobs' scores tokens under the version that sampled them, so 'rollout.{key}' must be {wanted}; got {r[key]}; "
            "change it, or set rollout.exact_logprobs=False",
        )
    yield "{question}" not in c.task.prompt_template, f"'task.prompt_template' must hold {{question}}; got '{c.task.prompt_template}'"
    for key, wanted in (
        ("chat=on", c.task.chat == "on"),
        ("system_prompt", bool(c.task.system_prompt)),
        ("enable_thinking", c.task.enable_thinking is not None),
    ):
        yield wanted and not m.path, f"'task.{key}' is about a checkpoint's chat template, and 'model.path' is empty; name a checkpoint, or leave the key"
        yield (
            wanted and c.task.chat == "off",
            f"'task.{key}' is about the chat template, which 'task.chat=off' does not use; set 'task.chat=auto', or leave the key",
        )
    for key in ("task.eval_path", "task.question_key", "task.answer_key"):
        yield bool(get(c, key)) and not c.task.path, f"'{key}' is about rows of your own, and 'task.path' is empty; got '{get(c, key)}'; set task.path too"
    yield (
        c.task.name == "sums" and (c.sft.steps > 0 or bool(c.sft.path)),
        f"'task.name=sums' has no demonstrations to warm up on, so 'sft.steps' must be 0 and 'sft.path' empty; got {c.sft.steps} and '{c.sft.path}'; "
        "give a checkpoint as 'model.path'",
    )
    yield bool(m.path) and bool(c.sft.path), "'model.path' and 'sft.path' both give the weights to start from; set one of them"


def validate(config: Config, *, planned: bool = False) -> Config:
    """Checks every key and every rule; returns the configuration with its types settled.

    Args:
      config: changed in place.
      planned: for a plan, which needs neither checkpoint nor rows nor verifier to be here.

    Raises:
      ConfigError: with the rule, the value and the remedy.
    """
    known = dict(fields())

    def walk(tree: Config, prefix: str) -> Iterator[str]:
        for name in tree:
            if isinstance(tree[name], ConfigDict):
                yield from walk(tree[name], f"{prefix}{name}.")
            else:
                yield prefix + name

    for key in walk(config, ""):
        if key not in known:
            raise unknown_key(key)
    for key, field in known.items():
        put(config, key, _check_field(key, field, get(config, key)))
    if config.task.path and config.task.name != "jsonl":
        put(config, "task.name", "jsonl")
    if config.sft.steps is None:
        if config.sft.data and config.sft.epochs is None:
            put(config, "sft.epochs", 1)
        put(config, "sft.steps", 0 if config.model.path or config.sft.data else WARMUP_STEPS)
    rules = itertools.chain(_rules(config), algorithm_rules(config), sft_rules(config), () if planned else presence_rules(config))
    for broken, message in rules:
        if broken:
            raise ConfigError(message)
    return config


def load(argv: Sequence[str], flags: Sequence[str] = (), *, planned: bool = False) -> tuple[Config, pathlib.Path, dict[str, str]]:
    """Reads ``--config=file.py[:variant] --config.section.key=value --workdir=DIR`` and checks it.

    Args:
      argv: the arguments after the program's name.
      flags: names of further ``--name=value`` flags of the program.
      planned: as of ``validate``.

    Returns:
      The checked configuration, the run's directory and the further flags.

    Raises:
      ConfigError: on anything that is not understood or must not run.
    """
    file, workdir, overrides, further = "", "", [], {}
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"arguments are --name=value; got '{argument}'")
        name = name[2:]
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"'--{name}' needs a value, as in --{name}=VALUE")
            value = rest.pop(0)
        if name == "config":
            file = value
        elif name == "workdir":
            workdir = value
        elif name.startswith("config."):
            overrides.append((name[len("config.") :], value))
        elif name in flags:
            further[name] = value
        else:
            near = difflib.get_close_matches(name, ["config", "workdir", *flags], n=1)
            raise ConfigError(
                f"unknown flag '--{name}'" + (f"; did you mean '--{near[0]}'?" if near else "; flags are --config, --workdir, --config.section.key")
            )
    if not file:
        raise ConfigError("'--config' is missing; as in --config=configs/math.py")
    config = read_file(file)
    known = dict(fields())
    for key, text in overrides:
        if key not in known:
            raise unknown_key(key)
        put(config, key, parse_value(key, known[key], text))
    path, _, variant = file.partition(":")
    name = pathlib.Path(path).stem + (f"-{variant}" if variant else "")
    return validate(config, planned=planned), pathlib.Path(workdir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"), further


def read_file(file: str) -> Config:
    """The configuration of 'path.py' or 'path.py:variant'."""
    path, _, variant = file.partition(":")
    if not os.path.isfile(path):
        raise ConfigError(f"'--config' must be a Python file with get_config(); '{path}' is not there")
    spec = importlib.util.spec_from_file_location("areal_jax_run_config", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"'--config' must be a Python file; '{path}' is not")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"'{path}' must be Python; line {error.lineno}: {error.msg}") from error
    if not hasattr(module, "get_config"):
        raise ConfigError(f"'{path}' must define get_config(variant='')")
    try:
        config = module.get_config(variant) if variant else module.get_config()
    except (AttributeError, KeyError) as error:
        raise ConfigError(f"'{path}' sets a key that does not exist: {error}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"'{path}': get_config must return the ConfigDict of base_config(); it returned {type(config).__name__}")
    return config


def run_main(main: Any, argv: Sequence[str] | None = None) -> None:
    """Runs ``main(argv)``; a ConfigError becomes one message and exit code 2, Ctrl-C (where the program does not take it) exit code 130."""
    try:
        code = main(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
