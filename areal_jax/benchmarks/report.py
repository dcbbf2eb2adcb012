"""What a benchmark found, as JSON and as one table; ``launch/benchmark.py table`` puts several files into one.

Invariant: the table holds what the JSON holds, a row a number and the settings in its caption; names say the unit.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_jax.config import ConfigError

WIDTH = 130


def rows(results: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """('section / name', value as text) of every leaf of nested results."""
    for name, value in results.items():
        label = f"{prefix} / {name}" if prefix else str(name)
        if isinstance(value, Mapping):
            yield from rows(value, label)
        else:
            yield label.replace("_", " "), as_text(value)


def as_text(value: Any) -> str:
    """A number with as many digits as say something; lists of them likewise."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(as_text(part) for part in value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.01 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_table(title: str, results: Mapping[str, Any]) -> None:
    """One table of all results; 'settings' are its caption."""
    settings = results.get("settings", {})
    caption = ", ".join(f"{name}={value}" for name, value in settings.items())
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("measure", overflow="fold")
    table.add_column("value", overflow="fold")
    section = None
    for label, text in rows({name: value for name, value in results.items() if name != "settings"}):
        if section not in (None, label.split(" / ")[0]):
            table.add_section()
        section = label.split(" / ")[0]
        table.add_row(label, text)
    Console(width=WIDTH, highlight=False).print(table)


def save(results: Mapping[str, Any], file: pathlib.Path | None) -> None:
    """Writes the file, if there is one; whole or not at all."""
    if file:
        fresh = file.with_name(f".{file.name}.new")
        fresh.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n")
        fresh.replace(file)


def deliver(title: str, results: Mapping[str, Any], file: pathlib.Path | None) -> None:
    """Prints the table and writes the file, if there is one."""
    print_table(title, results)
    save(results, file)


def main(argv: list[str]) -> int:
    """One table of the results in the files named; a file that is not there is a row that says so."""
    if not argv or any(name.startswith("--") for name in argv):
        raise ConfigError(f"name the JSON files whose results are wanted; got '{' '.join(argv)}'")
    joined: dict[str, Any] = {}
    for name in argv:
        file = pathlib.Path(name)
        try:
            found = json.loads(file.read_text()) if file.is_file() else {"result": "none: it did not run, or not to its end"}
        except ValueError as error:
            raise ConfigError(f"'{file}' must be JSON as written by --out: {error}") from error
        joined[file.stem] = {section: value for section, value in found.items() if section != "settings"}
    print_table("results", joined)
    return 0
