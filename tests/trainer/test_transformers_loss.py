"""A fine-tuning loss from files to gradient against transformers and torch: the same checkpoint, the same rows, computed by hand there."""

import json
import shutil

import jax
import numpy as np
import optax
import pytest

from areal_jax.config import base_config
from areal_jax.data.tuning import load_tuning
from areal_jax.models.checkpoint import load_policy
from areal_jax.models.forward import ForwardSettings
from areal_jax.models.tokenizer import load_tokenizer
from areal_jax.trainer.examples import Corpus
from areal_jax.trainer.supervised import SupervisedTrainer

torch = pytest.importorskip("torch", reason="compares with torch")
transformers = pytest.importorskip("transformers", reason="compares with transformers")

TALKS = [
    [("user", "2+2?"), ("assistant", "4"), ("user", "And 3+3?"), ("assistant", "6, of course.")],
    [("system", "Be brief."), ("user", "Capital of France?"), ("assistant", "Paris")],
    [("user", "Say nothing."), ("assistant", "…")],
]
HEADER = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer_files):
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    policy = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=49152, max_position_embeddings=128, initializer_range=0.2, **sizes))
    policy.save_pretrained(folder)
    for file in (tokenizer_files / "smollm2").iterdir():
        if file.name.startswith("tokenizer"):
            shutil.copyfile(file, folder / file.name)
    return folder, policy


def test_loss_and_gradient_are_those_of_torch(checkpoint, tmp_path, mesh_of):
    folder, policy = checkpoint
    config = base_config()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": [{"role": r, "content": c} for r, c in talk]}) + "\n" for talk in TALKS))
    config.sft.update(data=str(tmp_path / "rows.jsonl"), rows=3, steps=1, grad_clip=1e9)
    data = load_tuning(config, load_tokenizer(folder), 128)
    model, params = load_policy(folder)
    corpus = Corpus(data.train, data.capacity)
    trainer = SupervisedTrainer(config.sft, model, mesh_of(), params, corpus, 0, ForwardSettings(), epochs=1)
    ours = trainer.step()

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    header, end = tokenizer.encode(HEADER), tokenizer.convert_tokens_to_ids("<|im_end|>")
    total, count = torch.zeros(()), 0
    for talk in TALKS:
        ids = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in talk], tokenize=True, return_dict=True)["input_ids"]
        learnt, inside = [], False
        for place, token in enumerate(ids):
            inside = inside or ids[place - len(header) : place] == header
            learnt.append(inside)
            inside = inside and token != end
        logprobs = torch.log_softmax(policy(torch.tensor(ids)[None]).logits[0, :-1].float(), -1)
        chosen = logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        total, count = total - chosen[torch.tensor(learnt[1:])].sum(), count + sum(learnt)
    (total / count).backward()

    assert float(ours["tokens"]) == count and float(ours["loss"]) == pytest.approx(total.item() / count, rel=1e-5)
    moment = optax.tree.get(trainer.state.opt_state, "mu")
    layer, theirs = moment["layers"]["layer_0"], policy.model.layers[0]
    for got, parameter in (
        (layer["attention"]["query"]["kernel"].T, theirs.self_attn.q_proj.weight),
        (layer["mlp"]["down"]["kernel"].T, theirs.mlp.down_proj.weight),
        (moment["embedding"], policy.model.embed_tokens.weight),
    ):
        wanted = parameter.grad.numpy()
        np.testing.assert_allclose(np.asarray(jax.device_get(got)) / (1 - config.sft.adam_b1), wanted, atol=1e-5 * np.abs(wanted).max())
