"""A plan for people (rich tables, 120 columns) and for programs (one JSON object)."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_jax.config_devices import MESH_AXES
from areal_jax.planner.bounds import Times, link_seconds
from areal_jax.planner.candidates import Outcome, remedies
from areal_jax.planner.collectives import axes_of
from areal_jax.planner.compiled import SAMPLED_LAYERS, Program
from areal_jax.planner.counts import kv_bytes_per_token
from areal_jax.planner.hardware import GIB, GPUS, USABLE
from areal_jax.planner.memory import (
    Memory,
    accumulate_bytes,
    apply_bytes,
    decode_working,
    page_bytes,
    pages_that_fit,
    param_count,
    prefill_working,
    slots_that_fit,
)
from areal_jax.planner.setup import Axes
from areal_jax.planner.wires import Wires
from areal_jax.planner.work import Work

WIDTH = 120


def gib(size: float) -> str:
    """Bytes for people."""
    if size >= 2**40:
        return f"{size / 2**40:,.1f} TiB"
    return f"{size / GIB:.1f} GiB" if size >= 10 * GIB else f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def seconds(time: float) -> str:
    """A duration for people."""
    return f"{time:,.0f} s" if time >= 100 else f"{time:.1f} s" if time >= 1 else f"{time * 1e3:.2f} ms"


def flop(count: float) -> str:
    """Operations for people."""
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if count >= size:
            return f"{count / size:.3g} {unit}FLOP"
    return f"{count / 1e6:.3g} MFLOP"


def verdict(now: Outcome) -> tuple[bool, list[str]]:
    """(whether it fits, sentences)."""
    lines = []
    for role, room, memory in (("trainer", now.trainer_room, now.trainer), ("sampler", now.sampler_room, now.sampler)):
        state = f"fits, {gib(room)} a device to spare" if room >= 0 else f"does not fit: {gib(-room)} a device too much"
        lines.append(f"{role}: {state} ({gib(memory.total)} of {gib(now.setup.topology.chip.usable)})")
    if now.setup.topology.chip.name in GPUS:
        lines.append(f"JAX takes 75 % of a GPU's memory unless told otherwise: run with XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE:g}")
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
        f"sampler {s.sampler.devices} ({s.sampler}), {s.slots} slots a replica"
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
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
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
        f"KV cache: {kv_bytes_per_token(s.model):,} bytes a token, {gib(page_bytes(s, s.replica))} a page of {s.config.rollout.page_size} and device; "
        f"a replica's {s.pages} pages ({max(0, pages_that_fit(s))} fit) hold {(s.pages - 1) // s.sequence_pages} sequences of {s.longest} tokens, "
        f"{(s.pages - 1) // s.mean_pages} of the mean {s.workload.sequence}"
    )


def _parts(memory: Memory) -> list[tuple[str, str]]:
    parts = [(name, gib(size)) for name, size in memory.staying.items()]
    parts += [(f"{name} (at work)", gib(size)) for name, size in memory.working.items()]
    return [*parts, ("total", gib(memory.total))]


def _print_times(console: Console, now: Outcome) -> None:
    b = now.bounds
    title = "a step of one device: its work, and the least time of each part at the hardware's peaks (a bound, not a forecast)"
    table = _table(title, "part", "computes", "reads, writes", "sends", "compute", "memory", "links", "bound", "set by")

    def row(name: str, work: Work, times: Times, factor: float = 1.0) -> None:
        amounts = (flop(work.flops * factor), gib(work.memory * factor), gib(sum(work.wires.values()) * factor))
        table.add_row(name, *amounts, *(seconds(x * factor) for x in (times.compute, times.memory, times.links, times.bound)), times.limit)

    row("trainer", b.trainer_work, b.trainer)
    row(f"{b.decode_steps:,.0f} decode steps", b.decode_work, b.decode, b.decode_steps)
    row("prefill of prompts", b.prefill_work, b.prefill)
    row("rebuild of caches", b.rebuild_work, b.rebuild)
    table.add_row("push, all devices", "", "", gib(b.push_bytes), "", "", seconds(b.push), seconds(b.push), "network")
    console.print(table)
    trainer, sampler = b.trainer_work.flops * now.setup.trainer.devices, sampler_flops(now) * now.setup.sampler.devices
    console.print(f"a step computes, all devices together: trainer {flop(trainer)}, sampler {flop(sampler)}")
    table = _table("collectives of a step: what a device sends", "part", "collective", "axes", "bytes", "least time")
    for part, wires, axes in parts_that_send(now):
        times = link_seconds(now.setup, axes, wires)
        for (kind, names), sent in sorted(wires.items(), key=lambda item: -times[item[0]]):
            table.add_row(part, kind, names, gib(sent), seconds(times[kind, names]))
    console.print(table if table.row_count else "no device sends anything to one of its own role")


def sampler_flops(now: Outcome) -> float:
    """Of a sampler's device in a step."""
    b = now.bounds
    return b.decode_work.flops * b.decode_steps + b.prefill_work.flops + b.rebuild_work.flops


def parts_that_send(now: Outcome) -> list[tuple[str, Wires, Axes]]:
    """(part of a step, bytes a device sends in it by collective and axes, mesh)."""
    b, s = now.bounds, now.setup
    decoding = {key: sent * b.decode_steps for key, sent in b.decode_work.wires.items()}
    return [
        ("trainer", b.trainer_work.wires, s.trainer),
        ("decoding", decoding, s.replica),
        ("prefill", b.prefill_work.wires, s.replica),
        ("rebuild", b.rebuild_work.wires, s.replica),
    ]


def _print_meshes(console: Console, now: Outcome, others: Sequence[Outcome], samplers: Sequence[Outcome]) -> None:
    table = _table(
        "the trainer's meshes (analytic; the configured one first)",
        *("mesh", "parameters", "optimizer", "gradients", "activations", "total", "room", "bound", "set by"),
    )
    for o in (now, *(other for other in others if other.setup.trainer != now.setup.trainer)):
        held = o.trainer.staying
        parts = (held["parameters"] + held.get("frozen parameters", 0), held["optimizer"], held["gradients"], sum(o.trainer.working.values()))
        numbers = (*(gib(size) for size in (*parts, o.trainer.total)), _room(o.trainer_room), seconds(o.bounds.trainer.bound))
        table.add_row(str(o.setup.trainer), *numbers, o.bounds.trainer.limit)
    console.print(table)
    table = _table(
        "the sampler's meshes (analytic, slots and pages of a replica; the configured one first, then each with what fits at the mean length)",
        *("mesh", "slots", "pages", "weights", "KV", "at work", "total", "room", "bound", "set by"),
    )
    for o in (now, *samplers):
        held = o.sampler.staying
        parts = (held["weights"] + held["arriving weights"], held["KV cache"] + held["evaluation's KV cache"], sum(o.sampler.working.values()))
        numbers = (*(gib(size) for size in (*parts, o.sampler.total)), _room(o.sampler_room), seconds(o.bounds.sampler))
        table.add_row(str(o.setup.sampler), str(o.setup.slots), str(o.setup.pages), *numbers, o.bounds.decode.limit)
    console.print(table)


def _room(room: int) -> str:
    return gib(room) if room >= 0 else f"-{gib(-room)}"


def planned_bytes(now: Outcome, program: Program) -> int | None:
    """What the plan's own formulas say of a program under the compiler that compiled it; None where they say nothing.

    Of a prefill it is more than the compiler's figure: the head and most of the last block lie there too, but the program does not take them.
    """
    s, staying = now.setup, now.sampler.staying
    if program.name == "accumulate":
        return accumulate_bytes(s, widened="CPU" in program.target)
    if program.name == "apply":
        return apply_bytes(now.trainer)
    working = {"decode": decode_working, "prefill": prefill_working}.get(program.name)
    return staying["weights"] + staying["KV cache"] + working(s, widened="CPU" in program.target) if working else None


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
    if any(p.layers for p in programs):
        names, counts = ", ".join(p.name for p in programs if p.layers), " and ".join(str(n) for n in SAMPLED_LAYERS)
        console.print(f"{names}: compiled with {counts} blocks and extrapolated to {now.setup.model.layers}, as their programs are unrolled")
    if now.setup.config.model.attention == "kernel" and any("CPU" in p.target for p in programs):
        console.print("compiled with model.attention=blockwise, as the accelerator's kernel is not for the CPU; its memory is linear in the length as well")
    for target, axes in dict.fromkeys((p.target, str(p.axes)) for p in programs):
        widened = (
            "; its products of bfloat16 are float32, so its bytes are more than the run's, the sampler's by copies of its cache"
            if "CPU" in target and now.setup.model.dtype == "bfloat16"
            else ""
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
    table = _table(
        "the fastest division of each size that fits (analytic)", "devices", "trainer", "sampler", "slots", "pages", "fits", "step bound", "by", "tokens/s"
    )
    for o in found:
        s, b = o.setup, o.bounds
        lacking = "yes" if o.fits else f"no: -{gib(max(-o.trainer_room, -o.sampler_room))}"
        rate = f"{b.batch.tokens / b.step:,.0f}"
        table.add_row(s.topology.name, str(s.trainer), str(s.sampler), str(s.config.rollout.slots), str(s.pages), lacking, seconds(b.step), b.bottleneck, rate)
    console.print(table)


def as_json(now: Outcome, programs: Sequence[Program] = ()) -> dict[str, Any]:
    """The plan as plain values: bytes, seconds, FLOPs."""
    s, b = now.setup, now.bounds
    fits, lines = verdict(now)
    return {
        "topology": s.topology.name,
        "parameters": param_count(s),
        "trainer": {"mesh": dataclasses.asdict(s.trainer), "bytes": now.trainer.staying | now.trainer.working, "total": now.trainer.total},
        "sampler": {
            "mesh": dataclasses.asdict(s.sampler),
            "bytes": now.sampler.staying | now.sampler.working,
            "total": now.sampler.total,
            "slots": s.slots,
            "pages": s.pages,
        },
        "usable_bytes": s.topology.chip.usable,
        "kv_bytes_per_token": kv_bytes_per_token(s.model),
        "slots_that_fit": slots_that_fit(s),
        "pages_that_fit": max(0, pages_that_fit(s)),
        "trainer_flops": b.trainer_work.flops,
        "sampler_flops": sampler_flops(now),
        "sends": {part: {f"{kind} {axis}": size for (kind, axis), size in wires.items()} for part, wires, _ in parts_that_send(now)},
        "seconds": {
            "trainer": dataclasses.asdict(b.trainer),
            "decode_step": dataclasses.asdict(b.decode),
            "decode_steps": b.decode_steps,
            "prefill": dataclasses.asdict(b.prefill),
            "rebuild": dataclasses.asdict(b.rebuild),
            "push": b.push,
            "step": b.step,
        },
        "push_bytes": b.push_bytes,
        "bottleneck": b.bottleneck,
        "fits": fits,
        "verdict": lines,
        "programs": [dataclasses.asdict(p) | {"total": p.total, "sends": communication_line(p)} for p in programs],
    }
