"""Packing: a packed text is trained as the same text is alone."""

import json

import pytest
import torch
from datasets import Dataset
from small_models import small_of, tiny_llama
from transformers import TrainingArguments

from toolkit.configs.proven_models import PROVEN_MODELS
from toolkit.data.arguments import DataArguments
from toolkit.data.dataset import prepare_data
from toolkit.data.packing import (
    PROVEN_ATTENTION,
    FixedPacking,
    best_fit,
    check_borders,
    keep_texts_apart,
    pack_texts,
)
from toolkit.data.sampling_order import Collator, training_rows
from toolkit.data.tokens import row_features, supervised_tokens
from toolkit.errors import UsageError
from toolkit.records.evidence import IGNORED
from toolkit.training.arguments import ModelArguments
from toolkit.training.model import build_model, load_model
from toolkit.training.preflight import preflight
from toolkit.training.trainer import ToolkitTrainer

PAD = 9


def texts_of(lengths, *, vocabulary=60, seed=0):
    """Random texts: every second one is learned from its first token on, as plain text is.

    Of the others the first half is not learned, as with a prompt.
    """
    numbers = torch.Generator().manual_seed(seed)
    ids = [torch.randint(vocabulary, (n,), generator=numbers).tolist() for n in lengths]
    prompts = [0 if number % 2 == 0 else len(text) // 2 for number, text in enumerate(ids)]
    labels = [[IGNORED] * prompt + text[prompt:] for prompt, text in zip(prompts, ids, strict=True)]
    return Dataset.from_dict(
        {"input_ids": ids, "labels": labels, "sample_id": list(range(len(ids)))},
        features=row_features(),
    )


def packed(texts, *, room):
    members = best_fit([len(ids) for ids in texts["input_ids"]], room=room)
    rows = pack_texts({"texts": members}, range(len(members)), texts=texts)
    return members, Dataset.from_dict(rows, features=row_features(positions=True))


# Which texts share a row


@pytest.mark.parametrize("seed", range(3))
def test_every_text_is_whole_in_one_row_and_no_row_is_too_long(seed):
    lengths = torch.randint(1, 65, (300,), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = best_fit(lengths, room=64)
    assert sorted(text for row in rows for text in row) == list(range(300))
    filled = [sum(lengths[text] for text in row) for row in rows]
    assert max(filled) <= 64
    # Best fit decreasing needs at most 11/9 of the fewest rows, and one.
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 64) + 1
    assert best_fit(lengths, room=64) == rows


def test_a_text_goes_into_the_fullest_row_that_has_room():
    assert best_fit([6, 5, 2, 4, 3], room=10) == [[0, 3], [1, 4, 2]]
    assert best_fit([10, 10], room=10) == [[0], [1]]
    assert best_fit([], room=10) == []


def test_packed_rows_hold_positions_and_learn_nothing_across_borders():
    texts = texts_of([4, 2, 3])
    members, rows = packed(texts, room=8)
    assert members == [[0, 2], [1]]
    first = rows[0]
    assert first["position_ids"] == [0, 1, 2, 3, 0, 1, 2]
    assert first["input_ids"] == texts[0]["input_ids"] + texts[2]["input_ids"]
    assert first["labels"] == [IGNORED, *texts[0]["labels"][1:], IGNORED, *texts[2]["labels"][1:]]
    assert rows["sample_id"][:] == [0, 1]
    learned = sum(map(supervised_tokens, texts["labels"]))
    assert sum(map(supervised_tokens, rows["labels"])) == learned


def test_padding_of_packed_rows_is_a_text_of_its_own():
    _, rows = packed(texts_of([4, 2, 3]), room=8)
    batch = Collator(pad_token_id=PAD)(rows.to_list())
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 0, 0, 0, 0]]
    assert batch["labels"][1, 2:].tolist() == [IGNORED] * 5
    assert "attention_mask" not in batch


# The proof


def step(model, batches, items):
    """Return logits, loss and gradients of one step, as both engines weigh it."""
    model.zero_grad()
    logits, total = [], 0.0
    for batch in batches:
        inputs = {name: column for name, column in batch.items() if name != "sample_id"}
        out = model(**inputs, num_items_in_batch=items)
        out.loss.backward()
        logits.append(out.logits.detach())
        total += out.loss.item()
    return logits, total, {name: p.grad.clone() for name, p in model.named_parameters()}


def losses_of(logits, labels):
    """The loss of each row of labels, summed, predicted from the logits before it."""
    return torch.nn.functional.cross_entropy(
        logits[:-1], torch.tensor(labels[1:]), ignore_index=IGNORED, reduction="sum"
    )


def compared(model, texts, *, room, change=None):
    """Return the largest gaps of a text's loss and of a gradient, packed against alone."""
    collate = Collator(pad_token_id=PAD)
    members, rows = packed(texts, room=room)
    assert max(map(len, members)) > 1
    items = sum(map(supervised_tokens, texts["labels"]))
    alone, loss, gradients = step(model, [collate([row]) for row in texts.to_list()], items)
    batch = collate(rows.to_list())
    together, packed_loss, packed_gradients = step(
        model, [batch if change is None else change(batch)], items
    )
    gap = abs(loss - packed_loss)
    for row, numbers in enumerate(members):
        start = 0
        for number in numbers:
            labels = texts[number]["labels"]
            here = losses_of(together[0][row, start : start + len(labels)], labels)
            gap = max(gap, abs(here - losses_of(alone[number][0], labels)).item())
            start += len(labels)
    size = max(each.abs().max() for each in gradients.values())
    apart = max((packed_gradients[n] - each).abs().max() for n, each in gradients.items())
    return gap, (apart / size).item()


LENGTHS = [31, 20, 17, 9, 9, 5, 3, 2]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_losses_and_gradients_of_each_text_are_equal_packed_and_alone(attention, cache):
    arguments = ModelArguments(attn_implementation=attention)
    model = load_model(arguments, build_model()).train()
    assert model.config._attn_implementation == attention
    gap, apart = compared(model, texts_of(LENGTHS, vocabulary=1024), room=40)
    assert gap < 1e-4  # of a sum over up to 16 tokens of 7.6 each
    assert apart < 1e-5


def test_texts_that_saw_each_other_would_be_noticed():
    def as_one_text(batch):
        ones = torch.ones_like(batch["input_ids"])
        return batch | {"attention_mask": ones}

    gap, apart = compared(tiny_llama(), texts_of(LENGTHS), room=40, change=as_one_text)
    assert gap > 1e-3
    assert apart > 1e-3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sliding_windows_keep_to_the_borders_as_well(attention):
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
        use_cache=False,
    )
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MistralForCausalLM(config).train()
    gap, apart = compared(model, texts_of(LENGTHS), room=40)
    assert gap < 1e-4
    assert apart < 1e-5


@pytest.mark.parametrize("attention", PROVEN_ATTENTION)
@pytest.mark.parametrize("architecture", PROVEN_MODELS)
def test_the_architectures_that_are_taken_keep_texts_apart(architecture, attention):
    kind = PROVEN_MODELS[architecture]
    if (architecture, attention) == ("Gemma2ForCausalLM", "sdpa"):
        with pytest.raises(ValueError, match="does not support an attention implementation"):
            small_of(kind, attention)
        return
    model = small_of(kind, attention)
    assert type(model).__name__ == architecture
    assert model.config._attn_implementation == attention
    gap, apart = compared(model, texts_of(LENGTHS), room=40)
    assert gap < 1e-4
    assert apart < 1e-5


def test_an_architecture_that_takes_positions_and_mixes_texts_is_not_taken():
    gap, _ = compared(small_of("gpt_bigcode", "sdpa"), texts_of(LENGTHS), room=40)
    assert gap > 1e-3
    assert "GPTBigCodeForCausalLM" not in PROVEN_MODELS


# A cache of keys and values


def with_cache(batch):
    return batch | {"use_cache": True}


def test_with_a_cache_transformers_mixes_texts_that_share_a_row():
    gap, apart = compared(tiny_llama(), texts_of(LENGTHS), room=40, change=with_cache)
    assert gap > 1e-3
    assert apart > 1e-3


@pytest.mark.parametrize("architecture", PROVEN_MODELS)
def test_rows_of_several_texts_are_refused_where_there_is_a_cache(architecture):
    model = small_of(PROVEN_MODELS[architecture], "eager")
    keep_texts_apart(model)
    texts = texts_of(LENGTHS)
    gap, _ = compared(model, texts, room=40)
    assert gap < 1e-4
    batch = Collator(pad_token_id=PAD)(packed(texts, room=40)[1].to_list())
    items = sum(map(supervised_tokens, texts["labels"]))
    with pytest.raises(UsageError, match=r"use_cache.*see each other.*use_cache to False"):
        step(model, [with_cache(batch)], items)
    model.config.use_cache = True
    with pytest.raises(UsageError, match="see each other"):
        step(model, [batch], items)
    # A row of one text has no neighbour, nor has what is generated.
    ids = torch.tensor([texts[0]["input_ids"]])
    model(input_ids=ids, position_ids=torch.arange(ids.shape[1]).unsqueeze(0))
    model.eval().generate(ids, max_new_tokens=2, use_cache=True, do_sample=False)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_don_t_hide_the_cache_of_what_they_stand_in():
    import peft

    config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_llama(), config)
    keep_texts_apart(model)
    batch = Collator(pad_token_id=PAD)(packed(texts_of(LENGTHS), room=40)[1].to_list())
    inputs = {name: column for name, column in batch.items() if name != "sample_id"}
    model(**inputs)
    with pytest.raises(UsageError, match="see each other"):
        model(**inputs, use_cache=True)


def test_a_trainer_refuses_it_in_training_and_in_evaluation(tmp_path):
    _, rows = packed(texts_of(LENGTHS), room=40)
    trainer = ToolkitTrainer(
        model=tiny_llama(),
        args=TrainingArguments(
            output_dir=str(tmp_path),
            use_cache=True,
            use_cpu=True,
            max_steps=1,
            report_to="none",
            remove_unused_columns=False,
        ),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=Collator(pad_token_id=PAD),
    )
    for run in (trainer.evaluate, trainer.train):
        with pytest.raises(UsageError, match="see each other"):
            run()


def test_the_flag_is_refused_before_anything_is_launched():
    with pytest.raises(UsageError, match=r"--packing best_fit and --use_cache.*Leave one of them"):
        preflight(["--packing", "best_fit", "--use_cache", "True"])


# What is refused


@pytest.mark.parametrize(
    ("architecture", "attention", "says"),
    [
        (
            "LlamaForCausalLM",
            "flash_attention_2",
            "proven for --attn_implementation sdpa and eager",
        ),
        ("MambaForCausalLM", None, "not proven for MambaForCausalLM"),
        ("OPTForCausalLM", "sdpa", "not proven for OPTForCausalLM"),
        (None, None, "not proven for a model without"),
    ],
)
def test_models_that_might_mix_texts_are_refused(architecture, attention, says, tmp_path):
    values = {} if architecture is None else {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UsageError, match=f"{says}.*[Pp]ass"):
        check_borders(tmp_path, attention=attention)


def test_code_that_comes_with_a_model_is_not_proven_by_the_name_of_a_class(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling.LlamaForCausalLM"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_borders(tmp_path, attention=None)  # without the flag transformers runs its own
    with pytest.raises(UsageError, match="not proven for the code that comes with the model"):
        check_borders(tmp_path, attention=None, trust_remote_code=True)
    flags = ["--packing", "best_fit", "--model_name_or_path", str(tmp_path)]
    with pytest.raises(UsageError, match="not proven for the code that comes with the model"):
        preflight([*flags, "--trust_remote_code", "True"])


@pytest.mark.parametrize("attention", [None, *PROVEN_ATTENTION])
def test_the_built_in_model_is_taken(attention, cache):
    check_borders(build_model(), attention=attention)


def test_the_refusal_comes_before_anything_is_launched(cache):
    with pytest.raises(UsageError, match="best_fit is proven for"):
        preflight(["--packing", "best_fit", "--attn_implementation", "flash_attention_2"])


# Rows of one length


def test_a_stream_is_cut_into_rows_of_one_length_and_keeps_what_is_learned():
    cut = FixedPacking(4)
    first = cut({"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[1, 2, 3], [IGNORED, 5, 6]]})
    assert first["input_ids"] == [[1, 2, 3, 4]]
    assert first["labels"] == [[1, 2, 3, IGNORED]]
    second = cut({"input_ids": [[7] * 8], "labels": [[IGNORED] * 7 + [7]]})
    # Of 5 6 7 7 | 7 7 7 7 | 7 7, the second has nothing to learn.
    assert second["input_ids"] == [[5, 6, 7, 7]]
    assert (first["sample_id"], second["sample_id"]) == ([0], [1])


# Through the cache


def stories(path, count=40):
    rows = [{"prompt": f"say {n}: ", "completion": "word " * (n % 9 + 1)} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def plain_texts(path, count=40):
    rows = [{"text": f"{n} says " + "word " * (n % 9)} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("write_rows", [stories, plain_texts])
def test_packing_loses_no_text_and_no_learned_token(tmp_path, cache, write_rows):
    path, folder = write_rows(tmp_path / "rows.jsonl"), build_model()
    plain = prepare_data(DataArguments(train_file=path, max_length=32), folder)
    best = prepare_data(DataArguments(train_file=path, max_length=32, packing="best_fit"), folder)
    assert best.texts == plain.texts == plain.rows == 40
    assert best.supervised_tokens == plain.supervised_tokens
    assert best.tokens == plain.tokens
    if write_rows is plain_texts:  # all is learned but the first token of each text
        assert plain.supervised_tokens == plain.tokens - plain.rows
    assert best.rows < plain.rows
    assert best.longest <= 32
    assert best.load()["sample_id"][:] == list(range(best.rows))
    fixed = prepare_data(DataArguments(train_file=path, max_length=32, packing="fixed"), folder)
    assert {len(ids) for ids in fixed.load()["input_ids"]} == {32}
    assert plain.tokens - 32 < fixed.tokens <= plain.tokens


def test_a_run_of_packed_rows_has_packed_fillers_and_throughput_rows(tmp_path, cache):
    path, folder = stories(tmp_path / "rows.jsonl"), build_model()
    data = prepare_data(DataArguments(train_file=path, max_length=32, packing="best_fit"), folder)
    batch = data.rows - 1
    rows = training_rows(
        data.load(), steps=2, global_batch=batch, seed=0, throughput_steps=1, max_length=32
    )
    assert len(rows) == 3 * batch
    assert rows[data.rows]["position_ids"] == [0]
    assert rows[-1]["position_ids"] == list(range(32))


def test_texts_too_short_for_one_row_of_fixed_length(tmp_path, cache):
    path = stories(tmp_path / "rows.jsonl", count=2)
    arguments = DataArguments(train_file=path, max_length=500, packing="fixed")
    with pytest.raises(UsageError, match="don't fill one row of --max_length 500"):
        prepare_data(arguments, build_model())
