"""The Python in README and docs that reads a comparison, on a comparison."""

import pytest
from documents import ALL

from toolkit.comparing.report.write import write_report
from toolkit.records.json_files import write_json
from toolkit.records.results import RESULTS_FILE

BLOCKS = [text for page in ALL for text in page.python]
READERS = [text for text in BLOCKS if '"runs/' in text and "ToolkitTrainer" not in text]


@pytest.mark.parametrize("text", READERS)
def test_it_runs_and_shows_something(text, full_results, tmp_path, monkeypatch, capsys):
    for name in ("mine", "notebook"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        write_json(tmp_path / "runs" / name / RESULTS_FILE, full_results())
        write_report(tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "docs", "exec"), {})
    assert "ddp" in capsys.readouterr().out or "Markdown(" in text


def test_there_are_such_blocks():
    assert len(READERS) == 2
