"""What a person sees: a panel on a terminal, a line now and then in a log."""

import io
import threading

import pytest
from rich.console import Console

from areal_jax.telemetry.live import LiveView, _duration


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def view(mode="auto", terminal=False, total=100):
    clock, stream = Clock(), io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100, color_system=None)
    return LiveView(mode, total, console, clock), clock, stream, console


def test_log_gets_a_line_at_a_stage_and_every_ten_seconds():
    live, clock, stream, _ = view()
    with live:
        live.stage("training")
        for step in range(1, 31):
            clock.now += 1.0
            live.update(step, reward=step / 100, generated=5234.0)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[0:00] training"
    assert len(lines) == 4
    assert lines[1] == "[0:10] training  step 10/100  reward 0.100  generated 5.2k tokens/s  left 1:30"


def test_log_gets_the_last_step_at_once():
    live, _, stream, _ = view(total=3)
    live.stage("training")
    live.update(2)
    live.update(3)
    assert stream.getvalue().splitlines()[-1].startswith("[0:00] training  step 3/3")


def test_time_left_follows_the_last_steps_not_the_slow_start():
    live, clock, _, _ = view(total=100)
    live.stage("training")
    live.update(1)
    clock.now += 60.0  # compilation
    for step in range(2, 50):
        clock.now += 1.0
        live.update(step)
    assert live._time_left() == pytest.approx(51.0)
    clock.now += 11.0
    assert live._time_left() == pytest.approx(40.0)


def test_panel_shows_every_field(tmp_path):
    live, clock, _, console = view("on", terminal=True)
    live.stage("training")
    live.update(23, reward=0.512, accuracy=0.44, staleness=1.2, staleness_max=4)
    clock.now += 30.0
    live.update(24, buffer=3, in_flight=77, generated=5234.0, trained=1.2e6, waiting=0.25)
    with console.capture() as capture:
        console.print(live._panel())
    text = capture.get()
    for part in (
        "training",
        "24/100",
        "38:00 left",
        "0.512",
        "44.0 %",
        "1.20",
        "oldest token",
        "3 groups",
        "77 groups",
        "5.2k tokens/s",
        "1.2M tokens/s",
        "0.25 s",
    ):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 100


def test_metrics_rows_feed_the_view():
    live, _, stream, _ = view()
    live.stage("training")
    live.update_metrics({"reward/mean": 0.25, "staleness/max": 3, "loss/value": None, "eval/accuracy": None})
    live.update_metrics({"eval/accuracy": 0.5}, step=100)
    assert "reward 0.250  held-out accuracy 50.0 %  oldest token 3" in stream.getvalue()


def test_unknown_field_is_an_error():
    live, *_ = view()
    with pytest.raises(KeyError, match="rewrad"):
        live.update(rewrad=1.0)


def test_off_prints_only_messages_and_the_summary():
    live, clock, stream, _ = view("off")
    with live:
        live.stage("training")
        clock.now += 100
        live.update(5, reward=1.0)
        assert stream.getvalue() == ""
        live.message("resumed at step [5]")
        live.summary({"held-out accuracy": "30.1 % → 71.2 %"})
    assert "resumed at step [5]" in stream.getvalue() and "30.1 % → 71.2 %" in stream.getvalue() and "training" not in stream.getvalue()


def test_terminal_panel_survives_messages_from_threads():
    live, _, stream, _ = view("on", terminal=True)
    with live:
        live.stage("training")

        def work(number):
            for n in range(50):
                live.update(n, reward=n / 50)
                live.message(f"message {number} {n}")
                live._live.refresh()

        threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "the view deadlocked"
    assert all(f"message {number} {n}" in stream.getvalue() for number in range(3) for n in range(50))


@pytest.mark.parametrize("seconds, text", [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")])
def test_durations(seconds, text):
    assert _duration(seconds) == text
