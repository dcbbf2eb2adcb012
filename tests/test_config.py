"""A configuration that must not run is refused before a device is touched, by rule, value and remedy."""

import json
import pathlib
import subprocess
import sys

import pytest

from areal_jax.config import ConfigError, base_config, fields, get, load, put, run_main, validate
from areal_jax.config_devices import check_devices, parse_mesh
from areal_jax.workdir import open_workdir

ROOT = pathlib.Path(__file__).resolve().parent.parent
MATH = f"--config={ROOT / 'configs' / 'math.py'}"


def loaded(*overrides):
    return load([MATH, *(f"--config.{text}" for text in overrides)])[0]


def changed(**values):
    """The defaults with 'section__key' values."""
    config = base_config()
    for name, value in values.items():
        put(config, name.replace("__", "."), value)
    return config


# What somebody types, and the key that the message must name.
TYPOS = {
    "trainer.leraning_rate": "trainer.learning_rate",
    "trainer.learning_rates": "trainer.learning_rate",
    "trainer.lerning_rate": "trainer.learning_rate",
    "trainer.step": "trainer.steps",
    "trainer.minibatch": "trainer.minibatches",
    "trainer.group_per_step": "trainer.groups_per_step",
    "trainer.micro_batch_token": "trainer.micro_batch_tokens",
    "trainer.gradclip": "trainer.grad_clip",
    "rollout.max_stalness": "rollout.max_staleness",
    "rollout.groupsize": "rollout.group_size",
    "rollout.max_new_token": "rollout.max_new_tokens",
    "rollout.temprature": "rollout.temperature",
    "rollout.interuptible": "rollout.interruptible",
    "rollout.top-k": "rollout.top_k",
    "algorithm.clip_epsilom": "algorithm.clip_epsilon",
    "algorithm.advantages": "algorithm.advantage",
    "algorithm.importance_weigth_cap": "algorithm.importance_weight_cap",
    "reward.timeout": "reward.timeout_s",
    "reward.worker": "reward.workers",
    "eval.every_step": "eval.every_steps",
    "checkpoint.kep": "checkpoint.keep",
    "cluster.host_device": "cluster.host_devices",
    "cluster.mesh.trainr": "cluster.mesh.trainer",
    "telemetry.tensorbord": "telemetry.tensorboard",
    "modle.layers": "model.layers",
    "sed": "seed",
    # the right name in the wrong section
    "trainer.group_size": "rollout.group_size",
    "rollout.learning_rate": "trainer.learning_rate",
    "learning_rate": "trainer.learning_rate",
    "trainer.clip_epsilon": "algorithm.clip_epsilon",
    "max_staleness": "rollout.max_staleness",
    "trainer.host_devices": "cluster.host_devices",
}


@pytest.mark.parametrize("typed, meant", TYPOS.items())
def test_typo_names_the_key_that_was_meant(typed, meant):
    with pytest.raises(ConfigError) as caught:
        loaded(f"{typed}=1")
    assert f"'{typed}'" in str(caught.value) and f"'{meant}'" in str(caught.value)


def test_typo_ends_the_program_with_both_names(cases, tmp_path):
    """system-044, from the command line and from a file."""
    case = next(c for c in map(json.loads, (cases / "system.jsonl").read_text().splitlines()) if c["id"] == "system-044")
    assert "leraning_rate" in case["setup"]
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from areal_jax.config import base_config\ndef get_config(variant=''):\n  c = base_config()\n  c.trainer.leraning_rate = 1e-4\n  return c\n"
    )
    program = (
        "import sys\nfrom areal_jax.config import load, run_main\nrun_main(lambda argv: print('started', load(argv)) or 0)\nassert 'jax' not in sys.modules"
    )
    for arguments in ([MATH, "--config.trainer.leraning_rate=1e-4"], [f"--config={wrong}"]):
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "started" not in done.stdout
        assert "leraning_rate" in done.stderr and "learning_rate" in done.stderr.replace("leraning_rate", "")
        assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_section_is_not_a_key():
    with pytest.raises(ConfigError, match=r"'trainer' is a section.*trainer\.steps"):
        loaded("trainer=3")


@pytest.mark.parametrize(
    "flag, near", [("--workdri=x", "--workdir"), ("--confg=x", "--config"), ("--nothing=x", "--config.section.key"), ("positional", "--name=value")]
)
def test_unknown_flags(flag, near):
    with pytest.raises(ConfigError, match=near):
        load([MATH, flag])


def test_missing_values_and_files(tmp_path):
    with pytest.raises(ConfigError, match="'--config' is missing"):
        load([])
    with pytest.raises(ConfigError, match="'--workdir' needs a value"):
        load([MATH, "--workdir"])
    with pytest.raises(ConfigError, match=r"absent\.py"):
        load(["--config=absent.py"])
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ConfigError, match="get_config"):
        load([f"--config={tmp_path / 'empty.py'}"])
    with pytest.raises(ConfigError, match="no variant 'big'"):
        load([MATH + ":big"])


def test_overrides_take_the_type_of_their_key(tmp_path):
    config, workdir, further = load(
        [
            MATH,
            "--config.trainer.learning_rate=1e-4",
            "--config.rollout.max_staleness",
            "None",
            "--config.rollout.stop=('a','b')",
            "--config.rollout.interruptible=no",
            "--config.trainer.weight_decay=0",
            f"--workdir={tmp_path}",
            "--split=test",
        ],
        flags=("split",),
    )
    assert config.trainer.learning_rate == 1e-4 and config.rollout.max_staleness is None and config.rollout.stop == ("a", "b")
    assert config.rollout.interruptible is False and config.trainer.weight_decay == 0.0 and isinstance(config.trainer.weight_decay, float)
    assert workdir == tmp_path and further == {"split": "test"}


def test_default_workdir_is_named_after_the_config():
    assert str(load([MATH])[1]).startswith("runs/math-2")


@pytest.mark.parametrize(
    "text, parts",
    [
        ("trainer.steps=ten", ("'trainer.steps'", "int", "ten")),
        ("trainer.steps=1.5", ("'trainer.steps'", "int", "1.5")),
        ("trainer.steps=True", ("'trainer.steps'", "int", "True")),
        ("trainer.steps=None", ("'trainer.steps'", "int", "None")),
        ("trainer.learning_rate=fast", ("'trainer.learning_rate'", "float", "fast")),
        ("rollout.max_staleness=4.0", ("'rollout.max_staleness'", "int or None", "4.0")),
        ("rollout.interruptible=maybe", ("'rollout.interruptible'", "true or false", "maybe")),
        (r"rollout.stop='\n'", ("'rollout.stop'", r"tuple, as in ('\n',)", r"got '\n'")),
        ("model.lora_targets=query", ("'model.lora_targets'", "tuple, as in ('query', 'value')", "got 'query'")),
        ("telemetry.trace=2", ("'telemetry.trace'", "true or false", "2")),
    ],
)
def test_wrong_type_names_key_type_and_value(text, parts):
    with pytest.raises(ConfigError) as caught:
        loaded(text)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    "text, parts",
    [
        ("trainer.steps=-1", ("at least 0", "-1")),
        ("trainer.groups_per_step=0", ("at least 1", "got 0")),
        ("trainer.learning_rate=0", ("greater than 0", "got 0")),
        ("trainer.learning_rate=1e999", ("finite", "inf")),
        ("rollout.max_staleness=-1", ("at least 0", "-1")),
        ("rollout.temperature=0", ("greater than 0", "temperature")),
        ("rollout.top_p=1.5", ("at most 1", "1.5")),
        ("algorithm.clip_epsilon=2.0", ("at most 1", "2.0")),
        ("algorithm.dual_clip=1.0", ("greater than 1", "1.0")),
        ("reward.timeout_s=0", ("greater than 0", "killed")),
        ("task.holdout_fraction=1.0", ("at most 0.9", "1.0")),
        ("checkpoint.keep=0", ("at least 1", "got 0")),
        ("algorithm.loss=decoupled_pppo", ("decoupled_ppo, ppo", "did you mean 'decoupled_ppo'")),
        ("rollout.on_overdue=wiat", ("wait, drop, keep", "did you mean 'wait'")),
        ("telemetry.live=sometimes", ("auto, on, off", "sometimes")),
    ],
)
def test_out_of_range_names_key_rule_and_value(text, parts):
    with pytest.raises(ConfigError) as caught:
        loaded(text)
    key = text.partition("=")[0]
    assert all(part in str(caught.value) for part in (f"'{key}'", *parts)), str(caught.value)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "lite_ppo"])
def test_group_of_one_has_no_baseline(name):
    """system-008: never a run whose advantages are all 0 without a word."""
    with pytest.raises(
        ConfigError, match=rf"algorithm\.advantage={name}.*'rollout\.group_size' must be at least 2; got 1; or set 'algorithm\.advantage=batch'"
    ):
        loaded(f"algorithm.advantage={name}", "rollout.group_size=1")
    loaded("algorithm.advantage=batch", "rollout.group_size=1")
    loaded(f"algorithm.advantage={name}", "rollout.group_size=2")


@pytest.mark.parametrize(
    "overrides, parts, remedy",
    [
        (["model.heads=5"], ("'model.heads'", "'model.kv_heads'", "5", "2"), ["model.heads=5", "model.kv_heads=5"]),
        (
            ["model.family=qwen3_moe", "model.experts=4", "model.experts_per_token=5"],
            ("'model.experts_per_token'", "'model.experts' = 4", "got 5"),
            ["model.family=qwen3_moe", "model.experts=5", "model.experts_per_token=5"],
        ),
        (["model.lora_rank=4"], ("'model.lora_rank' = 4", "'model.path' is empty"), ["model.lora_rank=0"]),
        (["model.lora_targets=('query','gates')"], ("'model.lora_targets'", "gate", "got query, gates"), ["model.lora_targets=('query','gate')"]),
        (["model.lora_targets=()"], ("'model.lora_targets'", "got none"), ["model.lora_targets=('up',)"]),
        (["model.head_dim=15"], ("'model.head_dim'", "even", "15"), ["model.head_dim=16"]),
        (["trainer.groups_per_step=5"], ("'trainer.minibatches'", "5 and 2"), ["trainer.groups_per_step=5", "trainer.minibatches=1"]),
        (["rollout.prefill_chunk=100"], ("'rollout.prefill_chunk'", "multiple of 64", "take 128"), ["rollout.prefill_chunk=128"]),
        (["rollout.stop=(1,)"], ("'rollout.stop'", "(1,)"), [r"rollout.stop=('\n',)"]),
        (["rollout.stop=('',)"], ("'rollout.stop'", "('',)"), ["rollout.stop=()"]),
        (["rollout.stop=(';',';')"], ("'rollout.stop'", "different"), ["rollout.stop=(';',)"]),
        (["trainer.micro_batch_tokens=100"], ("'trainer.micro_batch_tokens'", "112", "100"), ["trainer.micro_batch_tokens=192"]),
        (
            ["task.max_prompt_tokens=100", "trainer.micro_batch_tokens=192"],
            ("'trainer.micro_batch_tokens'", "212", "192"),
            ["task.max_prompt_tokens=100", "trainer.micro_batch_tokens=212"],
        ),
        (
            ["rollout.max_staleness=0", "rollout.max_concurrent_groups=8"],
            ("'rollout.max_concurrent_groups'", "32", "8"),
            ["rollout.max_staleness=0", "rollout.max_concurrent_groups=32"],
        ),
        (
            ["algorithm.loss=ppo", "rollout.max_staleness=0", "algorithm.importance_weight_cap=5.0"],
            ("'algorithm.importance_weight_cap'", "5.0", "decoupled_ppo"),
            ["algorithm.loss=ppo", "rollout.max_staleness=0"],
        ),
        (["rollout.max_staleness=None", "rollout.on_overdue=drop"], ("'rollout.on_overdue=drop'", "bound"), ["rollout.max_staleness=None"]),
        *(
            (["rollout.exact_logprobs=yes", f"rollout.{key}={value}"], (f"'rollout.{key}'", rule, f"got {value}", "rollout.exact_logprobs=False"), remedy)
            for key, value, rule, remedy in (
                ("max_staleness", "None", "a number", ["rollout.exact_logprobs=yes", "rollout.max_staleness=0"]),
                ("on_overdue", "keep", "wait or drop", ["rollout.exact_logprobs=yes", "rollout.on_overdue=drop"]),
                ("kv_on_update", "keep", "recompute", ["rollout.exact_logprobs=yes", "rollout.kv_on_update=recompute"]),
                ("top_k", "5", "must be 0", ["rollout.exact_logprobs=False", "rollout.top_k=5"]),
                ("top_p", "0.9", "must be 1.0", ["rollout.exact_logprobs=yes", "rollout.top_p=1"]),
            )
        ),
        (["task.prompt_template=Solve this."], ("'task.prompt_template'", "{question}"), ["task.prompt_template=Solve: {question}"]),
        (["task.chat=on"], ("'task.chat=on'", "'model.path'"), ["task.chat=on", f"model.path={ROOT}"]),
        (["task.system_prompt=Be brief."], ("'task.system_prompt'", "'model.path'"), ["task.system_prompt=Be brief.", f"model.path={ROOT}"]),
        (
            ["task.enable_thinking=no", "task.chat=off", f"model.path={ROOT}"],
            ("'task.enable_thinking'", "'task.chat=off'", "'task.chat=auto'"),
            ["task.enable_thinking=no", "task.chat=auto", f"model.path={ROOT}"],
        ),
        (["task.name=jsonl"], ("'task.path'",), ["task.name=arithmetic"]),
        (["task.path=absent.jsonl"], ("'task.path'", "absent.jsonl"), [f"task.path={ROOT / 'pyproject.toml'}"]),
        (["model.path=absent"], ("'model.path'", "absent"), [f"model.path={ROOT}"]),
        ([f"model.path={ROOT / 'pyproject.toml'}"], ("'model.path'", "pyproject.toml' is a file; name its directory"), [f"model.path={ROOT}"]),
        (["sft.path=absent"], ("'sft.path'", "absent"), [f"sft.path={ROOT}"]),
    ],
)
def test_contradiction_names_both_sides_and_the_remedy_works(overrides, parts, remedy):
    with pytest.raises(ConfigError) as caught:
        loaded(*overrides)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    loaded(*remedy)


def test_path_of_rows_sets_the_task():
    assert loaded(f"task.path={ROOT / 'pyproject.toml'}").task.name == "jsonl"


@pytest.mark.parametrize(
    "available, asked, expected",
    [
        (1, (0, 0), (1, 1, True)),
        (1, (1, 1), (1, 1, True)),
        (2, (0, 0), (1, 1, False)),
        (3, (0, 0), (1, 2, False)),
        (8, (0, 0), (4, 4, False)),
        (8, (2, 0), (2, 6, False)),
        (8, (0, 2), (6, 2, False)),
        (8, (1, 3), (1, 3, False)),
    ],
)
def test_devices_are_shared_out(available, asked, expected):
    config = changed(cluster__sampler_devices=asked[0], cluster__trainer_devices=asked[1], trainer__micro_batch_rows=24, rollout__slots=24)
    assert check_devices(validate(config), available) == expected


@pytest.mark.parametrize("available, asked", [(2, (2, 1)), (4, (3, 2)), (4, (4, 0)), (4, (0, 4)), (2, (0, 5)), (1, (2, 0))])
def test_too_many_devices(available, asked):
    with pytest.raises(ConfigError, match=rf"{available} devices there are.*host_devices") as caught:
        check_devices(validate(changed(cluster__sampler_devices=asked[0], cluster__trainer_devices=asked[1])), available)
    assert all(str(number) in str(caught.value) for number in asked if number)


def test_batch_that_the_devices_cannot_share_names_the_numbers():
    """system-033: 3 rows on 4 devices."""
    config = validate(changed(trainer__micro_batch_rows=3, cluster__trainer_devices=4, cluster__sampler_devices=1))
    with pytest.raises(ConfigError, match=r"'trainer\.micro_batch_rows'.*4 data-parallel shards; got 3"):
        check_devices(config, 8)
    with pytest.raises(ConfigError, match=r"'rollout\.slots'.*3 replicas.*; got 64"):
        check_devices(validate(changed(cluster__sampler_devices=3, cluster__trainer_devices=4)), 8)
    put(config, "trainer.micro_batch_rows", 4)
    check_devices(config, 8)


def test_meshes():
    assert parse_mesh("k", "") == {} and parse_mesh("k", " fsdp=2, tensor=4 ") == {"fsdp": 2, "tensor": 4}
    with pytest.raises(ConfigError, match=r"'k': unknown mesh axis 'tensr'; did you mean 'tensor'"):
        parse_mesh("k", "tensr=2")
    for text in ("fsdp=0", "fsdp=x", "fsdp", "fsdp=-1", "fsdp=1.5"):
        with pytest.raises(ConfigError, match="whole number"):
            parse_mesh("k", text)
    with pytest.raises(ConfigError, match=r"'cluster\.mesh\.trainer'.*divisor of its 4 devices.*fsdp=3"):
        check_devices(validate(changed(cluster__mesh__trainer="fsdp=3")), 8)
    with pytest.raises(ConfigError, match=r"exactly 4 when data is given.*data=2"):
        check_devices(validate(changed(cluster__mesh__trainer="data=2")), 8)
    with pytest.raises(ConfigError, match=r"tensor axis must divide 'model\.heads' = 6.*got 4"):
        check_devices(validate(changed(cluster__mesh__sampler="tensor=4", model__heads=6)), 8)
    with pytest.raises(ConfigError, match=r"'cluster\.mesh\.sampler'.*no context axis.*context=2"):
        check_devices(validate(changed(cluster__mesh__sampler="context=2")), 8)
    for key, tokens in (("trainer.micro_batch_tokens", 194), ("sft.row_tokens", 150)):
        uneven = validate(changed(cluster__mesh__trainer="context=4", **{key.replace(".", "__"): tokens}))
        with pytest.raises(ConfigError, match=rf"'{key}' must be a multiple of the trainer's context axis = 4; got {tokens}"):
            check_devices(uneven, 8)
    assert check_devices(validate(changed(cluster__mesh__sampler="tensor=4", cluster__mesh__trainer="fsdp=2,tensor=2")), 8) == (4, 4, False)
    assert check_devices(validate(changed(trainer__micro_batch_rows=1, cluster__mesh__trainer="context=2,tensor=2")), 8) == (4, 4, False)


def test_workdir_must_be_writable(tmp_path):
    (tmp_path / "file").write_text("")
    for workdir in (tmp_path / "file", tmp_path / "file" / "run", pathlib.Path("/proc/areal_jax_run")):
        with pytest.raises(ConfigError, match=r"must be writable.*--workdir") as caught:
            open_workdir(workdir, loaded())
        assert str(workdir) in str(caught.value)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="broken"):
        open_workdir(tmp_path / "broken", loaded())


def test_resolved_configuration_is_saved(tmp_path):
    open_workdir(tmp_path / "run", loaded("trainer.learning_rate=1e-4", "rollout.max_staleness=None"))
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["trainer"]["learning_rate"] == 1e-4 and saved["rollout"]["max_staleness"] is None and saved["rollout"]["stop"] == []
    flat = {name for name, _ in fields()}
    assert all(part in saved for part in {name.split(".")[0] for name in flat})


def test_resume_keeps_the_configuration(tmp_path):
    open_workdir(tmp_path, loaded("seed=7"))
    open_workdir(tmp_path, loaded())  # nothing was trained yet: another configuration may take the place
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    open_workdir(tmp_path, loaded())
    open_workdir(tmp_path, loaded("trainer.steps=500", "checkpoint.every_steps=7", "telemetry.live=off"))
    for text, before in (("rollout.max_staleness=2", "4"), ("trainer.learning_rate=1.0", "0.0003"), ("seed=3", "0"), ("rollout.stop=(';',)", "[]")):
        with pytest.raises(ConfigError) as caught:
            open_workdir(tmp_path, loaded(text))
        key, _, value = text.partition("=")
        assert all(part in str(caught.value) for part in (f"'{key}'", before, value.strip("(,)"), "--workdir")), str(caught.value)
    assert json.loads((tmp_path / "config.json").read_text())["trainer"]["steps"] == 500


def test_run_main_gives_the_exit_code(capsys):
    for main, code in ((lambda argv: 0, 0), (lambda argv: 130, 130), (lambda argv: validate(changed(trainer__steps=-1)), 2)):
        with pytest.raises(SystemExit) as caught:
            run_main(main, [])
        assert caught.value.code == code
    assert capsys.readouterr().err.startswith("error: 'trainer.steps' must be at least 0; got -1")


def test_every_key_is_documented_and_every_default_is_allowed():
    config = validate(base_config())
    for name, field in fields():
        assert field.doc and (field.default is None or get(config, name) == field.default), name
    documented = [name for name, _ in fields()]
    assert len(documented) == len(set(documented)) > 80


def test_committed_configs_are_valid():
    files = sorted((ROOT / "configs").glob("*.py"))
    assert files
    for file in files:
        rows = ["--config.sft.data=rows.jsonl", "--config.model.path=policy"] if file.stem == "sft" else []
        load([f"--config={file}", *rows], planned=file.stem != "math")  # only the embedded job has its problems with it
