"""Hugging Face models as people type them: their own loss, adapters that travel alone, tied weights, saving."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from freshet import ConfigError, DataError, Federation, HuggingFaceTask, Result, RunError, load
from freshet.training.network import FlatModel, copy_module, layout_of
from freshet.training.task import TASKS

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
peft = pytest.importorskip("peft", reason="needs the extra hf")
datasets = pytest.importorskip("datasets", reason="needs the extra hf")

TASK = TASKS["huggingface"]
METHODS = ("fedasmu", "fedbuff", "fedavg")


# ---- tiny random models and data


def bert(**given: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=60, max_position_embeddings=32, num_labels=3, **sizes, **given)
    return transformers.BertForSequenceClassification(config)


def gpt2(kind: str = "GPT2LMHeadModel", **given: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 5}
    return getattr(transformers, kind)(transformers.GPT2Config(vocab_size=60, **sizes, **ids, **given))


def vit() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **sizes)
    )


def lora(model: nn.Module, kind: str, layers: list[str]) -> nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(task_type=kind, r=2, target_modules=layers))


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        y = int(rng.integers(3))
        rows.append(
            {"text": "unused", "input_ids": [y + 6, *rng.integers(10, 60, rng.integers(1, 9)).tolist()], "label": y}
        )
    return rows


def classification() -> dict[str, Any]:
    return {
        "train": datasets.Dataset.from_list(sentences(120, 0)),
        "test": datasets.Dataset.from_list(sentences(45, 1)),
    }


def language() -> dict[str, Any]:
    """Counting upwards: the next token is known after the first."""
    rng = np.random.default_rng(0)
    rows = [list(range(a, a + n)) for a, n in zip(rng.integers(6, 40, 150), rng.integers(3, 12, 150), strict=True)]
    data = datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])
    return {"train": data.select(range(110)), "test": data.select(range(110, 150))}


def pictures() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 150)
    x = (rng.normal(size=(150, 1, 8, 8)) + y[:, None, None, None]).astype(np.float32)
    rows = [{"pixel_values": image, "labels": int(label)} for image, label in zip(x, y, strict=True)]
    return {"train": rows[:110], "test": rows[110:]}


def run(model: nn.Module, data: dict[str, Any], out: Path, method: str = "fedavg", **given: Any) -> Result:
    return federation(model, data, method, **given).run(out=out)


def federation(model: nn.Module, data: dict[str, Any], method: str = "fedavg", **given: Any) -> Federation:
    options = {"name": method} | ({"K": 3} if method == "fedbuff" else {})
    run = {"executor": "serial", "eval_every": 20.0, "until": 40.0, "per_round": 3, "in_flight": 4}
    training = {"epochs": 2, "lr": 0.01, "optimiser": "adam"} | given.pop("training", {})
    run |= given.pop("run", {})
    fleet = {"devices": 5, "fastest": 2.0, "ratio": 2.0, "time": "trip"} | given.pop("fleet", {})
    given = {"task": "huggingface", "fleet": fleet, "seed": 1} | given
    return Federation(model, method=options, run=run, training=training, **data, **given)


# ---- what people type


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["bert", "gpt2 with LoRA", "vit"])
def test_a_model_trains_with_its_own_loss(kind: str, method: str, tmp_path: Path) -> None:
    model, data = {
        "bert": lambda: (bert(), classification()),
        "gpt2 with LoRA": lambda: (lora(gpt2(), "CAUSAL_LM", ["c_attn"]), language()),
        "vit": lambda: (vit(), pictures()),
    }[kind]()
    result = run(model, data, tmp_path / "run", method)
    assert result.loss[-1] < result.loss[0] and result.metric.name == "accuracy"
    assert ("perplexity" in result.rows[-1]) == (kind == "gpt2 with LoRA")


def test_worker_processes_give_the_same_bits(tmp_path: Path) -> None:
    model = lora(gpt2(), "CAUSAL_LM", ["c_attn"])
    alone = run(model, language(), tmp_path / "alone", "fedasmu")
    spread = run(model, language(), tmp_path / "spread", "fedasmu", run={"executor": "processes", "workers": 2})
    assert np.array_equal(alone.weights, spread.weights)
    assert (tmp_path / "alone/events.jsonl").read_bytes() == (tmp_path / "spread/events.jsonl").read_bytes()


def test_local_training_equals_a_textbook_loop(tmp_path: Path) -> None:
    """One device, one step over all samples: torch's SGD on the model's own loss, padded by hand."""
    rows = sentences(8, 3)
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    data = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows)}
    training = {"epochs": 1, "batch_size": 8, "lr": 0.1, "lr_decay": 1.0, "optimiser": "sgd"}
    one = {"rounds": 1, "per_round": 1, "in_flight": 1}
    result = run(model, data, tmp_path / "run", training=training, run=one, fleet={"devices": 1})
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows])
    twin = copy_module(model)
    loss = twin(
        input_ids=ids, attention_mask=(ids > 0).long(), labels=torch.tensor([row["label"] for row in rows])
    ).loss
    loss.backward()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter -= 0.1 * parameter.grad
    for mine, theirs in zip(result.module().parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_arrays_are_the_main_input_and_the_labels(tmp_path: Path) -> None:
    x, y = np.full((60, 4), 9), np.arange(60) % 3
    x[:, 0] = 6 + y
    assert run(bert(), {"train": (x, y), "test": (x, y)}, tmp_path / "run").loss[-1] < 1.1


def test_a_collator_of_transformers_makes_the_batches(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    words = {"[PAD]": 0, "[MASK]": 3, "[UNK]": 4} | {f"w{k}": k for k in range(5, 60)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "[UNK]")), pad_token="[PAD]", mask_token="[MASK]"
    )
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    rows = [{"input_ids": row["input_ids"]} for row in sentences(60, 0)]
    given = {"train": rows, "test": rows[:20], "collate": collate}
    first = run(gpt2(), given, tmp_path / "first")
    assert first.rows[-1]["perplexity"] == pytest.approx(math.exp(first.loss[-1]), rel=1e-5)
    masked = given | {"collate": transformers.DataCollatorForLanguageModeling(tokenizer, mlm=True)}
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(bert().config)
    a, b = (run(model, masked, tmp_path / name) for name in "ab")
    assert np.array_equal(a.weights, b.weights)  # masks come from the trip's own stream


# ---- loss and metrics


def test_loss_and_token_accuracy_equal_a_second_reading() -> None:
    model = gpt2().eval()
    rows = [{"input_ids": row, "labels": row} for row in ([7, 8, 9, 10], [11, 12], [13, 14, 15])]
    ids = torch.tensor([[7, 8, 9, 10], [11, 12, 0, 0], [13, 14, 15, 0]])
    mask = (ids > 0).long()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
        chances = logits.log_softmax(-1)
        rights, losses = [], []
        for row, tokens in enumerate(rows):
            for place, token in enumerate(tokens["input_ids"][1:]):
                losses.append(-float(chances[row, place, token]))
                rights.append(int(logits[row, place].argmax()) == token)
        labels = ids.masked_fill(mask == 0, -100)
        batches = [{"input_ids": ids[k], "attention_mask": mask[k], "labels": labels[k]} for k in ([0, 1], [2])]
        score = TASK.score((TASK.output(model, batch, batch), batch) for batch in batches)
    assert score.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert score.metrics["accuracy"] == pytest.approx(np.mean(rights))
    assert score.metrics["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)


def test_masked_tokens_are_not_shifted() -> None:
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(bert().config).eval()
    ids = torch.randint(6, 60, (3, 5))
    labels = torch.full_like(ids, -100)
    labels[0, 2], labels[1, 0], labels[2, 4] = 9, 8, 7
    batch = {"input_ids": ids, "labels": labels}
    with torch.no_grad():
        output = TASK.output(model, batch, batch)
    rows, targets = TASK.arrange(output, batch)
    assert targets.tolist() == [9, 8, 7] and torch.equal(rows[1], output.logits[1, 0])
    assert float(nn.functional.cross_entropy(rows, targets)) == pytest.approx(float(output.loss), rel=1e-6)


def test_a_batch_in_which_no_label_counts_has_no_gradient() -> None:
    model = gpt2()
    batch = {"input_ids": torch.tensor([[7, 8]]), "labels": torch.tensor([[9, -100]])}
    loss = TASK.batch_loss(model, batch, batch)
    assert loss.item() == 0.0
    gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    assert not any(gradient.any() for gradient in gradients)


def test_shorter_samples_are_filled_with_the_id_that_the_model_looks_for() -> None:
    """GPT-2 classifies at the last token before the padding id (5 here)."""
    model = gpt2("GPT2ForSequenceClassification", num_labels=3).eval()
    ids, mask = torch.tensor([[7, 8, 0, 0]]), torch.tensor([[1, 1, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([1])}
    with torch.no_grad():
        padded = TASK.output(model, batch, batch).logits
        alone = model(input_ids=ids[:, :2]).logits
    torch.testing.assert_close(padded, alone)


def test_other_losses_have_other_metrics(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig.from_dict(
        bert().config.to_dict() | {"num_labels": 1, "problem_type": "regression"}
    )
    model = transformers.BertForSequenceClassification(config)
    rows = [{"input_ids": row["input_ids"], "labels": row["label"] / 2} for row in sentences(60, 0)]
    data = {"train": rows, "test": rows[:20]}
    with pytest.raises(ConfigError, match=r"needs whole numbers as labels; give HuggingFaceTask"):
        federation(model, data)
    near = {"near": lambda output, batch: (output.logits[:, 0] - batch["labels"]).abs() < 0.3}
    result = run(model, data, tmp_path / "run", task=HuggingFaceTask(metrics=near, primary="near"))
    assert 0 <= result.values[-1] <= 1 and result.metric.name == "near"


# ---- errors that name the remedy


def test_without_a_task_the_error_names_the_line_that_fixes_it() -> None:
    x, y = np.full((30, 4), 9), np.arange(30) % 3
    with pytest.raises(ConfigError, match=r'SequenceClassifierOutput.*; add task="huggingface"'):
        federation(bert(), {"train": (x, y), "test": (x, y)}, task=None)
    with pytest.raises(DataError, match=r'input_ids.*or give task="huggingface"'):
        federation(bert, classification(), task=None)
    rows = [{"input_ids": row["input_ids"], "label": row["label"]} for row in sentences(30, 0)]  # of different lengths
    for data in (
        classification(),
        {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows)},
    ):
        with pytest.raises(ConfigError, match=r'^task: BertFor.* is a Hugging Face model.*; add task="huggingface"$'):
            federation(bert(), data, task=None)


def test_missing_labels_are_one_sentence() -> None:
    rows = [{"input_ids": row["input_ids"]} for row in sentences(30, 0)]
    with pytest.raises(ConfigError, match="no labels; add a column labels; for a language model, labels = input_ids"):
        federation(gpt2(), {"train": rows, "test": rows})


def test_too_few_outputs_and_other_models_are_one_sentence() -> None:
    rows = [{"input_ids": [9, 8], "labels": row // 8} for row in range(32)]
    with pytest.raises(ConfigError, match="returns 3 scores, but the data have 4 classes"):
        federation(bert(), {"train": rows, "test": rows})
    x, y = np.ones((30, 4), np.float32), np.arange(30) % 3
    with pytest.raises(ConfigError, match=r"needs a Hugging Face model|cannot take"):
        federation(nn.Linear(4, 3), {"train": (x, y), "test": (x, y)})


# ---- adapters, tied weights, saving


def test_only_the_adapter_travels_and_is_kept(tmp_path: Path) -> None:
    model = lora(bert(), "SEQ_CLS", ["query", "value"])
    learnable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    result = run(model, classification(), tmp_path / "run")
    assert len(result.weights) == learnable
    assert result.summary["bytes_up"] == 4 * learnable * result.summary["uploads"]
    assert (tmp_path / "run/model.safetensors").stat().st_size < 4 * learnable + 4000
    assert np.array_equal(load(tmp_path / "run", model).weights, result.weights)


def test_a_saved_adapter_is_read_by_from_pretrained(tmp_path: Path) -> None:
    model = lora(bert(), "SEQ_CLS", ["query", "value"])
    result = run(model, classification(), tmp_path / "run")
    result.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved/adapter_model.safetensors").is_file() and not (
        tmp_path / "saved/model.safetensors"
    ).exists()
    back = peft.PeftModel.from_pretrained(bert(), tmp_path / "saved").eval()
    ids = torch.tensor([[6, 12, 13]])
    with torch.no_grad():
        assert torch.equal(back(input_ids=ids).logits, result.module()(input_ids=ids).logits)
        assert not torch.equal(back(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    load(tmp_path / "run", model).save_pretrained(tmp_path / "again")
    names = "adapter_model.safetensors"
    assert (tmp_path / "again" / names).read_bytes() == (tmp_path / "saved" / names).read_bytes()


def test_tied_weights_are_one_vector_and_stay_tied(tmp_path: Path) -> None:
    model = gpt2()
    assert layout_of(model).size == sum(p.numel() for p in model.parameters())
    result = run(model, language(), tmp_path / "run")
    module: Any = result.module()
    assert module.lm_head.weight is module.transformer.wte.weight
    result.save_pretrained(tmp_path / "saved")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, tensor in module.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)
    start = {"model.start": str(tmp_path / "run/model.safetensors")}
    started = federation(model, language()).with_settings(start)
    assert np.array_equal(started.assembly.initial.weights, result.weights)


def test_other_modules_have_no_save_pretrained(tmp_path: Path) -> None:
    x, y = np.ones((30, 4), np.float32), np.arange(30) % 3
    result = run(nn.Linear(4, 3), {"train": (x, y), "test": (x, y)}, tmp_path / "run", task=None)
    with pytest.raises(RunError, match=r"Linear is no Hugging Face model .* use result\.module\(\)"):
        result.save_pretrained(tmp_path / "saved")


# ---- precision and memory


def test_a_frozen_bfloat16_base_keeps_its_type_and_its_memory(tmp_path: Path) -> None:
    model = lora(bert().to(torch.bfloat16), "SEQ_CLS", ["query", "value"])
    base = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    assert {p.dtype for p in base.values()} == {torch.bfloat16}
    flat = FlatModel(copy_module(model))
    for name, parameter in flat.module.named_parameters():
        if name in base:
            assert parameter.dtype is torch.bfloat16 and parameter.data_ptr() == base[name].data_ptr()
        else:
            assert parameter.dtype is torch.float32
    ids = torch.tensor([[6, 12, 13]])
    with torch.no_grad():
        mine, theirs = (m.eval()(input_ids=ids).logits for m in (flat.module, model))
    torch.testing.assert_close(mine, theirs, rtol=0.02, atol=1e-3)
    alone = run(model, classification(), tmp_path / "alone")
    assert alone.loss[-1] < alone.loss[0]
    spread = run(model, classification(), tmp_path / "run", run={"executor": "processes"})
    assert np.array_equal(alone.weights, spread.weights)


def test_a_device_answers_with_the_adapter_alone(tmp_path: Path) -> None:
    from freshet import Device
    from freshet.core.messages import Assignment
    from freshet.flower import wire

    def model() -> nn.Module:
        return lora(bert(), "SEQ_CLS", ["query", "value"])

    config = federation(model(), classification()).config
    weights = FlatModel(model()).dump()
    order = wire.Order(Assignment(2, 1, 1, 1, weights, 2, 0.1), "session", "ticket", wire.FreshChannel("none"))
    device = Device(load=lambda node: datasets.Dataset.from_list(sentences(25, 7)), model=model)
    answer = device.handle(order, config, {"folder": str(tmp_path)}, 7)
    assert answer.upload is not None and answer.samples == 25 and answer.upload.steps == 2 * 3
    assert answer.upload.weights.shape == weights.shape and not np.array_equal(answer.upload.weights, weights)


def test_every_counted_token_weighs_the_same(tmp_path: Path) -> None:
    """The loss of a test set does not depend on how it is cut into batches."""
    made = federation(gpt2(), language())
    trainer = made.assembly.setup().trainer()
    whole = trainer.evaluate(made.assembly.initial.weights).loss
    module = trainer.flat.module.eval()
    data: Any = trainer.data.test
    with torch.no_grad():
        small = TASK.score((TASK.output(module, x, y), y) for x, y in data.chunks(3)).loss
    assert small == pytest.approx(whole, rel=1e-5) and isinstance(data.y, Tensor)
