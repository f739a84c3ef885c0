"""Trackers: `--report_to` under both engines, the same values under the same names.

No tracker asks for a login, and without the user's own settings no value leaves the machine or the
output folder. The Trainer logs by its own callbacks; the loop by Accelerate's trackers, here.
"""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from toolkit.errors import UsageError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker
    from transformers import TrainingArguments

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Trackers that both engines report to."""

TRAINERS_OWN = {
    "azure_ml": "azureml",
    "clearml": "clearml",
    "codecarbon": "codecarbon",
    "comet_ml": "comet_ml",
    "dagshub": "dagshub",
    "dvclive": "dvclive",
    "flyte": "flytekit",
    "kubeflow": None,
    "neptune": "neptune",
    "swanlab": "swanlab",
}
"""Other trackers with a Trainer callback (transformers 5.23), and the package of each."""

KEPT_LOCAL = {
    "tensorboard": ("TENSORBOARD_LOGGING_DIR", "{folder}/tensorboard", "tensorboard/"),
    # wandb creates the folder `wandb` in it by itself.
    "wandb": ("WANDB_DIR", "{folder}", "wandb/"),
    "trackio": ("TRACKIO_DIR", "{folder}/trackio", "trackio/"),
    # A folder of files, its older form, is refused since mlflow 3.17.
    "mlflow": ("MLFLOW_TRACKING_URI", "sqlite:///{folder}/mlflow.db", "mlflow.db"),
}
"""The variable for a tracker's folder, its value for an output folder, and the name of the file or
folder that is written there."""

WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
"""wandb's own servers: a key of the older one is used for the newer, too."""


def requested_trackers(report_to: str | Sequence[str] | None, *, engine: str) -> list[str]:
    """Return the trackers that `--report_to` names for an engine, `trainer` or `loop`.

    `all` means those of `TRACKERS` that are installed, and `none` means no tracker.

    Raises:
        UsageError: a name is unknown to the engine, its package is missing, or WANDB_MODE asks for
            wandb's server without a key.
    """
    names = list(dict.fromkeys([report_to] if isinstance(report_to, str) else report_to or ()))
    if not set(names) - {"none"}:
        return []
    if len(names) > 1 and {"none", "all"} & set(names):
        raise UsageError(f"--report_to {' '.join(names)}: none and all stand alone.")
    if names == ["all"]:
        names = [name for name in TRACKERS if _installed(name)]
        if not names:
            raise UsageError(_missing_sentence("all", TRACKERS))
    package_of: dict[str, str | None] = {name: name for name in TRACKERS}
    if engine == "trainer":
        package_of |= TRAINERS_OWN
    if unknown := [name for name in names if name not in package_of]:
        raise UsageError(
            f"--report_to {' '.join(unknown)}: --engine {engine} reports to "
            f"{', '.join(package_of)}, all or none."
        )
    if missing := [name for name in names if not _installed(package_of[name])]:
        packages = [package_of[name] for name in missing]
        raise UsageError(_missing_sentence(" ".join(missing), packages))
    online = os.environ.get("WANDB_MODE") in ("online", "shared")
    if "wandb" in names and online and not _has_wandb_account():
        raise UsageError(
            f"WANDB_MODE is {os.environ['WANDB_MODE']} and wandb has no key, so it would ask for "
            "one. Set WANDB_API_KEY, run `wandb login`, or leave WANDB_MODE out to log offline."
        )
    return names


def names_of_trackers(names: Sequence[str]) -> list[str]:
    """Return the files and folders of trackers in the output folder; folders end with a slash."""
    local = (KEPT_LOCAL[name] for name in names if name in KEPT_LOCAL)
    return [written for variable, _, written in local if variable not in os.environ]


def keep_local(names: Sequence[str], output_dir: Path) -> list[str]:
    """Have trackers write into the output folder, and wandb log offline without an account.

    Sets environment variables of this process, unless the user has set them. Must be called before
    a tracker is imported. Returns notes for the user.
    """
    folder = output_dir.resolve()
    for name in names:
        if name not in KEPT_LOCAL:
            continue
        # `wandb init` leaves settings in the current folder, which wandb looks for in WANDB_DIR.
        if name == "wandb" and any(path.is_file() for path in _wandb_settings_here()):
            continue
        variable, value, _ = KEPT_LOCAL[name]
        os.environ.setdefault(variable, value.format(folder=folder))
    if "mlflow" in names:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    if "wandb" not in names or os.environ.get("WANDB_MODE") or _has_wandb_account():
        return []
    os.environ["WANDB_MODE"] = "offline"
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    return [
        "wandb: no WANDB_API_KEY and no `wandb login` here, so it logs offline, into "
        f"{os.environ.get('WANDB_DIR', '.')}/wandb; `wandb sync` uploads it"
    ]


def _missing_sentence(names: str, packages: Sequence[str | None]) -> str:
    several = "none of the packages is" if len(packages) > 1 else "its package is not"
    return (
        f"--report_to {names}: {several} installed. "
        f"pip install {' '.join(filter(None, packages))}, or pip install '.[trackers]' for "
        f"{', '.join(TRACKERS)}."
    )


def _installed(package: str | None) -> bool:
    """Whether a package is installed; None: a tracker that needs none."""
    if package is None:
        return True
    names = ("tensorboard", "tensorboardX") if package == "tensorboard" else (package,)
    # Without an origin it is only a folder of that name, such as wandb's own `./wandb`.
    return any(spec is not None and spec.origin is not None for spec in map(find_spec, names))


def _has_wandb_account() -> bool:
    """Whether wandb can log in without a question, or its settings need no login.

    Follows wandb 0.31 (`sdk/lib/wbauth`), because its public functions ask the user for a key.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = _wandb_settings()
    if settings.get("api_key") or settings.get("mode", "online") != "online":
        return True
    url = os.environ.get("WANDB_BASE_URL") or settings.get("base_url")
    host = urlsplit(url).netloc if url else None
    hosts = WANDB_HOSTS if host is None or host in WANDB_HOSTS else (host,)
    try:
        logins = netrc.netrc(_netrc_file())
    except (OSError, netrc.NetrcParseError):
        return False
    return any(login[2] for name in hosts if (login := logins.authenticators(name)))


def _netrc_file() -> Path:
    if path := os.environ.get("NETRC"):
        return Path(path).expanduser()
    usual = Path("~/.netrc").expanduser()
    return usual if usual.exists() else Path("~/_netrc").expanduser()


def _wandb_settings() -> dict[str, str]:
    config = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([config / "settings", *_wandb_settings_here()], encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError):
        return {}
    return dict(parser["default"]) if parser.has_section("default") else {}


def _wandb_settings_here() -> Iterator[Path]:
    folder = Path(os.environ.get("WANDB_DIR") or ".")
    yield from (folder / name / "settings" for name in ("wandb", ".wandb"))


def trackers(args: TrainingArguments) -> list[GeneralTracker]:
    """Return Accelerate's trackers for `report_to`, named as the Trainer names runs.

    They are not started; for `Accelerator(log_with=...)` of the loop.
    """
    from accelerate.tracking import MLflowTracker, TensorBoardTracker, TrackioTracker, WandBTracker

    named = {} if args.run_name is None else {"name": args.run_name}
    builders = {
        "tensorboard": lambda: TensorBoardTracker("", os.environ["TENSORBOARD_LOGGING_DIR"]),
        "wandb": lambda: WandBTracker(os.environ.get("WANDB_PROJECT", "huggingface"), **named),
        "trackio": lambda: TrackioTracker(
            args.project,
            space_id=args.trackio_space_id,
            private=args.hub_private_repo,
            bucket_id=args.trackio_bucket_id,
            resume="allow",
            **named,
        ),
        "mlflow": lambda: MLflowTracker("Default", run_name=args.run_name),
    }
    return [builders[name]() for name in args.report_to or () if name in builders]


def start(accelerator: Accelerator, args: TrainingArguments, model: Any) -> None:
    """Start the trackers on rank 0, and give them the arguments and the model's config."""
    accelerator.init_trackers("")
    if not accelerator.is_main_process:
        return
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            # Its `store_init_configuration` starts a run of its own in a folder below.
            tracker.tracker.add_text("args", args.to_json_string())
            tracker.tracker.add_text("model_config", model.config.to_json_string())
            continue
        tracker.store_init_configuration(model.config.to_dict() | args.to_dict())
        if tracker.name == "wandb":
            tracker.tracker.define_metric("train/global_step")
            tracker.tracker.define_metric("*", step_metric="train/global_step", step_sync=True)


def log(accelerator: Accelerator, step: int, values: Mapping[str, float | None]) -> None:
    """Log a step's values on rank 0, under the names that the Trainer's callbacks give them."""
    if not accelerator.is_main_process:
        return
    measured = {name: value for name, value in values.items() if value is not None}
    prefixed = {
        f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in measured.items()
    }
    for tracker in accelerator.trackers:
        if tracker.name == "mlflow":
            tracker.log(measured, step=step)
        elif tracker.name == "tensorboard":
            tracker.log(prefixed, step=step)
        else:
            tracker.log(prefixed | {"train/global_step": step})


def finish(accelerator: Accelerator) -> None:
    """End the trackers. `Accelerator.end_training` would end the process group with them."""
    if accelerator.is_main_process:
        for tracker in accelerator.trackers:
            tracker.finish()
