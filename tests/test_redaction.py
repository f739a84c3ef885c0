"""The values of secret variables and flags are removed from every text, and nothing else is."""

import base64
import html
import json
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from toolkit import redaction
from toolkit.errors import UsageError
from toolkit.files import new_file, write_text
from toolkit.launching.status import StatusFile
from toolkit.records.json_files import write_json
from toolkit.redaction import (
    is_secret_name,
    learn,
    redact,
    redact_known,
    redacted,
    redacted_words,
)

KEY = "0123456789abcdef" * 2 + "89abcdef"


@pytest.fixture(autouse=True)
def nothing_learned(monkeypatch):
    monkeypatch.setattr(redaction, "_learned", set())


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "MY_DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "OPENAI_KEY"),
        *(
            "DB_PASS",
            "GITHUB_PAT",
            "PASSPHRASE",
            "GOOGLE_CREDENTIALS",
            "CREDENTIAL",
            "MYSQL_PASSWD",
        ),
        *("MYPASS", "AUTH", "HTTP_AUTH", "COOKIE", "DB_PWD", "AccountKey"),
        *("--hub_token", "--hub-token", "apiKey", "hubToken", "client_secret", "AWS_ACCESS_KEY_ID"),
    ],
)
def test_a_name_that_says_so_is_that_of_a_secret(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("TOKENIZERS_PARALLELISM", "pad_token", "--eos_token", "max_new_tokens", "MONKEY", "key"),
        *(
            "COMPAT",
            "BYPASS",
            "seconds_per_token",
            "HF_TOKEN_PATH",
            "PATH",
            "keyboard",
            "secretary",
            "PWD",
            "OLDPWD",
            "COMPASS",
            "OAUTH",
        ),
    ],
)
def test_another_name_is_not(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "spelled",
    [
        lambda value: value,
        lambda value: f"https://host/x?k={quote(value, safe='')}&y",
        lambda value: base64.b64encode(value.encode()).decode(),
        lambda value: json.dumps({"x": value}),
        lambda value: repr({"x": value}),
        lambda value: html.escape(value),
    ],
)
def test_a_variables_value_is_removed_however_it_is_spelled(spelled, monkeypatch):
    value = 'swörd"fish/<&>\\+1'
    monkeypatch.setenv("MY_DB_PASSWORD", value)
    text = f"before {spelled(value)} after"
    assert spelled(value) not in redact_known(text)
    assert redact_known(text).startswith("before ")
    assert redact_known(text).endswith(" after")
    assert "[removed]" in redact_known(text)


def test_a_key_of_several_lines_is_removed_line_by_line(monkeypatch):
    monkeypatch.setenv("SSH_KEY", "-----BEGIN-----\nMIIEpAIBAAKC\nAQEA7bq1zzzz\n")
    assert redact("x MIIEpAIBAAKC y") == "x [removed] y"


@pytest.mark.parametrize(
    "value", ["1", "true", "none", "hunter2", "12345678", "/usr/lib", "toolkit"]
)
def test_a_value_that_may_mean_anything_is_removed_beside_its_name_only(value, monkeypatch):
    monkeypatch.setenv("MY_SECRET", value)
    text = f"{value}.5 of {value} in /usr/lib/{value}"
    assert redact(text) == text
    assert redact(f"MY_SECRET={value}") == "MY_SECRET=[removed]"
    assert redacted_words(["--my-secret", value, value]) == ["--my-secret", "[removed]", value]


def test_a_value_that_is_part_of_every_path_here_stays(tmp_path, monkeypatch):
    folder = tmp_path / "my-own-project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PROJECT_KEY", "my-own-project")
    assert redact(str(folder)) == str(folder)


def test_flags_are_told_from_values_in_any_spelling():
    words = [
        "t",
        "--hub_token",
        "a",
        "--hub-token=b",
        "--seed",
        "1",
        "HF_TOKEN=c",
        "--x_key",
        "--y",
    ]
    assert redacted_words(words) == [
        *("t", "--hub_token", "[removed]", "--hub-token=[removed]", "--seed", "1"),
        *("HF_TOKEN=[removed]", "--x_key", "--y"),
    ]
    learn(["--hub_token", "a-value-of-a-flag"])
    assert redact("the hub refused a-value-of-a-flag") == "the hub refused [removed]"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"wandb: login with {KEY} failed", "wandb: login with [removed] failed"),
        (f"{KEY} is the api key of W&B", "[removed] is the api key of W&B"),
        (f"commit {KEY}\nwandb: x", f"commit {KEY}\nwandb: x"),
        (f"wandb: /snapshots/{KEY}/config.json", f"wandb: /snapshots/{KEY}/config.json"),
        ("wandb_v1_" + "aB3" * 10, "[removed]"),
        ("['--hub_token', 'abc', '--x']", "['--hub_token', [removed], '--x']"),
        ("seconds_per_token: 0.5, next_token: 17", "seconds_per_token: 0.5, next_token: 17"),
        ("{'OPENAI_KEY': 'abc'} and X_PAT=1", "{'OPENAI_KEY': [removed]} and X_PAT=[removed]"),
        ("a basic transformer", "a basic transformer"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic [removed]"),
    ],
)
def test_what_looks_like_a_token_is_removed_and_what_does_not_stays(text, shown):
    assert redact(text) == shown


BASE64 = "MIIEpAIBAAKCAQEA7bq1" * 3
FORMS = {
    "Authorization: Token {}": "0a1b2c3d4e5f6a7b",
    '"Authorization": "ApiKey {}", "b": 1': "0a1b2c3d4e5f6a7b",
    "authorization=Custom-Scheme {}": "0a1b2c3d4e5f6a7b",
    "Authorization: {}": "0a1b2c3d4e5f6a7b8c9d",
    "Authorization: Digest {}": 'username="bob", realm="r", response="0a1b2c3d4e5f6a7b"',
    "Authorization: AWS4-HMAC-SHA256 {}": "Credential=a/20261126/s3, Signature=0a1b2c3d4e5f",
    "Cookie: {}": "session=0a1b2c3d; theme=dark",
    "'Set-Cookie': '{}'": "sid=0a1b2c3d; HttpOnly",
    "https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature={}&y=1": "0a1b2c3d4e5f" * 5,
    "GET https://b.s3.amazonaws.com/k?AWSAccessKeyId={}&Expires=1": "0A1B2C3D4E5F6A7B",
    "https://a.blob.core.windows.net/c?sv=2024&sig={}&se=1": "0a1b2c%2F3d4e5f%3D",
    "https://storage.googleapis.com/b/o?X-Goog-Signature={}": "0a1b2c3d4e5f6a7b",
    "POST https://hooks.slack.com/services/{} 200": "T0A1B2C3/B0A1B2C3/0a1b2c3d4e5f",
    "https://discord.com/api/webhooks/123456/{}": "0a1b2c3d4e5f",
    "npm: {}": "npm_" + "aB3" * 12,
    "twine: {}": "pypi-AgEIcHlwaS5vcmc" + "aB3" * 12,
    "docker: {}": "dckr_pat_" + "aB3" * 9,
    "mail: {}": f"SG.{'aB3' * 7}.{'aB3' * 12}",
    "nvcr.io: {}": "nvapi-" + "aB3" * 20,
    "replicate: {}": "r8_" + "aB3" * 12,
    "stripe: {}": "sk_live_" + "aB3" * 8,
    "aws: {}": "ASIA" + "0A1B" * 4,
    "Server=db;Uid=sa;Pwd={};": "hunter2",
    "mysql://h/db?user=a&pwd={}": "hunter2",
    "DefaultEndpointsProtocol=https;AccountKey={};": "0a1b2c3d4e5f6a7b==",
    "python train.py --wandb_key {} --seed 1": "hunter2",
    "MYPASS={} python a.py": "hunter2",
    "AUTH={} python a.py": "hunter2",
    "environ({{'HTTP_COOKIE': '{}'}})": "hunter2",
}
"""Text around a secret, and the secret."""


@pytest.mark.parametrize(("text", "secret"), FORMS.items())
def test_forms_of_well_kept_lists_are_removed_and_the_text_around_them_stays(text, secret):
    shown = redact(text.format(secret))
    before, _, after = text.format("\0").partition("\0")
    assert shown.startswith(before.rstrip("'")), shown
    assert shown.endswith(after.lstrip("'")), shown
    assert not any(part in shown for part in ("0a1b", "0A1B", "aB3", "hunter2")), shown
    assert redact(shown) == shown


@pytest.mark.parametrize("feed", ["\n", "\\n", "\r\n"])
def test_a_private_key_is_removed_with_and_without_its_end(feed):
    begin = "-----BEGIN RSA PRIVATE KEY-----"
    body = feed.join(["", BASE64, BASE64, "AbC="])
    whole = f"key: {begin}{body}{feed}-----END RSA PRIVATE KEY----- step 3"
    assert redact(whole) == f"key: {begin}[removed]-----END RSA PRIVATE KEY----- step 3"
    cut = f"{begin}{feed}{BASE64}{feed}{BASE64}\nstep 3 of 9"
    assert redact(cut) == f"{begin}[removed]\nstep 3 of 9"


@pytest.mark.parametrize(
    "text",
    [
        "The authorization failed for this user: ask for authorization: none needed",
        "PWD=/work/project OLDPWD=/work pwd=/work/project",
        "BYPASS=1 and COMPASS=north, PASS: test_a, PASS=3",
        "a cookie: sweet; author=Smith oauth: on",
        "msg.aaaaaaaaaaaaaaaaaaaaaaaaa.bbbbbbbbbbbbbbbbbbbbbbb and dapi and npm_config_cache",
        "--sort_by name --forward_passes 3 --max_length 9",
        "-----BEGIN CERTIFICATE-----\nMIIEpAIBAAKCAQEA7bq1\n-----END CERTIFICATE-----",
        "https://host/a?signal=abcdefghijklmnop&design=abcdefghijklmnop",
    ],
)
def test_words_that_look_alike_stay(text):
    assert redact(text) == text


def test_json_stays_json(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-long-secret-value")
    data = {"bytes_per_token": 5, "text": "a-long-secret-value", "hub_token": "x", "n": [1.5, None]}
    assert json.loads(redact_known(json.dumps(data))) == data | {"text": "[removed]"}
    assert redacted(data) == data | {"text": "[removed]", "hub_token": "[removed]"}
    assert redacted([data["text"], ("a", data["text"])]) == ["[removed]", ["a", "[removed]"]]


def test_a_usage_error_is_one_line_without_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-long-secret-value")
    error = UsageError("a\nb\x1b[31m: a-long-secret-value is no model.")
    assert str(error) == "a\\nb\\x1b[31m: [removed] is no model."


def test_what_a_rank_says_of_its_error_holds_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-long-secret-value")
    StatusFile(tmp_path, 0).failed(ValueError("401 for a-long-secret-value"))
    assert "a-long-secret-value" not in (tmp_path / "rank-0.json").read_text()


def test_files_are_for_their_owner_alone_where_it_is_asked_and_else_follow_the_umask(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", "a-long-secret-value")
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "log").symlink_to(victim)
    new_file(tmp_path / "log", private=True).close()
    assert victim.read_text() == "kept"
    write_json(tmp_path / "spec.json", {"x": "a-long-secret-value"}, private=True)
    write_text(tmp_path / "report.md", "a-long-secret-value")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {
        "victim": victim.stat().st_mode & 0o777,
        "log": 0o600,
        "spec.json": 0o600,
        "report.md": victim.stat().st_mode & 0o777,
    }
    assert all("a-long" not in path.read_text() for path in tmp_path.iterdir())


def test_what_a_process_prints_passes(monkeypatch):
    script = (
        "from toolkit.redaction import redact_output\n"
        "import sys, logging\n"
        "redact_output()\n"
        "print('hub', sys.argv[2], sys.argv[1][:9])\n"
        "logging.warning('log %s', sys.argv[2])\n"
        "raise ValueError(sys.argv[2])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--hub_token", "a-long-secret-value"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "hub [removed] --hub_tok\n"
    assert "log [removed]" in done.stderr
    assert "ValueError: [removed]" in done.stderr
    assert "a-long" not in done.stderr


@pytest.mark.parametrize(
    "piece",
    [
        *("token", "--", "--token ", "a-long-secret", "KEY=", "wandb ", "A_", "--wandb_key "),
        *("authorization: token ", "authorization=a ", "cookie: a=", "cookie:", "&sig=", "SG.a-"),
        *("-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----\nMIIE", "AUTH=", "A_AUTH='"),
        *("pwd='", "_pwd=", "https://hooks.slack.com/services/", "npm_aB3", "r8_", "eyJabcde."),
        *('authorization: digest response="a",a=', "authorization: a1,b=1,"),
    ],
)
def test_a_long_line_takes_no_time(piece, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-long-secret-value")
    line = f"{KEY} " + piece * (100_000 // len(piece))
    began = time.process_time()
    redact(line)
    assert time.process_time() - began < 1


def test_the_stock_trainers_pickle_of_the_arguments_holds_no_token(tmp_path):
    import torch
    from transformers import TrainingArguments

    from toolkit import ToolkitTrainer

    args = TrainingArguments(
        output_dir=str(tmp_path), hub_token="a-long-secret-value", use_cpu=True, report_to="none"
    )

    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

    trainer = ToolkitTrainer(model=Bare(), args=args)
    trainer.save_model(str(tmp_path / "final"))
    written = [path for path in Path(tmp_path).rglob("*") if path.is_file()]
    assert "training_args.bin" in {path.name for path in written}
    assert all(b"a-long-secret" not in path.read_bytes() for path in written)
    assert trainer.args.hub_token == "a-long-secret-value"
