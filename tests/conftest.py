"""Eight CPU devices for every test, and the fixture folders."""

import os
import pathlib

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

ROOT = pathlib.Path(__file__).resolve().parent.parent


def folder(variable: str, default: str) -> pathlib.Path:
    path = pathlib.Path(os.environ.get(variable, ROOT.parent / "shared" / default))
    if not path.is_dir():
        pytest.skip(f"the fixture folder {path} is not here; name it by {variable}", allow_module_level=True)
    return path


@pytest.fixture(scope="session")
def oracles() -> pathlib.Path:
    return folder("AREAL_JAX_ORACLES", "oracles")


@pytest.fixture(scope="session")
def tokenizer_files() -> pathlib.Path:
    return folder("AREAL_JAX_TOKENIZERS", "tokenizers")


@pytest.fixture(scope="session")
def cases() -> pathlib.Path:
    return folder("AREAL_JAX_CASES", "cases")


@pytest.fixture(scope="session")
def real_models() -> pathlib.Path:
    return folder("AREAL_JAX_MODELS", "models")
