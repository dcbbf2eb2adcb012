#!/usr/bin/env bash
# Checks and measures this project on a machine with a GPU, in under 8 minutes, and prints one table at the end.
#
#   launch/gpu_check.sh [DIRECTORY]      results as JSON and logs go to DIRECTORY (a new temporary one if none is named)
#
# What it does, each part in a process of its own under a time limit:
#   kernels   attention kernels against plain attention in float32: errors forward and backward, over pages, milliseconds
#   sampler   launch/benchmark.py sampler on a random policy of middle size, with its share of the roofline
#   trainer   launch/benchmark.py trainer on the same policy, with its share of the measured matmul peak
# It needs Python with JAX for the device and this project's other dependencies (pyproject.toml). It runs from this directory and installs
# nothing but what is missing, from the package index or, where there is none, from wheels in $GPU_CHECK_WHEELS.
# GPU_CHECK_TINY=1 (the default where JAX sees no accelerator) takes sizes for a CPU; GPU_CHECK_POLICY names another policy of --random.
# Exit status: 0 all parts ended and every error is within its limit, 1 otherwise, 2 something that is needed is missing.
set -uo pipefail

root="$(cd "$(dirname "$0")/.." && pwd)"
out="${1:-$(mktemp -d)}"
mkdir -p "$out"
python="${PYTHON:-python3}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
rm -f "$out"/{kernels,sampler,trainer}.json

missing() {
    "$python" - <<'PYTHON'
import importlib.util
names = {"jax": "jax", "flax": "flax", "optax": "optax", "orbax": "orbax-checkpoint", "ml_collections": "ml_collections", "absl": "absl-py",
         "numpy": "numpy", "rich": "rich", "tokenizers": "tokenizers", "jinja2": "jinja2"}
print(" ".join(package for module, package in names.items() if importlib.util.find_spec(module) is None))
PYTHON
}
lacking="$(missing)" || exit 2
if [ -n "$lacking" ]; then
    echo "missing: $lacking; trying to install them"
    if [ -n "${GPU_CHECK_WHEELS:-}" ]; then source_of=(--no-index --find-links "$GPU_CHECK_WHEELS"); else source_of=(--retries 1 --timeout 10); fi
    # shellcheck disable=SC2086  # one word a package
    timeout 60 "$python" -m pip install --quiet "${source_of[@]}" $lacking || true
    lacking="$(missing)"
    if [ -n "$lacking" ]; then
        echo "error: these packages are needed and cannot be installed here: $lacking; bring their wheels and name the directory by GPU_CHECK_WHEELS" >&2
        exit 2
    fi
fi

platform="$("$python" -c 'import jax; print(jax.default_backend())')" || exit 2
tiny="${GPU_CHECK_TINY:-$([ "$platform" = cpu ] && echo 1 || echo 0)}"
if [ "$tiny" = 1 ]; then
    attention=(--rows=1 --length=128 --heads=2 --kv-heads=1 --head-dim=16 --slots=4 --repeats=1 --interpret=yes)
    sampler=(--random="${GPU_CHECK_POLICY:-tiny}" --slots=8 --requests=16 --lengths=longtail:6:24 --prompt=8 --positions=32 --group-prompt=40 --group-samples=8
        --steps=2 --prefill-chunk=32 --page-size=8 --repeats=1 --limits=tiny --parts=load,prefill,steps,updates)
    trainer=(--random="${GPU_CHECK_POLICY:-tiny}" --sequences=8 --lengths=longtail:6:24 --prompt=8 --rows=1 --row=64 --micro-batches=2 --repeats=2 --limits=tiny)
else
    attention=()
    sampler=(--random="${GPU_CHECK_POLICY:-mid}" --slots=64 --requests=192 --lengths=longtail:128:1024 --prompt=64:256 --positions=256,1024 --prefill-chunk=2048
        --steps=16 --repeats=2 --seconds=10)
    trainer=(--random="${GPU_CHECK_POLICY:-mid}" --sequences=32 --lengths=fixed:896 --prompt=128 --layouts=algorithm1 --rows=4 --row=4096 --remat=dots --repeats=4)
fi

if [ "$platform" = gpu ] && ! "$python" -c 'import sys, importlib.util; sys.exit(importlib.util.find_spec("tokamax") is None)'; then
    echo "tokamax (extra 'gpu') is not here: its comparison is skipped, and the trainer attends blockwise"
    trainer+=(--attention=blockwise)
fi

status=0
part() { # NAME SECONDS ARGUMENTS…
    local name="$1" limit="$2" began=$SECONDS code=0
    shift 2
    echo "== $name (at most $limit s)"
    timeout --kill-after=5 "$limit" "$python" "$root/launch/benchmark.py" "$name" "$@" --out="$out/$name.json" >"$out/$name.log" 2>&1 || code=$?
    echo "   exit status $code after $((SECONDS - began)) s"
    if [ "$code" != 0 ]; then
        status=1
        tail -n 12 "$out/$name.log"
    fi
}
part kernels 70 "${attention[@]}"
part sampler 210 "${sampler[@]}"
part trainer 90 "${trainer[@]}"

"$python" "$root/launch/benchmark.py" table "$out/kernels.json" "$out/sampler.json" "$out/trainer.json" || status=1
echo "results and logs are in $out"
exit "$status"
