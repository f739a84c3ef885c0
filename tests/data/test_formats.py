"""Data as they are published: columns and messages of many kinds, and what is made of them."""

import json
import re

import pytest
from datasets import Dataset
from datasets.packaged_modules.json.json import Json
from places import ROOT

from toolkit.data.arguments import DataArguments
from toolkit.data.chat import ChatTokeniser, Template, find_template, shipped_templates
from toolkit.data.dataset import MOST_TOKENS, prepare_data, shown_rows
from toolkit.data.formats import Format, find_format
from toolkit.data.messages import Chat, read_messages, read_tools, with_system
from toolkit.data.sources import check_file
from toolkit.data.tokens import Tally, load_tokenizer
from toolkit.errors import UsageError
from toolkit.launching.preflight import described
from toolkit.training.model import build_model
from toolkit.training.preflight_process import main

HI = {"role": "user", "content": "hi"}
YES = {"role": "assistant", "content": "yes"}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"at": "sea"}}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALLS = [
    HI,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "blue"},
    YES,
]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def marked(data, folder):
    """The first rows of the data, with brackets around what is trained."""
    rows = shown_rows(data, load_tokenizer(folder))
    return [
        "".join(f"[{part['text']}]" if part["trained"] else part["text"] for part in row["parts"])
        for row in rows
    ]


def rendered(tokenizer, messages, template, *, tools=None, loss_on="assistant"):
    """Return the text of a chat, and what of it is learned."""
    form = Format(kind="chat", columns=("messages",), loss_on=loss_on, features={})
    made = ChatTokeniser(
        tokenizer,
        Template(name="x", text=template),
        form,
        max_length=999,
        name="rows",
        tally=Tally(),
    )
    ids, learned = made.tokens(Chat(messages=messages, prompt=0, tools=tools), where="Row 7")
    kept = [token for token, is_learned in zip(ids, learned, strict=True) if is_learned]
    return tokenizer.decode(ids), tokenizer.decode(kept)


@pytest.fixture
def folder(cache):
    return build_model()


@pytest.fixture
def tokenizer(folder):
    return load_tokenizer(folder)


# Questions and answers


def test_alpaca_columns_get_alpaca_s_text_where_the_model_has_no_template(tmp_path, folder):
    rows = [
        {"instruction": "Add.", "input": "1, 2", "output": "3", "id": 0},
        {"instruction": "Greet.", "input": "", "output": "Hello", "id": 1},
        {"instruction": "Say nothing.", "input": "", "output": " ", "id": 2},
    ]
    data = prepare_data(DataArguments(train_file=write_rows(tmp_path / "a.jsonl", rows)), folder)
    start = "<s>Below is an instruction that describes a task"
    end = " Write a response that appropriately completes the request.\n\n### Instruction:\n"
    assert marked(data, folder) == [
        f"{start}, paired with an input that provides further context.{end}Add.\n\n"
        "### Input:\n1, 2\n\n### Response:\n[3</s>]",
        f"{start}.{end}Greet.\n\n### Response:\n[Hello</s>]",
    ]
    assert (data.columns, data.unread_columns) == (["instruction", "input", "output"], ["id"])
    assert (data.dropped, data.dropped_why) == (1, {"empty": 1})
    assert (data.stop_token, data.rows_with_stop) == ("</s>", 2)
    read, template, left_out = data.notes()
    assert read.startswith("a.jsonl: instruction, input, output are read as a turn of the user and")
    assert read.endswith("not read: id")
    assert "trained with alpaca" in template
    assert left_out.endswith("(1 empty)")


def test_alpaca_columns_are_a_chat_where_the_model_has_a_template(tmp_path, tokenizer):
    tokenizer.chat_template = shipped_templates()["roles"]
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [
        {"instruction": "Add.", "context": "1, 2", "response": "3", "system_prompt": "Be good."}
    ]
    path = write_rows(tmp_path / "a.jsonl", rows)
    data = prepare_data(DataArguments(train_file=path), tmp_path / "model")
    assert marked(data, tmp_path / "model") == [
        "<s><|system|>\nBe good.</s>\n<|user|>\nAdd.\n\n1, 2</s>\n<|assistant|>\n[3</s>]\n"
    ]


@pytest.mark.parametrize(
    ("columns", "kind", "read"),
    [
        ("prompt completion", "prompt and completion", "prompt completion"),
        ("instruction output text", "question and answer", "instruction output"),
        ("instruction context response category", "question and answer", "instruction context res"),
        ("prompt response", "question and answer", "prompt response"),
        ("question answer", "question and answer", "question answer"),
        ("system_prompt question response", "question and answer", "question response system_prom"),
        ("query response", "question and answer", "query response"),
        ("prompt text", "text", "text"),
    ],
)
def test_the_columns_of_courses_are_known(columns, kind, read):
    rows = Dataset.from_list([dict.fromkeys(columns.split(), "a")])
    form = find_format(rows, "rows", DataArguments())
    assert form.kind == kind
    assert " ".join(form.columns).startswith(read)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ("instruction output response", "several ways, by its columns instruction, output, resp"),
        ("question answer prompt response", "several ways"),
        ("instruction input context output", "several ways"),
        ("message_id parent_id text role", "one message of a tree in each row"),
        ("prompt chosen rejected", "no column to train on; its columns are: prompt, chosen"),
    ],
)
def test_columns_that_could_mean_several_things_are_refused(columns, says):
    rows = Dataset.from_list([dict.fromkeys(columns.split(), "a")])
    with pytest.raises(UsageError, match=says):
        find_format(rows, "rows", DataArguments())


# Messages


def test_parts_of_text_and_calls_of_both_formats_become_one(folder):
    function = {"name": "find", "arguments": '{"at": "sea"}'}
    openai = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": function}]},
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": None, "refusal": "yes"},
    ]
    assert read_messages(openai, "Row 0") == CALLS
    use = {"type": "tool_use", "id": "c1", "name": "find", "input": {"at": "sea"}}
    result = {"type": "tool_result", "content": [{"type": "text", "text": "blue"}]}
    anthropic = [
        HI,
        {"role": "assistant", "content": [use]},
        {
            "role": "user",
            "content": [result | {"tool_use_id": "c1"}, {"type": "text", "text": "?"}],
        },
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, "yes"]},
    ]
    assert read_messages(anthropic, "Row 0") == [
        *CALLS[:2],
        {"role": "tool", "tool_call_id": "c1", "content": "blue"},
        {"role": "user", "content": "?"},
        YES | {"reasoning_content": "hm"},
    ]
    older = [HI, {"role": "assistant", "function_call": function}, {"role": "function", **YES}]
    assert read_messages(older[:2], "Row 0")[1]["tool_calls"][0]["function"] == CALL["function"]
    tool = {"name": "find", "input_schema": {"type": "object"}}
    assert read_tools([tool], "Row 0") == read_tools(json.dumps([tool]), "Row 0") == [TOOL]
    assert with_system([{"type": "text", "text": "s"}], [HI], "Row 0")[0]["content"] == "s"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            [{"type": "text", "text": "a"}, {"type": "image_url"}],
            "Row 3, part 2 .* user .*image_url",
        ),
        ([{"type": "document", "source": {}}], "part 1 .*not text .document."),
        ([{"type": "tool_result", "content": [{"type": "image"}]}], "part 1 .*not text .image."),
        ({"id": "audio_1"}, "not text .content."),
        ([{"type": "tool_use", "id": "1", "name": "f"}, "so"], "part 2 .* out of order"),
        ([{"type": "tool_use", "name": "f"}], "Row 3 has a part or a call .*'id'. Correct"),
    ],
)
def test_what_is_not_text_is_refused_by_row_and_part(content, says):
    with pytest.raises(UsageError, match=says):
        read_messages([{"role": "user", "content": content}], "Row 3")


def test_a_developer_is_the_system_of_templates_that_know_no_developer(tokenizer):
    chat, roles = (
        [{"role": "developer", "content": "be good"}, HI, YES],
        shipped_templates()["roles"],
    )
    assert "<|system|>\nbe good" in rendered(tokenizer, chat, roles)[0]
    knows = roles + "{# knows developer #}"
    assert "<|developer|>\nbe good" in rendered(tokenizer, chat, knows)[0]


MESSAGES = (
    "{%- for m in messages -%}{{- '<' + m.role + '>' + m.content -}}"
    "{%- for c in m.tool_calls or [] -%}{{- c.function.name -}}CALL{%- endfor -%}{%- endfor -%}"
)


def test_what_a_template_leaves_out_is_refused_by_row(tokenizer):
    with_calls = MESSAGES.replace("CALL", "{{- c.function.arguments | tojson -}}")
    text, learned = rendered(tokenizer, CALLS, with_calls)
    assert (text, learned) == (
        '<user>hi<assistant>find{"at": "sea"}<tool>blue<assistant>yes</s>',
        '<assistant>find{"at": "sea"}<assistant>yes</s>',
    )
    for template, tools, what in (
        (MESSAGES.replace("CALL", ""), None, "leaves out the arguments of a call"),
        (with_calls, [TOOL], "leaves out a call of a tool"),
        (with_calls.replace("{{- c.function.name -}}", ""), None, "leaves out a call of a tool"),
        (with_calls.replace("m.content", "(m.content if m.role != 'tool' else '')"), None, "tool"),
    ):
        with pytest.raises(UsageError, match=f"Row 7: .*{what}.*--chat_template"):
            rendered(tokenizer, CALLS, template, tools=tools)


def test_arguments_are_json_for_templates_that_write_them_down_as_they_are(tokenizer):
    for write in ("{{- c.function.arguments -}}", "{{- '' + c.function.arguments -}}"):
        text, _ = rendered(tokenizer, CALLS, MESSAGES.replace("CALL", write))
        assert 'find{"at": "sea"}<tool>' in text


def test_replies_of_the_weight_0_are_not_learned(tokenizer):
    chat = [HI, {"role": "assistant", "content": "no", "weight": 0}, HI, YES | {"weight": 1}]
    for template in ("roles", "alpaca"):
        text = find_template(tokenizer, template).text
        assert rendered(tokenizer, chat, text)[1] == "yes</s>"
    assert rendered(tokenizer, chat[:2], find_template(tokenizer, "roles").text)[1] == ""


def test_a_file_of_anthropic_s_rows_is_read_with_its_system_and_tools(tmp_path, folder):
    rows = [
        {
            "system": "be good",
            "messages": [HI, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}],
            "tools": [{"name": "find", "input_schema": {"type": "object"}}],
        },
        {"system": None, "messages": [HI, YES], "tools": None},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    data = prepare_data(DataArguments(train_file=path), folder)
    assert marked(data, folder) == [
        f"<s><|tools|>\n{json.dumps(TOOL)}\n</s>\n<|system|>\nbe good</s>\n"
        "<|user|>\nhi</s>\n<|assistant|>\n[yes</s>]\n",
        "<s><|user|>\nhi</s>\n<|assistant|>\n[yes</s>]\n",
    ]


# Folders and the Hub


def test_a_folder_of_text_files_has_a_row_for_each(tmp_path, folder):
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, text in (("b.md", "two\nlines"), ("a.txt", "one"), (".hidden", "x"), ("c.txt", "")):
        (texts / name).write_text(text)
    data = prepare_data(DataArguments(train_file=str(texts)), folder)
    # The first token is predicted from nothing, so it is not trained.
    assert marked(data, folder) == ["<s>[one</s>]", "<s>[two\nlines</s>]"]
    assert (data.name, data.dropped_why) == ("texts", {"empty": 1})
    (texts / "a.txt").write_text("three")
    assert prepare_data(DataArguments(train_file=str(texts)), folder).hash != data.hash
    first = DataArguments(train_file=str(texts), streaming=True, max_train_samples=1)
    assert marked(prepare_data(first, folder), folder) == ["<s>[three</s>]"]
    (texts / "b.md").write_bytes(b"na\xefve")
    with pytest.raises(UsageError, match=r"Line 1 of .*b.md is not UTF-8"):
        prepare_data(DataArguments(train_file=str(texts)), folder)


@pytest.mark.parametrize("name", ["picture.png", "inner/a.txt", ".hidden"])
def test_a_folder_with_other_files_or_none_is_refused(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("a")
    holds = {"inner/a.txt": "inner", ".hidden": "no files"}.get(name, name)
    with pytest.raises(UsageError, match=f"holds {holds}: a folder holds text alone.*--dataset_na"):
        check_file(tmp_path, flag="--train_file")


def test_a_hub_data_set_is_read_from_the_cache_where_there_is_no_network(
    tmp_path, folder, monkeypatch
):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "one"}])
    made = Json(cache_dir=tmp_path, dataset_name="set", data_files={"train": [path]}, hash="x")
    made.download_and_prepare()
    # As `datasets` (5.2) names what it fetched from some/set.
    (tmp_path / "set").rename(tmp_path / "some___set")
    config = next((tmp_path / "some___set").iterdir())
    config.rename(config.with_name("default"))
    data = prepare_data(DataArguments(dataset_name="some/set"), folder)
    assert marked(data, folder) == ["<s>[one</s>]"]
    with pytest.raises(UsageError, match=f"'no/set' can't .*not in the cache .{tmp_path}.: run"):
        prepare_data(DataArguments(dataset_name="no/set"), folder)


# What is trained


def test_the_middle_of_a_long_row_is_counted_and_not_shown(tmp_path, folder):
    long = [HI, {"role": "assistant", "content": "word " * 400}]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": long}] * 5)
    data = prepare_data(DataArguments(train_file=path, max_length=400), folder)
    shown = shown_rows(data, load_tokenizer(folder))
    assert [(row["row"], row["tokens"]) for row in shown] == [(0, 400), (1, 400), (2, 400)]
    note = {"text": f" [... {400 - MOST_TOKENS} tokens ...] ", "trained": False}
    texts = [part["trained"] for part in shown[0]["parts"]]
    assert shown[0]["parts"][2] == note
    assert texts == [False, True, False, True]
    assert data.rows_with_stop == 0  # each row lost its end


def test_prepare_shows_rows_and_needs_no_weights(tmp_path, tokenizer, capsys, caplog):
    caplog.set_level("INFO", "toolkit")
    model = tmp_path / "model"
    tokenizer.save_pretrained(model)
    (model / "config.json").write_bytes((build_model() / "config.json").read_bytes())
    path = write_rows(
        tmp_path / "rows.jsonl",
        [
            {"messages": [HI, YES], "id": 1},
            {"messages": [{"role": "user", "content": "many words " * 40}, YES], "id": 2},
            {"messages": [HI, {"role": "assistant", "content": "\x1b[2J" + "word " * 80}], "id": 3},
        ],
    )
    flags = ["--model_name_or_path", str(model), "--train_file", path, "--max_length", "50"]
    assert main(flags) == 2
    assert "No causal LM can be loaded" in capsys.readouterr().err
    assert main(["--preview", *flags]) == 0
    assert "holds no weights, which a training needs" in caplog.text
    facts = json.loads(capsys.readouterr().out)
    assert [row["row"] for row in facts["rows_shown"]] == [0, 2]
    table, _, shown = "\n".join(described(facts)).partition("\n\n")
    said = {line[:14].strip(): line[14:].strip() for line in table.splitlines()}
    assert said["columns"] == "messages (not read: id)"
    assert said["rows cut"].startswith("2 (--max_length")
    assert said["rows left out"] == "1: 1 cut before the first token to train on"
    assert said["stop token"] == "</s> is trained in 1 of 2 rows"
    plain = shown.replace("\x1b[1;32m", "").replace("\x1b[0m", "")
    assert "⟦these tokens⟧ are trained" in plain
    assert "  <|assistant|>\n  ⟦yes</s>⟧\n" in plain
    assert "\x1b" not in plain  # a row cannot write to the terminal
    facts["data"]["rows_with_stop"] = 0
    assert "</s>: not trained, so the model does not learn to stop" in "\n".join(described(facts))


def test_the_first_command_of_the_page_works_in_a_clone(cache, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "data.md").read_text()
    command = page.partition("```sh\n")[2].partition("\n")[0]
    assert command.startswith("toolkit prepare -- ")
    assert main(["--preview", *command.split()[3:]]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["data"]["rows"], facts["data"]["truncated"]) == (6, 0)
    lines = [line.rstrip() for line in described(facts)]
    plain = "\n".join(lines).replace("\x1b[1;32m", "").replace("\x1b[0m", "")
    # The built-in tokenizer, and so the numbers of tokens, depend on the version of Python.
    said = re.sub(r"[\d,]+", "N", plain)
    excerpts = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert len(excerpts) == 2
    assert all(re.sub(r"[\d,]+", "N", excerpt) in said for excerpt in excerpts)
