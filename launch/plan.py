"""Says whether a run fits a cluster that is not here, and what bounds it, before anything is bought.

  python launch/plan.py --config=configs/math.py:qwen2.5-1.5b --topology=h800:16x8
  python launch/plan.py --config=configs/code.py:qwen2.5-32b --topology=h800:48x8 --response=9000
  python launch/plan.py --config=configs/math.py:qwen2.5-7b --topology=h100:8..512
  python launch/plan.py --config=configs/math.py:qwen2.5-7b --topology=v6e:16x16 --json=plan.json
  python launch/plan.py --config=configs/math.py --topology=cpu:8

Neither checkpoint nor problems have to be here. Memory, work and least times come from the architecture and the hardware's peaks; for one topology
the run's own programs are also compiled for its devices (``--compile=no`` leaves that out; ``--compile=libtpu`` takes the TPU's own compiler
instead). Mean lengths of prompts and responses are assumed to be a quarter of their limits unless ``--prompt`` and ``--response`` say so.

Exit status: 0 it fits, 1 it does not (of a range: no size does), 2 the question is refused.
"""

import json
import os
import pathlib

from areal_jax.config import ConfigError, load, run_main


def main(argv: list[str]) -> int:
    config, _, flags = load(argv, flags=("topology", "prompt", "response", "compile", "json"), planned=True)
    from areal_jax.planner.topology import parse_topologies

    if "topology" not in flags:
        raise ConfigError("'--topology' must name the machines, as in --topology=h800:48x8")
    topologies = parse_topologies(flags["topology"])
    compiling = flags.get("compile", "yes" if len(topologies) == 1 else "no")
    if compiling not in ("yes", "no", "libtpu"):
        raise ConfigError(f"'--compile' must be yes, no or libtpu; got '{compiling}'")
    if compiling != "no" and len(topologies) > 1:
        raise ConfigError(f"'--compile={compiling}' is for one topology, and '{flags['topology']}' is {len(topologies)}; name one, or leave it out")
    file = pathlib.Path(flags["json"]) if "json" in flags else None
    if file and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        raise ConfigError(f"'--json' must name a file that can be written; '{file}' cannot; make its directory")
    lengths = {}
    for name in ("prompt", "response"):
        if name in flags and not (flags[name].isdigit() and int(flags[name])):
            raise ConfigError(f"'--{name}' must be a whole number of tokens from 1; got '{flags[name]}'")
        lengths[name] = int(flags[name]) if name in flags else None

    from rich.console import Console

    from areal_jax.planner.candidates import best, best_samplers, best_trainers, outcome
    from areal_jax.planner.compiled import compile_sampler, compile_trainer, virtual_devices
    from areal_jax.planner.report import WIDTH, as_json, print_plan, print_range
    from areal_jax.planner.setup import make_setup

    virtual_devices(max(t.devices for t in topologies) if compiling == "yes" else 1)
    libtpu = compiling == "libtpu"
    console = Console(width=WIDTH, highlight=False)
    plans = []
    if len(topologies) > 1:
        found = [best(make_setup(config, topology, **lengths, free=True)) for topology in topologies]
        print_range(console, found)
        plans = [as_json(one) for one in found]
    else:
        now = outcome(make_setup(config, topologies[0], **lengths))
        programs = [*compile_trainer(now.setup, libtpu=libtpu), *compile_sampler(now.setup, libtpu=libtpu)] if compiling != "no" else []
        print_plan(console, now, best_trainers(now.setup, 4), best_samplers(now.setup), programs)
        plans = [as_json(now, programs)]
    if file:
        file.write_text(json.dumps(plans if len(plans) > 1 else plans[0], indent=2) + "\n")
    return 0 if any(plan["fits"] for plan in plans) else 1


if __name__ == "__main__":
    run_main(main)
