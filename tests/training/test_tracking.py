"""`--report_to` under both engines: real event files, and what is decided before one is written."""

import os
from types import SimpleNamespace

import launches
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from toolkit.errors import UsageError
from toolkit.training import tracking
from toolkit.training.tracking import TRACKERS, keep_local, requested_trackers

OWN_SUMMARY = {"train/train_runtime", "train/train_loss", "train/total_flos"}
"""Some of what the Trainer alone adds at its end."""


def scalars(folder):
    """Every scalar in the event files below a folder: tag -> [(step, value)]."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_both_engines_log_the_same_values_under_the_same_names(launch, tmp_path):
    found = {}
    for engine in ("trainer", "loop"):
        done = launch(
            *("single", "-m", "toolkit.train", "--engine", engine, "--report_to", "tensorboard"),
            *("--max_steps", 5, "--logging_steps", 2, "--throughput_steps", 3),
            *("--output_dir", tmp_path / engine),
        )
        assert done.returncode == 0, done.stdout
        found[engine] = scalars(tmp_path / engine / "tensorboard")
    loop, trainer = found["loop"], found["trainer"]
    assert loop.keys() == {
        f"train/{name}" for name in ("loss", "grad_norm", "learning_rate", "epoch")
    }
    for tag, logged in loop.items():
        # 5 is no logging step, and 6 to 8 are timed.
        assert [step for step, _ in logged] == [2, 4]
        of_trainer = [(step, value) for step, value in trainer[tag] if step <= 5]
        assert logged == [(step, pytest.approx(value, rel=1e-6)) for step, value in of_trainer]
    assert [step for step, _ in trainer["train/loss"]] == [2, 4]
    assert trainer.keys() >= loop.keys() | OWN_SUMMARY
    assert {step for tag in OWN_SUMMARY for step, _ in trainer[tag]} == {8}


def test_a_tracker_that_is_not_there_is_one_sentence_and_leaves_nothing(
    launch_environment, tmp_path
):
    done = launches.run(
        [*launches.TRAIN, "--report_to", "tensorboard", "neptune"],
        folder=tmp_path,
        environment=launch_environment,
    )
    assert done.returncode == 2, done.stdout
    assert "--report_to neptune: its package is not installed. pip install neptune" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.fixture
def variables(monkeypatch, tmp_path):
    """An environment with an empty home and nothing else, and packages that are all there."""
    found = {"HOME": str(tmp_path / "home")}
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(os, "environ", found)
    monkeypatch.chdir(tmp_path)
    there = SimpleNamespace(origin="somewhere")
    monkeypatch.setattr(tracking, "find_spec", lambda name: there)
    return found


def netrc(home, host):
    (home / "home" / ".netrc").write_text(f"machine {host}\n  login user\n  password {'k' * 40}\n")
    (home / "home" / ".netrc").chmod(0o600)


@pytest.mark.parametrize("nothing", [None, [], "none", ["none"]])
def test_nothing_is_reported_unless_it_is_asked(nothing, variables, tmp_path):
    before = dict(variables)
    assert requested_trackers(nothing, engine="loop") == []
    assert keep_local([], tmp_path / "out") == []
    assert variables == before


@pytest.mark.parametrize("engine", ["trainer", "loop"])
def test_names_are_taken_once_and_all_is_what_both_engines_have(engine, variables, monkeypatch):
    assert requested_trackers(["mlflow", "tensorboard", "mlflow"], engine=engine) == [
        "mlflow",
        "tensorboard",
    ]
    assert requested_trackers("all", engine=engine) == list(TRACKERS)
    monkeypatch.setattr(
        tracking,
        "find_spec",
        lambda name: SimpleNamespace(origin="x") if name == "trackio" else None,
    )
    assert requested_trackers(["all"], engine=engine) == ["trackio"]
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--report_to all: none of the packages is installed"):
        requested_trackers(["all"], engine=engine)


@pytest.mark.parametrize(
    ("names", "engine", "said"),
    [
        (["wandbb"], "trainer", "--report_to wandbb: --engine trainer reports to tensorboard,"),
        (["comet_ml"], "loop", "--engine loop reports to tensorboard, wandb, trackio, mlflow, all"),
        (["none", "wandb"], "loop", "none and all stand alone"),
        (["all", "wandb"], "loop", "none and all stand alone"),
    ],
)
def test_names_that_do_not_fit_are_refused(names, engine, said, variables):
    with pytest.raises(UsageError, match=said):
        requested_trackers(names, engine=engine)


def test_what_only_the_trainer_has_is_left_to_it(variables):
    assert requested_trackers("comet_ml", engine="trainer") == ["comet_ml"]


def test_a_missing_package_is_named_with_the_way_to_get_it(variables, monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as error:
        requested_trackers(["wandb", "mlflow"], engine="loop")
    assert str(error.value) == (
        "--report_to wandb mlflow: none of the packages is installed. pip install wandb mlflow, "
        "or pip install '.[trackers]' for tensorboard, wandb, trackio, mlflow."
    )


def test_the_folder_that_wandb_leaves_is_not_taken_for_the_package(tmp_path, monkeypatch):
    (tmp_path / "package_of_no_files").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not tracking._installed("package_of_no_files")
    assert tracking._installed("tensorboard")


def test_everything_stays_in_the_output_folder(variables, tmp_path):
    told = keep_local(TRACKERS, tmp_path / "runs" / "x")
    out = tmp_path / "runs" / "x"
    assert variables["TENSORBOARD_LOGGING_DIR"] == str(out / "tensorboard")
    assert variables["TRACKIO_DIR"] == str(out / "trackio")
    assert variables["MLFLOW_TRACKING_URI"] == f"sqlite:///{out}/mlflow.db"
    assert variables["WANDB_DIR"] == str(out)
    assert variables["WANDB_MODE"] == "offline"
    assert len(told) == 1
    assert "no WANDB_API_KEY" in told[0]
    assert f"{out}/wandb" in told[0]


def test_what_the_user_has_set_stays(variables, tmp_path):
    users = dict.fromkeys(
        ("TENSORBOARD_LOGGING_DIR", "TRACKIO_DIR", "MLFLOW_TRACKING_URI", "WANDB_DIR"), "the user's"
    )
    variables |= users | {"WANDB_MODE": "disabled"}
    assert keep_local(TRACKERS, tmp_path) == []
    assert variables.items() >= users.items()
    assert variables["WANDB_MODE"] == "disabled"


@pytest.mark.parametrize(
    ("settings", "set_before", "host", "asks"),
    [
        (None, {}, None, True),
        (None, {"WANDB_API_KEY": "k" * 40}, None, False),
        (None, {"WANDB_API_KEY": ""}, None, True),
        (None, {"WANDB_IDENTITY_TOKEN_FILE": "token"}, None, False),
        (None, {}, "api.wandb.ai", False),
        (None, {}, "api.forge.coreweave.com", False),
        (None, {}, "github.com", True),
        (None, {"WANDB_BASE_URL": "https://wandb.inside:8080"}, "wandb.inside:8080", False),
        (None, {"WANDB_BASE_URL": "https://wandb.inside:8080"}, "api.wandb.ai", True),
        ("base_url = https://wandb.inside", {}, "wandb.inside", False),
        ("base_url = https://wandb.inside", {}, None, True),
        ("mode = offline", {}, None, False),
        ("this is no settings file", {}, None, True),
    ],
)
def test_wandb_goes_online_only_where_it_would_not_ask(
    settings, set_before, host, asks, variables, tmp_path
):
    variables |= set_before
    if host:
        netrc(tmp_path, host)
    if settings:
        (tmp_path / "home" / ".config" / "wandb").mkdir(parents=True)
        (tmp_path / "home" / ".config" / "wandb" / "settings").write_text(
            f"[default]\n{settings}\n"
        )
    assert bool(keep_local(["wandb"], tmp_path / "out")) is asks
    assert (variables.get("WANDB_MODE") == "offline") is asks

    variables["WANDB_MODE"] = "online"
    if asks:
        with pytest.raises(UsageError, match="Set WANDB_API_KEY, run `wandb login`"):
            requested_trackers("wandb", engine="trainer")
    else:
        assert requested_trackers("wandb", engine="trainer") == ["wandb"]


def test_settings_of_the_current_folder_are_still_found(variables, tmp_path):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nentity = us\n")
    keep_local(["wandb"], tmp_path / "out")
    assert "WANDB_DIR" not in variables


def test_settings_are_also_read_from_the_folder_that_wandb_is_given(variables, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "settings").write_text("[default]\napi_key = mine\n")
    assert keep_local(["wandb"], tmp_path / "out")
    del variables["WANDB_MODE"]
    variables["WANDB_CONFIG_DIR"] = str(tmp_path / "mine")
    assert not keep_local(["wandb"], tmp_path / "out")
