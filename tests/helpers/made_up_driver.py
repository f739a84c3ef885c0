"""NVIDIA's driver, made up: NVML's answers for GPUs that are not there."""

from types import SimpleNamespace


class NvmlError(Exception):
    def __init__(self, value, text="Not Supported"):
        super().__init__(text)
        self.value = value


class Gpu(SimpleNamespace):
    """An L4 that is idle, unless said otherwise."""

    def __init__(self, **facts):
        usual = {
            "name": "NVIDIA L4",
            "memory": 23034 * 2**20,
            "used": 455 * 2**20,
            "capability": (8, 9),
            "mode": 0,
            "mig": None,
        }
        super().__init__(**usual | facts)


class Nvml:
    """A driver and its GPUs, joined by NVLink or by PCIe."""

    NVMLError = NvmlError
    NVML_NVLINK_MAX_LINKS = 1

    def __init__(self, gpus, *, version="580.65.06", cuda=13000, peers=True, nvlink=False):
        self.gpus, self.version, self.cuda = gpus, version, cuda
        self.peers, self.nvlink = peers, nvlink
        self.error = None
        self.opened = 0

    def nvmlInit(self):
        if self.error is not None:
            raise self.error
        self.opened += 1

    def nvmlShutdown(self):
        self.opened -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle):
        return self.gpus[handle].name

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=self.gpus[handle].memory, used=self.gpus[handle].used)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return list(self.gpus[handle].capability)

    def nvmlDeviceGetComputeMode(self, handle):
        return self.gpus[handle].mode

    def nvmlDeviceGetMigMode(self, handle):
        if self.gpus[handle].mig is None:
            raise NvmlError(3)
        return [self.gpus[handle].mig, 0]

    def nvmlSystemGetDriverVersion(self):
        return self.version

    def nvmlSystemGetCudaDriverVersion_v2(self):
        if self.cuda is None:
            raise NvmlError(12)
        return self.cuda

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(domain=0, bus=handle, device=0)

    def nvmlDeviceGetNvLinkState(self, handle, link):
        return self.nvlink

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):
        return 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        return self.nvmlDeviceGetPciInfo(1 - handle)

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return 30

    def nvmlDeviceGetP2PStatus(self, one, other, kind):
        return 0 if self.peers else 2
