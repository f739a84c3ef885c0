"""Variables that override configs or slow a run down, in this shell and in NCCL's files."""

import pytest

from toolkit.doctor import variables
from toolkit.doctor.variables import HARMS, check_variables

SECRET = "not-to-be-shown-anywhere"


@pytest.fixture(autouse=True)
def shell(clean, tmp_path):
    """A clean shell on a machine with two interfaces and 8 CPUs."""
    for interface in ("lo", "eth0"):
        (tmp_path / "net" / interface).mkdir(parents=True)
    clean.setattr(variables, "NETWORKS", tmp_path / "net")
    clean.setattr(variables, "NCCL_FILE", tmp_path / "nccl.conf")
    clean.setattr(variables, "cpus", lambda: 8)
    return clean


def levels(gpus=2):
    return {
        finding.name: finding.level for finding in check_variables(gpus) if finding.level != "ok"
    }


def texts(gpus=2):
    return "\n".join(
        f"{finding.text} {finding.fix} {finding.evidence}" for finding in check_variables(gpus)
    )


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_clean_shell_is_all_right(gpus):
    assert levels(gpus) == {}
    assert "variables" in {finding.name for finding in check_variables(gpus)}


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("gpus", [0, 2])
def test_variables_of_a_rank_are_found(name, gpus, shell):
    shell.setenv(name, "1")
    assert levels(gpus) == {"rank variables": "warn"}
    assert f"unset {name}" in texts(gpus)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("ACCELERATE_USE_FSDP", "fail"),
        ("ACCELERATE_USE_DEEPSPEED", "fail"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "warn"),
        ("ACCELERATE_MIXED_PRECISION", "warn"),
        ("ACCELERATE_USE_CPU", "warn"),
        ("FSDP_VERSION", "warn"),
        ("ACCELERATE_DEBUG_MODE", None),
        ("ACCELERATION", None),
    ],
)
def test_variables_that_override_a_config_are_found(name, level, shell):
    shell.setenv(name, "1")
    assert levels(0).get("config variables") == level
    assert (f"unset {name}" in texts(0)) == (level is not None)


BAD = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_DISTRIBUTED_DEBUG": "detail",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_P2P_LEVEL": "LOC",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_DEBUG": "trace",
    "NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_BLOCKING_WAIT": "true",
    "NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "DS_ACCELERATOR": "cpu",
}
GOOD = {
    "CUDA_LAUNCH_BLOCKING": "0",
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
    "NCCL_P2P_DISABLE": "0",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_DEBUG": "INFO",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "DS_ACCELERATOR": "cuda",
}


@pytest.mark.parametrize("name", HARMS)
def test_a_harmful_value_is_found_where_there_are_gpus(name, shell):
    shell.setenv(name, BAD[name])
    assert levels() == {name: "warn"}
    assert f"unset {name}" in texts()
    assert levels(0) == {}


def test_other_values_of_such_variables_are_all_right(shell):
    for name, value in GOOD.items():
        shell.setenv(name, value)
    assert levels() == {}


@pytest.mark.parametrize("place", ["system", "home", "named"])
def test_variables_in_nccls_files_are_found(place, shell, tmp_path):
    file = {
        "system": tmp_path / "nccl.conf",
        "home": tmp_path / "home" / ".nccl.conf",
        "named": tmp_path / "another",
    }[place]
    if place == "named":
        shell.setenv("NCCL_CONF_FILE", str(file))
    file.write_text("# NCCL_ALGO=Ring\nNCCL_DEBUG=WARN\nNCCL_P2P_DISABLE = 1\n")
    assert levels() == {"NCCL_P2P_DISABLE": "warn"}
    assert str(file) in texts()


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "ens5,eth", True),
        ("NCCL_SOCKET_IFNAME", "ens5", False),
        ("NCCL_SOCKET_IFNAME", "^lo", True),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", False),
        ("GLOO_SOCKET_IFNAME", "lo", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "lo,ens5", False),
    ],
)
def test_an_interface_that_is_not_there_is_a_fault(name, value, fits, shell):
    shell.setenv(name, value)
    assert levels() == ({} if fits else {name: "fail"})
    assert fits or "eth0, lo" in texts()


def test_nccls_interface_does_not_matter_to_a_rehearsal(shell):
    shell.setenv("NCCL_SOCKET_IFNAME", "ens5")
    assert levels(0) == {}


@pytest.mark.parametrize(
    ("value", "level"),
    [
        ("expandable_segments:True", None),
        ("max_split_size_mb:512, garbage_collection_threshold:0.8", None),
        ("roundup_power2_divisions:[256:1,512:2,>:8],expandable_segments:True", None),
        ("", None),
        ("expandable_segments=True", "fail"),
        ("expandable_segments:True;max_split_size_mb:512", "fail"),
        ("True", "fail"),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_settings_that_the_allocator_would_not_take_are_found(name, value, level, shell):
    shell.setenv(name, value)
    assert levels().get(name) == level
    assert levels(0) == {}


@pytest.mark.parametrize(
    ("second", "names"), [("a:2", {"PYTORCH_CUDA_ALLOC_CONF"}), ("a:1", set())]
)
def test_settings_of_the_allocator_that_differ_are_found(second, names, shell):
    shell.setenv("PYTORCH_CUDA_ALLOC_CONF", "a:1")
    shell.setenv("PYTORCH_ALLOC_CONF", second)
    assert levels().keys() == names


@pytest.mark.parametrize(
    ("threads", "gpus", "level"),
    [
        ("4", 2, None),
        ("5", 2, "warn"),
        ("8", 0, None),
        ("x", 2, "warn"),
        ("4,2", 2, None),
        ("0", 1, "warn"),
    ],
)
def test_threads_must_fit_the_cpus(threads, gpus, level, shell):
    shell.setenv("OMP_NUM_THREADS", threads)
    assert levels(gpus).get("OMP_NUM_THREADS") == level


def test_unset_threads_are_a_remark_with_their_number():
    (finding,) = [finding for finding in check_variables(2) if finding.name == "OMP_NUM_THREADS"]
    assert (finding.level, finding.fix) == ("ok", "export OMP_NUM_THREADS=4")


def test_no_secret_is_shown(shell):
    shell.setenv("ACCELERATE_HUB_TOKEN", SECRET)
    shell.setenv("ACCELERATE_MY_PASSWORD", "w7xq")  # too short to be looked for elsewhere
    shell.setenv("FSDP_NOTE", f"see {SECRET}")
    shell.setenv("MASTER_ADDR", "https://user:pw-of-user@host")
    assert levels(0).keys() == {"config variables", "rank variables"}
    shown = texts(0)
    assert "ACCELERATE_HUB_TOKEN=[removed]" in shown
    assert "FSDP_NOTE=see [removed]" in shown
    assert SECRET not in shown
    assert "w7xq" not in shown
    assert "pw-of-user" not in shown
