"""Serves an exported policy: OpenAI's HTTP protocol and JetStream's gRPC protocol, over the run's own sampler.

  python launch/serve.py --config=configs/math.py --config.model.path=runs/math/policy
  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' -d '{"model": "policy", "prompt": "Compute 12 + 7", "max_tokens": 60}'

It needs the extra packages of `pip install -e '.[serve]'`. The keys are those of the section 'serve' in areal_jax/config_fields.py, and 'rollout.slots',
'rollout.steps_per_dispatch', 'model.dtype' and 'cluster' as in a run. Ctrl-C or SIGTERM: running requests are finished for at most 'serve.drain_s', new
ones are refused; a second one ends at once.

Exit status: 0 stopped with every request finished, 1 requests were cut off or the sampler failed, 2 the configuration is refused.
"""

import sys

from areal_jax.config import ConfigError, load, run_main


def main(argv: list[str]) -> int:
    config, _, _ = load(argv, planned=True)  # like a plan, it needs neither rows nor a verifier
    if not config.model.path:
        raise ConfigError("'model.path' must name the policy to serve, as in --config.model.path=runs/math/policy")

    from areal_jax.assembly import load_served, make_policy, make_service, start_devices
    from areal_jax.cluster.signals import StopSignal
    from areal_jax.serving.server import Server, require_packages

    require_packages()
    with StopSignal(promise="finishing the running requests, refusing new ones") as stop:
        tokenizer, limits = load_served(config)
        meshes = start_devices(config)
        model, params = make_policy(config, tokenizer, meshes.sampler, config.model.sampler_dtype)
        print(f"compiling for {config.rollout.slots} slots of at most {limits.max_length} tokens", flush=True)
        service = make_service(config, tokenizer, model, params, meshes, limits)
        s = config.serve
        with Server(service, tokenizer, limits, model.eos_ids, host=s.host, port=s.port, grpc_port=s.grpc_port) as server:
            also = f" and grpc at {s.host}:{server.grpc_port}" if server.grpc_port else ""
            print(f"serving '{limits.model}' at http://{s.host}:{server.port}/v1{also}", flush=True)
            while not stop.wait(0.2) and server.failure is None:
                pass
            finished = server.drain(s.drain_s)
            if server.failure is not None:
                print(f"error: the sampler has failed: {server.failure!r}", file=sys.stderr)
    print(f"served {service.totals.requests} requests, {service.totals.generated_tokens} tokens" + ("" if finished else "; some were cut off"), flush=True)
    return 0 if finished else 1


if __name__ == "__main__":
    run_main(main)
