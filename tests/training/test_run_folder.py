"""What is somebody's own in the folder of a run is not lost, and one run works there at a time."""

import json
import os
from functools import partial

import pytest
from accelerate.utils.memory import release_memory
from small_models import tiny_llama
from test_evaluation import COLLATE, arguments, ragged
from transformers import Trainer, hyperparameter_search, integrations
from transformers.hyperparameter_search import HyperParamSearchBackendBase
from transformers.trainer_utils import BestRun, HPSearchBackend

from toolkit.checkpoints.atomic_folder import atomic_folder
from toolkit.errors import UsageError
from toolkit.launching.folder_lock import is_marked, lock_folder
from toolkit.records.json_files import read_json
from toolkit.records.manifests import MANIFEST
from toolkit.training.method_arguments import MethodArguments
from toolkit.training.request import check_output_folder
from toolkit.training.run_folder import check_names, lock_run_folder
from toolkit.training.trainer import ToolkitTrainer

FULL = MethodArguments()
ADAPTERS = MethodArguments(method="lora", merge=True)

FOLDERS = ("final", "status", "merged", "checkpoint-7", "tensorboard")
FILES = ("steps.jsonl", "record.json", "adapter_start.safetensors", "mlflow.db")
OTHERS = ("stdout.log", "lost+found", "spec.json", "final-of-mine", "checkpoint-best", "wandb")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("TOOLKIT_STATUS_DIR", "TENSORBOARD_LOGGING_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def refused(folder, method=ADAPTERS, trackers=("tensorboard", "mlflow")):
    """Return the names that the run is refused for."""
    with pytest.raises(UsageError, match=f"^--output_dir {folder} holds what no run") as caught:
        check_output_folder(folder, method, list(trackers))
    listed = str(caught.value).partition("write over it: ")[2].partition(". Move it away")[0]
    return listed.split(", ")


def checkpoint(folder):
    with atomic_folder(folder, step=7) as draft:
        (draft / "state").write_text("tensors")


def test_every_name_that_the_run_would_write_and_that_is_somebodys_is_named_at_once(tmp_path):
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    for name in (*FILES, *OTHERS, ".lock"):
        (tmp_path / name).write_text("mine")
    names = [*(f"{name}/" for name in FOLDERS), *FILES, ".lock"]
    assert sorted(refused(tmp_path)) == sorted(names)


def test_what_the_run_does_not_write_is_no_reason(tmp_path, monkeypatch):
    for name in ("merged", "tensorboard", *OTHERS, "status"):
        (tmp_path / name).mkdir()
    for name in ("adapter_start.safetensors", "mlflow.db"):
        (tmp_path / name).touch()
    assert refused(tmp_path, FULL, ()) == ["status/"]
    monkeypatch.setenv("TOOLKIT_STATUS_DIR", str(tmp_path / "status"))  # made by a launcher
    check_output_folder(tmp_path, FULL, [])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost")
    check_output_folder(tmp_path, FULL, ["mlflow"])
    assert refused(tmp_path, FULL, ["tensorboard"]) == ["tensorboard/"]


def test_what_an_earlier_run_left_is_the_runs_own_but_never_a_link_or_another_kind(tmp_path):
    lock_folder(tmp_path, "run").release()
    for name in FOLDERS:
        (tmp_path / name).mkdir()  # the checkpoint among them is damaged: it has no manifest
    for name in set(FILES) - {"record.json"}:
        (tmp_path / name).touch()
    check_output_folder(tmp_path, ADAPTERS, ["tensorboard", "mlflow"])

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "checkpoint-8").symlink_to(elsewhere)
    (tmp_path / "final").rmdir()
    (tmp_path / "final").symlink_to(elsewhere)
    (tmp_path / "steps.jsonl").unlink()
    (tmp_path / "steps.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "status").rmdir()
    (tmp_path / "status").touch()
    assert sorted(refused(tmp_path)) == [
        "checkpoint-8/ (a symbolic link)",
        "final/ (a symbolic link)",
        "status/",
        "steps.jsonl (a symbolic link)",
    ]


def test_the_folder_itself_may_be_a_link_and_a_finished_run_keeps_its_record(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    check_output_folder(tmp_path / "out", FULL, [])
    lock_folder(tmp_path / "out", "run").release()
    (tmp_path / "out" / "record.json").write_text("{}")
    with pytest.raises(UsageError, match="holds the record of another run"):
        check_output_folder(tmp_path / "out", FULL, [])


def test_checkpoints_that_were_copied_alone_are_known_by_their_manifests(tmp_path):
    checkpoint(tmp_path / "checkpoint-7")
    check_output_folder(tmp_path, FULL, [])
    (tmp_path / "checkpoint-500").mkdir()  # as another program leaves one
    (tmp_path / "checkpoint-500" / "model.safetensors").touch()
    assert refused(tmp_path, FULL, ()) == ["checkpoint-500/"]
    (tmp_path / "checkpoint-7" / MANIFEST).write_text("torn")
    assert refused(tmp_path, FULL, ()) == ["checkpoint-500/", "checkpoint-7/"]


def test_a_mistake_that_is_found_while_it_is_held_leaves_the_folder_as_it_was(tmp_path):
    def fail(folder):
        with lock_run_folder(folder, lambda: None):
            assert is_marked(folder, "run")
            raise UsageError("of another training")

    with pytest.raises(UsageError, match="of another training"):
        fail(tmp_path / "new" / "out")
    (tmp_path / "log").touch()
    with pytest.raises(UsageError, match="of another training"):
        fail(tmp_path)
    assert os.listdir(tmp_path) == ["log"]


def test_it_is_held_on_after_all_is_checked_and_not_at_all_if_the_check_fails(tmp_path):
    (tmp_path / "final").mkdir()
    with (
        pytest.raises(UsageError, match="final/"),
        lock_run_folder(tmp_path, partial(check_names, tmp_path, ["final/"], flag="--output_dir")),
    ):
        pass
    assert os.listdir(tmp_path) == ["final"]

    with lock_run_folder(tmp_path, lambda: None) as lock:
        pass
    with (
        pytest.raises(UsageError, match="Another run is working"),
        lock_run_folder(tmp_path, lambda: None),
    ):
        pass
    lock.release()
    with lock_run_folder(tmp_path, lambda: None) as lock:
        lock.release()


def trainer_in(folder):
    return ToolkitTrainer(
        model=tiny_llama(),
        args=arguments(folder, max_steps=1, logging_steps=1),
        train_dataset=ragged(4),
        data_collator=COLLATE,
    )


class Trial(dict):
    """Values of hyperparameters, with the attributes of optuna's that transformers reads."""

    number = 0

    @property
    def params(self):
        return dict(self)


class Grid(HyperParamSearchBackendBase):
    """A search of given values, which treats a trainer as transformers' `run_hp_search_optuna`."""

    name = "optuna"
    is_available = staticmethod(lambda: True)

    def run(self, trainer, n_trials, direction, *, grid):
        ends = []
        for number, params in enumerate(grid[:n_trials]):
            trial, trainer.objective = Trial(params), None
            trial.number = number
            trainer.train(trial=trial)
            trainer.objective = trainer.compute_objective(trainer.evaluate())
            trainer.model_wrapped, trainer.model = release_memory(
                trainer.model_wrapped, trainer.model
            )
            trainer.accelerator.clear()
            ends.append(BestRun(str(number), trainer.objective, params))
        return min(ends, key=lambda end: end.objective)


def test_a_search_of_hyperparameters_leaves_a_record_of_each_trial(tmp_path, monkeypatch):
    backends = hyperparameter_search.ALL_HYPERPARAMETER_SEARCH_BACKENDS
    monkeypatch.setitem(backends, HPSearchBackend.OPTUNA, Grid)
    monkeypatch.setattr(integrations, "hp_params", dict)  # it takes trials of installed backends
    grid = [{"learning_rate": rate, "max_steps": 2} for rate in (1e-9, 1e-2)]
    best = {}
    for kind in (Trainer, ToolkitTrainer):
        trainer = kind(
            model_init=lambda: tiny_llama(),
            args=arguments(tmp_path / kind.__name__, save_strategy="steps", save_steps=2),
            train_dataset=ragged(8),
            eval_dataset=ragged(8),
            data_collator=COLLATE if kind is ToolkitTrainer else without_ids,
        )
        best[kind] = trainer.hyperparameter_search(
            hp_space=lambda trial: trial.params, n_trials=2, backend="optuna", grid=grid
        )
    assert best[ToolkitTrainer].run_id == best[Trainer].run_id == "1"
    folders = [tmp_path / "ToolkitTrainer" / f"run-{number}" for number in (0, 1)]
    records = [read_json(folder / "record.json") for folder in folders]
    assert [record["losses"][0] for record in records] == [records[0]["losses"][0]] * 2
    assert records[0]["losses"][1] != records[1]["losses"][1]
    assert [record["learning_rates"][0] for record in records] == [1e-9, 1e-2]
    for folder in folders:
        assert len((folder / "steps.jsonl").read_text().splitlines()) == 2
        assert (folder / "checkpoint-2").is_dir()


def without_ids(rows):
    return {name: values for name, values in COLLATE(rows).items() if name != "sample_id"}


def test_a_script_with_our_trainer_loses_nobodys_record_and_may_run_again(tmp_path):
    mine = {"record.json": "my own record", "steps.jsonl": "my own steps"}
    for name, text in mine.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=r"^output_dir .*: record.json, steps.jsonl\. Move it"):
        trainer_in(tmp_path).train()
    assert {name: (tmp_path / name).read_text() for name in mine} == mine
    assert sorted(os.listdir(tmp_path)) == sorted(mine)

    for name in mine:
        (tmp_path / name).unlink()
    (tmp_path / "notes").write_text("mine")
    for _ in range(2):  # no checkpoint is refused here: `atomic_folder` keeps what is in it
        trainer_in(tmp_path).train()
    assert json.loads((tmp_path / "record.json").read_text())["status"] == "ok"
    assert (tmp_path / "notes").read_text() == "mine"

    with lock_folder(tmp_path, "run"), pytest.raises(UsageError, match="Another run is working"):
        trainer_in(tmp_path).train()
