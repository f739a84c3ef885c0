"""Evaluation: the loss by tokens, of every row once, and a training that notices nothing of it."""

import math
import random

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from small_models import tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM, TrainingArguments

from toolkit import ToolkitTrainer
from toolkit.data.arguments import DataArguments
from toolkit.data.sampling_order import Collator
from toolkit.engines.backend import NotBetweenSteps, side_effect_free
from toolkit.errors import UsageError
from toolkit.measuring.attestation import Requested
from toolkit.measuring.recorder import Recorder
from toolkit.records.evidence import IGNORED
from toolkit.strategies import get_strategy
from toolkit.training.arguments import own_arguments, training_values
from toolkit.training.evaluation import Evaluation, loss_and_tokens, perplexity
from toolkit.training.evaluation_plan import (
    Schedule,
    check_evaluation,
    left_out_with_evidence,
    prompts_of,
    schedule,
)
from toolkit.training.loop import train_loop
from toolkit.training.speed import Speed
from toolkit.training.speed_arguments import SpeedArguments

COLLATE = Collator(pad_token_id=0)


def ragged(count, *, seed=0):
    """Rows of 3 to 40 tokens whose first third is a prompt."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        ids = [draw.randrange(1, 64) for _ in range(draw.randrange(3, 41))]
        prompt = len(ids) // 3
        labels = [IGNORED] * prompt + ids[prompt:]
        rows.append({"input_ids": ids, "labels": labels, "sample_id": number})
    return Dataset.from_list(rows)


def by_hand(model, rows):
    """One row after the other, without padding, in float64."""
    total, tokens = 0.0, 0
    model.eval()
    with torch.no_grad():
        for row in rows:
            logits = model(torch.tensor([row["input_ids"]])).logits[0].double()
            for at, label in enumerate(row["labels"][1:]):
                if label != IGNORED:
                    total -= float(logits[at].log_softmax(-1)[label])
                    tokens += 1
    model.train()
    return total, tokens


def arguments(folder, **changes):
    usual = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "remove_unused_columns": False,
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(folder), **usual | changes)


def recorder(tmp_path):
    asked = Requested(
        strategy=get_strategy("single"),
        num_processes=1,
        gradient_clipping=1.0,
        gradient_accumulation_steps=2,
    )
    return Recorder(asked, rehearsal=True, steps_file=tmp_path / "steps.jsonl")


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.mark.parametrize("batch_rows", [1, 4, 5])
def test_the_loss_is_that_of_all_tokens_together_and_every_row_counts_once(accelerator, batch_rows):
    model, rows = tiny_llama(), ragged(13)
    total, tokens = loss_and_tokens(accelerator, model, rows, COLLATE, batch_rows=batch_rows)
    wanted, count = by_hand(model, rows)
    assert tokens == count
    assert total == pytest.approx(wanted, rel=1e-6)
    means = [by_hand(model, [row]) for row in rows]
    assert abs(sum(loss / n for loss, n in means) / len(means) - total / tokens) > 1e-4


def test_a_row_without_a_token_to_predict_counts_nothing_and_none_at_all_is_no_number(accelerator):
    model, rows = tiny_llama(), ragged(3)
    silent = Dataset.from_list(
        [*rows, {"input_ids": [5, 6], "labels": [IGNORED] * 2, "sample_id": 9}]
    )
    assert loss_and_tokens(accelerator, model, silent, COLLATE, batch_rows=1) == loss_and_tokens(
        accelerator, model, rows, COLLATE, batch_rows=1
    )
    assert loss_and_tokens(accelerator, model, silent.select([3]), COLLATE, batch_rows=1) == (0, 0)


def test_long_rows_are_summed_chunk_by_chunk(accelerator, monkeypatch):
    model, rows = tiny_llama(), ragged(6)
    whole = loss_and_tokens(accelerator, model, rows, COLLATE, batch_rows=2)
    monkeypatch.setattr("toolkit.training.evaluation.CHUNK", 7)
    parts = loss_and_tokens(accelerator, model, rows, COLLATE, batch_rows=2)
    assert parts == (pytest.approx(whole[0], rel=1e-12), whole[1])


@pytest.mark.parametrize("autocast", [False, True])
def test_with_the_chunked_loss_no_more_logits_are_held_than_in_training(accelerator, autocast):
    vocabulary, chunk, rows = 997, 8, ragged(7)
    model, speed = (
        tiny_llama(vocabulary=vocabulary),
        Speed(SpeedArguments(tuned=True, loss_chunk_tokens=chunk)),
    )
    held = [0]
    inner = model.lm_head.register_forward_hook(
        lambda _, __, out: held.append(out.numel() if out.shape[-1:] == (vocabulary,) else 0)
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        whole = loss_and_tokens(accelerator, model, rows, COLLATE, batch_rows=4)
    assert max(held) > chunk * vocabulary
    inner.remove()
    speed.apply(model)
    collate, seen = speed.collating(COLLATE), Widest(vocabulary)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), seen:
        found = loss_and_tokens(accelerator, model, rows, collate, batch_rows=4)
    assert 0 < seen.tokens <= chunk
    assert found == (pytest.approx(whole[0], rel=1e-3 if autocast else 1e-6), whole[1])
    silent = Dataset.from_list([{"input_ids": [5, 6], "labels": [IGNORED] * 2, "sample_id": 9}])
    assert loss_and_tokens(accelerator, model, silent, collate, batch_rows=1) == (0, 0)


class Widest(TorchDispatchMode):
    """The most tokens of a tensor whose last dimension is the vocabulary."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.tokens = vocabulary, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.shape[-1:] == (self.vocabulary,):
            # The transposed head is as wide, and has as many rows as a state has numbers.
            rows = found.numel() // self.vocabulary
            self.tokens = max(self.tokens, 0 if found.shape[0] == 32 else rows)
        return found


def test_perplexity_is_the_exponential_or_infinite():
    assert perplexity(2.0) == math.exp(2)
    assert perplexity(800.0) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_between_steps_leaves_modes_random_numbers_and_gradients_as_they_were(accelerator):
    model = tiny_llama()
    model.model.layers[0].eval()
    before = torch.random.get_rng_state()
    with side_effect_free(accelerator, model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        torch.rand(3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.training
    assert not model.model.layers[0].training
    assert torch.is_grad_enabled()


def test_within_a_step_nothing_is_evaluated(accelerator):
    model, rows = tiny_llama(), ragged(2)
    accelerator.gradient_state._set_sync_gradients(False)
    try:
        with pytest.raises(NotBetweenSteps, match="between two optimizer steps"):
            loss_and_tokens(accelerator, model, rows, COLLATE, batch_rows=1)
    finally:
        accelerator.gradient_state._set_sync_gradients(True)


def trained(engine, folder, *, evaluated):
    """Train a model with dropout, and return losses, what was evaluated, and the record."""
    model = tiny_llama(attention_dropout=0.3)
    rows, kept = ragged(16, seed=1), recorder(folder)
    evaluation = Evaluation(
        ragged(7), COLLATE, batch_rows=2, schedule=Schedule(last=4, every=1), recorder=kept
    )
    observers = [evaluation] if evaluated else []
    args = arguments(folder)
    torch.manual_seed(3)
    try:
        if engine == "loop":
            train_loop(
                model,
                args,
                rows,
                COLLATE,
                recorder=kept,
                scheduled_steps=4,
                observers=observers,
            )
            record = kept.finish()
        else:
            trainer = ToolkitTrainer(
                model=model,
                args=args,
                train_dataset=rows,
                data_collator=COLLATE,
                recorder=kept,
                observers=observers,
            )
            trainer.train()
            record = trainer.record
    finally:
        kept.close()
    return record, evaluation.results, model


@pytest.mark.parametrize("engine", ["trainer", "loop"])
def test_losses_are_bit_equal_with_and_without_evaluation_after_every_step(tmp_path, engine):
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    with_it, found, model = trained(engine, tmp_path / "with", evaluated=True)
    without, nothing, other = trained(engine, tmp_path / "without", evaluated=False)
    assert with_it["losses"] == without["losses"]
    assert with_it["grad_norms"] == without["grad_norms"]
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    assert nothing == []
    # Nor does the step that is counted in know of it.
    assert with_it["peak"] == without["peak"]
    assert with_it["traffic"] == without["traffic"]
    assert [each["step"] for each in found] == [0, 1, 2, 3, 4]
    total, tokens = by_hand(model, ragged(7))
    assert found[-1]["loss"] == pytest.approx(total / tokens, rel=1e-6)
    assert found[-1]["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
    assert {(each["tokens"], each["rows"]) for each in found} == {(tokens, 7)}
    assert len({each["loss"] for each in found}) == 5
    lines = (tmp_path / "with" / "steps.jsonl").read_text()
    assert lines.count("eval_loss") == lines.count("eval_perplexity") == 5
    assert lines.count('"loss"') == 4, "an evaluation took the place of the step's own log"


@pytest.mark.parametrize("changes", [{}, {"average_tokens_across_devices": False}])
def test_the_trainer_evaluates_by_tokens_too(tmp_path, changes):
    model, rows = tiny_llama(), ragged(7)
    args = arguments(tmp_path, per_device_eval_batch_size=3, **changes)
    trainer = ToolkitTrainer(
        model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=COLLATE
    )
    metrics = trainer.evaluate()
    total, tokens = by_hand(model, rows)
    assert metrics["eval_loss"] == pytest.approx(total / tokens, rel=1e-6)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)


class Renamed(LlamaForCausalLM):
    """A causal LM whose name is not in the table of transformers."""


def test_smoothed_labels_are_those_of_the_next_tokens_whatever_the_model_s_class_is_called(
    tmp_path,
):
    model, rows = tiny_llama(), ragged(7)
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    losses = []
    for kind in (LlamaForCausalLM, Renamed):
        model.__class__ = kind
        trainer = ToolkitTrainer(
            model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=COLLATE
        )
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == losses[1]


def test_the_trainers_own_evaluations_change_no_loss_and_enter_no_ledger(tmp_path):
    def run(**changes):
        torch.manual_seed(5)
        trainer = ToolkitTrainer(
            model=tiny_llama(attention_dropout=0.3),
            args=arguments(tmp_path / str(len(changes)), **changes),
            train_dataset=ragged(16, seed=1),
            eval_dataset=ragged(7),
            data_collator=COLLATE,
        )
        trainer.train()
        return trainer.record, [each for each in trainer.state.log_history if "eval_loss" in each]

    with_it, evaluated = run(eval_strategy="steps", eval_steps=1)
    without, _ = run()
    assert len(evaluated) == 4
    for field in ("losses", "grad_norms", "peak", "traffic"):
        assert with_it[field] == without[field], field


def values(**changes):
    return {
        "eval_strategy": "no",
        "eval_steps": None,
        "logging_steps": 5,
        "eval_delay": 0,
    } | changes


@pytest.mark.parametrize(
    ("flags", "due"),
    [
        ({}, [10]),
        ({"eval_strategy": "steps", "eval_steps": 4.0}, [4, 8, 10]),
        ({"eval_strategy": "steps", "eval_steps": 0.25}, [3, 6, 9, 10]),
        ({"eval_strategy": "steps"}, [5, 10]),
        ({"eval_strategy": "epoch"}, [3, 6, 9, 10]),
        ({"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 5}, [6, 8, 10]),
        ({"eval_strategy": "epoch", "eval_delay": 2}, [6, 9, 10]),
    ],
)
def test_the_schedule_is_that_of_the_trainers_flags_and_always_has_the_last_step(flags, due):
    planned = schedule(values(**flags), steps=10, steps_per_epoch=3)
    assert [step for step in range(1, 14) if planned.due(step)] == due


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"eval_strategy": "steps"}, "--eval_strategy: there are no rows to evaluate on"),
        ({"eval_steps": 5}, "--eval_steps: there are no rows to evaluate on"),
        ({"do_eval": True}, "--do_eval: there are no rows"),
    ],
)
def test_asking_for_evaluation_without_rows_is_refused(flags, said):
    with pytest.raises(UsageError, match=said):
        check_evaluation(values(**flags), DataArguments())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"bf16_full_eval": True}, "--bf16_full_eval: toolkit.train evaluates in the precision"),
        ({"eval_steps": 50}, "--eval_steps 50 says when .*, and no was passed"),
        ({"eval_strategy": "epoch", "eval_steps": 0.5}, "--eval_steps 0.5 .*, and epoch was"),
    ],
)
def test_what_is_not_done_is_refused(flags, said):
    with pytest.raises(UsageError, match=said):
        check_evaluation(values(**flags), DataArguments(validation_split_percentage=5))


def test_steps_that_ask_for_evaluations_are_heard_with_their_strategy_and_without():
    data = DataArguments(validation_split_percentage=5)

    def values(*flags):
        return training_values(own_arguments(["--eval_steps", "2", *flags]))

    check_evaluation(values(), data)
    check_evaluation(values("--eval_strategy", "steps"), data)
    never = values("--eval_strategy", "no")
    with pytest.raises(UsageError, match="--eval_steps 2 .*no was passed"):
        check_evaluation(never, data)


def test_a_run_that_is_taken_apart_says_what_it_does_not_evaluate():
    held_out = DataArguments(validation_split_percentage=5, max_eval_samples=3)
    assert left_out_with_evidence(DataArguments(), samples=None) is None
    assert left_out_with_evidence(DataArguments(), samples=0) is None
    assert left_out_with_evidence(held_out, samples=2) == (
        "--sample_prompts, --validation_split_percentage: nothing is evaluated or sampled in a run "
        "with --evidence"
    )


def test_prompts_are_what_stands_before_the_first_learned_token_each_once():
    rows = Dataset.from_list(
        [
            {"input_ids": [1, 5, 6, 7], "labels": [IGNORED, IGNORED, 6, 7]},
            {"input_ids": [1, 5, 8, 8], "labels": [IGNORED, IGNORED, 8, 8]},
            {"input_ids": [1, 9, 9, 9, 9, 9], "labels": [1, 9, 9, 9, 9, 9]},
        ]
    )
    assert prompts_of(rows, 5) == [[1, 5], [1, 9, 9]]
    assert prompts_of(rows, 1) == [[1, 5]]
    long = Dataset.from_list([{"input_ids": [3] * 999 + [4], "labels": [IGNORED] * 999 + [4]}])
    assert [len(prompt) for prompt in prompts_of(long, 1)] == [256]


def test_a_comparison_refuses_validation_flags_that_are_wrong_once_and_before_its_runs(
    toolkit, tmp_path
):
    for flags, said in (
        (("--eval_steps", 2), "--eval_steps: there are no rows to evaluate on."),
        (("--validation_file", "gone.jsonl"), "--validation_file gone.jsonl is not there"),
    ):
        done = toolkit(
            *("compare", "--strategies", "single,ddp", "--output", tmp_path / "c", "--", *flags)
        )
        assert done.returncode == 2, done.stdout
        assert done.stdout.count(said) == 1
        assert not (tmp_path / "c").exists()
