"""The small files beside a policy's weights, and the one error for all of them.

Invariant: whatever is wrong with a checkpoint on the disk is a ``PolicyFilesError`` whose text is one line: the file, the rule, the remedy.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

LFS_POINTER = b"version https://git-lfs"
"""How a file begins that Git LFS has not fetched yet."""


class PolicyFilesError(ValueError):
    """A directory that holds no policy of these families; the text names the file, the rule and the remedy."""


def policy_directory(directory: str | pathlib.Path) -> pathlib.Path:
    """The directory as a path.

    Raises:
      PolicyFilesError: it is not there, or is a file.
    """
    path = pathlib.Path(directory)
    if path.is_file():
        raise PolicyFilesError(f"a policy must be a directory with config.json, *.safetensors and tokenizer.json; '{path}' is a file; name its directory")
    if not path.is_dir():
        raise PolicyFilesError(f"'{path}' is not there; put config.json, *.safetensors and tokenizer.json of a Hugging Face checkpoint into it")
    return path


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
      PolicyFilesError: the file is missing, is not JSON, or is not an object.
    """
    if not file.is_file():
        raise PolicyFilesError(f"'{file}' is not there; fetch the whole checkpoint (config.json, *.safetensors, tokenizer.json)")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise PolicyFilesError(f"'{file}' must be readable: {error}; change its permissions") from error
    if data.startswith(LFS_POINTER):
        raise PolicyFilesError(f"'{file}' is a Git LFS pointer, not the file itself; fetch it with 'git lfs pull'")
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise PolicyFilesError(f"'{file}' must be JSON: {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise PolicyFilesError(f"'{file}' must be a JSON object; it is a {type(value).__name__}; fetch it again")
    return value


def read_json_if_there(file: pathlib.Path) -> dict[str, Any]:
    """Like ``read_json``; empty where there is no such file."""
    return read_json(file) if file.is_file() else {}


def write_json(file: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object, indented."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
