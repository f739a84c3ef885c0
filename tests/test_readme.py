"""What the README shows is what there is: commands, flags, names, numbers and files."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

import toolkit
from toolkit.cli import app
from toolkit.comparing.parity import GATED_STEPS, GATES
from toolkit.comparing.reporting.runs_table import MEASURED
from toolkit.comparing.scheduling.options import DEFAULT_STRATEGIES, CompareOptions, read_scale
from toolkit.comparing.scheduling.plan import build_plan
from toolkit.errors import UsageError
from toolkit.strategies import STRATEGIES, get_strategy

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SHELL = [text.strip() for language, text in BLOCKS if language == "sh"]
COMMANDS = [line.split(" #")[0].strip() for block in SHELL for line in block.splitlines()]
CONFIGS = [line for line in COMMANDS if line.startswith("toolkit configs ")]
COMPARE = [line for line in COMMANDS if line.startswith("toolkit compare ")]
PLAN = [line for line in COMMANDS if line.startswith(("toolkit plan ", "toolkit recommend "))]
PREPARE = [line for line in COMMANDS if line.startswith("toolkit prepare ")]
LAUNCH = [line for line in COMMANDS if line.startswith("accelerate launch ")]

TEST_COMMAND = "pip install '.[test]' && pytest"


def test_the_two_commands_open_it():
    assert SHELL[:2] == ["pip install . && toolkit compare", TEST_COMMAND]
    before = README[: README.index("```")].strip().splitlines()
    assert [line[:1] for line in before if line] == ["#", before[-1][:1]]


def test_ci_runs_the_test_command_as_it_stands():
    assert TEST_COMMAND in (ROOT / ".ci" / "run").read_text().splitlines()


def test_every_command_is_of_a_kind_that_is_checked_here():
    assert set(COMMANDS) == {*SHELL[:2], *CONFIGS, *PLAN, *COMPARE, *PREPARE, *LAUNCH}
    assert CONFIGS
    assert PLAN
    assert COMPARE
    assert PREPARE
    assert LAUNCH


@pytest.mark.parametrize("line", [*CONFIGS, *PLAN])
def test_a_command_without_ranks_runs(line, tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.output


@pytest.mark.parametrize("line", COMPARE)
def test_a_compare_command_makes_a_plan(line):
    words, _, flags = line.partition(" -- ")
    command = typer.main.get_command(app).commands["compare"]
    given = command.make_context("compare", shlex.split(words)[2:]).params
    options = CompareOptions(
        strategies=given["strategies"].split(",") if given["strategies"] else DEFAULT_STRATEGIES,
        engine=given["engine"].value,
        max_steps=given["max_steps"],
        num_processes=given["num_processes"],
        scale=read_scale(given["scale"]) if given["scale"] else (),
        repeats=given["repeats"],
        dollars_per_hour=given["dollars_per_hour"],
        precision=given["precision"].value,
        output=given["output"],
        train_flags=shlex.split(flags),
    )
    assert all(get_strategy(side.partition("-")[0]) for side in given["bisect"] or ())
    for run in build_plan(options, gpus=0, missing=lambda strategy: None).runs:
        check_train_flags(run.flags)


@pytest.mark.parametrize("line", PREPARE)
def test_a_prepare_command_has_flags_that_training_takes(line):
    words, _, flags = line.partition(" -- ")
    typer.main.get_command(app).commands["prepare"].make_context("prepare", shlex.split(words)[2:])
    check_train_flags(shlex.split(flags))


@pytest.mark.parametrize("line", LAUNCH)
def test_a_launch_command_is_one_that_accelerate_takes(line):
    from accelerate.commands.launch import launch_command_parser

    given = launch_command_parser().parse_args(shlex.split(line)[2:])
    assert (ROOT / given.config_file).is_file()
    assert given.module
    assert given.training_script in ("toolkit.train", "toolkit.rehearse")
    if given.training_script == "toolkit.train":
        check_train_flags(given.training_script_args)


def check_train_flags(flags):
    from toolkit.training.arguments import parse_own, training_values

    model, _, run, rest = parse_own(flags)
    training_values(rest, model=model, run=run)


def test_a_flag_that_is_not_there_would_be_noticed():
    with pytest.raises(UsageError, match="no flag"):
        check_train_flags(["--no_such_flag", "1"])


def test_every_flag_in_the_text_exists():
    from transformers import TrainingArguments

    from toolkit.training.arguments import OWN

    kinds = [*OWN.values(), TrainingArguments]
    known = {f"--{name}" for kind in kinds for name in kind.__dataclass_fields__}
    root = typer.main.get_command(app)
    ours = (root.commands[name] for name in ("compare", "plan", "recommend", "prepare", "report"))
    for command in (*ours, *root.commands["configs"].commands.values()):
        known |= {name for option in command.params for name in option.opts}
    text = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(--[\w-]+)", text)) <= known


def rows_below(heading):
    """Return the cells of the first table after a line that holds `heading`."""
    table = re.search(r"(^\|.*\n)+", README[README.index(heading) :], re.MULTILINE)
    lines = [
        [cell.strip() for cell in line.strip("| \n").split(" | ")] for line in table[0].splitlines()
    ]
    return lines[0], lines[2:]


def test_the_strategies_are_those_of_the_code():
    _, rows = rows_below("## Strategies")
    assert [(row[0].strip("`"), row[1]) for row in rows] == [
        (strategy.name, strategy.summary) for strategy in STRATEGIES.values()
    ]
    assert all(row[2] for row in rows)


def test_the_table_has_the_columns_and_rows_that_compare_prints():
    header, rows = rows_below(SHELL[0])
    named = [cell.split()[0].strip(",") for cell in header]
    assert named == [column.split()[0] for column in ("strategy", "status", *MEASURED)]
    assert tuple(row[0] for row in rows) == DEFAULT_STRATEGIES
    assert {row[1] for row in rows} == {"ok"}


def test_the_gates_are_those_of_the_code():
    gates = GATES["no"]
    text = " ".join(README.split())
    assert f"over the first {GATED_STEPS} steps" in text
    assert f"loss within {short(gates.loss)}," in text
    assert f"within {short(gates.grad_norm)} relative" in text
    assert f"within {short(gates.weights)} of the control's own update" in text


def short(number):
    return f"{number:.0e}".replace("e-0", "e-")


def test_python_blocks_name_what_there_is():
    for text in (text for language, text in BLOCKS if language == "python"):
        names = {}
        exec(compile(text, "README.md", "exec"), names)
        assert all(names[name] is not None for name in toolkit.__all__ if name in text)


def test_every_link_and_path_exists():
    links = re.findall(r"\]\(([^)#]+)", README)
    paths = re.findall(
        r"`((?:accelerate_configs|deepspeed_configs|notebooks|benchmarks|tests|toolkit|\.ci)/[^`]*)`",
        README,
    )
    assert {"CONTRIBUTING.md", "LICENSE"} <= set(links)
    for name in (*links, *paths):
        if "://" not in name:
            assert (ROOT / name).exists(), name


def test_contributing_fits_one_screen():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 50
