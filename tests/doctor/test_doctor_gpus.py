"""GPUs, driver, links and torch's build: each check in both directions."""

import pytest
from made_up_driver import Gpu, NvmlError

from toolkit.doctor import driver as asking
from toolkit.doctor.driver import ask_driver
from toolkit.doctor.gpus import check_gpus, check_links
from toolkit.environment import TorchBuild

T4 = Gpu(name="Tesla T4", memory=15360 * 2**20, capability=(7, 5))
V100 = Gpu(name="Tesla V100", memory=16384 * 2**20, capability=(7, 0))
B200 = Gpu(name="NVIDIA B200", memory=183359 * 2**20, capability=(10, 0))


def torch(cuda="12.8", version="2.13.0"):
    return TorchBuild(version=version, cuda=cuda, hip=None)


def checked(build=None):
    """Return the findings of the driver in place, by name."""
    findings = check_gpus(ask_driver(), torch() if build is None else build)
    by_name = {finding.name: finding for finding in findings}
    assert len(by_name) == len(findings)
    return by_name


def levels(findings):
    return {name: finding.level for name, finding in findings.items() if finding.level != "ok"}


def test_two_idle_gpus_are_all_right(nvml):
    driver = nvml()
    findings = checked()
    assert levels(findings) == {}
    assert findings["gpus"].text == "2 x NVIDIA L4 with 22.5 GiB."
    assert "CUDA 13" in findings["driver"].text
    assert driver.opened == 0


def test_a_machine_without_gpus_can_rehearse(nvml, monkeypatch, tmp_path):
    monkeypatch.setattr(asking, "PCI_DEVICES", tmp_path)
    nvml().error = NvmlError(12, "NVML Shared Library Not Found")
    (finding,) = checked().values()
    assert finding.level == "ok"
    assert "rehearsed" in finding.text
    assert finding.fix == "toolkit compare"


def pci_device(folder, *, vendor, kind):
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


@pytest.mark.parametrize(
    ("vendor", "kind", "level"),
    [
        ("0x10de", "0x030200", "warn"),
        ("0x10de", "0x030000", "warn"),
        ("0x10de", "0x040300", "ok"),  # its sound
        ("0x8086", "0x030000", "ok"),
    ],
)
def test_a_gpu_without_a_driver_is_no_machine_without_gpus(
    vendor, kind, level, nvml, monkeypatch, tmp_path
):
    pci_device(tmp_path / "0000:01:00.0", vendor=vendor, kind=kind)
    monkeypatch.setattr(asking, "PCI_DEVICES", tmp_path)
    nvml().error = NvmlError(9, "Driver Not Loaded")
    assert checked()["gpus"].level == level


def test_a_driver_that_does_not_answer_is_a_fault(nvml):
    nvml().error = NvmlError(18, "Driver/library version mismatch")
    finding = checked()["gpus"]
    assert finding.level == "fail"
    assert "version mismatch" in finding.text


def test_a_lost_gpu_is_a_fault(nvml, monkeypatch):
    driver = nvml()

    def lost(handle):
        raise NvmlError(15, "GPU is lost")

    monkeypatch.setattr(driver, "nvmlDeviceGetName", lost)
    assert "GPU is lost" in checked()["gpus"].text
    assert driver.opened == 0


@pytest.mark.parametrize(
    ("gpus", "names"), [((T4, T4), {"bf16"}), ((V100,), {"bf16"}), ((Gpu(),), set())]
)
def test_bf16_goes_by_the_capability(gpus, names, nvml):
    nvml(*gpus)
    assert levels(checked()).keys() == names


@pytest.mark.parametrize(
    ("name", "capability", "version", "told"),
    [
        ("NVIDIA H200", (9, 0), "2.11.0", True),
        ("NVIDIA B200", (10, 0), "2.13.0", True),
        ("NVIDIA H200", (9, 0), "2.10.0", False),
        ("NVIDIA L4", (8, 9), "2.13.0", False),
        ("NVIDIA RTX PRO 6000", (12, 0), "2.13.0", False),
    ],
)
def test_a_gpu_on_which_torch_takes_cudnn_s_attention_is_named(
    name, capability, version, told, nvml
):
    nvml(Gpu(), Gpu(name=name, capability=capability))
    finding = checked(torch(version=version)).get("attention")
    assert (finding is not None) == told
    if told:
        assert (finding.level, name in finding.text) == ("warn", True)
        assert "enable_cudnn_sdp(False)" in finding.fix


def test_mixed_gpus_are_named_with_the_way_to_use_the_equal_ones(nvml):
    nvml(T4, Gpu(), Gpu())
    finding = checked()["mixed gpus"]
    assert finding.level == "warn"
    assert finding.fix.endswith("CUDA_VISIBLE_DEVICES=1,2")


def test_memory_that_others_hold_is_named(nvml):
    nvml(Gpu(), Gpu(used=7 * 2**30))
    finding = checked()["gpu memory"]
    assert (finding.level, "7.0 GiB of GPU 1" in finding.text) == ("warn", True)


@pytest.mark.parametrize(("mode", "level"), [(0, None), (2, "fail"), (3, "warn")])
def test_a_compute_mode_that_refuses_processes_is_noticed(mode, level, nvml):
    nvml(Gpu(), Gpu(mode=mode))
    assert levels(checked()).get("compute mode") == level


@pytest.mark.parametrize(("mig", "level"), [(None, None), (0, None), (1, "warn")])
def test_a_split_gpu_is_noticed(mig, level, nvml):
    nvml(Gpu(mig=mig))
    assert levels(checked()).get("mig") == level


@pytest.mark.parametrize(
    ("cuda", "built", "level"),
    [
        (12020, "12.8", "ok"),  # minor versions are compatible
        (13000, "12.8", "ok"),
        (12080, "13.0", "fail"),
        (11040, "12.6", "fail"),
        (None, "12.8", "fail"),
    ],
)
def test_the_driver_must_run_the_cuda_of_torch(cuda, built, level, nvml):
    nvml(cuda=cuda, version="535.104.05")
    finding = checked(torch(built))["driver"]
    assert finding.level == level
    if cuda is None:
        assert "NVIDIA_DRIVER_CAPABILITIES" in finding.fix
    elif level == "fail":
        assert {"13.0": "580", "12.6": "525"}[built] in finding.fix


@pytest.mark.parametrize(
    ("gpu", "built", "level"),
    [
        (Gpu(), None, "fail"),
        (Gpu(), "12.6", "ok"),
        (V100, "12.6", "ok"),
        (V100, "13.0", "fail"),
        (T4, "13.0", "ok"),
        (B200, "12.6", "fail"),
        (B200, "12.8", "ok"),
    ],
)
def test_torch_must_be_built_for_the_gpu(gpu, built, level, nvml):
    nvml(gpu)
    assert checked(torch(built))["torch"].level == level


@pytest.mark.parametrize(
    ("chosen", "level", "seen"),
    [
        (None, None, 2),
        ("0,1", None, 2),
        ("1", None, 1),
        ("GPU-1", None, 1),
        ("0,7", "fail", 1),
        ("7", "fail", 0),
        ("0,0", "fail", 0),
        ("", "warn", 0),
        ("-1", "warn", 0),
    ],
)
def test_cuda_visible_devices_must_name_gpus(chosen, level, seen, nvml, monkeypatch):
    nvml()
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    findings = checked()
    assert levels(findings).get("CUDA_VISIBLE_DEVICES") == level
    assert len(ask_driver().gpus) == seen
    assert ("gpus" in findings) == (seen > 0)


@pytest.mark.parametrize(
    ("driver", "level", "text"),
    [
        ({"nvlink": True}, "ok", "NVLink x1."),
        ({}, "ok", "PCIe, through the host bridge. Without NVLink"),
        ({"peers": False}, "warn", "NCCL copies through host memory"),
    ],
)
def test_links_are_judged_by_what_sharding_costs(driver, level, text, nvml):
    nvml(**driver)
    (finding,) = check_links(ask_driver())
    assert finding.level == level
    assert text in finding.text


def test_one_gpu_has_no_links(nvml):
    nvml(Gpu())
    assert check_links(ask_driver()) == []
