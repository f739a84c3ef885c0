"""What the README and the pages under `docs/` show is what there is: commands, flags, files."""

import math
import re
import shlex
import subprocess
import tomllib
from functools import cache

import launches
import pytest
import typer.main
import yaml
from documents import ALL, INDEX, PAGES, README, words_of
from places import ROOT
from typer.testing import CliRunner

import toolkit
from toolkit import rehearse
from toolkit.certifying.checks import CHECKS
from toolkit.cli import app
from toolkit.comparing.parity.gates import limit_of
from toolkit.comparing.parity.judgement import GATED_STEPS
from toolkit.comparing.report.runs_table import AT_7B, runs_table
from toolkit.comparing.run.comparison import Comparison
from toolkit.comparing.run.options import CompareOptions, read_scale
from toolkit.comparing.run.plan import build_plan
from toolkit.comparing.run.rows import bare_row
from toolkit.jobs.options import USUAL_STRATEGIES
from toolkit.records.record import read_record
from toolkit.records.results import Results, Row
from toolkit.strategies import STRATEGIES, get_strategy

MOST_WORDS = 1200
"""Outside of blocks, tables included."""
TEST_COMMAND = "pip install '.[test]' && pytest"
LAUNCH = "accelerate launch --config_file accelerate_configs"
COMMAND = typer.main.get_command(app)
COMMANDS = sorted({command for page in ALL for command in page.commands})
WITHOUT_RANKS = ("toolkit configs ", "toolkit plan ", "toolkit recommend ")
PYTHON = [(page, text) for page in ALL for text in page.python]
NEEDS_RANKS = "ToolkitTrainer("
NEEDS_A_COMPARISON = '"runs/'
"""tests/comparing/test_documents.py has one, and runs these."""
RUN_HERE = [
    text for _, text in PYTHON if NEEDS_RANKS not in text and NEEDS_A_COMPARISON not in text
]
TRAINING, REHEARSAL, COMPARING, REPORTS, SKILL, GLOSSARY, STRATEGIES_PAGE = (
    next(page for page in PAGES if page.path.name == f"{name}.md")
    for name in (
        *("training", "rehearsal", "comparing", "reports", "SKILL", "glossary", "strategies"),
    )
)
FORMS = {
    "attest": "attest(s|ed|ation)?",
    "collective": "collectives?",
    "control": "controls?",
    "gap": "gaps?",
    "gate": "gates?|gated",
    "gather": "gather(s|ed|ing)?",
    "ledger": "ledgers?",
    "micro-batch": "micro-batch(es)?",
    "parity": "parity",
    "rank": "ranks?",
    "rehearsal": r"rehears\w+",
    "shard": "shard(s|ed|ing)?",
    "states": "states",
}
"""The words of the glossary, by their anchors there, in the forms that pages use."""


def test_the_two_commands_open_the_readme():
    assert README.in_language("sh")[:2] == [
        "pip install . && toolkit compare\n",
        f"{TEST_COMMAND}\n",
    ]


def test_ci_runs_the_test_command_as_it_stands():
    assert TEST_COMMAND in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_readme_is_a_page_and_no_book():
    assert len(README.prose.split()) <= MOST_WORDS


def test_the_readme_counts_the_checks_of_a_certificate():
    assert f"to {len(CHECKS)} such checks" in " ".join(README.prose.split())


@pytest.mark.parametrize("page", [page for page in PAGES if page is not SKILL], ids=str)
def test_a_page_begins_with_what_its_reader_can_do_and_a_command(page):
    assert re.match(r"# .+\n\nAfter this page .+(\n.+)*\n\n```sh\n", page.text)


@pytest.mark.parametrize("page", ALL, ids=str)
def test_lines_are_short_enough_to_be_read_as_they_stand(page):
    lines = [line for line in page.text.splitlines() if not line.startswith("|")]
    assert max(map(len, lines)) <= 130


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one_that_its_program_takes(command):
    check_command(words_of(command))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("toolkit compare --strategy ddp", "No such option"),
        ("toolkit compare --strategies dpp", "dpp"),
        ("toolkit compare -- --no_such_flag 1", "no flag"),
        ("toolkit prepare -- --train_fil my.jsonl", "no flag"),
        ("toolkit explains", "explains"),
        ("toolkit configs write zero3", "to"),
        ("accelerate launch --config_file accelerate_configs/zero4.yaml -m toolkit.train", "zero4"),
        (
            "accelerate launch --config_file accelerate_configs/ddp.yaml -m toolkit.run",
            "toolkit.run",
        ),
        (f"{LAUNCH}/ddp.yaml -m toolkit.rehearse examples/no.py", "no.py"),
        (f"{LAUNCH}/ddp.yaml examples/no.py", "no.py"),
        (
            "accelerate launch --config_file accelerate_configs/ddp.yaml -m toolkit.train --tunde",
            "no flag",
        ),
        ("pip install '.[trakcers]'", "trakcers"),
        ("python benchmarks/no_such_script.py", "no_such_script"),
        ("python benchmarks/gpu_kit.py --no_such_flag", "no_such_flag"),
        ("rm -r runs", "rm"),
    ],
)
def test_a_command_that_is_wrong_would_be_noticed(command, said):
    with pytest.raises(Exception, match=re.escape(said)):
        check_command(words_of(command))


def check_command(words):
    """Raise unless the program that the words name takes them; it is not run."""
    match words:
        case ["toolkit", *rest]:
            check_toolkit(rest)
        case ["accelerate", "launch", *rest]:
            check_launch(rest)
        case ["torchrun", *rest]:
            given = torchrun_parser().parse_args(rest)
            assert given.module
            assert given.training_script == "toolkit.rehearse", given.training_script
            check_script(*given.training_script_args[:1])
        case ["pip", "install", package]:
            extra = re.fullmatch(r"\.(?:\[(\w+)\])?", package)[1]
            assert extra is None or extra in project()["optional-dependencies"], extra
        case ["python", script, *flags]:
            assert (ROOT / script).is_file(), script
            assert set(flags) <= script_flags(script), flags
        case ["pytest"]:
            pass
        case _:
            raise AssertionError(f"no check knows {shlex.join(words)}")


def check_toolkit(words):
    verb, rest = verb_of(words)
    settings = COMMAND.context_settings  # a verb gets them from its group
    given = verb.make_context(verb.name, rest, **settings).params
    if verb.name == "compare":
        check_compare(given)
    elif verb.name == "prepare":
        check_train_flags(given["train_flags"] or ())
    elif verb.name == "train":
        check_train_flags(verb.make_context(verb.name, rest, **settings).args)


def verb_of(words):
    """Return the verb that the words name, `configs show` is one, and the words behind it."""
    command = COMMAND
    while hasattr(command, "commands"):
        assert words, f"{command.name} needs a verb"
        assert words[0] in command.commands, words[0]
        command, words = command.commands[words[0]], words[1:]
    return command, words


def check_compare(given):
    as_passed = ("max_steps", "num_processes", "repeats", "throughput_steps", "output")
    options = CompareOptions(
        strategies=given["strategies"].split(",") if given["strategies"] else USUAL_STRATEGIES,
        engine=given["engine"],
        scale=read_scale(given["scale"]) if given["scale"] else (),
        dollars_per_hour=given["dollars_per_hour"],
        precision=given["precision"],
        train_flags=given["train_flags"] or (),
        **{name: given[name] for name in as_passed},
    )
    assert all(get_strategy(side.partition("-")[0]) for side in given["bisect"] or ())
    for run in build_plan(options, gpus=0, missing=lambda strategy: None).runs:
        check_train_flags(run.flags)


def check_launch(words):
    given = launch_parser().parse_args(words)
    assert (ROOT / given.config_file).is_file(), given.config_file
    if not given.module:
        check_script(given.training_script)
        return
    assert given.training_script in ("toolkit.train", "toolkit.rehearse"), given.training_script
    if given.training_script == "toolkit.train":
        check_train_flags(given.training_script_args)
    else:
        _, words = rehearse._options(given.training_script_args)
        check_script(*words[:1])


def check_script(name):
    assert (ROOT / name).is_file(), name


def check_train_flags(flags):
    from toolkit.training.arguments import own_arguments, training_values

    training_values(own_arguments(flags))


@cache
def torchrun_parser():
    from torch.distributed.run import get_args_parser

    return get_args_parser()


@cache
def launch_parser():
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser()


@cache
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def script_flags(script):
    return set(re.findall(r'"(--[\w-]+)"', (ROOT / script).read_text()))


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith(WITHOUT_RANKS)])
def test_a_command_without_ranks_runs(command, tmp_path, monkeypatch):
    assert output_of(command, tmp_path, monkeypatch)


def output_of(command, folder, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(folder / "cache"))
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, words_of(command)[1:], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_recommendation_that_is_shown_is_the_one_that_is_printed(tmp_path, monkeypatch):
    (command,) = [line for line in README.commands if line.startswith("toolkit recommend ")]
    printed = output_of(command, tmp_path, monkeypatch).splitlines()
    for line in README.outputs_of(command):
        assert any(agree(line, other) for other in printed), line


def test_commands_in_the_text_name_verbs_and_flags_that_exist():
    spans = [span for page in ALL for span in page.spans]
    for words in (span.split() for span in spans if span.startswith("toolkit ")):
        verb, rest = verb_of(words[1:])
        flags = rest[: rest.index("--")] if "--" in rest else rest
        assert {word for word in flags if word.startswith("--")} <= spellings([verb]), words
    launched = [span for span in spans if span.startswith("accelerate launch ") and " -m " in span]
    for words in map(str.split, launched):
        assert launch_parser().parse_args(words[2:]).training_script.startswith("toolkit."), words
    scripts = [span.split()[1] for span in spans if span.startswith("python ")]
    assert all((ROOT / script).is_file() for script in scripts)


def spellings(verbs):
    """Return the names of all options, with hyphens and with underscores."""
    options = [option for verb in verbs for option in verb.params]
    names = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    return names | {f"--{name[2:].replace('-', '_')}" for name in names}


def test_every_flag_in_the_text_exists():
    from transformers import TrainingArguments

    from toolkit.training.arguments import OWN

    kinds = [*OWN.values(), TrainingArguments]
    known = {f"--{name}" for kind in kinds for name in kind.__dataclass_fields__}
    groups = (COMMAND, COMMAND.commands["configs"], COMMAND.commands["checkpoint"])
    verbs = [verb for group in groups for verb in group.commands.values()]
    known |= spellings(verbs)
    known |= {name for action in launch_parser()._actions for name in action.option_strings}
    known |= script_flags("benchmarks/gpu_kit.py") | script_flags("examples/accelerate_loop.py")
    for page in ALL:
        flags = {span.split()[0] for span in page.spans if span.startswith("--")} - {"--"}
        assert flags <= known, page.name


@pytest.mark.parametrize(("page", "text"), PYTHON, ids=lambda value: str(value)[:20])
def test_python_is_python_and_names_what_there_is(page, text):
    compile(text, page.name, "exec")
    for module, names in re.findall(r"^from (toolkit[\w.]*) import (.+)$", text, re.MULTILINE):
        home = __import__(module, fromlist=["*"])
        assert all(getattr(home, name.strip()) is not None for name in names.split(","))


@pytest.mark.parametrize(
    "text",
    [pytest.param(text, marks=[pytest.mark.long] * ("launch(" in text)) for text in RUN_HERE],
)
def test_python_that_needs_no_ranks_runs(text, request, tmp_path, monkeypatch):
    if "launch(" in text:
        request.getfixturevalue("as_launched")
    else:
        monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "docs", "exec"), {})


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder from which the bundled configs are found as from the repository's root."""
    folder = tmp_path_factory.mktemp("here")
    for name in ("accelerate_configs", "deepspeed_configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def agree(shown, printed, within=0.005):
    """Whether a line that is shown is one that was printed, but for numbers that depend on a CPU.

    A shown line that ends in dots stands for the beginning of a printed one.
    """
    words, others = shown.removesuffix("...").split(), printed.split()
    if len(words) > len(others) or (len(words) < len(others) and not shown.endswith("...")):
        return False
    return all(
        word == other or math.isclose(number(word), number(other), rel_tol=within, abs_tol=1e-6)
        for word, other in zip(words, others, strict=False)
    )


def number(word):
    try:
        return float(word.rstrip(";,"))
    except ValueError:
        return math.nan


def test_lines_agree_where_only_their_last_digits_differ():
    line = "loss      6.9249 at the first step, 5.1179 at the last step"
    assert agree(line, line.replace("5.1179", "5.1181"))
    assert not agree(line, line.replace("5.1179", "5.6181"))
    assert not agree(line, line.replace("first", "last"))
    assert not agree("gap 6.0e-07", "gap 6.0e-05")
    assert agree("two words, ...", "two words, and more")
    assert not agree("two words", "two words, and more")


SHOWN = [
    "toolkit train --train_file examples/data.jsonl --output_dir runs/mine",
    "accelerate launch --config_file accelerate_configs/zero3.yaml -m toolkit.rehearse "
    "examples/trainer.py --max_steps 20",
    "accelerate launch --cpu --config_file accelerate_configs/fsdp.yaml -m toolkit.rehearse "
    "examples/trainer.py",
    "toolkit compare --strategies ddp,zero3 --output runs/ledgers",
    "toolkit compare --bisect single zero2-loop",
]
"""Commands of the README that launch ranks and whose output is shown."""


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_of_the_readme_prints_what_is_shown(command, here, launch_environment):
    done = subprocess.run(
        words_of(command),
        # As typed: the launcher's own command line is what is refused there.
        env=launches.cold(launch_environment) if "--cpu" in command else launch_environment,
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode == 0) is ("--cpu" not in command), done.stdout
    printed = done.stdout.splitlines()
    for line in README.outputs_of(command):
        assert any(agree(line, other) for other in printed), f"{line}\n{done.stdout}"


def test_every_command_that_shows_its_output_is_run():
    pairs = zip(README.blocks, README.blocks[1:], strict=False)
    shown = [text.strip() for (kind, text), (after, _) in pairs if (kind, after) == ("sh", "text")]
    assert [line for line in shown if not line.startswith("toolkit recommend ")] == SHOWN


def test_the_launch_of_training_trains(here, small_model, launch_environment):
    (command,) = [line for line in README.commands if "-m toolkit.train" in line]
    words = [*words_of(command), "--model_name_or_path", small_model]
    done = launches.run(words, environment=launch_environment, folder=here)
    assert done.returncode == 0, done.stdout
    (folder,) = (here / "runs").glob("zero2-*")
    record = read_record(folder)
    assert record["strategy"] == "zero2"
    assert record["summary"]["epochs"] == 1
    assert record["model"]["name"] == str(small_model)


def test_the_losses_that_open_the_readme_are_those_of_the_examples(here, launch_environment):
    flags = ["--label_smoothing_factor", "0.1", "--max_steps", "4", "--output_dir", "runs/smooth"]
    rows = rows_below(README, "| loss at step")
    scripts = {"`Trainer`": "trainer.py", "`ToolkitTrainer`": "toolkit_trainer.py"}
    for name, *losses in rows:
        script, strategy = name.split(", ")
        command = f"{LAUNCH}/{strategy}.yaml -m toolkit.rehearse examples/{scripts[script]}"
        words = [*words_of(command), "--per_device_train_batch_size", "2", *flags]
        done = launches.run(words, environment=launch_environment, folder=here)
        assert done.returncode == 0, done.stdout
        printed = re.findall(r"'loss': '?([\d.]+)", done.stdout)
        assert [float(loss.strip("*")) for loss in losses] == pytest.approx(
            [*map(float, printed)], abs=3e-3
        ), name
    assert rows[0][1:] == rows[2][1:]


def test_the_speeds_of_the_readme_are_those_of_the_page_that_it_links():
    page = (ROOT / "benchmarks/results/2026-11-26-speed-lab.md").read_text()
    assert "benchmarks/results/2026-11-26-speed-lab.md" in README.links
    measured = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    for name, *shown in rows_below(README, "## Measured"):
        cells = [{cell.strip() for cell in row} for row in measured]
        assert any({*shown} <= row for row in cells), name


def test_the_two_lines_are_those_by_which_the_examples_differ():
    (diff,) = README.in_language("diff")
    for sign, script in (("-", "trainer.py"), ("+", "toolkit_trainer.py")):
        text = (ROOT / "examples" / script).read_text()
        lines = [line[1:] for line in diff.splitlines() if line.startswith(sign)]
        assert len(lines) == 2
        assert f"    {lines[1]}\n" in text
        imported = lines[0].removeprefix("from ").split(" import ")
        found = re.findall(rf"^from {imported[0]} import (?:\((.*?)\)|(.*)$)", text, re.M | re.S)
        assert imported[1] in " ".join("".join(pair) for pair in found)


def test_the_script_with_our_trainer_in_the_docs_runs(here, small_model, launch_environment):
    (script,) = [text for text in TRAINING.python if NEEDS_RANKS in text]
    script = script.replace("Qwen/Qwen2.5-0.5B", str(small_model)).replace("runs/", "own/")
    (here / "mine.py").write_text(script)
    words = words_of(f"{LAUNCH}/zero3.yaml -m toolkit.rehearse mine.py")
    done = launches.run(words, environment=launch_environment, folder=here)
    assert done.returncode == 0, done.stdout
    shown = [line for text in REHEARSAL.in_language("text") for line in text.splitlines()]
    assert shown == README.outputs_of(SHOWN[1])
    assert (here / "own" / "mine" / "final" / "model.safetensors").is_file()


def rows_below(page, heading):
    """Return the cells of the first table after a line that holds `heading`."""
    table = re.search(r"(^\|.*\n)+", page.text[page.text.index(heading) :], re.MULTILINE)
    lines = [
        [cell.strip() for cell in line.strip("| \n").split(" | ")] for line in table[0].splitlines()
    ]
    return lines[2:]


def test_the_strategies_are_those_of_the_code():
    rows = rows_below(STRATEGIES_PAGE, "One name")
    assert all(row in rows for row in rows_below(README, "## Strategies"))
    assert [(row[0].strip("`"), row[1]) for row in rows] == [
        (strategy.name, strategy.summary) for strategy in STRATEGIES.values()
    ]
    assert all(row[2] for row in rows)
    for row, strategy in zip(rows, STRATEGIES.values(), strict=True):
        assert row[2].endswith("; `--engine loop`") == (strategy.engines == ("loop",)), row
    assert all(f"`{name}`" in INDEX.prose for name in STRATEGIES)


def test_the_table_of_a_comparison_is_explained_column_by_column(tmp_path):
    options = CompareOptions(engine="both")
    plan = build_plan(options, gpus=2, missing=lambda _: None)
    rows = {run.name: bare_row(run, "failed", "no disk", rehearsal=False) for run in plan.runs}
    comparison = Comparison(folder=tmp_path, plan=plan, options=options, environment={}, rows=rows)
    results = comparison.results()
    explained = [row[0] for row in rows_below(REPORTS, "## The table")]
    explained = ["strategy", "engine", *explained[1:]]
    assert rows_below(REPORTS, "## The table")[0][0] == "strategy, engine"
    header = runs_table(results | {"rehearsal": True}, show_speed=True).header
    shown = {"peak host memory": "peak memory", "gap to the control": "gap"}
    assert explained == [shown.get(name, name) for name in header]
    header = runs_table(results).header
    assert [name for name in explained if name != AT_7B] == [shown.get(n, n) for n in header]


def test_the_fields_that_are_explained_exist():
    rows = rows_below(REPORTS, "| field of a row")
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    texts = [*REPORTS.python, SKILL.text]
    named |= {name for text in texts for name in re.findall(r'row\["(\w+)"\]', text)}
    assert named <= Row.__annotations__.keys()
    of_all = {name for text in texts for name in re.findall(r'results\["(\w+)"\]', text)}
    assert {"runs"} < of_all <= Results.__annotations__.keys()


def test_the_usual_strategies_and_the_gates_are_those_of_the_code():
    text = " ".join(COMPARING.text.split())
    names = [f"`{name}`" for name in USUAL_STRATEGIES]
    assert f"the usual six: {', '.join(names[:-1])} and {names[-1]}." in text
    assert f"over the first {GATED_STEPS} steps" in text
    assert f"loss within {short(limit_of('loss', 'no'))}," in text
    assert f"within {short(limit_of('grad_norm', 'no'))} relative" in text
    assert f"within {short(limit_of('weights', 'no'))} times the change that training made" in text


def short(number):
    return f"{number:.0e}".replace("e-0", "e-")


@pytest.mark.parametrize("page", ALL, ids=str)
def test_every_link_and_path_exists(page):
    by_path = {other.path: other for other in ALL}
    for link in page.links:
        name, _, anchor = link.partition("#")
        if "://" in name:
            continue
        target = (page.path.parent / name).resolve() if name else page.path
        assert target.exists(), link
        assert not anchor or anchor in by_path[target].anchors, link
    folders = "accelerate_configs|deepspeed_configs|notebooks|benchmarks|tests|toolkit|docs|\\.ci"
    folders += "|examples"
    for name in re.findall(rf"`((?:{folders})/[^`]*)`", page.text):
        assert (ROOT / name).exists(), name


def test_the_glossary_has_a_sentence_for_each_of_its_words():
    words = re.findall(r"^## (.+)\n\n(?:(?!## ).+\n)+", GLOSSARY.text, re.MULTILINE)
    assert [word.lower() for word in words] == list(FORMS)


@pytest.mark.parametrize("page", [page for page in PAGES if page is not GLOSSARY], ids=str)
def test_the_first_use_of_a_word_of_the_glossary_links_there(page):
    text = page.running_text
    for word, forms in FORMS.items():
        if used := re.search(rf"(?i)(?<![\w-])({forms})(?![\w-])", text):
            link = f"[{used[0]}](glossary.md#{word})"
            assert text[used.start() - 1 :].startswith(link), (word, text[used.start() - 60 :][:90])


def test_every_page_is_linked_from_the_readme_and_from_the_index():
    assert {"CONTRIBUTING.md", "LICENSE", INDEX.name} <= set(README.links)
    assert {page.name for page in PAGES} <= {link.partition("#")[0] for link in README.links}
    assert {page.path.name for page in PAGES} <= set(INDEX.links)


def test_the_index_has_the_form_of_an_llms_txt():
    title, _, summary, *rest = INDEX.text.splitlines()
    assert title.startswith("# ")
    assert summary.startswith("> ")
    sections = "\n".join(rest).split("\n## ")[1:]
    lines = [line for section in sections for line in section.splitlines()[1:] if line]
    assert all(re.fullmatch(r"- \[.+\]\(.+\): .+\.", line) for line in lines)


def test_the_skill_says_when_to_use_it():
    _, front, body = SKILL.text.split("---\n", 2)
    matter = yaml.safe_load(front)
    assert matter.keys() == {"name", "description"}
    assert re.fullmatch(r"[a-z0-9-]{1,64}", matter["name"])
    assert 0 < len(matter["description"]) <= 1024
    assert re.match(r"\n# .+\n\nAfter this page .+(\n.+)*\n\n```sh\n", body)
    questions = [row[1] for row in rows_below(SKILL, "## Which command")]
    verbs = ("plan", "recommend", "prepare", "report", "compare", "configs")
    assert all(any(f"`toolkit {verb} " in cell for cell in questions) for verb in verbs)


def test_the_public_names_in_the_text_exist():
    named = {name for page in ALL for name in re.findall(r"\btoolkit\.([A-Za-z]\w*)", page.text)}
    modules = {"train", "rehearse", "records", "fork_server"}
    assert named - modules <= set(toolkit.__all__)


def test_contributing_fits_one_screen():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 50
