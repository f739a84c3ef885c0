import csv
import io

import pytest

from toolkit.comparing.report.table_file import render_table


def read(results):
    return list(csv.DictReader(io.StringIO(render_table(results))))


def test_a_run_is_a_line_of_plain_numbers(full_results):
    results = full_results()
    lines = read(results)
    assert [line["strategy"] for line in lines] == [row["strategy"] for row in results["runs"]]
    ddp = lines[1]
    assert float(ddp["tokens_per_second"]) == 1000.0
    assert float(ddp["speed_times_baseline"]) == 1.0
    assert int(ddp["states_bytes"]) == 2**30
    assert int(ddp["sent_gradients_bytes"]) == int(ddp["predicted_sent_bytes"]) == 2**28
    assert float(ddp["loss_gap_max"]) == 1.2e-6
    assert (ddp["gate_loss"], ddp["baseline"], ddp["control"]) == ("true", "true", "false")


COLUMNS = """
strategy engine status run control baseline rehearsal num_processes per_device_train_batch_size
gradient_accumulation_steps starts speed_times_baseline speed_up scaling_efficiency noise_share
final_loss tokens_per_second supervised_tokens_per_second step_median_seconds step_p90_seconds
data_median_seconds data_p90_seconds forward_median_seconds forward_p90_seconds
backward_median_seconds backward_p90_seconds optimizer_median_seconds optimizer_p90_seconds
other_median_seconds other_p90_seconds start_seconds build_seconds cache_seconds
first_step_seconds compile_seconds warm_up_steps save_seconds run_seconds counted_peak_phase
counted_peak_bytes schedule pipeline_micro_batches idle_slots slots bubble expected_bubble
server_workers server_received_bytes server_sent_bytes worker_sent_bytes worker_received_bytes
all_reduce_bytes server_states_bytes server_buffer_bytes worker_states_bytes
tokens_per_second_least tokens_per_second_most tokens_per_second_spread_share
tflops_per_gpu mfu gpu_hours dollars dollars_per_million_tokens loss_gap_max loss_gap_mean
grad_norm_gap weight_gap weight_difference weight_difference_tensor gradient_difference
gradient_difference_tensor eval_loss_gap parameters_bytes master_bytes gradients_bytes
optimizer_bytes device_peak_bytes device_peak_reserved_bytes host_peak_bytes host_shared_bytes
nvme_bytes predicted_parameters_bytes predicted_master_bytes predicted_gradients_bytes
predicted_optimizer_bytes predicted_device_peak_low_bytes predicted_device_peak_high_bytes
predicted_counted_peak_low_bytes predicted_counted_peak_high_bytes predicted_sent_bytes
room_bytes predicted_over_low_bytes predicted_over_high_bytes gate_loss gate_grad_norm
gate_weights gate_data gate_evaluation states_bytes states_least_bytes states_most_bytes
device_peak_least_bytes device_peak_most_bytes ended_peak_least_bytes ended_peak_most_bytes
counted_peak_parameters_bytes counted_peak_master_bytes counted_peak_gradients_bytes
counted_peak_optimizer_bytes counted_peak_activations_bytes counted_peak_other_bytes
sent_parameters_bytes sent_gradients_bytes sent_activations_bytes sent_other_bytes
sent_wire_bytes beside_the_papers
eval_loss_before eval_perplexity_before eval_loss_after eval_perplexity_after eval_rows
eval_tokens ranks_out_of_memory reason fix not_measured
"""


def test_the_columns_have_these_names_in_this_order(full_results):
    """Scripts of others read them: a name that is to change needs a new schema."""
    header = render_table(full_results()).splitlines()[0]
    assert header.split(",") == COLUMNS.split()


def test_every_later_number_has_a_column(full_results):
    ddp, fsdp = (read(full_results(rehearsal=False))[number] for number in (1, 4))
    assert fsdp["run"] == "fsdp-trainer-x4"
    assert (float(fsdp["speed_up"]), float(fsdp["scaling_efficiency"])) == (2.4, 0.6)
    assert (ddp["speed_up"], ddp["starts"], ddp["noise_share"]) == ("", "3", "0.031")
    for name, value in {
        "supervised_tokens_per_second": 800.0,
        "tokens_per_second_spread_share": 0.03,
        "backward_median_seconds": 0.25,
        "start_seconds": 75.0,
        "save_seconds": 1.5,
        "tflops_per_gpu": 123.4,
        "mfu": 0.395,
        "gpu_hours": 0.0067,
        "dollars": 0.02,
        "dollars_per_million_tokens": 1.23,
        "device_peak_reserved_bytes": 6 * 2**28,
        "counted_peak_activations_bytes": 2**27,
        "predicted_counted_peak_high_bytes": 5 * 2**28,
        "room_bytes": 2**34,
        "predicted_over_high_bytes": -(2**32),
        "sent_wire_bytes": 2**28 + 24,
        "weight_difference": 2e-6,
    }.items():
        assert float(ddp[name]) == value, name
    assert ddp["weight_difference_tensor"] == "model.layers.0.mlp.weight"
    assert (ddp["beside_the_papers"], ddp["counted_peak_phase"]) == ("equal", "backward")


def test_of_a_run_that_ran_out_the_line_says_which_ranks(full_results):
    failed = read(full_results())[-1]
    assert failed["ranks_out_of_memory"] == "1"
    assert int(failed["ended_peak_least_bytes"]) == 2**34
    assert failed["fix"] == "Use a smaller batch."


def test_results_in_which_little_was_counted_have_the_same_columns(full_results, bare_results):
    assert list(read(full_results())[0]) == list(read(bare_results())[0])


def test_what_is_empty_has_its_reason_at_the_end(full_results):
    failed = read(full_results())[-1]
    assert failed["tokens_per_second"] == ""
    assert "tokens_per_second: oom: rank 1 failed" in failed["not_measured"]


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@x", "\t=1", "  =1", "|x", "%x", "＝1", "＋1", "－1", "＠x"]
)
def test_no_text_is_a_formula(make_results, make_row, text):
    line = read(make_results(make_row(strategy=text, reason=text)))[1]
    assert line["strategy"].startswith("'")
    assert line["reason"].startswith("'")


def test_negative_numbers_stay_numbers(make_results, make_row):
    row = make_row(loss_gap={"max": 1e-6, "mean": -1e-7})
    assert read(make_results(row))[1]["loss_gap_mean"] == "-1e-07"


def test_a_line_stays_a_line(make_results, make_row):
    text = render_table(make_results(make_row(reason='two\nlines, "quoted"')))
    assert len(text.splitlines()) == 3


def test_without_runs_there_is_still_a_header(make_results):
    assert render_table(make_results(runs=[], control=None)).startswith("strategy,engine,status")
