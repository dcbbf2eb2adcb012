"""Policies out, in the layout of a Hugging Face checkpoint that ``transformers``, vLLM and ``load_policy`` read.

Invariants:
* The directory appears whole: it is written beside its place and renamed; a failure leaves what was there.
* The host holds one parameter at a time.
* A policy that came from a checkpoint keeps that checkpoint's tokenizer files, byte for byte, and its generation settings.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from areal_jax.models.adapters import merge
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.checkpoint import INDEX, PARAM_TYPES, SINGLE, leaf_name
from areal_jax.models.config_json import config_json
from areal_jax.models.files import policy_directory, read_json_if_there, write_json
from areal_jax.models.policy import Params, param_shapes
from areal_jax.models.safetensors_file import write_tensors
from areal_jax.models.stored_names import stored
from areal_jax.models.tokenizer import Tokenizer

SHARD_BYTES = 5 * 10**9
"""Most bytes of one file, as ``transformers`` has it; a larger tensor has a file of its own."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
)


def export_policy(
    directory: str | pathlib.Path,
    model: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    *,
    source: str | pathlib.Path | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a policy.

    Args:
      directory: replaced if it exists.
      model: the architecture.
      params: its parameters, on any mesh of this process; adapters are merged into their kernels.
      tokenizer: saved beside them when there is no ``source``.
      source: checkpoint that the policy was loaded from; its tokenizer files and its entries of generation_config.json are kept.
      dtype: stored type, 'float32' or 'bfloat16'; None or 'parameters': the parameters' own.
      shard_bytes: most bytes of one *.safetensors file.

    Raises:
      ValueError: the parameters are not the model's, or the tokenizer's ids exceed its vocabulary.
      PolicyFilesError: ``source`` is not there or broken.
      OSError: the directory cannot be written.
    """
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer's ids must lie in the model's vocabulary of {model.vocab_size}; it has {tokenizer.vocab_size}; export it with its own tokenizer"
        )
    model, params = merge(model, params)
    leaves = _checked_leaves(model, params)
    dtype = str(leaves[0][1].dtype) if dtype in (None, "parameters") else dtype
    origin = None if source is None else policy_directory(source)
    target = pathlib.Path(directory).absolute()
    fresh, old = (target.with_name(f".{target.name}.{word}-{os.getpid()}") for word in ("new", "old"))
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        _save_tensors(fresh, leaves, PARAM_TYPES[dtype], shard_bytes)
        _save_small_files(fresh, model, dtype, tokenizer, origin)
        _replace(fresh, target, old)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _checked_leaves(model: ModelConfig, params: Params) -> list[tuple[str, Any]]:
    leaves = [(leaf_name(key), leaf) for key, leaf in jax.tree_util.tree_leaves_with_path(params)]
    wanted = {leaf_name(key): leaf.shape for key, leaf in jax.tree_util.tree_leaves_with_path(param_shapes(model))}
    got = {name: tuple(leaf.shape) for name, leaf in leaves}
    for name in sorted(wanted.keys() | got.keys()):
        if wanted.get(name) != got.get(name):
            raise ValueError(
                f"the parameters of this {model.family} model must hold '{name}' as {wanted.get(name, 'nothing')}; got {got.get(name, 'nothing')}; "
                "export them with their own model"
            )
    return leaves


def _save_small_files(fresh: pathlib.Path, model: ModelConfig, dtype: str, tokenizer: Tokenizer, origin: pathlib.Path | None) -> None:
    config = {} if origin is None else read_json_if_there(origin / "config.json")
    write_json(fresh / "config.json", config_json(model, dtype, config))
    ids = {"bos_token_id": config.get("bos_token_id"), "eos_token_id": list(model.eos_ids), "pad_token_id": model.pad_id}
    kept = {} if origin is None else read_json_if_there(origin / "generation_config.json")
    write_json(fresh / "generation_config.json", ids | kept)
    if origin is None:
        tokenizer.save(fresh)
        return
    for name in TOKENIZER_FILES:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, fresh / name)


def _save_tensors(directory: pathlib.Path, leaves: list[tuple[str, Any]], dtype: np.dtype, shard_bytes: int) -> None:
    """One file, or numbered ones and their index when the bytes exceed ``shard_bytes``."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = total = 0
    for path, leaf in leaves:
        how = stored(path, tuple(leaf.shape))
        for name in how.names:
            more = int(np.prod(how.shape)) * dtype.itemsize
            if shards[-1] and size + more > shard_bytes:
                shards.append({})
                size = 0
            shards[-1][name] = how.shape
            size, total = size + more, total + more
    tensors = _stored_arrays(leaves)
    index: dict[str, str] = {}
    for number, shapes in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(directory / file, shapes, dtype, (next(tensors) for _ in shapes))
        index |= dict.fromkeys(shapes, file)
    if len(shards) > 1:
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def _stored_arrays(leaves: list[tuple[str, Any]]) -> Iterator[np.ndarray]:
    """Host arrays in the stored orientation, in the order of ``stored``'s names."""
    for path, leaf in leaves:
        how = stored(path, tuple(leaf.shape))
        host = _on_host(path, leaf)
        for array in host if how.stacked else (host,):
            yield array.T if how.transposed else array


def _on_host(path: str, leaf: jax.Array) -> np.ndarray:
    """The whole parameter."""
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise ValueError(f"'{path}' must lie on devices of this process to be exported; it lies on {leaf.sharding}; gather it first")
    shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0] or leaf.addressable_shards[:1]
    if len(shards) == 1:
        return _read(shards[0].data)
    host = np.empty(leaf.shape, leaf.dtype)
    for shard in shards:
        host[shard.index] = _read(shard.data)
    return host


def _read(array: jax.Array) -> np.ndarray:
    """Reads an array of one device, through a copy: an array keeps what the host has read of it for as long as it lives. On a CPU that is itself."""
    (device,) = array.devices()
    return np.asarray(array if device.platform == "cpu" else jax.device_put(array, device, may_alias=False))


def _replace(fresh: pathlib.Path, target: pathlib.Path, old: pathlib.Path) -> None:
    if not target.exists():
        os.replace(fresh, target)
        return
    shutil.rmtree(old, ignore_errors=True)
    os.replace(target, old)
    try:
        os.replace(fresh, target)
    except OSError:
        os.replace(old, target)
        raise
    shutil.rmtree(old)
