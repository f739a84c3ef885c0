"""Two real processes train under every strategy; four under `fsdp_hybrid`, eight `three_d`."""

import itertools
import json
import math
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
from toolkit.planning.speed.traffic import collectives
from toolkit.records.record import FILLER_ID, read_record
from toolkit.records.results import Results, read_results
from toolkit.strategies import STRATEGIES

pytestmark = pytest.mark.short

USUAL = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp")
OTHERS = tuple(name for name in STRATEGIES if name not in USUAL)

ROWS = 21
"""Two steps of 8 and one of 5: the last of each epoch is filled up."""

STEPS = 7
"""Two whole epochs and a step of a third."""

EVAL_ROWS = 13

FLAGS = (
    *("--max_train_samples", ROWS, "--validation_split_percentage", 1, "--sample_prompts", 1),
    # 13 rows are no multiple of 3.
    *("--max_eval_samples", EVAL_ROWS, "--per_device_eval_batch_size", 3),
)
EVAL_STEPS = {"trainer": 1, "loop": 1, "others": 3}
"""Of the six after each step, the one before the probe too."""

DATA = DataArguments(
    max_train_samples=ROWS, validation_split_percentage=1, max_eval_samples=EVAL_ROWS
)
"""What the flags say."""

OPTIONS = {
    # Parity on ragged rows, and speed on packed ones.
    "trainer": (USUAL, "--engine", "trainer", "--throughput_steps", 4),
    "loop": (USUAL, "--engine", "loop", "--throughput_steps", 4),
    "others": (OTHERS, "--throughput_steps", 0),
}
"""The comparisons: the six under each engine, and the others; a control is added to those."""

BUILT_IN = "trainer"
"""The comparison of the built-in model, in which sharded states are more than what passes by."""

BY_ENGINE = ("trainer", pytest.param("loop", marks=pytest.mark.long))


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A comparison that has ended."""

    kind: str
    done: subprocess.CompletedProcess[str]
    folder: Path
    results: Results

    @property
    def rows(self):
        return {row["strategy"]: row for row in self.results["runs"]}

    @property
    def trained(self):
        """Rows of the strategies that this machine can run."""
        return {name: row for name, row in self.rows.items() if row["status"] != "skipped"}

    def folder_of(self, strategy):
        return self.folder / self.rows[strategy]["folder"]


@pytest.fixture(scope="module")
def compare(toolkit, small_training):
    """Start one of the comparisons."""

    def start(kind, folder, timeout=1200):
        strategies, *options = OPTIONS[kind]
        model = () if kind == BUILT_IN else small_training
        done = toolkit(
            *("compare", "--strategies", ",".join(strategies), "--output", folder, *options),
            *("--max_steps", STEPS, "--", *model, *FLAGS, "--eval_steps", EVAL_STEPS[kind]),
            timeout=timeout,
        )
        return Compared(kind=kind, done=done, folder=folder, results=read_results(folder))

    return start


@pytest.fixture(scope="module")
def compared(compare, tmp_path_factory):
    """Return one of the comparisons, which is made once."""
    return cache(lambda kind: compare(kind, tmp_path_factory.mktemp(kind) / "runs"))


@pytest.fixture(params=BY_ENGINE)
def usual(request, compared):
    return compared(request.param)


@pytest.fixture
def others(compared):
    return compared("others")


@pytest.fixture(params=["others", *BY_ENGINE])
def comparison(request, compared):
    return compared(request.param)


def test_six_strategies_of_an_engine_are_six_rows_with_every_gate_held(usual):
    assert usual.done.returncode == 0, usual.done.stdout
    assert [(row["strategy"], row["engine"]) for row in usual.results["runs"]] == [
        (name, usual.kind) for name in USUAL
    ]
    for name, row in usual.rows.items():
        assert row["status"] == "ok", (name, row["reason"])
        assert name == "single" or row["gates"].keys() >= {"loss", "grad_norm", "weights", "data"}
        assert all(row["gates"].values()), (name, row["broken"])
        assert_equal_gradients(row)
        assert row["tokens_per_second"] > 0
    assert usual.results["control"]["strategy"] == "single"


def test_the_others_train_too_or_say_truly_why_not(others):
    assert others.done.returncode == 0, others.done.stdout
    assert others.rows.keys() == {*OTHERS, "single"}
    for name, row in others.rows.items():
        missing = environment.missing_for(STRATEGIES[name])
        if missing is not None:
            assert row["status"] == "skipped"
            assert row["reason"] == missing
            continue
        assert row["status"] == "ok", (name, row["reason"], row["tail"])
        assert all(row["gates"].values()), (name, row["broken"])
        assert_equal_gradients(row)
    assert others.rows["fsdp_hybrid"]["num_processes"] == 4
    assert "replicas 2 x tensor 2" in (others.folder / "report.md").read_text()
    assert others.rows["tensor_ddp"]["engine"] == "loop"
    assert read_record(others.folder_of("tensor_ddp"))["data_parallel_size"] == 2


def assert_equal_gradients(row):
    """Far below the limit, wherever shards, flat partitions and offload keep the gradients."""
    if row["strategy"] != "single":
        assert row["gradient_difference"]["value"] < 2e-5, (row["name"], row)


def test_every_row_is_trained_exactly_once_in_each_epoch(
    comparison, small_model, launch_environment, monkeypatch
):
    monkeypatch.setenv("TOOLKIT_CACHE", launch_environment["TOOLKIT_CACHE"])
    left = prepare_data(DATA, small_model).load()["sample_id"][:]
    assert len(set(left)) == ROWS
    for name in comparison.trained:
        steps = read_record(comparison.folder_of(name))["sample_ids"]
        for epoch in (steps[0:3], steps[3:6]):
            read = Counter(i for step in epoch for rank in step for i in rank)
            assert read.pop(FILLER_ID) == 3 * 8 - ROWS, name
            assert read == Counter(left), name


def test_each_strategy_proves_what_engaged(comparison):
    for name, row in comparison.trained.items():
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
        assert (row["memory"]["nvme_bytes"] > 0) is (strategy.offload_optimizer == "nvme")
        assert engaged["model_split_by"] == strategy.model_split_by(ranks)
        if strategy.backend == "fsdp":
            assert engaged["reshard_after_forward"] is strategy.reshard_after_forward
        assert engaged["gradient_clipping"] == 1.0
        assert row["attestation"]["held"] is True


def test_state_bytes_equal_their_formula(usual):
    """fp32: parameters 4, masters 4 under DeepSpeed, gradients 4, AdamW 8, halved where sharded."""
    final = usual.folder_of("single") / "final" / "model.safetensors"
    whole = 4 * read_record(usual.folder_of("single"))["model"]["parameters"]
    tensors = len(_keys(final))
    bytes_of = {name: row["memory"] for name, row in usual.rows.items()}
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
    persistent = 4 * sum(len(shape) == 1 and shape[0] for shape in _shapes(final))
    assert bytes_of["zero3"]["parameters_bytes"] == whole // 2 + persistent
    # Sharded gradients, each group padded to DeepSpeed's alignment.
    for name in ("zero1", "zero2"):
        assert 0 <= bytes_of[name]["gradients_bytes"] - whole // 2 <= 1024


def test_the_counted_peak_lies_where_the_planner_expects_it(comparison):
    outside, widths = {}, {}
    for name, row in comparison.trained.items():
        ends, counted = row["predicted"]["counted_bytes"], row["peak"]["total_bytes"]
        if row["predicted"]["errors"]["counted_bytes"]:
            outside[name] = (counted, ends)
        widths[name] = (ends["high"] - ends["low"]) / counted
    assert not outside
    for name, width in widths.items():
        # Of two layers, FSDP may hold one or both gathered.
        of_two = 0.35 if STRATEGIES[name].backend == "fsdp" else 0.17
        assert width < (0.16 if comparison.kind == BUILT_IN else of_two), (name, width)


def test_the_order_of_peaks_is_the_one_that_theory_gives(usual):
    peaks = {name: row["peak"]["total_bytes"] for name, row in usual.rows.items()}
    order = (("single", "ddp"), ("zero1",), ("zero2",), ("zero3", "fsdp"))
    for more, less in itertools.pairwise(order):
        assert min(peaks[name] for name in more) > max(peaks[name] for name in less), peaks


def test_bytes_on_the_wire_equal_the_planner_and_the_rest_is_listed_apart(comparison):
    config = json.loads((comparison.folder_of("single") / "final" / "config.json").read_text())
    model = shape_from_config(config, name="small")
    for name, row in comparison.trained.items():
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
        papers = job.backend.textbook(trained=psi, everything=psi, ranks=job.gpus)
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
        assert counted == wanted, name
        purposes = {each["purpose"] for each in found["collectives"]}
        assert purposes.isdisjoint({"other", "bitmap"}), name
        assert ("buffers" in purposes) is (name == "ddp")


def test_what_is_sent_differs_from_the_papers_in_what_is_known_to_differ(usual):
    psi = read_record(usual.folder_of("single"))["model"]["parameters"]
    traffic = {name: row["traffic"] for name, row in usual.rows.items()}
    assert traffic["ddp"]["sent_elements"] == traffic["ddp"]["textbook_elements"] == 2 * psi
    # DeepSpeed all-reduces where the paper reduce-scatters, ZeRO-2 for each of 2 micro-batches.
    assert traffic["zero1"]["sent_elements"] == 2 * psi + psi
    assert traffic["zero1"]["textbook_elements"] == 2 * psi
    assert traffic["zero2"]["sent_elements"] == 2 * 2 * psi + psi
    equal = {name for name, row in usual.rows.items() if difference_in_words(row) == "equal"}
    assert equal == {"ddp"}


def test_parameters_that_stay_are_gathered_once_for_each_micro_batch(others):
    psi = read_record(others.folder_of("single"))["model"]["parameters"]
    kept = others.rows["fsdp_grad_op"]["traffic"]
    assert kept["sent_elements"] == 2 * psi + psi
    assert kept["textbook_elements"] == psi + psi


def test_the_planner_predicts_the_states_of_every_rank_to_the_byte(comparison):
    for name, row in comparison.trained.items():
        record = read_record(comparison.folder_of(name))
        counted = [{state: rank["memory"][state] for state in STATES} for rank in row["per_rank"]]
        job = job_of(record)
        predicted = [state_bytes(job, rank["rank"]).counted() for rank in record["per_rank"]]
        assert predicted == counted, name
        exact = dict.fromkeys((*STATES, "counted_bytes", "traffic_bytes"), 0)
        assert row["predicted"]["errors"] == exact, name
        if comparison.kind != BUILT_IN and STRATEGIES[name].backend == "fsdp":
            continue  # which reduces half of two layers at once
        # Buffers don't hide what is sharded: the states of a model this size are more.
        estimate = estimate_memory(job)
        held = estimate.states.total
        reduced_in = sum(t.bytes.high for t in estimate.terms if "reduced in" in t.name)
        assert held.in_memory + held.nvme > 2 * reduced_in, name


def test_every_final_folder_loads_as_the_model_that_was_trained(comparison):
    from transformers import AutoTokenizer

    for name in comparison.trained:
        final = comparison.folder_of(name) / "final"
        model, report = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
        assert not report["missing_keys"], name
        assert not report["unexpected_keys"], name
        tokenizer = AutoTokenizer.from_pretrained(final)
        prompt = tokenizer("def add(a, b):\n", return_tensors="pt")
        assert model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] > 3


def test_evaluations_are_equal_across_strategies(comparison):
    control = comparison.rows["single"]["evaluation"]
    evaluated = {*range(0, STEPS, EVAL_STEPS[comparison.kind]), STEPS}
    assert [each["step"] for each in control] == sorted(evaluated)
    for name, row in comparison.trained.items():
        assert row["gates"].get("evaluation", name == "single"), name
        assert row["eval_loss_gap"] is None or row["eval_loss_gap"] <= 1e-5, name
        assert {each["rows"] for each in row["evaluation"]} == {EVAL_ROWS}, name
        assert {each["tokens"] for each in row["evaluation"]} == {control[0]["tokens"]}, name
        assert row["evaluation"][-1]["loss"] < row["evaluation"][0]["loss"], name


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("trainer", "fsdp"), pytest.param("loop", "zero3", marks=pytest.mark.long)],
)
def test_an_evaluation_is_equal_to_a_plain_computation(
    kind, strategy, compared, launch_environment, monkeypatch
):
    monkeypatch.setenv("TOOLKIT_CACHE", launch_environment["TOOLKIT_CACHE"])
    folder = compared(kind).folder_of(strategy)
    loss, tokens = plain_loss(folder / "final")
    last = read_record(folder)["evaluation"][-1]
    assert (last["loss"], last["tokens"]) == (pytest.approx(loss, abs=1e-5), tokens)
    assert last["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


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


def test_samples_are_equal_across_strategies_and_change_with_training(comparison):
    (control,) = comparison.rows["single"]["samples"]
    for name, row in comparison.trained.items():
        assert row["samples"] == [control], name
    assert "):" in control["prompt"]
    assert control["before"] != control["after"]


def test_the_report_shows_evaluations_and_samples(usual):
    text = (usual.folder / "report.md").read_text()
    assert "| eval loss | perplexity |" in text
    assert "## Evaluation" in text
    assert "| gate: evaluation |" in text
    assert "## Samples" in text
    assert text.count("| every run |") == 1


def test_every_final_folder_has_a_card_of_its_own_training(comparison):
    for name, row in comparison.trained.items():
        text = (comparison.folder_of(name) / "final" / "README.md").read_text()
        last = row["evaluation"][-1]
        assert f"| {last['loss']:.4f} |" in text, name
        assert f"{row['final_loss']:.4f} (last step)" in text, name
        assert f"accelerate_configs/{name}.yaml" in text, name
        assert str(comparison.folder) not in text


def test_a_run_folder_holds_the_command_that_anyone_can_run_again(usual):
    folder = usual.folder_of("zero2")
    assert folder.name == f"zero2-{usual.kind}-1"
    command = (folder / "command.txt").read_text()
    assert "accelerate launch --config_file " in command
    assert "-m toolkit.train" in command
    for name in ("spec.json", "stdout.log", "steps.jsonl", "zero2.yaml", "zero2.json"):
        assert (folder / name).stat().st_size > 0, name


def test_the_report_has_no_empty_cell(usual):
    text = (usual.folder / "report.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) > 12
    assert "predicted" in text
    # Every row's traffic is what the planner said.
    assert text.count("| equal |") == len(USUAL)
    for line in table:
        assert all(cell.strip() for cell in line.strip("|").split("|")), line


def test_time_is_told_by_phase_and_warm_up_apart(usual):
    for name, row in usual.rows.items():
        assert set(row["phases"]) == {"data", "forward", "backward", "optimizer", "other"}, name
        for phase in ("forward", "backward", "optimizer"):
            assert 0 < row["phases"][phase]["median"] < row["step_seconds"]["p90"], (name, phase)
        # A forked rank may start in less time than its first step takes.
        assert row["warm_up"]["start_seconds"] > 0, name
        assert row["warm_up"]["first_step_seconds"] > 0, name
        assert row["save_seconds"] > 0, name
        assert 0 < row["supervised_tokens_per_second"] < row["tokens_per_second"], name


def test_the_same_comparison_again_runs_nothing(compare, compared):
    first = compared("trainer")
    again = compare("trainer", first.folder, timeout=60)
    assert again.done.returncode == 0, again.done.stdout
    assert again.results["runs"] == first.results["runs"]


def _keys(path):
    with safe_open(path, "pt") as file:
        return list(file.keys())


def _shapes(path):
    with safe_open(path, "pt") as file:
        return [file.get_slice(key).get_shape() for key in file.keys()]  # noqa: SIM118
