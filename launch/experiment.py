"""Studies made of many runs: one command a question.

  python launch/experiment.py staleness --workers=2                                      # the whole grid: some hours on two cores
  python launch/experiment.py staleness --etas=0,4,16 --seeds=2 --out=runs/short         # a smaller one
  python launch/experiment.py staleness --learning-rate=1e-3 --minibatches=4 --warmups=runs/staleness/warmups --out=runs/harsh
  python launch/experiment.py report --out=runs/staleness                                # what is there so far

staleness   held-out accuracy by loss and bound η: every cell is a training run of a small policy on one core, in virtual time, so that staleness does
            not depend on the machine. The same command goes on where it was stopped; --jobs=N runs the next N runs only.
report      the table, the plots and the verdicts of a directory

Flags and their defaults are DEFAULTS of areal_jax/experiments/staleness.py; any configuration key that is the same for all cells is set by
--config.section.key=value.
"""

import importlib

from areal_jax.config import ConfigError, run_main

COMMANDS = {"staleness": "areal_jax.experiments.staleness", "report": "areal_jax.experiments.report"}


def main(argv: list[str]) -> int:
    if argv in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if not argv or argv[0] not in COMMANDS:
        raise ConfigError(f"name a study: {', '.join(COMMANDS)}; got '{argv[0] if argv else ''}'; --help says more")
    return importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])


if __name__ == "__main__":
    run_main(main)
