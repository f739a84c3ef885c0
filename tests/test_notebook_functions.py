"""Functions for notebooks: runs in own processes, shown as one output, and stopped as a whole."""

import subprocess
import sys
import time

import nbclient
import psutil
import pytest
from jupyter_client.manager import KernelManager
from nbformat.v4 import new_code_cell, new_notebook
from places import SCRIPTS

import toolkit
from toolkit import environment
from toolkit.errors import UsageError
from toolkit.launching.forking import COLD

FAILS = 'print("before it")\nraise ValueError("no such column: text")\n'
INTERRUPTED_AFTER = "step 1/"
ENDED = "Interrupted: every process of the run has ended."


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("as_launched")
def test_a_run_shows_what_engaged_and_a_script_that_fails_its_reason(here, capsys):
    ran = toolkit.launch("zero2", args=["--max_steps", 2, "--output_dir", "mine"])
    assert (ran.status, ran.reason, ran.folder) == ("ok", None, here / "mine")
    assert ran.record["attestation"]["held"] is True
    shown = ran._repr_html_()
    assert "<td style='text-align:left'>DeepSpeedEngine</td>" in shown
    names = ("distributed type", "num processes", "wrapper", "zero stage", "held fraction")
    for name in (*names, "parameter dtypes"):
        assert shown.count(f">{name}</th>") == 1
    assert "sharded fraction" not in shown
    assert "in 2 steps" in str(ran)
    assert "effective batch: 4 rows x 2 processes" in capsys.readouterr().out

    (here / "own.py").write_text(FAILS)
    failed = toolkit.launch("single", "own.py")
    assert failed.status == "failed"
    assert (
        failed.reason
        == "rank 0 failed before its first step was done: ValueError: no such column: text"
    )
    assert "no such column" in failed._repr_html_()
    assert (failed.record, failed.folder.parent) == (None, here / "runs")
    assert "before it" in capsys.readouterr().out


def test_a_strategy_that_lacks_something_here_is_skipped_with_the_reason(here, monkeypatch):
    monkeypatch.setattr(environment, "missing_for", lambda strategy: f"{strategy.name}: no libaio")
    skipped = toolkit.launch("zero3_nvme", args=["--max_steps", 2])
    assert (skipped.status, skipped.reason) == ("skipped", "zero3_nvme: no libaio")
    assert "no libaio" in skipped._repr_html_()
    assert list(here.iterdir()) == []


@pytest.mark.long
def test_launches_in_a_block_are_forked_from_one_process_and_read_scripts_anew(here, capsys):
    before = psutil.Process().children()  # other tests' of this session
    with toolkit.warm_launches():
        (warm,) = [each for each in psutil.Process().children() if each not in before]
        ran = toolkit.launch("ddp", args=["--max_steps", 2])
        (here / "own.py").write_text("print('first')")
        first = toolkit.launch("ddp", "own.py")
        (here / "own.py").write_text("print('second')")
        second = toolkit.launch("zero2", "own.py")
    assert [each.status for each in (ran, first, second)] == ["ok", "ok", "ok"]
    assert ran.record["memory"]["host_shared_bytes"]
    lines = capsys.readouterr().out.splitlines()
    assert (lines.count("first"), lines.count("second")) == (2, 2)
    assert not any(COLD in line for line in lines)
    assert not warm.is_running()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("zeroo2",), "zero2"),
        (("ddp", "missing.py"), "missing.py is no file here"),
        (("single", "toolkit.train", (), 2), "single"),
    ],
)
def test_a_mistake_is_a_sentence_and_nothing_is_written(here, arguments, named):
    with pytest.raises(UsageError, match=named):
        toolkit.launch(*arguments)
    assert not list(here.iterdir())


@pytest.mark.usefixtures("as_launched")
def test_a_comparison_and_its_report_are_the_same_page(here):
    done = toolkit.compare("single, ddp", max_steps=2, throughput_steps=0, output="both")
    assert done.sound
    assert [row["strategy"] for row in done.rows] == ["single", "ddp"]
    page = done._repr_markdown_()
    assert page == (here / "both" / "report.md").read_text()
    assert toolkit.report("both")._repr_markdown_() == page == str(done)
    assert "<svg" in done.figure("losses")._repr_html_()
    with pytest.raises(UsageError, match="nowhere"):
        toolkit.report("nowhere")


@pytest.mark.usefixtures("as_launched")
def test_a_certificate_is_its_page(here, capsys):
    script = str(SCRIPTS / "faulty_loop.py")
    done = toolkit.certify(script, ["sound"], strategy="ddp", output="proof")
    assert done.sound
    assert done._repr_markdown_() == (here / "proof" / "certificate.md").read_text() == str(done)
    assert "Nothing is broken: of 45 checks" in capsys.readouterr().out
    (here / "own.py").write_text(FAILS)
    failed = toolkit.certify("own.py", strategy="ddp", output="none")
    assert not failed.sound
    assert "could not be judged. Its log: none/ranks" in str(failed)
    with pytest.raises(UsageError, match="by --strategy or by --config"):
        toolkit.certify(script)


def test_nothing_of_torch_is_loaded():
    code = "import sys, toolkit; toolkit.launch, toolkit.report; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_a_plan_is_one_output_of_a_cell_and_its_text_says_the_same():
    cell = new_code_cell("import toolkit\ntoolkit.plan('7b')")
    (answer,) = nbclient.NotebookClient(new_notebook(cells=[cell])).execute().cells[0].outputs
    assert answer.data["text/plain"].startswith("7b: 6,999,191,552 parameters")
    assert "<table>" in answer.data["text/html"]


@pytest.mark.long
def test_the_stop_button_ends_every_process_of_a_run(here):
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(here))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        client.execute("import toolkit; toolkit.launch('ddp', args=['--max_steps', '100000'])")
        wait_for(client, lambda content: INTERRUPTED_AFTER in str(content.get("data")))
        kernel = psutil.Process(manager.provisioner.pid)
        started = kernel.children(recursive=True)
        assert len([each for each in started if "toolkit.train" in each.cmdline()]) >= 2
        manager.interrupt_kernel()
        wait_for(client, lambda content: ENDED in str(content.get("data")))
        wait_for(client, lambda content: content.get("ename") == "KeyboardInterrupt")
        wait_for(client, lambda content: content.get("execution_state") == "idle")
        _, alive = psutil.wait_procs(started, timeout=30)
        assert not alive
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def wait_for(client, matches):
    """Read what the kernel publishes, up to the message with such content."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        message = client.get_iopub_msg(timeout=300)
        if matches(message["content"]):
            return
    raise AssertionError("the kernel published no such message")
