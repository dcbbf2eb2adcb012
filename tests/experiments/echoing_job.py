"""What the grid's tests run in place of a job: makes its result, fails, or sleeps, as it is told."""

import json
import pathlib
import sys
import time

told = json.load(sys.stdin)
print(f"on core {told['core']}", flush=True)
if told.get("fails"):
    raise SystemExit("failed on purpose")
if told.get("sleeps"):
    time.sleep(told["sleeps"])
order = pathlib.Path(told["order"])
with open(order, "a") as stream:
    stream.write(f"{told['name']}\n")
pathlib.Path(told["result"]).write_text("done")
