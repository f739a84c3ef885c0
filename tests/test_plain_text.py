"""Plain text, whose first tokens are learned: nothing predicts them, and no engine counts them."""

import json
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from toolkit.data.arguments import DataArguments
from toolkit.data.dataset import prepare_data
from toolkit.records.record import read_record
from toolkit.records.results import read_results

MAX_LENGTH = 48


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts of 3 to some 30 tokens, each with another beginning."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = [{"text": f"{chr(65 + n % 26)}{n} " + "and so on " * (n % 7)} for n in range(70)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("packing", "strategies"), [("none", "single,ddp"), ("best_fit", "single,fsdp")]
)
def test_both_engines_train_on_what_follows_the_first_token_of_each_text(
    packing,
    strategies,
    texts,
    toolkit,
    small_model,
    small_training,
    tmp_path,
    launch_environment,
    monkeypatch,
):
    done = toolkit(
        *("compare", "--strategies", strategies, "--engine", "both", "--max_steps", 3),
        *("--throughput_steps", 0, "--global_batch_size", 8, "--output", tmp_path / "runs", "--"),
        *("--train_file", texts, "--max_length", MAX_LENGTH, "--packing", packing),
        *small_training,
    )
    assert done.returncode == 0, done.stdout
    monkeypatch.setenv("TOOLKIT_CACHE", launch_environment["TOOLKIT_CACHE"])
    data = DataArguments(train_file=str(texts), max_length=MAX_LENGTH, packing=packing)
    rows = prepare_data(data, small_model).load()
    by_id = dict(zip(rows["sample_id"], rows, strict=True))
    model = AutoModelForCausalLM.from_pretrained(small_model)
    runs = read_results(tmp_path / "runs")["runs"]
    assert len(runs) == 4
    for run in runs:
        assert run["status"] == "ok", run["reason"]
        assert all(run["gates"].values()), run["broken"]
        record = read_record(tmp_path / "runs" / run["folder"])
        first = [by_id[number] for rank in record["sample_ids"][0] for number in rank]
        assert len(first) == 8
        assert record["losses"][0] == pytest.approx(mean_loss(model, first), rel=1e-6), run["name"]


def mean_loss(model, rows):
    """Return the mean over all tokens but each text's first, one text after the other."""
    losses = []
    for row in rows:
        starts = [0]
        if "position_ids" in row:
            starts = [at for at, place in enumerate(row["position_ids"]) if place == 0]
        for start, end in pairwise([*starts, len(row["input_ids"])]):
            text = torch.tensor(row["input_ids"][start:end])
            with torch.no_grad():
                scores = model(text.unsqueeze(0)).logits[0, :-1].double()
            losses.append(torch.nn.functional.cross_entropy(scores, text[1:], reduction="none"))
    return torch.cat(losses).mean().item()
