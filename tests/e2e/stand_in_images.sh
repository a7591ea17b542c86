#!/bin/sh
# Makes stand-ins for the two images of docker-compose.yml where no registry can be reached, under the official names.
#
#     tests/e2e/stand_in_images.sh PYTHON BASE_IMAGE
#
# PYTHON is the project's interpreter (.venv/bin/python); BASE_IMAGE a Debian or Ubuntu image whose python3 has the same
# minor version, with pip, curl, wget and ps. On Debian such an image can be made without a registry:
#     debootstrap --variant=minbase --include=ca-certificates,curl,wget,procps,python3,python3-pip,libpython3.11 bookworm DIR
#     tar -C DIR --numeric-owner -c . | docker import - local/debian:bookworm
# The Triton image gets the tritonserver of the nvidia-pytriton wheel in NVIDIA's layout, without C++ backends: so our
# Python stand-ins serve there. The Prometheus image gets the prometheus found on PATH (Debian's package); none, no image.
# Images of these names that are there already (the real ones) are left alone.
set -eu
python=$1
base=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

make_image() { # NAME FOLDER
    if docker image inspect "$1" >/dev/null 2>&1; then echo "$1 is there"; else docker build --quiet --tag "$1" "$2"; fi
}

triton=$work/triton/opt/tritonserver
mkdir -p "$triton/bin" "$triton/backends" "$triton/caches"
site=$("$python" -c 'import importlib.metadata as m; print(m.distribution("nvidia-pytriton").locate_file(""))')
minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
cp "$site/pytriton/tritonserver/bin/tritonserver" "$triton/bin/"
cp -r "$site/nvidia_pytriton.libs" "$triton/lib"
cp -r "$site/pytriton/tritonserver/backends/python" "$triton/backends/"
cp "$site/pytriton/tritonserver/python_backend_stubs/$minor/triton_python_backend_stub" "$triton/backends/python/"
cp -r "$site/pytriton/tritonserver/caches/local" "$triton/caches/"
"$python" -m pip install --quiet --no-warn-conflicts --target "$work/triton/packages" 'numpy>=1.26,<2' 'onnxruntime>=1.20' 'setuptools>=77' wheel
"$python" -m pip install --quiet --no-warn-conflicts --no-deps --constraint "$(dirname "$0")/../../requirements.lock" \
  --target "$work/triton/packages" pillow tokenizers opencv-python-headless
cat >"$work/triton/Dockerfile" <<EOF
FROM $base
COPY opt/ /opt/
COPY packages/ /usr/local/lib/python$minor/dist-packages/
RUN useradd --uid 1000 triton-server && chmod -R a+rX /opt/tritonserver
# pip takes the setuptools above: 0 means no isolated build environment
ENV PATH=/opt/tritonserver/bin:\$PATH LD_LIBRARY_PATH=/opt/tritonserver/lib PIP_NO_BUILD_ISOLATION=0
EOF
make_image nvcr.io/nvidia/tritonserver:24.10-py3 "$work/triton"

if prometheus=$(command -v prometheus); then
    mkdir "$work/prometheus"
    cp "$prometheus" "$work/prometheus/"
    cat >"$work/prometheus/Dockerfile" <<EOF
FROM $base
COPY prometheus /bin/prometheus
RUN mkdir /prometheus && chown nobody /prometheus
USER nobody
ENTRYPOINT ["/bin/prometheus"]
EOF
    make_image prom/prometheus:v3.5.0 "$work/prometheus"
fi
