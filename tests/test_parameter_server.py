"""Three real ranks train with a parameter server, and two train adapters over 4-bit weights."""

import pytest
import torch
from transformers import Trainer

from toolkit.configs.optimizers import EVERYWHERE, OF_WHOLE, OF_WHOLE_OR_FLAT
from toolkit.engines.parameter_server import step_on_nothing
from toolkit.errors import UsageError
from toolkit.records.results import read_results
from toolkit.training.arguments import own_arguments, training_arguments, training_values
from toolkit.training.preflight import preflight


@pytest.fixture(scope="module")
def three(toolkit, small_training, tmp_path_factory):
    folder = tmp_path_factory.mktemp("three") / "runs"
    done = toolkit(
        *("compare", "--strategies", "ddp,parameter_server", "--engine", "loop"),
        *("--num_processes", 3, "--global_batch_size", 12, "--output", folder),
        *("--max_steps", 4, "--throughput_steps", 0, "--", *small_training),
    )
    assert done.returncode == 0, done.stdout
    return folder, {row["strategy"]: row for row in read_results(folder)["runs"]}


def test_three_ranks_train_as_one_process_and_only_rank_0_holds_the_optimizer(three):
    _, rows = three
    row = rows["parameter_server"]
    assert row["status"] == "ok", row["reason"]
    assert row["gates"] == dict.fromkeys(("loss", "grad_norm", "weights", "data"), True)
    engaged = row["attestation"]["engaged"]
    assert engaged["servers"] == [0]
    assert engaged["optimizer_fractions"] == [1.0, 0.0, 0.0]
    held = [rank["memory"]["optimizer_bytes"] for rank in row["per_rank"]]
    assert held == [rows["ddp"]["memory"]["optimizer_bytes"], 0, 0]
    assert not any(row["predicted"]["errors"].values()), row["predicted"]["errors"]


def test_all_bytes_of_the_workers_are_at_the_server_and_the_report_says_so(three):
    folder, rows = three
    load, ddp = rows["parameter_server"]["server"], rows["ddp"]["traffic"]["collectives"]
    (reduced,) = (calls for calls in ddp if calls["purpose"] == "gradients")
    weights = reduced["payload_bytes"]
    assert load["received_bytes"] == load["sent_bytes"] == load["expected_bytes"] == 2 * weights
    assert load["worker_sent_bytes"] == load["worker_received_bytes"] == weights
    assert load["all_reduce_bytes"] == reduced["wire_bytes"] == pytest.approx(4 / 3 * weights)
    embedding = 4 * 1024 * 128
    assert load["buffer_bytes"] == 2 * embedding
    assert load["states_bytes"] > 1.9 * load["worker_states_bytes"]
    assert rows["ddp"]["server"] is None
    text = (folder / "report.md").read_text()
    section = text.split("## Parameter server of one optimizer step")[1].split("\n## ")[0]
    assert "1.50 times as much as at each rank of an all-reduce" in section


def test_adapters_alone_are_pushed_and_pulled_over_4_bit_weights(toolkit, small_training, tmp_path):
    done = toolkit(
        *("compare", "--strategies", "parameter_server", "--precision", "bf16"),
        *("--output", tmp_path / "runs", "--max_steps", 3, "--throughput_steps", 0),
        *("--", "--method", "qlora", *small_training),
    )
    assert done.returncode == 0, done.stdout
    rows = {row["strategy"]: row for row in read_results(tmp_path / "runs")["runs"]}
    row = rows["parameter_server"]
    assert row["status"] == "ok", row["reason"]
    assert all(row["gates"].values()), row["broken"]
    assert row["server"]["received_bytes"] == 4 * row["traffic"]["trained_elements"]
    assert row["server"]["received_bytes"] < row["memory"]["parameters_bytes"] / 2
    errors = dict(row["predicted"]["errors"])
    # The activations of 4-bit weights are an estimate, with or without a server.
    control = rows["single"]["predicted"]["errors"]["counted_bytes"]
    assert errors.pop("counted_bytes") == pytest.approx(control, abs=0.005)
    assert not any(errors.values()), errors


@pytest.mark.parametrize("name", [*EVERYWHERE, *OF_WHOLE_OR_FLAT, *OF_WHOLE])
def test_a_worker_can_call_the_step_of_every_optimizer_and_nothing_moves(name, tmp_path):
    args = training_arguments(
        training_values(own_arguments([f"--optim={name}", f"--output_dir={tmp_path}"]))
    )
    model = torch.nn.Linear(3, 2)
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
    optimizer = kind([{"params": [*model.parameters()], "weight_decay": 0.1}], **options)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.ones(1, 3)).sum().backward()
    step_on_nothing(optimizer)
    optimizer.step()
    assert not optimizer.state
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    ("flags", "ranks", "reason"),
    [
        ([], 1, "parameter_server needs at least 2 processes"),
        (["--fp16", "true"], 2, "parameter_server does not work with --fp16"),
        (["--sync_each_batch", "true"], 2, "parameter_server, whose workers push once a step"),
        (["--ddp_bucket_view", "true"], 2, "--ddp_bucket_view is for ddp"),
    ],
)
def test_a_request_that_a_server_cannot_meet_is_refused(flags, ranks, reason):
    flags = [
        "--max_train_samples",
        "40",
        "--engine",
        "loop",
        "--gradient_accumulation_steps",
        "2",
        *flags,
    ]
    with pytest.raises(UsageError, match=reason):
        preflight(flags, num_processes=ranks, strategies=["parameter_server"])
