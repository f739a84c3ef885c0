"""What must not leave the machine is taken out of everything that is shown."""

import time
from pathlib import Path

import pytest

from toolkit.comparing.report.names import clean, redact_results
from toolkit.comparing.report.table_file import render_table
from toolkit.comparing.report.write import render_markdown, render_page

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


JWT = ".".join(["eyJhbGciOiJIUzI1NiJ9", "eyJzdWIiOiIxIn0", "dBjftJeZ4CVP-mB92K27"])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("os.environ['HF_TOKEN'] = 'abc'", "os.environ['HF_TOKEN'] = [removed]"),
        ('(d["secret"])="abc", 1', '(d["secret"])=[removed], 1'),
        ("if token == 'abc'", "if token == [removed]"),
        (f"wandb: API key {'0123456789abcdef' * 2}", "wandb: API key [removed]"),
        ("api key: abc, access-key=abc", "api key: [removed], access-key=[removed]"),
        (f"session {JWT}.", "session [removed]."),
        (f"maps AIza{'Sy-4_' * 7}", "maps [removed]"),
        ("/data/home/alice/x /mnt/home/alice /c/Users/bob/y", "~/x ~ ~/y"),
        ("/mnt/c/Users/bob/y file:///data/home/al/x", "~/y file://~/x"),
        (r"C:\Users\Bob Smith\x and D:\Users\al", r"~\x and ~"),
        (r"'C:\\Users\\Bob Smith\\x'", r"'~\\x'"),
    ],
)
def test_what_was_written_another_way_is_taken_out_too(text, shown):
    assert clean(text) == shown
    assert clean(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "--pad_token </s> --seed 1",
        "eos_token='</s>', bos_token: <s>, unk-token=x, sep_token=x, cls_token=x",
        "{'mask_token': '<mask>'}",
        "the API key of an organization-administrator",
        "eyJ.a.b and AIzawa",
        "https://example.org/home/page https://example.org/a/Users/x",
        "runs/home/x /a/b/home/x",
        r"C:\Program Files\x",
    ],
)
def test_what_is_no_secret_stays(text):
    assert clean(text) == text


def test_a_special_token_is_no_secret_as_a_key_either(full_results):
    results = full_results()
    results["environment"] |= {"pad_token": "</s>", "hub_token": "plain-word", "API key": "word"}
    shown = redact_results(results)["environment"]
    assert (shown["pad_token"], shown["hub_token"], shown["API key"]) == (
        "</s>",
        "[removed]",
        "[removed]",
    )


@pytest.mark.parametrize(
    "piece",
    [
        *("-", "a-", "a.", "A_", "token", "--token", "token]", "token'", "token ", "api key "),
        *("eyJ", "eyJ-", "eyJaaaaa.", "AIza-", "hf_", "://", "a://", "/home", "/a", "/", "/mnt/c"),
        *("C:\\Users\\a ", "a ", "bearer ", "\x1b[1", "\x1b]", "'", "token='", "=", "A_=", " "),
    ],
)
@pytest.mark.parametrize("start", ["", "token", "C:\\Users\\", "api key", "eyJ"])
def test_a_long_line_takes_no_time(piece, start):
    line = start + piece * (50_000 // len(piece))
    began = time.process_time()
    clean(line)
    assert time.process_time() - began < 0.25


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
    shown = redact_results(results)
    for text in (render_page(shown), render_markdown(shown), render_table(shown)):
        for part in ("alice", "dora", TOKEN, "value123", "plain-word"):
            assert part not in text
        assert "~/x" in text


def test_what_was_measured_stays_as_it_is(full_results):
    results = full_results()
    assert redact_results(results) == results
