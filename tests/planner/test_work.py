"""The plan's counts against numbers that can be worked out by hand, and its readers against small texts."""

import pathlib

import pytest

from areal_jax.config import ConfigError, load
from areal_jax.planner.bounds import bounds
from areal_jax.planner.candidates import best_samplers, outcome, remedies
from areal_jax.planner.collectives import axes_of, read_collectives
from areal_jax.planner.counts import adapter_elements, batch_of, kv_bytes_per_token, matrices
from areal_jax.planner.memory import pages_that_fit, param_count, sampler_memory, slots_that_fit, trainer_memory
from areal_jax.planner.setup import Axes, make_setup, with_meshes
from areal_jax.planner.topology import parse_topologies
from areal_jax.planner.work import forward_flops, trainer_work

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CLUSTERS = {"1.5b": "h800:16x8", "7b": "h800:24x8", "14b": "h800:32x8", "32b": "h800:48x8"}
COUNTS = {"1.5b": 1_777_088_000, "7b": 7_615_616_512, "14b": 14_770_033_664, "32b": 32_763_876_352}


def setup(size, topology="", task="math", overrides=(), **more):
    config = load([f"--config={ROOT}/configs/{task}.py:qwen2.5-{size}", *(f"--config.{key}" for key in overrides)], planned=True)[0]
    return make_setup(config, parse_topologies(topology or CLUSTERS[size])[0], **more)


@pytest.mark.parametrize("task", ["math", "code"])
@pytest.mark.parametrize(("size", "topology"), [*CLUSTERS.items(), ("32b", "h800:64x8")])
def test_the_papers_runs_fit_the_papers_clusters(size, topology, task):
    now = outcome(setup(size, topology, task))
    assert now.fits, (now.trainer_room, now.sampler_room)
    assert not remedies(now)


LORA = ("model.lora_rank=16",)


def test_adapters_are_what_is_trained_and_pushed():
    whole, adapted = setup("7b"), setup("7b", overrides=LORA)
    # Of rank 16: query, key, value, output; gate, up, down.
    adapters = 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert adapter_elements(adapted.model) == adapters and adapter_elements(whole.model) == 0
    assert param_count(adapted) == COUNTS["7b"] + 28 * adapters
    trainer, sampler = trainer_memory(adapted).staying, sampler_memory(adapted).staying
    assert trainer["parameters"] == trainer["gradients"] == 28 * 4 * 16 * (7 * 3584 // 8 + 2 * 3584 + 2 * 512 + 3 * 18944)
    assert trainer["frozen parameters"] == trainer_memory(whole).staying["parameters"]
    assert sampler["weights"] > 100 * sampler["arriving weights"]
    pushed = bounds(adapted).push_bytes
    assert 28 * adapters * 2 * 72 <= pushed <= 28 * adapters * 2 * 144
    assert pushed == sampler["arriving weights"] * 144


def test_frozen_kernels_have_no_gradient():
    whole, adapted = trainer_work(setup("7b")), trainer_work(setup("7b", overrides=LORA))
    s = setup("7b", overrides=LORA)
    b, w = batch_of(s), matrices(s.model)
    kernels = 2.0 * b.positions * (s.model.layers * w.block + w.head)
    adapters = 2.0 * b.positions * s.model.layers * w.adapters
    passes = 3.0 + 1.0 + (s.config.trainer.minibatches - 1) / s.config.trainer.minibatches  # forward, inputs' and own gradients; anew; proximal
    assert (whole.flops - adapted.flops) * s.trainer.devices == pytest.approx(kernels - passes * adapters, rel=1e-9)
    # What is gathered is the same; what is summed is the adapters' gradients.
    assert adapted.wires["all-gather", "fsdp"] >= whole.wires["all-gather", "fsdp"]
    assert ("reduce-scatter", "fsdp") not in adapted.wires and ("all-reduce", "data") not in adapted.wires
    assert adapted.wires["all-reduce", "data+fsdp"] < 0.05 * whole.wires["reduce-scatter", "fsdp"]


def test_slices_that_cannot_be_rented_are_noted():
    assert [parse_topologies(text)[0].listed for text in ("v5e:7", "v5e:8", "v5p:4x4x12", "v5p:3x3x3", "h100:4")] == [False, True, True, False, True]
    notes = " ".join(setup("1.5b", "v5e:7", overrides=("cluster.mesh.trainer=", "cluster.mesh.sampler=")).notes)
    assert "v5e:1x7 is no slice" in notes and "8x16" in notes


def test_more_hosts_are_a_plan_only():
    assert any("one host" in note for note in setup("7b").notes)
    assert not any("one host" in note for note in setup("1.5b", "h800:8", overrides=("cluster.mesh.trainer=",)).notes)


@pytest.mark.parametrize("size", CLUSTERS)
def test_parameters(size):
    s = setup(size)
    assert param_count(s) == COUNTS[size]
    # The input embedding is no matrix product; biases and norms are the small rest.
    products = s.model.layers * matrices(s.model).block + matrices(s.model).head
    assert 0 < COUNTS[size] - products - s.model.vocab_size * s.model.hidden_size < 1e-3 * COUNTS[size]


def test_cache_of_a_token():
    assert kv_bytes_per_token(setup("7b").model) == 2 * 28 * 4 * 128 * 2 == 57344
    assert kv_bytes_per_token(setup("32b").model) == 2 * 64 * 8 * 128 * 2 == 262144


def test_training_flops_are_six_a_parameter_and_token():
    s = setup("7b")
    products = s.model.layers * matrices(s.model).block + matrices(s.model).head
    assert 3 * forward_flops(s.model, 1000, 0.0) == pytest.approx(6 * products * 1000)
    # Attention: scores and mixing, two operations each, over half of 8192 positions on average.
    attention = forward_flops(s.model, 1000, 4096) - forward_flops(s.model, 1000, 0.0)
    assert attention == pytest.approx(1000 * 28 * 2 * 2 * 28 * 128 * 4096)


def test_memory_of_parameters_is_their_shards():
    s = setup("7b")
    assert (s.trainer, s.sampler) == (Axes(data=6, fsdp=8), Axes(data=72, tensor=2))
    trainer, sampler = trainer_memory(s).staying, sampler_memory(s).staying
    # Norms and key/value biases are not divided over fsdp; they are less than a thousandth.
    assert trainer["parameters"] == pytest.approx(COUNTS["7b"] * 4 / 8, rel=1e-3)
    assert trainer["optimizer"] == pytest.approx(2 * trainer["parameters"], abs=64)
    assert trainer["gradients"] == trainer["parameters"]
    assert sampler["weights"] == pytest.approx(COUNTS["7b"] * 2 / 2, rel=1e-3)
    # Pages of 64 tokens, the longest sequence's 448 for 36 of them and the scrap page, whatever the slots.
    assert sampler["KV cache"] == sampler["evaluation's KV cache"] == (36 * 448 + 1) * 64 * 57344 // 2


def test_earlier_versions_lie_beside_the_parameters():
    plain, exact = (trainer_memory(setup("7b", overrides=("rollout.max_staleness=3", f"rollout.exact_logprobs={on}"))).staying for on in ("no", "yes"))
    assert exact["parameters of 3 earlier versions"] == 3 * plain["parameters"]
    assert exact["batch"] * 10 == plain["batch"] * 11
    assert exact.keys() - plain.keys() == {"parameters of 3 earlier versions"}


@pytest.mark.parametrize("pages", [0, 9000])
def test_slots_that_fit_fit(pages):
    s = setup("7b", overrides=(f"rollout.kv_pages={pages}",))
    fitting, chip = slots_that_fit(s), s.topology.chip
    for slots, fits in ((fitting, True), (fitting + 1, False)):
        assert (sampler_memory(with_meshes(s, slots=slots * s.sampler.data)).room(chip) >= 0) == fits


def test_pages_that_fit_fit():
    s = setup("7b")
    fitting, chip = pages_that_fit(s), s.topology.chip
    for pages, fits in ((fitting, True), (fitting + 1, False)):
        assert (sampler_memory(with_meshes(s, pages=pages)).room(chip) >= 0) == fits


def test_what_a_replicas_pages_hold():
    s = setup("7b", overrides=("rollout.kv_pages=7842", "rollout.slots=7200"), prompt=1000, response=7000)
    # 8000 tokens are 125 pages, 7841 pages without the scrap page hold 62 such sequences, fewer than there are slots.
    assert (s.slots, s.replica, s.mean_pages, s.concurrent) == (100, Axes(tensor=2), 125, 62)
    assert with_meshes(s, slots=72 * 10).concurrent == 10
    assert with_meshes(s, pages=0).pages == 100 * 448 + 1
    assert bounds(s).decode_steps == pytest.approx(8192 * 7000 / (62 * 72))


def test_a_decode_step_reads_the_parameters_and_the_cache_in_use():
    s = setup("7b", prompt=1000, response=7000)
    products = s.model.layers * matrices(s.model).block + matrices(s.model).head
    logits = 3 * s.concurrent * s.model.vocab_size * 4 / 2
    assert s.concurrent == s.slots == 108
    assert bounds(s).decode_work.memory == pytest.approx(products * 2 / 2 + 108 * (1000 + 3500) * 57344 / 2 + logits)
    assert bounds(s).decode_work.flops == pytest.approx(108 * (2 * products + 28 * 2 * 2 * 28 * 128 * 4500) / 2)


def test_prompts_are_prefilled_once_a_group_and_responses_rebuilt():
    s = setup("7b", prompt=1000, response=6000)
    blocks = 2 * s.model.layers * matrices(s.model).block
    attention = 28 * 2 * 2 * 28 * 128
    b = bounds(s)
    assert b.prefill_work.flops == pytest.approx(512 / 72 * 1000 * (blocks + attention * 500) / 2)
    again = 108 / 16 * 1000 * (blocks + attention * 500) + 108 * 3000 * (blocks + attention * 3000)
    assert b.rebuild_work.flops == pytest.approx(again / 2)
    assert bounds(setup("7b", overrides=("rollout.kv_on_update=keep",))).rebuild.bound == 0


def test_too_few_pages_are_refused():
    with pytest.raises(ConfigError, match=r"'rollout.kv_pages' must be at least 450 .* got 449"):
        setup("7b", overrides=("rollout.kv_pages=449",))


def test_pages_are_a_remedy():
    now = outcome(setup("7b", overrides=("rollout.kv_pages=0",)))
    assert not now.fits
    (slots,) = [text for text in remedies(now) if text.startswith("rollout.slots=")]
    (pages,) = [text for text in remedies(now) if text.startswith("rollout.kv_pages=")]
    for text in (slots, pages):
        key, value = text.split()[0].split("=")
        kept = "rollout.kv_pages=0" if "slots" in key else "rollout.page_size=64"
        assert outcome(setup("7b", overrides=(kept, f"{key}={value}"))).fits
    assert "without preemption 108 sequences of the mean 7168 tokens at once" in pages


def test_meshes_of_the_sampler_fit_and_divide_the_cache():
    found = [o.setup for o in best_samplers(setup("1.5b"))]
    assert {s.sampler.tensor for s in found} == {1, 2}, "two heads of keys and values"
    assert all(o.sampler_room >= 0 and o.setup.concurrent == o.setup.slots for o in best_samplers(setup("7b")))


def test_batch_and_push():
    s = setup("1.5b", prompt=1, response=8192)
    b = batch_of(s)
    assert (b.sequences, b.tokens) == (8192, 8192 * 8192)
    # Four sequences of 8192 positions fill a row; 2048 a minibatch are 512 rows, 16 micro-batches of 32 rows.
    assert (b.micro_batches, b.positions) == (64, b.tokens)
    pushed = bounds(s)
    assert pushed.push_bytes == pytest.approx(96 * 2 * COUNTS["1.5b"], rel=1e-3)
    assert pushed.push == pytest.approx(pushed.push_bytes / 32 / 50e9)
    assert pushed.decode_steps == pytest.approx(8192 * 8192 / s.config.rollout.slots)


def test_topologies():
    shapes = {
        "h800:48x8": (384, 8),
        "h100:64": (64, 8),
        "h100:4": (4, 4),
        "v5e:256": (256, 256),
        "v6e:16x16": (256, 256),
        "v5p:4x4x8": (128, 128),
        "v5p:64": (64, 64),
        "cpu:8": (8, 8),
    }
    for text, (devices, domain) in shapes.items():
        (topology,) = parse_topologies(text)
        assert (topology.devices, topology.domain) == (devices, domain), text
    assert [t.devices for t in parse_topologies("h100:8..512")] == [8, 16, 32, 64, 128, 256, 512]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("h900:8", ["unknown chip 'h900'", "did you mean 'h800'"]),
        ("h100", ["how many devices"]),
        ("h100:", ["h800:48x8"]),
        ("h100:12", ["hosts have 8", "12"]),
        ("h100:8x16", ["at most 8 devices a host"]),
        ("v5e:512", ["at most 256 chips", "512"]),
        ("v5p:16x16", ["3 sides"]),
        ("h100:64..8", ["range rises"]),
        ("cpu:1", ["at least 2 devices"]),
    ],
)
def test_topologies_that_are_refused(text, parts):
    with pytest.raises(ConfigError) as refused:
        parse_topologies(text)
    assert all(part in str(refused.value) for part in parts), refused.value


TEXT = """HloModule m

%body.1 (p: (f32[4])) -> (f32[4]) {
  %g = bf16[64,8]{1,0} all-gather(bf16[16,8]{1,0} %x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
}

%cond.1 (p: (f32[4])) -> pred[] {
  ROOT %c = pred[] constant(true)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %w = (f32[4]) while((f32[4]) %t), condition=%cond.1, body=%body.1, backend_config={"known_trip_count":{"n":"5"}}
  %r = (f32[10]{0}, f32[2,3]{1,0}) all-reduce(f32[10]{0} %a, f32[2,3]{1,0} %b), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  ROOT %s = f32[3]{0} reduce-scatter(f32[6]{0} %d), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}, to_apply=%add
}
"""


MESHES = {
    "mesh['axis_0'=1,'axis_1'=2,'axis_2'=1,'axis_3'=2], device_ids=([2,2]T(1,0)) {'axis_1'}": (0, 1),
    "mesh['axis_0'=1,'axis_1'=1,'axis_2'=2,'axis_3'=2], device_ids=([2,2]T(1,0)) {'axis_3'}": (0, 2),
    "mesh['a'=2,'b'=4] {'a','b'}": (0, 1, 2, 3, 4, 5, 6, 7),
    "mesh['a'=2,'b'=4] {'b':(2)2}": (0, 1),
    "mesh['a'=2,'b'=4] {'b':(1)2}": (0, 2),
}


@pytest.mark.parametrize("notation", MESHES)
def test_groups_of_the_mesh_notation(notation):
    line = f"  ROOT %g = f32[64]{{0}} all-gather(f32[16]{{0}} %x), channel_id=3, replica_groups={notation}, dimensions={{0}}, use_global_device_ids=true"
    (found,) = read_collectives("ENTRY %main (x: f32[16]) -> f32[64] {\n" + line + "\n}\n").collectives
    assert found.group == MESHES[notation]
    assert found.sent == 64 * 4 * (len(found.group) - 1) / len(found.group)


def test_collectives_count_with_their_loops():
    found = {c.kind: c for c in read_collectives(TEXT).collectives}
    assert (found["all-gather"].count, found["all-gather"].sent, found["all-gather"].group) == (5, 5 * 64 * 8 * 2 * 3 / 4, (0, 1, 2, 3))
    assert (found["all-reduce"].count, found["all-reduce"].sent, found["all-reduce"].group) == (1, 2 * (10 + 6) * 4 / 2, (0, 4))
    assert (found["reduce-scatter"].sent, found["reduce-scatter"].group) == (3 * 4, (0, 1))
    assert read_collectives(TEXT).open_loops == 0
    assert read_collectives(TEXT.replace(', backend_config={"known_trip_count":{"n":"5"}}', "")).open_loops == 1
    names, sizes = ("data", "fsdp", "context", "tensor"), (2, 2, 1, 2)
    assert [axes_of(group, names, sizes) for group in ((0, 1, 2, 3), (0, 4), (0, 1))] == ["fsdp+tensor", "data", "tensor"]
