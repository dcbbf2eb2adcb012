"""A plan for people (rich tables, 120 columns) and for programs (one JSON object)."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_jax.config_devices import MESH_AXES
from areal_jax.planner.bounds import Times
from areal_jax.planner.candidates import Outcome, remedies
from areal_jax.planner.collectives import axes_of
from areal_jax.planner.compiled import Program
from areal_jax.planner.hardware import GIB, USABLE
from areal_jax.planner.memory import Memory, accumulate_bytes, kv_bytes_per_token, param_count, slot_bytes, slots_that_fit
from areal_jax.planner.work import trainer_work

WIDTH = 120


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def seconds(time: float) -> str:
    """A duration for people."""
    return f"{time:,.0f} s" if time >= 100 else f"{time:.1f} s" if time >= 1 else f"{time * 1e3:.2f} ms"


def verdict(now: Outcome) -> tuple[bool, list[str]]:
    """(whether it fits, sentences)."""
    lines = []
    for role, room, memory in (("trainer", now.trainer_room, now.trainer), ("sampler", now.sampler_room, now.sampler)):
        state = f"fits, {gib(room)} a device to spare" if room >= 0 else f"does not fit: {gib(-room)} a device too much"
        lines.append(f"{role}: {state} ({gib(memory.total)} of {gib(now.setup.topology.chip.usable)})")
    changes = remedies(now)
    if changes:
        lines.append("what would make it fit, each alone for its role: " + "; ".join(changes))
    return now.fits, lines


def print_plan(console: Console, now: Outcome, others: Sequence[Outcome], samplers: Sequence[Outcome], programs: Sequence[Program]) -> None:
    """Everything about one topology."""
    s, b = now.setup, now.bounds
    t, r = s.config.trainer, s.config.rollout
    console.print(f"[bold]{s.topology.name}[/bold]: {s.topology.devices} devices, {s.topology.chip.source}")
    console.print(
        f"policy: {param_count(s):,} parameters, {s.model.layers} layers; trainer {s.trainer.devices} devices ({s.trainer}), "
        f"sampler {s.sampler.devices} ({s.sampler}), {s.slots} slots a shard"
    )
    console.print(
        f"a step: {t.groups_per_step} x {r.group_size} samples in {t.minibatches} minibatches, {b.batch.micro_batches} micro-batches of "
        f"{t.micro_batch_rows} x {t.micro_batch_tokens} tokens; η = {r.max_staleness}"
    )
    console.print(f"assumed: prompts of {s.workload.prompt} and responses of {s.workload.response} tokens on average (--prompt, --response)")
    for note in s.notes:
        console.print(f"note: {note}")
    _print_memory(console, now)
    _print_times(console, now)
    _print_meshes(console, now, others, samplers)
    if programs:
        _print_programs(console, now, programs)
    fits, lines = verdict(now)
    console.print(f"[bold]{'FITS' if fits else 'DOES NOT FIT'}[/bold]")
    for line in lines:
        console.print("  " + line, soft_wrap=False)
    console.print(
        f"  bound on a step: {seconds(b.step)}, by the {b.bottleneck} ({(b.trainer.limit if b.bottleneck == 'trainer' else 'decoding, ' + b.decode.limit)}); "
        f"at most {b.batch.tokens / b.step:,.0f} trained tokens/s"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", width=WIDTH)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _print_memory(console: Console, now: Outcome) -> None:
    table = _table(f"memory of a device (usable: {USABLE:.0%} of {gib(now.setup.topology.chip.memory)})", "trainer", "", "sampler", "")
    left, right = _parts(now.trainer), _parts(now.sampler)
    for i in range(max(len(left), len(right))):
        table.add_row(*(left[i] if i < len(left) else ("", "")), *(right[i] if i < len(right) else ("", "")))
    table.columns[2].justify = "left"
    console.print(table)
    s = now.setup
    console.print(
        f"KV cache: {kv_bytes_per_token(s.model):,} bytes a token, {gib(slot_bytes(s, s.sampler))} a slot and device at {s.longest} tokens; "
        f"{slots_that_fit(s)} slots a shard fit"
    )


def _parts(memory: Memory) -> list[tuple[str, str]]:
    parts = [(name, gib(size)) for name, size in memory.staying.items()]
    parts += [(f"{name} (at work)", gib(size)) for name, size in memory.working.items()]
    return [*parts, ("total", gib(memory.total))]


def _print_times(console: Console, now: Outcome) -> None:
    b = now.bounds
    table = _table("least seconds of a step at the hardware's peaks (a bound, not a forecast)", "part", "compute", "memory", "links", "bound", "set by")

    def row(name: str, times: Times, factor: float = 1.0) -> None:
        table.add_row(name, *(seconds(x * factor) for x in (times.compute, times.memory, times.links, times.bound)), times.limit)

    row("trainer: proximal pass, gradients, updates", b.trainer)
    row(f"sampler: {b.decode_steps:,.0f} decode steps of all slots", b.decode, b.decode_steps)
    table.add_row("sampler: prefill, caches rebuilt after an update", seconds(b.prefill), "", "", seconds(b.prefill), "compute")
    table.add_row(f"weight push: {gib(b.push_bytes)} in all", "", "", seconds(b.push), seconds(b.push), "network")
    console.print(table)
    sent = ", ".join(f"{kind} over {axis} {gib(size)}" for (kind, axis), size in sorted(trainer_work(now.setup).wires.items(), key=lambda item: -item[1]))
    console.print(f"trainer sends a step and device: {sent or 'nothing'}")


def _print_meshes(console: Console, now: Outcome, others: Sequence[Outcome], samplers: Sequence[Outcome]) -> None:
    table = _table("other ways to divide the devices (analytic)", "mesh", "memory", "room", "bound on its part of a step", "set by")

    def trainer(o: Outcome, mark: str = "") -> None:
        table.add_row(f"trainer {o.setup.trainer}{mark}", gib(o.trainer.total), _room(o.trainer_room), seconds(o.bounds.trainer.bound), o.bounds.trainer.limit)

    def sampler(o: Outcome, mark: str = "") -> None:
        name = f"sampler {o.setup.sampler}, {o.setup.slots} slots a shard{mark}"
        table.add_row(name, gib(o.sampler.total), _room(o.sampler_room), seconds(o.bounds.sampler), o.bounds.decode.limit)

    trainer(now, " (configured)")
    for other in others:
        if other.setup.trainer != now.setup.trainer:
            trainer(other)
    table.add_section()
    sampler(now, " (configured)")
    for other in samplers:
        sampler(other)
    console.print(table)


def _room(room: int) -> str:
    return gib(room) if room >= 0 else f"-{gib(-room)}"


def planned_bytes(now: Outcome, program: Program) -> int | None:
    """What the plan's own formulas say of a program under the compiler that compiled it; None where they say nothing."""
    if program.name == "accumulate":
        return accumulate_bytes(now.setup, widened="CPU" in program.target)
    return None


def _print_programs(console: Console, now: Outcome, programs: Sequence[Program]) -> None:
    table = _table("the run's own programs, compiled: bytes of a device", "program", "arguments", "results", "temporary", "total", "planned", "compiled in")
    for p in programs:
        planned = planned_bytes(now, p)
        expected = gib(planned) if planned is not None else ""
        if p.refusal:
            table.add_row(p.name, "", "", "", "refused", expected, seconds(p.seconds))
        else:
            table.add_row(p.name, *(gib(x) for x in (p.argument, p.output - p.alias, p.temporary, p.total)), expected, seconds(p.seconds))
    console.print(table)
    for p in programs:
        if p.refusal:
            console.print(f"{p.name} is refused by the compiler for {p.target}: {p.refusal}")
        if p.communication is None:
            console.print(f"{p.name}: what it sends cannot be read from the program for {p.target}; the plan's own count stands")
        elif p.communication.collectives:
            console.print(f"{p.name} sends a run and device: {communication_line(p)}")
    for target, axes in dict.fromkeys((p.target, str(p.axes)) for p in programs):
        widened = (
            "; its products of bfloat16 are float32, so its bytes are more than the run's" if "CPU" in target and now.setup.model.dtype == "bfloat16" else ""
        )
        console.print(f"compiled for {target}, mesh {axes}{widened}")


def communication_line(program: Program) -> str:
    """The collectives of a program, largest first, those of a kind and axis together."""
    if program.communication is None:
        return "not known"
    sizes = [getattr(program.axes, axis) for axis in MESH_AXES]
    joined: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for c in program.communication.collectives:
        entry = joined[c.kind, axes_of(c.group, MESH_AXES, sizes)]
        entry[0] += c.count
        entry[1] += c.sent
    ordered = sorted(joined.items(), key=lambda item: -item[1][1])
    return ", ".join(f"{kind} over {axes} {gib(sent)} in {count:.0f}" for (kind, axes), (count, sent) in ordered[:6])


def print_range(console: Console, found: Sequence[Outcome]) -> None:
    """One line a size: the fastest division that fits."""
    table = _table("the fastest division of each size that fits (analytic)", "devices", "trainer", "sampler", "slots", "fits", "step bound", "by", "tokens/s")
    for o in found:
        s, b = o.setup, o.bounds
        lacking = "yes" if o.fits else f"no: -{gib(max(-o.trainer_room, -o.sampler_room))}"
        rate = f"{b.batch.tokens / b.step:,.0f}"
        table.add_row(s.topology.name, str(s.trainer), str(s.sampler), str(s.config.rollout.slots), lacking, seconds(b.step), b.bottleneck, rate)
    console.print(table)


def as_json(now: Outcome, programs: Sequence[Program] = ()) -> dict[str, Any]:
    """The plan as plain values: bytes, seconds, FLOPs."""
    s, b = now.setup, now.bounds
    work = trainer_work(s)
    fits, lines = verdict(now)
    return {
        "topology": s.topology.name,
        "parameters": param_count(s),
        "trainer": {"mesh": dataclasses.asdict(s.trainer), "bytes": now.trainer.staying | now.trainer.working, "total": now.trainer.total},
        "sampler": {"mesh": dataclasses.asdict(s.sampler), "bytes": now.sampler.staying | now.sampler.working, "total": now.sampler.total, "slots": s.slots},
        "usable_bytes": s.topology.chip.usable,
        "kv_bytes_per_token": kv_bytes_per_token(s.model),
        "slots_that_fit": slots_that_fit(s),
        "trainer_flops": work.flops,
        "trainer_sends": {f"{kind} {axis}": size for (kind, axis), size in work.wires.items()},
        "seconds": {
            "trainer": dataclasses.asdict(b.trainer),
            "decode_step": dataclasses.asdict(b.decode),
            "decode_steps": b.decode_steps,
            "prefill": b.prefill,
            "push": b.push,
            "step": b.step,
        },
        "push_bytes": b.push_bytes,
        "bottleneck": b.bottleneck,
        "fits": fits,
        "verdict": lines,
        "programs": [dataclasses.asdict(p) | {"total": p.total, "sends": communication_line(p)} for p in programs],
    }
