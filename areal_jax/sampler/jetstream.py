"""JetStream's real package (google-jetstream 0.2.2), the one place that imports it.

The package names seqio, and with it TensorFlow, for two class names in annotations that the engine interface never
uses. Where seqio is not installed, empty classes of those names stand in for it, before JetStream's first import.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

from areal_jax.config import ConfigError


def _stand_in_for_seqio() -> None:
    if "seqio" in sys.modules or importlib.util.find_spec("seqio") is not None:
        return
    seqio, vocabularies = types.ModuleType("seqio"), types.ModuleType("seqio.vocabularies")
    for name in ("Vocabulary", "SentencePieceVocabulary"):
        setattr(vocabularies, name, type(name, (), {}))
    seqio.vocabularies = vocabularies  # type: ignore[attr-defined]
    sys.modules.update({"seqio": seqio, "seqio.vocabularies": vocabularies})


if importlib.util.find_spec("jetstream") is None:
    raise ConfigError("the package google-jetstream is missing; install it by: pip install --no-deps google-jetstream==0.2.2")
_stand_in_for_seqio()

from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2  # noqa: E402

Engine = engine_api.Engine
ResultTokens = engine_api.ResultTokens
Tokenizer = tokenizer_api.Tokenizer
TokenizerParameters = vars(tokenizer_pb2)["TokenizerParameters"]
pad_tokens = token_utils.pad_tokens


def orchestrator() -> types.ModuleType:
    """JetStream's own orchestrator, usable under a JAX without ``jax.tree_map`` (needs grpcio)."""
    import jax

    module = importlib.import_module("jetstream.core.orchestrator")
    module.delete_pytree = lambda tree: jax.tree.map(lambda leaf: leaf.delete(), tree)  # type: ignore[attr-defined]
    return module


def protocol() -> tuple[types.ModuleType, types.ModuleType]:
    """JetStream's gRPC protocol: (messages, services); needs grpcio."""
    name = "jetstream.core.proto.jetstream_pb2"
    return importlib.import_module(name), importlib.import_module(f"{name}_grpc")
