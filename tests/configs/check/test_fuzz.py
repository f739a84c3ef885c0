"""Files with a mistake at every place: what is found is what the real libraries do."""

import pytest
from config_sweep import findings_on, read, sweep
from real_parsers import every_file

SHARE = (
    "trl/accelerate_configs/zero3.yaml",
    "accelerate_configs/fsdp_hybrid.yaml",
    "deepspeed_configs/zero3_nvme.json",
)
"""The wide sweep over all files is benchmarks/config_fuzz.py."""


@pytest.mark.filterwarnings("ignore:DeepSpeed Zero3 Init flag:UserWarning")
@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[pytest.mark.long] if file.stem == "fsdp_hybrid" else [])
        for file in every_file()
        if str(file).endswith(SHARE)
    ],
    ids=lambda file: file.name,
)
def test_every_mistake_is_found_exactly_where_the_libraries_raise_or_do_something_else(
    file, tmp_path
):
    cases = list(sweep(file, tmp_path))
    assert [case for case in cases if not case.is_right] == []
    assert {case.real for case in cases} == {"raises", "changed", "same"}


@pytest.mark.parametrize("file", every_file(), ids=lambda file: f"{file.parts[-3]}-{file.name}")
def test_an_unchanged_file_has_no_error(file):
    content, named = read(file)
    found = findings_on(file, content, named)
    assert [one for one in found if one.severity == "error"] == []
    if "trl" not in file.parts:
        assert found == []
