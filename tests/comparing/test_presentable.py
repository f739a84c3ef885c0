"""What must not leave the machine is taken out of everything that is shown."""

from pathlib import Path

import pytest

from toolkit.comparing.reporting.page import render_page
from toolkit.comparing.reporting.presentable import clean, presentable
from toolkit.comparing.reporting.report import render_markdown
from toolkit.comparing.reporting.table_file import render_table

TOKEN = "hf_" + "a1B2" * 8


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/alice/runs/x.yaml", "~/runs/x.yaml"),
        ("--output_dir=/Users/bob/x '/home/al/y'", "--output_dir=~/x '~/y'"),
        (r"C:\Users\carol\runs", r"~\runs"),
        ("/root/x and /root", "~/x and ~"),
        ("/tmp/pytest-of-root/home/x /rooted", "/tmp/pytest-of-root/home/x /rooted"),
        (f"HF_TOKEN={TOKEN} python", "HF_TOKEN=[removed] python"),
        (f"login with {TOKEN}.", "login with [removed]."),
        ("'WANDB_API_KEY': 'abc123'", "'WANDB_API_KEY': [removed]"),
        ("--hub_token abc --seed 1", "--hub_token [removed] --seed 1"),
        ("Authorization: Bearer abcdefghij", "Authorization: Bearer [removed]"),
        ("https://me:secret@host/x", "https://[removed]@host/x"),
        ("MY_SETTING=/mnt/x", "MY_SETTING=[removed]"),
        ("CUDA_VISIBLE_DEVICES='' accelerate", "CUDA_VISIBLE_DEVICES='' accelerate"),
        (
            "try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
        ("1000 tokens/s, tokens: 5, x=1", "1000 tokens/s, tokens: 5, x=1"),
        ("\x1b[31mred\x1b[0m \x1b]8;;http://x\x07link \u202eback\ud800", "red link back"),
    ],
)
def test_homes_tokens_and_variables_are_taken_out(text, shown):
    assert clean(text) == shown
    assert clean(shown) == shown


def test_this_home_is_taken_out_wherever_it_is(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/teamspace/studios/this_studio"))
    assert clean("/teamspace/studios/this_studio/runs") == "~/runs"
    assert clean("/teamspace/studios/this_studio2/runs") == "/teamspace/studios/this_studio2/runs"


def test_none_of_the_reports_holds_them(full_results, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/data/people/dora"))
    results = full_results()
    secret = f"/home/alice/x /data/people/dora/y HF_TOKEN={TOKEN} MY_VARIABLE=value123"
    for row in results["runs"]:
        row["command"] = f"{secret} accelerate launch"
        row["notes"], row["reason"] = [secret], secret
        row["not_measured"] = dict.fromkeys(row["not_measured"], secret)
    results["runs"][-1] |= {"tail": [secret], "fix": secret, "folder": secret}
    results["environment"] |= {"HF_TOKEN": "plain-word", "folder": secret}
    results["fixed"]["model"] = secret
    shown = presentable(results)
    for text in (render_page(shown), render_markdown(shown), render_table(shown)):
        for part in ("alice", "dora", TOKEN, "value123", "plain-word"):
            assert part not in text
        assert "~/x" in text


def test_what_was_measured_stays_as_it_is(full_results):
    results = full_results()
    assert presentable(results) == results
