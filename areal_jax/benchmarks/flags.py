"""The arguments of the benchmarks: ``--name=value`` with defaults, every mistake one line.

Invariant: a flag that is not known, or whose value is not understood, ends the program before anything is measured.
"""

from __future__ import annotations

import difflib
import os
import pathlib
from collections.abc import Mapping, Sequence

from areal_jax.benchmarks.loads import whole_number
from areal_jax.config import ConfigError


def parse(argv: Sequence[str], defaults: Mapping[str, str]) -> dict[str, str]:
    """The values of flags by name.

    Args:
      argv: ``--name=value`` or ``--name value``.
      defaults: every flag with its default.

    Raises:
      ConfigError: naming the argument, and the flag that may have been meant.
    """
    values = dict(defaults)
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or name not in defaults:
            near = difflib.get_close_matches(name, defaults, n=1)
            hint = f"did you mean '--{near[0]}'?" if near else f"flags are {', '.join('--' + flag for flag in defaults)}"
            raise ConfigError(f"unknown argument '{argument}'; {hint}")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"'--{name}' needs a value, as in --{name}=VALUE")
            value = rest.pop(0)
        values[name] = value
    return values


def whole(values: Mapping[str, str], name: str, least: int = 1) -> int:
    """The whole number of a flag."""
    return whole_number(name, values[name], least)


def several(values: Mapping[str, str], name: str) -> tuple[int, ...]:
    """The whole numbers of a flag such as ``--batches=16,32``."""
    return tuple(whole_number(name, part) for part in values[name].split(","))


def span(values: Mapping[str, str], name: str) -> tuple[int, int]:
    """(least, greatest) of a flag such as ``--prompt=16`` or ``--prompt=8:24``."""
    parts = [whole_number(name, part) for part in values[name].split(":")]
    if len(parts) > 2 or parts[0] > parts[-1]:
        raise ConfigError(f"'--{name}' must be N or LEAST:GREATEST; got '{values[name]}'")
    return parts[0], parts[-1]


def seconds(values: Mapping[str, str], name: str) -> float:
    """The positive number of seconds of a flag."""
    try:
        value = float(values[name])
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e6:
        raise ConfigError(f"'--{name}' must be a number of seconds above 0; got '{values[name]}'")
    return value


def chosen(values: Mapping[str, str], name: str, known: Sequence[str]) -> tuple[str, ...]:
    """The words of a flag such as ``--parts=steps,updates``; 'all' are all of them."""
    words = tuple(known) if values[name] == "all" else tuple(values[name].split(","))
    for word in words:
        if word not in known:
            raise ConfigError(f"'--{name}' must be all, or some of {', '.join(known)}; got '{word}'")
    return words


def output(values: Mapping[str, str], name: str = "out") -> pathlib.Path | None:
    """The file of a flag, None if it names none.

    Raises:
      ConfigError: it cannot be written.
    """
    if not values[name]:
        return None
    file = pathlib.Path(values[name])
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"'--{name}' must name a file that can be written; '{file}' cannot; make its directory")
    return file
