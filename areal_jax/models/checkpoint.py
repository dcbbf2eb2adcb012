"""Policies from a Hugging Face checkpoint: from the files straight to the shards of a mesh.

Invariants:
* All names, shapes and types are checked against the architecture before a byte of a tensor is read.
* A process reads the bytes of its own shards alone, and holds on the host one parameter's at a time.
* The tokenizer's ids lie in the policy's vocabulary.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from ml_dtypes import bfloat16

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.config_json import read_model
from areal_jax.models.files import PolicyFilesError, policy_directory, read_json
from areal_jax.models.policy import Params, param_shapes
from areal_jax.models.safetensors_file import Part, StoredTensor, read_header, read_parts
from areal_jax.models.sharding import named_shardings, param_specs
from areal_jax.models.stored_names import STORED_NAMES, Stored, stored
from areal_jax.models.tokenizer import Tokenizer

PARAM_TYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(bfloat16)}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def load_policy(directory: str | pathlib.Path, dtype: str | None = None, param_dtype: str = "float32", mesh: Mesh | None = None) -> tuple[ModelConfig, Params]:
    """Reads a Hugging Face checkpoint of a family in ``config_json.ARCHITECTURES``.

    Args:
      directory: with config.json and *.safetensors.
      dtype: compute type; None: what an export of ours says, else the type that config.json names.
      param_dtype: type of the parameters, 'float32' or 'bfloat16', whatever they are stored as.
      mesh: where ``models.sharding`` places them; None: whole on the first device.

    Returns:
      (model, params): committed ``jax.Array`` leaves.

    Raises:
      PolicyFilesError: a file or a tensor is missing, broken, or has a part, a switch or a shape that is not known here.
    """
    model = read_model(directory, dtype)
    shapes = param_shapes(model)
    if mesh is None:
        whole = SingleDeviceSharding(jax.local_devices()[0])
        return model, load_params(directory, model, param_dtype, jax.tree.map(lambda _: whole, shapes))
    return model, load_params(directory, model, param_dtype, named_shardings(mesh, param_specs(model), shapes))


def load_params(directory: str | pathlib.Path, model: ModelConfig, param_dtype: str, shardings: Any) -> Params:
    """The parameters of a checkpoint whose architecture is known.

    Args:
      directory: with *.safetensors, one or several with their index.
      model: from ``read_model``.
      param_dtype: 'float32' or 'bfloat16'.
      shardings: tree of ``Sharding`` like the parameters, over devices of one or more processes; each process calls this with its own view of the files.

    Raises:
      PolicyFilesError: a file or a tensor is missing, too much, broken or of another shape.
    """
    path = policy_directory(directory)
    shapes = param_shapes(model)
    sources = _match(path, model, open_tensors(path))
    dtype = PARAM_TYPES[param_dtype]

    def load(key: Any, leaf: Any, sharding: Any) -> jax.Array:
        return _load_leaf(sources[leaf_name(key)], leaf.shape, dtype, sharding)

    return jax.tree_util.tree_map_with_path(load, shapes, shardings)


def check_vocabulary(directory: str | pathlib.Path, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer whose ids the policy has no embedding for.

    Raises:
      PolicyFilesError: the tokenizer's largest id is not in the vocabulary.
    """
    if tokenizer.vocab_size > model.vocab_size:
        raise PolicyFilesError(
            f"'{directory}': the tokenizer's ids must lie in the policy's vocabulary of {model.vocab_size}; it has {tokenizer.vocab_size}; "
            "put the policy's own tokenizer there"
        )


def leaf_name(key: Any) -> str:
    """'layers/layer_0/mlp/up/kernel' from a key path of the parameter tree."""
    return jax.tree_util.keystr(key, simple=True, separator="/")


def open_tensors(path: pathlib.Path) -> dict[str, StoredTensor]:
    """All tensors of a directory by name.

    Raises:
      PolicyFilesError: there are none, a shard is missing, or the index and the files disagree.
    """
    index = path / INDEX
    if index.is_file():
        return _open_indexed(path, index)
    names = [SINGLE] if (path / SINGLE).is_file() else sorted(p.name for p in path.glob("*.safetensors"))
    if not names:
        other = next((p.name for kind in ("*.bin", "*.pth", "*.pt", "*.gguf", "*.h5") for p in sorted(path.glob(kind))), None)
        have = f"it holds {other}; save it with safe_serialization" if other else "there are none; fetch the weights of the checkpoint"
        raise PolicyFilesError(f"'{path}' must hold *.safetensors; {have}")
    for name in names:
        part = re.fullmatch(r"(.*-)\d{5}-of-(\d{5})\.safetensors", name)
        if part:
            wanted = {f"{part[1]}{i:05d}-of-{part[2]}.safetensors" for i in range(1, int(part[2]) + 1)}
            for absent in sorted(wanted - set(names)):
                raise PolicyFilesError(f"'{path / absent}' is not there, but '{name}' is; fetch the whole checkpoint")
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        for key, tensor in read_header(path / name).items():
            if key in tensors:
                raise PolicyFilesError(f"'{key}' must be in one file; it is in '{tensors[key].file}' and in '{tensor.file}'; remove one of them")
            tensors[key] = tensor
    return tensors


def _open_indexed(path: pathlib.Path, index: pathlib.Path) -> dict[str, StoredTensor]:
    places = read_json(index).get("weight_map")
    if not (isinstance(places, dict) and places and all(isinstance(name, str) and name == pathlib.PurePath(name).name for name in places.values())):
        raise PolicyFilesError(f"'{index}' must hold 'weight_map', from tensors to files beside it; fetch it again")
    files = sorted(set(places.values()))
    for name in files:
        if not (path / name).is_file():
            raise PolicyFilesError(f"'{path / name}' is not there, but '{index}' names it; fetch the whole checkpoint")
    if SINGLE not in files and (path / SINGLE).is_file():
        raise PolicyFilesError(f"'{path}' must hold one set of weights; '{SINGLE}' is there and '{INDEX}' names others; remove one of them")
    held = {name: read_header(path / name) for name in files}
    for key, name in places.items():
        if key not in held[name]:
            raise PolicyFilesError(f"'{path / name}' must hold '{key}', as '{INDEX}' says; it does not; fetch the whole checkpoint")
    for name, tensors in held.items():
        for key in tensors:
            if places.get(key) != name:
                raise PolicyFilesError(f"'{path / name}' holds '{key}', which '{INDEX}' does not place there; fetch the whole checkpoint")
    return {key: held[name][key] for key, name in places.items()}


def _match(path: pathlib.Path, model: ModelConfig, tensors: dict[str, StoredTensor]) -> dict[str, tuple[Stored, list[StoredTensor]]]:
    """For each parameter how and where it is stored."""
    sources: dict[str, tuple[Stored, list[StoredTensor]]] = {}
    used = set()
    for key, leaf in jax.tree_util.tree_leaves_with_path(param_shapes(model)):
        how = stored(leaf_name(key), leaf.shape)
        for name in how.names:
            if name not in tensors:
                raise PolicyFilesError(f"'{path}' must hold the tensor '{name}' {list(how.shape)}; it is missing; fetch the whole checkpoint")
            if tensors[name].shape != how.shape:
                raise PolicyFilesError(
                    f"'{tensors[name].file}': '{name}' must be {list(how.shape)} by config.json; it is {list(tensors[name].shape)}; "
                    "take configuration and weights from one checkpoint"
                )
        sources[leaf_name(key)] = how, [tensors[name] for name in how.names]
        used |= set(how.names)
    for name, tensor in tensors.items():
        if name not in used and not _derived(name, model):
            raise PolicyFilesError(f"'{tensor.file}' holds '{name}', which a {model.family} policy of config.json does not have; check its architecture")
    return sources


def _derived(name: str, model: ModelConfig) -> bool:
    """Tensors that repeat what others say: old rotary tables, and the head of a policy that shares its embedding."""
    return name.endswith("rotary_emb.inv_freq") or (model.tie_embeddings and name == STORED_NAMES["lm_head/kernel"])


def _load_leaf(source: tuple[Stored, list[StoredTensor]], shape: tuple[int, ...], dtype: np.dtype, sharding: Any) -> jax.Array:
    """One parameter on its devices; its host copies are gone on return."""

    def bounds(index: Any) -> tuple[tuple[int, int], ...]:
        return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))

    # Before the devices ask one by one: replicas share a reading, and so do shards that lie side by side in the file.
    shards = _read_shards(source, {bounds(index) for index in sharding.addressable_devices_indices_map(shape).values()}, dtype)
    return jax.block_until_ready(jax.make_array_from_callback(shape, sharding, lambda index: shards[bounds(index)], dtype=dtype))


def _read_shards(source: tuple[Stored, list[StoredTensor]], wanted: set[tuple[tuple[int, int], ...]], dtype: np.dtype) -> dict[Any, np.ndarray]:
    """The shards at ``wanted`` (start and stop on each axis), in the orientation of the parameter."""
    how, tensors = source
    shards: dict[Any, np.ndarray] = {}
    parts: list[list[Part]] = [[] for _ in tensors]
    for place in wanted:
        (first, last), inner = (place[0], place[1:]) if how.stacked else ((0, 1), place)
        rows, columns = (*(slice(*ends) for ends in (inner[::-1] if how.transposed else inner)), slice(0, 1))[:2]
        target = np.empty((last - first, rows.stop - rows.start, columns.stop - columns.start), dtype)
        for number in range(first, last):
            parts[number].append((rows, columns, target[number - first]))
        shard = target.swapaxes(1, 2) if how.transposed else target
        shard = shard if how.stacked else shard[0]
        shards[place] = shard[:, 0] if len(inner) == 1 else shard
    for tensor, pieces in zip(tensors, parts, strict=True):
        read_parts(tensor, pieces)
    return shards
