"""Admission against the oracle computed by AReaL's own gate, and against equation 3 written out."""

from __future__ import annotations

import json
import pathlib

import pytest

from areal_jax.controller import StalenessGate


def test_oracle(oracles: pathlib.Path):
    checked = 0
    for case in json.loads((oracles / "staleness_gate.json").read_text())["cases"]:
        p, want = case["params"], case["outputs"]
        gate = StalenessGate(p["batch_size"], p["max_staleness"], p["max_concurrent"])
        version, accepted, running, rejected = p["initial_version"], 0, 0, 0

        def capacity() -> int:
            return gate.capacity(version=version, submitted=accepted + running, running=running)  # noqa: B023

        assert capacity() == want["initial_capacity"] or any(e["event"] == "recover" for e in case["inputs"]["events"][:1]), case["name"]
        for index, event in enumerate(case["inputs"]["events"]):
            kind, count, admitted = event["event"], event.get("count", 0), 0
            if kind == "submit":
                while admitted < count and capacity() > 0:
                    admitted, running = admitted + 1, running + 1
            elif kind == "accept":
                accepted, running = accepted + count, running - count
            elif kind == "reject":
                rejected, running = rejected + count, running - count
            elif kind == "version":
                version += count
            else:
                version, accepted = event["version"], event["version"] * p["batch_size"]
            state = {"admitted": admitted, "capacity": capacity(), "running": running, "accepted": accepted, "rejected": rejected, "version": version}
            assert state == {key: want[key][index] for key in state}, f"{case['name']}, event {index}"
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("eta", [0, 1, 4])
@pytest.mark.parametrize("groups_per_step", [1, 3])
def test_capacity_is_how_often_equation_3_admits(groups_per_step: int, eta: int):
    gate = StalenessGate(groups_per_step, eta)
    for version in range(4):
        for submitted in range(30):
            count = 0
            while (submitted + count) // groups_per_step <= version + eta:
                count += 1
            assert gate.capacity(version=version, submitted=submitted, running=0) == count


def test_nothing_is_admitted_that_no_step_trains():
    gate = StalenessGate(groups_per_step=4, max_staleness=8, total_steps=3)
    assert gate.capacity(version=0, submitted=0, running=0) == 12
    assert gate.capacity(version=2, submitted=11, running=0) == 1
    assert gate.capacity(version=3, submitted=12, running=0) == 0


def test_unbounded_staleness_still_bounds_what_runs():
    assert StalenessGate(4, None).capacity(version=0, submitted=10**6, running=1) == 3
    assert StalenessGate(4, None, max_concurrent_groups=50).capacity(version=0, submitted=10**6, running=1) == 49
