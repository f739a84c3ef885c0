"""Trackers: `--report_to` under both engines, the same values under the same names.

Nobody is asked to log in, and without the user's own settings nothing leaves the machine or the
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

from toolkit.engines.tensors import number
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker
    from transformers import TrainingArguments

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Those that both engines report to."""

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
"""Others that the Trainer has a callback for (transformers 5.23), and the package they need."""

KEPT_LOCAL = {
    "tensorboard": ("TENSORBOARD_LOGGING_DIR", "tensorboard/"),
    "wandb": ("WANDB_DIR", "wandb/"),
    "trackio": ("TRACKIO_DIR", "trackio/"),
    "mlflow": ("MLFLOW_TRACKING_URI", "mlflow.db"),
}
"""What each writes in the output folder, unless the user has set the variable."""

WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
"""Where wandb reports to by default: the newer looks its key up under the older's name, too."""


def asked_trackers(report_to: str | Sequence[str] | None, *, engine: str) -> list[str]:
    """Return the trackers that `--report_to` names.

    Args:
        report_to: `none`, `all` (of `TRACKERS`, what is installed), or names.
        engine: `trainer` or `loop`.

    Raises:
        UsageError: a name is unknown to the engine, its package is missing, or wandb is told to
            be online without a key.
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
    known = {name: name for name in TRACKERS}
    if engine == "trainer":
        known |= TRAINERS_OWN
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            f"--report_to {' '.join(unknown)}: --engine {engine} reports to "
            f"{', '.join(known)}, all or none."
        )
    if missing := [name for name in names if known[name] and not _installed(known[name])]:
        raise UsageError(_missing_sentence(" ".join(missing), [known[name] for name in missing]))
    if "wandb" in names and _wandb_must_ask():
        raise UsageError(
            f"WANDB_MODE is {os.environ['WANDB_MODE']} and wandb has no key, so it would ask for "
            "one. Set WANDB_API_KEY, run `wandb login`, or leave WANDB_MODE out to log offline."
        )
    return names


def names_of_trackers(names: Sequence[str]) -> list[str]:
    """Return what trackers write in the output folder; names of folders end with a slash."""
    local = (KEPT_LOCAL[name] for name in names if name in KEPT_LOCAL)
    return [written for variable, written in local if variable not in os.environ]


def keep_local(names: Sequence[str], output_dir: Path) -> list[str]:
    """Point trackers at the output folder, and wandb without an account away from its server.

    Only what the user has not set: environment variables of this process. Must come before a
    tracker is imported.

    Returns:
        What the user should be told.
    """
    folder = output_dir.resolve()
    told: list[str] = []
    if "tensorboard" in names:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(folder / "tensorboard"))
    if "trackio" in names:
        os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
    if "mlflow" in names:
        # A folder of files, its older form, is refused since mlflow 3.17.
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    if "wandb" in names:
        # `wandb init` leaves settings in the current folder, which are looked for in WANDB_DIR.
        if not any(path.is_file() for path in _wandb_settings_here()):
            os.environ.setdefault("WANDB_DIR", str(folder))
        if not os.environ.get("WANDB_MODE") and not _has_wandb_account():
            os.environ["WANDB_MODE"] = "offline"
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
            told.append(
                "wandb: no WANDB_API_KEY and no `wandb login` here, so it logs offline, into "
                f"{os.environ.get('WANDB_DIR', '.')}/wandb; `wandb sync` uploads it"
            )
    return told


def _missing_sentence(asked: str, packages: Sequence[str | None]) -> str:
    several = "none of the packages is" if len(packages) > 1 else "its package is not"
    return (
        f"--report_to {asked}: {several} installed. "
        f"pip install {' '.join(filter(None, packages))}, or pip install '.[trackers]' for "
        f"{', '.join(TRACKERS)}."
    )


def _installed(package: str | None) -> bool:
    """Whether a package is there; a mere folder of its name, such as wandb's `./wandb`, is not."""
    names = ("tensorboard", "tensorboardX") if package == "tensorboard" else (package,)
    specs = [find_spec(name) for name in names if name]
    return any(spec is not None and spec.origin is not None for spec in specs)


def _wandb_must_ask() -> bool:
    return os.environ.get("WANDB_MODE") in ("online", "shared") and not _has_wandb_account()


def _has_wandb_account() -> bool:
    """Whether wandb finds by itself how to log in, or is told in its settings not to.

    As wandb 0.31 looks for it (`sdk/lib/wbauth`), which has no public way to look without asking.
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
        known = netrc.netrc(_netrc_file())
    except (OSError, netrc.NetrcParseError):
        return False
    return any(entry[2] for name in hosts if (entry := known.authenticators(name)))


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


# The loop's own


def trackers(args: TrainingArguments) -> list[GeneralTracker]:
    """Return Accelerate's trackers for `report_to`, not started, named as the Trainer names runs.

    For `Accelerator(log_with=...)`.
    """
    from accelerate.tracking import (
        MLflowTracker,
        TensorBoardTracker,
        TrackioTracker,
        WandBTracker,
    )

    named = {} if args.run_name is None else {"name": args.run_name}
    made = {
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
    return [made[name]() for name in args.report_to or () if name in made]


def start(accelerator: Accelerator, args: TrainingArguments, model: Any) -> None:
    """Start the trackers on rank 0, and hand them the arguments and the model's config."""
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
    known = {name: value for name, value in values.items() if value is not None}
    prefixed = {
        f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in known.items()
    }
    for tracker in accelerator.trackers:
        if tracker.name == "mlflow":
            tracker.log(known, step=step)
        elif tracker.name == "tensorboard":
            tracker.log(prefixed, step=step)
        else:
            tracker.log(prefixed | {"train/global_step": step})


def finish(accelerator: Accelerator) -> None:
    """End the trackers. `Accelerator.end_training` would end the process group with them."""
    if accelerator.is_main_process:
        for tracker in accelerator.trackers:
            tracker.finish()


def plain(value: Any) -> float | None:
    """Return a norm as a number; every rank calls it, since FSDP2's is spread over them."""
    return None if value is None else number(value)
