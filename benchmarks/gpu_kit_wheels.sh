#!/usr/bin/env bash
# Collect the wheels that a machine with a GPU and without a network may lack.
#
#     benchmarks/gpu_kit_wheels.sh
#     LIMIT_MIB=30 PYTHON_VERSION=3.11 benchmarks/gpu_kit_wheels.sh /tmp/wheels
#
# The machine has torch, transformers and accelerate with what these need. Wheels go into
# benchmarks/gpu_kit_wheels/ or the folder that is named, in the order below and never more than
# the limit in all: a line is taken whole or left out. `kit/wheels.py` installs them there.
#
#     PYTHON_VERSION  of the machine; 3.12
#     LIMIT_MIB       of the folder; 50
#     PLATFORMS       tags that the machine takes; pip compares each exactly
#     PYTHON          an environment of the toolkit's, in which pip builds DeepSpeed's wheel; python3
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$here/gpu_kit_wheels}
python=${PYTHON:-python3}
python_version=${PYTHON_VERSION:-3.12}
limit_mib=${LIMIT_MIB:-50}
manylinux=(manylinux_2_{39,35,34,31,28,27,24,17}_x86_64 manylinux2014_x86_64 manylinux1_x86_64)
read -ra platforms <<<"${PLATFORMS:-${manylinux[*]}}"

lines=(
  "nvidia-ml-py==13.615.71"
  "rich==15.0.0 markdown-it-py==4.3.0 mdurl==0.1.2 pygments==2.21.0"
  "pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5"
  "typer==0.29.2 shellingham==1.5.4 annotated-doc==0.0.7"
  "datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1 python-dateutil==4.0.0 tzdata==2026.6 \
    dill==0.4.1 multiprocess==0.70.19 xxhash==4.1.0"
  "deepspeed==0.19.8 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 ninja==1.13.2 py-cpuinfo==9.0.0"
  "peft==0.20.0"
  "trl==1.16.0"
  "bitsandbytes==0.50.2"
  "liger-kernel==0.8.5"
)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Download wheels, and build the one that is published as source only, without its kernels.
fetch() { # FOLDER REQUIREMENT...
  local to=$1 platform options=()
  shift
  for platform in "${platforms[@]}"; do
    options+=(--platform "$platform")
  done
  if [[ $1 == deepspeed==* ]]; then
    DS_BUILD_OPS=0 "$python" -m pip wheel -q --no-deps --no-build-isolation -w "$to" "$1"
    shift
  fi
  "$python" -m pip download -q --no-deps --only-binary=:all: --implementation cp \
    --python-version "$python_version" "${options[@]}" -d "$to" "$@"
}

# Pack large wheels again. pip reads LZMA too, which takes a third less than what wheels come in;
# and the parts that are left out are never imported where a language model is trained.
repack() { # FOLDER
  "$python" - "$1" <<'END'
import sys
from fnmatch import fnmatch
from pathlib import Path
from zipfile import ZIP_LZMA, ZipFile

LEFT_OUT = {
    "pyarrow": ["*/tests/*", "*/include/*", "*flight*", "*s3*", "*_python*.so", "*.so.*.*.*"],
    "pandas": ["*/tests/*"],
    "bitsandbytes": ["*_cuda1[12]*.so", "*_cuda132.so", "*_rocm*.so", "*_xpu*.so"],
}

for wheel in Path(sys.argv[1]).glob("*.whl"):
    if wheel.stat().st_size < 2**20:
        continue
    patterns = LEFT_OUT.get(wheel.name.split("-")[0], [])

    def is_kept(name):
        return not any(fnmatch(name, pattern) for pattern in patterns)

    smaller = wheel.with_suffix(".smaller")
    with ZipFile(wheel) as old, ZipFile(smaller, "w") as new:
        for entry in filter(lambda entry: is_kept(entry.filename), old.infolist()):
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                rows = content.decode().splitlines(keepends=True)
                content = "".join(row for row in rows if is_kept(row.split(",")[0])).encode()
            new.writestr(entry, content, compress_type=ZIP_LZMA)
    smaller.replace(wheel)
END
}

bytes_of() { # FILE...
  cat "$@" | wc -c
}

mib() { # BYTES
  awk -v bytes="$1" 'BEGIN { printf "%.2f", bytes / 1048576 }'
}

mkdir -p "$folder"
if [[ -n $(ls -A "$folder") ]]; then
  echo "$folder is not empty, and two versions of one library would stop the installation." \
    "Remove it, and run again." >&2
  exit 2
fi

total=0
left_out=()
printf '%8s  %s\n' MiB wheel
for i in "${!lines[@]}"; do
  read -ra requirements <<<"${lines[i]}"
  line=$scratch/$i
  mkdir "$line"
  fetch "$line" "${requirements[@]}"
  repack "$line"
  size=$(bytes_of "$line"/*.whl)
  if ((total + size > limit_mib * 1048576)); then
    left_out+=("$(printf '%8s  left out, over the limit: %s' "$(mib "$size")" "${requirements[*]}")")
    continue
  fi
  total=$((total + size))
  for wheel in "$line"/*.whl; do
    printf '%8s  %s\n' "$(mib "$(bytes_of "$wheel")")" "$(basename "$wheel")"
    mv "$wheel" "$folder"
  done
done
printf '%8s  in %s, of at most %s\n' "$(mib "$total")" "$folder" "$limit_mib"
for sentence in "${left_out[@]}"; do
  echo "$sentence"
done
