"""Two real processes train under every strategy; four under `fsdp_hybrid`, eight `three_d`."""

import itertools
import json
import math
from collections import Counter

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from toolkit import environment
from toolkit.comparing.predicted import STATES
from toolkit.comparing.report.sections.traffic import difference_in_words
from toolkit.data.arguments import DataArguments
from toolkit.data.dataset import prepare_data, prepare_validation
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.estimate import estimate_memory, state_bytes
from toolkit.planning.models.architectures import shape_from_config
from toolkit.planning.of_run import job_of
from toolkit.planning.speed.traffic import collectives, textbook
from toolkit.records.record import FILLER_ID, read_record
from toolkit.records.results import read_results
from toolkit.strategies import STRATEGIES
from toolkit.training.model import build_model

pytestmark = pytest.mark.short

USUAL = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp")
OTHERS = tuple(name for name in STRATEGIES if name not in USUAL)

ROWS = 21
"""Two steps of 8 and one of 5: the last of each epoch is filled up."""

STEPS = 7
"""Two whole epochs and a step of a third."""

EVAL_ROWS = 13

FLAGS = (
    *("--max_train_samples", ROWS, "--validation_split_percentage", 1),
    # After each step, the one before the probe too; 13 rows are no multiple of 3.
    *("--max_eval_samples", EVAL_ROWS, "--eval_steps", 1, "--per_device_eval_batch_size", 3),
)

DATA = DataArguments(
    max_train_samples=ROWS, validation_split_percentage=1, max_eval_samples=EVAL_ROWS
)
"""What the flags say."""


@pytest.fixture(scope="module")
def usual(toolkit, tmp_path_factory):
    """The six under both engines, parity on ragged rows and speed on packed ones."""
    folder = tmp_path_factory.mktemp("usual") / "runs"
    done = toolkit(
        *("compare", "--strategies", ",".join(USUAL), "--engine", "both", "--output", folder),
        *("--max_steps", STEPS, "--throughput_steps", 4, "--", *FLAGS),
    )
    return done, folder, read_results(folder)


@pytest.fixture(scope="module")
def others(toolkit, tmp_path_factory):
    """The others, evaluated less often. Their control is added by the comparison."""
    folder = tmp_path_factory.mktemp("others") / "runs"
    done = toolkit(
        *("compare", "--strategies", ",".join(OTHERS), "--output", folder),
        *("--max_steps", STEPS, "--throughput_steps", 0, "--", *FLAGS, "--eval_steps", 3),
    )
    return done, folder, read_results(folder)


def rows(comparison):
    return {(row["strategy"], row["engine"]): row for row in comparison[2]["runs"]}


def test_six_strategies_and_both_engines_are_twelve_rows_with_every_gate_held(usual):
    done, _, results = usual
    assert done.returncode == 0, done.stdout
    found = rows(usual)
    assert set(found) == {(name, engine) for name in USUAL for engine in ("trainer", "loop")}
    for key, row in found.items():
        assert row["status"] == "ok", (key, row["reason"])
        assert row["gates"].keys() >= {"loss", "grad_norm", "weights", "data"} or key == (
            "single",
            "trainer",
        )
        assert all(row["gates"].values()), (key, row["broken"])
        assert_equal_gradients(row)
        assert row["tokens_per_second"] > 0
    assert results["control"]["strategy"] == "single"


def test_the_others_train_too_or_say_truly_why_not(others):
    done, folder, _ = others
    assert done.returncode == 0, done.stdout
    found = rows(others)
    assert {name for name, _ in found} == {*OTHERS, "single"}
    for (name, _), row in found.items():
        missing = environment.missing_for(STRATEGIES[name])
        if missing is not None:
            assert row["status"] == "skipped"
            assert row["reason"] == missing
            continue
        assert row["status"] == "ok", (name, row["reason"], row["tail"])
        assert all(row["gates"].values()), (name, row["broken"])
        assert_equal_gradients(row)
    assert found["fsdp_hybrid", "trainer"]["num_processes"] == 4
    assert "replicas 2 x tensor 2" in (folder / "report.md").read_text()
    mesh = found["tensor_ddp", "loop"]
    assert read_record(folder / mesh["folder"])["data_parallel_size"] == 2


def assert_equal_gradients(row):
    """Far below the limit, wherever shards, flat partitions and offload keep the gradients."""
    if row["strategy"] != "single":
        assert row["gradient_difference"]["value"] < 2e-5, (row["name"], row)


def test_every_row_is_trained_exactly_once_in_each_epoch(
    usual, others, launch_environment, monkeypatch
):
    monkeypatch.setenv("TOOLKIT_CACHE", launch_environment["TOOLKIT_CACHE"])
    left = prepare_data(DATA, build_model()).load()["sample_id"][:]
    assert len(set(left)) == ROWS
    for _, folder, results in (usual, others):
        for row in results["runs"]:
            if row["status"] == "skipped":
                continue
            steps = read_record(folder / row["folder"])["sample_ids"]
            for epoch in (steps[0:3], steps[3:6]):
                read = Counter(i for step in epoch for rank in step for i in rank)
                assert read.pop(FILLER_ID) == 3 * 8 - ROWS, row["name"]
                assert read == Counter(left), row["name"]


def test_each_strategy_proves_what_engaged(usual, others):
    for (name, _), row in {**rows(usual), **rows(others)}.items():
        if row["status"] == "skipped":
            continue
        strategy = STRATEGIES[name]
        engaged = row["attestation"]["engaged"]
        ranks = row["num_processes"]
        assert engaged["ranks"] == list(range(ranks))
        assert engaged["zero_stage"] == strategy.zero_stage
        assert engaged["replicas"] == strategy.replicas
        shards = strategy.shards(ranks)
        wanted = 1 / shards if strategy.shards_parameters else 1
        assert engaged["sharded_fraction"] == pytest.approx(wanted, abs=0.01)
        # A small model must not stay whole below a threshold made for large ones.
        assert engaged["resident_fraction"] == pytest.approx(wanted, abs=0.01)
        assert (engaged["offload_optimizer"], engaged["offload_parameters"]) == (
            strategy.offload_optimizer,
            strategy.offload_parameters,
        )
        assert engaged["model_split_by"] == strategy.model_split_by(ranks)
        if strategy.backend == "fsdp":
            assert engaged["reshard_after_forward"] is strategy.reshard_after_forward
        assert engaged["gradient_clipping"] == 1.0
        assert row["attestation"]["held"] is True


def test_state_bytes_equal_their_formula(usual):
    """fp32: parameters 4, masters 4 under DeepSpeed, gradients 4, AdamW 8, halved where sharded."""
    found = rows(usual)
    folder = usual[1] / "single-trainer-1"
    parameters = read_record(folder)["model"]["parameters"]
    tensors = len(_keys(folder / "final" / "model.safetensors"))
    for engine in ("trainer", "loop"):
        bytes_of = {name: found[name, engine]["memory"] for name in USUAL}
        whole = 4 * parameters
        for name in ("single", "ddp"):
            assert bytes_of[name]["parameters_bytes"] == whole
            assert bytes_of[name]["gradients_bytes"] == whole
            assert bytes_of[name]["optimizer_bytes"] == 2 * whole + 4 * tensors
            assert bytes_of[name]["master_bytes"] == 0
        assert bytes_of["fsdp"]["parameters_bytes"] == whole // 2
        assert bytes_of["fsdp"]["gradients_bytes"] == whole // 2
        assert bytes_of["fsdp"]["optimizer_bytes"] == whole + 4 * tensors
        for name in ("zero1", "zero2"):
            assert bytes_of[name]["parameters_bytes"] == whole
        for name in ("zero1", "zero2", "zero3"):
            assert bytes_of[name]["master_bytes"] == whole // 2
            # One step counter for each of the two groups: decayed and not.
            assert bytes_of[name]["optimizer_bytes"] == whole + 2 * 4
        assert bytes_of["zero3"]["gradients_bytes"] == whole // 2
        # Half of everything, and the norms, which stay whole beside their halves.
        persistent = 4 * sum(
            size for size in _sizes(folder / "final" / "model.safetensors") if size <= 192
        )
        assert bytes_of["zero3"]["parameters_bytes"] == whole // 2 + persistent
        # Sharded gradients, each group padded to DeepSpeed's alignment.
        for name in ("zero1", "zero2"):
            assert 0 <= bytes_of[name]["gradients_bytes"] - whole // 2 <= 1024


def test_the_counted_peak_lies_where_the_planner_expects_it(usual, others):
    outside, widths = {}, {}
    for _, _, results in (usual, others):
        for row in results["runs"]:
            if row["status"] == "skipped":
                continue
            ends, counted = row["predicted"]["counted_bytes"], row["peak"]["total_bytes"]
            if row["predicted"]["errors"]["counted_bytes"]:
                outside[row["name"]] = (counted, ends)
            widths[row["name"]] = (ends["high"] - ends["low"]) / counted
    assert not outside
    assert max(widths.values()) < 0.16, widths


def test_the_order_of_peaks_is_the_one_that_theory_gives(usual):
    found = rows(usual)
    for engine in ("trainer", "loop"):
        peaks = {name: found[name, engine]["peak"]["total_bytes"] for name in USUAL}
        order = (("single", "ddp"), ("zero1",), ("zero2",), ("zero3", "fsdp"))
        for more, less in itertools.pairwise(order):
            lower = max(peaks[name] for name in less)
            assert min(peaks[name] for name in more) > lower, (engine, peaks)


def test_bytes_on_the_wire_equal_the_planner_and_the_rest_is_listed_apart(usual, others):
    config = json.loads((usual[1] / "single-trainer-1" / "final" / "config.json").read_text())
    model = shape_from_config(config, name="built in")
    for (name, engine), row in {**rows(usual), **rows(others)}.items():
        if row["status"] == "skipped":
            continue
        job = PlannedJob(
            model=model,
            strategy=STRATEGIES[name],
            gpus=row["num_processes"],
            accumulation=row["gradient_accumulation_steps"],
            precision="no",
            sequence=DATA.length,
        )
        found = row["traffic"]
        assert found["disagreements"] == []
        assert (found["step"], found["micro_batches"]) == (2, job.accumulation)
        psi = model.parameters
        papers = textbook(job.strategy, trained=psi, everything=psi, ranks=job.gpus)
        assert found["textbook_elements"] == papers
        assert "not known" not in difference_in_words(row), (name, difference_in_words(row))
        counted, wanted = Counter(), Counter()
        for each in found["collectives"]:
            if each["purpose"] in ("parameters", "gradients"):
                key = (each["kind"], each["purpose"], each["dtype"], each["ranks"])
                counted[key] += each["payload_bytes"]
        for each in collectives(job):
            if each.purpose in ("parameters", "gradients"):
                key = (each.kind, each.purpose, "float32", each.ranks)
                wanted[key] += each.payload_bytes
        assert counted == wanted, (name, engine)
        purposes = {each["purpose"] for each in found["collectives"]}
        assert purposes.isdisjoint({"other", "bitmap"}), (name, engine)
        assert ("buffers" in purposes) is (name == "ddp")


def test_what_is_sent_differs_from_the_papers_in_what_is_known_to_differ(usual, others):
    psi = read_record(usual[1] / "single-trainer-1")["model"]["parameters"]
    found = {**rows(usual), **rows(others)}
    for engine in ("trainer", "loop"):
        traffic = {name: found[name, engine]["traffic"] for name in USUAL}
        assert traffic["ddp"]["sent_elements"] == traffic["ddp"]["textbook_elements"] == 2 * psi
        # DeepSpeed all-reduces where the paper reduce-scatters, ZeRO-2 for each of 2 micro-batches.
        assert traffic["zero1"]["sent_elements"] == 2 * psi + psi
        assert traffic["zero1"]["textbook_elements"] == 2 * psi
        assert traffic["zero2"]["sent_elements"] == 2 * 2 * psi + psi
        equal = {name for name in USUAL if difference_in_words(found[name, engine]) == "equal"}
        assert equal == {"ddp"}
    # Gathered once for each micro-batch.
    kept = found["fsdp_grad_op", "trainer"]["traffic"]
    assert kept["sent_elements"] == 2 * psi + psi
    assert kept["textbook_elements"] == psi + psi


def test_the_planner_predicts_the_states_of_every_rank_to_the_byte(usual, others):
    for _, folder, results in (usual, others):
        for row in results["runs"]:
            if row["status"] == "skipped":
                continue
            record = read_record(folder / f"{row['strategy']}-{row['engine']}-1")
            counted = [{name: rank["memory"][name] for name in STATES} for rank in row["per_rank"]]
            job = job_of(record)
            predicted = [state_bytes(job, rank["rank"]).counted() for rank in record["per_rank"]]
            assert predicted == counted, row["strategy"]
            exact = dict.fromkeys((*STATES, "counted_bytes", "traffic_bytes"), 0)
            assert row["predicted"]["errors"] == exact, row["strategy"]
            # Buffers don't hide what is sharded: the states of a model this size are more.
            estimate = estimate_memory(job)
            held = estimate.states.total
            reduced_in = sum(t.bytes.high for t in estimate.terms if "reduced in" in t.name)
            assert held.in_memory + held.nvme > 2 * reduced_in, row["strategy"]


def test_every_final_folder_loads_as_the_model_that_was_trained(usual, others):
    from transformers import AutoTokenizer

    for _, folder, results in (usual, others):
        for row in results["runs"]:
            if row["status"] == "skipped":
                continue
            final = folder / f"{row['strategy']}-{row['engine']}-1" / "final"
            model, report = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
            assert not report["missing_keys"], row["strategy"]
            assert not report["unexpected_keys"], row["strategy"]
            tokenizer = AutoTokenizer.from_pretrained(final)
            prompt = tokenizer("def add(a, b):\n", return_tensors="pt")
            assert model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] > 3


def test_evaluations_are_equal_across_strategies_and_to_a_plain_computation(
    usual, others, launch_environment, monkeypatch
):
    found = {**rows(usual), **rows(others)}
    control = rows(usual)["single", "trainer"]["evaluation"]
    assert [each["step"] for each in control] == list(range(STEPS + 1))
    for key, row in found.items():
        if row["status"] == "skipped":
            continue
        assert row["gates"].get("evaluation", key == ("single", "trainer")), key
        assert row["eval_loss_gap"] is None or row["eval_loss_gap"] <= 1e-5, key
        assert {each["rows"] for each in row["evaluation"]} == {EVAL_ROWS}, key
        assert {each["tokens"] for each in row["evaluation"]} == {control[0]["tokens"]}, key
        assert row["evaluation"][-1]["loss"] < row["evaluation"][0]["loss"], key
    monkeypatch.setenv("TOOLKIT_CACHE", launch_environment["TOOLKIT_CACHE"])
    for name in ("zero3-loop-1", "fsdp-trainer-1"):
        loss, tokens = plain_loss(usual[1] / name / "final")
        last = read_record(usual[1] / name)["evaluation"][-1]
        assert (last["loss"], last["tokens"]) == (pytest.approx(loss, abs=1e-5), tokens), name
        assert last["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4), name


def plain_loss(folder):
    """One row after the other in one process, with the folder that was saved."""
    data = prepare_validation(DATA, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in data.load():
            scores = model(torch.tensor([row["input_ids"]])).logits[0, :-1].double()
            labels = torch.tensor(row["labels"][1:])
            total += float(torch.nn.functional.cross_entropy(scores, labels, reduction="sum"))
            tokens += int((labels != -100).sum())
    return total / tokens, tokens


def test_samples_are_equal_across_strategies_and_change_with_training(usual, others):
    control = rows(usual)["single", "trainer"]["samples"]
    assert len(control) == 2
    for key, row in {**rows(usual), **rows(others)}.items():
        if row["status"] != "skipped":
            assert row["samples"] == control, key
    assert all("):" in each["prompt"] for each in control)
    assert all(each["before"] != each["after"] for each in control)


def test_the_report_shows_evaluations_and_samples(usual):
    text = (usual[1] / "report.md").read_text()
    assert "| eval loss | perplexity |" in text
    assert "## Evaluation" in text
    assert "| gate: evaluation |" in text
    assert "## Samples" in text
    assert text.count("| every run |") == 2


def test_every_final_folder_has_a_card_of_its_own_training(usual, others):
    for _, folder, results in (usual, others):
        for row in results["runs"]:
            if row["status"] == "skipped":
                continue
            text = (folder / row["folder"] / "final" / "README.md").read_text()
            last = row["evaluation"][-1]
            assert f"| {last['loss']:.4f} |" in text, row["name"]
            assert f"{row['final_loss']:.4f} (last step)" in text, row["name"]
            assert f"accelerate_configs/{row['strategy']}.yaml" in text, row["name"]
            assert str(folder) not in text


def test_a_run_folder_holds_the_command_that_anyone_can_run_again(usual):
    folder = usual[1] / "zero2-loop-1"
    command = (folder / "command.txt").read_text()
    assert "accelerate launch --config_file " in command
    assert "-m toolkit.train" in command
    for name in ("spec.json", "stdout.log", "steps.jsonl", "zero2.yaml", "zero2.json"):
        assert (folder / name).stat().st_size > 0, name


def test_the_report_has_no_empty_cell(usual):
    text = (usual[1] / "report.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) > 12
    assert "predicted" in text
    # Every row's traffic is what the planner said.
    assert text.count("| equal |") == 12
    for line in table:
        assert all(cell.strip() for cell in line.strip("|").split("|")), line


def test_time_is_told_by_phase_and_warm_up_apart(usual):
    for key, row in rows(usual).items():
        assert set(row["phases"]) == {"data", "forward", "backward", "optimizer", "other"}, key
        for phase in ("forward", "backward", "optimizer"):
            assert 0 < row["phases"][phase]["median"] < row["step_seconds"]["p90"], (key, phase)
        # A forked rank may start in less time than its first step takes.
        assert row["warm_up"]["start_seconds"] > 0, key
        assert row["warm_up"]["first_step_seconds"] > 0, key
        assert row["save_seconds"] > 0, key
        assert 0 < row["supervised_tokens_per_second"] < row["tokens_per_second"], key


def test_the_same_comparison_again_runs_nothing(usual, toolkit):
    _, folder, before = usual
    again = toolkit(
        *("compare", "--strategies", ",".join(USUAL), "--engine", "both", "--output", folder),
        *("--max_steps", STEPS, "--throughput_steps", 4, "--", *FLAGS),
        timeout=60,
    )
    assert again.returncode == 0, again.stdout
    assert read_results(folder)["runs"] == before["runs"]


def _keys(path):
    with safe_open(path, "pt") as file:
        return list(file.keys())


def _sizes(path):
    with safe_open(path, "pt") as file:
        return [file.get_tensor(key).numel() for key in file.keys()]  # noqa: SIM118
