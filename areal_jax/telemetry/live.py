"""The live view of a run: one panel on a terminal, a plain line now and then elsewhere.

Invariants:
* It only shows; no other part reads from it, and a value that is not known is not shown.
* On a terminal the panel is redrawn in place; elsewhere (a pipe, a log file) a line is printed at each change of stage and about every ``PLAIN_SECONDS``.
* The refresh thread takes rich's lock and then this one's, so nothing here prints to a live console while it holds its own.
* ``message`` and ``summary`` print in every mode, 'off' included: they are results and warnings, not progress.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_SECONDS = 10.0
RATE_STEPS = 20
"""Steps over which the time left is estimated."""


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


SHOWN: dict[str, tuple[str, str, Callable[[Any], str]]] = {
    "reward": ("reward", "reward/mean", "{:.3f}".format),
    "accuracy": ("held-out accuracy", "eval/accuracy", _percent),
    "loss": ("loss", "loss/supervised", "{:.3f}".format),
    "preference_loss": ("loss", "preference/loss", "{:.4f}".format),
    "margin": ("margin", "preference/margin", "{:.3f}".format),
    "heldout_loss": ("held-out loss", "eval/loss", "{:.4f}".format),
    "perplexity": ("perplexity", "eval/perplexity", "{:.2f}".format),
    "heldout_correct": ("held-out pairs in order", "eval/correct", _percent),
    "staleness": ("staleness", "staleness/mean", "{:.2f}".format),
    "staleness_max": ("oldest token", "staleness/max", "{:.0f}".format),
    "buffer": ("buffer", "buffer/depth", "{:.0f} groups".format),
    "in_flight": ("in flight", "groups/in_flight", "{:.0f} groups".format),
    "generated": ("generated", "tokens_per_second/generated", lambda v: f"{_short(v)} tokens/s"),
    "trained": ("trained", "tokens_per_second/trained", lambda v: f"{_short(v)} tokens/s"),
    "waiting": ("trainer waited", "time/wait_for_batch", "{:.2f} s".format),
}
"""Field of ``update`` → (label, the metric it shows, its text)."""


class LiveView:
    """Context manager around a run; ``stage``, ``update`` and ``message`` may be called from any thread."""

    def __init__(self, mode: str, total_steps: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        """Prepares the view.

        Args:
          mode: 'auto' (panel on a terminal, lines elsewhere), 'on' (panel), 'off' (no progress).
          total_steps: steps of the stages that do not say otherwise.
          console: where to print; standard output by default.
          clock: seconds; only differences count.
        """
        self._console = console or Console(force_terminal=True if mode == "on" else None)
        self._mode = mode if mode != "auto" else "on" if self._console.is_terminal else "plain"
        self._clock = clock
        self._lock = threading.RLock()
        self._started = clock()
        self._default_total = total_steps
        self._values: dict[str, Any] = {}
        self._printed_at = float("-inf")
        self._enter_stage("starting", 0)
        self._live = Live(get_renderable=self._panel, console=self._console, refresh_per_second=2, transient=True) if self._mode == "on" else None

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes the panel away; a second call does nothing."""
        if self._live is not None:
            self._live.stop()

    def stage(self, name: str, total_steps: int | None = None) -> None:
        """A new stage ('compiling', 'warm-up', 'training', 'evaluation', ...); ``total_steps`` 0: it has no steps."""
        with self._lock:
            self._enter_stage(name, self._default_total if total_steps is None else total_steps)
            if self._mode == "plain":
                self._print_line()

    def _enter_stage(self, name: str, total_steps: int) -> None:
        self._values.pop("loss", None)  # of the stage before
        self._stage, self._total, self._step = name, total_steps, 0
        self._stage_started = self._clock()
        self._steps_at: collections.deque[tuple[float, int]] = collections.deque(maxlen=RATE_STEPS + 1)

    def update(self, step: int | None = None, **values: float | None) -> None:
        """New values.

        Args:
          step: steps done in this stage.
          values: any of ``SHOWN``; None leaves the last known one.

        Raises:
          KeyError: a field that is not shown.
        """
        unknown = values.keys() - SHOWN.keys()
        if unknown:
            raise KeyError(f"the live view has no field {sorted(unknown)[0]!r}; fields are {', '.join(SHOWN)}")
        with self._lock:
            self._values.update({name: float(value) for name, value in values.items() if value is not None})
            if step is not None:
                self._step = step
                self._steps_at.append((self._clock(), step))
            if self._mode == "plain" and (self._clock() - self._printed_at >= PLAIN_SECONDS or (step is not None and step == self._total)):
                self._print_line()

    def update_metrics(self, row: Mapping[str, Any], step: int | None = None) -> None:
        """``update`` from a row of ``metrics.jsonl``, ``eval.jsonl`` or ``warmup.jsonl``; other metrics are passed over."""
        self.update(step, **{name: row.get(metric) for name, (_, metric, _) in SHOWN.items()})

    def message(self, text: str) -> None:
        """One line that stays, above the panel."""
        self._console.print(Text(text), soft_wrap=True)

    def summary(self, rows: Mapping[str, str], title: str = "result") -> None:
        """Takes the panel away and prints the final table of names and texts."""
        self.close()
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right", overflow="fold")
        for name, text in rows.items():
            table.add_row(Text(name), Text(str(text)))
        self._console.print(table)

    def _time_left(self) -> float | None:
        """Seconds to the end of the stage at the pace of the last steps."""
        if not self._total or len(self._steps_at) < 2:
            return None
        (first_time, first), (last_time, last) = self._steps_at[0], self._steps_at[-1]
        if last <= first:
            return None
        return max(0.0, (self._total - last) * (last_time - first_time) / (last - first) - (self._clock() - last_time))

    def _facts(self) -> list[tuple[str, str]]:
        return [(label, form(self._values[name])) for name, (label, _, form) in SHOWN.items() if name in self._values]

    def _print_line(self) -> None:
        now = self._clock()
        self._printed_at = now
        parts = [f"[{_duration(now - self._started)}] {self._stage}"]
        if self._total and self._step:
            parts.append(f"step {self._step}/{self._total}")
        parts += [f"{label} {text}" for label, text in self._facts()]
        left = self._time_left()
        if left:
            parts.append(f"left {_duration(left)}")
        self._console.print(Text("  ".join(parts)), soft_wrap=True)

    def _panel(self) -> RenderableType:
        with self._lock:
            now = self._clock()
            head = Table.grid(expand=True, padding=(0, 1))
            head.add_column()
            head.add_column(ratio=1)
            head.add_column(justify="right")
            if self._total:
                bar: RenderableType = ProgressBar(total=self._total, completed=min(self._step, self._total))
                left = self._time_left()
                end = f"{self._step}/{self._total}" + (f"  {_duration(left)} left" if left is not None else "")
            else:
                bar, end = ProgressBar(pulse=True, animation_time=now), _duration(now - self._stage_started)
            head.add_row(Text(self._stage, style="bold"), bar, Text(end))
            facts = self._facts()
            body = Table.grid(expand=True, padding=(0, 2))
            for _ in range(2):
                body.add_column(style="dim")
                body.add_column(ratio=1)
            for left_fact, right_fact in zip(facts[::2], [*facts[1::2], ("", "")], strict=False):
                body.add_row(*left_fact, *right_fact)
            return Panel(
                Group(head, body) if facts else head, title="areal_jax", subtitle=_duration(now - self._started), title_align="left", subtitle_align="right"
            )
