"""Tensor groups, alone and several with FSDP2, train a model as one process trains it whole."""

import json
import math
import subprocess
import sys
from functools import cache

import launches
import pytest
import split_cases
import torch
from places import SCRIPTS
from transformers import AutoConfig

from toolkit.backends.matrices import part_of_model
from toolkit.engines.described import decoder_layers, described, splits_of
from toolkit.engines.tensor_parallel import plan_problem
from toolkit.errors import UsageError
from toolkit.measuring.meta_model import build
from toolkit.planning.models import family as planned
from toolkit.planning.models.architectures import shape_from_config
from toolkit.planning.models.counted import shape_of

GROUPS = {
    "one group": ("tensor", 2),
    "two groups that shard": ("tensor", 4),
    "two groups that average": ("tensor_ddp", 4),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, launch_environment):
    """Return what all ranks of a number of them kept, under each strategy that has it."""
    folder = tmp_path_factory.mktemp("splits")
    for name, case in split_cases.CASES.items():
        case.model().save_pretrained(folder / name)

    @cache
    def of_ranks(ranks):
        strategies = [name for name, count in GROUPS.values() if count == ranks]
        kept = folder / str(ranks)
        kept.mkdir()
        arguments = (ranks, kept / "store", folder, kept, *strategies)
        command = [sys.executable, SCRIPTS / "splits.py", *arguments]
        done = launches.run(command, environment=launch_environment, timeout=400)
        assert done.returncode == 0, done.stdout
        assert "view tensor" not in done.stdout
        return [torch.load(kept / f"{rank}.pt", weights_only=False) for rank in range(ranks)]

    return of_ranks


@pytest.fixture(params=GROUPS)
def of_ranks(request, trained):
    strategy, ranks = GROUPS[request.param]
    return [of_rank[strategy] for of_rank in trained(ranks)]


def test_groups_are_replicas_where_they_shard_nothing(trained):
    found = {
        (name, ranks): {of_rank[name]["llama"]["replicas"] for of_rank in trained(ranks)}
        for name, ranks in GROUPS.values()
    }
    assert found == {("tensor", 2): {1}, ("tensor", 4): {1}, ("tensor_ddp", 4): {2}}
    held = {name: trained(4)[0][name]["llama"]["held"] for name in ("tensor", "tensor_ddp")}
    assert held["tensor_ddp"] == pytest.approx(2 * held["tensor"], rel=0.02)


@pytest.mark.parametrize("name", split_cases.CASES)
def test_losses_gradients_norms_and_weights_equal_those_of_one_process(of_ranks, name):
    case = split_cases.CASES[name]
    model = case.model()
    optimizer = split_cases.optimizer_for(model)
    ranks = [outcomes[name] for outcomes in of_ranks]
    readers = {rank["reader"]: rank for rank in ranks}
    for step, window in enumerate(split_cases.windows(case)):
        items = split_cases.items_of(window)
        loss = sum(model(**batch, num_items_in_batch=items).loss for batch in window)
        loss.backward()
        shares = torch.stack([rank["losses"][step] for rank in readers.values()])
        torch.testing.assert_close(shares.sum(), loss.detach(), rtol=0, atol=2e-6)
        for parameter, weight in model.named_parameters():
            for rank in ranks:
                torch.testing.assert_close(
                    rank["gradients"][step][parameter], weight.grad, rtol=1e-4, atol=1e-6
                )
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), split_cases.LIMIT)
        assert norm > split_cases.LIMIT, "clipping is not active"
        for rank in ranks:
            torch.testing.assert_close(rank["norms"][step], norm, rtol=1e-5, atol=0)
        optimizer.step()
        optimizer.zero_grad()
    for parameter, weight in model.named_parameters():
        for rank in ranks:
            torch.testing.assert_close(
                rank["weights"][parameter], weight.detach(), rtol=0, atol=2e-5
            )
            torch.testing.assert_close(rank["put"][parameter], rank["weights"][parameter] + 1)


@pytest.mark.parametrize("name", split_cases.CASES)
def test_squares_of_all_ranks_count_each_part_of_a_gradient_once(of_ranks, name):
    ranks = [outcomes[name] for outcomes in of_ranks]
    total = sum(squares / copies for rank in ranks for _, squares, copies in rank["squares"])
    assert math.sqrt(total) == pytest.approx(float(ranks[0]["norms"][-1]), rel=1e-5)


def test_ranks_of_a_group_read_the_same_rows_and_no_two_groups_do(of_ranks):
    rows = {}
    for outcomes in of_ranks:
        rows.setdefault(outcomes["llama"]["reader"], []).append(outcomes["llama"]["rows"])
    assert [len(of_group) for of_group in rows.values()] == [2] * (len(of_ranks) // 2)
    assert all(of_group[0] == of_group[1] for of_group in rows.values())
    assert sorted(row for of_group in rows.values() for row in of_group[0]) == [*range(8)]


def test_the_guard_of_the_datas_order_knows_who_shares_layers(of_ranks):
    for rank in of_ranks:
        parts = rank["llama"]["parts"]
        assert parts["as they should"] is None
        assert parts["one each"] == "Rank 1 shares its layers with rank 0 and trains other rows."
        repeated = "Rank 2 trains the rows of rank 0." if len(of_ranks) > 2 else None
        assert parts["all the first"] == repeated


FAMILIES = (
    *("gemma", "gemma2", "gemma3_text", "gpt_neox", "gptj", "granite", "llama", "mistral", "olmo"),
    *("phi", "qwen2", "qwen3", "smollm3", "starcoder2", "cohere"),
)
REFUSED = ("phi3", "olmoe", "gpt2", "gpt_oss", "mixtral", "olmo2")


@pytest.fixture(scope="module")
def parts():
    command = [sys.executable, SCRIPTS / "split_shapes.py", "2", *FAMILIES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def shape(config):
    if config["model_type"] in planned.FAMILIES:
        return shape_from_config(config, name=config["model_type"])
    model = build(config, torch.float32)
    splits = splits_of(model, decoder_layers(model)[0])
    answer = described(model) | {"features": ("heads",), "splits": splits}
    return shape_of(answer, config["model_type"])


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_is_refused_whose_layers_are_not_all_split(family):
    config = AutoConfig.for_model(family).to_dict()
    with pytest.raises(UsageError, match="how tensor parallelism splits .*: (transformers|its)"):
        part_of_model(shape_from_config(config, name=family), 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_planner_knows_the_shape_of_each_part(parts, family):
    whole = shape(parts[family]["config"])
    split = {tensor.name: list(tensor.shape) for tensor in part_of_model(whole, 2).tensors}
    assert split == parts[family]["shapes"]


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        ("gpt2", {}, "gpt2 has no tensor-parallel plan"),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}, "1 key-value heads"),
        ("llama", {"num_attention_heads": 5, "hidden_size": 40}, "5 attention heads"),
        ("qwen2", {"vocab_size": 61, "tie_word_embeddings": True}, "61 tied embeddings"),
        ("qwen2", {"vocab_size": 64, "tie_word_embeddings": True}, None),
        ("llama", {"vocab_size": 61}, None),
        ("olmo_hybrid", {}, "transformers splits olmo_hybrid so that it trains another loss"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_by_name(kind, sizes, words):
    problem = plan_problem(AutoConfig.for_model(kind, **sizes), 2, 2)
    assert problem is None if words is None else words in problem


@pytest.mark.parametrize(
    ("kind", "refused"), [("olmo_hybrid", False), ("hrm_text", True), ("falcon_h1", True)]
)
def test_a_model_that_only_some_groups_train_wrongly_is_refused_for_these(kind, refused):
    problem = plan_problem(AutoConfig.for_model(kind), 2, 1)
    assert ("trains another loss" in (problem or "")) is refused
